from types import SimpleNamespace

import numpy as np
import pytest
import strangers
import torch
from stranger import Ratings, regressor
from torch.utils.data import DataLoader

from notebooks import copied, lesson, proof_fails
from tutorial_utils import measure

LESSON = lesson("00")
COPIED = copied(LESSON)
ROLES = {"weights", "optimizer state", "gradients", "activations"}


def loss_of(model, batch):
    return model(**batch).loss


def in_bytes(roles):
    return {role: round(mib * 2**20) for role, mib in roles.items()}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    loss_of(model, batch).backward()", "    (loss_of(model, batch) + loss_of(model, batch)).backward()"),
        ("storage.nbytes()", "storage.nbytes() // 2"),
        (" if address not in weights", ""),
        ("with torch.random.fork_rng(gpus), torch", "with torch"),
        ("grad(loss, trained,", "grad(loss, trained[1:],"),
    ],
    ids=["another step", "half of the bytes", "weights twice", "other random numbers", "a gradient less"],
)
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


def test_copied():
    """GPT-2, whose head shares the embedding's storage: tied weights count once."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=500, n_positions=64))
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(500, (4, 32))
    batch = {"input_ids": ids, "labels": ids}
    parameters = sum(p.numel() for p in model.parameters())
    buffers = sum(b.nbytes for b in model.buffers())
    held = in_bytes(COPIED["memory_by_role"](model, optimizer, loss_of, batch))
    assert held["optimizer state"] == 0 and all(p.grad is None for p in model.parameters())
    loss_of(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    held = in_bytes(COPIED["memory_by_role"](model, optimizer, loss_of, batch))
    assert held["weights"] == 4 * parameters + buffers
    assert held["gradients"] == 4 * parameters
    assert held["optimizer state"] == 8 * parameters + 4 * len(list(model.parameters()))


def test_frozen_layers_and_checkpointing_are_seen():
    """Frozen parameters have neither gradient nor state; checkpointed layers keep their inputs alone."""

    def held(prepare):
        model = regressor(layers=4).train()
        prepare(model)
        optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
        batch = next(iter(DataLoader(Ratings(16), batch_size=16)))
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        return COPIED["memory_by_role"](model, optimizer, loss_of, batch)

    plain = held(lambda model: None)
    frozen = held(lambda model: model.distilbert.requires_grad_(False))
    assert frozen["weights"] == plain["weights"]
    assert max(frozen[role] / plain[role] for role in ("gradients", "optimizer state", "activations")) < 0.2
    checkpointed = held(lambda model: model.gradient_checkpointing_enable({"use_reentrant": False}))
    assert checkpointed["activations"] < 0.4 * plain["activations"]
    assert checkpointed["gradients"] == plain["gradients"]
    with pytest.raises(RuntimeError, match="use_reentrant"):
        held(lambda model: model.gradient_checkpointing_enable({"use_reentrant": True}))


def test_what_a_look_leaves_alone():
    """A head beside the model, gradients of a window that is not whole, an optimizer in the backward pass."""
    model, head = regressor(layers=1).train(), torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()])
    batch = next(iter(DataLoader(Ratings(8), batch_size=8)))

    def loss_of(model, batch):
        return head(model(**batch).logits).square().mean()

    loss_of(model, batch).backward()
    waiting = [p.grad.clone() for p in (*model.parameters(), *head.parameters())]
    held = in_bytes(COPIED["memory_by_role"](model, optimizer, loss_of, batch))
    left = [p.grad for p in (*model.parameters(), *head.parameters())]
    assert all(map(torch.equal, waiting, left)), "the window's gradients changed"
    parameters = (*model.parameters(), *head.parameters())
    assert held["gradients"] == sum(p.nbytes for p in parameters)
    assert held["weights"] == sum(tensor.nbytes for tensor in (*parameters, *model.buffers()))
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: pytest.fail("an optimizer would have stepped"))
    COPIED["memory_by_role"](model, optimizer, loss_of, batch)


def test_a_step_that_runs_out_of_memory_leaves_nothing():
    model = regressor(layers=4)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = next(iter(DataLoader(Ratings(64), batch_size=64)))
    step = lambda: loss_of(model, batch).backward()  # noqa: E731
    peak = measure.memory(step, model, None, batch).peak
    model.zero_grad()
    with measure.Tracker(model, optimizer, batch, card=peak // 2) as card:
        before = card.bytes
        try:
            COPIED["memory_by_role"](model, optimizer, loss_of, batch)
            pytest.fail("it fits")
        except torch.OutOfMemoryError:
            pass
        assert card.bytes - before < 0.02 * peak


def same_weights(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def check(looked, model, untrained="-"):
    """One look in a run, at its second batch: bytes as by the formulas."""
    (roles,) = looked
    held, storages = in_bytes(roles), {}
    for tensor in (*model.parameters(), *model.buffers()):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    trained = [parameter.numel() for name, parameter in model.named_parameters() if untrained not in name]
    assert set(held) >= ROLES and held["activations"] > 2**20
    assert held["weights"] == sum(storages.values())
    assert held["gradients"] == 4 * sum(trained)
    if not torch.cuda.is_available():
        assert held["optimizer state"] == 8 * sum(trained) + 4 * len(trained)


LOOK = """
        if step == 1:
            looked.append(memory_by_role(model, optimizer, loss_of, batch))
"""


def test_in_a_strangers_classifier(stranger_files, capsys):
    def arguments(batch_size):
        files = dict(train=stranger_files / "train.csv", valid=stranger_files / "valid.csv")
        return SimpleNamespace(model=stranger_files / "bert", **files, epochs=1, batch_size=batch_size)

    mine = """
looked = []

def loss_of(model, batch):
    return model(**batch.to(device)).loss
"""
    edits = {
        "    model.train()\n    for batch in loader:\n": "    model.train()\n    for step, batch in enumerate(loader):"
        + LOOK
    }
    plain = strangers.load("classifier")
    changed = strangers.load("classifier", LESSON.source("copy") + mine, edits)
    before, after = plain.main(arguments(16)), changed.main(arguments(16))
    one, other = capsys.readouterr().out.splitlines()
    assert one == other and same_weights(before, after), "looking changes nothing"
    check(changed.looked, after)
    changed.main(arguments(32))
    few, many = (roles["activations"] for roles in changed.looked)
    assert 1.6 < many / few < 2.4, "twice the texts, of another length"


@pytest.mark.parametrize("apex", [False, True], ids=["fp32", "autocast and a scaler"])
def test_in_a_strangers_competition_script(stranger_files, monkeypatch, apex):
    monkeypatch.setenv("DATA", str(stranger_files / "scores"))
    monkeypatch.setenv("MODEL", str(stranger_files / "bert"))
    mine = """
looked = []

def loss_of(model, batch):
    inputs, labels = batch
    inputs = {k: v.to(CFG.device) for k, v in inputs.items()}
    with torch.autocast(CFG.device, enabled=CFG.apex):
        return nn.SmoothL1Loss()(model(inputs), labels.to(CFG.device))
"""
    edits = {
        "    for inputs, labels in train_loader:\n": "    for step, batch in enumerate(train_loader):"
        + LOOK
        + "        inputs, labels = batch\n"
    }
    plain = strangers.load("competition")
    changed = strangers.load("competition", LESSON.source("copy") + mine, edits)
    plain.CFG.apex = changed.CFG.apex = apex
    (before, submission), (after, submitted) = plain.main(), changed.main()
    assert same_weights(before, after), "looking changes nothing"
    assert (submission.id == submitted.id).all() and np.array_equal(submission.values, submitted.values)
    check(changed.looked, after, untrained="model.pooler")  # whose output the script does not use


def test_autocast_shows_in_a_competition_script(stranger_files, monkeypatch):
    monkeypatch.setenv("MODEL", str(stranger_files / "bert"))
    script = strangers.load("competition")
    frame = script.pd.read_csv(stranger_files / "scores" / "train.csv").iloc[:32]
    tokenizer = script.AutoTokenizer.from_pretrained(script.CFG.model)
    batch = next(iter(DataLoader(script.TextDataset(frame, tokenizer), 32)))
    model = script.CustomModel()
    optimizer = torch.optim.AdamW(script.get_optimizer_params(model))

    def held(enabled):
        def loss_of(model, batch):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                return script.nn.SmoothL1Loss()(model(batch[0]).float(), batch[1])

        return COPIED["memory_by_role"](model, optimizer, loss_of, batch)

    full, half = held(False), held(True)
    assert half["activations"] < 0.8 * full["activations"] and half["weights"] == full["weights"]


def test_in_a_strangers_decoder(stranger_files, capsys):
    mine = """
looked = []

def loss_of(model, batch):
    return model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
"""
    edits = {"    for step, batch in enumerate(loader):\n": "    for step, batch in enumerate(loader):" + LOOK}
    plain = strangers.load("decoder")
    changed = strangers.load("decoder", LESSON.source("copy") + mine, edits)
    files = [stranger_files / name for name in ("llama", "bert", "train.jsonl", "valid.jsonl")]
    before, after = plain.main(*files), changed.main(*files)
    assert same_weights(before, after), "looking changes nothing"
    lines = capsys.readouterr().out.splitlines()
    assert lines[: len(lines) // 2] == lines[len(lines) // 2 :], "the same losses and perplexity"
    check(changed.looked, after)
