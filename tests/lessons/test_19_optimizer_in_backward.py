import copy
import gc
import weakref
from types import SimpleNamespace

import pytest
import strangers
import torch
from stranger import Ratings, regressor
from torch.utils.data import DataLoader

from notebooks import answer_to_exercise, copied, lesson, proof_fails, run, source
from tutorial_utils import bounds, measure, models

LESSON = lesson("19")
COPIED = copied(LESSON)
FP16 = source(next(cell for cell in LESSON.cells if cell["id"] == "fp16"))
run(FP16, COPIED)
step_in_backward, find_scale, unscale_in_backward = (
    COPIED[name] for name in ("step_in_backward", "find_scale", "unscale_in_backward")
)
INFINITE = float("inf")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("dict(optimizer.param_groups[n], params=[p])", "dict(optimizer.param_groups[0], params=[p])"),
        ("clip_grad_norm_(p, max_norm)\n        groups", "clip_grad_norm_(p, 1e9)\n        groups"),
        ("optimizer.param_groups, p.grad = groups, None", "optimizer.param_groups = groups"),
        ("if p.requires_grad]\n", "if p.ndim > 1]\n"),
    ],
    ids=["the first group's rate and decay for all", "no clipping", "gradients wait", "not all have hooks"],
)
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


def vector(model):
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def loss_of(model, batch):
    return torch.nn.functional.mse_loss(model(input_ids=batch["input_ids"]).logits.squeeze(-1), batch["labels"])


def batches(size, count):
    return list(DataLoader(Ratings(size * count), batch_size=size))


def groups_of(model):
    big, flat = ([p for p in model.parameters() if (p.ndim > 1) == matrix] for matrix in (True, False))
    return [{"params": big, "weight_decay": 0.1, "lr": 3e-3}, {"params": flat}]


OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "foreach": lambda groups, lr: torch.optim.AdamW(groups, lr=lr, foreach=True),
    "fused": lambda groups, lr: torch.optim.AdamW(groups, lr=lr, fused=True),
    "amsgrad": lambda groups, lr: torch.optim.Adam(groups, lr=lr, amsgrad=True),
    "SGD": lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9),
    "Adafactor": torch.optim.Adafactor,
    "RMSprop": torch.optim.RMSprop,
}


def train(model, optimizer, data, schedule=None, max_norm=INFINITE):
    for number, batch in enumerate(data):
        torch.manual_seed(number)
        loss_of(model.train(), batch).backward()
        for p in model.parameters():
            torch.nn.utils.clip_grad_norm_(p, max_norm)
        optimizer.step()
        optimizer.zero_grad()
        if schedule:
            schedule.step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_copied(kind, recwarn):
    """Another architecture, a regression, several optimizers: the same weights to the bit, and no gradient is left."""
    ends = []
    for hooked in (False, True):
        model = regressor()
        optimizer = OPTIMIZERS[kind](groups_of(model), lr=1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
        if hooked:
            hooks = step_in_backward(optimizer, max_norm=0.1)
            assert len(hooks) == len(list(model.parameters()))
            loss_of(model, batches(4, 1)[0]).backward()
            assert all(p.grad is None for p in model.parameters())
            model.load_state_dict(regressor().state_dict())
            optimizer.state.clear()
        train(model, optimizer, batches(4, 4), schedule, max_norm=0.1)
        ends.append(vector(model))
    assert torch.equal(*ends) and not torch.equal(ends[0], vector(regressor()))
    assert not [warning for warning in recwarn if "lr_scheduler.step" in str(warning.message)]


def test_without_max_norm_nothing_is_clipped():
    ends = []
    for hooked in (False, True):
        model = regressor()
        optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
        if hooked:
            step_in_backward(optimizer)
        train(model, optimizer, batches(4, 1))
        ends.append(vector(model))
    assert torch.equal(*ends)


def test_memory():
    """The gradients are gone, but for one at a time; and the copy that foreach makes for all parameters at once."""
    batch = batches(1, 1)[0]

    def peak(hooked, **options):
        model = regressor(layers=6, width=256)
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        if hooked:
            step_in_backward(optimizer)

        def step():
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        return measure.memory(step, model, optimizer, batch).peak, sum(p.nbytes for p in model.parameters())

    (fused, weights), (in_backward, _) = peak(False, fused=True), peak(True, fused=True)
    assert in_backward < fused - 0.7 * weights
    (foreach, _), (in_backward, _) = peak(False, foreach=True), peak(True, foreach=True)
    assert in_backward < foreach - 1.6 * weights


def test_the_model_is_freed():
    """At once by its references, with a scheduler: a k-fold loop has one model at a time."""
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(layer.parameters())
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    step_in_backward(optimizer)
    layer(torch.ones(1, 4)).sum().backward()
    schedule.step()
    left = [weakref.ref(layer.weight), weakref.ref(optimizer)]
    del layer, optimizer, schedule
    gc.collect()
    assert [reference() for reference in left] == [None, None]


def test_an_error_in_the_step_leaves_the_groups_whole():
    """Out of memory, or a Ctrl-C: the optimizer has its groups, and the next step is right."""
    model = regressor()
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-3)
    step_in_backward(optimizer)
    groups, calls = optimizer.param_groups, []

    def interrupted(*_):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    handle = optimizer.register_step_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        loss_of(model, batches(4, 1)[0]).backward()
    handle.remove()
    assert optimizer.param_groups is groups and [len(g["params"]) for g in groups] == [
        len(g["params"]) for g in groups_of(model)
    ]
    optimizer.zero_grad()
    loss_of(model, batches(4, 1)[0]).backward()
    assert all(p.grad is None for p in model.parameters())


def test_called_twice_steps_once():
    ends = []
    for times in (1, 2):
        model = regressor().eval()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(times):
            step_in_backward(optimizer)
        loss_of(model, batches(4, 1)[0]).backward()
        assert {int(state["step"]) for state in optimizer.state.values()} == {1}
        ends.append(vector(model))
    assert torch.equal(*ends)


def test_a_second_optimizer_is_not_taken_for_the_first():
    """Where the first is gone, its hooks say so, and come off; nothing is trained silently by neither."""
    model = regressor().eval()
    hooks = step_in_backward(torch.optim.AdamW(model.parameters()))
    gc.collect()
    second = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step_in_backward(second)
    with pytest.raises(ReferenceError):
        loss_of(model, batches(4, 1)[0]).backward()
    for hook in hooks:
        hook.remove()
    loss_of(model, batches(4, 1)[0]).backward()
    assert len(second.state) == len(list(model.parameters()))


class CountsInTheGroup(torch.optim.SGD):
    """Momentum with a correction by the steps, which are counted in the group, as optimizers of others do."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                    p.sub_(mean / (1 - 0.9 ** group["count"]), alpha=group["lr"])


def test_steps_that_are_counted_in_a_group_need_the_loops_own_step():
    """Why the page says that optimizer.step() stays."""
    ends = {}
    for way in ("plain", "hooks", "hooks, no step"):
        model = regressor().eval()
        optimizer = CountsInTheGroup(groups_of(model), lr=1e-3)
        if way != "plain":
            step_in_backward(optimizer)
        for batch in batches(4, 3):
            loss_of(model, batch).backward()
            if way != "hooks, no step":
                optimizer.step()
                optimizer.zero_grad()
        ends[way] = vector(model)
    assert torch.equal(ends["plain"], ends["hooks"]) and not torch.equal(ends["plain"], ends["hooks, no step"])


def test_exceptions_of_bitsandbytes_are_lost():
    """Why the page says so: an embedding that lesson 04 keeps in 32 bits is not."""
    pytest.importorskip("bitsandbytes")
    adamw_8bit, kinds = copied(lesson("04"))["adamw_8bit"], []
    for hooked in (False, True):
        model = regressor(width=128).eval()
        optimizer = adamw_8bit(model, [{"params": [*model.parameters()]}], lr=1e-3)
        if hooked:
            step_in_backward(optimizer)
        train(model, optimizer, batches(4, 1))
        kinds.append(optimizer.state[model.get_input_embeddings().weight]["state1"].dtype)
    assert kinds == [torch.float32, torch.uint8]


def test_hooks_come_off_again():
    model = regressor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for hook in step_in_backward(optimizer):
        hook.remove()
    loss_of(model, batches(4, 1)[0]).backward()
    assert all(p.grad is not None for p in model.parameters()) and not optimizer.state


@pytest.mark.parametrize(
    ("name", "least", "most"), [("bert-large-uncased", 0.08, 0.12), ("deberta-v3-large", 0.28, 0.33)]
)
def test_the_embeddings_share_is_what_the_page_says(name, least, most):
    with torch.device("meta"):
        model = models.untrained(models.config(name))
    share = model.get_input_embeddings().weight.numel() / sum(p.numel() for p in model.parameters())
    assert least < share < most, "a tenth, nearly a third"


def test_frozen_parameters_stay():
    model = regressor().eval()
    model.distilbert.embeddings.requires_grad_(False)
    before = vector(model.distilbert.embeddings)
    step_in_backward(torch_optimizer := torch.optim.AdamW(model.parameters(), lr=1e-3))
    loss_of(model, batches(4, 1)[0]).backward()
    assert torch.equal(before, vector(model.distilbert.embeddings))
    assert len(torch_optimizer.state) == sum(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("kind", ["linear", "plateau"])
def test_schedulers_set_the_rate_of_each_group(kind):
    from transformers import get_linear_schedule_with_warmup

    model = regressor().eval()
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-3, weight_decay=0.0)
    step_in_backward(optimizer)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.0, patience=0, eps=0.0)
    schedule = get_linear_schedule_with_warmup(optimizer, 0, 1) if kind == "linear" else plateau
    loss_of(model, batches(4, 1)[0]).backward()
    for loss in (1.0, 2.0, 3.0):
        schedule.step(*[loss] * (kind == "plateau"))
    before = vector(model)
    loss_of(model, batches(4, 1)[0]).backward()
    assert torch.equal(before, vector(model))


def test_state_loaded_after_the_hooks_counts():
    """Loading replaces the groups by new ones, with the saved rates."""
    model = regressor().eval()
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-3)
    step_in_backward(optimizer)
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group |= {"lr": 0.0, "weight_decay": 0.0}
    optimizer.load_state_dict(state)
    before = vector(model)
    loss_of(model, batches(4, 1)[0]).backward()
    assert torch.equal(before, vector(model))


def test_eight_bit_states():
    """bitsandbytes' optimizer under the same hooks."""
    AdamW8bit = pytest.importorskip("bitsandbytes").optim.AdamW8bit
    ends = []
    for hooked in (False, True):
        model = regressor(width=128).eval()
        optimizer = AdamW8bit(model.parameters(), lr=1e-3)
        if hooked:
            step_in_backward(optimizer)
        train(model, optimizer, batches(4, 3))
        ends.append(vector(model))
    assert torch.equal(*ends)


def half_weight():
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    return weight, torch.optim.SGD([weight], lr=1.0)


def test_the_scale_is_the_largest_without_an_overflow():
    weight, optimizer = half_weight()

    def loss_of_it(model, factor):
        return (weight.float() * factor).sum()

    # A gradient of 8 overflows in fp16 at a scale of 2^13: 65504 is less than 2^16.
    assert find_scale(None, optimizer, 8.0, loss_of_it) == 2.0**12 / 4
    assert weight.grad is None and torch.equal(weight, torch.ones(2, dtype=torch.float16))
    with pytest.raises(ValueError, match="not finite at a scale of 1"):
        find_scale(None, optimizer, float("nan"), loss_of_it)
    loss_of_it(None, 1.0).backward()
    assert weight.grad is not None, "its hooks are gone"


def test_what_overflows_is_counted():
    weight, optimizer = half_weight()
    hooks, lost = unscale_in_backward(optimizer, 4.0)
    hooks += step_in_backward(optimizer)
    for factor, total in ((4.0, 0), (1e6, 2), (float("nan"), 4)):
        (weight.float() * factor).sum().backward()
        assert lost == total
    for hook in hooks:
        hook.remove()
    weight.float().sum().backward()
    assert weight.grad is not None


class Scores(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, inputs):
        return self.inner(**inputs).logits.squeeze(-1)


@pytest.mark.parametrize("all_off", [True, False], ids=["as the page says", "unscaling left on"])
def test_to_begin_again_in_fp16_unscaling_comes_off_too(all_off):
    lines = LESSON.fenced("unscale_in_backward").replace('"cuda"', '"cpu"').replace("torch.float16", "torch.bfloat16")
    model, ends = Scores(regressor()), []
    start, texts = copy.deepcopy(model.state_dict()), batches(4, 1)[0]
    batch = {"input_ids": texts["input_ids"]}, texts["labels"]
    for _ in range(2):
        model.load_state_dict(start)
        made = COPIED | {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
        made |= {"loader": [batch], "criterion": torch.nn.functional.mse_loss}
        torch.manual_seed(0)
        run(lines, made)
        torch.manual_seed(0)
        (made["loss_of"](model, batch) * made["scale"]).backward()
        ends.append(vector(model))
        for hook in made["hooks"] + (made["unscaling"] if all_off else []):
            hook.remove()
    assert torch.equal(*ends) == all_off


def test_a_criterion_with_weights_is_unscaled_too():
    ends = []
    for scale in (1.0, 64.0):
        model, criterion = regressor().eval(), torch.nn.Linear(1, 1)
        torch.nn.init.ones_(criterion.weight)
        torch.nn.init.zeros_(criterion.bias)
        optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
        unscale_in_backward(optimizer, scale)
        step_in_backward(optimizer)
        for batch in batches(4, 2):
            output = criterion(model(input_ids=batch["input_ids"]).logits)
            (torch.nn.functional.mse_loss(output.squeeze(-1), batch["labels"]) * scale).backward()
        ends.append(vector(torch.nn.ModuleList([model, criterion])))
    assert torch.equal(*ends)


def same(one, other, start):
    way = (vector(one) - vector(start)).norm()
    return way > 0 and (vector(one) - vector(other)).norm() <= 1e-3 * way


def no_gradients(model):
    return all(p.grad is None for p in model.parameters())


def test_in_a_strangers_classifier(stranger_files, capsys):
    """One line more: the same weights to the bit, in less memory."""
    line = "    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)\n"
    files = dict(train=stranger_files / "train.csv", valid=stranger_files / "valid.csv")
    arguments = SimpleNamespace(model=stranger_files / "bert", **files, epochs=1, batch_size=32)
    plain = strangers.load("classifier")
    changed = strangers.load("classifier", LESSON.source("copy"), {line: line + "    step_in_backward(optimizer)\n"})
    before, after = plain.main(arguments), changed.main(arguments)
    one, other = capsys.readouterr().out.splitlines()
    assert one == other and torch.equal(vector(before), vector(after)) and no_gradients(after)

    tokenizer = plain.AutoTokenizer.from_pretrained(stranger_files / "bert")
    rows = plain.pd.read_csv(files["train"]).iloc[:1].assign(text="a short text")
    loader = list(plain.make_loader(rows, tokenizer, 1, False))

    def peak(script, model, hooked):
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        if hooked:
            script.step_in_backward(optimizer)
        step = lambda: script.train_one_epoch(model, loader, optimizer, schedule)  # noqa: E731
        return measure.memory(step, model, optimizer).peak

    weights = [p.nbytes for p in before.parameters()]
    ordinary = peak(plain, before, False)
    assert peak(changed, before, True) < ordinary - 0.9 * (sum(weights) - max(weights))


OPTIMIZER = "    optimizer = torch.optim.AdamW(get_optimizer_params(model), eps=1e-6, betas=(0.9, 0.999))\n"
CLIP = "        torch.nn.utils.clip_grad_norm_(model.parameters(), CFG.max_grad_norm)\n"
BY_PARAMETER = (
    "        for p in model.parameters():\n            torch.nn.utils.clip_grad_norm_(p, CFG.max_grad_norm)\n"
)
SCALER = (
    "        scaler.scale(loss).backward()\n        scaler.unscale_(optimizer)\n"
    + CLIP
    + "        scaler.step(optimizer)\n        scaler.update()\n        optimizer.zero_grad()\n"
)
IN_BACKWARD = "    step_in_backward(optimizer, max_norm=CFG.max_grad_norm)\n"


@pytest.mark.parametrize("apex", [False, True], ids=["fp32", "autocast in bf16"])
def test_in_a_strangers_competition_script(stranger_files, monkeypatch, apex):
    """Three groups, a cosine, validation, a submission: as the script with clipping by parameter."""
    bf16 = {"torch.autocast(CFG.device, ": "torch.autocast(CFG.device, torch.bfloat16, "}
    plain = strangers.competition(stranger_files, monkeypatch, "", {CLIP: BY_PARAMETER, **bf16})
    edits = {OPTIMIZER: OPTIMIZER + IN_BACKWARD, SCALER: "        loss.backward()\n", **bf16}
    changed = strangers.competition(stranger_files, monkeypatch, LESSON.source("copy"), edits)
    plain.CFG.apex = changed.CFG.apex = apex
    plain.CFG.max_grad_norm = changed.CFG.max_grad_norm = 0.05
    (before, submission), (after, submitted) = plain.main(), changed.main()
    torch.manual_seed(42)
    assert same(before, after, plain.CustomModel()) and no_gradients(after)
    assert apex or torch.equal(vector(before), vector(after))
    assert (submission.id == submitted.id).all() and (submission - submitted).abs().max().max() <= 1e-3


def test_in_a_strangers_competition_script_in_fp16(stranger_files, monkeypatch):
    """As on a T4: the scaler goes, a fixed scale comes. Both scripts see the same scale, and end the same."""
    half = {"torch.autocast(CFG.device, enabled=CFG.apex)": "torch.autocast(CFG.device, torch.float16)",
            "max_len = 64": "max_len = 24"}  # fp16 is slow on a CPU  # fmt: skip
    mine = """
def loss_of(model, batch):
    inputs, labels = batch
    with torch.autocast(CFG.device, torch.float16):
        return nn.SmoothL1Loss()(model({k: v.to(CFG.device) for k, v in inputs.items()}), labels.to(CFG.device))

SCALES = []
"""
    made = (
        OPTIMIZER
        + "    model.train()\n    SCALES.append(find_scale(model, optimizer, next(iter(train_loader)), loss_of))\n"
        "    unscale_in_backward(optimizer, SCALES[0])\n" + IN_BACKWARD
    )
    edits = {**half, OPTIMIZER: made, SCALER: "        (loss * SCALES[0]).backward()\n"}
    changed = strangers.competition(stranger_files, monkeypatch, LESSON.source("copy") + "\n\n" + FP16 + mine, edits)
    after, _ = changed.main()
    assert changed.SCALES[0] >= 2.0 and no_gradients(after)
    assert all(p.isfinite().all() for p in after.parameters())

    first = "    model.train()\n    next(iter(train_loader))\n"  # draws the same numbers for shuffling
    scaler = "GradScaler(CFG.device, enabled=CFG.apex)"
    fixed = f"GradScaler(CFG.device, init_scale={changed.SCALES[0]}, growth_interval=10**6)"
    plain = strangers.competition(
        stranger_files, monkeypatch, "", {**half, CLIP: BY_PARAMETER, OPTIMIZER: OPTIMIZER + first, scaler: fixed}
    )
    before, _ = plain.main()
    torch.manual_seed(42)
    assert same(before, after, plain.CustomModel())


def test_in_a_strangers_decoder(stranger_files, capsys):
    line = "    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)\n"
    clip = "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
    by_parameter = f"        for p in model.parameters():\n    {clip.replace('model.parameters()', 'p')}"
    plain = strangers.load("decoder", "", {clip: by_parameter})
    changed = strangers.load(
        "decoder", LESSON.source("copy"), {line: line + "    step_in_backward(optimizer, max_norm=1.0)\n"}
    )
    files = [stranger_files / name for name in ("llama", "bert", "train.jsonl", "valid.jsonl")]
    before = plain.main(*files)
    printed = strangers.perplexities(capsys)
    after = changed.main(*files)
    assert torch.equal(vector(before), vector(after)) and no_gradients(after)
    assert strangers.perplexities(capsys) == pytest.approx(printed, rel=1e-4)


def rounding():
    namespace = {"torch": torch, "partial": __import__("functools").partial, **COPIED}
    run(source(next(cell for cell in LESSON.cells if cell["id"] == "rounding")), namespace)
    return namespace


def test_rounding_at_random_is_unbiased_and_keeps_what_fits():
    at_random = rounding()["round_at_random"]
    exact = torch.randn(1000).bfloat16()
    assert torch.equal(at_random(exact.float()), exact)
    weight = torch.nn.Parameter(torch.full((2000,), 0.05).bfloat16())
    optimizer = torch.optim.SGD([weight], lr=2e-5)
    rounding()["step_in_16_bits"](optimizer)
    for _ in range(200):
        weight.float().sum().neg().backward()
    assert weight.dtype == torch.bfloat16 and weight.grad is None
    assert weight.float().mean().item() - 0.05 == pytest.approx(200 * 2e-5, rel=0.05)


@pytest.mark.parametrize(
    ("old", "new"),
    [("torch.rand_like(values) <", "0.5 <"), ("torch.rand_like(values) <", "torch.rand_like(values) / 2 <")],
    ids=["to the nearest", "up too often"],
)
def test_the_mean_of_the_roundings_can_fail(old, new):
    cells = {cell["id"]: source(cell) for cell in LESSON.code}
    namespace = {"torch": torch, "partial": None, "device": "cpu", **COPIED}
    assert cells["rounding"].count(old) == 1
    run(cells["rounding"].replace(old, new), namespace)
    with pytest.raises(AssertionError):
        run(cells["unbiased"], namespace)


@pytest.mark.parametrize(
    ("figure", "value"), [("vit_l_gb", 5.0), ("vit_l_in_backward_gb", 4.9), ("vit_l_memory_ratio", 0.8)]
)
def test_claims_can_fail(figure, value):
    right = {"vit_l_gb": 6.1, "vit_l_in_backward_gb": 4.0, "vit_l_memory_ratio": 0.66}

    def verdicts(predicted):
        return [row["verdict"] for row in bounds.claims(LESSON.name, {}, predicted)]

    assert verdicts(right) == ["holds (predicted)"] * 3
    assert sum(verdict.startswith("holds") for verdict in verdicts(right | {figure: value})) == 2


def test_a_faulty_try_leaves_nothing_to_the_next_one():
    """Its hooks stay at the model, and would raise before the check has begun."""
    said = answer_to_exercise(
        LESSON,
        ("print(check_exercise(", "def faulty(model):\n    [p.register_post_accumulate_grad_hook(lambda p: 1 / 0) for p"
         " in model.parameters()]\n\n\ntry:\n    check_exercise(guess, faulty)\nexcept ZeroDivisionError:\n    pass\n"
         "print(check_exercise("),
    )  # fmt: skip
    assert said.splitlines()[-1] == "passed"
