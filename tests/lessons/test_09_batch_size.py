import contextlib
import gc
from types import SimpleNamespace

import pytest
import torch
from stranger import Ratings, regressor
from torch.utils.data import default_collate

from notebooks import copied, lesson, proof_fails, run, source
from tutorial_utils import bounds, machine, measure, predict

LESSON = lesson("09")
COPIED = copied(LESSON)
SECOND = LESSON.code[LESSON.code.index(LESSON.tagged("copy")[0]) + 1]  # the lesson says to copy it too
exec(source(SECOND), COPIED)
TRACKED, ZERO = (
    "with measure.Tracker(model, optimizer, (), card",
    'model = model or new_model(attention="eager")\n    optimizer = torch.optim.AdamW(model.parameters(), lr=',
)
fits, largest_batch, trial = (COPIED[name] for name in ("fits", "largest_batch", "trial"))
MiB = 2**20


def shorter():
    """The lesson with three of the proof's five cards: quick ones, of which one ends in a try that leaves gradients."""
    small = lesson("09")
    for cell in small.code:
        code = source(cell)
        if "cases = {" in code:
            start, end = code.index("cases = {"), code.index("searched = ")
            cases = 'cases = {"a": (48 * MiB, 64), "b": (44 * MiB, 32), "c": (25 * MiB, 128)}\n'
            cell["source"] = code[:start] + cases + code[end:]
    return small


def test_the_shorter_proof_holds():
    namespace = {}
    for cell in shorter().needed_for("proof"):
        run(source(cell), namespace)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("while high - low > 1:", "while high - low > 2:"),
        ("            optimizer.step()\n", "            pass\n"),
        (f"{TRACKED})", f"{TRACKED} + 8 * MiB)"),
        (f"{ZERO}0.0", f"{ZERO}1e-5"),
        ("            model.zero_grad()\n", ""),
    ],
    ids=["stops early", "without the optimizer's step", "a larger card", "a learning rate", "leaves gradients"],
)  # fmt: skip
def test_proof_can_fail(old, new):
    proof_fails(shorter(), old, new)


def stranger_on(card, accumulate=1):
    """(a model of another family, a regression; a step to search with on a virtual card of this size)"""
    model = regressor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    inner = trial(model, optimizer, lambda count: default_collate(list(Ratings(count))), accumulate)

    def step(batch_size):
        with measure.Tracker(model, optimizer, (), card):
            inner(batch_size)

    return model, optimizer, step


@pytest.mark.parametrize("card", [5 * MiB, 12 * MiB])
@pytest.mark.parametrize("multiple", [1, 4])
def test_copied(card, multiple):
    """The batch found fits, the next does not, and model and optimizer are as before."""
    model, optimizer, step = stranger_on(card)
    before = [weight.clone() for weight in model.parameters()]
    best = largest_batch(step, start=16, multiple=multiple, most=256)
    assert best % multiple == 0 and 0 < best < 256
    assert fits(step, best) and not fits(step, best + multiple)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(weight.grad is None for weight in model.parameters()) and not optimizer.state


def test_every_failed_try_leaves_nothing():
    """On cards that are full in the forward pass, in backward, or while the optimizer makes its state."""
    weights = sum(weight.nbytes for weight in regressor().parameters())
    answers = []
    for percent in range(125, 600, 50):  # of the weights; with gradients and state they are 400
        model, optimizer, step = stranger_on(weights * percent // 100)
        answers.append(largest_batch(step, start=4, most=4))
        assert answers[-1] == 0 or percent > 400
        assert all(weight.grad is None for weight in model.parameters()) and not optimizer.state
    assert answers[-1] > 0 and answers == sorted(answers)


def test_accumulating_needs_room_for_the_gradients_before():
    """What fits alone may not fit as a later micro-batch; two stand for any number."""
    alone, two, four = (stranger_on(12 * MiB, accumulate)[2] for accumulate in (1, 2, 4))
    most, micro = largest_batch(alone, most=256), largest_batch(two, most=256)
    assert 0 < micro < most and not fits(two, most)
    assert fits(four, micro) and not fits(four, micro + 1)


@pytest.mark.parametrize("name", ["Tesla T4", "a card without facts"])
def test_the_search_on_a_gpu_stands_beside_its_prediction(name, monkeypatch):
    """That cell, on an imitated T4 which 52 texts fill."""

    def step(batch_size):
        if batch_size > 52:
            raise torch.OutOfMemoryError

    predicted, searched = (
        next(source(cell) for cell in LESSON.code if words in source(cell))
        for words in ("def predicted_step", "batch_found_to_predicted")
    )
    model = regressor()
    monkeypatch.setattr(machine, "this_gpu", lambda: machine.Gpu(name, 15 * 2**30, (7, 5)))
    namespace = {
        **COPIED, "contextlib": contextlib,
        "bounds": bounds, "machine": machine, "predict": predict, "LESSON": LESSON.name, "measured": {},
        "model": model, "optimizer": torch.optim.AdamW(model.parameters()), "trial": lambda *_: step,
        "here": SimpleNamespace(device="cuda", name=name),
        "preset": machine.Preset("bert-large-uncased", "random", 32, 128),
    }  # fmt: skip
    run(predicted[: predicted.index("guesses = ")], namespace)
    assert "48, found by running out of memory; predicted 48" in run(searched, namespace)
    assert namespace["measured"] == {"batch_found_to_predicted": 1.0}


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, MemoryError])
@pytest.mark.parametrize("limit", [0, 1, 5, 8, 63, 64, 100])
@pytest.mark.parametrize("start", [1, 8, 200])
def test_every_answer(kind, limit, start):
    tried = []

    def step(batch_size):
        tried.append(batch_size)
        if batch_size > limit:
            raise kind

    assert largest_batch(step, start=start, most=64) == min(limit, 64)
    assert len(set(tried)) == len(tried) <= 13 and 0 not in tried and max(tried) <= 64
    assert largest_batch(step, start=start, multiple=8, most=64) == min(limit, 64) // 8 * 8


@pytest.mark.parametrize(
    "message",
    [
        "CUDA out of memory. Tried to allocate 20.00 MiB",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes",
        "MPS backend out of memory (MPS allocated: 1 GB)",
    ],
)
def test_out_of_memory_in_other_words(message):
    def step(_):
        raise RuntimeError(message)

    assert not fits(step, 1)


@pytest.mark.parametrize(
    "error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("no"), KeyError(3)]
)
def test_other_errors_come_through(error):
    def step(_):
        raise error

    with pytest.raises(type(error)):
        largest_batch(step)


def test_what_failed_is_freed():
    """Also of a step that made a cycle: nothing of the failed try lives when the next one starts."""
    living = []

    class Part:
        def __init__(self):
            living.append(1)
            self.self = self

        def __del__(self):
            living.pop()

    def step(batch_size):
        assert not living, "the failed try is still there"
        if batch_size > 3:
            raise torch.OutOfMemoryError(Part())

    gc.disable()
    try:
        assert largest_batch(step, start=32) == 3 and not living
    finally:
        gc.enable()
