"""The lessons as pages: how long the first part is to a reader."""

import nbformat
from browser import needs_a_browser, page

from notebooks import lessons

WIDTH, HIGHEST = 1000, 8000  # pixels


def first_part(lesson) -> str:
    """HTML as Jupyter shows it when it opens: the evidence is folded, and so is the code of folded cells."""
    from nbconvert import HTMLExporter

    notebook = nbformat.read(lesson.path, 4)
    notebook.cells = notebook.cells[: len(lesson.part_one)]
    for cell in notebook.cells:
        if cell.metadata.get("jupyter", {}).get("source_hidden"):
            cell.metadata["transient"] = {"remove_source": True}  # nbconvert's own mark
    return HTMLExporter().from_notebook_node(notebook)[0]


@needs_a_browser
def test_the_first_part_is_short_on_the_screen():
    too_high = {}
    with page(viewport={"width": WIDTH, "height": 600}) as shown:
        for lesson in lessons():
            shown.set_content(first_part(lesson), wait_until="load")
            height = shown.evaluate("document.documentElement.scrollHeight")
            assert height > 2000, f"{lesson.name}: nothing was rendered"
            if height > HIGHEST:
                too_high[lesson.name] = height
    assert not too_high, f"more than {HIGHEST} pixels at a width of {WIDTH}: {too_high}"
