import sys
from importlib.util import find_spec

import pytest
import torch
from stranger import Ratings, regressor
from torch.utils.data import DataLoader

from notebooks import copied, lesson, names, proof_fails, run, source, tags

LESSON = lesson("11")
COPIED = copied(LESSON)
build_optimizer, decay_groups = COPIED["build_optimizer"], COPIED["decay_groups"]
RATES = {"adamw": 1e-3, "adafactor": 1e-3, "adafactor_torch": 1e-2, "adagrad": 1e-2, "rmsprop": 1e-4, "sgd": 1e-2,
         "adamw_8bit": 1e-3, "lion": 1e-4, "lion_8bit": 1e-4, "ademamix": 1e-3}  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("parameter.ndim > 1 and", "parameter.ndim > 0 and"),
        (' and "bias" not in name', ""),
        ('"AdamW, fused": ("adamw", {})', '"AdamW, fused": ("adamw", {"betas": (0.9, 0.99)})'),
        ('"sgd": {"momentum": 0.9}', '"sgd": {}'),
    ],
    ids=["norms decay", "a bias that is a matrix decays", "another AdamW", "momentum lost"],
)
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


def namespace_with(*wanted):
    """What the lesson's cells define, of those that `wanted` needs."""
    uses, needed = set(wanted), []
    for cell in reversed(LESSON.code):
        defines, used = names(source(cell))
        if defines & uses or "setup" in tags(cell):
            needed.insert(0, cell)
            uses = (uses - defines) | used
    namespace = {}
    for cell in needed:
        run(source(cell), namespace)
    return namespace


def steps(model, optimizer, count=12):
    losses = []
    for batch in list(DataLoader(Ratings(8), batch_size=8)) * count:
        loss = model(**batch).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def held(optimizer):
    return sum(t.nbytes for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t))


@pytest.mark.parametrize("name", RATES)
def test_copied(name):
    """A regression of another family: every name trains it, with two groups that hold all that is trained."""
    if name in COPIED["BITSANDBYTES"]:
        pytest.importorskip("bitsandbytes")
    model = regressor(width=128).eval()
    frozen = model.distilbert.embeddings.position_embeddings.weight.requires_grad_(False)
    optimizer = build_optimizer(name, model, RATES[name], weight_decay=0.01)
    losses = steps(model, optimizer)
    assert losses[-1] < 0.9 * losses[0]
    handed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    trained = {parameter for parameter in model.parameters() if parameter is not frozen}
    assert len(handed) == len(trained) and set(handed) == trained
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    adamw = 8 * sum(parameter.numel() for parameter in trained)
    most = {"adafactor": 0.1, "adafactor_torch": 0.1, "adamw_8bit": 0.3, "lion_8bit": 0.15, "ademamix": 1.51}
    assert held(optimizer) <= most.get(name, 1.001) * adamw


def test_norms_and_biases_stay():
    """Without a gradient, decay alone moves: the matrices, and neither norms (named as BERT's are not) nor biases."""
    model = regressor()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer("adamw", model, 0.1, weight_decay=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        decayed = not torch.equal(before[name], parameter)
        assert decayed == (name.endswith("weight") and "norm" not in name.lower()), name


def test_another_name_is_refused():
    with pytest.raises(ValueError, match="name was 'adamw_hf'; accepted: adafactor, adamw, .*sgd"):
        build_optimizer("adamw_hf", regressor(), 1e-3)


def test_options_replace_defaults():
    model = regressor()
    assert build_optimizer("adafactor", model, 1e-3, beta1=0.9).defaults["beta1"] == 0.9
    assert build_optimizer("sgd", model, 1e-3, momentum=0.0).defaults["momentum"] == 0.0
    assert build_optimizer("adamw", model, 1e-3, fused=False).defaults["fused"] is False


def test_muon_continues_from_a_checkpoint():
    """Four steps in a row, or two, saved, loaded into a new pair, and two: the same weights, and its own rate."""
    muon = namespace_with("muon")["muon"]
    whole, parted = regressor().eval(), regressor().eval()
    steps(whole, muon(whole, 1e-3), 4)
    before = muon(parted, 1e-3)
    steps(parted, before, 2)
    after = muon(parted, 1e-3)
    after.load_state_dict(before.state_dict())
    steps(parted, after, 2)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), parted.parameters(), strict=True))
    still = [parameter.detach().clone() for parameter in parted.parameters()]
    for group in after.param_groups:
        group["lr"] = 0.0
    steps(parted, after, 1)
    assert all(torch.equal(a, b) for a, b in zip(still, parted.parameters(), strict=True))


def test_a_group_added_to_muon_is_trained():
    """With the settings and the rate of the last part, also after loading, which makes new groups."""
    model, added = regressor(), torch.nn.Parameter(torch.ones(4))
    optimizer = namespace_with("muon")["muon"](model, 1e-3)
    steps(model, optimizer, 1)
    optimizer.add_param_group({"params": [added], "weight_decay": 0.0})
    for lr, way in ((1e-3, 1e-3), (0.5, 0.501), (0.0, 0.501)):
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.param_groups[-1]["lr"] = lr
        added.grad = torch.ones(4)
        optimizer.step()
        torch.testing.assert_close(added.detach(), torch.full((4,), 1 - way), rtol=0.0, atol=1e-5)
    assert optimizer.state[added]["step"] == 3


def test_muon_names_what_a_model_lacks():
    muon, layers = namespace_with("muon")["muon"], [torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)]
    with pytest.raises(ValueError, match=r"Sequential has no trained matrix inside a torch\.nn\.ModuleList"):
        muon(torch.nn.Sequential(*layers), 1e-3)
    assert muon(torch.nn.Sequential(torch.nn.ModuleList(layers)), 1e-3).parts[0].param_groups[0]["params"]


def test_without_bitsandbytes_and_on_a_gpu(monkeypatch):
    """Imitated: no bitsandbytes. And the functions for a GPU, on the CPU with the tiny model."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    for place in ("trainer", "trainer_optimizer"):  # of older and of newer versions
        if find_spec(f"transformers.{place}"):
            asked = f"transformers.{place}.is_bitsandbytes_available"
            monkeypatch.setattr(asked, lambda: False, raising=False)
    space = namespace_with("tried", "times_of_2022", "times_on_ladder")
    assert space["bnb"] is None
    assert "`bitsandbytes`" in space["tried"]("adamw_bnb_8bit")["reason"]
    assert space["tried"]("sgd")["library"] == "torch"
    seconds = space["times_of_2022"](space["new_model"](), "Adafactor", "cpu", 2, 32)
    assert seconds.ratio("all four", to="plain") > 0 and seconds.ratio("Adafactor", to="plain") > 0
    assert space["times_on_ladder"](space["new_model"](), "cpu", 2).ratio("Adafactor", to="AdamW, for-loop") > 0

    whole, pieces = space["new_model"]().eval(), space["new_model"]().eval()
    batch = space["batches_of"](4, length=32)[0]
    parts = [{name: value[i : i + 1] for name, value in batch.items()} for i in range(4)]
    space["training_step"](whole, space["make"]("SGD", whole, 1.0), batch)()
    space["accumulated"](pieces, space["make"]("SGD", pieces, 1.0), parts, "cpu", False)()
    for a, b in zip(whole.parameters(), pieces.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert not torch.equal(whole.classifier.weight, space["new_model"]().classifier.weight)
