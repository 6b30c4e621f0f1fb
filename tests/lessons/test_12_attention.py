import copy
import functools
import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from stranger import Ratings, regressor
from torch.utils.data import DataLoader

from notebooks import copied, lesson, names, proof_fails, run, source
from tutorial_utils import models

LESSON = lesson("12")
COPIED = copied(LESSON)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("        model.set_attn_implementation(wanted)", "        pass"),
        ('of_bert("sdpa", padded_texts)', 'of_bert("sdpa", full_texts)'),
        ("scale=(query.shape[-1] * terms) ** -0.5", "scale=query.shape[-1] ** -0.5"),
        ("bias = bias.masked_fill(~attention_mask.bool(), torch.finfo(bias.dtype).min)", "bias = bias.detach()"),
        ("use_reentrant=False, **options)", "use_reentrant=False, preserve_rng_state=False, **options)"),
    ],
    ids=["never switched", "mask dropped", "wrong scale", "bias without mask and gradient",
         "random state not restored"],
)  # fmt: skip
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


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

    def stepped(wanted):
        model = regressor()
        model.set_attn_implementation("eager")
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        assert COPIED["choose_attention"](model, wanted) == wanted
        for layer in model.distilbert.transformer.layer:
            layer.attention.dropout.p = 0.0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        calls.clear()
        loss = COPIED["train_step"](model, optimizer, batch)
        return len(calls), [loss, *(parameter.detach() for parameter in model.parameters())]

    (without, eager), (with_sdpa, sdpa) = stepped("eager"), stepped("sdpa")
    assert (without, with_sdpa) == (0, 2) and calls[0] is not None
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(eager, sdpa, strict=True))


@pytest.mark.parametrize("wanted", ["flash_attention_2", "typing_error"])
def test_refusals_leave_the_model_as_it_was(wanted, capsys):
    model = regressor()
    assert COPIED["choose_attention"](model, "eager") == "eager"
    assert COPIED["choose_attention"](model, wanted) == "eager"
    said = capsys.readouterr().out
    assert said.endswith("staying with eager\n") and len(said.splitlines()) == 1
    COPIED["train_step"](model, torch.optim.SGD(model.parameters(), lr=0.1), next(iter(DataLoader(Ratings(4)))))


def test_deberta_is_told_apart(capsys):
    sizes = dict(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=32, vocab_size=50)
    model = models.build("deberta-v3-small", **sizes)
    assert COPIED["choose_attention"](model) == "eager"
    assert capsys.readouterr().out == "DebertaV2ForSequenceClassification has no sdpa: staying with eager\n"


def test_flex_is_refused_with_attention_dropout_alone(capsys):
    """Each family has another name for it. DistilBERT's is `attention_dropout`, T5's `dropout_rate`."""
    model = regressor()
    before = COPIED["choose_attention"](model, "sdpa")
    assert COPIED["choose_attention"](model, "flex_attention") == before == "sdpa"
    assert "no flex_attention with attention dropout: staying with sdpa" in capsys.readouterr().out
    model.config.attention_dropout = 0.0
    assert COPIED["choose_attention"](model, "flex_attention") == "flex_attention"

    sizes = dict(d_model=32, d_kv=16, d_ff=32, num_layers=1, num_decoder_layers=1, num_heads=2, vocab_size=50)
    t5 = models.build("t5-base", **sizes)
    before = COPIED["choose_attention"](t5, "eager")
    assert COPIED["choose_attention"](t5, "flex_attention") == before == "eager"
    t5.config.dropout_rate = 0.0
    flex = "flex_attention" if t5._supports_flex_attn else "eager"  # older versions have none for T5
    assert COPIED["choose_attention"](t5, "flex_attention") == flex
    capsys.readouterr()
    assert COPIED["choose_attention"](t5, "flash_attention_2") == flex
    assert f"has no flash_attention_2: staying with {flex}" in capsys.readouterr().out


def cell(start):
    """The source of the code cell that defines a name."""
    return next(source(c) for c in LESSON.code if start in names(source(c))[0])


def small_deberta():
    torch.manual_seed(0)
    sizes = dict(num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=32, vocab_size=50)
    return models.build("deberta-v3-small", **sizes).train()


def test_checkpoint_attention_stands_alone():
    """Copied alone: the attention is computed once more in the backward pass, and no gradient changes."""
    namespace, calls = {}, []
    run(cell("checkpoint_attention"), namespace)
    ids = torch.arange(5, 45).view(2, 20)

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
        namespace["checkpoint_attention"](model)
    (plain, expected), (twice, found) = gradients(small_deberta()), gradients(model)
    assert (plain, twice) == (2, 4)
    assert len(expected) == len(found) and all(map(torch.equal, expected, found))
    with pytest.raises(ValueError, match="DistilBertForSequenceClassification has no disentangled attention"):
        namespace["checkpoint_attention"](regressor())


@pytest.mark.parametrize("prepare", ["checkpoint_attention", "forward on the module"])
def test_a_replica_computes_with_its_own_weights(prepare):
    """Two GPUs imitated: nn.DataParallel's copy of the attention, with other weights."""
    namespace, model = {}, small_deberta().eval()
    run(cell("checkpoint_attention"), namespace)
    first = model.deberta.encoder.layer[0].attention.self
    if prepare == "checkpoint_attention":
        namespace["checkpoint_attention"](model)
    else:
        first.forward = functools.partial(namespace["checkpoint"], first.forward, use_reentrant=False)
    replica = first._replicate_for_data_parallel()
    replica._modules = {name: copy.deepcopy(child) for name, child in first._modules.items()}
    for parameter in replica._modules["value_proj"].parameters():
        torch.nn.init.zeros_(parameter)
    inputs = torch.randn(1, 4, 32), torch.ones(1, 1, 4, 4), False, None, None, torch.randn(512, 32)
    assert first(*inputs)[0].any()
    own = not replica(*inputs)[0].any()
    assert own == (prepare == "checkpoint_attention")


def test_flash_attention_from_the_package_kernels(monkeypatch):
    """Imitated: flash-attn is not installed, `kernels` is, and gives a compiled one."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "kernels" or None)
    said = {torch.float32: ["only float16. You should not"], torch.bfloat16: []}
    namespace = {"importlib": importlib, "torch": torch, "accepted": said.get, "new_model": lambda *a: None,
                 "tried": lambda wanted: "forward and backward",
                 "choose_attention": lambda *a: "kernels-community/flash-attn2"}  # fmt: skip
    assert "asked for: forward and backward" in run(cell("in_fp32"), namespace)


def test_a_package_that_is_installed_is_measured(monkeypatch):
    """Imitated: a package of that name, found and importable."""
    called, module = [], ModuleType("disentangled_flash")
    module.optimize_deberta_training = lambda deberta, backend: called.append(backend)
    module.__spec__ = SimpleNamespace(name="disentangled_flash")
    monkeypatch.setitem(sys.modules, "disentangled_flash", module)
    namespace = {"importlib": importlib, "ways": {}, "here": SimpleNamespace(device="cuda"), "torch": torch}
    assert run(cell("small_deberta"), namespace) == ""
    namespace["ways"]["disentangled_flash"](SimpleNamespace(deberta=None))
    assert called == ["triton"]


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    printed = run(cell("small_deberta"), {"importlib": importlib, "ways": {}, "torch": torch})
    assert "disentangled_flash is not installed" in printed
