import multiprocessing
import os
import pathlib
import re
import subprocess
import sys
import time
import warnings
from types import SimpleNamespace

import numpy
import pytest
import strangers
import torch
from stranger import Ratings, regressor
from strangers import competition, counted, same_weights
from torch.utils.data import Dataset, IterableDataset, RandomSampler, get_worker_info

from notebooks import copied, lesson, proof_fails, run, source
from tutorial_utils import bounds

LESSON = lesson("13")
COPIED = copied(LESSON)
worker_loader, watched = COPIED["worker_loader"], COPIED["watched"]
OF_ORDER = 'options["sampler"] = RandomSampler(dataset, generator=torch.Generator().manual_seed(seed))'


def cell(name):
    """The source of the code cell with this id."""
    return next(source(cell) for cell in LESSON.code if cell["id"] == name)


def test_a_sampler_of_ones_own_is_not_dropped():
    mine = torch.utils.data.SequentialSampler(range(8))
    assert worker_loader(range(8), 4, shuffle=True, sampler=mine).sampler is mine
    assert type(worker_loader(range(8), 4, shuffle=True, sampler=None).sampler) is RandomSampler, "it must be shuffled"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (OF_ORDER, 'options["sampler"] = RandomSampler(dataset)'),
        (OF_ORDER, 'options["shuffle"] = True'),
        (OF_ORDER, "pass"),
        ("self.rows[index], dict(", "self.rows[index - (get_worker_info() is not None)], dict("),
        ("self.rows[index], dict(", "self.rows[numpy.random.randint(len(self))], dict("),
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


def share_of(loader, step=lambda batch: None):
    seconds = {}
    for batch in watched(loader, seconds):
        step(batch)
    return seconds["waiting"] / sum(seconds.values())


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
        loader = worker_loader(Slow(64), 8, shuffle=True, workers=workers)
        shares[workers] = best(share_of(loader, step) for _ in range(6))
    assert found[0] == found[3] and len(found[0]) == 48
    assert sum(found[0][-8:]) < sum(found[0][:8])
    assert shares[0] > 0.3 and shares[3] < 0.6 * shares[0]


@pytest.mark.alone
def test_watched_tells_what_is_waited():
    """A loader that waits as long as each step works; and every batch goes through, in its order."""

    def batches():
        for number in range(8):
            time.sleep(0.02)
            yield number

    found, seconds = [], {}
    for batch in watched(batches(), seconds):
        found.append(batch)
        time.sleep(0.02)
    assert found == [*range(8)] and seconds["working"] > 0.12 and sum(seconds.values()) > 0.3
    assert 0.4 < seconds["waiting"] / sum(seconds.values()) < 0.6
    assert share_of([None] * 8, lambda _: time.sleep(0.02)) < 0.05


def test_watched_begins_anew_with_each_epoch():
    seconds = {"waiting": 100.0, "working": 100.0}
    assert list(watched([1, 2], seconds)) == [1, 2] and sum(seconds.values()) < 1


def test_settings_follow_the_machine(monkeypatch):
    alone, two = worker_loader(Ratings(8), 4), worker_loader(Ratings(8), 4, workers=2)
    assert (alone.num_workers, alone.persistent_workers, alone.prefetch_factor) == (0, False, None)
    assert (two.num_workers, two.persistent_workers, two.prefetch_factor) == (2, True, 2)
    assert two.pin_memory == torch.cuda.is_available()
    other = worker_loader(Ratings(8), 4, workers=2, persistent_workers=False, prefetch_factor=5, drop_last=True)
    assert (other.persistent_workers, other.prefetch_factor, other.drop_last) == (False, 5, True)
    assert worker_loader(Ratings(8), 4, sampler=[5, 3]).sampler == [5, 3]
    # A GPU, imitated: the answer of torch is replaced.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert worker_loader(Ratings(8), 4).pin_memory


def test_watched_waits_for_the_gpu(monkeypatch):
    """A GPU, imitated: work that goes on after the step has returned ends in synchronize."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: time.sleep(0.02))
    assert share_of([None] * 5) < 0.1


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


def test_seeds_of_workers_follow_the_seed_of_the_loader():
    """The page's function gives the data set's own generator another state in each worker, the same in each run."""

    def seed_own(_):
        worker = get_worker_info()
        worker.dataset.rng = numpy.random.default_rng(worker.seed)

    def drawn(**options):
        loader = worker_loader(Noise(), 4, workers=2, worker_init_fn=seed_own, **options)
        return [number for _ in range(2) for batch in loader for number in batch.tolist()]

    assert "worker.dataset.rng = numpy.random.default_rng(worker.seed)" in cell("pitfall-seeds")
    assert len({*drawn()}) == 16 and drawn() == drawn() and not {*drawn()} & {*drawn(seed=1)}


def test_a_stream():
    for workers in (0, 2, 3):
        found = [int(number) for batch in worker_loader(Numbers(), 2, workers=workers) for number in batch]
        assert sorted(found) == list(range(10))


def test_every_text_once_and_another_order_in_each_epoch():
    loader = worker_loader(range(20), 6, shuffle=True, workers=2)
    first, second = (torch.cat(list(loader)).tolist() for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(20)) and first != second
    assert torch.cat(list(worker_loader(range(20), 6, workers=3))).tolist() == [*range(20)]


def test_the_arithmetic_of_the_idle_share():
    """The formula and the picture against a simulation, batch by batch, of workers that make batches in turn."""
    namespace = {"rows": [None] * 96, "BATCH": 8, "figures": SimpleNamespace(strips=lambda *_: None)}
    run(cell("arithmetic"), namespace)
    run(cell("mechanism"), namespace)

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
            assert namespace["who_works_when"](load, 1, workers, 12)[1] == pytest.approx(simulated(load, workers))
    assert namespace["computed_idle"](2, 1, 0) == pytest.approx(2 / 3)
    assert namespace["who_works_when"](2, 1, 0)[1] == pytest.approx(2 / 3)


def test_a_system_that_does_not_fork_by_default():
    """macOS and Python 3.14, imitated: the setup says it and chooses fork."""
    code = f"import multiprocessing\nmultiprocessing.set_start_method('spawn')\n{cell('fork')}"
    code += "\nprint(multiprocessing.get_start_method())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "workers are forked here" in done.stdout and done.stdout.split()[-1] == "fork"


def test_without_proc_memory_one_line_says_so():
    class Nowhere:
        def __init__(self, *_):
            pass

        def exists(self):
            return False

    assert run(cell("growth"), {"Path": Nowhere}).startswith("left out: ")
    assert run(cell("main-memory"), {"told": False}).startswith("left out: ")


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="this system does not tell shared memory")
def test_main_memory_counts_what_a_process_wrote():
    """A forked process that writes 32 MiB adds so much more than one that reads them."""
    namespace = {"Path": pathlib.Path, "multiprocessing": multiprocessing, "re": re}
    run(cell("memory"), namespace)
    numbers, forked, sizes = numpy.ones(2**22), multiprocessing.get_context("fork"), []
    for work in (numbers.sum, lambda: numbers.fill(2)):
        done, end = forked.Event(), forked.Event()
        process = forked.Process(target=lambda work=work, done=done, end=end: (work(), done.set(), end.wait(30)))
        process.start()
        assert done.wait(30)
        sizes.append(namespace["main_memory"]())
        end.set()
        process.join()
    assert 30 * 2**20 < sizes[1] - sizes[0] < 36 * 2**20


@pytest.mark.alone
def test_the_callback_tells_what_a_trainer_waits():
    """Its moments in the Trainer's order: half of the time is waited, what comes before and after does not count."""
    namespace = {"time": time, "torch": torch}
    run(cell("idle-share-callback"), namespace)
    idle = namespace["IdleShare"]()
    for _ in range(2):
        idle.on_epoch_begin(None, None, None)
        for _ in range(3):
            time.sleep(0.03)
            idle.on_step_begin(None, None, None)
            time.sleep(0.03)
            idle.on_step_end(None, None, None)
            time.sleep(0.1)  # an evaluation in the epoch
            idle.on_evaluate(None, None, None)
        time.sleep(0.1)
    assert 0.17 < idle.waited < 0.3 and 0.4 < idle.waited / (idle.waited + idle.busy) < 0.6
    assert namespace["IdleShare"].waited == 0


def test_what_is_not_measured_leaves_a_claim_open():
    """The pinned copy needs a GPU, where it is bounded; main memory a system that tells what processes share."""
    times = ["time_ratio", "time_ratio_4_workers", "time_ratio_computing", "time_ratio_ready"]
    *timed, memory, pinned = bounds.claims(LESSON.name, dict.fromkeys(times, 0.5), {})
    assert [row["verdict"] for row in timed] == ["holds (measured)"] * 4
    assert memory["verdict"].startswith("open: needs a system") and pinned["verdict"] == "open: needs a GPU"
    expected = bounds._bounds(LESSON.name)["pinned_copy_speedup"]
    assert "cpu" not in expected and "cuda" in expected


@pytest.mark.skipif(not hasattr(os, "fork"), reason="workers are forked in the lesson")
def test_the_loader_keeps_no_process():
    """What a lesson starts ends with it: workers go when their loader does."""
    before = set(multiprocessing.active_children())
    loader = worker_loader(Ratings(8), 4, workers=2)
    list(loader)
    assert len(set(multiprocessing.active_children()) - before) == 2
    del loader
    time.sleep(0.2)
    assert not set(multiprocessing.active_children()) - before


IN_ORDER = {"shuffle=True": "shuffle=False", "shuffle=shuffle": "shuffle=False"}


def with_workers(name, edits, workers, start=strangers.load):
    """A stranger's script with the copied cell, as the page says, and so many workers."""
    edits = {old: new.replace("WORKERS", str(workers)) for old, new in edits.items()}
    return start(name, LESSON.source("copy") + "\n\nseconds = {}\n", edits)


def in_order(edits):
    """The same edits where nothing is shuffled."""
    for old, new in IN_ORDER.items():
        edits = {its: text.replace(old, new) for its, text in edits.items()}
    return edits


def check_seconds(script):
    assert script.seconds["waiting"] > 0 < script.seconds["working"]


def test_in_a_strangers_classifier(stranger_files, capsys):
    files = dict(train=stranger_files / "train.csv", valid=stranger_files / "valid.csv")
    arguments = SimpleNamespace(model=stranger_files / "bert", **files, epochs=2, batch_size=32)
    loader = "return DataLoader(rows, batch_size, shuffle=shuffle,"
    edits = {
        loader: "return worker_loader(rows, batch_size, shuffle=shuffle, workers=WORKERS,",
        "train_one_epoch(model, train_loader, ": "train_one_epoch(model, watched(train_loader, seconds), ",
    }
    shuffled = [with_workers("classifier", edits, workers) for workers in (0, 2)]
    plain = strangers.load("classifier", "", {loader: in_order({"": loader})[""]})
    (before, tokens), (after, same_tokens), (one, _), (two, _) = (
        counted(script, arguments) for script in (plain, with_workers("classifier", in_order(edits), 2), *shuffled)
    )
    check_seconds(shuffled[1])
    torch.manual_seed(42)
    start = plain.AutoModelForSequenceClassification.from_pretrained(stranger_files / "bert", num_labels=4)
    assert tokens == same_tokens and same_weights(before, after, start)
    assert all(map(torch.equal, one.parameters(), two.parameters())) and not same_weights(one, before, start)
    shown = capsys.readouterr().out.splitlines()
    assert shown[:2] == shown[2:4] and shown[4:6] == shown[6:], "the same accuracies"


TRAIN, VALID, TEST = (
    "DataLoader(TextDataset(train, tokenizer), CFG.batch_size, shuffle=True, drop_last=True)",
    "DataLoader(TextDataset(valid, tokenizer), 2 * CFG.batch_size, shuffle=False)",
    "DataLoader(TextDataset(test, tokenizer, train=False), 2 * CFG.batch_size, shuffle=False)",
)
IN_A_COMPETITION = {
    TRAIN: TRAIN.replace("DataLoader", "worker_loader").replace("drop_last", "workers=WORKERS, drop_last"),
    VALID: "worker_loader(TextDataset(valid, tokenizer), 2 * CFG.batch_size, workers=WORKERS)",
    TEST: "worker_loader(TextDataset(test, tokenizer, train=False), 2 * CFG.batch_size, workers=WORKERS)",
    "loss = train_fn(train_loader, ": "loss = train_fn(watched(train_loader, seconds), ",
}


@pytest.mark.parametrize("apex", [False, True], ids=["fp32", "autocast and a scaler"])
def test_in_a_strangers_competition_script(stranger_files, monkeypatch, apex):
    def loaded(name, copied, edits):
        script = competition(stranger_files, monkeypatch, copied, edits)
        script.CFG.apex = apex
        return script

    plain = loaded("competition", "", {TRAIN: TRAIN.replace("shuffle=True", "shuffle=False")})
    alike = with_workers("competition", in_order(IN_A_COMPETITION), 2, loaded)
    alone, beside = (with_workers("competition", IN_A_COMPETITION, workers, loaded) for workers in (0, 2))
    ((before, submission), tokens), ((after, same), same_tokens) = counted(plain), counted(alike)
    (_, one), (_, two) = alone.main(), beside.main()
    check_seconds(beside)
    torch.manual_seed(42)
    assert tokens == same_tokens and same_weights(before, after, plain.CustomModel())
    assert submission.equals(same), "each row has its own prediction"
    assert one.equals(two) and not one.equals(submission)


def test_in_a_strangers_decoder(stranger_files, capsys):
    loader, rows = "loader = DataLoader(\n", "rows, BATCH_SIZE, shuffle=shuffle, collate_fn"
    edits = {
        loader: loader.replace("DataLoader", "worker_loader"),
        rows: rows.replace("collate_fn", "workers=WORKERS, collate_fn"),
        "train(model, loaders[0], optimizer": "train(model, watched(loaders[0], seconds), optimizer",
    }
    files = [stranger_files / name for name in ("llama", "bert", "train.jsonl", "valid.jsonl")]
    shuffled = [with_workers("decoder", edits, workers) for workers in (0, 2)]
    plain = strangers.load("decoder", "", {rows: in_order({"": rows})[""]})
    (before, tokens), (after, same_tokens), (one, _), (two, _) = (
        counted(script, *files) for script in (plain, with_workers("decoder", in_order(edits), 2), *shuffled)
    )
    check_seconds(shuffled[1])
    start = plain.AutoModelForCausalLM.from_pretrained(stranger_files / "llama")
    assert tokens == same_tokens and same_weights(before, after, start)
    assert all(map(torch.equal, one.parameters(), two.parameters())) and not same_weights(one, before, start)
    assert capsys.readouterr().out.count("perplexity") == 4


def test_after_a_loop_that_stops_early_the_next_order_goes_with_the_workers():
    """As the page says: a worker fetches ahead, and the sampler draws once more when it is at its end."""

    def orders(workers, stop):
        loader, seen = worker_loader(range(20), 2, shuffle=True, workers=workers), []
        for _ in range(2):
            seen.append([batch.tolist() for batch, _ in zip(loader, range(stop))])
        return seen

    assert orders(0, 10) == orders(2, 10), "all batches: the same order in both epochs"
    assert orders(0, 8)[0] == orders(2, 8)[0] and orders(0, 8)[1] != orders(2, 8)[1]


def test_a_loader_made_anew_begins_with_the_same_order():
    first, again, other = ([*worker_loader(range(20), 2, shuffle=True, seed=seed)] for seed in (0, 0, 1))
    assert all(map(torch.equal, first, again)) and not all(map(torch.equal, first, other))


def test_a_batch_sampler_goes_with_a_batch_size_of_one():
    loader = worker_loader(range(6), 1, batch_sampler=[[3, 1], [5]])
    assert [batch.tolist() for batch in loader] == [[3, 1], [5]]
