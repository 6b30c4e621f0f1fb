"""What a reader copies, run in an empty namespace on a model and data that the lesson did not use."""

import contextlib
import io

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from notebooks import lessons
from tutorial_utils import measure

BY_NAME = {lesson.name: lesson for lesson in lessons()}


def copied(name: str) -> dict:
    namespace = {}
    exec(compile(BY_NAME[name].source("copy"), f"{name}: copy", "exec"), namespace)
    return namespace


class Ratings(Dataset):
    """A stranger's data set: texts of one length with a score to predict."""

    def __init__(self, count, length=32):
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(5, 500, (count, length), generator=generator)
        self.scores = torch.rand(count, generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.scores[index]}


def regressor():
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    torch.manual_seed(0)
    config = DistilBertConfig(n_layers=2, dim=64, n_heads=2, hidden_dim=256, vocab_size=500, num_labels=1)
    return DistilBertForSequenceClassification(config)


def test_00_memory_anatomy():
    """GPT-2, whose head shares the embedding's storage: tied weights count once."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=500, n_positions=64))
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(500, (4, 32))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    held = copied("00_memory_anatomy")["memory_held"](model, optimizer)
    parameters = sum(p.numel() for p in model.parameters())
    buffers = sum(b.nbytes for b in model.buffers())
    assert held["weights"] * 2**20 == 4 * parameters + buffers
    assert held["gradients"] * 2**20 == 4 * parameters
    if not torch.cuda.is_available():  # there the counters of the step stay in main memory too
        assert held["optimizer state"] * 2**20 == 8 * parameters + 4 * len(list(model.parameters()))
    optimizer.zero_grad()
    assert copied("00_memory_anatomy")["memory_held"](model, optimizer)["gradients"] == 0


def test_01_gradient_accumulation():
    """A regression: the same gradient as the large batch, also in a short window, in less memory."""
    train_epoch = copied("01_gradient_accumulation")["train_epoch_accumulated"]

    def gradient(batch_size, grad_accum_steps, count):
        model = regressor().double().eval()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        loader = DataLoader(Ratings(count), batch_size=batch_size)
        train_epoch(
            model,
            optimizer,
            scheduler,
            ({**b, "labels": b["labels"].double()} for b in loader),
            grad_accum_steps,
            max_norm=float("inf"),
        )
        return torch.cat([(b - p.detach()).flatten() for b, p in zip(before, model.parameters(), strict=True)])

    for batch_size, steps, count in ((4, 4, 16), (4, 4, 8), (4, 4, 14)):
        whole = gradient(count, 1, count)
        in_parts = gradient(batch_size, steps, count)
        assert (in_parts - whole).norm() <= 1e-6 * whole.norm(), (batch_size, steps, count)

    def peak(batch_size, grad_accum_steps):
        model = regressor()
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        loader = DataLoader(Ratings(64), batch_size=batch_size)
        return measure.memory(
            lambda: train_epoch(model, optimizer, scheduler, loader, grad_accum_steps), model, optimizer
        ).peak

    assert peak(8, 8) < 0.4 * peak(64, 1)


def test_01_steps_the_optimizer_and_the_scheduler_once_a_window():
    train_epoch = copied("01_gradient_accumulation")["train_epoch_accumulated"]
    model = regressor()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    train_epoch(model, optimizer, scheduler, DataLoader(Ratings(40), batch_size=4), 4)
    assert scheduler.last_epoch == 3  # 10 micro-batches in windows of 4
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", BY_NAME)
def test_every_lesson_has_its_test(name):
    assert f"test_{name}" in globals(), f"write test_{name} here: the copy cell on another model and data"


@pytest.mark.parametrize("name", BY_NAME)
def test_solution_passes_where_the_open_exercise_does_not(name):
    from tutorial_utils import figures, predict

    lesson, namespace = BY_NAME[name], copied(name) | {"figures": figures, "predict": predict}
    for tag, expected in (("exercise", "not yet: "), ("solution", "passed")):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(lesson.source(tag), f"{name}: {tag}", "exec"), namespace)
        assert output.getvalue().startswith(expected), output.getvalue()
