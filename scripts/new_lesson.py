"""The form of a lesson, and an empty one: python scripts/course.py new 27 distillation [study]

The contract holds each lesson to PARTS and TAGS. An empty lesson fails it for all that is missing.
"""

import json
from pathlib import Path

# Headings of part one, by kind; the last one opens part two, which is folded.
_FIRST, _LAST = ["Setup", "The idea"], ["Measure", "Proof", "In your script", "Pitfalls",
                 "When to use it, and when not", "Exercise", "The evidence"]  # fmt: skip
PARTS = {
    "technique": [*_FIRST, "Baseline", "The technique", *_LAST],
    "study": [*_FIRST, "To copy", *_LAST],
}
# Of code cells, in this order; those in ONCE stand in exactly one cell, the others in one or more.
_REST = ["copy", "proof", "pitfall", "exercise", "solution", "trainer", "claims", "figures", "check"]
TAGS = {"technique": ["setup", "baseline", *_REST], "study": ["setup", *_REST]}
ONCE = {"setup", "baseline", "copy", "proof", "claims", "exercise", "solution", "figures", "check"}
UNDER = {  # heading → the tags of the cells below it
    "Setup": ["setup"], "Baseline": ["baseline"], "The technique": ["copy"], "To copy": ["copy"], "Proof": ["proof"],
    "Pitfalls": ["pitfall"], "Exercise": ["exercise", "solution"],
    "The evidence": ["trainer", "claims", "figures", "check"],
}  # fmt: skip
SHAPES = ["classifier", "competition", "decoder"]  # of scripts; a lesson's facts may name fewer
START = {"check": "verdict.require()", "exercise": 'print("not yet: ")', "solution": 'print("passed")'}
FACTS = """title = "{title}"
kind = "{kind}"
promise = ""
changes = ""
when = ""
no_help = ""
know = []
learn = []
needs = []

[figures.baseline_peak_bytes]

[figures.technique_peak_bytes]

[figures.memory_ratio]
why = ""
bytes = true # made of bytes alone: it is judged where no numbers are computed, too
# cpu = [0.4, 0.5] # the lowest and the highest, of a class of machines; cuda = []: too few were recorded

# [claims.{name}-memory]
# source = "who published it"
# claim = "model, texts × tokens: memory, to what"
# claimed = 0.7
# of = "saving" # or "overhead", "gain", "value"
# tolerance = 0.1 # in its unit: at most a third of what is claimed
# figure = "memory_ratio"
# by = ["predicted"] # where not all evidence fits its set-up
# needs = "a V100" # where no evidence does
"""
TESTS = """import pytest
import strangers  # noqa: F401 the technique in each of its scripts

from notebooks import copied, lesson, proof_fails

LESSON = lesson("{number}")
COPIED = copied(LESSON)


@pytest.mark.parametrize(("old", "new"), [("what the proof needs", "a fault that it must find")])
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


def test_copied():
    pytest.fail("put the copied cell into a script that the lesson does not know, and assert its effect")
"""
STRANGER = """

def test_in_a_strangers_{shape}(stranger_files):
    pytest.fail("put the technique into strangers/{shape}.py as the page says, and assert its effect")
"""


def make(root: Path, number: str, name: str, kind: str = "technique") -> list[Path]:
    """Write the notebook, the facts and the tests of a lesson that says nothing yet. ValueError, FileExistsError."""
    if not (number.isdecimal() and len(number) == 2 and name.isidentifier() and kind in PARTS):
        raise ValueError(
            f"lesson was {number!r}, {name!r}, {kind!r}; accepted: two digits, a name, {' or '.join(PARTS)}"
        )
    lesson = f"{number}_{name}"
    title = name.replace("_", " ").capitalize()
    paths = {
        root / "notebooks" / f"{lesson}.ipynb": json.dumps(notebook(kind), indent=1, ensure_ascii=False) + "\n",
        root / "tutorial_utils" / "facts" / "lessons" / f"{lesson}.toml": FACTS.format(
            title=title, kind=kind, name=name
        ),
        root / "tests" / "lessons" / f"test_{lesson}.py": TESTS.format(number=number)
        + "".join(STRANGER.format(shape=shape) for shape in SHAPES),
    }
    if there := [path.stem for path in (root / "notebooks").glob(f"{number}_*.ipynb")]:
        raise FileExistsError(f"{there[0]} has that number already: choose another number")
    there = [path for path in paths if path.exists()]
    if there:
        raise FileExistsError(f"{there[0]} is there already: choose another number or name")
    for path, text in paths.items():
        path.write_text(text, encoding="utf-8")
    return list(paths)


def notebook(kind: str) -> dict:
    cells = [_cell("markdown", "title", {"tags": ["title"]}), _cell("markdown", "card", {"tags": ["card"]})]
    for heading in PARTS[kind]:
        name = heading.lower().replace(" ", "-").replace(",", "")
        metadata = {}
        if heading == "The evidence":
            name = "evidence"
            metadata = {"id": name, "jp-MarkdownHeadingCollapsed": True}
        cells.append(_cell("markdown", f"{name}-heading" if name != "evidence" else name, metadata, f"## {heading}"))
        cells += [_code(tag) for tag in UNDER.get(heading, [])]
    cells.append(_cell("markdown", "sources", {"tags": ["sources"]}, "### Sources"))
    about = {"colab": {"collapsed_sections": ["evidence"]},
             "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
             "language_info": {"name": "python"}}  # fmt: skip
    return {"cells": cells, "metadata": about, "nbformat": 4, "nbformat_minor": 5}


def _cell(kind: str, name: str, metadata: dict, text: str = "") -> dict:
    return {"cell_type": kind, "id": name, "metadata": metadata, "source": text.splitlines(keepends=True)}


def _code(tag: str) -> dict:
    folded = {"cellView": "form", "jupyter": {"source_hidden": True}} if tag in ("setup", "solution") else {}
    tags = [tag, "nbval-check-output"] if tag in ("proof", "solution", "check") else [tag]
    cell = _cell("code", tag, {**folded, "tags": tags}, START.get(tag, ""))
    return cell | {"execution_count": None, "outputs": []}
