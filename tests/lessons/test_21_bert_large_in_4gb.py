import re

import pytest
import torch
from stranger import Ratings, regressor
from torch.utils.data import DataLoader

from notebooks import copied, lesson, proof_fails, run, source
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
        ("p.grad.float() / self.scale", "p.grad.float()"),
        ("clip_grad_norm_(p, self.max_norm)", "clip_grad_norm_(p, 1e9)"),
        ('self.optimizers[p].param_groups[0]["lr"] = low.float(), grad, self.lr', "_ = low.float(), grad, 0"),
    ],
    ids=[
        "a step at every micro-batch",
        "rounded to the nearest",
        "one random bit too many is kept",
        "a sum of micro-batches",
        "decay for biases",
        "never written back",
        "the scale stays in the gradient",
        "no clipping",
        "the rate is not followed",
    ],
)
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


def batches(size, count):
    return list(DataLoader(Ratings(size * count), batch_size=size))


def train(model, trainer, data):
    return [COPIED["train_step"](model, trainer, batch) for batch in data]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_copied(dtype):
    """A regression with another architecture learns in 16 bits; every parameter changes and no gradient is left."""
    model = regressor().eval()
    before = [p.detach().clone() for p in model.to(dtype).parameters()]
    trainer = StepInBackward(model, dtype, lr=1e-3, micro_batches=2, scale=4096.0 if dtype == torch.float16 else 1.0)
    losses = train(model, trainer, batches(8, 1) * 15)
    assert sum(losses[-2:]) < 0.6 * sum(losses[:2])
    assert all(p.dtype == dtype and p.grad is None and p.isfinite().all() for p in model.parameters())
    used = {id(p) for name, p in model.named_parameters() if "embed" not in name}
    assert all((p != q).any() for p, q in zip(model.parameters(), before, strict=True) if id(p) in used)


def test_memory():
    """Weights of two bytes and no gradients: less than an ordinary step in 16 bits at the same size."""
    batch = batches(2, 1)[0]
    batch["labels"] = batch["labels"].to(torch.bfloat16)  # or torch 2.10's loss has no gradient

    def peak(small):
        model = regressor(layers=6, width=256).to(torch.bfloat16)
        if small:
            trainer = StepInBackward(model, torch.bfloat16, micro_batches=1)
            step = lambda: trainer.backward(model(**batch).loss)  # noqa: E731
        else:
            optimizers = [COPIED["Adafactor"]([p], lr=1e-3, relative_step=False) for p in model.parameters()]

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


def test_one_update_is_adafactor_of_the_clipped_gradient():
    """By hand: a first step moves a vector's elements by the rate each, against their gradients' signs."""
    model = torch.nn.Linear(4, 1)
    before = model.bias.detach().clone()
    trainer = StepInBackward(model, torch.float32, lr=1e-2, micro_batches=1)
    trainer.backward(model(torch.ones(2, 4)).sum() * 1e-3)
    assert torch.allclose(before - model.bias, torch.tensor([1e-2]), rtol=1e-4)


def test_the_loop_that_is_shown(monkeypatch, tmp_path):
    """The block under the copy cell, with a small model in place of the download, and no GPU."""
    import transformers

    (block,) = re.findall(r"```python\n(.*?)```", "\n".join(map(source, LESSON.cells)), re.S)
    model, before = regressor(), [p.detach().clone() for p in regressor().parameters()]
    asked = []
    monkeypatch.setattr(
        transformers.AutoModelForSequenceClassification, "from_pretrained", lambda name: asked.append(name) or model
    )
    monkeypatch.setattr(torch.nn.Module, "cuda", lambda self: self)
    monkeypatch.setattr(model, "save_pretrained", lambda place: model.config.save_pretrained(tmp_path / place))

    class Batch(dict):
        def to(self, device):
            assert device == "cuda"
            return self

    run(block, COPIED | {"loader": [Batch(batch) for batch in batches(4, 2)]})
    assert asked == ["bert-large-uncased"] and (tmp_path / "trained" / "config.json").exists()
    assert all(p.dtype == torch.bfloat16 and p.grad is None for p in model.parameters())
    assert any((p != q.to(p.dtype)).any() for p, q in zip(model.parameters(), before, strict=True))


def test_gradients_wait_for_the_last_micro_batch():
    model = regressor()
    trainer = StepInBackward(model, torch.float32, micro_batches=2)
    before = [p.detach().clone() for p in model.parameters()]
    trainer.backward(model(**batches(4, 1)[0]).loss)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert any(p.grad is not None for p in model.parameters())
    trainer.backward(model(**batches(4, 1)[0]).loss)
    assert all(p.grad is None for p in model.parameters())


def test_another_optimizer_in_its_place():
    """As the table of advice has it: 8-bit AdamW in the line of Adafactor."""
    AdamW8bit = pytest.importorskip("bitsandbytes").optim.AdamW8bit
    old = "Adafactor([p], scale_parameter=False, relative_step=False, **options)"
    assert LESSON.source("copy").count(old) == 1
    namespace = {"AdamW8bit": AdamW8bit}
    run(LESSON.source("copy").replace(old, "AdamW8bit([p], **options)"), namespace)
    model = regressor().eval()
    trainer = namespace["StepInBackward"](model, torch.bfloat16, lr=1e-3, micro_batches=2)
    losses = [namespace["train_step"](model, trainer, batch) for batch in batches(8, 1) * 15]
    assert sum(losses[-2:]) < 0.6 * sum(losses[:2])
    assert any(s["state1"].dtype == torch.uint8 for o in trainer.optimizers.values() for s in o.state.values())
