"""Run the course.

course.py run [--only 01 …]   every lesson in a fresh kernel; reports/course.json and the executed notebooks
course.py lesson 01           re-run one lesson in place and stamp its card
course.py record              run all and write facts/bounds/<machine>.json; needs no jupyter
"""

import argparse
import ast
import importlib.util
import json
import linecache
import os
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

NOTEBOOKS, REPORTS = ROOT / "notebooks", ROOT / "reports"
CELL_TIMEOUT = 300


def lessons(only: list[str] | None = None) -> list[Path]:
    """The notebooks in order. ValueError for a number that none has."""
    found = sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
    for number in only or []:
        if not any(path.name.startswith(number) for path in found):
            raise ValueError(f"lesson was {number!r}; accepted: {', '.join(p.stem[:2] for p in found)}")
    return [path for path in found if not only or any(path.name.startswith(number) for number in only)]


def run_lesson(path: Path, keep: Path | None = None) -> dict:
    """Run one lesson in a foreign folder: {name, status, reason, seconds, figures, inside}.

    keep: where the executed notebook goes, when jupyter is there to execute one.
    """
    content = json.loads(path.read_text())
    result = {"name": path.stem, "status": "passed", "reason": "", "seconds": 0.0, "figures": {}, "inside": None}
    missing = [name for name in content["metadata"]["course"]["needs"] if not importlib.util.find_spec(name)]
    if missing:
        return {**result, "status": "skipped", "reason": f"needs {', '.join(missing)}"}
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "COURSE_REPORT": str(report), "PYTHONPATH": os.pathsep.join(paths)}
        jupyter = importlib.util.find_spec("nbclient") is not None
        error = (_in_kernel if jupyter else _in_process)(path, Path(folder), environment, keep)
        if report.exists():
            written = json.loads(report.read_text())
            result |= {"figures": written["figures"], "inside": written["inside"]}
    result["seconds"] = round(time.perf_counter() - started, 1)
    if error:
        result |= {"status": "failed", "reason": error}
    return result


def _in_kernel(path, folder, environment, keep) -> str:
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
        resources={"metadata": {"path": str(folder)}},
        on_cell_execute=progress,
        extra_arguments=["--log-level=ERROR"],
    )
    error = ""
    try:
        client.execute(env=environment)
    except CellExecutionError as failure:
        error = f"{failure.ename}: {failure.evalue}"
    except Exception as failure:  # a dead kernel or a time-out fails this lesson, not the course
        error = f"{type(failure).__name__}: {failure}"
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day: noise in every diff
    notebook.metadata["language_info"] = {"name": "python"}
    if keep and not (error and keep == path):
        keep.parent.mkdir(parents=True, exist_ok=True)
        unfinished = keep.with_suffix(".unfinished")
        nbformat.write(notebook, unfinished)
        unfinished.replace(keep)
    return error


def _in_process(path, folder, environment, keep) -> str:
    command = [sys.executable, str(Path(__file__).resolve()), "cells", str(path)]
    done = subprocess.run(command, cwd=folder, env=environment, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["died"])[-1]


def run_cells(path: Path):
    """The code cells of a notebook in this process.

    A cell that lacks an optional package is left out, and so are those of its section that then miss its names.
    """
    namespace, left_out = {"__name__": "__main__"}, set()
    for number, cell in enumerate(json.loads(path.read_text())["cells"]):
        if cell["cell_type"] != "code":
            continue
        tags = set(cell["metadata"].get("tags", []))
        tree = ast.parse("".join(cell["source"]))
        linecache.cache[f"<cell {number}>"] = (0, None, "".join(cell["source"]).splitlines(True), f"<cell {number}>")
        ends_in_value = bool(tree.body) and isinstance(tree.body[-1], ast.Expr)
        last = [tree.body.pop()] if ends_in_value else []
        try:
            exec(compile(tree, f"<cell {number}>", "exec"), namespace)
            # "single" shows the value of an expression, as a notebook does of a cell's last one.
            exec(compile(ast.Interactive(last), f"<cell {number}>", "single"), namespace)
        except (ImportError, NameError) as error:
            if isinstance(error, NameError) and not tags & left_out:
                raise
            left_out |= tags
            print(f"cell {number} left out: {error}".splitlines()[0])


def machine_facts() -> tuple[dict, str]:
    """(what reports and recordings say of this machine, its slug)."""
    from tutorial_utils import machine

    here = machine.facts()
    facts = {
        "name": here.name,
        "device": here.device,
        "memory_bytes": here.memory,
        "cores": here.cores,
        "bf16": here.bf16,
    }
    return {"machine": facts, "versions": here.versions, "date": date.today().isoformat()}, here.slug


def run(paths: list[Path], keep: bool = True) -> list[dict]:
    """Run lessons in order; one that fails leaves the others' results."""
    results = []
    for path in paths:
        print(f"{path.stem} …", flush=True)
        results.append(run_lesson(path, REPORTS / "executed" / path.name if keep else None))
        last = results[-1]
        print(f"{path.stem} {last['status']} in {last['seconds']:.0f} s {last['reason'][:500]}".rstrip(), flush=True)
    return results


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
                    "reason": result["reason"][:120],
                }
                for result in results
            ]
        )
    )


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("run").add_argument("--only", nargs="+")
    commands.add_parser("lesson").add_argument("number")
    commands.add_parser("record").add_argument("--only", nargs="+")
    commands.add_parser("cells").add_argument("path", type=Path)
    arguments = parser.parse_args(given)
    if arguments.command == "cells":
        run_cells(arguments.path)
        return 0
    from tutorial_utils import bounds

    try:
        chosen = lessons([arguments.number] if arguments.command == "lesson" else arguments.only)
    except ValueError as error:
        parser.error(str(error))
    if arguments.command == "record":
        os.environ["COURSE_RECORDING"] = "1"
    if arguments.command == "lesson":
        result = run_lesson(chosen[0], keep=chosen[0])
        print(table([result]))
        import stamp

        stamp.main([])
        return result["status"] == "failed"
    results = run(chosen, keep=arguments.command == "run")
    about, slug = machine_facts()
    print("\n" + table(results))
    failed = any(result["status"] == "failed" for result in results)
    if arguments.command == "run":
        bounds.write(REPORTS / "course.json", {**about, "lessons": results})
        print("\nreports/course.json; the executed notebooks are in reports/executed")
    elif failed:
        print("\nA lesson failed: nothing recorded")
    else:
        path = bounds.folder() / f"{slug}.json"
        before = json.loads(path.read_text())["lessons"] if arguments.only and path.exists() else {}
        now = {r["name"]: {"seconds": r["seconds"], "figures": r["figures"]} for r in results if r["figures"]}
        bounds.write(path, {**about, "lessons": {**before, **now}})
        print(f"\nwrote {os.path.relpath(path)}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
