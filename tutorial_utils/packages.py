"""What is missing here: added from the kit or the network, or left out with what needs it."""

import importlib.metadata
import importlib.util
import os
import re
import site
import subprocess
import symtable
import sys
import tempfile
from pathlib import Path

from .check import accept

# peft makes no LoRA layer beside an older torchao, which Kaggle and Colab have. Source: peft's import_utils.py.
OLDEST_TORCHAO = (0, 16)

may_install = False  # from the network; set by `machine.start`
left_out: dict[str, str] = {}  # package → what this lesson leaves out without it
_unmade: set[str] = set()  # names that the cells would have made that were left out


def need(package: str, what: str) -> bool:
    """Whether a package is here; if not, it is taken from the kit, or from the network if the lesson may.

    Where it cannot be had, a line says that `what` is left out, and the runner's table will.
    """
    accept(isinstance(package, str) and package.isidentifier(), "package", package, "the name that is imported")
    hidden = package in sys.modules and sys.modules[package] is None
    if not hidden and (importlib.util.find_spec(package) or _install(package)):
        return True
    leave_out(package, what, "too old, or left out above" if hidden else "not installed")
    return False


def leave_out(package: str, what: str, why: str):
    """Say in a line, and in the runner's table, what this lesson leaves out; from here on the package is not there."""
    sys.modules[package] = None
    left_out[package] = what
    print(f"left out: {what}. {package}: {why}")
    _excuse_cells()


def excused(error: BaseException, source: str) -> bool:
    """Whether a cell failed for what is left out: a package, or a name of a cell that failed so. Says it in a line."""
    lacks = error.name if isinstance(error, NameError) and error.name in _unmade else None
    cause = error if isinstance(error, ImportError) else None
    while cause is not None and lacks is None:
        lacks = next((name for name in left_out if name in f"{getattr(cause, 'name', '')} {cause}"), None)
        cause = cause.__cause__ or cause.__context__
    if lacks is None:
        return False
    print(f"left out: this cell, which needs {lacks}")
    names = symtable.symtable(source, "cell", "exec").get_symbols()
    _unmade.update(name.get_name() for name in names if name.is_assigned() or name.is_imported())
    return True


def _excuse_cells():
    """In a notebook, let a cell that lacks what is left out end in that line, and the next ones run."""
    shell = sys.modules["IPython"].get_ipython() if sys.modules.get("IPython") else None
    if shell is None or shell.custom_exceptions:
        return
    failed = []

    def judge(result):
        if failed:
            kind, error, traceback, offset = failed.pop()
            if excused(error, shell.transform_cell(result.info.raw_cell)):  # Python, also where it has magics
                result.error_in_exec = None
            else:
                shell.showtraceback((kind, error, traceback), tb_offset=offset)

    shell.set_custom_exc(
        (ImportError, NameError), lambda _, *caught, tb_offset=None: failed.append((*caught, tb_offset))
    )
    shell.events.register("post_run_cell", judge)


def hide_old_torchao():
    """Kaggle and Colab have one beside which peft refuses to make adapters."""
    if importlib.util.find_spec("torchao"):
        version = importlib.metadata.version("torchao")
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_TORCHAO:
            sys.modules["torchao"] = None


def _wheels() -> list[Path]:
    """The folders of wheels in the kit: attached, named by COURSE_KIT, or uploaded beside the notebook."""
    kit = Path(os.environ.get("COURSE_KIT", "/kaggle/input"))
    # Not deeper: a competition's data may be a million files.
    found = [path for depth in ("", "*/", "*/*/", "*/*/*/") for path in kit.glob(f"{depth}wheels") if path.is_dir()]
    return [*found, *(path for path in (Path("wheels"), Path("kit/wheels"), Path()) if any(path.glob("*.whl")))]


def _install(package: str) -> bool:
    """Add a package, from the kit or the network, without replacing anything that is here."""
    folders = _wheels()
    sources = [("the kit", ["--no-index", *(f"--find-links={at.resolve()}" for at in folders)])] if folders else []
    if may_install:
        sources.append(("the network", ["--retries=1", "--timeout=10"]))
    for source, options in sources:
        with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as constraints:
            constraints.write("\n".join(_installed()))
            constraints.flush()
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            command = [*pip, f"--constraint={constraints.name}", *options, package]
            done = subprocess.run(command, capture_output=True, text=True)
        importlib.invalidate_caches()
        if done.returncode == 0 and not importlib.util.find_spec(package):
            site.addsitedir(site.getusersitepackages())  # where pip installs if the environment is read-only
        if done.returncode == 0 and importlib.util.find_spec(package):
            print(f"{package} {importlib.metadata.version(package)}: installed from {source}")
            return True
        print(f"{package} could not be installed from {source}:", *done.stderr.strip().splitlines()[-1:])
    return False


def _installed() -> list[str]:
    """name==version of each package, as it is imported: Colab has some twice, from Debian in other versions."""
    found = {}
    for one in importlib.metadata.distributions():  # in the order of sys.path
        if name := one.metadata["Name"]:
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), f"{name}=={one.version}")
    return list(found.values())
