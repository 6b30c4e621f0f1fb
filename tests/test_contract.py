"""The contract of a lesson. It has no list of exceptions: a lesson that breaks a rule fails."""

import ast
import difflib
import re
import subprocess
import sys

import new_lesson
import pytest

from notebooks import ROOT, code_lines, lessons, printed, source, tags
from tutorial_utils import bounds
from tutorial_utils.figures import size

LESSONS = pytest.mark.parametrize("lesson", lessons(), ids=lambda lesson: lesson.name)
MOST_LINES, MOST_CHANGED = 30, 10
# Of part one: words, lines of code, those of a cell that is not folded, words of a paragraph, characters of a line.
MOST_WORDS, MOST_CODE, MOST_SHOWN, MOST_OF_A_PARAGRAPH, WIDEST = 1500, 200, 20, 60, 110
PRIVATE = re.compile(r"(?:(?<![\w.])|(?<=-I))/(root|home|Users|tmp|work|mnt|opt|var)/|[A-Z]:\\\\Users")


@LESSONS
def test_sections_by_kind(lesson):
    kind = lesson.course["kind"]
    assert kind in new_lesson.PARTS, f"kind is {kind!r}; accepted: {', '.join(new_lesson.PARTS)}"
    assert lesson.headings() == new_lesson.PARTS[kind], "sections missing, added or out of order"
    first = source(lesson.cells[0])
    assert first.startswith(f"# {lesson.name[:2]} · {lesson.course['title']}") and tags(lesson.cells[0]) == ["title"]
    assert tags(lesson.cells[1]) == ["card"]
    assert "](http" in source(lesson.cells[-1]), "the sources need links"


@LESSONS
def test_the_card_has_something_to_say(lesson):
    for name in ("title", "promise", "changes", "when", "no_help", "know", "learn"):
        assert lesson.course[name], f"{name} is empty in facts/lessons/{lesson.name}.toml"


@LESSONS
def test_tags(lesson):
    found = [tag for cell in lesson.code for tag in tags(cell) if tag != "nbval-check-output"]
    in_order = list(dict.fromkeys(found))
    assert in_order == new_lesson.TAGS[lesson.course["kind"]]
    for tag in new_lesson.ONCE & set(in_order):
        assert found.count(tag) == 1, f"{found.count(tag)} cells are tagged {tag}; there must be one"
    compared = ("proof", "solution", "check")
    for tag in compared:
        assert "nbval-check-output" in tags(lesson.tagged(tag)[0]), f"nbval must compare the output of {tag}"
    assert len(lesson.tagged("nbval-check-output")) == len(compared), "only the verdict cells are compared"


@LESSONS
def test_executed_in_one_run_without_errors(lesson):
    counts = [cell["execution_count"] for cell in lesson.code]
    assert counts == list(range(1, len(counts) + 1)), f"record it again: make record ONLY={lesson.name[:2]}"
    errors = [source(cell) for cell in lesson.code for output in cell["outputs"] if output["output_type"] == "error"]
    assert not errors, f"cells ended in an error: {errors}"
    assert not any("execution" in cell["metadata"] for cell in lesson.code), "times of day are noise in a diff"


@LESSONS
def test_no_link_stands_in_a_link_or_in_code(lesson):
    """Numbers of lessons are stamped as links: put "03" into code, and other words into a link with a place."""
    for text in (source(cell) for cell in lesson.cells if cell["cell_type"] == "markdown"):
        assert not re.search(r"\[\[[Ll]esson", text), text
        for code in text.split("```")[1::2]:
            assert ".ipynb)" not in code, code


@LESSONS
@pytest.mark.parametrize(("tag", "verdict"), [("proof", r"(equal|close \([\w .%-]+\))"), ("check", "inside")])
def test_verdicts_print_names_only(lesson, tag, verdict):
    (cell,) = lesson.tagged(tag)
    lines = printed(cell).strip().splitlines()
    assert lines, "a verdict cell without a verdict"
    for line in lines:
        assert re.fullmatch(rf"[\w ,×()-]+: {verdict}", line), f"not a fixed name and a verdict: {line!r}"


@LESSONS
def test_a_proof_with_a_tolerance_says_close(lesson):
    (proof,) = lesson.tagged("proof")
    used = [float(n) for n in re.findall(r"(?:<=? .*?|tol=)(\d[\d.]*e-\d+|\b0\.\d*[1-9])", source(proof))]
    said = re.findall(r": close \(([\d.e-]+)( %)?", printed(proof))
    stated = {float(n) / (100 if percent else 1) for n, percent in said}
    assert not used or max(used) in stated, f"equal within {max(used)}: say close, and that tolerance, not {stated}"


@LESSONS
def test_proof_can_fail(lesson):
    assert "assert " in lesson.source("proof")
    assert lesson.source("check").strip() == "verdict.require()"
    assert "assert " in lesson.source("pitfall"), "a pitfall must be seen to fail"


@LESSONS
def test_outputs_and_recording_are_of_one_run(lesson):
    recorded = bounds.load(bounds.FACTS / "bounds" / "cpu.json")["lessons"].get(lesson.name)
    if recorded is None:
        pytest.skip("not recorded on a CPU yet")
    shown = printed(lesson.tagged("figures")[0])
    for name, value in recorded["figures"].items():
        label = name.removesuffix("_bytes").replace("_", " ")
        text = size(value) if name.endswith("_bytes") else f"{value:.3g}"
        row = re.search(rf"^{label}  +(\S+( MiB| GiB)?)  ", shown, re.M)
        assert row and row[1] == text, f"{name} is recorded as {text}: make record ONLY={lesson.name[:2]}"


@LESSONS
def test_outputs_and_recordings_of_gpus_agree(lesson):
    """A page shows the GPUs' figures that were there when it was recorded."""
    again = f"is not on the page: make record ONLY={lesson.name[:2]}"
    shown = "\n".join(printed(cell) for cell in lesson.code)
    if any("bounds.elsewhere(LESSON)" in source(cell) for cell in lesson.code):
        for row in repr(bounds.elsewhere(lesson.name)).splitlines()[1:]:
            assert row in shown, f"{row!r} {again}"
    recorded = bounds.recorded_on_gpus(lesson.name)
    for claim in lesson.course["claims"].values():
        found = {gpu: figures[claim["figure"]] for gpu, figures in recorded.items() if claim["figure"] in figures}
        due = [f"{gpu} {bounds._number(value)}" for gpu, value in found.items()]
        if found and "recorded" in claim.get("by", bounds.EVIDENCE):
            due.append(bounds._verdict(claim, [("recorded", value) for value in found.values()]))
        claimed = f"{claim['claim']} ({claim['source']})"
        row = next((line for line in shown.splitlines() if line.startswith(claimed)), "")
        if re.search(r"  [\d.,]+ predicted +– ", row):
            continue  # what is predicted alone is no recording
        assert all(text in row for text in due), f"{claim['claim']}: {due} {again}"


@LESSONS
def test_nothing_private_and_no_warnings_in_outputs(lesson):
    for cell in lesson.code:
        text = str(cell["outputs"])
        assert not PRIVATE.search(text), f"a path of a machine: {PRIVATE.search(text).group()} in {text[:300]}"
        streams = [output for output in cell["outputs"] if output.get("name") == "stderr"]
        assert not streams, f"something was written to stderr: {streams}"


@LESSONS
def test_no_table_is_lost(lesson):
    """Jupyter shows the last line of a cell; a table before it is printed, or nobody sees it."""
    makes = {"Table", "memory_table", "time_table", "elsewhere", "table"}
    for cell in lesson.cells:
        lines = ast.parse(source(cell)).body if cell["cell_type"] == "code" else []
        shown = lines[-1:]
        for line in (node for part in lines for node in ast.walk(part) if isinstance(node, ast.Expr)):
            called = getattr(getattr(line.value, "func", None), "attr", None)
            assert called not in makes or line in shown, f"print it: {ast.unparse(line)[:80]}"


@LESSONS
def test_cells_are_short(lesson):
    for cell in lesson.code:
        lines = source(cell).splitlines()
        assert code_lines(source(cell)) <= MOST_LINES, f"{code_lines(source(cell))} lines of code: {source(cell)[:60]}"
        assert max(map(len, lines), default=0) <= 120, (
            f"a line of {max(map(len, lines))} characters: {source(cell)[:60]}"
        )


def folded(cell) -> bool:
    """For Jupyter and for Colab."""
    return bool(cell["metadata"].get("jupyter", {}).get("source_hidden") and cell["metadata"].get("cellView") == "form")


@LESSONS
def test_part_one_is_read_in_twenty_minutes(lesson):
    prose = [source(cell) for cell in lesson.part_one if cell["cell_type"] == "markdown"]
    code = [cell for cell in lesson.part_one if cell["cell_type"] == "code"]
    words = sum(len(text.split()) for text in prose)
    assert words <= MOST_WORDS, f"{words} words; at most {MOST_WORDS}"
    lines = sum(code_lines(source(cell), True) for cell in code)
    assert lines <= MOST_CODE, f"{lines} lines of code; at most {MOST_CODE}"
    for paragraph in (part for text in prose for part in re.split(r"\n\s*\n", text) if part[:1] not in "|-<"):
        count = len(paragraph.split())
        assert count <= MOST_OF_A_PARAGRAPH, f"a paragraph of {count} words: {paragraph[:60]}"
    for cell in code:
        if not folded(cell):
            lines = source(cell).splitlines()
            assert code_lines(source(cell), True) <= MOST_SHOWN, (
                f"{code_lines(source(cell), True)} lines of code: {source(cell)[:60]}"
            )
            assert max(map(len, lines), default=0) <= WIDEST, (
                f"a line of {max(map(len, lines))} characters: {source(cell)[:60]}"
            )


@LESSONS
def test_scaffolding_solution_and_evidence_are_folded(lesson):
    for tag in ("setup", "solution"):
        assert folded(lesson.tagged(tag)[0]), f"{tag} is not folded"
    evidence = lesson.cells[len(lesson.part_one)]
    assert evidence["metadata"].get("jp-MarkdownHeadingCollapsed"), "the evidence is not folded in Jupyter"
    assert lesson.content["metadata"]["colab"]["collapsed_sections"] == ["evidence"], "nor in Colab"
    assert evidence["metadata"]["id"] == "evidence", "by which Colab finds it"


@LESSONS
def test_the_three_shapes_are_shown(lesson):
    shown = "\n".join(printed(cell) for cell in lesson.part_one if cell["cell_type"] == "code")
    for shape in lesson.course.get("shapes", new_lesson.SHAPES):
        assert re.search(rf"^{shape}: ", shown, re.M), f"the page does not run the technique in a {shape}"


@LESSONS
def test_each_shape_has_its_test(lesson):
    tests = (ROOT / "tests" / "lessons" / f"test_{lesson.name}.py").read_text()
    for shape in lesson.course.get("shapes", new_lesson.SHAPES):
        assert f"\ndef test_in_a_strangers_{shape}" in tests, f"nothing puts the technique into strangers/{shape}.py"


@LESSONS
def test_a_picture_of_the_mechanism_comes_before_any_measurement(lesson):
    drawn = [cell for cell in lesson.under("The idea") if "image/png" in str(cell.get("outputs"))]
    assert drawn, "no picture under The idea"


@LESSONS
def test_the_technique_is_shown_as_a_difference(lesson):
    if lesson.course["kind"] == "technique":
        assert any("figures.difference(" in source(cell) for cell in lesson.under("The technique"))


@LESSONS
def test_three_to_five_pitfalls_with_their_places_in_public(lesson):
    texts = [source(cell) for cell in lesson.under("Pitfalls") if cell["cell_type"] == "markdown"]
    pitfalls = re.split(r"^(?=\*\*\d\. )", "\n\n".join(texts), flags=re.M)[1:]
    assert 3 <= len(pitfalls) <= 5, f"{len(pitfalls)} pitfalls in the lesson; the others belong to the evidence"
    for pitfall in pitfalls:
        assert "](http" in pitfall, f"no link to where it stands in public: {pitfall[:60]}"


def changed_lines(before: str, after: str) -> int:
    """Lines changed, added or removed, whatever their indentation; blank lines do not count."""
    old, new = ([line.strip() for line in text.splitlines() if line.strip()] for text in (before, after))
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in blocks if kind != "equal")


@LESSONS
def test_technique_differs_from_its_baseline_by_few_lines(lesson):
    if lesson.course["kind"] == "technique":
        changed = changed_lines(lesson.source("baseline"), lesson.source("copy"))
        assert 1 <= changed <= MOST_CHANGED, f"{changed} lines differ; at most {MOST_CHANGED}"


@LESSONS
def test_copy_cell_stands_alone(lesson):
    copied = lesson.source("copy")
    assert "tutorial_utils" not in copied and "preset" not in copied and "trust_remote_code" not in copied
    assert re.search(r"^(import|from) ", copied, re.M), "the copy cell must import what it uses"


@LESSONS
def test_exercise_is_open_and_its_solution_passes(lesson):
    assert printed(lesson.tagged("exercise")[0]).startswith("not yet: ")
    assert printed(lesson.tagged("solution")[0]).strip() == "passed"


@LESSONS
def test_every_claim_has_its_row(lesson):
    assert lesson.course["claims"], "what was published on it, beside what is measured here?"
    shown = printed(lesson.tagged("claims")[0])
    for claim in lesson.course["claims"].values():
        named = f"{claim['claim']} ({claim['source']})"
        claimed = next((line[len(named) :].split()[0] for line in shown.splitlines() if line.startswith(named)), None)
        due = bounds._number(claim["claimed"])
        assert claimed == due, f"{named}: its row says {claimed}, its facts {due}: make record ONLY={lesson.name[:2]}"


def test_generated_parts_are_fresh():
    done = subprocess.run([sys.executable, ROOT / "scripts" / "stamp.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, f"run python scripts/stamp.py\n{done.stdout}{done.stderr}"


def test_setup_cell_is_short():
    assert code_lines((ROOT / "scripts" / "setup_cell.py").read_text()) <= MOST_LINES


def test_the_diff_counts():
    assert changed_lines("a\nb\nc", "a\n  b\nc") == 0
    assert changed_lines("a\nb\nc", "a\nx\ny\nc") == 2
    assert changed_lines("a\nb", "b") == 1


@LESSONS
def test_links_within_the_page_have_their_place(lesson):
    texts = "\n".join(source(cell) for cell in lesson.cells if cell["cell_type"] == "markdown")
    places = {heading.strip().replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", texts, re.M)}
    places |= set(re.findall(r'<a id="([^"]+)"', texts))
    missing = set(re.findall(r"\]\(#([^)]+)\)", texts)) - places
    assert not missing, f"no heading and no <a id> of that name: {missing}"
