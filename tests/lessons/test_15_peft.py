import re
import sys
import warnings

import pytest
import torch
from stranger import Ratings, regressor
from torch.utils.data import DataLoader

from notebooks import ROOT, copied, lesson, proof_fails, run, source
from tutorial_utils import bounds, machine, models, packages, predict

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
LESSON = lesson("15")
COPIED = copied(LESSON)
with_lora, train_step = COPIED["with_lora"], COPIED["train_step"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("r=rank,", "r=rank, init_lora_weights=False,"),
        ("linear.weight.new_zeros(", "linear.weight.new_ones("),
        ("self.scale = linear, alpha / rank", "self.scale = linear, alpha"),
        ("    optimizer.step()", "    optimizer.step(); [p.data.mul_(1.001) for p in model.parameters()]"),
        ("adapted.merge_and_unload()", "adapted.unload()"),
        ("PeftModel.from_pretrained(other_head, folder)", "other_head"),
        ("LORA_RATE)\n    for texts in TEXTS", "0.0)\n    for texts in TEXTS"),
    ],
    ids=[
        "random from the start, library",
        "ones from the start, by hand",
        "another scale",
        "the base moves",
        "adapters thrown away",
        "the adapter not loaded",
        "nothing learned",
    ],
)
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


def tuned(model, batches, lr):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    return [train_step(model, optimizer, batch).item() for batch in batches], optimizer


def test_copied():
    """A DistilBERT regression: it learns, the base stays, the state is small, merged and reloaded it answers alike."""
    batches = [next(iter(DataLoader(Ratings(16), batch_size=16)))] * 20
    model = regressor()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    plain = model(**batches[0]).logits
    base = {name: p.clone() for name, p in model.distilbert.named_parameters()}
    adapted = with_lora(model)
    assert torch.equal(plain, adapted(**batches[0]).logits)
    losses, optimizer = tuned(adapted, batches, 5e-3)
    assert losses[-1] < 0.5 * losses[0]
    kept = dict(adapted.named_parameters())
    for name, value in base.items():
        found = [p for n, p in kept.items() if n.replace("base_layer.", "").endswith("distilbert." + name)]
        assert len(found) == 1 and torch.equal(found[0], value) and not found[0].requires_grad, name
    trained = {n for n, p in kept.items() if p.requires_grad}
    assert {n for n in trained if "lora_" not in n} == {
        f"base_model.model.{part}.modules_to_save.default.{kind}"
        for part in ("pre_classifier", "classifier")
        for kind in ("weight", "bias")
    }
    assert sum("lora_A" in n for n in trained) == 2 * 6  # every linear layer of both blocks
    state = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if t.dim())
    assert state == 8 * sum(kept[n].numel() for n in trained)
    answers = adapted.eval()(**batches[0]).logits
    merged = adapted.merge_and_unload()
    assert (merged(**batches[0]).logits - answers).abs().max() < 1e-5
    assert type(merged).__name__ == "DistilBertForSequenceClassification"


def test_saved_and_loaded_onto_another_random_head(tmp_path):
    batches = list(DataLoader(Ratings(32), batch_size=16))
    adapted = with_lora(regressor())
    tuned(adapted, batches, 5e-3)
    adapted.eval().save_pretrained(tmp_path)
    base = regressor()
    torch.nn.init.normal_(base.pre_classifier.weight)
    torch.nn.init.normal_(base.classifier.weight)
    again = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    assert torch.equal(again(**batches[0]).logits, adapted(**batches[0]).logits)


FAMILIES = {
    "bert-base-uncased": ({"num_hidden_layers": 1}, {"pooler", "classifier"}, 6),
    "roberta-base": ({"num_hidden_layers": 1}, {"classifier"}, 6),
    "deberta-v3-base": ({"num_hidden_layers": 1}, {"pooler", "classifier"}, 6),
    "electra-base": ({"num_hidden_layers": 1, "embedding_size": 64}, {"classifier"}, 6),
    "modernbert-base": ({"num_hidden_layers": 2}, {"head", "classifier"}, 8),  # one of its kinds of layer each
    "gpt2": ({"n_layer": 1, "vocab_size": 50257}, {"score"}, 4),
    "llama-2-7b": ({"num_hidden_layers": 1, "num_key_value_heads": 4, "intermediate_size": 96}, {"score"}, 7),
}


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name):
    """The head trains whole, every linear layer of the base has an adapter, nothing else trains."""
    changes, heads, linear = FAMILIES[name]
    narrow = {"hidden_size": 64, "num_attention_heads": 4}
    narrow = {"n_embd": 64, "n_head": 4} if name == "gpt2" else narrow
    adapted = with_lora(models.build(name, 3, **{**narrow, **changes}))
    trained = [n for n, p in adapted.named_parameters() if p.requires_grad]
    assert sum("lora_A" in n for n in trained) == linear
    found = {re.search(r"(\w+)\.modules_to_save", n).group(1) for n in trained if "lora_" not in n}
    assert found == heads


def test_only():
    adapted = with_lora(regressor(), only=("q_lin", "v_lin"))
    assert {name.split(".")[-1] for name in adapted.base_model.targeted_module_names} == {"q_lin", "v_lin"}


def test_the_prediction_takes_the_copied_function():
    """State and weights of a DeBERTa under fake tensors are those that were counted on a real one."""
    settings = models.config("deberta-v3-base", 2, num_hidden_layers=1, vocab_size=1000)
    real = with_lora(models.build("deberta-v3-base", 2, num_hidden_layers=1, vocab_size=1000))
    counted = sum(p.numel() for p in real.parameters() if p.requires_grad)
    parts = predict.step_memory(settings, 1, 16, prepare=with_lora).parts
    assert 8 * counted <= parts["optimizer state"] <= 8 * counted + 4 * 200
    assert parts["weights"] >= sum(p.nbytes for p in real.parameters())


def cells(*tags):
    return [source(cell) for cell in LESSON.code if set(cell["metadata"].get("tags", [])) & set(tags)]


@pytest.fixture
def put_back(monkeypatch):
    """What a lesson leaves out is there again for the other tests."""
    monkeypatch.setattr(packages, "left_out", {})
    for name in ("peft", "bitsandbytes"):
        if name in sys.modules:
            monkeypatch.setitem(sys.modules, name, sys.modules[name])
        else:
            monkeypatch.delitem(sys.modules, name, raising=False)


def test_without_peft(monkeypatch, put_back):
    """A machine without peft (imitated): LoRA by hand goes through the proof, and the bounds expect no more."""
    monkeypatch.setitem(sys.modules, "peft", None)
    namespace, said = {}, ""
    with warnings.catch_warnings():
        for cell in LESSON.needed_for("proof"):
            said += run(source(cell), namespace)
    assert "left out: LoRA by the library, and what is measured of it. peft: " in said
    assert namespace["has_peft"] is False and namespace["has_4bit"] is False and said.count(": equal") == 5
    expected = bounds._expected("15_peft", namespace["here"])
    assert "accuracy_ratio" in expected and not {"memory_ratio", "qlora_7b_gb", "bert_large_memory_ratio"} & set(
        expected
    )


def test_bitsandbytes_without_kernels_for_the_gpu(monkeypatch, put_back):
    """Its trial in a process of its own fails on a GPU (imitated): one line says so, and it counts as not installed."""
    import subprocess

    pytest.importorskip("bitsandbytes")
    [cell] = [source(cell) for cell in LESSON.code if "FOUR_BITS =" in source(cell)]
    failed = subprocess.CompletedProcess([], 1, "", "Traceback\nRuntimeError: no kernel image")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    here = type("Here", (), {"device": "cuda"})
    said = run(cell, namespace := {"here": here, "machine": machine, "packages": packages})
    assert "left out: the base of 4 bits. bitsandbytes: RuntimeError: no kernel image" in said
    assert namespace["has_peft"] and not namespace["has_4bit"]
    assert "qlora_7b_gb" not in bounds._expected("15_peft", machine.facts())


def test_beside_an_old_torchao(tmp_path):
    """As on Kaggle and Colab, in a process of its own, where nobody has hidden it: peft makes its adapters."""
    import subprocess

    script = "\n".join([
        "import sys, importlib.util, importlib.metadata",
        f"sys.path[:0] = {[str(tmp_path), *map(str, (ROOT, ROOT / 'tests'))]!r}",
        LESSON.source("copy"),
        "from stranger import regressor",
        "print('adapted', sum('lora_A' in name for name, _ in with_lora(regressor()).named_parameters()))",
    ])  # fmt: skip
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao" / "__init__.py").write_text("raise RuntimeError('too old for this torch')")
    (tmp_path / "torchao-0.10.0.dist-info").mkdir()
    (tmp_path / "torchao-0.10.0.dist-info" / "METADATA").write_text("Name: torchao\nVersion: 0.10.0\n")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "adapted 12" in done.stdout, done.stderr[-1000:]
    without = script.replace('sys.modules.setdefault("torchao", None)', "pass")
    assert (
        "incompatible version of torchao"
        in subprocess.run([sys.executable, "-c", without], capture_output=True, text=True).stderr
    )
