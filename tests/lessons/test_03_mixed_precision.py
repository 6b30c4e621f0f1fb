import copy
from types import SimpleNamespace

import pytest
import strangers
import torch
from stranger import Ratings, regressor
from torch.utils.data import DataLoader

from notebooks import answer_to_exercise, copied, lesson, proof_fails
from tutorial_utils import measure

LESSON = lesson("03")
COPIED = copied(LESSON)
TRAIN = COPIED["train_half"]
NO_SCALER = torch.amp.GradScaler("cpu", enabled=False)


def loss_of(model, batch):
    return model(**batch).loss


def nothing():
    pass


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("scaler.scale(loss).backward()", "scaler.scale(loss / 100).backward()"),
        ("        scaler.unscale_(optimizer)\n        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
         "        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)\n        scaler.unscale_(optimizer)"),
        ("        optimizer.zero_grad()\n        if scaler", "        if scaler"),
        ("        scaler.step(optimizer)", "        optimizer.step() if scaler.step(optimizer) is None else None"),
    ],
    ids=["a wrong scale", "clipped before it is unscaled", "gradients that pile up", "two steps"],
)  # fmt: skip
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


def vector(model):
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def plain(model, optimizer, loader):
    for batch in loader:
        loss_of(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def trained(scaler, loader, train=TRAIN):
    model, steps = regressor().eval(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    train(model, optimizer, loader, loss_of, lambda: steps.append(1), torch.device("cpu"), scaler)
    return vector(model), len(steps)


@pytest.mark.parametrize("enabled", [False, True], ids=["bf16", "fp16"])
def test_copied(enabled):
    """A regression: the weights move as in fp32, within the type's rounding, in less memory, and stay fp32."""
    start, loader = vector(regressor()), DataLoader(Ratings(16), batch_size=8)
    model = regressor().eval()
    plain(model, torch.optim.SGD(model.parameters(), lr=1e-2), loader)
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)
    half, steps = trained(scaler, loader)
    assert half.dtype == torch.float32 and steps == 2
    assert 0 < (half - vector(model)).norm() <= 0.05 * (vector(model) - start).norm()

    def peak(train):
        model = regressor(width=128)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        return measure.memory(lambda: train(model, optimizer), model, optimizer).peak

    texts = DataLoader(Ratings(64), batch_size=64)
    in_half = peak(lambda model, optimizer: TRAIN(model, optimizer, texts, loss_of, nothing, "cpu", scaler))
    assert in_half < 0.9 * peak(lambda model, optimizer: plain(model, optimizer, texts))


def test_the_model_runs_in_the_scalers_type():
    """Forward and loss, but not backward, under autocast."""
    seen = []

    def watched(model, batch):
        seen.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)
        loss = loss_of(model, batch)
        loss.register_hook(lambda _: seen.append(torch.is_autocast_enabled("cpu")))
        return loss

    for enabled in (False, True):
        model = regressor()
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        TRAIN(model, torch.optim.SGD(model.parameters()), DataLoader(Ratings(8), 8), watched, nothing, "cpu", scaler)
    assert seen == [torch.bfloat16, False, torch.float16, False]


@pytest.mark.parametrize(
    ("device", "hardware", "fp16"),
    [
        ("cuda", True, False),
        ("cuda", False, True),
        ("cuda:0", False, True),
        (torch.device("cuda"), False, True),
        (0, False, True),
        (0, True, False),
        ("cpu", False, False),
        ("cpu", True, False),
    ],
    ids=["A100", "T4", "T4, numbered", "T4, as a device", "T4, by its number", "A100, by its number"]
    + ["CPU alone", "CPU beside an A100"],
)
def test_fp16_where_the_gpu_has_no_bf16(monkeypatch, device, hardware, fp16):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated=True: asked.append(emulated) or hardware)
    monkeypatch.setattr(torch.amp, "GradScaler", lambda enabled: enabled)
    assert COPIED["scaler_for"](device) == fp16
    assert not any(asked), "emulation does not count"


def test_a_weight_outside_the_optimizer_spoils_the_others():
    """As the page says: the scaler does not know it, its gradient stays scaled, and clipping shrinks all the rest."""
    moved = []
    for everything in (True, False):
        model = regressor().eval()
        start = {name: part.detach().clone() for name, part in model.named_parameters()}
        owned = [name for name in start if everything or "embeddings" not in name]
        sgd = torch.optim.SGD([model.get_parameter(name) for name in owned], lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)  # not so high that the first step is skipped
        TRAIN(model, sgd, DataLoader(Ratings(8), 8), loss_of, nothing, "cpu", scaler, max_norm=0.1)
        moved.append((model.classifier.weight - start["classifier.weight"]).norm().item())
    assert 0 < moved[1] < 0.05 * moved[0]


def test_a_step_that_overflows_is_skipped_and_the_schedule_waits():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    start, _ = trained(scaler, [])
    after, steps = trained(scaler, DataLoader(Ratings(8), batch_size=8))
    assert torch.equal(start, after) and steps == 0 and scaler.get_scale() == 2.0**59


@pytest.mark.parametrize("forget", [nothing, torch.clear_autocast_cache], ids=["as it is", "as the page says"])
def test_weights_that_change_within_a_loss(forget):
    """AWP moves the weights between two forward passes. Autocast goes on with the copies that it has."""
    losses = []

    def adversarial(model, batch):
        losses.append(loss_of(model, batch))
        with torch.no_grad():
            model.classifier.weight.add_(1.0)
        forget()
        losses.append(loss_of(model, batch))
        with torch.no_grad():
            model.classifier.weight.sub_(1.0)
        forget()
        return sum(losses)

    model = regressor().eval()
    TRAIN(model, torch.optim.SGD(model.parameters()), DataLoader(Ratings(8), 8), adversarial, nothing, "cpu", NO_SCALER)
    assert torch.equal(*losses) == (forget is nothing)


def test_groups_keep_their_rates():
    model = regressor()
    head = list(model.classifier.parameters())
    rest = [p for p in model.parameters() if all(p is not q for q in head)]
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD([{"params": rest, "lr": 0.0}, {"params": head, "lr": 0.1}])
    TRAIN(model, optimizer, DataLoader(Ratings(8), 8), loss_of, nothing, "cpu", NO_SCALER)
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {"classifier.weight", "classifier.bias"}


def close(one, other, start, most):
    """How far two models ended from one another, as a share of the way of the first."""
    way, off = (vector(one) - vector(start)).norm(), (vector(one) - vector(other)).norm()
    assert vector(other).dtype == torch.float32 and 0 < off <= most * way, off / way


SCALERS = pytest.mark.parametrize("scaler", ["scaler_for({})", "torch.amp.GradScaler({})"], ids=["bf16", "fp16"])


@SCALERS
def test_in_a_strangers_classifier(stranger_files, capsys, scaler):
    files = dict(train=stranger_files / "train.csv", valid=stranger_files / "valid.csv")
    arguments = SimpleNamespace(model=stranger_files / "bert", **files, epochs=1, batch_size=32)
    mine = """
def loss_of(model, batch):
    return model(**batch.to(device)).loss
"""
    made = "    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)\n"
    edits = {
        made: made + f"    scaler = {scaler.format('device')}\n",
        "        train_one_epoch(model, train_loader, optimizer, scheduler)\n": "        model.train()\n"
        "        train_half(model, optimizer, train_loader, loss_of, scheduler.step, device, scaler, float('inf'))\n",
    }
    short = {"max_length=64": "max_length=24"}  # fp16 is slow on a CPU
    script = strangers.load("classifier", "", short)
    changed = strangers.load("classifier", LESSON.source("copy") + mine, edits | short)
    before, after = script.main(arguments), changed.main(arguments)
    accuracies = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert abs(accuracies[0] - accuracies[1]) <= 0.05
    torch.manual_seed(42)
    start = script.AutoModelForSequenceClassification.from_pretrained(stranger_files / "bert", num_labels=4)
    close(before, after, start, 0.1)

    frame = script.pd.read_csv(files["train"])
    loader = script.make_loader(frame[:32], script.AutoTokenizer.from_pretrained(stranger_files / "bert"), 32, False)
    sgd = torch.optim.SGD(before.parameters(), lr=0.0)
    schedule = torch.optim.lr_scheduler.ConstantLR(sgd, 1.0)
    own = torch.amp.GradScaler("cpu", enabled="Grad" in scaler)

    def peak(step):
        return measure.memory(step, before, sgd).peak

    in_half = peak(lambda: changed.train_half(before, sgd, loader, changed.loss_of, nothing, "cpu", own))
    assert in_half < 0.85 * peak(lambda: script.train_one_epoch(before, loader, sgd, schedule))


@SCALERS
def test_in_a_strangers_competition_script(stranger_files, monkeypatch, scaler):
    monkeypatch.setenv("DATA", str(stranger_files / "scores"))
    monkeypatch.setenv("MODEL", str(stranger_files / "bert"))
    mine = """
def loss_of(model, batch):
    inputs, labels = batch
    inputs = {k: v.to(CFG.device) for k, v in inputs.items()}
    loss = nn.SmoothL1Loss()(model(inputs).float(), labels.to(CFG.device))
    losses.append(loss.item())
    return loss

losses = []
"""
    call = """        model.train()
        train_half(model, optimizer, train_loader, loss_of, scheduler.step, CFG.device, scaler, CFG.max_grad_norm)
        loss = np.mean(losses)
"""
    edits = {
        "torch.amp.GradScaler(CFG.device, enabled=CFG.apex)": scaler.format("CFG.device"),
        "        loss = train_fn(train_loader, model, criterion, optimizer, scheduler, scaler)\n": call,
    }
    short = {"max_len = 64": "max_len = 24"}
    script = strangers.load("competition", "", short)
    changed = strangers.load("competition", LESSON.source("copy") + mine, edits | short)
    script.CFG.apex = False
    (before, submission), (after, submitted) = script.main(), changed.main()
    torch.manual_seed(42)
    close(before, after, script.CustomModel(), 0.2)
    assert (submission.id == submitted.id).all() and submitted.notna().all(axis=None)
    assert (submission - submitted).abs().max().max() <= 0.05
    for target in script.CFG.targets:  # predicted in fp32: no score was rounded to that of another text
        assert submitted[target].nunique() == submission[target].nunique()
        assert submitted[target].corr(submission[target]) > 0.99


@SCALERS
def test_in_a_strangers_decoder(stranger_files, capsys, scaler):
    mine = """
def loss_of(model, batch):
    return model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
"""
    made = "    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)\n"
    edits = {
        made: made + f"    scaler = {scaler.format('device.type')}\n",
        "        train(model, loaders[0], optimizer, scheduler)\n": "        model.train()\n"
        "        train_half(model, optimizer, loaders[0], loss_of, scheduler.step, device.type, scaler)\n",
    }
    short = {"EPOCHS = 96,": "EPOCHS = 40,"}
    script = strangers.load("decoder", "", short)
    changed = strangers.load("decoder", LESSON.source("copy") + mine, edits | short)
    files = [stranger_files / name for name in ("llama", "bert", "train.jsonl", "valid.jsonl")]
    before, after = script.main(*files), changed.main(*files)
    lines = [line for line in capsys.readouterr().out.splitlines() if "perplexity" in line]
    one, other = (float(line.split()[-1]) for line in lines)
    assert abs(one / other - 1) <= 0.01
    close(before, after, script.AutoModelForCausalLM.from_pretrained(stranger_files / "llama"), 0.1)


def test_the_exercise_refuses_a_schedule_that_moves_at_a_skipped_step():
    after_each = (
        "            if scaler.get_scale() >= scale:\n                after_step()",
        "            after_step()",
    )
    assert "not yet: 68 steps and 80 calls of after_step" in answer_to_exercise(LESSON, after_each)
