"""The platforms as files, and what runs the lessons with their versions."""

import re
import subprocess
import sys
import time
import tomllib

import course
import kit
import pytest
import yaml
from test_course import write

import platforms
from notebooks import ROOT
from tutorial_utils import machine

NAMES = ("colab", "kaggle", "newest")


def version(text: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", text)[:2]]


def pinned(name: str) -> dict[str, str]:
    lines = platforms.pins(name).read_text().splitlines()
    return {"python": platforms.wanted_python(name)} | dict(line.split("==") for line in lines if line[0] != "#")


@pytest.mark.parametrize("name", NAMES)
def test_each_file_says_where_it_is_from_and_how_to_renew_it(name):
    text = platforms.pins(name).read_text()
    assert re.search(r"^# .*20\d\d-\d\d", text) and "# Source: " in text and "# Renew: " in text
    assert {"python", "torch", "transformers", "accelerate", "peft", "datasets"} <= set(pinned(name))
    assert all(re.fullmatch(r"[\w.-]+==\d[\w.]*", line) for line in text.splitlines() if line[0] != "#")


def test_the_floors_are_the_oldest_of_the_platforms_and_the_newest_is_newest():
    assert platforms.names() == list(NAMES)
    for package, oldest in machine.OLDEST.items():
        found = min(version(pinned(name)[package]) for name in NAMES)
        assert version(oldest) <= found if package == "python" else version(oldest) == found, package
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    floors = dict(line.split(">=") for line in project["optional-dependencies"]["lessons"] if ">=" in line)
    assert floors.keys() >= {"accelerate", "datasets", "ipywidgets", "peft"}
    for package, oldest in floors.items():
        assert version(oldest) == min(version(pinned(name)[package]) for name in NAMES), package
    assert {name: version(text) for name, text in machine.NEWEST.items()} == {
        name: version(pinned("newest")[name]) for name in machine.NEWEST}  # fmt: skip


def test_a_job_for_each_platform_with_its_python():
    content = yaml.safe_load((ROOT / ".github" / "workflows" / "platforms.yml").read_text())
    (job,) = content["jobs"].values()
    jobs = {row["platform"]: row["python"] for row in job["strategy"]["matrix"]["include"]}
    assert jobs == {name: platforms.wanted_python(name) for name in NAMES}
    assert {"schedule", "workflow_dispatch"} <= set(content[True])


def test_a_missing_interpreter_is_one_clear_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setattr(platforms, "ENVIRONMENTS", tmp_path)
    with pytest.raises(SystemExit) as ended:
        platforms.main(["kaggle"])
    assert ended.value.code == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .endswith("no Python 3.12 here: install it, or name one with WITH=PATH, which is --python PATH")
    )
    wrong = sys.executable if sys.version_info[:2] != (3, 12) else "/bin/false"
    with pytest.raises(ValueError, match=f"no Python 3.12 at {wrong}"):
        platforms.interpreter("3.12", wrong)


def test_an_interpreter_is_found_on_the_path_or_with_pyenv(monkeypatch, tmp_path):
    own = ".".join(map(str, sys.version_info[:2]))
    assert platforms.interpreter(own, sys.executable) == sys.executable
    there = tmp_path / "versions" / f"{own}.99" / "bin"
    there.mkdir(parents=True)
    (there / "python").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert platforms.interpreter(own) == str(there / "python")


def test_renewing_takes_the_versions_of_a_freeze(monkeypatch, tmp_path):
    monkeypatch.setattr(platforms, "PLATFORMS", tmp_path)
    (tmp_path / "colab.txt").write_text("# Colab, 2026-01-01\n# python 3.13\ntorch==1.0\nhuggingface_hub==1.0\n")
    freeze = tmp_path / "freeze"
    freeze.write_text("torch==2.12.0+cu130\nhuggingface-hub==2.0\nother @ git+https://x\n")
    assert platforms.main(["--renew", "colab", str(freeze)]) == 0
    assert (tmp_path / "colab.txt").read_text().splitlines()[2:] == ["torch==2.12.0", "huggingface_hub==2.0"]
    freeze.write_text("torch==2.12.0\n")
    with pytest.raises(ValueError, match="freeze has no huggingface_hub"):
        platforms.renew("colab", freeze)


def test_lessons_run_as_forks_and_one_that_fails_is_exit_1(monkeypatch, capsys, tmp_path):
    """In this environment; the lessons find nothing but the kit, and what one installs the next does not have."""
    notebooks, setup = tmp_path / "notebooks", (ROOT / "scripts" / "setup_cell.py").read_text()
    notebooks.mkdir()
    alone = "import os, tutorial_utils; assert 'session' in tutorial_utils.__file__; assert len(os.listdir()) == 1"
    for name in ("01_first", "02_second"):
        write(notebooks, name, setup, alone)
    monkeypatch.setattr(course, "NOTEBOOKS", notebooks)
    monkeypatch.setattr(platforms, "environment", lambda *_: platforms.Path(sys.executable))
    monkeypatch.setattr(kit, "whole", kit.build)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert platforms.main(["colab", "--only", "01", "02"]) == 0, capsys.readouterr().out
    write(notebooks, "02_second", "1 / 0")
    assert platforms.main(["colab", "--only", "01", "02"]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"01_first +passed", printed) and re.search(r"02_second +failed .*ZeroDivisionError", printed)


def test_an_interrupt_ends_it_without_the_lessons_that_wait(monkeypatch, capsys):
    ran = []

    def interrupted(python, lesson, attached):
        ran.append(lesson)
        time.sleep(0.5)
        raise KeyboardInterrupt

    monkeypatch.setattr(platforms, "run_lesson", interrupted)
    monkeypatch.setattr(platforms, "environment", lambda *_: platforms.Path(sys.executable))
    monkeypatch.setattr(kit, "whole", lambda folder: folder)
    assert platforms.main(["colab", "--only", "00", "01", "02", "03", "04", "05", "06", "07"]) == 130
    assert len(ran) <= 4 and "colab" in capsys.readouterr().out


def test_make_has_the_command():
    done = subprocess.run(
        ["make", "--dry-run", "platform", "P=colab", "CPU=1"], cwd=ROOT, capture_output=True, text=True
    )
    assert "scripts/platforms.py colab --cpu" in done.stdout


@pytest.mark.parametrize(("code", "status"), [("pass", "passed"), ("assert False", "failed")])
def test_a_group_of_tests_has_pytests_verdict(code, status, monkeypatch, tmp_path):
    monkeypatch.setattr(platforms, "session", lambda *_: sys.executable)
    monkeypatch.setattr(platforms, "ADDED", ())
    (path := tmp_path / "test_one.py").write_text(f"def test_one():\n    {code}\n")
    row = platforms.run_tests(sys.executable, "one", [str(path)], tmp_path)
    assert row["status"] == status and f"1 {status}" in row["reason"]
