import inspect
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import strangers
import torch
from stranger import Ratings, regressor
from strangers import same_weights
from torch.utils.data import DataLoader

from notebooks import answer_to_exercise, copied, lesson, names, proof_fails, run, source, tags
from tutorial_utils import packages

LESSON = lesson("11")
COPIED = copied(LESSON)
build_optimizer, decay_groups = COPIED["build_optimizer"], COPIED["decay_groups"]
RATES = {"adamw": 1e-3, "adafactor": 1e-3, "sgd": 1e-2, "adafactor, torch": 1e-2, "adafactor, moment": 1e-3,
         "adagrad": 1e-2, "rmsprop": 1e-4, "sgd, plain": 5e-2, "adamw, foreach": 1e-3, "adamw, for-loop": 1e-3,
         "adamw, 8 bit": 1e-3, "lion": 1e-4, "lion, 8 bit": 1e-4, "ademamix": 1e-3}  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('{"fused": True}', '{"fused": True, "eps": 1e-6}'),
        ('{"foreach": True}', '{"foreach": True, "betas": (0.9, 0.99)}'),
    ],
    ids=["another AdamW", "another foreach"],
)
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


def cell(name):
    return next(cell for cell in LESSON.code if cell["id"] == name)


def sources_for(name):
    """The sources of the cell of that id, and before it of those that define what it uses, and what they use."""
    *before, last = LESSON.code[: LESSON.code.index(cell(name)) + 1]
    needed, (_, uses) = [source(last)], names(source(last))
    for one in reversed(before):
        defines, used = names(source(one))
        if defines & uses or "setup" in tags(one):
            needed.insert(0, source(one))
            uses = (uses - defines) | used
    return needed


def namespace_with(*cells):
    """What those cells define, and the cells that they need."""
    namespace, ran = {}, set()
    for name in cells:
        for code in sources_for(name):
            if code not in ran:
                run(code, namespace)
                ran.add(code)
    return namespace


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("pitfall-names", "parameter.ndim > 1 and", "parameter.ndim > 0 and"),
        ("pitfall-class", ' and "bias" not in name else', " else"),
        ("states", '{"momentum": 0.9}', "{}"),
        ("states", "4 * means + 4", "4 * means"),
    ],
    ids=["norms decay", "a bias that is a matrix decays", "momentum lost", "a wrong formula"],
)
def test_the_evidence_can_fail(name, old, new):
    *before, last = sources_for(name)
    assert any(old in code for code in before), old
    namespace = {}
    for code in before:
        run(code.replace(old, new), namespace)
    with pytest.raises(AssertionError):
        run(last, namespace)


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


@pytest.fixture(scope="module")
def more():
    """The copied cell, and what the lesson adds to it."""
    return namespace_with("more-ways", "muon")


@pytest.mark.parametrize("name", RATES)
def test_copied(name, more):
    """A regression of another family: every name trains it, with two groups that hold all that is trained."""
    build = build_optimizer
    if name not in COPIED["KINDS"]:
        build = more["build_optimizer"]
        if name not in more["KINDS"]:
            pytest.importorskip("bitsandbytes")
    model = regressor(width=128).eval()
    frozen = model.distilbert.embeddings.position_embeddings.weight.requires_grad_(False)
    optimizer = build(name, decay_groups(model, 0.01), lr=RATES[name])
    losses = steps(model, optimizer)
    assert losses[-1] < 0.9 * losses[0]
    handed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    trained = {parameter for parameter in model.parameters() if parameter is not frozen}
    assert len(handed) == len(trained) and set(handed) == trained
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    adamw = 8 * sum(parameter.numel() for parameter in trained)
    most = {"adafactor": 0.1, "adafactor, torch": 0.1, "adafactor, moment": 0.6, "adamw, 8 bit": 0.3, "sgd": 0.5,
            "lion, 8 bit": 0.15, "ademamix": 1.51}  # fmt: skip
    assert held(optimizer) <= most.get(name, 1.001) * adamw


def test_norms_and_biases_stay():
    """Without a gradient, decay alone moves: the matrices, and neither norms (named as BERT's are not) nor biases."""
    model = regressor()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer("adamw", decay_groups(model, 0.5), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        decayed = not torch.equal(before[name], parameter)
        assert decayed == (name.endswith("weight") and "norm" not in name.lower()), name


def test_a_rate_for_each_part():
    model = regressor()
    groups = [*decay_groups(model.distilbert, lr=2e-5), *decay_groups(model.classifier, 0.1, lr=1e-3)]
    for name in ("adamw", "adafactor", "sgd"):
        optimizer = build_optimizer(name, [dict(group) for group in groups])
        assert [group["lr"] for group in optimizer.param_groups] == [2e-5, 2e-5, 1e-3, 1e-3]
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0, 0.1, 0.0]


def test_another_name_is_refused():
    with pytest.raises(ValueError, match="name was 'adamw_hf'; accepted: adamw, adafactor, sgd"):
        build_optimizer("adamw_hf", regressor().parameters())


def test_options_replace_defaults():
    parameters = list(regressor().parameters())
    assert build_optimizer("adafactor", parameters, lr=1e-3, beta1=0.9).defaults["beta1"] == 0.9
    assert build_optimizer("sgd", parameters, lr=1e-3, momentum=0.0).defaults["momentum"] == 0.0
    assert build_optimizer("adamw", parameters, lr=1e-3, fused=False).defaults["fused"] is False


@pytest.fixture(scope="module")
def muon():
    """Its cell alone, as it is copied."""
    namespace = {}
    run(source(cell("muon")), namespace)
    return lambda model, lr, groups=None: namespace["muon"](model, groups or decay_groups(model), lr=lr)


def test_muon_keeps_groups(muon):
    """Rates and decay of each part; hidden matrices to Muon, all else to AdamW, frozen ones to none."""
    model = regressor()
    model.distilbert.embeddings.requires_grad_(False)
    groups = [*decay_groups(model.distilbert, 0.1, lr=2e-5), *decay_groups(model.classifier, lr=1e-3)]
    optimizer = muon(model, 1e-4, groups)
    handed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    trained = {parameter for group in groups for parameter in group["params"]}
    assert len(handed) == len(trained) and set(handed) == trained
    of_muon = {parameter for group in optimizer.parts[0].param_groups for parameter in group["params"]}
    assert of_muon == {parameter for parameter in model.distilbert.transformer.parameters() if parameter.ndim == 2}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            own = next(one for one in groups if any(parameter is p for p in one["params"]))
            assert (group["lr"], group["weight_decay"]) == (own["lr"], own["weight_decay"])


def test_muon_takes_a_closure(muon):
    one, other, batch = regressor().eval(), regressor().eval(), next(iter(DataLoader(Ratings(8), batch_size=8)))
    plain, closed = muon(one, 1e-3), muon(other, 1e-3)
    loss = one(**batch).loss
    loss.backward()
    plain.step()

    def closure():
        closed.zero_grad()
        found = other(**batch).loss
        found.backward()
        return found

    assert closed.step(closure).item() == loss.item()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_muon_continues_from_a_checkpoint(muon):
    """Four steps in a row, or two, saved, loaded into a new pair, and two: the same weights, and its own rate."""
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


def test_a_group_added_to_muon_is_trained(muon):
    """With the settings and the rate of the last part, also after loading, which makes new groups."""
    model, added = regressor(), torch.nn.Parameter(torch.ones(4))
    optimizer = muon(model, 1e-3)
    steps(model, optimizer, 1)
    optimizer.add_param_group({"params": [added], "weight_decay": 0.0})
    for lr, way in ((1e-3, 1e-3), (0.5, 0.501), (0.0, 0.501)):
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.param_groups[-1]["lr"] = lr
        added.grad = torch.ones(4)
        optimizer.step()
        torch.testing.assert_close(added.detach(), torch.full((4,), 1 - way), rtol=0.0, atol=1e-5)
    assert optimizer.state[added]["step"] == 3


def test_muon_names_what_a_model_lacks(muon):
    layers = [torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)]
    with pytest.raises(ValueError, match=r"Sequential has no trained matrix inside a torch\.nn\.ModuleList"):
        muon(torch.nn.Sequential(*layers), 1e-3)
    assert muon(torch.nn.Sequential(torch.nn.ModuleList(layers)), 1e-3).parts[0].param_groups[0]["params"]


def test_without_bitsandbytes_and_on_a_gpu(monkeypatch):
    """Imitated: no bitsandbytes. And the functions for a GPU, on the CPU with the tiny model."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setattr(packages, "left_out", {})
    for place in ("trainer", "trainer_optimizer"):  # of older and of newer versions
        if find_spec(f"transformers.{place}"):
            asked = f"transformers.{place}.is_bitsandbytes_available"
            monkeypatch.setattr(asked, lambda: False, raising=False)
    space = namespace_with("tried", "times-on-a-gpu")
    assert not space["has_bnb"] and "adamw, 8 bit" not in space["KINDS"]
    assert "`bitsandbytes`" in space["tried"]("adamw_bnb_8bit")["reason"]
    assert space["tried"]("sgd")["library"] == "torch"
    seconds = space["times_of_2022"](space["fresh"](), "adafactor", space["device"], 2, 32)
    assert seconds.ratio("all four", to="plain") > 0 and seconds.ratio("adafactor", to="plain") > 0
    assert space["times_on_ladder"](space["fresh"](), space["device"], 2).ratio("adafactor", to="adamw, for-loop") > 0

    whole, pieces = space["fresh"]().eval(), space["fresh"]().eval()
    batch = space["batches"](4)[0].to(space["device"])
    parts = [{name: value[i : i + 1] for name, value in batch.items()} for i in range(4)]
    one, other = (space["build_optimizer"]("sgd", model.parameters(), lr=1.0) for model in (whole, pieces))
    space["train"](whole, one, [batch])
    space["accumulated"](pieces, other, parts, space["device"], False)()
    for a, b in zip(whole.parameters(), pieces.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert not torch.equal(whole.classifier.weight, space["fresh"]().classifier.weight)


CAUGHT = """
made = []

def caught(optimizer):
    made.append(optimizer)
    return optimizer
"""


def scripts(name, was, *now):
    """The script as it is and with the copied cell; each keeps the optimizers that it makes in `made`."""
    plain = strangers.load(name, CAUGHT, {was: f"caught({was})"})
    return [plain, *(strangers.load(name, LESSON.source("copy") + CAUGHT, {was: f"caught({one})"}) for one in now)]


def test_the_exercise_refuses_a_last_division_that_is_left_out_or_always_made():
    namespace = namespace_with("check-exercise")
    source_of = source(next(cell for cell in LESSON.code if "solution" in tags(cell)))
    for wrong in ("", " / step.square().mean().sqrt()"):
        answer = source_of.replace(" / step.square().mean().sqrt().clamp(min=1.0)", wrong)
        assert answer != source_of
        assert "not yet: the library's first row is" in run(answer, namespace), wrong


def test_in_a_strangers_classifier(stranger_files, capsys):
    """adamw trains to the same place; Adafactor keeps hardly any state, and its rate trains as well."""
    files = dict(train=stranger_files / "train.csv", valid=stranger_files / "valid.csv")
    arguments = SimpleNamespace(model=stranger_files / "bert", **files, epochs=1, batch_size=32)
    plain, same, small = scripts(
        "classifier",
        "torch.optim.AdamW(model.parameters(), lr=5e-4)",
        'build_optimizer("adamw", model.parameters(), lr=5e-4)',
        'build_optimizer("adafactor", decay_groups(model), lr=5e-4)',
    )
    before, after, other = (script.main(arguments) for script in (plain, same, small))
    one, two, three = capsys.readouterr().out.splitlines()
    assert one == two and three.startswith("epoch 0: accuracy ")
    torch.manual_seed(42)
    start = plain.AutoModelForSequenceClassification.from_pretrained(stranger_files / "bert", num_labels=4)
    assert same_weights(before, after, start) and not same_weights(before, other, start)
    assert held(same.made[0]) == held(plain.made[0]) > 10 * held(small.made[0])
    frame = plain.pd.read_csv(files["train"])
    loader = plain.make_loader(frame, plain.AutoTokenizer.from_pretrained(stranger_files / "bert"), 64, False)
    with torch.no_grad():
        losses = [sum(model.eval()(**batch).loss.item() for batch in loader) for model in (start, before, other)]
    assert max(losses[1:]) < losses[0]


@pytest.mark.parametrize("apex", [False, True], ids=["fp32", "autocast and a scaler"])
def test_in_a_strangers_competition_script(stranger_files, monkeypatch, apex):
    """Groups with rates and decay of their own, a schedule, clipping, a scaler; predictions in the rows' order."""
    monkeypatch.setenv("DATA", str(stranger_files / "scores"))
    monkeypatch.setenv("MODEL", str(stranger_files / "bert"))
    plain, same, small = scripts(
        "competition",
        "torch.optim.AdamW(get_optimizer_params(model), eps=1e-6, betas=(0.9, 0.999))",
        'build_optimizer("adamw", get_optimizer_params(model), eps=1e-6, betas=(0.9, 0.999))',
        'build_optimizer("adafactor", get_optimizer_params(model))',
    )
    for script in (plain, same, small):
        script.CFG.apex = apex
    (before, submission), (after, submitted), (_, other) = (script.main() for script in (plain, same, small))
    for key in ("initial_lr", "lr", "weight_decay"):
        of_plain, of_same, of_small = ([g[key] for g in s.made[0].param_groups] for s in (plain, same, small))
        assert of_same == of_plain == of_small
    assert held(same.made[0]) == held(plain.made[0]) > 10 * held(small.made[0])
    torch.manual_seed(42)
    if not apex:  # which rounds to bf16
        assert same_weights(before, after, plain.CustomModel())
    for one in (submitted, other):
        assert (submission.id == one.id).all() and one.notna().all(axis=None)
    distance = (submission - submitted).abs().max().max()
    assert distance <= (0.05 if apex else 1e-3), f"predictions are {distance} apart"
    assert 1e-3 < (submission - other).abs().max().max() < 1.0, "another method, not another task"


def test_in_a_strangers_decoder(stranger_files, capsys):
    plain, same, small = scripts(
        "decoder",
        "torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)",
        'build_optimizer("adamw", model.parameters(), lr=LR, weight_decay=0.1)',
        'build_optimizer("adafactor", decay_groups(model, 0.1), lr=LR)',
    )
    files = [stranger_files / name for name in ("llama", "bert", "train.jsonl", "valid.jsonl")]
    before, after, _ = (script.main(*files) for script in (plain, same, small))
    found = strangers.perplexities(capsys)
    assert found[1] == pytest.approx(found[0], rel=1e-3) and found[2] < 8192, "better than a guess among all tokens"
    start = plain.AutoModelForCausalLM.from_pretrained(stranger_files / "llama")
    assert same_weights(before, after, start)
    assert held(same.made[0]) == held(plain.made[0]) > 10 * held(small.made[0])


def test_the_copied_cell_asks_for_no_model():
    """Groups are all that it takes: any module, any parameters."""
    assert list(inspect.signature(build_optimizer).parameters) == ["name", "groups", "options"]
    weight = torch.nn.Parameter(torch.ones(3, 3))
    weight.grad = torch.ones(3, 3)
    for name in COPIED["KINDS"]:
        build_optimizer(name, [weight], lr=0.1).step()
    assert weight.max() < 1


def test_the_exercise_refuses_a_row_of_zeros_divided_by_zero():
    assert answer_to_exercise(LESSON, (" + 1e-30", "")).startswith("not yet")
