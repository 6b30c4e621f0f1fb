"""Run the course.

course.py run [--only 01 …]     every lesson in a fresh kernel; reports/course.json and the executed notebooks.
                                On two processors or more, without a GPU, two lessons at a time share them
course.py lesson 01             re-run one lesson in place and stamp its card
course.py record [--only 01 …]  run them, times settled, and write facts/bounds/<machine>.json; needs no jupyter.
                                On a CPU the notebooks' outputs and cards too, of the same run. On a virtual GPU
                                that computes no numbers: the bytes at real size, in facts/bounds/real-size
course.py new 27 distillation   an empty lesson: its notebook, its facts, its tests, which say what is missing

Ctrl-C ends it: the results so far are written and shown, no kernel is left, exit 130.
"""

import argparse
import ast
import hashlib
import importlib.util
import json
import linecache
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from datetime import date
from pathlib import Path

import new_lesson

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

NOTEBOOKS, REPORTS = ROOT / "notebooks", ROOT / "reports"
FACTS = ROOT / "tutorial_utils" / "facts" / "lessons"
CELL_TIMEOUT = 300


def lessons(only: list[str] | None = None) -> list[Path]:
    """The notebooks in order. ValueError for a number that none has."""
    found = sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
    for number in only or []:
        if not any(path.stem[:2] == number for path in found):
            raise ValueError(f"lesson was {number!r}; accepted: {', '.join(p.stem[:2] for p in found)}")
    return [path for path in found if not only or path.stem[:2] in only]


def run_lesson(
    path: Path,
    keep: Path | None = None,
    folder: Path | None = None,
    python: str = sys.executable,
    stop: threading.Event | None = None,
) -> dict:
    """Run one lesson in a process and a folder of its own: its row of course.json.

    status is "passed", "failed", "skipped" or "interrupted"; reason says why, or what was not judged or left out.
    keep: where the executed notebook goes, when jupyter is there to execute one; not over itself where it failed.
    folder: where to run, in place of a foreign folder with the course on its path. stop: what interrupts it.
    """
    result, facts = blank(path, "passed"), FACTS / f"{path.stem}.toml"
    needs = tomllib.loads(facts.read_text(encoding="utf-8"))["needs"] if facts.exists() else []
    missing = [name for name in needs if not importlib.util.find_spec(name)]
    if missing:
        return {**result, "status": "skipped", "reason": f"needs {', '.join(missing)}"}
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as own:
        report, executed, wrong = Path(own, "report.json"), Path(own, "executed.ipynb"), Path(own, "error.txt")
        environment = {**os.environ, "COURSE_REPORT": str(report)}
        environment.pop("COURSE_PROCESS", None)  # the runner's: a lesson beside this one is no part of it
        if folder is None:
            paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment["PYTHONPATH"] = os.pathsep.join(paths)
            (folder := Path(own, "foreign")).mkdir()
        command = [python, str(Path(__file__).resolve()), "execute", str(path.resolve()), str(executed), str(wrong)]
        # In a session of its own: a Ctrl-C in the terminal comes to the runner alone, which ends the lesson's.
        process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True)
        while process.poll() is None and not (stop and stop.is_set()):
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
        if process.returncode is None:
            end(process)
            result |= {"status": "interrupted", "reason": "interrupted"}
        else:
            error = wrong.read_text(encoding="utf-8") if wrong.exists() else ""
            if error or process.returncode:
                result |= {"status": "failed", "reason": error or f"died with exit code {process.returncode}"}
        if report.exists():
            result |= _reported(json.loads(report.read_text(encoding="utf-8")), result)
        if keep and executed.exists() and not (result["status"] != "passed" and keep == path):
            keep.parent.mkdir(parents=True, exist_ok=True)
            unfinished = keep.with_suffix(".unfinished")
            shutil.copyfile(executed, unfinished)
            unfinished.replace(keep)
    result["seconds"] = round(time.perf_counter() - started, 1)
    return result


def blank(path: Path, status: str) -> dict:
    """A row of course.json without figures."""
    return {"name": path.stem, "status": status, "reason": "", "seconds": 0.0, "figures": {}, "inside": None}


@contextmanager
def undisturbed():
    """Without interrupts: what is written meanwhile takes a moment, and people press Ctrl-C twice."""
    before = {}
    with suppress(ValueError):  # not in the main thread
        for asked in (signal.SIGINT, signal.SIGTERM):
            before[asked] = signal.signal(asked, signal.SIG_IGN)
    try:
        yield
    finally:
        for asked, handler in before.items():
            signal.signal(asked, handler or signal.SIG_DFL)


def _reported(written: dict, result: dict) -> dict:
    """What a lesson said of itself, with a reason for what it left open."""
    from tutorial_utils import bounds

    parts = [f"left out: {what} ({package})" for package, what in written["left_out"].items()]
    for verdict in bounds.UNJUDGED:
        names = [name for name, given in written["not_judged"].items() if given == verdict]
        if names:
            parts.insert(0, f"{verdict}: {', '.join(names)}")
    names = ("figures", "times", "inside", "not_judged")
    found = {**{name: written[name] for name in names}, "reason": result["reason"] or "; ".join(parts)}
    if result["status"] == "passed" and written["inside"] is None:  # a virtual GPU goes on after a cell that fails
        found |= {"status": "failed", "reason": "its figures were not held to their bounds"}
    return found


def end(process: subprocess.Popen):
    """Kill a lesson's process, its kernel and whatever that has started."""
    kill_family(process.pid)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _end_with(runner: int):
    """Where the runner was killed it could not end its lesson: this process does, and so does the kernel with it."""
    while os.getppid() == runner:
        time.sleep(0.5)
    kill_family(os.getpid())
    os._exit(1)


def kill_family(ancestor: int):
    """Kill what a process started: a kernel is in a session of its own. psutil comes with jupyter, as kernels do."""
    with suppress(ImportError):
        import psutil

        family = psutil.Process(ancestor).children(recursive=True)
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, timeout=3)


def execute(path: Path, executed: Path, wrong: Path) -> int:
    """Run a notebook here, in a kernel where jupyter is there; write it with its outputs, or what went wrong."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    without_numbers = _computes() == "small"
    if importlib.util.find_spec("nbclient") and not without_numbers:
        error = _in_kernel(path, executed)
    else:
        try:
            run_cells(path, past_failures=without_numbers)
            error = ""
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
    if error:
        wrong.write_text(error, encoding="utf-8")
    return bool(error)


def _computes() -> str | None:
    """Which values a virtual GPU computes, where one is."""
    return json.loads(os.environ.get("VIRTUAL_GPU", "{}")).get("values")


def _in_kernel(path: Path, executed: Path) -> str:
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    notebook = nbformat.read(path, as_version=4)
    count, started = len(notebook.cells), time.perf_counter()

    def progress(cell, cell_index, **_):
        if sys.stderr.isatty():
            seconds = time.perf_counter() - started
            print(f"\r{path.stem}  cell {cell_index + 1}/{count}  {seconds:.0f} s ", end="", file=sys.stderr)

    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT,
        kernel_name="python3",
        resources={"metadata": {"path": os.getcwd()}},
        on_cell_execute=progress,
        extra_arguments=["--log-level=ERROR"],
    )
    error = ""
    try:
        client.execute(env=dict(os.environ))
    except CellExecutionError as failure:
        error = f"{failure.ename}: {failure.evalue or _failed_line(failure.traceback)}"
    except Exception as failure:  # a dead kernel or a time-out fails this lesson, not the course
        error = f"{type(failure).__name__}: {failure}"
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day: noise in every diff
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, executed)
    return error


def _failed_line(traceback: str) -> str:
    """The line of a cell at which an error without a message came."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", traceback)
    return (re.findall(r"^-+> *\d+ (.*)", plain, re.M) or [""])[0].strip()


def run_cells(path: Path, past_failures: bool = False):
    """The code cells of a notebook in this process. Those that lack what the lesson left out are left out too.

    past_failures: go on from a statement that fails, as a proof does where no numbers are computed, and say so.
    """
    from tutorial_utils import packages

    namespace = {"__name__": "__main__", "display": say_each}  # which a kernel has by itself
    for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] != "code":
            continue
        source = "".join(cell["source"])
        tree = ast.parse(source)
        linecache.cache[f"<cell {number}>"] = (0, None, source.splitlines(True), f"<cell {number}>")
        if past_failures:
            for statement in tree.body:
                try:
                    exec(compile(ast.Module([statement], []), f"<cell {number}>", "exec"), namespace)
                except Exception as error:
                    print(f"cell {number}, line {statement.lineno}: {type(error).__name__}")
                    for node in ast.walk(statement):  # what it would have made is no number
                        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                            namespace.setdefault(node.id, math.nan)
            continue
        ends_in_value = bool(tree.body) and isinstance(tree.body[-1], ast.Expr)
        last = [tree.body.pop()] if ends_in_value else []
        try:
            exec(compile(tree, f"<cell {number}>", "exec"), namespace)
            # "single" shows the value of an expression, as a notebook does of a cell's last one.
            exec(compile(ast.Interactive(last), f"<cell {number}>", "single"), namespace)
        except (ImportError, NameError) as error:
            if not packages.excused(error, source):
                raise


def machine_facts() -> tuple[dict, str]:
    """(what reports and recordings say of this machine and its versions, its slug)."""
    from tutorial_utils import machine

    here = machine.facts()
    facts = {
        "name": here.name,
        "device": here.device,
        "memory_bytes": here.memory,
        "cores": here.cores,
        "bf16": here.bf16,
        "virtual": here.virtual,
    }
    return {"machine": facts, "versions": here.versions, "date": date.today().isoformat()}, here.slug


def run(paths: list[Path], keep: bool = True, record: bool = False, at_once: int = 1) -> list[dict]:
    """Run lessons in order; one that fails leaves the others' results, an interrupt those before it."""
    stop = threading.Event()

    def one(path: Path) -> dict:
        say(f"{path.stem} …")
        with tempfile.TemporaryDirectory() as folder:
            executed, code = Path(folder, path.name) if record else REPORTS / "executed" / path.name, digest(path)
            result = run_lesson(path, executed if keep else None, stop=stop)
            if record and result["status"] == "passed":
                write_recording(path, result, executed, code)
        say(f"{path.stem} {result['status']} in {result['seconds']:.0f} s {result['reason'][:500]}".rstrip())
        return result

    # In threads: an interrupt comes to this one, which ends the lessons, and nothing that is being written.
    with ThreadPoolExecutor(at_once) as pool:
        rows = [pool.submit(one, path) for path in paths]
        try:
            wait(rows, return_when=FIRST_EXCEPTION)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # people press it twice, and the table is yet to come
            stop.set()
        pool.shutdown(cancel_futures=True)
    results = [row.result() for row in rows if not row.cancelled()]
    if stop.is_set() and not any(result["status"] == "interrupted" for result in results):  # between two lessons
        results += [blank(path, "interrupted") for path, row in zip(paths, rows) if row.cancelled()][:1]
    return results


def recording_file(machine: dict, slug: str) -> Path:
    """Where the figures of a machine are written: in a folder of their own where no numbers were computed."""
    from tutorial_utils import bounds

    return bounds.folder() / ("real-size" if machine["virtual"] == "small" else "") / f"{slug}.json"


def write_recording(path: Path, result: dict, executed: Path, code: str):
    """A lesson's figures with the date and the versions of its run; on a CPU its outputs, of the same run."""
    from tutorial_utils import bounds

    about, slug = machine_facts()
    into = recording_file(about["machine"], slug)
    content = bounds.load(into) if into.exists() else {"lessons": {}}
    if result["figures"]:
        of_the_run = {"date": about["date"], "versions": about["versions"]}
        times = result["times"] if about["machine"]["virtual"] else ()
        figures = {name: value for name, value in result["figures"].items() if name not in times}
        row = {**of_the_run, "code": code, "machine": about["machine"], "seconds": result["seconds"],
               "figures": figures}  # fmt: skip
        kept = {**content["lessons"], result["name"]: row}
        bounds.write(into, {"machine": about["machine"], "lessons": dict(sorted(kept.items()))})
    if slug == "cpu" and executed.exists():
        unfinished = path.with_suffix(".unfinished")
        shutil.copyfile(executed, unfinished)
        unfinished.replace(path)


def digest(path: Path) -> str:
    """Of a lesson's code, but for the setup that all share: whether a recording is of the cells as they are."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code" and "setup" not in cell["metadata"].get("tags", ())]
    return hashlib.sha256("\n\n".join("".join(cell["source"]) for cell in code).encode()).hexdigest()[:12]


def say(text: str):
    """Print it, also where the terminal's encoding has not all of its letters."""
    with suppress(AttributeError):
        sys.stdout.reconfigure(errors="replace")
    print(text, flush=True)


def say_each(*shown):
    """What a notebook displays."""
    say("\n".join(map(str, shown)))


def table(results: list[dict]) -> str:
    from tutorial_utils.figures import Table, size

    def shown(figures, name, form):
        return form(figures[name]) if name in figures else "–"

    verdicts = {True: "inside", False: "outside", None: "–"}
    return str(
        Table(
            [
                {
                    "lesson": result["name"],
                    "status": result["status"],
                    "seconds": f"{result['seconds']:.0f}",
                    "baseline": shown(result["figures"], "baseline_peak_bytes", size),
                    "technique": shown(result["figures"], "technique_peak_bytes", size),
                    "memory ratio": shown(result["figures"], "memory_ratio", "{:.2f}".format),
                    "time ratio": shown(result["figures"], "time_ratio", "{:.2f}".format),
                    "bounds": verdicts[result["inside"]],
                    "reason": " ".join(result["reason"].split())[:160],
                }
                for result in results
            ]
        )
    )


def of_bf16(lesson: str) -> bool:
    """Whether it has times that differ by how fast a CPU's bf16 is."""
    from tutorial_utils import bounds

    return any("cpu-slow-bf16" in bound for bound in bounds.facts(lesson)["figures"].values())


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("run").add_argument("--only", nargs="+")
    commands.add_parser("lesson").add_argument("number")
    commands.add_parser("record").add_argument("--only", nargs="+")
    new = commands.add_parser("new")
    new.add_argument("number")
    new.add_argument("name")
    new.add_argument("kind", nargs="?", default="technique")
    execution = commands.add_parser("execute")
    for name in ("path", "executed", "wrong"):
        execution.add_argument(name, type=Path)
    arguments = parser.parse_args(given)
    if arguments.command == "new":
        try:
            made = new_lesson.make(ROOT, arguments.number, arguments.name, arguments.kind)
        except (ValueError, FileExistsError) as error:
            parser.error(str(error))
        print(*(path.relative_to(ROOT) for path in made), "now: python scripts/stamp.py", sep="\n")
        return 0
    if arguments.command == "execute":
        if arguments.path.suffix != ".ipynb" or not arguments.path.is_file():
            parser.error(f"no notebook at {str(arguments.path)!r}: give the path of one")
        return execute(arguments.path, arguments.executed, arguments.wrong)
    from tutorial_utils import bounds, machine

    here = machine.facts()
    try:
        chosen = lessons([arguments.number] if arguments.command == "lesson" else arguments.only)
    except ValueError as error:
        parser.error(str(error))
    known = here.device == "cuda" or here.backend in ("cpu", "cpu-slow-bf16") or os.environ.get("COURSE_BOUNDS")
    if arguments.command == "record" and not known:  # where cores are few, it is bf16 that is slower
        others = [path.stem for path in chosen if here.cores > machine.FEW_CORES or of_bf16(path.stem)]
        if others:
            parser.error(
                f"this machine is of class {here.backend}, the recorded times of {', '.join(others)} are of class cpu, "
                f"of {machine.FEW_CORES} cores at most and without emulated bf16: take fewer cores "
                "(taskset -c 0-3 make record), or name a folder of your own in COURSE_BOUNDS"
            )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a termination ends it as Ctrl-C does
    if arguments.command == "lesson":
        results = [run_lesson(chosen[0], keep=chosen[0])]
    else:
        if recording := arguments.command == "record":
            os.environ |= {"COURSE_RECORDING": "1", "COURSE_STRICT": "1"}
            if os.environ.pop("COURSE_BUSY", None):  # said by the notebook that records, of a moment that is over
                os.environ.pop("OMP_WAIT_POLICY", None)
        alone = recording or here.device == "cuda" or here.cores < 2 or len(chosen) < 2
        if not alone:
            os.environ.setdefault("OMP_NUM_THREADS", str(here.cores // 2))
        results = run(chosen, record=recording, at_once=1 if alone else 2)
    with undisturbed():
        about, slug = machine_facts()
        say("\n" + table(results))
        if arguments.command == "run":
            bounds.write(REPORTS / "course.json", {**about, "lessons": results})
            print("\nreports/course.json; the executed notebooks are in reports/executed")
        if arguments.command == "record":
            recorded = [result["name"] for result in results if result["status"] == "passed" and result["figures"]]
            where = os.path.relpath(recording_file(about["machine"], slug))
            print(f"\n{len(recorded)} of {len(chosen)} lessons recorded in {where}")
        if arguments.command == "lesson" or (arguments.command == "record" and slug == "cpu"):
            import stamp

            stamp.main([])
    statuses = {result["status"] for result in results}
    return 130 if "interrupted" in statuses else int("failed" in statuses)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before the first lesson
        sys.exit(130)
