import gc

import pytest
import torch
from stranger import Ratings, regressor
from torch.utils.data import default_collate

from notebooks import copied, lesson, proof_fails, run, source
from tutorial_utils import measure

LESSON = lesson("09")
COPIED = copied(LESSON)
exec(next(source(cell) for cell in LESSON.code if "def trial(" in source(cell)), COPIED)
TRACKED, ZERO = (
    "with measure.Tracker(model, optimizer, (), card",
    "zero = torch.optim.AdamW(searched_model.parameters(), lr=",
)
fits, largest_batch, trial = (COPIED[name] for name in ("fits", "largest_batch", "trial"))
MiB = 2**20


def shorter():
    """The lesson with two of the proof's five cards, the quickest."""
    small = lesson("09")
    for cell in small.code:
        code = source(cell)
        if "cases = {" in code:
            start, end = code.index("cases = {"), code.index("answers = ")
            cases = 'cases = {"a": (64 * MiB, 256), "b": (48 * MiB, 64)}\n'
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
    ],
    ids=["stops early", "without the optimizer's step", "a larger card", "a learning rate"],
)  # fmt: skip
def test_proof_can_fail(old, new):
    proof_fails(shorter(), old, new)


@pytest.mark.parametrize("card", [5 * MiB, 12 * MiB])
@pytest.mark.parametrize("multiple", [1, 4])
def test_copied(card, multiple):
    """Another family, a regression: the batch found fits, the next does not, and the weights are as before."""
    model = regressor()
    before = [weight.clone() for weight in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    inner = trial(model, optimizer, lambda count: default_collate(list(Ratings(count))))

    def step(batch_size):
        model.zero_grad()
        with measure.Tracker(model, optimizer, (), card):
            inner(batch_size)

    best = largest_batch(step, start=16, multiple=multiple, most=256)
    assert best % multiple == 0 and 0 < best < 256
    assert fits(step, best) and not fits(step, best + multiple)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


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
