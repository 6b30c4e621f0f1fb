"""The runner: statuses, figures, the report, recording, and running without jupyter."""

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import course
import nbformat
import new_lesson
import psutil
import pytest

from tutorial_utils import bounds, machine, packages

EXPECTED = bounds._bounds("00_memory_anatomy")
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
    if needs:
        (folder / f"{name}.toml").write_text(f"needs = {list(needs)}")
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
    monkeypatch.setattr(course, "FACTS", notebooks)
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
    assert re.search(r"03_measures +passed +\d+ +0\.0 MiB .*inside", printed)


def test_an_error_without_a_message_shows_its_line(small_course, monkeypatch):
    write(small_course / "notebooks", "01_fails", "here = 1", "here = 2\nassert here == 3")
    assert run(monkeypatch, "run", "--only", "01")
    (lesson,) = json.loads((small_course / "reports" / "course.json").read_text())["lessons"]
    assert lesson["reason"] == "AssertionError: assert here == 3"


def test_all_passed_is_green_and_one_lesson_can_be_chosen(small_course, monkeypatch, capsys):
    assert not run(monkeypatch, "run", "--only", "03", "04")
    with pytest.raises(SystemExit):
        run(monkeypatch, "run", "--only", "77")
    assert "lesson was '77'; accepted: 01, 02, 03, 04" in capsys.readouterr().err


def test_a_bounds_file_with_one_wrong_figure_turns_the_run_red(small_course, monkeypatch, capsys):
    here = machine.facts()
    of_the_run = {"date": "2026-01-01", "versions": here.versions, "seconds": 1}
    content = {"machine": {}, "lessons": {"00_memory_anatomy": {**of_the_run, "figures": FIGURES}}}
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
    """What passed is recorded with its own date and versions, and its outputs are of the same run."""
    recorded = small_course / "bounds"
    if not jupyter:  # the lesson's process then finds none
        (small_course / "sitecustomize.py").write_text(
            "import importlib.util as util\nfind = util.find_spec\n"
            "util.find_spec = lambda name, *package: None if name == 'nbclient' else find(name, *package)\n"
        )
    paths = [str(course.Path(course.__file__).resolve().parents[1]), str(small_course)]
    monkeypatch.setenv("PYTHONPATH", course.os.pathsep.join(paths))
    monkeypatch.setattr(course.os, "environ", dict(course.os.environ))
    monkeypatch.setattr("stamp.main", lambda arguments: 0)
    measures, fails = (small_course / "notebooks" / f"{name}.ipynb" for name in ("03_measures", "01_fails"))
    before = fails.read_text()
    bounds.write(recorded / f"{machine.facts().slug}.json", {"machine": {}, "lessons": {
        "04_other": {"date": "2026-01-01", "versions": {"torch": "1"}, "seconds": 1, "figures": {}}}})  # fmt: skip
    assert run(monkeypatch, "record") == 1, "a lesson failed"
    content = bounds.load(recorded / f"{machine.facts().slug}.json")
    assert content["lessons"].keys() == {"03_measures", "04_other"}
    other, row = content["lessons"]["04_other"], content["lessons"]["03_measures"]
    assert other["versions"] == {"torch": "1"} and "machine" not in other, "another lesson's recording was restamped"
    assert row["machine"]["cores"] == machine.facts().cores
    assert row["figures"] == FIGURES and row["versions"] == machine.facts().versions and row["date"] > "2026-01-01"
    assert content["machine"]["name"] and fails.read_text() == before
    if jupyter and machine.facts().slug == "cpu":
        assert "baseline_peak_bytes: inside" in measures.read_text(), "the outputs are not of the run"


def test_a_run_whose_times_did_not_settle_is_not_recorded(small_course, monkeypatch):
    unsettled = (
        COMPARE.replace("bounds.compare(", "bounds.compare(", 1)
        .replace("verdict =", "from tutorial_utils.times import Figure\nverdict =")
        .replace(str(FIGURES), str(FIGURES | {"activation_share": "?"}).replace("'?'", "Figure(0.8, settled=False)"))
    )
    write(small_course / "notebooks", "03_measures", unsettled, "verdict.require()")
    monkeypatch.setattr(course.os, "environ", dict(course.os.environ))
    monkeypatch.setattr("stamp.main", lambda arguments: 0)
    assert not run(monkeypatch, "run", "--only", "03"), "a busy machine fails nothing"
    (lesson,) = json.loads((small_course / "reports" / "course.json").read_text())["lessons"]
    assert lesson["not_judged"] == {"activation_share": bounds.BUSY} and "this machine is busy" in lesson["reason"]
    assert run(monkeypatch, "record", "--only", "03") == 1
    assert not (small_course / "bounds").exists()


@pytest.mark.alone
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "termination"])
def test_an_interrupt_ends_the_course(small_course, how):
    """Within five seconds, with the results so far, without a traceback, and without a kernel left."""
    write(small_course / "notebooks", "02_long", "import os, time\nprint(os.getpid())\ntime.sleep(100)")
    for other in ("02_skipped", "03_measures", "04_foreign"):
        (small_course / "notebooks" / f"{other}.ipynb").unlink()
    script = "import course, pathlib, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    script += f"course.NOTEBOOKS = pathlib.Path({str(small_course / 'notebooks')!r}); "
    script += f"course.REPORTS = pathlib.Path({str(small_course / 'reports')!r}); sys.exit(course.main(['run']))"
    process = subprocess.Popen([sys.executable, "-c", script], cwd=Path(course.__file__).parent,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip
    assert any("01_fails failed" in line for line in process.stdout), process.stderr.read()
    family, deadline = [], time.monotonic() + 60
    while len(family) < 2 and time.monotonic() < deadline:  # the lesson's process and its kernel
        family = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.2)
    time.sleep(1)
    started = time.monotonic()
    process.send_signal(how)
    out, err = process.communicate(timeout=30)
    assert time.monotonic() - started < 5 and process.returncode == 130
    assert "Traceback" not in out + err
    statuses = {
        r["name"]: r["status"] for r in json.loads((small_course / "reports/course.json").read_text())["lessons"]
    }
    assert statuses == {"01_fails": "failed", "02_long": "interrupted"}
    assert re.search(r"02_long +interrupted", out)
    assert len(family) >= 2 and not any(member.is_running() for member in family), "a kernel was left"


def test_two_lessons_at_a_time_share_the_processors(small_course, monkeypatch):
    monkeypatch.setattr(course.os, "environ", {**course.os.environ})
    monkeypatch.delitem(course.os.environ, "OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(machine, "facts", lambda real=machine.facts: replace(real(), cores=4, device="cpu"))
    waits = "import os, pathlib, time\nassert os.environ['OMP_NUM_THREADS'] == '2'\npathlib.Path({!r}).touch()\n"
    waits += "deadline = time.monotonic() + 60\n"
    waits += "while not pathlib.Path({!r}).exists():\n    assert time.monotonic() < deadline\n    time.sleep(0.1)"
    marks = [str(small_course / name) for name in ("one", "other")]
    write(small_course / "notebooks", "03_measures", waits.format(*marks))
    write(small_course / "notebooks", "04_foreign", waits.format(*reversed(marks)))
    assert run(monkeypatch, "run", "--only", "03", "04") == 0


def test_an_interrupt_between_two_lessons_keeps_the_results(small_course, monkeypatch, capsys):
    def interrupted(text, say=course.say):
        say(text)
        if text.startswith("01_fails failed"):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
            time.sleep(0.5)

    monkeypatch.setattr(machine, "facts", lambda real=machine.facts: replace(real(), cores=1))
    monkeypatch.setattr(course, "say", interrupted)
    assert run(monkeypatch, "run") == 130
    rows = json.loads((small_course / "reports" / "course.json").read_text())["lessons"]
    assert {row["name"]: row["status"] for row in rows} == {"01_fails": "failed", "02_skipped": "interrupted"}
    assert re.search(r"02_skipped +interrupted", capsys.readouterr().out)


@pytest.mark.parametrize("jupyter", [True, False], ids=["jupyter", "no jupyter"])
def test_cells_that_lack_what_is_left_out_say_so_and_no_others(tmp_path, monkeypatch, capsys, jupyter):
    """The package itself, what it is needed for by name, and a name of a cell that was left out."""
    cells = [
        "from tutorial_utils import packages\npackages.need('no_such_package', 'its cells')",
        "import no_such_package\nmade, other = 1, no_such_package.x",
        "print(made)",
        "x = 1\nx + 1",
        "no_such_name",
    ]
    path, done = tmp_path / "05_cells.ipynb", tmp_path / "done.ipynb"
    cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    monkeypatch.setattr(packages, "left_out", {})
    if jupyter:
        monkeypatch.setenv("PYTHONPATH", str(course.ROOT))
        monkeypatch.chdir(tmp_path)
        assert course._in_kernel(path, done) == "NameError: name 'no_such_name' is not defined"
        said = "".join(o.get("text", o.get("data", {}).get("text/plain", "") + "\n")
                       for cell in nbformat.read(done, 4).cells for o in cell.outputs)  # fmt: skip
    else:
        monkeypatch.setitem(sys.modules, "no_such_package", None)
        monkeypatch.setattr(packages, "_unmade", set())
        with pytest.raises(NameError, match="no_such_name"):
            course.run_cells(path)
        said = capsys.readouterr().out
    assert [line for line in said.splitlines() if line not in ("", "False")] == [
        f"left out: its cells. no_such_package: {'not installed' if jupyter else 'too old, or left out above'}",
        "left out: this cell, which needs no_such_package",
        "left out: this cell, which needs made",
        "2",
    ]


def test_a_kernel_does_not_outlive_a_killed_runner(small_course):
    """Killed, the runner cannot clean up: the kernel itself sees that its parent is gone."""
    write(small_course / "notebooks", "01_fails", "import time\ntime.sleep(100)")
    script = f"import course, pathlib; course.NOTEBOOKS = pathlib.Path({str(small_course / 'notebooks')!r}); "
    command = [sys.executable, "-c", script + "course.main(['run'])"]
    process = subprocess.Popen(command, cwd=Path(course.__file__).parent, stdout=subprocess.DEVNULL)
    family, deadline = [], time.monotonic() + 60
    while len(family) < 2 and time.monotonic() < deadline:
        family = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.2)
    time.sleep(2)
    process.kill()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert len(family) >= 2 and not alive, f"left: {alive}"


def test_a_lesson_re_run_in_place_is_not_overwritten_by_a_failure(small_course):
    path = small_course / "notebooks" / "01_fails.ipynb"
    before = path.read_text()
    assert course.run_lesson(path, keep=path)["status"] == "failed"
    assert path.read_text() == before


def test_a_new_lesson_fails_for_what_is_missing(tmp_path):
    """Its contract, its facts and its tests, in a copy of the course."""
    ignored = shutil.ignore_patterns(".*", "reports", "dist", "__pycache__")
    folder = shutil.copytree(course.ROOT, tmp_path / "copy", ignore=ignored)
    made = new_lesson.make(folder, "96", "new_thing")
    assert [path.relative_to(folder).parts[0] for path in made] == ["notebooks", "tutorial_utils", "tests"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_contract.py", "-k", "96_new"]
    done = subprocess.run([*command, made[2]], cwd=folder, capture_output=True, text=True)
    parts = ["sections", "executed_in_one_run", "verdicts", "proof_can_fail", "copy_cell", "three_shapes"]
    for part in [*parts, "picture", "as_a_difference", "pitfalls"]:
        assert re.search(rf"FAILED tests/test_contract.py::\S*{part}", done.stdout), f"{part}: {done.stdout[-3000:]}"
    for shape in new_lesson.SHAPES:
        assert re.search(rf"FAILED \S*test_in_a_strangers_{shape}", done.stdout), done.stdout[-3000:]
    with pytest.raises(FileExistsError, match="96_new_thing has that number already"):
        new_lesson.make(folder, "96", "another_thing")
    made[0].unlink()
    with pytest.raises(FileExistsError, match="choose another number or name"):
        new_lesson.make(folder, "96", "new_thing")
    for wrong in (("9", "a"), ("96", "a b"), ("96", "a", "poem")):
        with pytest.raises(ValueError, match="accepted: two digits, a name, technique or study"):
            new_lesson.make(folder, *wrong)


@pytest.mark.parametrize(
    ("cores", "lesson", "refused"),
    [(2, "01", False), (2, "21", True), (16, "01", True)],
    ids=["fp32 alone", "times of bf16", "more cores"],
)
def test_times_of_another_class_are_not_recorded(monkeypatch, capsys, cores, lesson, refused):
    """A CPU that emulates bf16 may record what does without."""
    emulates = replace(machine.facts(), name="CPU", device="cpu", cores=cores, bf16_time=9.0, virtual=None)
    monkeypatch.setattr(machine, "facts", lambda: emulates)
    monkeypatch.delenv("COURSE_BOUNDS", raising=False)
    monkeypatch.setattr(course, "run", lambda *_, **__: 1 / 0)
    with pytest.raises(SystemExit if refused else ZeroDivisionError):
        run(monkeypatch, "record", "--only", lesson)
    said = capsys.readouterr().err
    assert ("are of class cpu" in said) == ("taskset -c 0-3" in said) == refused


def test_where_no_numbers_are_computed_a_failed_statement_leaves_no_number(tmp_path, capsys):
    write(tmp_path, "01_small", "ratio = 1 / 0\nassert ratio < 1\nprint('twice it:', 2 * ratio)")
    course.run_cells(tmp_path / "01_small.ipynb", past_failures=True)
    printed = capsys.readouterr().out.splitlines()
    assert printed == ["cell 0, line 1: ZeroDivisionError", "cell 0, line 2: AssertionError", "twice it: nan"]


def test_figures_without_a_verdict_are_a_failure():
    """Where no numbers are computed a lesson goes on after a cell that fails, also after that of its bounds."""
    written = {"figures": {"peak_bytes": 1.0}, "times": [], "inside": None, "not_judged": {}, "left_out": {}}
    assert course._reported(written, course.blank(Path("01.ipynb"), "passed"))["status"] == "failed"
    assert "status" not in course._reported(written | {"inside": True}, course.blank(Path("01.ipynb"), "passed"))
