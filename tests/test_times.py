"""A round counts if the process had its processors; what does not settle says so."""

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time

import pytest
import torch

from tutorial_utils import measure, times


def steps():
    matrix = torch.rand(400, 400)
    return {"one": lambda: matrix @ matrix, "three": lambda: [matrix @ matrix for _ in range(3)]}


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr(times, "_patience", 4.0)
    monkeypatch.delenv("COURSE_BUSY", raising=False)


def answers(monkeypatch, *disturbed: bool):
    """Say of each round in turn whether it was disturbed; the last answer stays."""
    said = list(disturbed)
    monkeypatch.setattr(times, "_disturbed", lambda *_: said.pop(0) if len(said) > 1 else said[0])


def test_a_disturbed_round_is_repeated_and_does_not_count(monkeypatch):
    slow = iter([0.1, 0.01, 0.01, 0.01])
    answers(monkeypatch, True, False)
    monkeypatch.setattr(times, "_agree", lambda values: True)
    taken = measure.timing({"a": lambda: time.sleep(next(slow))}, rounds=3, warmup=0)
    assert taken.settled and len(taken.rounds["a"]) == 3 and max(taken.rounds["a"]) < 0.1


def test_what_does_not_settle_ends_and_says_so(monkeypatch):
    answers(monkeypatch, True)
    started = time.monotonic()
    taken = measure.timing({"a": lambda: time.sleep(0.05)}, rounds=2, warmup=0)
    assert 0.9 < time.monotonic() - started < 3, "a timing has a quarter of the patience that is left"
    assert not taken.settled and not taken.median("a").settled and len(taken.rounds["a"]) > 2


def test_rounds_that_are_not_repeated_settle_where_more_than_half_had_their_processors(monkeypatch):
    for disturbed, settled, kept in ((2, True, 3), (3, False, 5)):
        answers(monkeypatch, *[True] * disturbed, *[False] * (5 - disturbed))
        taken = measure.timing({"a": lambda: time.sleep(0.01)}, rounds=5, warmup=0, repeat=False)
        assert taken.settled is settled and len(taken.rounds["a"]) == kept


def test_a_lesson_that_began_on_a_busy_machine_repeats_nothing(monkeypatch):
    answers(monkeypatch, False)
    monkeypatch.setenv("COURSE_BUSY", "1")
    taken = measure.timing({"a": lambda: None}, rounds=3)
    assert not taken.settled and len(taken.rounds["a"]) == 3


def test_patience_is_of_the_whole_process(monkeypatch):
    answers(monkeypatch, True)
    counts = []
    for _ in range(12):
        counts.append(len(measure.timing({"a": lambda: time.sleep(0.05)}, rounds=2, warmup=0).rounds["a"]))
    assert counts[0] > 10 and counts[-1] <= 4, counts


def test_rounds_that_are_far_apart_do_not_settle(monkeypatch):
    answers(monkeypatch, False)
    naps = iter([0.01, 0.03, 0.09] * 100)
    taken = measure.timing({"a": lambda: time.sleep(next(naps))}, rounds=3, warmup=0)
    assert taken.settled and not taken.median("a").settled
    assert len(taken.rounds["a"]) > 3, "more rounds were worth a try"


def test_arithmetic_keeps_whether_a_figure_settled():
    good, bad = measure.Figure(2.0), measure.Figure(4.0, settled=False)
    for made in (
        1 / bad,
        bad + 1,
        1 - bad,
        2 * bad,
        bad / good,
        good * bad,
        sum([bad, good]),
        statistics.median([bad, bad]),
        -bad,
        abs(bad),
        bad**2,
        2**bad,
        bad // 1,
        bad % 3,
        round(bad, 1),
    ):
        assert not made.settled
    assert (good / 2 + 1).settled and good / 2 + 1 == 2.0 and f"{bad:.1f}" == "4.0"


def test_a_round_is_disturbed_where_others_took_the_processors_it_waited_for():
    now, quiet = times._Processors, times._Processors(0.0, 0.0, 0.0)
    assert times._disturbed(quiet, now(1.0, 0.5, 0.5), 1.0)
    assert not times._disturbed(quiet, now(1.0, 0.01, 0.9), 1.0), "others were there, and took nothing from it"
    assert not times._disturbed(quiet, now(1.0, 0.5, 0.0), 1.0), "its own threads and children wait for each other"
    unknown = now(0.0, None, 0.0)  # a system that does not tell who waited
    cores = os.cpu_count()
    assert times._disturbed(unknown, now(0.6 * cores, None, 0.4 * cores), 1.0)
    assert not times._disturbed(unknown, now(0.99 * cores, None, 0.01 * cores), 1.0)
    assert not times._disturbed(unknown, now(0.4 * cores, None, 0.4 * cores), 1.0), "processors were left"


def test_results_are_of_the_rounds_that_count(monkeypatch):
    """Four rounds that others disturbed gave 9; the figure is made of the three that count."""
    disturbed, given = iter([True] * 4 + [False] * 9), iter([9.0] * 4 + [1.0] * 9)
    monkeypatch.setattr(times, "_disturbed", lambda *_: next(disturbed))
    monkeypatch.setattr(times, "_seconds", lambda step, keep: (1.0, step()))
    taken = measure.timing({"a": lambda: next(given)}, rounds=3, warmup=0, results=True)
    assert taken.settled and taken.results == {"a": [1.0, 1.0, 1.0]}


def test_another_figure_of_rounds_that_disagree_is_not_settled():
    assert measure.Timing({"a": [1.0, 1.1, 1.05]}).figure(0.5).settled
    assert not measure.Timing({"a": [1.0, 1.1, 1.05], "b": [10.0, 30.0, 90.0]}).figure(0.5).settled
    assert not measure.Timing({"a": [1.0]}, settled=False).figure(0.5).settled


def test_a_recording_does_not_inherit_that_the_machine_was_busy(monkeypatch):
    monkeypatch.setattr(times, "_disturbed", lambda *_: False)
    monkeypatch.setenv("COURSE_BUSY", "1")
    assert not measure.timing({"a": lambda: None}, rounds=1).settled
    monkeypatch.setenv("COURSE_STRICT", "1")
    assert measure.timing({"a": lambda: time.sleep(0.01)}, rounds=1).settled


def test_without_psutil_waiting_alone_tells():
    def at(used, waited):
        return times._Processors(used, waited, None)

    assert times._disturbed(at(0, 0.0), at(1, 0.5), 1.5)
    assert not times._disturbed(at(0, 0.0), at(1, 0.01), 1.0)
    assert times._disturbed(at(0, None), at(1, None), 1.0), "nobody can tell: it does not count"


@pytest.mark.alone
def test_a_busy_machine_is_noticed_for_real():
    """Another process on every core: children of this test would be its own, so they are given away."""
    code = ("import os\nif pid := os.fork(): print(pid, flush=True); os._exit(0)\nimport time\n"
            "end = time.monotonic() + 12\nwhile time.monotonic() < end: pass")  # fmt: skip
    busy = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
            for _ in range(os.cpu_count())]  # fmt: skip
    others = [int(process.stdout.readline()) for process in busy]
    try:
        for process in busy:
            process.wait()  # the grandchild, whose parent is gone, spins on
        time.sleep(0.5)
        work = torch.rand(900, 900)
        taken = measure.timing({"a": lambda: [work @ work for _ in range(10)]}, rounds=3)
    finally:
        for pid in others:  # or the next test that holds a time finds a busy machine
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert not taken.settled
