import copy
import functools
import importlib.util
import json
import shutil
import sys
from types import ModuleType, SimpleNamespace

import pytest
import strangers
import torch
from stranger import Ratings, regressor
from strangers import same_weights
from torch.utils.data import DataLoader

from notebooks import answer_to_exercise, copied, lesson, proof_fails, run, source
from tutorial_utils import measure, models

LESSON = lesson("12")
COPIED = copied(LESSON)
NO_MASK = "lambda part, args, options: (args, {**options, 'attention_mask': None}), with_kwargs=True"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('            part.set_attn_implementation("sdpa")', "            pass"),
        ('part.set_attn_implementation("sdpa")',
         f'part.set_attn_implementation("sdpa"); part.register_forward_pre_hook({NO_MASK})'),
        ("part.__class__ = Recomputed", "part.__class__ = Recomputed; part.dropout.p = 0.0"),
        ("use_reentrant=False, **options)", "use_reentrant=False, preserve_rng_state=False, **options)"),
    ],
    ids=["never switched", "mask dropped", "dropout lost", "random state not restored"],
)  # fmt: skip
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("scale=(query.shape[-1] * terms) ** -0.5", "scale=query.shape[-1] ** -0.5"),
        ("bias = bias.masked_fill(~attention_mask.bool(), torch.finfo(bias.dtype).min)", "bias = bias.detach()"),
    ],
    ids=["wrong scale", "bias without mask and gradient"],
)
def test_sdpa_with_a_bias_can_be_wrong(old, new):
    sources = [source(cell) for cell in LESSON.needed_for("bias-proof")]
    assert sum(old in code for code in sources) == 1
    namespace = {}
    with pytest.raises(AssertionError):
        for code in sources:
            run(code.replace(old, new), namespace)
    assert "biased" in namespace, "it fails where the two are compared"


def sdpa_calls(monkeypatch):
    calls, original = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, **options: calls.append(options.get("attn_mask")) or original(*args, **options),
    )
    return calls


def test_copied(monkeypatch):
    """Another architecture, a regression: the same step, through SDPA in each of its layers."""
    batch = next(iter(DataLoader(Ratings(16), batch_size=16)))
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, 20:] = 0
    calls = sdpa_calls(monkeypatch)

    def stepped(lean):
        model = models.without_dropout(regressor())
        model.set_attn_implementation("eager")
        if lean:
            assert COPIED["lean_attention"](model) is model
        for layer in model.distilbert.transformer.layer:
            layer.attention.dropout.p = 0.0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        calls.clear()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        return len(calls), [loss, *(parameter.detach() for parameter in model.parameters())]

    (without, eager), (with_sdpa, sdpa) = stepped(False), stepped(True)
    assert (without, with_sdpa) == (0, 2) and calls[0] is not None
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(eager, sdpa, strict=True))


def test_a_model_that_cannot_be_switched_stays_as_it_was():
    """A DeBERTa of the first version has no SDPA, and another attention than v2's."""
    from transformers import DebertaConfig, DebertaModel

    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=50)
    model = DebertaModel(DebertaConfig(**sizes)).eval()
    before = model(torch.arange(5, 25)[None]).last_hidden_state
    COPIED["lean_attention"](model)
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(torch.arange(5, 25)[None]).last_hidden_state, before)


def test_scores_that_are_capped_stay_eager():
    """Gemma 2's. Versions of transformers let it take SDPA, which drops the cap without a word."""
    from transformers import Gemma2Config, Gemma2Model

    torch.manual_seed(0)
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    capped = dict(intermediate_size=32, vocab_size=50, attn_logit_softcapping=0.1, query_pre_attn_scalar=16)
    model = Gemma2Model._from_config(Gemma2Config(**sizes, **capped), attn_implementation="eager").eval()
    before = model(torch.arange(5, 25)[None]).last_hidden_state
    COPIED["lean_attention"](model)
    assert torch.equal(model(torch.arange(5, 25)[None]).last_hidden_state, before)


def small_deberta():
    torch.manual_seed(0)
    sizes = dict(num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=32, vocab_size=50)
    return models.build("deberta-v3-small", **sizes).train()


def test_an_attention_of_ones_own_stays():
    """Made of DeBERTa's, with a forward of its own, which would be lost."""
    model = small_deberta()
    attention = model.deberta.encoder.layer[0].attention.self
    attention.__class__ = own = type("Own", (type(attention),), {})
    COPIED["lean_attention"](model)
    assert type(attention) is own
    assert type(model.deberta.encoder.layer[1].attention.self) is COPIED["Recomputed"]


def test_deberta_computes_its_attention_again(capfd):
    """In the backward pass, and no gradient changes; weights keep their names; nothing is logged."""
    calls, ids = [], torch.arange(5, 45).view(2, 20)

    def gradients(model):
        for layer in model.deberta.encoder.layer:
            attention = layer.attention.self
            bias = attention.disentangled_attention_bias
            attention.disentangled_attention_bias = lambda *args, bias=bias: calls.append(1) or bias(*args)
        calls.clear()
        torch.manual_seed(1)
        model(input_ids=ids, labels=torch.tensor([0, 1])).loss.backward()
        return len(calls), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    model = small_deberta()
    for _ in range(2):  # a second call does nothing
        COPIED["lean_attention"](model)
    assert capfd.readouterr() == ("", "")
    assert list(model.state_dict()) == list(small_deberta().state_dict())
    (plain, expected), (twice, found) = gradients(small_deberta()), gradients(model)
    assert (plain, twice) == (2, 4)
    assert len(expected) == len(found) and all(map(torch.equal, expected, found))


@pytest.mark.parametrize("prepare", ["lean_attention", "forward on the module"])
def test_a_replica_computes_with_its_own_weights(prepare):
    """Two GPUs imitated: nn.DataParallel's copy of the attention, with other weights."""
    model = small_deberta().eval()
    first = model.deberta.encoder.layer[0].attention.self
    if prepare == "lean_attention":
        COPIED["lean_attention"](model)
    else:
        first.forward = functools.partial(COPIED["checkpoint"], first.forward, use_reentrant=False)
    replica = first._replicate_for_data_parallel()
    replica._modules = {name: copy.deepcopy(child) for name, child in first._modules.items()}
    for parameter in replica._modules["value_proj"].parameters():
        torch.nn.init.zeros_(parameter)
    inputs = torch.randn(1, 4, 32), torch.ones(1, 1, 4, 4), False, None, None, torch.randn(512, 32)
    assert first(*inputs)[0].any()
    own = not replica(*inputs)[0].any()
    assert own == (prepare == "lean_attention")


def test_flash_attention_from_the_package_kernels(monkeypatch):
    """Imitated: flash-attn is not installed, `kernels` is, and gives a compiled one."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "kernels" or None)
    said = {torch.float32: ["only float16. You should not"], torch.bfloat16: []}
    namespace = {"importlib": importlib, "torch": torch, "accepted": said.get,
                 "trials": {"flash_attention_2": "forward and backward"}}  # fmt: skip
    assert "asked for: forward and backward" in run(LESSON.source("pitfall-package"), namespace)


def packages(device="cpu"):
    namespace = {"here": SimpleNamespace(device=device), "names": SimpleNamespace(checkpoint_layers=None)}
    namespace |= {"lean_attention": None, "sdpa_with_bias": None}
    return namespace, run(LESSON.source("packages"), namespace)


def test_a_package_that_is_installed_is_measured(monkeypatch):
    """Imitated: a package of that name, found and importable."""
    called, module = [], ModuleType("disentangled_flash")
    module.optimize_deberta_training = lambda deberta, backend: called.append(backend)
    module.__spec__ = SimpleNamespace(name="disentangled_flash")
    monkeypatch.setitem(sys.modules, "disentangled_flash", module)
    namespace, printed = packages("cuda")
    assert printed == ""
    namespace["ways"]["disentangled_flash"](SimpleNamespace(deberta=None))
    assert called == ["triton"]


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "disentangled_flash is not installed" in packages()[1]


def peak_of(step, model):
    return measure.memory(step, model).peak


EAGER = ', attn_implementation="eager")'


def test_in_a_strangers_classifier(stranger_files, capsys):
    """A script that asks for eager: the same weights and accuracy, in less memory, through SDPA."""
    load = "num_labels=train.label.nunique()).to(device)\n"
    eager = {load: "num_labels=train.label.nunique()" + EAGER + ".to(device)\n"}
    lean = {load: eager[load] + "    lean_attention(model)\n"}
    plain = strangers.load("classifier", "", eager)
    changed = strangers.load("classifier", LESSON.source("copy"), lean)
    files = dict(train=stranger_files / "train.csv", valid=stranger_files / "valid.csv")
    arguments = SimpleNamespace(model=stranger_files / "bert", **files, epochs=1, batch_size=32)
    before, after = plain.main(arguments), changed.main(arguments)
    one, other = capsys.readouterr().out.splitlines()
    assert one == other, "the same accuracy"
    torch.manual_seed(42)
    start = plain.AutoModelForSequenceClassification.from_pretrained(stranger_files / "bert", num_labels=4)
    assert same_weights(before, after, start)
    assert (before.config._attn_implementation, after.config._attn_implementation) == ("eager", "sdpa")
    batch = {"input_ids": torch.randint(5, 500, (4, 256)), "labels": torch.zeros(4, dtype=torch.long)}
    peaks = [peak_of(lambda model=model: model.train()(**batch).loss.backward(), model) for model in (before, after)]
    assert peaks[1] < 0.9 * peaks[0], peaks


@pytest.fixture(scope="module")
def deberta_folder(stranger_files, tmp_path_factory):
    """A small DeBERTa-v3 with dropout and the strangers' tokenizer, as a competition script loads it."""
    folder = tmp_path_factory.mktemp("deberta")
    for path in stranger_files.joinpath("bert").iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            shutil.copy(path, folder)
    vocabulary = json.loads((stranger_files / "bert" / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    sizes = dict(num_hidden_layers=2, hidden_size=64, num_attention_heads=2, intermediate_size=64)
    models.build("deberta-v3-small", **sizes, vocab_size=vocabulary).base_model.save_pretrained(folder)
    return folder


BUILD = "    model = CustomModel().to(CFG.device)\n"


@pytest.mark.parametrize("apex", [False, True], ids=["fp32", "autocast and a scaler"])
def test_in_a_strangers_competition_script(stranger_files, deberta_folder, monkeypatch, apex):
    """A DeBERTa as its backbone: the same weights and submission to the last bit, with dropout, in less memory."""
    monkeypatch.setenv("DATA", str(stranger_files / "scores"))
    monkeypatch.setenv("MODEL", str(deberta_folder))
    plain = strangers.load("competition")
    changed = strangers.load("competition", LESSON.source("copy"), {BUILD: BUILD + "    lean_attention(model)\n"})
    plain.CFG.apex = changed.CFG.apex = apex
    (before, submission), (after, submitted) = plain.main(), changed.main()
    assert all(map(torch.equal, before.parameters(), after.parameters()))
    assert submission.equals(submitted) and submitted.notna().all(axis=None)
    inputs = {"input_ids": torch.randint(5, 500, (4, 256)), "attention_mask": torch.ones(4, 256, dtype=torch.long)}
    peaks = [peak_of(lambda model=model: model.train()(inputs).sum().backward(), model) for model in (before, after)]
    assert peaks[1] < 0.85 * peaks[0], peaks


def test_in_a_strangers_decoder(stranger_files, capsys):
    load = "AutoModelForCausalLM.from_pretrained(model_path)"
    eager = load.replace(")", EAGER)
    plain = strangers.load("decoder", "", {load: eager})
    changed = strangers.load("decoder", LESSON.source("copy"), {load: f"lean_attention({eager})"})
    files = [stranger_files / name for name in ("llama", "bert", "train.jsonl", "valid.jsonl")]
    before = plain.main(*files)
    after = changed.main(*files)
    *_, one, other = (float(line.split()[-1]) for line in capsys.readouterr().out.splitlines() if "perplexity" in line)
    assert other == pytest.approx(one, rel=1e-4)
    assert same_weights(before, after, plain.AutoModelForCausalLM.from_pretrained(stranger_files / "llama"))
    ids = torch.randint(5, 500, (2, 512))
    peaks = [peak_of(lambda model=model: model(input_ids=ids, labels=ids).loss.backward(), model)
             for model in (before, after)]  # fmt: skip
    tables = 2 * 2 * 4 * 512**2 * 4  # of each layer one, without dropout
    assert peaks[0] - peaks[1] > 0.95 * tables, peaks


def test_the_exercise_refuses_dropout_of_the_outputs():
    old = "F.scaled_dot_product_attention(query, key, value, ~padding[:, None, None], dropout if training else 0.0)"
    new = "F.dropout(F.scaled_dot_product_attention(query, key, value, ~padding[:, None, None]), dropout, training)"
    assert answer_to_exercise(LESSON, (old, new)).startswith("not yet: training drops weights: False")
