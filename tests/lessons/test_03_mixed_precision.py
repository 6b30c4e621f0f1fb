import pytest
import torch
from stranger import Ratings, regressor
from torch.utils.data import DataLoader

from notebooks import copied, lesson, proof_fails
from tutorial_utils import measure

LESSON = lesson("03")
TRAIN = copied(LESSON)["train_epoch_amp"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # A hundredth: of a half, clipping leaves nothing to see where the gradients are large.
        ("scaler.scale(loss).backward()", "scaler.scale(loss / 100).backward()"),
        ("        scaler.unscale_(optimizer)\n        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
         "        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)\n        scaler.unscale_(optimizer)"),
        ("            scheduler.step()\n        optimizer.zero_grad()", "            scheduler.step()"),
    ],
    ids=["a wrong scale", "clipped before it is unscaled", "gradients that pile up"],
)  # fmt: skip
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


def trained(dtype, scaler, loader, lr=1e-2):
    model = regressor().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=1.0)
    TRAIN(model, optimizer, scheduler, scaler, loader, dtype)
    return torch.cat([p.detach().flatten() for p in model.parameters()]), scheduler.last_epoch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_copied(dtype):
    """A regression: the weights move as in fp32, within the type's rounding, in less memory, and stay fp32."""
    start = torch.cat([p.detach().flatten() for p in regressor().parameters()])
    loader = DataLoader(Ratings(16), batch_size=8)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    exact = in_fp32(loader)
    half, steps = trained(dtype, scaler, loader)
    assert half.dtype == torch.float32 and steps == 2
    assert 0 < (half - exact).norm() <= 0.05 * (exact - start).norm()

    def peak(train):
        model = regressor(width=128)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        return measure.memory(lambda: train(model, optimizer), model, optimizer).peak

    batches = DataLoader(Ratings(64), batch_size=64)
    constant = torch.optim.lr_scheduler.ConstantLR
    half_peak = peak(lambda model, optimizer: TRAIN(model, optimizer, constant(optimizer), scaler, batches, dtype))
    assert half_peak < 0.9 * peak(lambda model, optimizer: plain(model, optimizer, batches))


def plain(model, optimizer, loader):
    for batch in loader:
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def in_fp32(loader):
    model = regressor().eval()
    plain(model, torch.optim.SGD(model.parameters(), lr=1e-2), loader)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_step_that_overflows_is_skipped_and_the_schedule_waits():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    start, _ = trained(torch.float16, scaler, [])
    after, steps = trained(torch.float16, scaler, DataLoader(Ratings(8), batch_size=8))
    assert torch.equal(start, after) and steps == 0 and scaler.get_scale() == 2.0**59
