from types import SimpleNamespace

import pytest
import strangers
import torch
from stranger import Ratings, regressor
from torch.utils.data import DataLoader

from notebooks import copied, lesson, names, proof_fails, run, source, tags
from tutorial_utils import bounds

LESSON = lesson("22")
wrong_together = copied(LESSON)["wrong_together"]
NO_GRADIENT, NOT_HANDED = "trained, but no gradient reaches it", "trained, but not in the optimizer"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("with torch.random.fork_rng(range(torch.cuda.device_count())):", "if True:"),
        ("torch.autograd.grad(loss, [*trained], allow_unused=True)", "loss.backward() or [p.grad for p in trained]"),
    ],
    ids=["the check draws random numbers", "the check leaves gradients"],
)
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


def cells_for(name):
    """The sources of the cell of that id, and before it of those that define what it uses, and what they use."""
    *before, last = LESSON.code[: [cell["id"] for cell in LESSON.code].index(name) + 1]
    needed, (_, uses) = [source(last)], names(source(last))
    for one in reversed(before):
        defines, used = names(source(one))
        if defines & uses or "setup" in tags(one):
            needed.insert(0, source(one))
            uses = (uses - defines) | used
    return needed


# What brings an activation back: from main memory to a GPU, or out of NumPy on a CPU.
BACK = "return kept.to(device)" if torch.cuda.is_available() else "return torch.from_numpy(kept).clone()"


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("exact", '(loss * size / len(inputs["labels"])).backward()', "loss.backward()"),
        ("exact", "optimizer.param_groups, p.grad = groups, None", "optimizer.param_groups = groups"),
        ("exact", BACK, f"{BACK}.roll(1)"),
        ("pitfall-micro-batches", "step_in_backward(optimizer) if hooked else optimizer", "optimizer"),
        ("pitfall-reentrant", "use_reentrant=reentrant", "use_reentrant=False"),
        (
            "pitfall-scaler",
            'step_in_backward(OPTIMIZERS["adamw"](model := fresh()))',
            'OPTIMIZERS["adamw"](model := fresh())',
        ),
        ("pitfall-early", "if early else None", "if False else None"),
        ("offloading", "    if checkpointed:", "    if False:"),
    ],
)
def test_the_evidence_can_fail(name, old, new):
    if name == "pitfall-early":
        pytest.importorskip("peft")
    *before, last = cells_for(name)
    assert any(old in code for code in (*before, last)), old
    namespace = {}
    for code in before:
        run(code.replace(old, new), namespace)
    with pytest.raises(AssertionError):
        run(last.replace(old, new), namespace)


def loss_of(model, batch):
    return model(**batch).loss


@pytest.fixture
def batch():
    return next(iter(DataLoader(Ratings(4), batch_size=4)))


def adamw(model):
    return torch.optim.AdamW([{"params": list(model.parameters()), "lr": 1e-3}])


def test_copied(batch):
    """Nothing is wrong with a plain step of another architecture, and nothing is left behind."""
    model = regressor()
    optimizer, state = adamw(model), torch.get_rng_state()
    assert wrong_together(model, optimizer, loss_of, batch) == {}
    assert torch.equal(state, torch.get_rng_state())
    assert not optimizer.state and all(p.grad is None for p in model.parameters())


def test_frozen_input_under_reentrant_checkpoints(batch):
    model = regressor()
    model.distilbert.embeddings.requires_grad_(False)
    for reentrant in (True, False):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.disable_input_require_grads()
        found = wrong_together(model, adamw(model), loss_of, batch)
        if reentrant:
            layers = [n for n, _ in model.named_parameters() if ".layer." in n]
            assert found == {NO_GRADIENT: sorted(layers)}
        else:
            assert found == {}


def test_reentrant_checkpoints_say_so(batch):
    """torch cannot give gradients of chosen tensors through them: the answer has its words, and does not raise."""
    model = regressor()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    (said,) = wrong_together(model, adamw(model), loss_of, batch)
    assert "use_reentrant=True" in said


def test_too_little_memory_is_no_answer(batch, monkeypatch):
    def grad(*_, **__):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch.autograd, "grad", grad)
    model = regressor()
    with pytest.raises(torch.OutOfMemoryError):
        wrong_together(model, adamw(model), loss_of, batch)


def test_steps_in_backward(batch):
    model = regressor()
    optimizer = adamw(model)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda _: pytest.fail("the check steps"))
    on, off = (torch.amp.GradScaler("cpu", enabled=enabled) for enabled in (True, False))
    assert wrong_together(model, optimizer, loss_of, batch, scaler=off) == {}
    for options in ({"steps": 2}, {"scaler": on}):
        ((said, found),) = wrong_together(model, optimizer, loss_of, batch, **options).items()
        assert said.startswith("steps in the backward pass") and len(found) == len(list(model.parameters()))


def test_an_optimizer_that_was_built_too_early(batch):
    model = regressor()
    optimizer = adamw(model)
    model.classifier = torch.nn.Linear(64, 1)
    assert wrong_together(model, optimizer, loss_of, batch) == {
        NOT_HANDED: ["classifier.bias", "classifier.weight"],
        "in the optimizer, but no longer in the model": ["of shape [1, 64]", "of shape [1]"],
    }
    model.classifier.requires_grad_(False)  # frozen, and handed over all the same: no harm
    assert NOT_HANDED not in wrong_together(model, adamw(model), loss_of, batch)


def test_a_model_that_is_frozen_as_a_whole(batch):
    model = regressor().requires_grad_(False)
    ((said, found),) = wrong_together(model, adamw(model), loss_of, batch).items()
    assert "grad" in said and found == sorted(name for name, _ in model.named_parameters())


CALL = """if not FOUND:
            FOUND.append(wrong_together(model, optimizer, {loss_of}, {batch}{more}))
        """
CHECK = LESSON.source("copy") + "\n\nFOUND = []\n"


def equal(one, other):
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


def test_in_a_strangers_classifier(stranger_files, capsys):
    line = "loss = model(**batch).loss"
    call = CALL.format(loss_of="lambda model, batch: model(**batch).loss", batch="batch", more="")
    plain, checked = strangers.load("classifier"), strangers.load("classifier", CHECK, {line: call + line})
    frames = dict(train=stranger_files / "train.csv", valid=stranger_files / "valid.csv", epochs=1, batch_size=32)
    before, after = (s.main(SimpleNamespace(model=stranger_files / "bert", **frames)) for s in (plain, checked))
    assert checked.FOUND == [{}] and equal(before, after)
    one, other = capsys.readouterr().out.splitlines()
    assert one == other, "the same accuracy"


REENTRANT = """self.pool = MeanPooling()
        self.model.embeddings.requires_grad_(False)
        self.model.gradient_checkpointing_enable({"use_reentrant": REENTRANT})
        self.model.disable_input_require_grads()"""


@pytest.mark.filterwarnings("ignore")
def test_in_a_strangers_competition(stranger_files, monkeypatch, capsys):
    line = "labels = labels.to(CFG.device)"
    call = CALL.format(
        loss_of="lambda model, batch: criterion(model(batch[0]), batch[1])", batch="(inputs, labels)",
        more=", scaler=scaler",
    )  # fmt: skip
    after_line = {line: f"{line}\n        {call.rstrip()}"}
    plain = strangers.competition(stranger_files, monkeypatch)
    checked = strangers.competition(stranger_files, monkeypatch, CHECK, after_line)
    (before, submission), (after, submitted) = plain.main(), checked.main()
    pooler = ["model.pooler.dense.bias", "model.pooler.dense.weight"]
    assert [{NO_GRADIENT: pooler}] == checked.FOUND and equal(before, after) and submission.equals(submitted)
    for reentrant, layers in (("True", 64), ("False", 0)):
        edits = {"self.pool = MeanPooling()": REENTRANT.replace("REENTRANT", reentrant)}
        broken = strangers.competition(stranger_files, monkeypatch, CHECK, edits | after_line)
        start = broken.CustomModel().model.encoder.state_dict()
        model, _ = broken.main()
        (found,) = broken.FOUND
        named = [name for name in found[NO_GRADIENT] if "encoder.layer" in name]
        moved = sum(not torch.equal(a, b) for a, b in zip(start.values(), model.model.encoder.state_dict().values()))
        assert len(named) == layers, "the check names every layer's tensors, or none"
        assert (moved == 0) == bool(layers), "and they are those that do not move"


def test_in_a_strangers_decoder(stranger_files, capsys):
    line = "loss = model(**batch).loss\n        loss.backward()"
    call = CALL.format(loss_of="lambda model, batch: model(**batch).loss", batch="batch", more="")
    late = "scheduler = torch.optim.lr_scheduler.CosineAnnealingLR("
    plain = strangers.load("decoder")
    checked, broken = (
        strangers.load("decoder", CHECK, {line: call + line} | edits)
        for edits in ({}, {late: f"model.resize_token_embeddings(9000, mean_resizing=False)\n    {late}"})
    )
    files = [stranger_files / name for name in ("llama", "bert", "train.jsonl", "valid.jsonl")]
    before, after, _ = (script.main(*files) for script in (plain, checked, broken))
    assert checked.FOUND == [{}] and equal(before, after)
    (found,) = {str(one) for one in broken.FOUND}
    assert NOT_HANDED in found and "lm_head" in found and "no longer in the model" in found


@pytest.mark.parametrize("claim", LESSON.course["claims"].values(), ids=list(LESSON.course["claims"]))
def test_claims_can_fail(claim):
    name, apart = claim["figure"], 1.5 * claim["tolerance"]
    others = {one["figure"]: one["claimed"] for one in LESSON.course["claims"].values()}
    for value, right in ((claim["claimed"], True), (claim["claimed"] + apart, False)):
        rows = bounds.claims(LESSON.name, {}, others | {name: value})
        (row,) = (row for row in rows if row["claim"].startswith(claim["claim"]))
        assert row["verdict"].startswith("holds") == right
