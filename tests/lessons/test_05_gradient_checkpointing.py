from types import SimpleNamespace

import pytest
import strangers
import torch
from stranger import Ratings, regressor
from strangers import competition
from torch.utils.data import DataLoader
from transformers.modeling_layers import GradientCheckpointingLayer

from notebooks import copied, lesson, proof_fails
from tutorial_utils import measure

LESSON = lesson("05")
checkpoint_layers = copied(LESSON)["checkpoint_layers"]
CALL = "checkpoint_layers(model)\n"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('{"use_reentrant": False, **options}', '{"use_reentrant": False, "preserve_rng_state": False, **options}'),
        ("inner.disable_input_require_grads()", "inner.get_input_embeddings().requires_grad_(False)"),
        ("= number % every_n_layers == 0", "= False"),
        ("= number % every_n_layers == 0", "= number % 2 == 2"),
    ],
    ids=["random state not restored", "a lost gradient", "never switched on", "a wrong count"],
)
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


def runs_of(model):
    """A list that grows by one with each run of a checkpointed kind of layer's first linear layer."""
    runs = []
    for layer in (part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)):
        linear = next(part for part in layer.modules() if isinstance(part, torch.nn.Linear))
        linear.register_forward_pre_hook(lambda *_: runs.append(1))
    return runs


def step(model, batch, optimizer):
    model.train()
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_copied():
    """Another architecture, a regression: the same step with dropout on, in less memory, without a warning."""
    batch = next(iter(DataLoader(Ratings(64), batch_size=64)))

    def model_with(options):
        model = regressor(layers=4)
        if options:
            checkpoint_layers(model, **options)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def stepped(**options):
        model, optimizer = model_with(options)
        runs = runs_of(model)
        torch.manual_seed(3)
        step(model, batch, optimizer)
        return list(model.parameters()), len(runs)

    def peak(**options):
        model, optimizer = model_with(options)
        return measure.memory(lambda: step(model, batch, optimizer), model, optimizer, batch).peak

    plain, once = stepped()
    assert once == 4
    for every, runs in ((1, 8), (2, 6), (3, 6), (4, 5)):
        found, counted = stepped(every_n_layers=every)
        assert counted == runs and all(map(torch.equal, plain, found)), every
    assert peak(every_n_layers=1) < peak(every_n_layers=2) < peak()
    assert peak(every_n_layers=1) < 0.6 * peak()


def test_older_and_newer_names(monkeypatch):
    """The newer name where there is one; else the older, which takes no more than its kwargs."""
    from transformers import PreTrainedModel

    asked = []

    def enable(self, kwargs=None):
        asked.append(kwargs)
        for layer in (part for part in self.modules() if isinstance(part, GradientCheckpointingLayer)):
            layer.gradient_checkpointing = True

    monkeypatch.delattr(PreTrainedModel, "activation_checkpointing_enable", raising=False)
    monkeypatch.setattr(PreTrainedModel, "gradient_checkpointing_enable", enable)
    model = regressor(layers=4)
    checkpoint_layers(model, every_n_layers=2, debug=True)
    monkeypatch.setattr(PreTrainedModel, "activation_checkpointing_enable", enable, raising=False)
    monkeypatch.setattr(PreTrainedModel, "gradient_checkpointing_enable", None)
    checkpoint_layers(model, every_n_layers=2)
    assert asked == [{"use_reentrant": False, "debug": True}, {"use_reentrant": False}]
    assert [layer.gradient_checkpointing for layer in model.distilbert.transformer.layer] == [True, False] * 2


def test_called_twice_over_frozen_layers():
    """No layer runs twice for gradients that nobody wants, and adapters above them get theirs."""
    model = regressor(layers=4)
    for part in (model.distilbert.embeddings, *model.distilbert.transformer.layer[:3]):
        part.requires_grad_(False)
    for _ in range(2):
        checkpoint_layers(model)
    runs = runs_of(model)
    model.train()(**next(iter(DataLoader(Ratings(8), batch_size=8)))).loss.backward()
    assert len(runs) == 5
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


def gradients_of_exchanged_weights(prepare, early):
    """Those of a loss with other weights, which are put back before the backward pass, or after it."""
    model = regressor().train()
    prepare(model)
    own = [p.data for p in model.parameters()]

    def put_back():
        for p, data in zip(model.parameters(), own):
            p.data = data

    for p in model.parameters():
        p.data = 1.5 * p.data
    torch.manual_seed(1)
    loss = model(input_ids=torch.arange(5, 69).view(2, 32)).logits.square().mean()
    for act in (put_back, loss.backward) if early else (loss.backward, put_back):
        act()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("early", [False, True], ids=["put back after it", "put back before it"])
def test_weights_that_are_exchanged_stay_for_the_backward_pass(early):
    """A layer runs again with the weights that are there."""
    plain, found = (gradients_of_exchanged_weights(prepare, early) for prepare in (lambda _: None, checkpoint_layers))
    assert all(map(torch.equal, plain, found)) is not early


def test_nothing_to_switch_is_an_error():
    with pytest.raises(StopIteration):
        checkpoint_layers(torch.nn.Linear(2, 2))


def test_selective_checkpointing_goes_through_its_options():
    from functools import partial

    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    keep = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    model = regressor(layers=4)
    checkpoint_layers(model, context_fn=partial(create_selective_checkpoint_contexts, keep))
    runs = runs_of(model)
    model.train()(**next(iter(DataLoader(Ratings(8), batch_size=8)))).loss.backward()
    assert len(runs) == 8 and all(p.grad is not None for p in model.parameters())


def same_weights(one, other):
    return all(map(torch.equal, one.parameters(), other.parameters()))


def memory_of(train, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    return measure.memory(lambda: train(model, optimizer, scheduler), model, optimizer).peak


def test_in_a_strangers_classifier(stranger_files, capsys):
    files = dict(train=stranger_files / "train.csv", valid=stranger_files / "valid.csv")
    arguments = SimpleNamespace(model=stranger_files / "bert", **files, epochs=1, batch_size=32)
    loader = "    train_loader = make_loader(train, tokenizer, args.batch_size, True)\n"
    plain = strangers.load("classifier")
    changed = strangers.load("classifier", LESSON.source("copy"), {loader: "    " + CALL + loader})
    before, after = plain.main(arguments), changed.main(arguments)
    one, other = capsys.readouterr().out.splitlines()
    assert one == other, "the same accuracy"
    assert same_weights(before, after)

    tokenizer = plain.AutoTokenizer.from_pretrained(stranger_files / "bert")
    batches = list(plain.make_loader(plain.pd.read_csv(files["train"]).iloc[:32], tokenizer, 32, False))

    def train(model, optimizer, scheduler):
        plain.train_one_epoch(model, batches, optimizer, scheduler)

    ratio = memory_of(train, after) / memory_of(train, before)
    assert ratio < 0.7, ratio


MAKES_A_MODEL = "    model = CustomModel().to(CFG.device)\n"


@pytest.mark.parametrize("apex", [False, True], ids=["fp32", "autocast and a scaler"])
def test_in_a_strangers_competition_script(stranger_files, monkeypatch, apex):
    """The backbone is inside a module of its own: equal weights, equal predictions in the rows' order."""
    plain = competition(stranger_files, monkeypatch)
    edits = {MAKES_A_MODEL: MAKES_A_MODEL + "    " + CALL}
    changed = competition(stranger_files, monkeypatch, LESSON.source("copy"), edits)
    plain.CFG.apex = changed.CFG.apex = apex
    (before, submission), (after, submitted) = plain.main(), changed.main()
    assert all(layer.gradient_checkpointing for layer in after.model.encoder.layer)
    assert same_weights(before, after)
    assert submission.equals(submitted) and submitted.notna().all(axis=None)

    frame = plain.pd.read_csv(stranger_files / "scores" / "train.csv").iloc[:32]
    loader = DataLoader(plain.TextDataset(frame, plain.AutoTokenizer.from_pretrained(plain.CFG.model)), 32)

    def train(model, optimizer, scheduler):
        scaler = torch.amp.GradScaler(plain.CFG.device, enabled=apex)
        plain.train_fn(loader, model, plain.nn.SmoothL1Loss(), optimizer, scheduler, scaler)

    ratio = memory_of(train, after) / memory_of(train, before)
    assert ratio < 0.7, ratio


def test_in_a_strangers_decoder(stranger_files, capsys):
    makes_a_model = "    model = AutoModelForCausalLM.from_pretrained(model_path).to(device)\n"
    plain = strangers.load("decoder")
    changed = strangers.load("decoder", LESSON.source("copy"), {makes_a_model: makes_a_model + "    " + CALL})
    files = [stranger_files / name for name in ("llama", "bert", "train.jsonl", "valid.jsonl")]
    before = plain.main(*files)
    printed = capsys.readouterr().out
    after = changed.main(*files)
    assert "perplexity" in printed and capsys.readouterr().out == printed
    assert same_weights(before, after)

    ids = torch.randint(5, 500, (16, 64), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.masked_fill(ids > 20, -100)}

    def train(model, optimizer, scheduler):
        plain.train(model, [batch], optimizer, scheduler)

    assert memory_of(train, after) < 0.95 * memory_of(train, before)


def test_adapters_get_their_gradients():
    peft = pytest.importorskip("peft")
    batch = next(iter(DataLoader(Ratings(8), batch_size=8)))

    def gradients(change):
        model = peft.get_peft_model(regressor(layers=4), peft.LoraConfig(target_modules=["q_lin", "v_lin"]))
        change(model)
        torch.manual_seed(3)
        model.train()(**batch).loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.requires_grad]

    expected, found = gradients(lambda model: None), gradients(checkpoint_layers)
    assert len(found) > 8 and all(map(torch.equal, expected, found))
