"""How long did it take, and did it have its processors? `timing` (interleaved medians), `Figure`.

A machine is never quiet. A round counts only if the process had the processors that it asked for.
"""

import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from . import kernels
from .check import accept

# A round counts if the process had this share of the processor time that it asked for, or nobody else was there.
HAD = 0.95
AGREE = 0.2  # the rounds' median distance from their median, as a share of it
PATIENCE = 24.0  # seconds that a process spends on repeating rounds, in all; one timing has a quarter of what is left
_patience = PATIENCE
# The first process of a lesson: those that it starts inherit the name, and none of them is another to the others.
os.environ.setdefault("COURSE_PROCESS", str(os.getpid()))


class Figure(float):
    """A time, or what was computed from times. settled: whether their rounds had their processors, and agreed.

    Arithmetic keeps it: what is made of an unsettled figure is unsettled.
    """

    def __new__(cls, value, settled: bool = True):
        figure = super().__new__(cls, value)
        figure.settled = settled
        return figure


def _keeping(name):
    compute = getattr(float, name)

    def operation(self, *others):
        value = compute(self, *others)
        if not isinstance(value, float):  # NotImplemented, or a whole number of round()
            return value
        return Figure(value, all(getattr(operand, "settled", True) for operand in (self, *others)))

    return operation


_TWO = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow"]
for _name in [*_TWO, *(f"r{name}" for name in _TWO), "neg", "abs", "round"]:
    setattr(Figure, f"__{_name}__", _keeping(f"__{_name}__"))


@dataclass
class Timing:
    """Seconds of each round that counts, by name. Rounds were interleaved, so that ratios share the noise.

    results: what each step gave in these rounds, where that was asked for.
    settled: whether there were as many rounds with their processors as asked for. Figures of one that did not
    settle, or whose rounds are further apart than AGREE, are not settled either.
    """

    rounds: dict[str, list[float]]
    settled: bool = True
    results: dict[str, list] = field(default_factory=dict)

    def median(self, name: str) -> Figure:
        """Median seconds of one step."""
        return self._figure(self._of(name))

    def spread(self, name: str) -> tuple[float, float]:
        """The fastest and the slowest round, in seconds."""
        return min(self._of(name)), max(self._of(name))

    def ratio(self, name: str, to: str) -> Figure:
        """Median over the rounds of the seconds of `name` divided by those of `to`."""
        return self._figure([mine / theirs for mine, theirs in zip(self._of(name), self._of(to))])

    def figure(self, value: float) -> Figure:
        """Another figure that was taken in these rounds: settled if they and all of their seconds are."""
        return Figure(value, self.settled and all(map(_agree, self.rounds.values())))

    def _of(self, name) -> list[float]:
        accept(isinstance(name, Hashable) and name in self.rounds, "name", name, ", ".join(map(str, self.rounds)))
        return self.rounds[name]

    def _figure(self, values: list[float]) -> Figure:
        return Figure(statistics.median(values), self.settled and _agree(values))


@kernels.of_torch()
def timing(
    steps: dict[str, Callable[[], object]],
    rounds: int = 5,
    warmup: int = 1,
    repeat: bool = True,
    results: bool = False,
) -> Timing:
    """Time each step once a round, after `warmup` rounds that do not count. Without tracking, and with torch's kernels.

    A round in which the process did not get its processors does not count and is repeated, as long as there is
    patience; then all rounds are shown, and the timing is not settled. None does in a lesson that began on a busy
    machine (COURSE_BUSY, set by `machine.start`). repeat: False for processes that take their rounds together, where
    one that repeats a round alone would wait for the others, and for what happens once; then more than half of the
    rounds must count. results: whether to keep what the steps give. ValueError for what is not accepted.
    """
    global _patience
    accept(type(rounds) is int and rounds >= 1, "rounds", rounds, "1 or more")
    accept(type(warmup) is int and warmup >= 0, "warmup", warmup, "0 or more")
    known = isinstance(steps, dict) and steps and all(map(callable, steps.values()))
    accept(known, "steps", steps, "functions by name, one or more")
    for _ in range(warmup):
        for step in steps.values():
            _seconds(step)
    busy = bool(os.environ.get("COURSE_BUSY")) and not os.environ.get("COURSE_STRICT")
    if "VIRTUAL_GPU" in os.environ:  # which has no times
        busy, rounds = True, rounds if results else 1
    taken, counted, budget = [], [], 0.0 if busy or not repeat else _patience / 4
    while True:
        before, started = _processors(), time.perf_counter()
        taken.append({name: _seconds(step, results) for name, step in steps.items()})
        wall = time.perf_counter() - started
        if not busy and not _disturbed(before, _processors(), wall):
            counted.append(taken[-1])
        settled = len(counted) >= (rounds if repeat else rounds // 2 + 1)
        if len(taken) < rounds:
            continue
        if settled and all(_agree([once[name][0] for once in counted]) for name in steps):
            break
        budget -= wall
        if budget <= 0:
            break
        _patience -= wall
    kept = counted if settled else taken
    seconds, given = ({name: [once[name][part] for once in kept] for name in steps} for part in (0, 1))
    return Timing(seconds, settled, given if results else {})


def _seconds(step, keep: bool = False) -> tuple[float, object]:
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronize()
    started = time.perf_counter()
    result = step()
    synchronize()
    return time.perf_counter() - started, result if keep else None


def _agree(values: list[float]) -> bool:
    middle = statistics.median(values)
    return statistics.median(abs(value - middle) for value in values) <= AGREE * middle


@dataclass
class _Processors:
    """Seconds of processor until now: used by this process, waited for and used by others (None where no one tells)."""

    used: float
    waited: float | None
    others: float | None


def _processors() -> _Processors:
    waits = []
    for task in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # a thread that has ended
            waits.append(int(task.read_text(encoding="utf-8").split()[1]) / 1e9)
    others = _used_by_all() - _used_by_the_lesson() if importlib.util.find_spec("psutil") else None
    return _Processors(time.process_time(), sum(waits) if waits else None, others)


def _used_by_all() -> float:
    import psutil

    return sum(getattr(psutil.cpu_times(), kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal"))


def _used_by_the_lesson() -> float:
    """Of all of its processes, also those that have ended."""
    import psutil

    used, first = 0.0, os.environ["COURSE_PROCESS"]
    root = psutil.Process(int(first) if psutil.pid_exists(int(first)) else None)
    for process in [root, *root.children(recursive=True)]:
        with suppress(psutil.Error):
            spent = process.cpu_times()
            used += spent.user + spent.system + spent.children_user + spent.children_system
    return used


def _disturbed(before: _Processors, after: _Processors, wall: float) -> bool:
    """Whether this process waited for processors that others used. The lesson's own processes are no others."""
    used = after.used - before.used
    others = None if before.others is None else after.others - before.others
    if before.waited is None or after.waited is None:
        # Then the others' use has to tell: they took processors that are not idle for us. Without it nobody can.
        full = others is not None and used + others > HAD * wall * (os.cpu_count() or 1)
        return others is None or full and others > (1 - HAD) * max(used, wall)
    waited = max(0.0, after.waited - before.waited)
    return waited > (1 - HAD) * (used + waited) and (others is None or others > (1 - HAD) * wall)
