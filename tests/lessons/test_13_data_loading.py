import os
import pathlib
import subprocess
import sys
import time
import warnings

import numpy
import pytest
import torch
from stranger import Ratings, regressor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from notebooks import copied, lesson, proof_fails, run, source
from tutorial_utils import bounds

LESSON = lesson("13")
COPIED = copied(LESSON)
make_loader, idle_share = COPIED["make_loader"], COPIED["idle_share"]
OF_ORDER = "RandomSampler(dataset, generator=torch.Generator().manual_seed(seed)) if shuffle"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (OF_ORDER, "RandomSampler(dataset) if shuffle"),
        ("sampler=sampler, num_workers", "shuffle=shuffle, num_workers"),
        ("sampler=sampler, num_workers", "num_workers"),
        ("column[index] for name", "column[index - (get_worker_info() is not None)] for name"),
        ("{name: column[index]", "{name: column[numpy.random.randint(len(self))]"),
    ],
    ids=[
        "an order without a seed",
        "one generator for the order and the workers",
        "not shuffled",
        "a worker changes a value",
        "rows drawn at random",
    ],
)
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


@pytest.fixture(autouse=True)
def forked():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two that spin while they wait take each other's time where something else runs
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        yield
    torch.set_num_threads(threads)


class Slow(Ratings):
    """A stranger's data set whose rows take their time."""

    def __getitem__(self, index):
        time.sleep(0.004)
        return super().__getitem__(index)


def training():
    model = regressor()
    model.eval()  # no dropout: what differs would come from the loader
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []

    def step(batch):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        time.sleep(0.03)  # a device that leaves the cores to the workers

    return step, losses


@pytest.mark.alone
def test_copied():
    """A regression on a data set of its own: the same losses with workers, and hardly any waiting.

    By the best epoch of six, since the workers need processors that something else may have in the others.
    """
    shares, found = {}, {}
    for workers, best in ((0, max), (3, min)):
        step, found[workers] = training()
        loader = make_loader(Slow(64), 8, shuffle=True, workers=workers)
        shares[workers] = best(idle_share(loader, step)[0] for _ in range(6))
    assert found[0] == found[3] and len(found[0]) == 48
    assert sum(found[0][-8:]) < sum(found[0][:8])
    assert shares[0] > 0.3 and shares[3] < 0.6 * shares[0]


@pytest.mark.alone
def test_idle_share_is_the_share_that_is_waited():
    """A loader that waits as long as each step works."""

    def batches():
        for _ in range(8):
            time.sleep(0.02)
            yield None

    share, seconds = idle_share(batches(), lambda _: time.sleep(0.02))
    assert 0.4 < share < 0.6 and seconds > 0.3
    assert idle_share([None] * 8, lambda _: time.sleep(0.02))[0] < 0.05


def test_settings_follow_the_machine(monkeypatch):
    alone, two = make_loader(Ratings(8), 4, workers=0), make_loader(Ratings(8), 4)
    assert (alone.num_workers, alone.persistent_workers, alone.prefetch_factor) == (0, False, None)
    assert (two.num_workers, two.persistent_workers, two.prefetch_factor) == (2, True, 2)
    assert two.pin_memory == torch.cuda.is_available()
    assert make_loader(Ratings(8), 4, persistent_workers=False, prefetch_factor=5).prefetch_factor == 5
    # A GPU, imitated: the answer of torch is replaced.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert make_loader(Ratings(8), 4, workers=0).pin_memory


def test_idle_share_waits_for_the_gpu(monkeypatch):
    """A GPU, imitated: work that goes on after the step has returned ends in synchronize."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: time.sleep(0.02))
    share, _ = idle_share([None] * 5, lambda _: None)
    assert share < 0.1


class Noise(Dataset):
    def __init__(self):
        self.rng = numpy.random.default_rng(0)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return int(self.rng.integers(2**40))


class Numbers(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        yield from range(worker.id, 10, worker.num_workers) if worker else range(10)


def test_a_generator_of_the_data_set_is_seeded_anew_in_each_worker():
    loader = make_loader(Noise(), 4, workers=2)
    drawn = [number for _ in range(2) for batch in loader for number in batch.tolist()]
    assert len(set(drawn)) == 16
    again = make_loader(Noise(), 4, workers=2)
    assert drawn == [number for _ in range(2) for batch in again for number in batch.tolist()]
    other = make_loader(Noise(), 4, workers=2, seed=1)
    assert not set(drawn) & {number for batch in other for number in batch.tolist()}


def test_a_stream():
    for workers in (0, 2, 3):
        found = [int(number) for batch in make_loader(Numbers(), 2, workers=workers) for number in batch]
        assert sorted(found) == list(range(10))


def test_every_text_once_and_another_order_in_each_epoch():
    loader = make_loader(range(20), 6, shuffle=True, workers=2)
    first, second = (torch.cat(list(loader)).tolist() for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(20)) and first != second


def test_the_arithmetic_of_the_idle_share():
    """The formula against a simulation, batch by batch, of workers that make batches in turn."""
    namespace = {"rows": [None] * 96, "BATCH": 8, "figures": None}
    cell = source(next(cell for cell in LESSON.code if "def computed_idle" in source(cell)))
    run(cell.split("\n\n\nfigures.")[0], namespace)

    def simulated(load, workers, batches=12):
        made, clock = [0.0] * workers, 0.0
        for number in range(batches):
            worker = number % workers
            made[worker] += load
            clock = max(clock, made[worker]) + 1  # the step takes 1
        return 1 - batches / clock

    for load in (0.5, 1, 2, 4):
        for workers in (1, 2, 4):
            assert namespace["computed_idle"](load, 1, workers) == pytest.approx(simulated(load, workers), abs=0.04)
    assert namespace["computed_idle"](2, 1, 0) == pytest.approx(2 / 3)


def test_a_system_that_does_not_fork_by_default():
    """macOS and Python 3.14, imitated: the setup says it and chooses fork."""
    cell = next(source(cell) for cell in LESSON.code if "set_start_method" in source(cell))
    part = cell[cell.index("if multiprocessing") : cell.index("if here.device")]
    code = f"import multiprocessing\nmultiprocessing.set_start_method('spawn')\n{part}"
    code += "print(multiprocessing.get_start_method())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "workers are forked here" in done.stdout and done.stdout.split()[-1] == "fork"


def test_without_proc_memory_one_line_says_so():
    growth = next(source(cell) for cell in LESSON.code if "grown = " in source(cell))
    own = next(source(cell) for cell in LESSON.code if "def private_memory" in source(cell))

    class Nowhere:
        def __init__(self, *_):
            pass

        def exists(self):
            return False

    assert run(growth, {"Path": Nowhere}).startswith("left out: ")
    namespace = {"Path": Nowhere}
    assert run(own[own.index("if Path(") :], namespace).startswith("left out: ")


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="this system does not tell private memory")
def test_private_memory_is_what_a_process_wrote():
    """A forked process that writes 32 MiB has so much more for itself than one that reads them."""
    import multiprocessing

    own = next(source(cell) for cell in LESSON.code if "def private_memory" in source(cell))
    namespace = {"Path": pathlib.Path}
    run(own[: own.index("\n\n\n")], namespace)
    numbers, forked, sizes = numpy.ones(2**22), multiprocessing.get_context("fork"), []
    for work in (numbers.sum, lambda: numbers.fill(2)):
        done, end = forked.Event(), forked.Event()
        process = forked.Process(target=lambda work=work, done=done, end=end: (work(), done.set(), end.wait(30)))
        process.start()
        assert done.wait(30)
        sizes.append(namespace["private_memory"](process))
        end.set()
        process.join()
    assert 31 * 2**20 < sizes[1] - sizes[0] < 36 * 2**20


@pytest.mark.alone
def test_the_callback_tells_what_a_trainer_waits():
    """Its moments in the Trainer's order: half of the time is waited, what comes before and after does not count."""
    from transformers import TrainerCallback

    cell = next(source(cell) for cell in LESSON.code if "class IdleShare" in source(cell))
    namespace = {"TrainerCallback": TrainerCallback, "time": time, "torch": torch}
    run(cell, namespace)
    idle = namespace["IdleShare"]()
    for _ in range(2):
        idle.on_epoch_begin(None, None, None)
        for _ in range(3):
            time.sleep(0.03)
            idle.on_step_begin(None, None, None)
            time.sleep(0.03)
            idle.on_step_end(None, None, None)
        time.sleep(0.1)
    assert 0.17 < idle.waited < 0.3 and 0.4 < idle.waited / (idle.waited + idle.busy) < 0.6
    assert namespace["IdleShare"].waited == 0


def test_the_pinned_copy_needs_a_gpu():
    """On a CPU the figure is not expected and its claim stays open; on a GPU it is bounded."""
    times = ["time_ratio", "time_ratio_4_workers", "time_ratio_computing", "time_ratio_ready"]
    rows = bounds.claims(LESSON.name, dict.fromkeys(times, 0.5) | {"memory_ratio": 1.0}, {})
    assert [row["verdict"] for row in rows] == ["holds"] * 5 + ["open: needs a GPU"]
    expected = bounds._bounds(LESSON.name)["pinned_copy_speedup"]
    assert "cpu" not in expected and "cuda" in expected


@pytest.mark.skipif(not hasattr(os, "fork"), reason="workers are forked in the lesson")
def test_the_loader_keeps_no_process():
    """What a lesson starts ends with it: workers go when their loader does."""
    import multiprocessing

    before = set(multiprocessing.active_children())
    loader = make_loader(Ratings(8), 4, workers=2)
    list(loader)
    assert len(set(multiprocessing.active_children()) - before) == 2
    del loader
    time.sleep(0.2)
    assert not set(multiprocessing.active_children()) - before
