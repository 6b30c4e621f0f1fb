import copy
from types import SimpleNamespace

import pytest
import strangers
import torch
from stranger import Ratings, regressor
from torch.utils.data import DataLoader

from notebooks import copied, lesson, proof_fails
from tutorial_utils import measure, names

LESSON = lesson("02")
COPIED = copied(LESSON)
NO_SCALER = torch.amp.GradScaler(enabled=False)
QUIET = """\
    for part in [m for m in model.modules() if {p.requires_grad for p in m.parameters()} == {False}]:
        part.eval()
"""


def loss_of(model, batch):
    return model(**batch).loss


def nothing():
    pass


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (".base_model.requires_grad_(False)", ".base_model"),
        ("stack[layers:]", "stack[layers + 1:]"),
        ("*parts)", ")"),
        ("        part.eval()", "        part.eval(); next(part.parameters()).data += 1e-6"),
        ("        part.eval()", "        part.eval()\n    max_norm = 1e-3"),
    ],
    ids=["nothing frozen", "a layer too many", "a frozen pooler", "frozen weights that move", "other gradients"],
)
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


def train(model, optimizer, loader):
    COPIED["train_frozen"](model, optimizer, loader, loss_of, nothing, NO_SCALER)


def peak(layers):
    model = regressor(layers=4)
    if layers is not None:
        COPIED["freeze"](model, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Ratings(64), batch_size=64)
    return measure.memory(lambda: train(model, optimizer, loader), model, optimizer).peak


def test_copied():
    """A DistilBERT regression: half the layers frozen keep their weights, the rest learns, in less memory."""
    model = regressor(layers=4)
    before = copy.deepcopy(dict(model.named_parameters()))
    COPIED["freeze"](model, 2)
    frozen = {name for name in before if "embeddings" in name or "layer.0." in name or "layer.1." in name}
    assert frozen == {name for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        train(model, optimizer, DataLoader(Ratings(32), batch_size=8))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) is (name in frozen), name
    assert set(optimizer.state) == {p for p in model.parameters() if p.requires_grad}
    assert peak(2) < 0.65 * peak(None) and peak(4) < 0.25 * peak(None)


def test_freezes_anew_whatever_was_frozen():
    model = regressor(layers=4)
    for layers in (4, 0, 2):
        COPIED["freeze"](model, layers)
        modes = [layer.ffn.lin1.weight.requires_grad for layer in model.distilbert.transformer.layer]
        assert modes == [number >= layers for number in range(4)]
        assert not model.distilbert.embeddings.word_embeddings.weight.requires_grad
        assert model.classifier.weight.requires_grad


def test_frozen_layers_do_without_dropout():
    model = regressor(layers=4)
    COPIED["freeze"](model, 2)
    assert QUIET in LESSON.source("copy")
    train(model, None, [])
    modes = [layer.training for layer in model.distilbert.transformer.layer]
    assert modes == [False, False, True, True] and not model.distilbert.embeddings.training
    assert model.dropout.training


@pytest.mark.parametrize(("quiet", "runs"), [(False, 2), (True, 1)], ids=["train", "eval"])
def test_checkpoints_compute_a_frozen_layer_twice_or_in_eval_keep_it(quiet, runs):
    """Until `disable_input_require_grads` takes back what transformers did when they were turned on."""
    model, batch, calls = regressor(), next(iter(DataLoader(Ratings(4), batch_size=4))), []
    names.checkpoint_layers(model, use_reentrant=False)
    COPIED["freeze"](model, 1)
    frozen = model.base_model.transformer.layer[0]
    frozen.attention.register_forward_pre_hook(lambda *_: calls.append(1))
    frozen.train(not quiet)
    loss_of(model, batch).backward()
    assert len(calls) == runs
    model.disable_input_require_grads()
    calls.clear()
    loss_of(model, batch).backward()
    assert len(calls) == 1


def test_nothing_frozen_is_the_baseline():
    """Also the modes of modules without parameters."""
    model = regressor()
    train(model.eval(), None, [])
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("max_norm", [0.1, float("inf")])
def test_a_scaler_changes_nothing(max_norm):
    def trained(scaler):
        model = regressor()
        COPIED["freeze"](model, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(0)
        loader = DataLoader(Ratings(40), batch_size=8)
        COPIED["train_frozen"](model, optimizer, loader, loss_of, nothing, scaler, max_norm)
        return torch.nn.utils.parameters_to_vector(model.parameters())

    torch.testing.assert_close(trained(torch.amp.GradScaler("cpu")), trained(NO_SCALER))


def test_it_clips_to_max_norm():
    model = regressor().eval()
    start = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    COPIED["train_frozen"](model, sgd, DataLoader(Ratings(8), 8), loss_of, nothing, NO_SCALER, 0.01)
    way = torch.nn.utils.parameters_to_vector(model.parameters()).detach() - start
    assert way.norm().item() == pytest.approx(0.01, rel=1e-2)


def small(name, kind):
    import transformers

    sizes = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64, vocab_size=100)
    if name == "deberta-v2":
        sizes |= dict(relative_attention=True, pos_att_type=["p2c", "c2p"], position_biased_input=False)
    ends = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
    config = transformers.AutoConfig.for_model(name, **sizes, **ends, tie_word_embeddings=True)
    return getattr(transformers, kind).from_config(config)


@pytest.mark.parametrize(
    ("name", "kind", "place", "above"),
    [
        ("bert", "AutoModelForSequenceClassification", "encoder.layer", "pooler"),
        ("electra", "AutoModelForSequenceClassification", "encoder.layer", "classifier"),
        ("roberta", "AutoModelForSequenceClassification", "encoder.layer", "classifier"),
        ("deberta-v2", "AutoModelForSequenceClassification", "encoder.layer", "pooler"),
        ("modernbert", "AutoModelForSequenceClassification", "layers", "final_norm"),
        ("bert", "AutoModel", "encoder.layer", "pooler"),
        ("llama", "AutoModelForCausalLM", "layers", "norm"),
        ("gpt2", "AutoModelForCausalLM", "h", "ln_f"),
    ],
)
def test_other_models(name, kind, place, above):
    """What stands beside the layers is frozen too: the first layer that trains is where the gradient ends."""
    model = small(name, kind)
    COPIED["freeze"](model, 2)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert any(above in name for name in trained)
    outside = {name for name in trained if f"{place}." in name and f"{place}.2." not in name}
    assert not outside and not any("embed" in name or "wte" in name or "wpe" in name for name in trained)
    reached = []
    for layer in model.base_model.get_submodule(place):
        layer.register_forward_hook(
            lambda _, __, output: reached.append((output[0] if isinstance(output, tuple) else output).requires_grad)
        )
    model(input_ids=torch.ones(2, 8, dtype=torch.long))[0].sum().backward()
    assert reached == [False, False, True]


def test_a_tied_output_layer_is_frozen_with_the_embeddings():
    model = small("llama", "AutoModelForCausalLM")
    COPIED["freeze"](model, 1)
    assert model.lm_head.weight is model.model.embed_tokens.weight and not model.lm_head.weight.requires_grad


def test_a_backbone_among_modules_of_ones_own():
    """The head stands before it, with a list of modules."""

    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = torch.nn.ModuleList(torch.nn.Linear(32, 1) for _ in range(2))
            self.encoder = small("bert", "AutoModel")

    model = Own()
    COPIED["freeze"](model, 3)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if "heads" in name or "pooler" in name}


BY_HAND = """
def freeze_by_hand(model, frozen):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
"""
LOW = (".embeddings.", ".layer.0.", ".layer.1.")


def loaded(name, line, freeze, quiet="", copied=""):
    """A stranger's script with `freeze` after the line that makes the model, and `quiet` after model.train()."""
    return strangers.load(name, copied, {line: line + freeze, "    model.train()\n": "    model.train()\n" + quiet})


def same(one, other, start, frozen):
    """Whether two models have the same weights, and only these names are where they started."""
    one, other, start = (dict(model.named_parameters()) for model in (one, other, start))
    still = {name for name in one if torch.equal(one[name], start[name])}
    assert still == {name for name in one if any(part in name for part in frozen)}
    return all(torch.equal(one[name], other[name]) for name in one)


def test_in_a_strangers_classifier(stranger_files, capsys):
    files = dict(train=stranger_files / "train.csv", valid=stranger_files / "valid.csv")
    arguments = SimpleNamespace(model=stranger_files / "bert", **files, epochs=2, batch_size=32)
    line = (
        "    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=train.label.nunique())"
    )
    line += ".to(device)\n"
    plain = loaded("classifier", line, f"    freeze_by_hand(model, {LOW})\n", copied=BY_HAND)
    changed = loaded("classifier", line, "    freeze(model, 2)\n", QUIET, LESSON.source("copy"))
    before, after = plain.main(arguments), changed.main(arguments)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 4 and printed[:2] == printed[2:], "the same accuracy"
    torch.manual_seed(42)
    start = plain.AutoModelForSequenceClassification.from_pretrained(stranger_files / "bert", num_labels=4)
    assert same(after, before, start, LOW)
    assert not after.training, "its validation came last"


MODEL = "    model = CustomModel().to(CFG.device)\n"


def competition(files, monkeypatch, freeze="", quiet="", copied=""):
    monkeypatch.setenv("DATA", str(files / "scores"))
    monkeypatch.setenv("MODEL", str(files / "bert"))
    return loaded("competition", MODEL, freeze, quiet, copied)


@pytest.mark.parametrize("apex", [False, True], ids=["fp32", "autocast and a scaler"])
def test_in_a_strangers_competition_script(stranger_files, monkeypatch, apex):
    low = tuple(f"model{part}" for part in (".embeddings.", ".encoder.layer.0.", ".encoder.layer.1."))
    by_hand = f"    freeze_by_hand(model, {(*low, 'pooler')})\n"  # which mean pooling does not use
    plain = competition(stranger_files, monkeypatch, by_hand, copied=BY_HAND)
    changed = competition(stranger_files, monkeypatch, "    freeze(model, 2)\n", QUIET, LESSON.source("copy"))
    plain.CFG.apex = changed.CFG.apex = apex
    (before, submission), (after, submitted) = plain.main(), changed.main()
    torch.manual_seed(42)
    assert same(after, before, plain.CustomModel(), (*low, "pooler"))
    assert submission.equals(submitted) and submitted.notna().all(axis=None)


def test_a_competition_script_takes_less_memory(stranger_files, monkeypatch):
    """And its parameter groups stay as they were."""
    script = competition(stranger_files, monkeypatch, quiet=QUIET, copied=LESSON.source("copy"))
    script.CFG.apex = False

    def one_step(layers):
        model = script.CustomModel().to(script.CFG.device)
        if layers is not None:
            script.freeze(model, layers)
        optimizer = torch.optim.AdamW(script.get_optimizer_params(model))
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        frame = script.pd.read_csv(stranger_files / "scores" / "train.csv").iloc[:32]
        loader = DataLoader(script.TextDataset(frame, script.AutoTokenizer.from_pretrained(script.CFG.model)), 32)
        step = lambda: script.train_fn(loader, model, script.nn.SmoothL1Loss(), optimizer, scheduler, NO_SCALER)  # noqa: E731
        return measure.memory(step, model, optimizer), optimizer, model

    (whole, groups, _), (half, same_groups, model) = one_step(None), one_step(2)
    assert half.peak < 0.65 * whole.peak
    assert [len(group["params"]) for group in groups.param_groups] == [
        len(group["params"]) for group in same_groups.param_groups
    ]
    assert all(p.requires_grad for p in same_groups.state) and model.fc.weight in same_groups.state


def test_in_a_strangers_decoder(stranger_files, capsys):
    line = "    model = AutoModelForCausalLM.from_pretrained(model_path).to(device)\n"
    low = ("model.embed_tokens.", "model.layers.0.")
    plain = loaded("decoder", line, f"    freeze_by_hand(model, {low})\n", copied=BY_HAND)
    changed = loaded("decoder", line, "    freeze(model, 1)\n", QUIET, LESSON.source("copy"))
    files = [stranger_files / name for name in ("llama", "bert", "train.jsonl", "valid.jsonl")]
    before, after = plain.main(*files), changed.main(*files)
    start = plain.AutoModelForCausalLM.from_pretrained(stranger_files / "llama")
    assert same(after, before, start, low)
    assert "perplexity" in capsys.readouterr().out
