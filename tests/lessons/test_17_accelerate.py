import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from stranger import Ratings, regressor
from torch.utils.data import DataLoader

from notebooks import copied, lesson, proof_fails

LESSON = lesson("17")
TRAIN = copied(LESSON)["train"]
PREPARED = "model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)"


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("accelerator.backward(loss)", "accelerator.backward(loss / grad_accum_steps)"),
        ("if accelerator.sync_gradients:", "if False:"),
        (PREPARED, "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"),
        (PREPARED, "model, scheduler, loader = accelerator.prepare(model, scheduler, loader)"),
        (", gradient_accumulation_steps=grad_accum_steps)", ", gradient_accumulation_steps=1)"),
    ],
    ids=["divided twice", "never clipped", "the schedule not prepared", "the optimizer not prepared", "no windows"],
)
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


def by_hand(model, optimizer, scheduler, loader, parts):
    for step, batch in enumerate(loader, start=1):
        (model(**batch).loss / parts).backward()
        if step % parts == 0 or step == len(loader):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("texts", [64, 56])
def test_copied(texts):
    """Another architecture, a regression, a data set class of its own: the weights of the loop by hand."""
    models, rates, steps = [], [], []
    for loop in (TRAIN, by_hand):
        model = regressor()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer.register_step_post_hook(lambda *_: steps.append(1))
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=10)
        torch.manual_seed(3)
        model.train()
        loop(model, optimizer, scheduler, DataLoader(Ratings(texts), batch_size=8), 4)
        models.append([parameter.detach() for parameter in model.parameters()])
        rates += scheduler.get_last_lr()
    assert all(torch.equal(one, other) for one, other in zip(*models, strict=True))
    assert len(steps) == 4 and rates[0] == rates[1] < 0.5
    assert not torch.equal(models[0][0], next(regressor().parameters()))


def test_half_precision():
    losses = TRAIN(*parts(), DataLoader(Ratings(16), batch_size=8), 2, precision="bf16")
    AcceleratorState._reset_state(True)
    in_full = TRAIN(*parts(), DataLoader(Ratings(16), batch_size=8), 2)
    assert 0 < (torch.stack(losses) - torch.stack(in_full)).abs().max() < 0.05


def parts():
    model = regressor()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    torch.manual_seed(3)
    return model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)
