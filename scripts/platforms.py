"""Run the lessons and their tests with the versions of a platform: python scripts/platforms.py kaggle

It makes the environment of platforms/kaggle.txt with that platform's Python, then runs every lesson as a fork does: the
.ipynb alone in a folder, the kit attached, the course nowhere else; then the tests of the copied cells, of measuring
and of predicting. Two at a time, since no time is judged here. Prints a table; exit 1 where something failed. Needs pip
and a network for the environment and the kit, and none of the course's packages.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path

import kit

ROOT = Path(__file__).resolve().parents[1]
PLATFORMS, ENVIRONMENTS = ROOT / "platforms", ROOT / ".platforms"
TESTS = {
    "copied cells": ["tests/test_copy_cells.py", "tests/lessons"],
    "measuring": ["tests/test_measure.py", "tests/test_times.py", "tests/test_kernels.py"],
    "predicting": ["tests/test_predict.py"],
    "written scripts": ["tests/test_plan.py", "tests/test_recipe.py"],
}
ADDED = ("bitsandbytes", "deepspeed")  # what lessons add where it is missing
RUNNERS = ("pytest", "nbclient", "nbformat")  # what runs lessons and tests, where a platform has it not
WORKERS = 2  # at a time, with their part of the processors each
# A constraint of this machine's own would ask for other versions than the platform's.
FREE = {"PIP_CONSTRAINT": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
PYTORCH_CPU = "https://download.pytorch.org/whl/cpu"


def names() -> list[str]:
    return sorted(path.stem for path in PLATFORMS.glob("*.txt"))


def pins(name: str) -> Path:
    """The file of a platform. ValueError for one that has none."""
    if name not in names():
        raise ValueError(f"platform was {name!r}; accepted: {', '.join(names())}")
    return PLATFORMS / f"{name}.txt"


def wanted_python(name: str) -> str:
    """The platform's Python, such as "3.12", which stands in its file."""
    return re.search(r"^# python (\d+\.\d+)$", pins(name).read_text(encoding="utf-8"), re.M)[1]


def interpreter(version: str, given: str | None = None) -> str:
    """A Python of this version: the one given, or on the path, or pyenv's, or uv's. ValueError where there is none."""
    places = [given] if given else [shutil.which(f"python{version}")]
    if not given:
        pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
        places += [str(path) for path in sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True)]
        if shutil.which("uv"):
            found = subprocess.run(["uv", "python", "find", version], capture_output=True, text=True)
            places.append(found.stdout.strip())
    for place in filter(None, places):
        code = "import sys; print(*sys.version_info[:2], sep='.')"
        try:
            done = subprocess.run([place, "-c", code], capture_output=True, text=True)
        except OSError:
            continue
        if done.stdout.strip() == version:
            return place
    raise ValueError(
        f"no Python {version} {f'at {given}' if given else 'here'}: install it, "
        "or name one with WITH=PATH, which is --python PATH"
    )


def environment(name: str, given: str | None = None, cpu: bool = False) -> Path:
    """The python of a platform's environment, made anew where its file changed. ValueError without its Python."""
    folder = ENVIRONMENTS / name
    python, made = folder / "bin" / "python", folder / "made_of"
    digest = hashlib.sha256(pins(name).read_bytes() + str((given, cpu)).encode()).hexdigest()
    if made.exists() and made.read_text(encoding="utf-8") == digest:
        return python
    source = interpreter(wanted_python(name), given)
    print(f"{name}: making the environment with Python {wanted_python(name)}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([source, "-m", "venv", str(folder)], check=True)
    free = os.environ | FREE
    index = ["--extra-index-url", PYTORCH_CPU] if cpu else []
    pip = [str(python), "-m", "pip", "install", "--quiet", *index]
    subprocess.run([*pip, "-r", str(pins(name))], check=True, env=free)
    subprocess.run([*pip, "-c", str(pins(name)), *RUNNERS], check=True, env=free)
    made.write_text(digest, encoding="utf-8")
    return python


def session(python: Path, folder: Path) -> str:
    """A python with all that the platform has, in which a lesson may install without leaving it to the next one."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    known, own = python, folder / "session"
    subprocess.run([str(python), "-m", "venv", "--without-pip", str(own)], check=True)
    site, there = (
        subprocess.run([str(p), "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        for p in (own / "bin" / "python", known)
    )
    # Not the path alone: the platform's own .pth files count too, such as the one that setuptools gives distutils by.
    Path(site, "platform.pth").write_text(f"import site; site.addsitedir({there!r})\n", encoding="utf-8")
    return str(own / "bin" / "python")


def clean(attached: Path) -> dict[str, str]:
    """An environment in which only the kit is attached, and which does not judge times."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "COURSE_BOUNDS")}
    threads = max(1, (os.cpu_count() or 1) // WORKERS)
    known = {"COURSE_KIT": str(attached.parent), "COURSE_BUSY": "1", "OMP_NUM_THREADS": str(threads)}
    return kept | known | FREE | {"PYDEVD_DISABLE_FILE_VALIDATION": "1"}  # a line of ipykernel's for each kernel


def run_lesson(python: Path, lesson: Path, attached: Path) -> dict:
    """A lesson's row, run as a fork: the notebook alone, the kit attached, no network asked for."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        fork = Path(folder, "fork")
        fork.mkdir()
        notebook = Path(shutil.copy(lesson, fork))
        code = (
            "import json, sys; from pathlib import Path; "
            f"sys.path.insert(0, {str(ROOT / 'scripts')!r}); import course; "
            f"print(json.dumps(course.run_lesson(Path({str(notebook)!r}), folder=Path({str(fork)!r}))))"
        )
        started = time.monotonic()
        command = [session(python, Path(folder)), "-c", code]
        done = subprocess.run(command, env=clean(attached), stdout=subprocess.PIPE, text=True, cwd=folder)
        try:
            return json.loads(done.stdout.splitlines()[-1])
        except (IndexError, ValueError):
            seconds = time.monotonic() - started
            reason = f"the runner died with exit code {done.returncode}"
            return {"name": lesson.stem, "status": "failed", "seconds": seconds, "inside": None, "reason": reason}


def run_tests(python: Path, name: str, paths: list[str], attached: Path) -> dict:
    """A row for a group of tests, from pytest's last line. They find what a lesson would add from the kit."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        own = session(python, Path(folder))
        code = f"from tutorial_utils import packages; [packages.need(package, 'its tests') for package in {ADDED}]"
        for command in (["-c", code], ["-m", "pytest", "-q", "-p", "no:cacheprovider", *paths]):
            done = subprocess.run([own, *command], env=clean(attached), cwd=ROOT, capture_output=True, text=True)
            if done.returncode:
                break
    last = (done.stdout.strip().splitlines() or ["nothing was run"])[-1]
    status = "failed" if done.returncode else "passed"
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-2000:], sep="\n")
    return {"name": name, "status": status, "seconds": time.monotonic() - started, "inside": None, "reason": last}


def table(rows: list[dict]) -> str:
    """Name, status, seconds, bounds and reason of each row, in columns."""
    verdicts = {True: "inside", False: "outside", None: "–"}
    lines = [["", "status", "seconds", "bounds", "reason"]]
    for row in rows:
        reason = (row["reason"].splitlines() or [""])[0][:200]
        lines.append([row["name"], row["status"], f"{row['seconds']:.0f}", verdicts[row["inside"]], reason])
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)


def renew(name: str, freeze: Path):
    """Give each package of a platform's file the version that a `pip freeze` has. ValueError where it has none."""

    def key(package):
        return re.sub(r"[-_.]+", "-", package).lower()

    lines = freeze.read_text(encoding="utf-8").splitlines()
    versions = {key(line.split("==")[0]): line.split("==")[1].split("+")[0] for line in lines if "==" in line}
    renewed = []
    for line in pins(name).read_text(encoding="utf-8").splitlines():
        if "==" in line and not line.startswith("#"):
            package = line.split("==")[0]
            if key(package) not in versions:
                raise ValueError(f"{freeze.name} has no {package}: take it out of platforms/{name}.txt if it is gone")
            line = f"{package}=={versions[key(package)]}"
        renewed.append(line)
    unfinished = pins(name).with_suffix(".unfinished")
    unfinished.write_text("\n".join(renewed) + "\n", encoding="utf-8")
    unfinished.replace(pins(name))


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("platform", nargs="?", help=f"one of {', '.join(names())}")
    parser.add_argument("--only", nargs="+", help="numbers of lessons, without the tests")
    parser.add_argument("--python", help="the path of the platform's Python")
    parser.add_argument("--cpu", action="store_true", help="torch from PyTorch's own index of CPU builds")
    parser.add_argument("--renew", nargs=2, metavar=("PLATFORM", "FREEZE"), help="take the versions from a pip freeze")
    arguments = parser.parse_args(given)
    try:
        if arguments.renew:
            renew(arguments.renew[0], Path(arguments.renew[1]))
            return 0
        pins(arguments.platform)
        import course

        lessons = course.lessons(arguments.only)
        python = environment(arguments.platform, arguments.python, arguments.cpu)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    except subprocess.CalledProcessError:
        parser.error(f"pip could not install platforms/{arguments.platform}.txt: its reason stands above")
    rows, interrupted = [], False
    with tempfile.TemporaryDirectory() as folder:
        attached = kit.whole(Path(folder, "input", "small-gpu-course"))
        jobs = [
            partial(run_tests, python, name, paths, attached)
            for name, paths in ({} if arguments.only else TESTS).items()
        ]
        jobs += [partial(run_lesson, python, lesson, attached) for lesson in lessons]
        with ThreadPoolExecutor(WORKERS) as pool:
            try:
                for done in as_completed(map(pool.submit, jobs)):
                    rows.append(done.result())
                    if rows[-1]["status"] == "failed":
                        course.say(rows[-1]["reason"])
                    course.say(table(rows[-1:]).splitlines()[1])
            except KeyboardInterrupt:
                interrupted = True
                pool.shutdown(wait=False, cancel_futures=True)
                course.kill_family(os.getpid())
    rows.sort(key=lambda row: row["name"])
    course.say(f"\n{arguments.platform}\n{table(rows)}")
    return 130 if interrupted else int(any(row["status"] == "failed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
