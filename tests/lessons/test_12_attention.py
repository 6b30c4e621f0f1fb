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
        ("partial(checkpoint, module.forward, use_reentrant=False)",
         "partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)"),
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


def cell(start):
    """The source of the code cell that defines a name."""
    return next(source(c) for c in LESSON.code if start in names(source(c))[0])


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
