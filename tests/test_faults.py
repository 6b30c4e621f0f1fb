"""What goes wrong on readers' machines, done for real: a lesson finishes, or one line says what to do.

A lesson in small each, and of those in a process of its own a third in a run, chosen by the commit. With
COURSE_TEST_ALL=1 (make test-all) all of them, with a whole lesson.
"""

import functools
import http.server
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest.mock import patch

import course
import nbformat
import pytest
import torch
from test_forks import EVERY, without_network

from notebooks import LESSONS, ROOT, lesson, run, source
from tutorial_utils import data, measure, models, predict

SMALL = """
from tutorial_utils import machine
here = machine.start()
from tutorial_utils import bounds, data, figures, measure, models, predict
corpus, tokenizer = data.load(), data.tokenizer()
model = models.build("tiny", len(corpus.labels), "pretrained")
batch = next(iter(data.loader([corpus.train[i] for i in range(8)], tokenizer, 8, 64)))
report = measure.memory(lambda: model(**batch).loss.backward(), model, None, batch)
print(figures.memory_table({"a step × 1": report}))
predict.step_memory("tiny", 8, 64, card="T4")
"""
WHOLE = f"""
import pathlib, sys
sys.path.insert(0, {str(ROOT / "scripts")!r})
import course
course.run_cells(pathlib.Path({str(LESSONS[1])!r}))
"""
PRINT = "\nprint('finished')\n"
HUB = """
from tutorial_utils import data, models
data.load("hub:owner/name")
models.build("distilbert-base-uncased", 2, "pretrained")
"""
COMMIT = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def in_turn(number: int):
    """A third of the tests in a run, chosen by the commit."""
    return pytest.mark.skipif(not EVERY and int(COMMIT or "0", 16) % 3 != number, reason="the turn of others")


unshare = pytest.mark.skipif(not without_network(), reason="this machine allows no namespaces of its own")


def take(folder: Path, code=WHOLE if EVERY else SMALL, prefix=(), **variables):
    """Run a lesson in a folder with a home and a cache of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    (script := Path(tempfile.mkdtemp(dir=folder), "lesson.py")).write_text(code + PRINT, encoding="utf-8")
    command = [*prefix, sys.executable, str(script)]
    return subprocess.run(command, cwd=folder, env=environment | variables, capture_output=True, text=True,
                          encoding="utf-8", errors="replace", timeout=600)  # fmt: skip


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A cache that has the texts, the user's if there are: to read them from the libraries takes ten seconds."""
    folder = tmp_path_factory.mktemp("filled")
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tutorial_utils"
    for texts in users.glob("docstrings-*"):
        shutil.copytree(texts, folder / users.name / texts.name)
    with patch.dict(os.environ, XDG_CACHE_HOME=str(folder)):
        data.load()
    return folder


def finished(done) -> str:
    """What it said. It must have finished, and said nothing of a traceback."""
    assert done.returncode == 0 and "finished" in done.stdout, done.stdout[-1000:] + done.stderr[-3000:]
    assert "Traceback" not in done.stdout + done.stderr
    return done.stdout


@unshare
@in_turn(0)
def test_no_network(tmp_path):
    said = finished(take(tmp_path, HUB, prefix=without_network()))
    assert said.count("the hub cannot be reached") == 2


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub that is there and does not work, or only as long as it is asked whether it is there."""

    def do_GET(self):
        if self.server.answers and self.path.startswith("/api/models/google-bert"):
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(b'{"id": "google-bert/bert-base-uncased", "siblings": [], "tags": []}')
        elif self.server.fault == "errs":
            self.send_error(503)
        elif self.server.fault == "is slow":
            time.sleep(60)
        else:
            self.send_response(200)
            for name, value in (("Content-Type", "application/json"), ("ETag", '"a"'), ("X-Repo-Commit", "0" * 40)):
                self.send_header(name, value)
            self.send_header("Content-Length", "100000")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(b'{"id": "a"')
                self.wfile.flush()
            self.connection.close()

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


FAULTS = [("errs", False), ("is slow", False), ("breaks off", False), ("errs", True), ("breaks off", True)]


@pytest.mark.parametrize(
    ("fault", "answers"), [pytest.param(*fault, marks=in_turn(turn % 3)) for turn, fault in enumerate(FAULTS)]
)
def test_a_hub_that(fault, answers, filled, tmp_path):
    """It is asked first whether it is there: what it does after that is another matter."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.fault, server.answers, server.daemon_threads = fault, answers, True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    started = time.monotonic()
    hub = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path)}
    said = finished(take(tmp_path, HUB, XDG_CACHE_HOME=str(filled), **hub))
    assert said.count("the hub cannot be reached") == 2
    # Its own client tries an error six times, for each file that it wants.
    assert time.monotonic() - started < (180 if answers else 90), "a hub that does not answer must not hold up a lesson"
    server.shutdown()


def said_by_loading(capsys) -> str:
    capsys.readouterr()
    data.load()
    return capsys.readouterr().out


@in_turn(0)
def test_a_cache_that_is_half_written(filled, tmp_path, monkeypatch, capsys):
    shutil.copytree(filled, tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    whole = data.load().train[0]
    for ending in (b"", b"\0"):  # cut off, or of its full size with nothing behind: both are left by a full disk
        for file in (tmp_path / "cache").rglob("*.arrow"):
            content = file.read_bytes()
            begun = len(content) * 9 // 10
            file.write_bytes(content[:begun] + ending * (len(content) - begun))
        assert "The texts in the cache cannot be read" in (
            finished(take(tmp_path)) if ending else said_by_loading(capsys)
        )
    assert data.load().train[0] == whole
    assert not capsys.readouterr().out, "the cache was not mended"


def mounted(folder: Path, options: str) -> list[str]:
    """A prefix under which a folder is a file system of its own, with these options."""
    folder.mkdir()
    return [
        "unshare",
        "-m",
        "sh",
        "-c",
        f'mount -t tmpfs -o {options} none "{folder}" && cd "{folder}" && exec "$@"',
        "sh",
    ]


@unshare
@in_turn(1)
def test_a_full_disk(tmp_path):
    said = finished(take(tmp_path, prefix=mounted(tmp_path / "cache", "size=200k")))
    assert "The texts stay in memory (No space left on device)" in said


@unshare
@in_turn(2)
def test_a_home_and_a_working_folder_that_are_read_only(tmp_path):
    home = tmp_path / "home"
    prefix = mounted(home, "ro")
    said = finished(take(tmp_path, prefix=prefix, HOME=str(home), XDG_CACHE_HOME=str(home / ".cache")))
    assert "The texts stay in memory (Read-only file system)" in said


@in_turn(1)
def test_one_cache_and_two_kernels(tmp_path):
    results = []
    both = [threading.Thread(target=lambda: results.append(take(tmp_path, SMALL))) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert len(results) == 2, "one of the two did not end"
    for done in results:
        finished(done)
    assert len(list((tmp_path / "cache" / "tutorial_utils").iterdir())) == 1, "something half-made was left"


@in_turn(2)
def test_a_kernel_killed_while_it_fills_the_cache(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    process = subprocess.Popen([sys.executable, "-c", SMALL], cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    while process.poll() is None and not any((tmp_path / "cache").rglob("*.arrow")):
        time.sleep(0.01)
    assert process.poll() is None, "it ended before it wrote to the cache: nothing was killed"
    process.kill()
    process.wait()
    finished(take(tmp_path))


class Interrupt:
    """Ctrl-C after so many seconds, and again as people do: Python swallows one that comes inside a __del__."""

    def __init__(self, seconds):
        self.seconds, self.over = seconds, threading.Event()
        self.thread = threading.Thread(target=self.press)

    def press(self):
        while not self.over.wait(self.seconds):
            os.kill(os.getpid(), signal.SIGINT)
            self.seconds = 10

    def __enter__(self):
        self.before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.thread.start()

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()
        signal.signal(signal.SIGINT, self.before)


REPLACED = {
    (owner, name): getattr(owner, name)
    for owner, names in (
        (torch.nn.functional, ("scaled_dot_product_attention", "dropout", "softmax", "layer_norm", "cross_entropy")),
        (torch, ("pow",)),
        (torch.Tensor, ("to", "cuda")),
        (torch.utils, ("swap_tensors",)),
        (torch.amp.GradScaler, ("__init__", "_maybe_opt_step")),
        (torch.amp.autocast_mode.autocast, ("__init__",)),
    )
    for name in names
}


def prediction():
    return predict.step_memory("bert-base-uncased", 8, 128, card="T4", precision="fp16", checkpointing=1)


@functools.cache
def uninterrupted() -> tuple[int, float]:
    """What is predicted, and in how many seconds."""
    prediction()  # imports
    started = time.perf_counter()
    return prediction().peak, time.perf_counter() - started


@pytest.mark.parametrize("part", [0.05, 0.2, 0.4, 0.6, 0.8, 0.95])
def test_an_interrupted_prediction_leaves_torch_as_it_was(part):
    (expected, seconds), started = uninterrupted(), time.perf_counter()
    with pytest.raises(KeyboardInterrupt), Interrupt(part * seconds):
        while time.perf_counter() < started + 300:  # the machine's speed must not decide whether it is hit
            prediction()
    for (owner, name), function in REPLACED.items():
        assert getattr(owner, name) is function, f"{owner.__name__}.{name} was not put back"
    assert prediction().peak == expected


@pytest.mark.parametrize("seconds", [0.02, 0.1, 0.3])
def test_an_interrupted_measurement_measures_the_same_afterwards(seconds):
    model = models.build("tiny")
    ids = torch.ones(16, 128, dtype=torch.long)

    def ask():
        model.zero_grad()
        return measure.memory(lambda: model(ids).logits.sum().backward(), model, None, [ids]).peak

    ask()
    expected, started = ask(), time.perf_counter()
    with pytest.raises(KeyboardInterrupt), Interrupt(seconds):
        while time.perf_counter() < started + 60:
            ask()
    assert ask() == expected
    assert not torch.nn.modules.module._global_forward_hooks, "a hook was left"


def test_cells_out_of_order_spoil_nothing():
    """Backwards, each cell that misses a name says which; then in order they hold."""
    cells, namespace, missing = [source(cell) for cell in lesson("01").needed_for("proof")], {}, 0
    for code in reversed(cells):
        try:
            run(code, namespace)
        except NameError:
            missing += 1
    assert missing, "no cell depends on another: this tests nothing"
    for code in cells:
        said = run(code, namespace)
    assert said and all(line.endswith(": close (1e-6)") for line in said.splitlines())


@pytest.mark.skipif(not EVERY, reason="a whole lesson twice: make test-all")
@pytest.mark.parametrize("spoiled", ["interrupted", "backwards"])
def test_run_all_after(spoiled, tmp_path):
    """In one kernel: a lesson interrupted in each of its longer cells, or run backwards; then Run All."""
    from nbclient import NotebookClient

    notebook = nbformat.read(LESSONS[1], as_version=4)
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}, allow_errors=True)
    with client.setup_kernel(env={**os.environ, "PYTHONPATH": str(ROOT)}):
        cells = [(number, cell) for number, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
        for number, cell in reversed(cells) if spoiled == "backwards" else cells:
            timer = threading.Timer(0.3, client.km.interrupt_kernel)
            if spoiled == "interrupted" and number > cells[1][0]:
                timer.start()
            client.execute_cell(cell, number)
            timer.cancel()
        client.allow_errors = False
        for number, cell in cells:
            client.execute_cell(cell, number)


@pytest.mark.skipif(not EVERY, reason="lesson 14, two minutes: make test-all")
def test_no_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("CC", "no-such-compiler")
    result = course.run_lesson(next(path for path in LESSONS if path.stem.startswith("14")))
    assert result["status"] == "passed", result["reason"]


@in_turn(0)
def test_a_path_with_spaces_and_other_letters(tmp_path):
    folder = tmp_path / "mein Kurs für λ"
    folder.mkdir()
    (folder / "tutorial_utils").symlink_to(ROOT / "tutorial_utils")
    finished(take(folder, PYTHONPATH=str(folder), TMPDIR=str(folder)))


@in_turn(1)
def test_a_locale_that_is_not_utf_8(tmp_path):
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    in_a_kernel = "import sys\nsys.stdout.reconfigure(encoding='utf-8')  # as a kernel's is\n"
    templates = "\nimport torch._inductor.lowering  # torch opens its own templates in the locale's encoding\n"
    finished(take(tmp_path, in_a_kernel + (WHOLE if EVERY else SMALL) + templates, **ascii_only))
    report = {"name": "01", "status": "passed", "reason": "×", "seconds": 1, "figures": {}, "inside": None}
    path = f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r})"
    code = f"{path}; import course; course.say(course.table([{report}]))"
    assert "01" in finished(take(tmp_path, code, **ascii_only))
