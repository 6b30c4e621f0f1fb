"""A lesson alone in a folder, in another environment, without a network, twice in a row.

One of the shortest lessons, chosen by the commit; all of them with COURSE_TEST_ALL=1 (make test-all).
"""

import json
import os
import shutil
import subprocess
import sysconfig
import venv
import zipfile
from pathlib import Path

import kit
import nbformat
import pytest

from notebooks import LESSONS, ROOT

EVERY = bool(os.environ.get("COURSE_TEST_ALL"))


def chosen():
    if EVERY:
        return LESSONS
    recorded = json.loads((ROOT / "tutorial_utils" / "facts" / "bounds" / "cpu.json").read_text())["lessons"]
    short = sorted(LESSONS, key=lambda lesson: recorded.get(lesson.stem, {"seconds": 0})["seconds"])[:6]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return [short[int(commit or "0", 16) % len(short)]]


# Run by the other environment, before what is tried there: cut the network if it can be cut.
CUT = """
import fcntl, socket, struct, sys
if sys.argv[1] == "cut":
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, 0x8914, struct.pack("16sh14x", b"lo", 1))  # SIOCSIFFLAGS: loopback up
    assert [name for _, name in socket.if_nameindex()] == ["lo"]
"""
NOTEBOOK = """
import nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[2], as_version=4)
NotebookClient(notebook, timeout=300, kernel_name="python3", extra_arguments=["--log-level=ERROR"]).execute()
"""
SETUP = (ROOT / "scripts" / "setup_cell.py").read_text()
# What the other environment's interpreters do at their start: note every address of a network that is asked for.
WATCH = """
import os, sys
def watch(event, arguments):
    if event in ("socket.getaddrinfo", "socket.connect"):
        asked = arguments[0] if event == "socket.getaddrinfo" else arguments[1]
        path = event == "socket.connect" and isinstance(asked, (str, bytes))  # to a process of this machine
        address = str(asked)
        if not path and not any(local in address for local in ("127.0.0.1", "localhost", "::1")):
            with open({log!r}, "a") as file:
                file.write(f"{{event}} {{address}}\\n")
sys.addaudithook(watch)
"""


@pytest.fixture(scope="module")
def other_environment(tmp_path_factory):
    """(python of an environment that has the libraries, pip too, and not the course, its log of addresses)."""
    folder = tmp_path_factory.mktemp("platform")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
                               capture_output=True, text=True, check=True).stdout.strip())  # fmt: skip
    log = folder / "addresses.log"
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (site / "sitecustomize.py").write_text(WATCH.format(log=str(log)))
    return python, log


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A kit, made once: pip takes seconds for its wheel."""
    return kit.build(tmp_path_factory.mktemp("built") / "small-gpu-course")


def remove(python, package: str):
    """What pip installed of a package in the other environment."""
    for part in (python.parents[1] / "lib").glob(f"python*/site-packages/{package}*"):
        shutil.rmtree(part) if part.is_dir() else part.unlink()


def without_network() -> list[str]:
    """The command prefix that cuts the network, or nothing where the machine does not allow it."""
    for prefix in (["unshare", "-n"], ["unshare", "-rn"]):
        if shutil.which("unshare") and subprocess.run([*prefix, "true"], capture_output=True).returncode == 0:
            return prefix
    return []


def execute(python, code: str, folder: Path, *arguments, **variables):
    prefix = without_network()
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "COURSE_KIT", "COURSE_BOUNDS")}
    return subprocess.run(
        [*prefix, python, "-c", f"{CUT}{code}\nprint('executed')", "cut" if prefix else "whole", *arguments],
        cwd=folder, env=clean | variables, capture_output=True, text=True,
    )  # fmt: skip


def torch_of(python) -> str:
    code = "import importlib.util; print(importlib.util.find_spec('torch').origin)"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(not without_network(), reason="this machine allows no namespace without a network")
@pytest.mark.parametrize("lesson", chosen(), ids=lambda path: path.stem)
def test_a_fork_with_only_the_kit_attached_and_no_network_twice_in_a_row(lesson, built, other_environment, tmp_path):
    python, log = other_environment
    attached = shutil.copytree(built, tmp_path / "attached" / built.name)
    assert {p.suffix for p in attached.iterdir()} >= {".whl"}
    tiny = attached / "course" / "tutorial_utils" / "tiny"
    assert {p.name for p in tiny.iterdir()} >= {"model.safetensors", "tokenizer.json", "config.json"}
    fork = tmp_path / "fork"
    fork.mkdir()
    notebook = nbformat.read(lesson, as_version=4)
    notebook.cells += [nbformat.from_dict(dict(cell, id=f"again-{n}")) for n, cell in enumerate(notebook.cells)]
    nbformat.write(notebook, fork / lesson.name)
    torch_before = torch_of(python)
    remove(python, "tutorial_utils")
    done = execute(python, NOTEBOOK, fork, lesson.name, COURSE_KIT=str(tmp_path / "attached"))
    assert "executed" in done.stdout, done.stdout + done.stderr
    assert not log.exists(), f"the network was tried unasked: {log.read_text()}"
    assert torch_before == torch_of(python)
    assert [p.name for p in fork.iterdir()] == [lesson.name], "the lesson left something in its folder"


def no_room(source, there, folder, copytree=shutil.copytree, **options):
    """The copy to the kit's own place ends half-way."""
    if Path(there).parent != folder:
        return copytree(source, there, ignore=shutil.ignore_patterns("__pycache__"))
    there.mkdir()
    raise OSError("no room")


def test_the_kit_takes_wheels_along(built, tmp_path, monkeypatch):
    """From a folder that serves as the index, so that no network is needed. Its own wheel is the one made before."""
    (wheel,) = built.glob("*.whl")

    def pip(command, run=subprocess.run, **options):
        if "wheel" not in command:
            return run(command, **options)
        (made := Path(command[command.index("--wheel-dir") + 1])).mkdir()
        return shutil.copy(wheel, made)

    monkeypatch.setattr(kit.subprocess, "run", pip)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    attached = kit.build(tmp_path / "kit", taken=("tutorial_utils",))
    assert [path.name for path in (attached / "wheels").iterdir()] == [wheel.name]
    with pytest.raises(subprocess.CalledProcessError):
        kit.build(tmp_path / "kit", taken=("no-such-package",))
    with monkeypatch.context() as patched, pytest.raises(OSError, match="no room"):
        patched.setattr(kit.shutil, "copytree", lambda source, there, *_, **__: no_room(source, there, tmp_path))
        kit.build(tmp_path / "kit")
    assert (attached / "wheels" / wheel.name).exists(), "the earlier kit is gone, and there is no new one"


def test_the_watch_on_addresses_can_fail(other_environment):
    python, log = other_environment
    subprocess.run([python, "-c", "import socket; socket.getaddrinfo('example.invalid', 80)"], capture_output=True)
    assert "example.invalid" in log.read_text()
    log.unlink()


def wheel(folder, name, requires=(), version="1.0"):
    """A wheel of an empty package."""
    folder.mkdir(parents=True, exist_ok=True)
    about = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {one}\n" for one in requires)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", "x = 1\n")
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")


@pytest.mark.parametrize("requires", [["numpy"], ["numpy==0.0.1"]], ids=["suits", "would replace numpy"])
def test_what_is_missing_comes_from_the_kit_and_replaces_nothing(other_environment, tmp_path, requires):
    """By pip itself: what the package needs is there already, or it is not had."""
    python, _ = other_environment
    wheel(tmp_path / "kit" / "course" / "wheels", "no_such_package", requires)
    if requires != ["numpy"]:  # or pip would fail anyway, for want of it
        wheel(tmp_path / "kit" / "course" / "wheels", "numpy", version="0.0.1")
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import numpy
from tutorial_utils import packages
if packages.need("no_such_package", "its cells"):
    import no_such_package
print(numpy.__version__, packages.left_out)
"""
    clean = {**os.environ, "COURSE_KIT": str(tmp_path / "kit")}
    done = subprocess.run([python, "-c", code], cwd=tmp_path, env=clean, capture_output=True, text=True)
    remove(python, "no_such_package")
    *said, versions = done.stdout.splitlines()
    import numpy

    assert versions.startswith(numpy.__version__)
    if requires == ["numpy"]:
        assert said == ["no_such_package 1.0: installed from the kit"]
    else:
        assert said[0].startswith("no_such_package could not be installed from the kit: ERROR: ")
        assert said[1:] == ["left out: its cells. no_such_package: not installed"]


def test_setup_finds_the_course_beside_the_notebook(other_environment, tmp_path):
    python, _ = other_environment
    remove(python, "tutorial_utils")
    (tmp_path / "lessons").mkdir()
    (tmp_path / "tutorial_utils").symlink_to(ROOT / "tutorial_utils")
    done = execute(python, SETUP, tmp_path / "lessons", COURSE_KIT=str(tmp_path / "none"))
    assert "executed" in done.stdout, done.stderr


def test_setup_says_what_to_do_where_the_kit_is_cut_off(other_environment, tmp_path):
    python, _ = other_environment
    remove(python, "tutorial_utils")
    (half := tmp_path / "kit" / "tutorial_utils-1.0-py3-none-any.whl").parent.mkdir()
    half.write_bytes(b"PK" + bytes(1000))
    done = execute(python, SETUP, tmp_path, COURSE_KIT=str(half.parent))
    assert "executed" not in done.stdout and "CalledProcessError" not in done.stderr
    assert "tutorial_utils: attach the kit (scripts/kit.py makes it) or put it beside this file" in done.stderr


def test_setup_says_what_to_do_where_the_course_is_nowhere(other_environment, tmp_path):
    python, _ = other_environment
    remove(python, "tutorial_utils")
    done = execute(python, SETUP, tmp_path, COURSE_KIT=str(tmp_path / "none"))
    assert "executed" not in done.stdout
    assert "tutorial_utils: attach the kit (scripts/kit.py makes it) or put it beside this file" in done.stderr
