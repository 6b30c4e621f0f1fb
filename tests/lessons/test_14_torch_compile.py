import contextlib
import copy
import os
from types import SimpleNamespace

import pytest
import strangers
import torch
import torch._dynamo
from stranger import Ratings, regressor
from test_forks import EVERY
from torch.utils.data import DataLoader
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

from notebooks import answer_to_exercise, copied, lesson, proof_fails, run, source

LESSON = lesson("14")
COPIED = copied(LESSON)
CELLS = {cell["id"]: source(cell) for cell in LESSON.cells}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One folder of compiled code for all tests here: the C++ compiler works once for each graph."""
    return str(tmp_path_factory.mktemp("inductor"))


@pytest.fixture(autouse=True)
def forgotten(folder, monkeypatch):
    """The lesson's cells choose folders of their own, which are gone with them."""
    from torch._inductor import codecache

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
    for name in ("_HEADER_DIR", "_HEADER_LOCK_DIR"):
        monkeypatch.setattr(codecache, name, getattr(codecache, name))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    """A machine without a C++ compiler or compiled code, imitated: Inductor is told of one that is not there."""
    from torch._inductor import config, cpp_builder
    from torch._inductor.utils import clear_caches

    def forget():
        clear_caches()
        for function in vars(cpp_builder).values():
            if hasattr(type(function), "cache_clear"):
                function.cache_clear()

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    forget()
    with config.patch({"cpp.cxx": ("no-such-compiler",)}):
        yield
    forget()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    torch.manual_seed(7)\n    loss", "    torch.manual_seed(7 + (network is after))\n    loss"),
        ("compile_somehow(after, dynamic=True", "compile_somehow(after, dynamic=False"),
        ("        layer.compile(**options)", "        pass"),
        ("autograd.grad(loss,", "autograd.grad(loss * (2 if network is after else 1),"),
        ("return loss.item(),", "return loss.item() + 1e-4 * (network is after),"),
    ],
    ids=["other random numbers", "a graph for each shape", "nothing compiled", "twice the gradient", "another loss"],
)
def test_proof_can_fail(old, new, no_compiler):
    """By aot_eager, whose graphs are the same."""
    proof_fails(LESSON, old, new)


def test_copied():
    """Another family, a regression: the layers' code runs from one graph, losses and weights are the plain ones.

    By aot_eager, whose graphs are Inductor's; in a stranger's script, below, by Inductor where all is tested.
    """

    def trained(prepare):
        model = regressor(layers=3).eval()
        prepared = prepare(model)
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
        for batch in DataLoader(Ratings(24), batch_size=8):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return prepared, losses, list(model.parameters()), list(model.state_dict())

    _, losses, weights, names = trained(lambda model: None)
    torch._dynamo.utils.counters.clear()
    done, compiled_losses, compiled_weights, compiled_names = trained(
        lambda model: COPIED["compile_layers"](model, backend="aot_eager")
    )
    assert done == 3 and names == compiled_names
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # the try, and one for three layers
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(losses, compiled_losses, strict=True))
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(weights, compiled_weights, strict=True))


def counting():
    """A backend that counts, and its graphs made and run."""
    made, ran = [], []

    def backend(graph, _):
        made.append(graph)
        return lambda *arguments: (ran.append(1), graph(*arguments))[1]

    return backend, made, ran


@pytest.mark.parametrize(("use_cache", "graphs"), [(False, 1), (True, 8)], ids=["as the page says", "with the cache"])
def test_a_deep_decoder_is_compiled_once(use_cache, graphs):
    """Twelve layers, whose caches are numbered, and one graph that all of them run; else the limit's eight."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=12, n_head=2, n_positions=16))
    backend, made, ran = counting()
    model.config.use_cache = use_cache
    assert COPIED["compile_layers"](model, backend=backend) == 12
    made.clear()
    ran.clear()
    texts = torch.ones(2, 8, dtype=torch.long)
    for _ in range(2):
        model(input_ids=texts, labels=texts).loss.backward()
    assert (len(made), len(ran)) == (graphs, 2 * (12 if graphs == 1 else 8))


def test_electras_layers_are_of_two_kinds():
    """With dynamic=True, where a projection stands before the first layer, that layer has a graph of its own."""
    from transformers import ElectraConfig, ElectraModel

    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2, vocab_size=64)
    graphs = []
    for embedding_size in (16, 8):
        model = ElectraModel(ElectraConfig(**sizes, embedding_size=embedding_size))
        backend, made, _ = counting()
        assert COPIED["compile_layers"](model, backend=backend, dynamic=True) == 4
        made.clear()
        model(input_ids=torch.arange(5, 45).view(4, 10)).last_hidden_state.sum().backward()
        graphs.append(len(made))
        torch._dynamo.reset()
    assert graphs == [1, 2]


@pytest.mark.parametrize(("limit", "whole"), [(8, False), (32, True)], ids=["by default", "as the page says"])
def test_frozen_layers_of_three_kinds_pass_the_limit_of_graphs(limit, whole):
    """ModernBERT, its lower half frozen: trained and predicted, with padding and without."""
    from transformers import ModernBertConfig, ModernBertModel

    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=6, num_attention_heads=2, vocab_size=64)
    ids = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
    model = ModernBertModel(ModernBertConfig(**sizes, **ids))
    for part in (model.embeddings, *model.layers[:3]):
        part.requires_grad_(False)
    text = torch.arange(5, 45).view(4, 10)
    mask = (torch.arange(10) < torch.tensor([[10], [8], [7], [5]])).long()
    with torch._dynamo.config.patch(recompile_limit=limit, fail_on_recompile_limit_hit=True):
        assert COPIED["compile_layers"](model, backend="eager", dynamic=True) == 6
        with contextlib.nullcontext() if whole else pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            for given in (mask, None):
                model.train()(input_ids=text, attention_mask=given).last_hidden_state.sum().backward()
                with torch.no_grad():
                    model.eval()(input_ids=text, attention_mask=given)
                    model(input_ids=text[:1], attention_mask=None if given is None else given[:1])
    torch._dynamo.reset()


def test_a_replica_runs_the_first_gpus_layer():
    """Two GPUs imitated: nn.DataParallel's copy of a compiled layer calls the layer that it was made of."""
    layer = torch.nn.Linear(4, 4)
    layer.compile(backend="eager")
    replica = layer._replicate_for_data_parallel()
    replica.weight = replica.bias = None  # its own, which it would need
    assert torch.equal(replica(torch.ones(4)), layer(torch.ones(4)))


def test_the_exercise_refuses_a_guard_that_lets_negative_values_through():
    said = answer_to_exercise(LESSON, ("x.abs().max() > 100, x / 2", "x.max() > 100, x / 2"))
    assert "not yet: the same results" in said


def test_what_is_not_compiled_is_not_called_compiled():
    pooler = BertModel(BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)).pooler
    torchs = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3)
    dropouts = torch.nn.ModuleList(torch.nn.Dropout(p) for p in (0.1, 0.2))
    for model in (pooler, torchs, torch.nn.ModuleList([torch.nn.Linear(2, 2), dropouts])):
        assert COPIED["compile_layers"](model, backend="eager") == 0


def test_without_a_compiler(no_compiler, capsys):
    """The copied cell says why and leaves the model alone; the lesson goes on with aot_eager, and its proof holds."""
    model = regressor()
    assert not COPIED["compile_layers"](model)
    said = capsys.readouterr()
    assert "C++ compiler" in said.out and len(said.out.splitlines()) == 1 and not said.err
    assert not any(module._compiled_call_impl for module in model.modules())
    namespace = {}
    for cell in LESSON.needed_for("proof"):
        run(source(cell), namespace)
    assert namespace["proved_by"] == "aot_eager"


def test_a_gpu_that_is_too_old(monkeypatch, capsys):
    """A P100, imitated: Inductor raises what it raises there."""
    from torch._inductor import exc

    class P100:
        name, major, minor = "Tesla P100-PCIE-16GB", 6, 0

    def refuse(*_, **__):
        raise exc.GPUTooOldForTriton(P100, None)

    monkeypatch.setattr(torch, "compile", refuse)
    assert not COPIED["compile_layers"](regressor())
    assert "too old" in capsys.readouterr().out


def test_needs_by_the_facts():
    namespace = {}
    exec(CELLS["needs"], namespace)
    needs = namespace["needs"]
    assert needs("cpu") is None and "C++" in needs("cpu", compiler=False)
    assert "7.0" in needs("cuda", (6, 0)) and needs("cuda", (7, 5)) is None and needs("cuda", (7, 0), triton=False)
    assert "C compiler" in needs("cuda", (7, 5), compiler=False)


def test_nothing_stays_on_disk(monkeypatch):
    """The lesson's folder of compiled code is in force, whatever stood there before, and goes with its kernel."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    namespace = {}
    run(source(LESSON.tagged("setup")[0]), namespace)
    run(CELLS["start"], namespace)
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    place = namespace["folder"].name
    assert cache_dir() == place and os.path.exists(place)
    namespace.clear()
    assert not os.path.exists(place)


def graphs_made():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def in_a_script(name, edits, call):
    """Run a stranger's script plain and compiled: what each gives, and the graphs that the second made."""
    plain, changed = strangers.load(name), strangers.load(name, LESSON.source("copy"), edits)
    before, start = call(plain), graphs_made()
    after = call(changed)
    return before, after, graphs_made() - start - 1  # less the one of the try


def apart(one, other):
    return max((a - b).abs().max().item() for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_in_a_strangers_classifier(stranger_files, capsys):
    files = dict(train=stranger_files / "train.csv", valid=stranger_files / "valid.csv")
    arguments = SimpleNamespace(model=stranger_files / "bert", **files, epochs=1, batch_size=32)
    line = 'print(compile_layers(model, dynamic=True, backend="aot_eager"), "layers compiled")'
    before_loop = "    for epoch in range(args.epochs):\n"
    before, after, graphs = in_a_script(
        "classifier", {before_loop: f"    {line}\n{before_loop}"}, lambda s: s.main(arguments)
    )
    accuracy, compiled, same_accuracy = capsys.readouterr().out.splitlines()
    assert compiled == "4 layers compiled" and accuracy == same_accuracy
    assert graphs == 2, "one to train, one to evaluate, whatever the lengths"
    assert apart(before, after) <= 1e-5 and list(before.state_dict()) == list(after.state_dict())


@pytest.mark.parametrize("apex", [False, True], ids=["fp32", "autocast and a scaler"])
def test_in_a_strangers_competition_script(stranger_files, monkeypatch, apex):
    """The submission is the plain one's, row by row. In fp32 by Inductor with COURSE_TEST_ALL=1: it takes a minute."""
    monkeypatch.setenv("DATA", str(stranger_files / "scores"))
    monkeypatch.setenv("MODEL", str(stranger_files / "bert"))
    backend = "inductor" if EVERY and not apex else "aot_eager"
    line = f'assert compile_layers(model, dynamic=True, backend="{backend}") == 4'
    after_model = "    model = CustomModel().to(CFG.device)\n"

    def submitted(script):
        script.CFG.apex = apex
        return script.main()

    edits = {after_model: f"{after_model}    {line}\n"}
    (before, submission), (after, other), graphs = in_a_script("competition", edits, submitted)
    assert graphs == 2
    if not apex:  # which rounds to bf16
        torch.manual_seed(42)
        assert strangers.same_weights(before, after, strangers.load("competition").CustomModel())
    assert (submission.id == other.id).all() and other.notna().all(axis=None)
    assert (submission - other).abs().max().max() <= (0.05 if apex else 1e-3)


@pytest.mark.parametrize("on_a_copy", [False, True], ids=["on the model", "on a copy"])
def test_generating_before_training(on_a_copy):
    """On the model it fills the limit of graphs, and training runs plain, with a warning alone; a copy is plain."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=64, intermediate_size=64, num_attention_heads=2, vocab_size=200)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4)).train()
    runs = []

    def counting(graph, _):
        return lambda *given: runs.append(1) or graph(*given)

    COPIED["compile_layers"](model, dynamic=True, backend=counting)
    ids = torch.arange(10).view(2, 5)
    (copy.deepcopy(model) if on_a_copy else model).eval().generate(ids, max_new_tokens=12, do_sample=False)
    model.config.use_cache = False
    runs.clear()
    model.train()(input_ids=ids, labels=ids).loss.backward()
    assert len(runs) == (4 if on_a_copy else 0)


def test_in_a_strangers_decoder(stranger_files, capsys):
    after_model = "    model = AutoModelForCausalLM.from_pretrained(model_path).to(device)\n"
    lines = (
        '    model.config.use_cache = False\n    assert compile_layers(model, dynamic=True, backend="aot_eager") == 2\n'
    )
    files = [stranger_files / name for name in ("llama", "bert", "train.jsonl", "valid.jsonl")]
    before, after, graphs = in_a_script("decoder", {after_model: after_model + lines}, lambda s: s.main(*files))
    assert graphs <= 3, "to train and to evaluate; batches of 16 are as heads, 16 wide, so the last of 8 is another"
    assert apart(before, after) <= 1e-4
    one, other = strangers.perplexities(capsys)
    assert other == pytest.approx(one, rel=1e-4), "the same perplexity"
