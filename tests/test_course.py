"""The runner: statuses, figures, the report, recording, and running without jupyter."""

import json
import re
import tomllib

import course
import nbformat
import pytest

from tutorial_utils import bounds, machine

EXPECTED = tomllib.loads((bounds.FACTS / "bounds.toml").read_text())["00_memory_anatomy"]
FIGURES = {
    name: 1000 if name.endswith("_bytes") else sum(bound[machine.facts().device]) / 2
    for name, bound in EXPECTED.items()
}
COMPARE = f"""
from tutorial_utils import bounds
verdict = bounds.compare("00_memory_anatomy", {FIGURES}, {{"baseline_peak_bytes": 1000}})
"""


def write(folder, name, *cells, needs=()):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.metadata["course"] = {"needs": list(needs)}
    nbformat.write(notebook, folder / f"{name}.ipynb")


@pytest.fixture
def small_course(tmp_path, monkeypatch):
    """Four small lessons: one fails, one is skipped, one measures, one leaves its mark in its folder."""
    notebooks, reports = tmp_path / "notebooks", tmp_path / "reports"
    notebooks.mkdir()
    write(notebooks, "01_fails", "1 / 0")
    write(notebooks, "02_skipped", "1 / 0", needs=["no_such_package"])
    write(notebooks, "03_measures", COMPARE, "verdict.require()")
    write(notebooks, "04_foreign", "import pathlib; pathlib.Path('mark').touch(); print('here')")
    monkeypatch.setattr(course, "NOTEBOOKS", notebooks)
    monkeypatch.setattr(course, "REPORTS", reports)
    monkeypatch.setenv("COURSE_BOUNDS", str(tmp_path / "bounds"))
    return tmp_path


def run(monkeypatch, *arguments) -> int:
    monkeypatch.setattr("sys.argv", ["course.py", *arguments])
    return course.main()


def test_a_failing_lesson_leaves_the_others_results(small_course, monkeypatch, capsys):
    assert run(monkeypatch, "run")
    report = json.loads((small_course / "reports" / "course.json").read_text())
    assert set(report) == {"machine", "versions", "date", "lessons"}
    statuses = {lesson["name"]: lesson["status"] for lesson in report["lessons"]}
    assert statuses == {"01_fails": "failed", "02_skipped": "skipped", "03_measures": "passed",
                        "04_foreign": "passed"}  # fmt: skip
    by_name = {lesson["name"]: lesson for lesson in report["lessons"]}
    assert by_name["01_fails"]["reason"].startswith("ZeroDivisionError")
    assert by_name["02_skipped"]["reason"] == "needs no_such_package"
    assert by_name["03_measures"]["figures"] == FIGURES and by_name["03_measures"]["inside"] is True
    assert by_name["03_measures"]["seconds"] > 0
    assert sorted(p.stem for p in (small_course / "reports" / "executed").iterdir()) == [
        "01_fails", "03_measures", "04_foreign"]  # fmt: skip
    assert not list(small_course.rglob("mark")), "a lesson ran in the course's own folder"
    printed = capsys.readouterr().out
    assert re.search(r"03_measures +passed .*1\.0 KiB|03_measures +passed", printed) and "inside" in printed


def test_all_passed_is_green_and_one_lesson_can_be_chosen(small_course, monkeypatch, capsys):
    assert not run(monkeypatch, "run", "--only", "03", "04")
    with pytest.raises(SystemExit):
        run(monkeypatch, "run", "--only", "77")
    assert "lesson was '77'; accepted: 01, 02, 03, 04" in capsys.readouterr().err


def test_a_bounds_file_with_one_wrong_figure_turns_the_run_red(small_course, monkeypatch, capsys):
    here = machine.facts()
    content = {"machine": {}, "versions": here.versions, "date": "2026-01-01", "lessons": {
        "00_memory_anatomy": {"seconds": 1, "figures": FIGURES}}}  # fmt: skip
    path = small_course / "bounds" / f"{here.slug}.json"
    bounds.write(path, content)
    assert not run(monkeypatch, "run", "--only", "03")
    content["lessons"]["00_memory_anatomy"]["figures"] = FIGURES | {"baseline_peak_bytes": 2000}
    bounds.write(path, content)
    assert run(monkeypatch, "run", "--only", "03")
    report = json.loads((small_course / "reports" / "course.json").read_text())
    (lesson,) = report["lessons"]
    assert lesson["status"] == "failed" and lesson["inside"] is False
    assert "baseline_peak_bytes is 1,000, outside" in lesson["reason"]


@pytest.mark.parametrize("jupyter", [True, False], ids=["jupyter", "no jupyter"])
def test_recording(small_course, monkeypatch, jupyter):
    recorded = small_course / "bounds"
    recorded.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(course.Path(course.__file__).resolve().parents[1]))
    if not jupyter:
        find = course.importlib.util.find_spec
        monkeypatch.setattr(course.importlib.util, "find_spec", lambda n, *a: None if n == "nbclient" else find(n, *a))
    assert run(monkeypatch, "record"), "a failed lesson must leave nothing recorded"
    assert not list(recorded.iterdir())
    monkeypatch.delenv("COURSE_RECORDING")
    (small_course / "notebooks" / "01_fails.ipynb").unlink()
    assert not run(monkeypatch, "record")
    monkeypatch.delenv("COURSE_RECORDING")
    content = bounds.load(recorded / f"{machine.facts().slug}.json")
    assert content["lessons"].keys() == {"03_measures"}
    assert content["lessons"]["03_measures"]["figures"] == FIGURES
    assert content["machine"]["name"] and content["versions"]["torch"] and content["date"]


def test_without_jupyter_cells_that_lack_a_package_are_left_out(tmp_path, capsys):
    cells = [
        nbformat.v4.new_code_cell("import no_such_package", metadata={"tags": ["trainer"]}),
        nbformat.v4.new_code_cell("no_such_package.x", metadata={"tags": ["trainer"]}),
        nbformat.v4.new_code_cell("x = 1\nx + 1"),
        nbformat.v4.new_code_cell("no_such_name"),
    ]
    path = tmp_path / "05_cells.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    with pytest.raises(NameError, match="no_such_name"):
        course.run_cells(path)
    assert capsys.readouterr().out.splitlines() == [
        "cell 0 left out: No module named 'no_such_package'",
        "cell 1 left out: name 'no_such_package' is not defined",
        "2",
    ]


def test_a_lesson_re_run_in_place_is_not_overwritten_by_a_failure(small_course):
    path = small_course / "notebooks" / "01_fails.ipynb"
    before = path.read_text()
    assert course.run_lesson(path, keep=path)["status"] == "failed"
    assert path.read_text() == before
