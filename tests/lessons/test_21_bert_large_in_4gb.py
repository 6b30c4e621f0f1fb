import sys

import pytest
import torch
from stranger import Ratings, regressor
from torch.utils.data import DataLoader

from notebooks import copied, lesson, proof_fails
from tutorial_utils import measure

LESSON = lesson("21")
COPIED = copied(LESSON)
StepInBackward, round_at_random = COPIED["StepInBackward"], COPIED["round_at_random"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("if self.left:", "if False:"),
        ("torch.randint(2**dropped, values", "torch.randint(2**dropped // 2, 2**dropped // 2 + 1, values"),
        ("(bits & -(2**dropped))", "(bits & -(2**dropped // 2))"),
        ("(self.scale / self.every)", "self.scale"),
        ("weight_decay=decay if p.ndim > 1 else 0.0", "weight_decay=decay"),
        ("low.copy_(round_at_random(p.data, low.dtype))", "low"),
    ],
    ids=[
        "a step at every micro-batch",
        "rounded to the nearest",
        "one random bit too many is kept",
        "a sum of micro-batches",
        "decay for biases",
        "never written back",
    ],
)
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


def batches(size, count):
    return list(DataLoader(Ratings(size * count), batch_size=size))


def train(model, trainer, data):
    losses = []
    for batch in data:
        loss = model(**batch).loss
        trainer.backward(loss)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_copied(dtype):
    """A regression with another architecture learns in 16 bits; every parameter changes and no gradient is left."""
    model = regressor().eval()
    before = [p.detach().clone() for p in model.to(dtype).parameters()]
    trainer = StepInBackward(model, dtype, lr=1e-3, micro_batches=2, scale=4096.0 if dtype == torch.float16 else 1.0)
    losses = train(model, trainer, batches(4, 2) * 15)
    assert sum(losses[-4:]) < 0.6 * sum(losses[:4])
    assert all(p.dtype == dtype and p.grad is None and p.isfinite().all() for p in model.parameters())
    used = {id(p) for name, p in model.named_parameters() if "embed" not in name}
    assert all((p != q).any() for p, q in zip(model.parameters(), before, strict=True) if id(p) in used)


def test_memory():
    """Weights of two bytes and no gradients: less than an ordinary step in 16 bits at the same size."""
    batch = batches(2, 1)[0]

    def peak(small):
        model = regressor(layers=2, width=256).to(torch.bfloat16)
        if small:
            trainer = StepInBackward(model, torch.bfloat16, micro_batches=1)
            step = lambda: trainer.backward(model(**batch).loss)  # noqa: E731
        else:
            parts = [(p, "distilbert.embeddings" in name) for name, p in model.named_parameters()]
            kinds = ((torch.optim.AdamW, True), (COPIED["AdamW"], False))
            optimizers = [kind([p for p, embedded in parts if embedded == which]) for kind, which in kinds]

            def step():
                model(**batch).loss.backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()

        step()
        return measure.memory(step, model, None, batch).peak, sum(p.nbytes for p in model.parameters())

    (small, weights), (ordinary, _) = peak(True), peak(False)
    assert small < ordinary - 0.3 * weights


def test_an_overflow_is_skipped():
    model = regressor()
    trainer = StepInBackward(model, torch.float32, micro_batches=1)
    before = [p.detach().clone() for p in model.parameters()]
    trainer.backward(model(**batches(4, 1)[0]).loss * float("inf"))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert not any(optimizer.state for optimizer in trainer.optimizers.values())


def test_frozen_and_tied_parameters():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=16)).eval()
    model.transformer.wpe.weight.requires_grad = False
    position = model.transformer.wpe.weight.detach().clone()
    words = torch.arange(8)[None]
    trainer = StepInBackward(model, torch.float32, lr=1e-2, micro_batches=1)
    losses = train(model, trainer, [{"input_ids": words, "labels": words}] * 5)
    assert losses[-1] < losses[0] and torch.equal(model.transformer.wpe.weight, position)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert trainer.optimizers[model.lm_head.weight].state[model.lm_head.weight]["step"] == 5


def test_the_rate_follows_the_trainer():
    model = regressor()
    trainer = StepInBackward(model, torch.float32, lr=1e-3, micro_batches=1)
    trainer.lr = 0.0
    before = [p.detach().clone() for p in model.parameters()]
    train(model, trainer, batches(4, 1))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_values_that_fit_are_kept():
    for dtype in (torch.bfloat16, torch.float16):
        exact = torch.randn(1000).clamp(min=-8, max=8).to(dtype)
        exact = exact[exact.abs() > 2**-13]  # below, fp16 has fewer bits
        assert torch.equal(round_at_random(exact.float(), dtype), exact)
    values = torch.randn(100)
    assert torch.equal(round_at_random(values, torch.float32), values)


def test_without_bitsandbytes(monkeypatch, capsys):
    """Degraded: one line, and AdamW with its state in 32 bits."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    found = copied(LESSON)
    assert "no bitsandbytes" in capsys.readouterr().out and found["AdamW"] is torch.optim.AdamW
    model = regressor()
    trainer = found["StepInBackward"](model, torch.bfloat16, lr=1e-3, micro_batches=1)
    losses = train(model, trainer, batches(4, 1) * 8)
    assert losses[-1] < losses[0]
    states = [s for optimizer in trainer.optimizers.values() for s in optimizer.state.values()]
    assert all(s["exp_avg"].dtype == torch.float32 for s in states)
