import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[1] / ".github" / "workflows"
FILES = sorted([*FOLDER.glob("*.yml"), *FOLDER.glob("*.yaml")])
READ_ONLY = {"contents": "read"}
PINNED = re.compile(r"[\w.-]+(/[\w.-]+)+@[0-9a-f]{40} # v\d+(\.\d+)*")

every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)


def load(path):
    content = yaml.safe_load(path.read_text())
    content["on"] = content.pop(True)  # YAML 1.1 reads the key `on` as true
    return content


def test_schema():
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run([*command, *map(str, FILES)], capture_output=True, text=True)
    assert done.returncode == 0, f"correct the workflow files:\n{done.stdout}{done.stderr}"


@every_file
def test_actions_are_pinned(path):
    used = re.findall(r"^[^#\n]*\buses: *(.*)$", path.read_text(), re.MULTILINE)
    loose = [action for action in used if not PINNED.fullmatch(action)]
    assert not loose, f"{path.name}: write owner/action@<commit SHA of 40 digits> # v1.2.3 instead of {loose}"


@every_file
def test_permissions_are_read_only(path):
    content = load(path)
    assert content.get("permissions") == READ_ONLY, f"{path.name}: set the top-level permissions to {READ_ONLY}"
    wider = [name for name, job in content["jobs"].items() if job.get("permissions", {}) not in ({}, READ_ONLY)]
    assert not wider, f"{path.name}: remove `permissions` from the jobs {wider}"


def test_gpu_triggers():
    content = load(FOLDER / "gpu.yml")
    missing = {"schedule", "workflow_dispatch", "pull_request"} - set(content["on"])
    assert not missing, f"gpu.yml: add {sorted(missing)} to `on`"
    assert content["on"]["pull_request"] == {"types": ["labeled"]}, (
        "gpu.yml: set the pull_request types to [labeled] alone; any other runs code that nobody has read"
    )
    for name, job in content["jobs"].items():
        for condition in ("github.event.label.name == 'gpu'", "!github.event.repository.fork"):
            assert condition in job.get("if", ""), f"gpu.yml: put `{condition}` in the `if` of job {name}"


def test_gpu_runs_the_tests_and_uploads_reports():
    steps = [step for job in load(FOLDER / "gpu.yml")["jobs"].values() for step in job["steps"]]
    assert "make test" in [step.get("run") for step in steps], "gpu.yml: add the step `run: make test`"
    uploads = [
        step
        for step in steps
        if step.get("uses", "").startswith("actions/upload-artifact@") and step["with"]["path"] == "reports/"
    ]
    assert uploads, "gpu.yml: upload reports/ with actions/upload-artifact"
    assert uploads[0].get("if") == "always()", "gpu.yml: give the upload `if: always()`: a failed run needs its reports"


def test_test_all_runs_every_file_that_has_more_for_it():
    tests = Path(__file__).parent
    asks = re.compile(r"^from test_forks import EVERY|^EVERY = |COURSE_TEST_ALL\"\)", re.MULTILINE)
    more = {path.stem.removeprefix("test_") for path in tests.glob("test_*.py") if asks.search(path.read_text())}
    makefile = re.search(r"foreach part,([a-z_ ]+),", (tests.parent / "Makefile").read_text()).group(1).split()
    matrix = load(FOLDER / "test-all.yml")["jobs"]["test"]["strategy"]["matrix"]["part"]
    assert {*makefile} == more, "Makefile: ALL_OF names the files whose tests look at COURSE_TEST_ALL"
    assert {*matrix} == more | {"proofs"}, "test-all.yml: a part for each of them, and for the proofs"
