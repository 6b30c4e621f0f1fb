"""Lessons on machines that are not here, imitated by changing the machine's facts; and the recording notebook.

Three imitated machines: a T4 (no bf16), a P100 (no kernels in this build of torch), one without bitsandbytes.
All lessons run on all of them with COURSE_TEST_ALL=1; else one on one to which it matters, chosen by the commit.
"""

import json
import re
import subprocess

import course
import kit
import nbformat
import pytest
from test_course import COMPARE, FIGURES
from test_faults import COMMIT
from test_forks import EVERY

from notebooks import LESSONS, ROOT, printed

IMITATE = """
import dataclasses
from tutorial_utils import machine
_real = machine.facts()
machine.facts = lambda: dataclasses.replace(_real, **{changes})
"""
MACHINES = {
    "T4": IMITATE.format(changes=dict(name="Tesla T4 (imitated)", capability=(7, 5), bf16=False)),
    "P100": IMITATE.format(changes=dict(name="Tesla P100 (imitated)", capability=(6, 0), kernels=False)),
    "no bitsandbytes": "import sys\nsys.modules['bitsandbytes'] = None",
}
SAID = {"T4": r"\(imitated\)[\s\S]*No bf16", "P100": r"\(imitated\)[\s\S]*no kernels for this GPU, .*\(sm_60\)"}
MATTERS = [("T4", "03"), ("P100", "00"), ("no bitsandbytes", "04")]


def runs() -> list:
    if EVERY:
        return [(name, path) for path in LESSONS for name in MACHINES]
    by_number = {path.stem[:2]: path for path in LESSONS}
    name, number = MATTERS[int(COMMIT or "0", 16) // 3 % 3]  # not always with the same third of the faults
    return [(name, by_number[number])]


def with_first_cell(path, source, folder):
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(source))
    nbformat.write(notebook, folder / path.name)
    return folder / path.name


@pytest.mark.parametrize(("name", "path"), runs(), ids=lambda value: getattr(value, "stem", value))
def test_lessons_run_what_they_can_and_say_what_they_left_out(name, path, tmp_path):
    executed = tmp_path / "executed.ipynb"
    result = course.run_lesson(with_first_cell(path, MACHINES[name], tmp_path), keep=executed)
    assert result["status"] == "passed", result["reason"]
    assert result["inside"] is True
    shown = "\n".join(
        printed(cell) for cell in json.loads(executed.read_text())["cells"] if cell["cell_type"] == "code"
    )
    if name in SAID:
        assert re.search(SAID[name], shown), "the imitated machine is not named, or its limit not said"
    elif path.stem.startswith("04"):
        assert "bitsandbytes is left out: " in shown, "what was left out is not said"


@pytest.mark.parametrize("place", ["input/a-data-set", "input/datasets/somebody/a-data-set", "work/kit"])
def test_the_recording_finds_the_kit(place, tmp_path, monkeypatch):
    """Attached in Kaggle, or unzipped beside the notebook in Colab."""
    script = tmp_path / place / "course" / "scripts" / "course.py"
    for folder in (script.parent, tmp_path / "work"):
        folder.mkdir(parents=True, exist_ok=True)
    script.touch()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("COURSE_KIT", str(tmp_path / "input"))
    cells = json.loads((ROOT / "notebooks" / "record_on_your_gpu.ipynb").read_text())["cells"]
    search = next("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code").partition("sys.path")[0]
    exec(search, namespace := {})
    assert namespace["found"] == [tmp_path / place / "course"]


def test_recording_on_a_gpu_from_the_kit(tmp_path, monkeypatch):
    """The kit alone, an imitated T4 and a course of one small lesson: the file lies beside the notebook."""
    attached = kit.build(tmp_path / "attached" / "small-gpu-course")
    lessons, work = tmp_path / "lessons", tmp_path / "work"
    lessons.mkdir()
    work.mkdir()
    small = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in (COMPARE, "verdict.require()")])
    nbformat.write(small, lessons / "03_measures.ipynb")
    imitate = f"""
import pathlib, sys
sys.path[:0] = [{str(attached / "course" / "scripts")!r}, {str(attached / "course")!r}]
import course
course.NOTEBOOKS = pathlib.Path({str(lessons)!r})
""" + MACHINES["T4"].replace("name=", "device='cuda', name=").replace("**{", "**{'device': 'cuda', ")
    notebook = with_first_cell(ROOT / "notebooks" / "record_on_your_gpu.ipynb", imitate, work)
    for name in ("PYTHONPATH", "COURSE_BOUNDS", "COURSE_RECORDING", "COURSE_REPORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COURSE_KIT", str(tmp_path / "attached"))
    done = subprocess.run(
        [course.sys.executable, "-m", "jupyter", "nbconvert", "--to", "notebook", "--execute", "--log-level=ERROR",
         "--output", "done.ipynb", str(notebook)], cwd=work, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (path,) = (work / "bounds").glob("*.json")
    content = json.loads(path.read_text())
    assert path.name == "tesla-t4-imitated.json" and content["machine"]["name"] == "Tesla T4 (imitated)"
    assert content["lessons"]["03_measures"]["figures"] == FIGURES
    assert str(path.name) in (work / "done.ipynb").read_text()
