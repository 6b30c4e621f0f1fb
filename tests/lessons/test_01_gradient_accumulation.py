import pytest
import strangers
import torch
from stranger import Ratings, regressor
from strangers import competition, same_weights
from torch.utils.data import DataLoader

from notebooks import answer_to_exercise, copied, lesson, proof_fails
from tutorial_utils import measure

LESSON = lesson("01")
COPIED = copied(LESSON)
NO_SCALER = torch.amp.GradScaler(enabled=False)


def loss_of(model, batch):
    return model(**batch).loss


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("count(batch) / total * ", ""),
        ("count(batch) / total * ", "count(batch) / 32 * "),
        ("count(batch) / total * ", "(count(batch) / total + 1e-3) * "),
    ],
    ids=["a lost share", "a wrong count", "a small bias"],
)
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


def test_copied():
    """A regression: the same gradient as the large batch, also in a short window, in less memory."""
    train = COPIED["train_accumulated"]

    def gradient(batch_size, steps, count):
        model = regressor().double().eval()
        before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        loader = ({**b, "labels": b["labels"].double()} for b in DataLoader(Ratings(count), batch_size=batch_size))
        train(model, optimizer, loader, loss_of, scheduler.step, NO_SCALER, steps, max_norm=float("inf"))
        return before - torch.nn.utils.parameters_to_vector(model.parameters()).detach()

    for batch_size, steps, count in ((4, 4, 16), (4, 4, 8), (4, 4, 14)):
        whole = gradient(count, 1, count)
        in_parts = gradient(batch_size, steps, count)
        assert (in_parts - whole).norm() <= 1e-6 * whole.norm(), (batch_size, steps, count)

    def peak(batch_size, steps):
        model = regressor()
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        loader = DataLoader(Ratings(64), batch_size=batch_size)
        step = lambda: train(model, optimizer, loader, loss_of, scheduler.step, NO_SCALER, steps)  # noqa: E731
        return measure.memory(step, model, optimizer).peak

    assert peak(8, 8) < 0.4 * peak(64, 1)


def test_a_micro_batch_or_a_window_may_have_no_targets():
    """Its sum, divided as the page says: no window loses its rows, and no loss is NaN."""
    from transformers import BatchEncoding

    ids, targets = Ratings(48).ids, torch.arange(48) % 2  # three windows, and the last has none
    targets[4:8] = targets[13] = targets[32:] = -100

    def count(batch):
        return (batch["labels"] != -100).sum().item()

    def losses_of(model, batch):
        logits = model(input_ids=batch["input_ids"]).logits.double().expand(-1, 2) * torch.tensor([1.0, -1.0])
        summed = torch.nn.functional.cross_entropy(logits, batch["labels"], reduction="sum", ignore_index=-100)
        seen.append(summed / (count(batch) or 1))
        return seen[-1]

    ways, seen = [], []
    for size in (16, 4):
        model = regressor().double().eval()
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        batches = [BatchEncoding({"input_ids": ids[n : n + size], "labels": targets[n : n + size]})
                   for n in range(0, 48, size)]  # fmt: skip
        train = COPIED["train_accumulated"]
        train(model, sgd, batches, losses_of, lambda: None, NO_SCALER, 16 // size, max_norm=float("inf"), count=count)
        ways.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
    start = torch.nn.utils.parameters_to_vector(regressor().double().parameters()).detach()
    assert (ways[1] - ways[0]).norm() <= 1e-6 * (ways[0] - start).norm() and all(map(torch.isfinite, seen))


def test_steps_the_optimizer_and_the_scheduler_once_a_window():
    model = regressor()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    loader = DataLoader(Ratings(40), batch_size=4)
    COPIED["train_accumulated"](model, optimizer, loader, loss_of, scheduler.step, NO_SCALER, 4)
    assert scheduler.last_epoch == 3  # 10 micro-batches in windows of 4
    assert all(p.grad is None for p in model.parameters())


def test_a_scaler_changes_nothing():
    """In fp32, with a real scaler: gradients are scaled, and back before they are clipped."""

    def trained(scaler):
        model = regressor()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        loader = DataLoader(Ratings(40), batch_size=4)
        COPIED["train_accumulated"](model, optimizer, loader, loss_of, scheduler.step, scaler, 4, max_norm=0.1)
        return torch.nn.utils.parameters_to_vector(model.parameters())

    torch.testing.assert_close(trained(torch.amp.GradScaler("cpu")), trained(NO_SCALER))


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(7, 3),
        {"labels": torch.zeros(7, 2)},
        (torch.zeros(7), torch.zeros(7)),
        [{"ids": torch.zeros(7, 3)}, torch.zeros(7)],
        (["a"] * 7, {"ids": torch.zeros(7, 3)}, torch.zeros(7)),
        (torch.zeros(7, 3), {"score": torch.zeros(7), "topic": torch.zeros(7)}),
        [torch.zeros(7, 3), [torch.zeros(7), torch.zeros(7)]],
        ({"ids": torch.zeros(7, 3)}, torch.zeros(7), ["a"] * 7),
        {"ids": torch.zeros(7, 3), "labels": torch.zeros(7), "number": torch.tensor(3), "names": [4, 5]},
    ],
    ids=[
        "a tensor",
        "a dictionary",
        "a tuple",
        "inputs and targets",
        "names, inputs and targets",
        "targets by name",
        "a pair",
        "names last",
        "a number and names last",
    ],
)
def test_rows_of_a_batch(batch):
    assert COPIED["_rows"](batch) == 7


@pytest.mark.parametrize("last", [torch.ones(2), {"weights": torch.ones(1)}], ids=["class weights", "one weight"])
def test_tensors_of_different_lengths_are_an_error(last):
    """None of them says how much the batch weighs: the gradient would be a little wrong, silently."""
    with pytest.raises(ValueError, match="too many values to unpack"):
        COPIED["_rows"](({"ids": torch.zeros(7, 3)}, torch.zeros(7), last))


@pytest.mark.parametrize(
    "batch", [(["one", "two"], ["three", "four"]), {"ids": [[1, 2], [3]]}, [], 7], ids=["texts", "lists", "none", "7"]
)
def test_a_batch_without_tensors_is_an_error(batch):
    """Its share would be 0 of 0: a loss would be shown, and nothing trained."""
    model = regressor()

    def texts_of(model, _):
        return model(input_ids=torch.ones(2, 3, dtype=torch.long)).logits.mean()

    def epoch(**count):
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        COPIED["train_accumulated"](model, sgd, [batch] * 2, texts_of, lambda: None, NO_SCALER, 2, **count)
        return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()

    start = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    with pytest.raises(ZeroDivisionError):
        epoch()
    assert not torch.equal(epoch(count=lambda batch: 2), start), "with the number of texts it trains"


def peak_of(step, model):
    return measure.memory(step, model, torch.optim.SGD(model.parameters(), lr=0.0)).peak


def test_in_a_strangers_classifier(stranger_files, capsys):
    mine = """
import math

def loss_of(model, batch):
    return model(**batch.to(device)).loss
"""
    edits = {
        "        train_one_epoch(model, train_loader, optimizer, scheduler)\n": "        model.train()\n"
        "        train_accumulated(model, optimizer, train_loader, loss_of, scheduler.step,\n"
        "                          torch.amp.GradScaler(enabled=False), 4, max_norm=float('inf'))\n",
        "args.epochs * len(train_loader)": "args.epochs * math.ceil(len(train_loader) / 4)",
    }
    strangers.classifier_learns_the_same(stranger_files, LESSON.source("copy") + mine, edits, capsys)


IN_A_COMPETITION = """
import math

def loss_of(model, batch):
    inputs, labels = batch
    inputs = {k: v.to(CFG.device) for k, v in inputs.items()}
    with torch.autocast(CFG.device, enabled=CFG.apex):
        loss = nn.SmoothL1Loss()(model(inputs), labels.to(CFG.device))
    losses.append(loss.item())
    return loss

losses = []
"""
COMPETITION_EDITS = {
    "        loss = train_fn(train_loader, model, criterion, optimizer, scheduler, scaler)\n": "        model.train()\n"
    "        train_accumulated(model, optimizer, train_loader, loss_of, scheduler.step, scaler, 4, CFG.max_grad_norm)\n"
    "        loss = np.mean(losses)\n",
    "    batch_size = 32\n": "    batch_size = 8\n",
    "= len(train_loader) * CFG.epochs": "= math.ceil(len(train_loader) / 4) * CFG.epochs",
}


@pytest.mark.parametrize("apex", [False, True], ids=["fp32", "autocast and a scaler"])
def test_in_a_strangers_competition_script(stranger_files, monkeypatch, apex):
    plain = competition(stranger_files, monkeypatch)
    changed = competition(stranger_files, monkeypatch, LESSON.source("copy") + IN_A_COMPETITION, COMPETITION_EDITS)
    plain.CFG.apex = changed.CFG.apex = apex
    (before, submission), (after, submitted) = plain.main(), changed.main()
    torch.manual_seed(42)
    if not apex:  # which rounds to bf16
        assert same_weights(before, after, plain.CustomModel())
    assert (submission.id == submitted.id).all() and submitted.notna().all(axis=None)
    distance = (submission - submitted).abs().max().max()
    assert distance <= (0.05 if apex else 1e-3), f"predictions are {distance} apart"


def test_a_competition_script_takes_less_memory(stranger_files, monkeypatch):
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
        return measure.memory(lambda: train(script, loader, model, optimizer, scheduler), model, optimizer).peak

    def accumulated(script, loader, model, optimizer, scheduler):
        script.train_accumulated(model, optimizer, loader, script.loss_of, scheduler.step, NO_SCALER, 4)

    def as_it_was(script, loader, model, optimizer, scheduler):
        script.train_fn(loader, model, script.nn.SmoothL1Loss(), optimizer, scheduler, NO_SCALER)

    ratio = peak(changed, 8, accumulated) / peak(plain, 32, as_it_was)
    assert ratio < 0.6, ratio


def test_in_a_strangers_decoder(stranger_files, capsys):
    mine = """
import math

def loss_of(model, batch):
    return model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss

def tokens(batch):
    return (batch["labels"][:, 1:] != -100).sum().item()
"""
    call = "train_accumulated(model, optimizer, loaders[0], loss_of, scheduler.step,\n" + " " * 26
    call += "torch.amp.GradScaler(enabled=False), 4, count=tokens)"
    edits = {
        "LR, BATCH_SIZE, EPOCHS = 96, 1e-3, 16, 1": "LR, BATCH_SIZE, EPOCHS = 96, 1e-3, 4, 1",
        "        train(model, loaders[0], optimizer, scheduler)\n": f"        model.train()\n        {call}\n",
        "EPOCHS * len(loaders[0])": "EPOCHS * math.ceil(len(loaders[0]) / 4)",
    }
    plain = strangers.load("decoder")
    changed = strangers.load("decoder", LESSON.source("copy") + mine, edits)
    unweighted = strangers.load("decoder", LESSON.source("copy") + mine, {
        old: new.replace(", count=tokens", "") for old, new in edits.items()})  # fmt: skip
    files = [stranger_files / name for name in ("llama", "bert", "train.jsonl", "valid.jsonl")]
    before, after, means = plain.main(*files), changed.main(*files), unweighted.main(*files)
    start = plain.AutoModelForCausalLM.from_pretrained(stranger_files / "llama")
    assert same_weights(before, after, start)
    assert not same_weights(before, means, start), "the mean of means is another gradient"
    assert "perplexity" in capsys.readouterr().out


def test_the_exercise_refuses_one_backward_pass_for_a_window():
    """It keeps the activations of all its micro-batches: the memory of the large batch."""
    said = answer_to_exercise(
        LESSON,
        ("(loss_of(model, batch) * _rows(batch)).backward()",
         "total = (total if seen else 0.0) + loss_of(model, batch) * _rows(batch)"),
        ("            for parameter in", "            total.backward()\n            for parameter in"),
    )  # fmt: skip
    assert "not yet: 3 steps of 3, weights" in said and "peak" in said


def test_a_loss_that_pops_its_labels_is_counted_before():
    def loss_of(model, batch):
        labels = batch.pop("labels")
        return (model(batch["x"])[:, 0] - labels).square().mean()

    model = torch.nn.Linear(2, 1)
    loader = [{"x": torch.ones(2, 2), "labels": torch.ones(2)} for _ in range(4)]
    given = model, torch.optim.SGD(model.parameters(), lr=0.1), loader, loss_of, lambda: None
    scaler = torch.amp.GradScaler(enabled=False)
    COPIED["train_accumulated"](*given, scaler, 2, count=lambda batch: len(batch["labels"]))
    assert not any("labels" in batch for batch in loader)


def moved(train, model) -> float:
    start = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    train(torch.optim.SGD(model.parameters(), lr=1.0))
    return (torch.nn.utils.parameters_to_vector(model.parameters()).detach() - start).norm().item()


def test_it_clips_to_max_norm():
    model, loader = regressor().eval(), DataLoader(Ratings(8), 4)
    way = moved(lambda sgd: COPIED["train_accumulated"](
        model, sgd, loader, loss_of, lambda: None, NO_SCALER, 2, max_norm=0.01), model)  # fmt: skip
    assert way == pytest.approx(0.01, rel=1e-2)


def test_class_weights_are_counted_as_the_page_says():
    weights, ids, labels = torch.tensor([1.0, 4.5]).double(), Ratings(16).ids, (torch.arange(16) < 5).long()

    def losses_of(model, batch):
        logits = model(input_ids=batch["input_ids"]).logits.expand(-1, 2) * torch.tensor([1.0, -1.0])
        return torch.nn.functional.cross_entropy(logits, batch["labels"], weight=weights)

    def count(batch):
        return weights[batch["labels"]].sum().item()

    ends = []
    for size in (16, 4):
        model = regressor().double().eval()
        parts = [{"input_ids": ids[n : n + size], "labels": labels[n : n + size]} for n in range(0, 16, size)]
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        COPIED["train_accumulated"](
            model, sgd, parts, losses_of, lambda: None, NO_SCALER, 16 // size, float("inf"), count)  # fmt: skip
        ends.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
    start = torch.nn.utils.parameters_to_vector(regressor().double().parameters()).detach()
    assert (ends[1] - ends[0]).norm() <= 1e-6 * (ends[0] - start).norm()


def test_the_exercise_refuses_gradients_left_after_the_last_window():
    zero = "            optimizer.zero_grad()"
    said = answer_to_exercise(LESSON, (zero, f"{zero} if batch else None"))
    assert said.startswith("not yet: 3 steps of 3, weights")
