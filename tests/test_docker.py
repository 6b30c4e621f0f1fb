"""The Dockerfiles are linted, and their instructions executed in a clean folder. No Docker is needed."""

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import nbformat
import pytest

from notebooks import ROOT

PAGE = (ROOT / "docker" / "README.md").read_text()
FILES = {
    "Dockerfile": (ROOT / "docker" / "Dockerfile").read_text(),
    "fork on the page": re.search(r"```dockerfile\n(.*?)```", PAGE, re.S)[1],
}
IGNORED = [line for line in (ROOT / ".dockerignore").read_text().split("\n") if line and line[0] != "#"]
SHORT = "97_short"  # a lesson of one cell
CELL = """
import os, sys
assert sys.prefix == os.environ["CLEAN"] + "/.venv", sys.prefix
from tutorial_utils import machine
machine.start()
"""


def instructions(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return [tuple(line.split(None, 1)) for line in "\n".join(lines).replace("\\\n", " ").splitlines()]


def ignored(path: Path) -> bool:
    """Whether .dockerignore leaves out a path of the project, or a folder above it."""
    parts = path.relative_to(ROOT).parts
    for line in IGNORED:
        places = parts if line.startswith("**/") else ["/".join(parts[: n + 1]) for n in range(len(parts))]
        if any(fnmatch.fnmatchcase(place, line.removeprefix("**/")) for place in places):
            return True
    return False


def copy(source: str, folder: Path):
    """COPY one file of the project, or with "." all that .dockerignore leaves."""
    if source != ".":
        shutil.copy2(ROOT / source, folder / source)
        return

    def left_out(place, names):
        return [name for name in names if ignored(Path(place, name))]

    shutil.copytree(ROOT, folder, ignore=left_out, dirs_exist_ok=True)


def stand_in(folder: Path, name: str, script: str):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def image(tmp_path):
    """Executes a Dockerfile: the folder that WORKDIR names, its environment, its command, and what apt-get was told."""
    # No system packages: nothing but stand-ins can be found. Else: this machine's Python as the base's.
    system, base, folder = tmp_path / "system", tmp_path / "base", tmp_path / "course"
    for name in ("apt-get", "rm"):
        stand_in(system, name, f'echo {name} "$@" >> {tmp_path}/told')
    stand_in(base, "python3", f'exec {sys.executable} "$@"')
    folder.mkdir()
    packages = [sysconfig.get_path("purelib"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        "PATH": f"{base}:/usr/local/bin:/usr/bin:/bin", "HOME": str(tmp_path / "home"), "CLEAN": str(folder),
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),
        "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0",  # 0 is what switches the isolation off
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PYTHONPATH": os.pathsep.join(packages),
    }  # fmt: skip

    def build(text):
        command = None
        for word, rest in instructions(text):
            if word in ("ARG", "ENV"):
                name, _, value = rest.partition("=")
                environment[name] = value
            elif word == "COPY":
                *sources, target = rest.split()
                assert target in (".", "./")
                for source in sources:
                    copy(source, folder)
            elif word == "RUN":
                path = str(system) if "apt-get" in rest else environment["PATH"]
                shell = ["/bin/sh", "-ec", rest]
                variables = environment | {"PATH": path}
                done = subprocess.run(shell, cwd=folder, env=variables, capture_output=True, text=True)
                assert done.returncode == 0, f"RUN {rest}\n{done.stdout}{done.stderr}"
            elif word == "CMD":
                command = json.loads(rest)
            else:
                assert word in ("FROM", "WORKDIR"), f"not known to this test: {word} {rest}"
        told = tmp_path / "told"
        return folder, environment, command, told.read_text() if told.exists() else ""

    return build


def lint(text) -> str:
    """What hadolint says."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    hadolint = shutil.which("hadolint", path=path)
    assert hadolint, "hadolint is not installed: pip install -r requirements.txt"
    done = subprocess.run([hadolint, "--no-color", "-"], input=text, capture_output=True, text=True)
    assert done.returncode == bool(done.stdout), done.stderr
    return done.stdout


@pytest.mark.parametrize("name", FILES)
def test_lint(name):
    assert lint(FILES[name]) == ""


def test_the_linter_can_fail():
    assert "DL3008" in lint(FILES["Dockerfile"].replace("# hadolint ignore=DL3008\n", ""))


def test_its_instructions_run_in_a_clean_folder(image):
    folder, environment, command, told = image(FILES["Dockerfile"])
    assert command == ["make", "course"] and "g++ make" in told
    installed = folder / ".venv" / "installed"
    made = installed.stat().st_mtime_ns

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    nbformat.write(notebook, folder / "notebooks" / f"{SHORT}.ipynb")
    done = subprocess.run(command, cwd=folder, env=environment | {"ONLY": "97"}, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    (result,) = json.loads((folder / "reports" / "course.json").read_text())["lessons"]
    assert (result["name"], result["status"]) == (SHORT, "passed")
    assert installed.stat().st_mtime_ns == made, "the command installed again"


def test_the_fork_on_the_page_keeps_its_torch(image):
    folder, environment, command, _ = image(FILES["fork on the page"])
    code = "import importlib.util; [print(importlib.util.find_spec(n).origin) for n in ('torch', 'tutorial_utils')]"
    python = [folder / ".venv" / "bin" / "python", "-c", code]
    done = subprocess.run(python, cwd=folder.parent, env=environment, capture_output=True, text=True)
    torch, ours = done.stdout.split()
    assert not torch.startswith(str(folder)) and ours.startswith(str(folder / ".venv"))
    would = subprocess.run(
        [command[0], "-n", *command[1:]], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert would.stdout.split() == [".venv/bin/python", "scripts/course.py", "run"], "it would install again"


def test_versions_stand_in_requirements_alone():
    text = FILES["Dockerfile"]
    assert "==" not in text and "requirements.txt" in text
    slow, course = text.index("RUN make .venv/installed"), text.index("COPY . .")
    assert text.index("COPY requirements.txt Makefile ./") < slow < course


def test_nothing_that_git_ignores_gets_into_the_image():
    for pattern in (ROOT / ".gitignore").read_text().split():
        name = pattern.rstrip("/").replace("*", "some")
        for path in (ROOT / name / "file", ROOT / "scripts" / name / "file"):
            assert ignored(path), f".dockerignore does not leave out {path.relative_to(ROOT)}"
    assert ignored(ROOT / ".git" / "config") and not ignored(ROOT / "docker" / "Dockerfile")
    assert not ignored(ROOT / "notebooks" / "00_memory_anatomy.ipynb") and not ignored(ROOT / "tutorial_utils/tiny/x")
