import re
import sys
import warnings
from types import SimpleNamespace

import pytest
import strangers
import torch
from stranger import Ratings, regressor
from strangers import competition
from torch.utils.data import DataLoader

from notebooks import ROOT, copied, lesson, proof_fails, run, source
from tutorial_utils import bounds, data, machine, measure, models, packages, predict

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
LESSON = lesson("15")
COPIED = copied(LESSON)
with_lora = COPIED["with_lora"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("r=rank,", "r=rank, init_lora_weights=False,"),
        ("        optimizer.step()", "        optimizer.step(); [p.data.mul_(1.001) for p in model.parameters()]"),
        ("lora.merge_and_unload()", "lora.unload()"),
        ("PeftModel.from_pretrained(other, folder)", "pass"),
        ("lr=10 * RATE)\n    train_epoch", "lr=0.0)\n    train_epoch"),
    ],
    ids=[
        "random from the start",
        "the base moves",
        "adapters thrown away",
        "the adapter not loaded",
        "nothing learned",
    ],
)
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


def trained(model, batches, lr=5e-3):
    """The losses of a step on each batch, and the optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for batch in batches:
        losses.append(model(**batch).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses], optimizer


def trains(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


def test_copied():
    """A DistilBERT regression: it learns, the base stays, the state is small, merged and reloaded it answers alike."""
    batches = [next(iter(DataLoader(Ratings(16), batch_size=16)))] * 20
    model = models.without_dropout(regressor())
    plain = model(**batches[0]).logits
    base = {name: p.clone() for name, p in model.distilbert.named_parameters()}
    adapted = with_lora(model)
    assert torch.equal(plain, model(**batches[0]).logits)
    losses, optimizer = trained(model, batches)
    assert losses[-1] < 0.5 * losses[0]
    kept = dict(model.named_parameters())
    for name, value in base.items():
        found = [p for n, p in kept.items() if n.replace("base_layer.", "").endswith("distilbert." + name)]
        assert len(found) == 1 and torch.equal(found[0], value) and not found[0].requires_grad, name
    assert {n for n in trains(model) if "lora_" not in n} == {
        f"{part}.modules_to_save.default.{kind}"
        for part in ("pre_classifier", "classifier")
        for kind in ("weight", "bias")
    }
    assert sum("lora_A" in n for n in trains(model)) == 2 * 6  # every linear layer of both blocks
    state = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if t.dim())
    assert state == 8 * sum(kept[n].numel() for n in trains(model))
    answers = model.eval()(**batches[0]).logits
    assert adapted.merge_and_unload() is model, "it is the model itself that is merged"
    assert (model(**batches[0]).logits - answers).abs().max() < 1e-5
    assert {name for name, _ in model.named_parameters()} == {name for name, _ in regressor().named_parameters()}


def test_saved_and_loaded_onto_another_random_head(tmp_path):
    batches = list(DataLoader(Ratings(32), batch_size=16))
    adapted = with_lora(regressor())
    trained(adapted, batches)
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


def test_options_are_those_of_peft():
    adapted = with_lora(regressor(), rank=4, target_modules=["q_lin", "v_lin"], use_rslora=True)
    assert {name.split(".")[-1] for name in adapted.targeted_module_names} == {"q_lin", "v_lin"}
    config = adapted.peft_config["default"]
    assert (config.r, config.lora_alpha, config.use_rslora) == (4, 16, True)


class Own(torch.nn.Module):
    """A backbone among modules and parameters of one's own."""

    def __init__(self, backbone):
        super().__init__()
        self.heads = torch.nn.ModuleList(torch.nn.Linear(64, 1) for _ in range(2))
        self.weights = torch.nn.Parameter(torch.zeros(3))
        self.encoder = backbone

    def forward(self, **inputs):
        hidden = self.encoder(**inputs).last_hidden_state[:, 0]
        return sum(head(hidden) for head in self.heads)


@pytest.mark.parametrize(("name", "linear"), [("bert-base-uncased", 6), ("deberta-v3-base", 6), ("roberta-base", 6)])
def test_a_backbone_among_modules_of_ones_own(name, linear):
    """What is one's own trains under its own name; of the backbone, adapters and a pooler, if it has one."""
    sizes = dict(num_hidden_layers=1, hidden_size=64, num_attention_heads=4)
    model = Own(models.build(name, 3, **sizes).base_model)
    before = trains(model)
    lora = with_lora(model)
    own = {name for name in before if not name.startswith("encoder.")}
    assert own <= trains(model) and {"weights", "heads.0.weight"} <= own
    of_backbone = trains(model) - own
    assert all("lora_" in name or "pooler" in name for name in of_backbone)
    assert sum("lora_A" in name for name in of_backbone) == linear
    ids = torch.ones(2, 8, dtype=torch.long)
    model(input_ids=ids).sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "lora_B" in name)
    lora.merge_and_unload()
    assert {name for name, _ in model.named_parameters()} == before


@pytest.mark.parametrize("name", ["model", "base_model"])
def test_a_class_of_ones_own_that_derives_from_transformers(name):
    """As competition scripts have it, whatever the backbone is called: its head trains whole."""
    from transformers import BertPreTrainedModel

    backbone = models.build("bert-base-uncased", 3, num_hidden_layers=1, hidden_size=64, num_attention_heads=4).bert

    class Net(BertPreTrainedModel if name == "model" else torch.nn.Module):
        def __init__(self):
            super().__init__(*[backbone.config] * (name == "model"))
            setattr(self, name, backbone)
            self.fc = torch.nn.Linear(64, 1)

    net = Net()
    with_lora(net)
    assert {"fc.weight", "fc.bias"} <= trains(net) and type(net.fc) is torch.nn.Linear
    assert all("lora_" in one or "pooler" in one for one in trains(net) - {"fc.weight", "fc.bias"})


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_decoders_output_layer_stays(tied):
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=100)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, tie_word_embeddings=tied))
    with_lora(model)
    assert all("lora_" in name for name in trains(model))
    assert sum("lora_A" in name for name in trains(model)) == 2 * 7


@pytest.mark.parametrize("name", ["bert", "roberta", "deberta-v2", "distilbert", "modernbert"])
def test_a_masked_language_model_keeps_its_vocabulary(name, tmp_path):
    """Tied to the embeddings and frozen: what is merged and saved is what was trained."""
    from transformers import AutoConfig, AutoModelForMaskedLM

    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=99)
    sizes |= {"dim": 64, "hidden_dim": 64, "n_layers": 2, "n_heads": 2} if name == "distilbert" else {}
    ids = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model(name, **sizes, **ids))
    lora = with_lora(model)
    assert not model.get_output_embeddings().weight.requires_grad
    optimizer, text = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.arange(5, 25).view(2, 10)
    for _ in range(3):
        model(input_ids=text, labels=text).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    answers = model.eval()(input_ids=text).logits
    lora.merge_and_unload()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    assert torch.allclose(loaded(input_ids=text).logits, answers, atol=1e-4)


def test_two_backbones_are_called_one_by_one():
    """By one call the first alone gets adapters, and the second trains whole."""
    from transformers import AutoConfig, AutoModel

    def pair():
        return torch.nn.ModuleList([AutoModel.from_config(AutoConfig.from_pretrained(data.TINY)) for _ in range(2)])

    once, each = pair(), pair()
    with_lora(once)
    for backbone in each:
        with_lora(backbone)
    adapters = [[sum("lora_A" in name for name, _ in part.named_parameters()) for part in two] for two in (once, each)]
    assert adapters == [[24, 0], [24, 24]]
    assert all(p.requires_grad for p in once[1].parameters())


@pytest.mark.parametrize(
    ("head", "skip", "packed"),
    [("score", ["classifier", "pooler.dense"], True), ("score", ["score"], False), ("lm_head", None, False)],
)
def test_what_is_new_is_named_for_4_bits(head, skip, packed, tmp_path):
    """Of a Llama classifier the score; a language model's head is left out by itself."""
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BitsAndBytesConfig, LlamaConfig

    kind = AutoModelForCausalLM if head == "lm_head" else AutoModelForSequenceClassification
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, vocab_size=100)
    kind.from_config(LlamaConfig(**sizes)).save_pretrained(tmp_path)
    recipe = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=skip)
    model = kind.from_pretrained(tmp_path, quantization_config=recipe, dtype=torch.float32)
    assert (type(getattr(model, head)).__name__ == "Linear4bit") is packed


def test_a_base_of_4_bits_inside_a_module_of_ones_own():
    """Its adapters know that what they stand beside is packed."""
    pytest.importorskip("bitsandbytes")
    import transformers

    recipe = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=["pooler.dense"]
    )
    backbone = transformers.AutoModel.from_pretrained(
        data.TINY, quantization_config=recipe, dtype=torch.float32, local_files_only=True
    )
    model = Own(backbone)
    with_lora(model)
    layers = [part for part in model.modules() if hasattr(part, "lora_A")]
    assert len(layers) == 24 and {type(part).__name__ for part in layers} == {"Linear4bit"}


def test_the_prediction_takes_the_copied_function():
    """State and weights of a DeBERTa under fake tensors are those that were counted on a real one."""
    settings = models.config("deberta-v3-base", 2, num_hidden_layers=1, vocab_size=1000)
    real = with_lora(models.build("deberta-v3-base", 2, num_hidden_layers=1, vocab_size=1000))
    counted = sum(p.numel() for p in real.parameters() if p.requires_grad)
    parts = predict.step_memory(settings, 1, 16, prepare=with_lora).parts
    assert 8 * counted <= parts["optimizer state"] <= 8 * counted + 4 * 200
    assert parts["weights"] >= sum(p.nbytes for p in real.parameters())


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
    """A machine without peft (imitated): LoRA by hand is proved, and the bounds expect no more than it gives."""
    monkeypatch.setitem(sys.modules, "peft", None)
    namespace, said = {}, ""
    wanted = {"start", "baseline", "copy", "before-and-after", "differences", "merged-and-loaded", "by-hand",
              "by-hand-equal", "by-hand-activations"}  # fmt: skip
    with warnings.catch_warnings():
        for cell in LESSON.code:
            if cell["id"] in wanted or "setup" in cell["metadata"].get("tags", []):
                try:
                    said += run(source(cell), namespace)
                except (ImportError, NameError) as error:
                    assert packages.excused(error, source(cell)), error
    assert "left out: LoRA by the library, and what is measured of it. peft: " in said
    assert "by hand: {'merged': " in said and "from peft" not in said
    expected = bounds._expected("15_peft", namespace["here"])
    assert expected.keys() == {"baseline_peak_bytes", "activations_by_hand"}
    assert list(namespace["memory"]) == ["all trained"] and 0.9 < namespace["by_hand_held"] < 1.1


def test_bitsandbytes_without_kernels_for_the_gpu(monkeypatch, put_back):
    """Its trial in a process of its own fails on a GPU (imitated): one line says so, and it counts as not installed."""
    import subprocess

    pytest.importorskip("bitsandbytes")
    [cell] = [source(cell) for cell in LESSON.code if cell["id"] == "try-four-bits"]
    failed = subprocess.CompletedProcess([], 1, "", "Traceback\nRuntimeError: no kernel image")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    said = run(cell, namespace := {"device": "cuda", "packages": packages, "has_4bit": True})
    assert "left out: the base of 4 bits. bitsandbytes: RuntimeError: no kernel image" in said
    assert not namespace["has_4bit"]
    assert "qlora_7b_gb" not in bounds._expected("15_peft", machine.facts())


def test_bitsandbytes_comes_before_peft_looks_for_it():
    """Which it does once: what was added later would not be seen, and QLoRA's adapters be those of plain layers."""
    sources = [source(cell) for cell in LESSON.code]
    added = next(i for i, code in enumerate(sources) if 'need("bitsandbytes"' in code)
    used = next(i for i, code in enumerate(sources) if "with_lora(" in code and "def with_lora" not in code)
    assert added < used
    from peft import import_utils

    assert hasattr(import_utils.is_bnb_available, "cache_info"), "peft looks again: the order does not matter any more"


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


def changes(model, start, rank=8):
    """The names of a model's weights that moved; those of its layers by no more than a rank."""
    before, after = dict(start.named_parameters()), dict(model.named_parameters())
    assert before.keys() == after.keys(), "merged, the model is as it was"
    moved = {name for name, p in after.items() if not torch.equal(p, before[name])}
    for name in moved:
        if "layer" in name:
            change = (after[name] - before[name]).detach()
            assert change.dim() == 2 and torch.linalg.matrix_rank(change, rtol=1e-3) <= rank, name
    return moved


def test_in_a_strangers_classifier(stranger_files, capsys):
    files = dict(train=stranger_files / "train.csv", valid=stranger_files / "valid.csv")
    arguments = SimpleNamespace(model=stranger_files / "bert", **files, epochs=2, batch_size=32)
    line = "    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)\n"
    adapted = {line: "    lora = with_lora(model)\n" + line.replace("5e-4", "5e-3")}
    merge = "    lora.merge_and_unload()\n    print(evaluate(model, valid_loader))\n"
    merged = {"    return model\n": merge + "    return model\n"}
    script = strangers.load("classifier", LESSON.source("copy"), adapted | merged)
    model = script.main(arguments)
    *epochs, last = capsys.readouterr().out.splitlines()
    assert epochs[-1].endswith(f"{float(last):.4f}"), "merged, the same accuracy"
    torch.manual_seed(42)
    start = script.AutoModelForSequenceClassification.from_pretrained(stranger_files / "bert", num_labels=4)
    moved = changes(model, start)
    assert sum("layer" in name for name in moved) == 24
    assert {name for name in moved if "layer" not in name} == {
        f"{part}.{kind}" for part in ("bert.pooler.dense", "classifier") for kind in ("weight", "bias")
    }


MODEL = "    model = CustomModel().to(CFG.device)\n"
ADAPTED = {MODEL: MODEL + "    lora = with_lora(model)\n", "encoder_lr = 2e-4": "encoder_lr = 2e-3"}
MERGED = {"    return model, preds\n": "    lora.merge_and_unload()\n    return model, preds\n"}


@pytest.mark.parametrize("apex", [False, True], ids=["fp32", "autocast and a scaler"])
def test_in_a_strangers_competition_script(stranger_files, monkeypatch, apex):
    """Merged, it predicts the same for the test rows, which have no labels, in their order."""
    kept = competition(stranger_files, monkeypatch, LESSON.source("copy"), ADAPTED)
    script = competition(stranger_files, monkeypatch, LESSON.source("copy"), ADAPTED | MERGED)
    kept.CFG.apex = script.CFG.apex = apex
    (unmerged, submission), (model, submitted) = kept.main(), script.main()
    assert (submission.id == submitted.id).all() and len(submission) == 50
    distance = (submission - submitted).abs().max().max()
    assert distance < 1e-4, f"merged and unmerged are {distance} apart"
    assert submitted.wording.std() > 1e-3, "it tells texts apart"
    tokenizer = script.AutoTokenizer.from_pretrained(script.CFG.model)
    test = script.pd.read_csv(stranger_files / "scores" / "test.csv").iloc[[41, 7]]
    alone = script.inference_fn(DataLoader(script.TextDataset(test, tokenizer, train=False), 1), model)
    assert abs(submitted.iloc[[41, 7]][script.CFG.targets].values - alone).max() < 1e-4
    own = {name: p for name, p in unmerged.named_parameters() if p.requires_grad}
    script.with_lora(again := script.CustomModel())
    assert not again.load_state_dict(own, strict=False).unexpected_keys
    loader = DataLoader(script.TextDataset(test, tokenizer, train=False), 1)
    assert (script.inference_fn(loader, again.eval()) == kept.inference_fn(loader, unmerged)).all(), "as it was saved"
    torch.manual_seed(42)
    moved = changes(model, script.CustomModel())
    assert {name for name in moved if "layer" not in name} == {"fc.weight", "fc.bias"}


def test_stages_as_the_page_says():
    """What is frozen after the call, what disable_adapter does to it, and what trains after merging."""
    model = regressor()
    lora = with_lora(model)
    every = trains(model)
    model.distilbert.transformer.layer[0].requires_grad_(False)
    assert 0 < len(trains(model)) < len(every)
    with lora.disable_adapter():
        pass
    assert trains(model) == every, "disable_adapter leaves what is frozen: say so on the page"
    model.distilbert.transformer.layer[0].requires_grad_(False)
    trained(model, DataLoader(Ratings(8), batch_size=4))
    own = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad or "lora_" in n}
    assert own.keys() == every, "adapters that were frozen later are saved too"
    lora.merge_and_unload()
    base = {name for name, _ in model.named_parameters()}
    assert trains(model) < base and not any(".transformer." in name for name in trains(model))
    assert model.requires_grad_(True) is model and trains(model) == base


def test_a_second_call_loses_what_adapters_learned():
    def learned():
        return any(p.any() for name, p in model.named_parameters() if "lora_B" in name)

    model = regressor()
    with_lora(model)
    trained(model, DataLoader(Ratings(8), batch_size=4))
    assert learned()
    with pytest.warns(UserWarning):
        with_lora(model)
    assert not learned()


def test_a_competition_scripts_groups_and_memory(stranger_files, monkeypatch):
    """Adapters get the encoder's rate, the head keeps its own, and the state is a fraction."""
    script = competition(stranger_files, monkeypatch, LESSON.source("copy"))
    script.CFG.apex = False

    def one_step(prepare):
        model = script.CustomModel().to(script.CFG.device)
        prepare(model)
        optimizer = torch.optim.AdamW(script.get_optimizer_params(model))
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        scaler = torch.amp.GradScaler(script.CFG.device, enabled=False)
        frame = script.pd.read_csv(stranger_files / "scores" / "train.csv").iloc[:32]
        loader = DataLoader(script.TextDataset(frame, script.AutoTokenizer.from_pretrained(script.CFG.model)), 32)
        step = lambda: script.train_fn(loader, model, script.nn.SmoothL1Loss(), optimizer, scheduler, scaler)  # noqa: E731
        return measure.memory(step, model, optimizer), model, optimizer

    whole, _, _ = one_step(lambda model: None)
    adapted, model, optimizer = one_step(lambda model: script.with_lora(model, target_modules=["query", "value"]))
    assert adapted.peak < 0.85 * whole.peak
    assert adapted.parts["optimizer state"] < 0.03 * whole.parts["optimizer state"]
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert rates[id(parameter)] == (script.CFG.head_lr if name.startswith("fc.") else script.CFG.encoder_lr)


def test_in_a_strangers_decoder(stranger_files, capsys):
    line = "    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)\n"
    edits = {
        line: "    print(f'perplexity {perplexity(model, loaders[1]):.2f}')\n    lora = with_lora(model)\n" + line,
        "MAX_LENGTH, LR, BATCH_SIZE, EPOCHS = 96, 1e-3, 16, 1": "MAX_LENGTH, LR, BATCH_SIZE, EPOCHS = 96, 1e-2, 16, 2",
        "    return model\n": "    lora.merge_and_unload()\n"
        "    print(f'perplexity {perplexity(model, loaders[1]):.2f}')\n    return model\n",
    }
    script = strangers.load("decoder", LESSON.source("copy"), edits)
    model = script.main(*[stranger_files / name for name in ("llama", "bert", "train.jsonl", "valid.jsonl")])
    found = strangers.perplexities(capsys)
    untrained, *_, last, merged = found
    assert last < 0.9 * untrained and abs(merged / last - 1) < 1e-3
    moved = changes(model, script.AutoModelForCausalLM.from_pretrained(stranger_files / "llama"))
    assert len(moved) == 2 * 7 and all("layers." in name for name in moved)


def test_another_lessons_freeze_would_train_the_base():
    """As the page says, which freezes by requires_grad_."""
    model = regressor()
    with_lora(model)
    frozen = [p for name, p in model.named_parameters() if ".base_layer." in name]
    assert not any(p.requires_grad for p in frozen)
    copied(lesson("02"))["freeze"](model, 0)
    assert any(p.requires_grad for p in frozen)
