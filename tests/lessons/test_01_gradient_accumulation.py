import pytest
import torch
from stranger import Ratings, regressor
from torch.utils.data import DataLoader

from notebooks import copied, lesson, proof_fails
from tutorial_utils import measure

LESSON = lesson("01")
COPIED = copied(LESSON)


@pytest.mark.parametrize(
    ("old", "new"),
    [(" * share", ""), ("/ targets", "/ 32"), ("sum().item() / targets", "sum().item() / targets + 1e-3")],
    ids=["a lost share", "a wrong count", "a small bias"],
)
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


def test_copied():
    """A regression: the same gradient as the large batch, also in a short window, in less memory."""
    train_epoch = COPIED["train_epoch_accumulated"]

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


def test_steps_the_optimizer_and_the_scheduler_once_a_window():
    train_epoch = COPIED["train_epoch_accumulated"]
    model = regressor()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    train_epoch(model, optimizer, scheduler, DataLoader(Ratings(40), batch_size=4), 4)
    assert scheduler.last_epoch == 3  # 10 micro-batches in windows of 4
    assert all(p.grad is None for p in model.parameters())
