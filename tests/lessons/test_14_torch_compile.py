import os

import pytest
import torch
import torch._dynamo
from stranger import Ratings, regressor
from torch.utils.data import DataLoader
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

from notebooks import copied, lesson, proof_fails, run, source

LESSON = lesson("14")
COPIED = copied(LESSON)


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
        ('faithful = {"dynamic": True', 'faithful = {"dynamic": False'),
        ("        layer.compile(**options)", "        pass"),
        ("    loss.backward()\n    gradients", "    (loss * (2 if network is after else 1)).backward()\n    gradients"),
    ],
    ids=["other random numbers", "a graph for each shape", "nothing compiled", "a gradient of twice the size"],
)
def test_proof_can_fail(old, new, no_compiler):
    """By aot_eager, whose graphs are the same."""
    proof_fails(LESSON, old, new)


def test_copied():
    """Another family, a regression: the layers' code runs from one graph, losses and weights are the plain ones."""

    def trained(prepare):
        model = regressor(layers=3).eval()
        model.train = lambda mode=True: model  # dropout off, whatever the copied step says
        prepared = prepare(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batches = DataLoader(Ratings(24), batch_size=8)
        losses = [COPIED["train_step"](model, optimizer, batch) for batch in batches]
        return prepared, losses, list(model.parameters()), list(model.state_dict())

    _, losses, weights, names = trained(lambda model: None)
    torch._dynamo.utils.counters.clear()
    done, compiled_losses, compiled_weights, compiled_names = trained(lambda m: COPIED["compile_layers"](m))
    assert done == 3 and names == compiled_names
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # the try, and one for three layers
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(losses, compiled_losses, strict=True))
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(weights, compiled_weights, strict=True))


def test_a_deep_decoder_is_compiled_once():
    """Twelve layers, whose caches are numbered, and one graph that all of them run."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=12, n_head=2, n_positions=16))
    made, ran = [], []

    def backend(graph, _):
        made.append(graph)
        return lambda *arguments: (ran.append(1), graph(*arguments))[1]

    assert COPIED["compile_layers"](model, backend=backend) == 12
    made.clear()
    ran.clear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    texts = torch.ones(2, 8, dtype=torch.long)
    for _ in range(2):
        COPIED["train_step"](model, optimizer, {"input_ids": texts, "labels": texts})
    assert (len(made), len(ran)) == (1, 24)


def test_a_model_without_a_list_of_layers_is_not_called_compiled():
    model = BertModel(BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)).pooler
    model.config, model.device = BertConfig(), torch.device("cpu")
    assert not COPIED["compile_layers"](model, backend="eager")


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
    cell = next(cell for cell in LESSON.code if "def needs(" in source(cell))
    exec(source(cell).split("\n\n\n")[0], namespace)
    needs = namespace["needs"]
    assert needs("cpu") is None and "C++" in needs("cpu", compiler=False)
    assert "7.0" in needs("cuda", (6, 0)) and needs("cuda", (7, 5)) is None and needs("cuda", (7, 0), triton=False)
    assert "C compiler" in needs("cuda", (7, 5), compiler=False)


def test_nothing_stays_on_disk(monkeypatch):
    """The lesson's folder of compiled code is in force, whatever stood there before, and goes with its kernel."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    namespace = {}
    run(source(LESSON.tagged("setup")[0]), namespace)
    run(source(next(cell for cell in LESSON.code if "TemporaryDirectory()" in source(cell))), namespace)
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    place = namespace["folder"].name
    assert cache_dir() == place and os.path.exists(place)
    namespace.clear()
    assert not os.path.exists(place)
