"""Every lesson has its own test file, and its exercise can be solved from the copy cell.

tests/lessons/test_<lesson>.py runs what a reader copies, in an empty namespace, on a model and data
that the lesson did not use; and breaks the copy cell to see the lesson's proof fail.
"""

import pytest

from notebooks import ROOT, lessons, run, source, tags

LESSONS = pytest.mark.parametrize("lesson", lessons(), ids=lambda lesson: lesson.name)


@LESSONS
def test_every_lesson_has_its_tests(lesson):
    path = ROOT / "tests" / "lessons" / f"test_{lesson.name}.py"
    assert path.exists(), f"write {path.name}: the copy cell on another model and data, and the proof broken"
    text = path.read_text()
    assert "def test_copied" in text and "proof_fails(" in text, f"{path.name}: no test_copied, or no proof_fails"


@pytest.mark.nbval
@LESSONS
def test_solution_passes_where_the_open_exercise_does_not(lesson):
    namespace, printed = {}, {}
    exercise, solution = lesson.needed_for("exercise"), lesson.needed_for("solution")
    for cell in [cell for cell in lesson.code if cell in exercise or cell in solution]:
        printed[(*tags(cell), None)[0]] = run(source(cell), namespace)
    assert printed["exercise"].startswith("not yet: "), printed["exercise"]
    assert printed["solution"].startswith("passed"), printed["solution"]
