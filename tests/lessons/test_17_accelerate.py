import itertools
import math
import re

import pytest
import strangers
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from stranger import Ratings, regressor
from strangers import competition, same_weights
from torch.utils.data import DataLoader

from notebooks import answer_to_exercise, copied, lesson, proof_fails, source
from tutorial_utils import measure

LESSON = lesson("17")
train_accelerated = copied(LESSON)["train_accelerated"]
PREPARED = "prepared = accelerator.prepare(model, optimizer, scheduler, loader)"


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    forget()
    yield
    forget()


def forget():
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("loss * (steps / in_window)", "loss / steps"),
        ("loss * (steps / in_window)", "loss"),
        ("if accelerator.sync_gradients:", "if False:"),
        (PREPARED, "prepared = [*accelerator.prepare(model, optimizer), scheduler, accelerator.prepare(loader)]"),
        (PREPARED, "prepared = [accelerator.prepare(model), optimizer, *accelerator.prepare(scheduler, loader)]"),
        ("gradient_accumulation_steps=steps,", "gradient_accumulation_steps=1,"),
    ],
    ids=[
        "divided twice", "a short window not weighed up", "never clipped", "the schedule not prepared",
        "the optimizer not prepared", "no windows",
    ],
)  # fmt: skip
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


def test_a_prepared_loader_is_a_batch_ahead():
    """So a collator draws its random numbers in another order beside dropout, as the page says."""
    order = []

    def collate(rows):
        order.append("batch")
        return torch.utils.data.default_collate(rows)

    for _ in Accelerator().prepare(DataLoader(Ratings(16), 8, collate_fn=collate)):
        order.append("step")
    assert order == ["batch", "batch", "step", "step"]


def by_hand(model, optimizer, scheduler, loader, parts):
    batches = list(loader)
    for start in range(0, len(batches), parts):
        window = batches[start : start + parts]
        for batch in window:
            (model(**batch).loss / len(window)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def loss_of(model, batch):
    return model(**batch).loss


def prepared(steps, texts, rate=0.5, precision="no"):
    """(accelerator and all that it prepared; the model, the optimizer and the schedule as they are without it)"""
    accelerator = Accelerator(gradient_accumulation_steps=steps, mixed_precision=precision)
    model = regressor()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=10)
    ready = accelerator.prepare(model, optimizer, scheduler, DataLoader(Ratings(texts), batch_size=8))
    return (accelerator, *ready), (model, optimizer, scheduler)


@pytest.mark.parametrize(("texts", "steps"), [(64, 4), (56, 4), (40, 3)])
def test_copied(texts, steps):
    """Another architecture, a regression, a data set class of its own: the weights of the loop by hand."""
    ready, (ours, _, rate) = prepared(steps, texts)
    taken = []
    rate.optimizer.register_step_post_hook(lambda *_: taken.append(1))
    torch.manual_seed(3)
    train_accelerated(*ready, loss_of)

    forget()
    _, (theirs, optimizer, scheduler) = prepared(steps, texts)
    torch.manual_seed(3)
    by_hand(theirs.train(), optimizer, scheduler, DataLoader(Ratings(texts), batch_size=8), steps)
    assert len(taken) == -(-texts // 8 // steps) and rate.get_last_lr() == scheduler.get_last_lr() < [0.5]
    start = regressor()
    assert same_weights(theirs, ours, start)
    if steps == 4:  # a third of a third is not a ninth to the bit
        assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


def test_half_precision():
    def losses(precision):
        forget()
        found = []

        def noted(model, batch):
            found.append(model(**batch).loss)
            return found[-1]

        ready, _ = prepared(2, 16, rate=0.0, precision=precision)
        torch.manual_seed(3)
        train_accelerated(*ready, noted)
        return torch.stack(found).detach()

    assert 0 < (losses("bf16") - losses("no")).abs().max() < 0.05


def test_the_next_epoch_begins_a_window():
    """7 micro-batches in windows of 4: two steps in each epoch."""
    ready, (_, optimizer, _) = prepared(4, 56)
    taken = []
    optimizer.register_step_post_hook(lambda *_: taken.append(1))
    for _ in range(3):
        train_accelerated(*ready, loss_of)
    assert len(taken) == 6 and optimizer.param_groups[0]["params"][0].grad is None


def test_in_a_strangers_classifier(stranger_files, monkeypatch, capsys):
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    mine = "\nimport math\n\ndef loss_of(model, batch):\n    return model(**batch).loss\n"
    edits = {
        "args.epochs * len(train_loader))\n": "args.epochs * math.ceil(len(train_loader) / 4))\n"
        "    accelerator = Accelerator(gradient_accumulation_steps=4)\n"
        "    model, optimizer, scheduler, train_loader, valid_loader = accelerator.prepare(\n"
        "        model, optimizer, scheduler, train_loader, valid_loader)\n",
        "        train_one_epoch(model, train_loader, optimizer, scheduler)\n": "        train_accelerated("
        "accelerator, model, optimizer, scheduler, train_loader, loss_of, max_norm=float('inf'))\n",
        "    return model\n\n\nif": "    return accelerator.unwrap_model(model)\n\n\nif",
    }
    strangers.classifier_learns_the_same(stranger_files, LESSON.source("copy") + mine, edits, capsys)


IN_A_COMPETITION = """
import math

def loss_of(model, batch):
    inputs, labels = batch
    losses.append(nn.SmoothL1Loss()(model(inputs), labels))
    return losses[-1]

losses = []
"""
COMPETITION_EDITS = {
    "    batch_size = 32\n": "    batch_size = 8\n",
    "= len(train_loader) * CFG.epochs": "= math.ceil(len(train_loader) / 4) * CFG.epochs",
    "    scaler = torch.amp.GradScaler(CFG.device, enabled=CFG.apex)\n": "    accelerator = Accelerator(\n"
    "        mixed_precision='bf16' if CFG.apex else 'no', gradient_accumulation_steps=4)\n"
    "    model, optimizer, scheduler, train_loader, valid_loader = accelerator.prepare(\n"
    "        model, optimizer, scheduler, train_loader, valid_loader)\n",
    "        loss = train_fn(train_loader, model, criterion, optimizer, scheduler, scaler)\n": "        "
    "train_accelerated(accelerator, model, optimizer, scheduler, train_loader, loss_of, CFG.max_grad_norm)\n"
    "        loss = torch.stack(losses).mean().item()\n",
    "    return model, preds\n": "    return accelerator.unwrap_model(model, keep_fp32_wrapper=False), preds\n",
}


@pytest.mark.parametrize("apex", [False, True], ids=["fp32", "half precision"])
def test_in_a_strangers_competition_script(stranger_files, monkeypatch, capsys, apex):
    """Its parameter groups, schedule, clipping, folds, validation, and the rows' order in the submission."""
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    plain = competition(stranger_files, monkeypatch)
    changed = competition(stranger_files, monkeypatch, LESSON.source("copy") + IN_A_COMPETITION, COMPETITION_EDITS)
    plain.CFG.apex = changed.CFG.apex = apex
    (before, submission), (after, submitted) = plain.main(), changed.main()
    torch.manual_seed(42)
    if not apex:  # which rounds to bf16
        assert same_weights(before, after, plain.CustomModel())
        one, other = (line.partition("MCRMSE")[2] for line in capsys.readouterr().out.splitlines())
        assert one == other, "the same score in validation"
    assert (submission.id == submitted.id).all() and submitted.notna().all(axis=None)
    distance = (submission - submitted).abs().max().max()
    assert distance <= (0.05 if apex else 1e-3), f"predictions are {distance} apart"


def test_a_competition_script_takes_less_memory(stranger_files, monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    plain = competition(stranger_files, monkeypatch)
    changed = competition(stranger_files, monkeypatch, LESSON.source("copy") + IN_A_COMPETITION, COMPETITION_EDITS)

    def peak(script, size, train):
        script.CFG.apex = False
        model = script.CustomModel().to(script.CFG.device)
        optimizer = torch.optim.AdamW(script.get_optimizer_params(model))
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        frame = script.pd.read_csv(stranger_files / "scores" / "train.csv").iloc[:32]
        tokenizer = script.AutoTokenizer.from_pretrained(script.CFG.model)
        loader = DataLoader(script.TextDataset(frame, tokenizer), size)
        return measure.memory(lambda: train(script, model, optimizer, scheduler, loader), model, optimizer).peak

    def under_accelerate(script, *objects):
        accelerator = Accelerator(gradient_accumulation_steps=4)
        script.train_accelerated(accelerator, *accelerator.prepare(*objects), script.loss_of)

    def as_it_was(script, model, optimizer, scheduler, loader):
        no_scaler = torch.amp.GradScaler(enabled=False)
        script.train_fn(loader, model, script.nn.SmoothL1Loss(), optimizer, scheduler, no_scaler)

    ratio = peak(changed, 8, under_accelerate) / peak(plain, 32, as_it_was)
    assert ratio < 0.6, ratio


def test_in_a_strangers_decoder(stranger_files, monkeypatch, capsys):
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    mine = "\nimport math\n\ndef loss_of(model, batch):\n    return model(**batch).loss\n"
    edits = {
        "EPOCHS * len(loaders[0]))\n": "EPOCHS * len(loaders[0]))\n"
        "    accelerator = Accelerator()\n"
        "    model, optimizer, scheduler, *loaders = accelerator.prepare(model, optimizer, scheduler, *loaders)\n",
        "        train(model, loaders[0], optimizer, scheduler)\n": "        train_accelerated("
        "accelerator, model, optimizer, scheduler, loaders[0], loss_of)\n",
    }
    plain, changed = strangers.load("decoder"), strangers.load("decoder", LESSON.source("copy") + mine, edits)
    files = [stranger_files / name for name in ("llama", "bert", "train.jsonl", "valid.jsonl")]
    before = plain.main(*files)
    *_, one = capsys.readouterr().out.splitlines()
    after = changed.main(*files)
    *_, other = capsys.readouterr().out.splitlines()
    assert one == other and "perplexity" in one
    assert same_weights(before, after, plain.AutoModelForCausalLM.from_pretrained(stranger_files / "llama"))


def test_the_pages_length_of_a_schedule():
    """Each process has its share of the micro-batches; a prepared schedule steps once for each process."""
    page = "".join(source(cell) for cell in LESSON.cells if cell["id"] == "script")
    (formula,) = re.findall(r"`(math\.ceil\(len\(train_loader\)[^`]*)`", page)
    for n, micro_batches in itertools.product((1, 2, 3), range(1, 40)):
        steps = math.ceil(math.ceil(micro_batches / n) / 4)
        assert eval(formula, {"math": math, "train_loader": range(micro_batches), "n": n}) == steps * n


def test_an_epoch_begins_in_training_mode():
    model = regressor()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    ready = accelerator.prepare(model, optimizer, scheduler, DataLoader(Ratings(16), batch_size=8))
    ready[0].eval()
    train_accelerated(accelerator, *ready, loss_of)
    assert all(module.training for module in model.modules())


def test_the_exercise_refuses_windows_of_four_that_are_written_down():
    said = answer_to_exercise(LESSON, ("% accelerator.gradient_accumulation_steps", "% 4"))
    assert "not yet: stopped after 5, in windows of 3" in said
