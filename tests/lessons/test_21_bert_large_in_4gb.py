import copy
import gc
import re
import weakref
from types import SimpleNamespace

import pytest
import strangers
import torch
from stranger import Ratings, regressor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from notebooks import copied, lesson, proof_fails, run, source
from tutorial_utils import measure

LESSON = lesson("21")
COPIED = copied(LESSON)
LOOP = source(next(cell for cell in LESSON.cells if cell["id"] == "loop"))
run(LOOP, COPIED)
step_in_backward, round_at_random, train_small = (
    COPIED[name] for name in ("step_in_backward", "round_at_random", "train_small")
)
BOTH = LESSON.source("copy") + "\n\n" + LOOP


def adafactor(parameters, lr=1e-3, **options):
    from transformers.optimization import Adafactor

    return Adafactor(parameters, lr=lr, scale_parameter=False, relative_step=False, **options)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('if not getattr(opt, "waiting", False):', "if True:"),
        ("torch.randint_like(bits, unit)", "unit // 2"),
        ("& -unit)", "& -(unit // 2 or 1))"),
        ("[dict(opt.param_groups[n]", "[dict(opt.param_groups[0]"),
        ("p.grad.float() / scale", "p.grad.float()"),
        ("clip_grad_norm_(p, max_norm)", "clip_grad_norm_(p, 1e9)"),
    ],
    ids=[
        "a step at every micro-batch",
        "rounded to the nearest",
        "one random bit too many is kept",
        "the first group's rate and decay for all",
        "the scale stays in the gradient",
        "no clipping",
    ],
)
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


def test_the_model_is_freed():
    """Hooks that held the optimizer would hold the model for ever: a loop over folds would fill the card."""
    layer = torch.nn.Linear(4, 4)
    optimizer = adafactor(layer.parameters())
    step_in_backward(optimizer)
    layer(torch.ones(1, 4)).sum().backward()
    left = [weakref.ref(layer.weight), weakref.ref(optimizer)]
    del layer, optimizer
    gc.collect()
    assert [reference() for reference in left] == [None, None]


def test_the_step_in_16_bits_can_fail():
    old, new = "low.copy_(round_at_random(p.data, low.dtype))", "low.clone()"
    needed = ("start", "copy", "loop", "before-and-after", "step-in-16-bits")
    *before, step = [source(cell) for cell in LESSON.code if cell["id"] in needed]
    namespace = {}
    run(LESSON.source("setup"), namespace)
    assert sum(code.count(old) for code in before) == 1
    for code in before:
        run(code.replace(old, new), namespace)
    with pytest.raises(AssertionError, match="not a neighbour"):
        run(step, namespace)


def test_small_updates_are_not_lost():
    """200 updates of 2e-5 at 0.05, where the next bf16 is 2.4e-4 away: on average all of them arrive."""
    weight = torch.nn.Parameter(torch.full((2000,), 0.05).bfloat16())
    start = weight.float().mean().item()
    optimizer = torch.optim.SGD([weight], lr=2e-5)
    step_in_backward(optimizer, max_norm=float("inf"))
    for _ in range(200):
        weight.float().sum().neg().backward()
    assert weight.float().mean().item() - start == pytest.approx(200 * 2e-5, rel=0.05)


def batches(size, count):
    return list(DataLoader(Ratings(size * count), batch_size=size))


def loss_of(model, batch):
    scores = model(input_ids=batch["input_ids"]).logits.float().squeeze(-1)
    return torch.nn.functional.mse_loss(scores, batch["labels"])


def hooked(model, lr=1e-3, **options):
    optimizer = adafactor(model.parameters(), lr=lr)
    step_in_backward(optimizer, **options)
    return optimizer


def train(model, optimizer, data, steps=1, scale=1.0):
    losses = []

    def keeping(model, batch):
        losses.append(loss_of(model, batch))
        return losses[-1]

    train_small(model, optimizer, data, keeping, lambda: None, steps, scale)
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_copied(dtype):
    """A regression with another architecture learns in 16 bits; every parameter changes and no gradient is left."""
    model, scale = regressor().eval().to(dtype), 4096.0 if dtype == torch.float16 else 1.0
    before = [p.detach().clone() for p in model.parameters()]
    losses = train(model, hooked(model, scale=scale), batches(4, 2) * 15, 2, scale)
    assert sum(losses[-4:]) < 0.6 * sum(losses[:4])
    assert all(p.dtype == dtype and p.grad is None and p.isfinite().all() for p in model.parameters())
    for (name, p), q in zip(model.named_parameters(), before, strict=True):
        used = "embed" not in name  # of words that do not occur
        assert (p != q).float().mean() > (0.5 if used else 0.05), name


def test_rotary_positions_keep_their_frequencies():
    """Where parameters alone are turned to 16 bits; `to` turns the buffers, too."""
    from transformers import LlamaConfig, LlamaModel

    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=100)
    whole, apart = (LlamaModel(LlamaConfig(**sizes)) for _ in range(2))
    whole.to(torch.bfloat16)
    for p in apart.parameters():
        p.data = p.data.bfloat16()
    assert {p.dtype for model in (whole, apart) for p in model.parameters()} == {torch.bfloat16}
    frequencies = [model.rotary_emb.inv_freq for model in (whole, apart)]
    assert [kept.dtype for kept in frequencies] == [torch.bfloat16, torch.float32]
    angles = [512 * kept.double() for kept in frequencies]
    assert (angles[0] - angles[1]).abs().max() > 0.05, "radians at position 512"


def test_an_average_of_16_bit_weights_stands_still():
    """One of fp32 moves: a thousandth of a small difference is below half of a step of bf16."""
    model = regressor().to(torch.bfloat16)
    moved = {}
    for dtype in (torch.bfloat16, torch.float32):
        average = [p.detach().to(dtype).clone() for p in model.parameters()]
        for mean, p in zip(average, model.parameters()):
            mean.lerp_(1.01 * p.detach().to(dtype), 0.001)
        pairs = list(zip(average, model.parameters()))
        moved[dtype] = sum((mean != p).sum() for mean, p in pairs) / sum(p.numel() for _, p in pairs)
    assert moved[torch.bfloat16] < 0.1 and moved[torch.float32] > 0.9, moved


def test_memory():
    """Weights of two bytes and no gradients: less than an ordinary step in 16 bits at the same size."""
    batch = batches(2, 1)[0]

    def peak(small):
        model = regressor(layers=6, width=256).to(torch.bfloat16)
        optimizer = hooked(model) if small else adafactor(model.parameters())

        def step():
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        return measure.memory(step, model, optimizer, batch).peak, sum(p.nbytes for p in model.parameters())

    (small, weights), (ordinary, _) = peak(True), peak(False)
    assert small < ordinary - 0.3 * weights


def test_no_step_waits_for_the_gpu():
    """Nothing reads a value of a tensor: on a GPU that would be a synchronisation for each parameter."""

    class Reads(TorchDispatchMode):
        found = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.found += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    model = regressor().to(torch.bfloat16)
    model.kept = hooked(model)
    loss = loss_of(model, batches(4, 1)[0])
    with Reads() as reads:
        loss.backward()
    assert reads.found == 0
    with Reads() as reads:
        loss.item()
    assert reads.found == 1


def test_an_overflow_changes_nothing():
    """Without decay. The state sees a gradient of zero, and the next step is finite."""
    model = regressor()
    optimizer = hooked(model)
    before = [p.detach().clone() for p in model.parameters()]
    for bad in (float("inf"), float("nan")):
        (loss_of(model, batches(4, 1)[0]) * bad).backward()
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    train(model, optimizer, batches(4, 1))
    assert all(p.isfinite().all() for p in model.parameters())
    assert any((p != q).any() for p, q in zip(model.parameters(), before, strict=True))


def test_one_element_that_overflows_stops_its_parameter():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    COPIED["step_in_backward"](optimizer)
    (weight * torch.tensor([1.0, float("inf"), 1.0])).sum().backward()
    assert torch.equal(weight.detach(), torch.ones(3))


def test_frozen_and_tied_parameters():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=16)).eval()
    model.transformer.wpe.weight.requires_grad = False
    position = model.transformer.wpe.weight.detach().clone()
    words = torch.arange(8)[None]
    optimizer = adafactor([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    step_in_backward(optimizer)
    losses = []
    for _ in range(5):
        losses.append(model(input_ids=words, labels=words).loss)
        losses[-1].backward()
    assert losses[-1] < losses[0] and torch.equal(model.transformer.wpe.weight, position)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert optimizer.state[model.lm_head.weight]["step"] == 5


@pytest.mark.parametrize("kind", ["linear", "cosine", "plateau"])
def test_schedulers_of_the_libraries_set_the_rate(kind, recwarn):
    from torch.optim.lr_scheduler import ReduceLROnPlateau
    from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

    model = regressor()
    optimizer = hooked(model)
    schedule = {
        "linear": lambda: get_linear_schedule_with_warmup(optimizer, 0, 1),
        "cosine": lambda: get_cosine_schedule_with_warmup(optimizer, 0, 1),
        "plateau": lambda: ReduceLROnPlateau(optimizer, factor=0.0, patience=0),
    }[kind]()
    train(model, optimizer, batches(4, 1))
    for loss in (1.0, 2.0, 3.0):  # a plateau
        schedule.step(*[loss] * (kind == "plateau"))
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, batches(4, 1))  # at a rate of 0
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert not [w for w in recwarn if "lr_scheduler.step" in str(w.message)]


def test_values_that_fit_are_kept():
    for dtype in (torch.bfloat16, torch.float16):
        exact = torch.randn(1000).clamp(min=-8, max=8).to(dtype)
        exact = exact[exact.abs() > 2**-13]  # below, fp16 has fewer bits
        assert torch.equal(round_at_random(exact.float(), dtype), exact)
    values = torch.randn(100)
    assert torch.equal(round_at_random(values, torch.float32), values)


def test_one_update_is_adafactor_of_the_gradient():
    """By hand: a first step moves a vector's elements by the rate each, against their gradients' signs."""
    model = torch.nn.Linear(4, 1)
    before = model.bias.detach().clone()
    model.kept = hooked(model, lr=1e-2)
    (model(torch.ones(2, 4)).sum() * 1e-3).backward()
    assert torch.allclose(before - model.bias, torch.tensor([1e-2]), rtol=1e-4)


def test_frozen_parameters_may_stay_in_the_groups():
    model = regressor()
    model.classifier.requires_grad_(False)
    before = model.classifier.weight.clone()
    model.kept = hooked(model)
    loss_of(model, batches(4, 1)[0]).backward()
    assert torch.equal(model.classifier.weight, before)
    assert all(p.grad is None for p in model.parameters())


def test_gradients_wait_for_the_last_micro_batch():
    model = regressor()
    optimizer, before = hooked(model), [p.detach().clone() for p in model.parameters()]
    optimizer.waiting = True
    loss_of(model, batches(4, 1)[0]).backward()
    optimizer.waiting = False
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert any(p.grad is not None for p in model.parameters())
    loss_of(model, batches(4, 1)[0]).backward()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(("size", "steps", "count"), [(4, 4, 16), (4, 4, 8), (4, 2, 5), (3, 4, 5)])
def test_a_window_is_one_batch_however_short(size, steps, count):
    """Also five rows in two micro-batches, of 4 and of 1."""
    rows, ends = Ratings(count), []
    for micro, window in ((count, 1), (size, steps)):
        model = regressor().eval()
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        seen = []
        sgd.register_step_post_hook(lambda *_, seen=seen: seen.append(1))
        step_in_backward(sgd, max_norm=float("inf"))
        train(model, sgd, DataLoader(rows, micro), window)
        ends.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
        assert len(seen) == len(list(model.parameters())), "one step of each parameter"
    start = torch.nn.utils.parameters_to_vector(regressor().parameters())
    assert (ends[0] - ends[1]).norm() <= 1e-4 * (ends[0] - start).norm()


def test_a_loss_may_take_the_labels_out_of_the_batch():
    """As a loss of one's own often does: `labels = batch.pop("labels")`."""

    def popping(model, batch):
        labels = batch.pop("labels")
        return loss_of(model, batch | {"labels": labels})

    ends = []
    for loss in (loss_of, popping):
        model = regressor().eval()
        train_small(model, hooked(model), batches(4, 2), loss, lambda: None, 2)
        ends.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
    assert torch.equal(*ends)


def test_hooks_that_are_removed_step_no_more():
    model = regressor()
    optimizer = adafactor(model.parameters())
    for hook in step_in_backward(optimizer):
        hook.remove()
    before = [p.detach().clone() for p in model.parameters()]
    loss_of(model, batches(4, 1)[0]).backward()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert all(p.grad is not None for p in model.parameters())


def test_the_pages_line_for_a_loop_of_ones_own_waits_for_each_windows_last():
    page = "".join(source(cell) for cell in LESSON.cells if cell["cell_type"] == "markdown")
    (line,) = re.findall(r"`optimizer\.waiting = (number % [^`]*)`", page)
    for steps, count in ((1, 3), (2, 5), (4, 4), (4, 6)):
        given = {"steps": steps, "loader": range(count)}
        stepped = [n for n in range(1, count + 1) if not eval(line, given | {"number": n})]
        assert stepped == sorted({*range(steps, count + 1, steps), count})


def test_a_run_that_is_resumed_goes_on():
    """State loaded before model.to, as the page says: the same step, but for the rounding."""
    model = regressor().eval()
    optimizer = hooked(model)
    train(model, optimizer, batches(4, 3))
    weights, state = {k: v.clone() for k, v in model.state_dict().items()}, copy.deepcopy(optimizer.state_dict())
    ends = []
    for dtype in (torch.float32, torch.bfloat16):
        again = regressor().eval()
        again.load_state_dict(weights)
        resumed = adafactor(again.parameters())
        resumed.load_state_dict(copy.deepcopy(state))
        again.to(dtype)
        step_in_backward(resumed)
        train(again, resumed, batches(4, 1))
        ends.append(torch.nn.utils.parameters_to_vector(again.float().parameters()).detach())
        assert {s["exp_avg_sq_row"].dtype for s in resumed.state.values() if "exp_avg_sq_row" in s} == {torch.float32}
    train(model, optimizer, batches(4, 1))
    assert torch.equal(torch.nn.utils.parameters_to_vector(model.parameters()), ends[0])
    assert (ends[1] - ends[0]).abs().max() < 0.02


def test_a_schedule_that_is_resumed_goes_on_at_its_rate():
    """In the page's order: the scheduler before the states are loaded, or it writes its first rate over theirs."""

    def made(states=None):
        model = regressor()
        optimizer = adafactor(model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)
        for part, state in zip((optimizer, schedule), states or ()):
            part.load_state_dict(copy.deepcopy(state))
        step_in_backward(optimizer)
        return model, optimizer, schedule

    def rates(model, optimizer, schedule, count):
        seen = []
        for batch in batches(4, count):
            seen.append(optimizer.param_groups[0]["lr"])
            loss_of(model, batch).backward()
            optimizer.step()
            schedule.step()
        return seen

    first = made()
    through = rates(*first, 3)
    resumed = rates(*made([part.state_dict() for part in first[1:]]), 2)
    assert through + resumed == pytest.approx([1e-3, 9e-4, 8e-4, 7e-4, 6e-4])


@pytest.mark.parametrize("in_backward", [False, True], ids=["as usual", "in backward"])
def test_weights_that_are_restored_lose_their_step(in_backward):
    """FGM and AWP move weights between two backward passes, and put them back: here after their step."""
    model = regressor()
    words, head = model.get_input_embeddings().weight, model.classifier.weight
    optimizer = adafactor(model.parameters())
    if in_backward:
        step_in_backward(optimizer)
    before = words.detach().clone(), head.detach().clone()
    optimizer.waiting = True
    loss_of(model, batches(4, 1)[0]).backward()
    words.data.add_(0.1)
    optimizer.waiting = False
    loss_of(model, batches(4, 1)[0]).backward()
    words.data.copy_(before[0])
    optimizer.step()
    assert torch.equal(words, before[0]) == in_backward and not torch.equal(head, before[1])


def test_under_accelerate_the_hooks_learn_from_the_optimizer_within():
    from accelerate import Accelerator

    model = regressor()
    optimizer = hooked(model)
    model, wrapped = Accelerator(cpu=True).prepare(model, optimizer)
    train(model, wrapped.optimizer, batches(4, 4), steps=4)
    assert {state["step"] for state in optimizer.state.values()} == {1}


def test_another_optimizer_in_its_place():
    """As the table of advice has it: 8-bit AdamW where Adafactor was."""
    AdamW8bit = pytest.importorskip("bitsandbytes").optim.AdamW8bit
    model = regressor().eval().to(torch.bfloat16)
    optimizer = AdamW8bit(model.parameters(), lr=1e-3)
    step_in_backward(optimizer)
    losses = train(model, optimizer, batches(4, 2) * 15, 2)
    assert sum(losses[-4:]) < 0.6 * sum(losses[:4])
    assert any(state["state1"].dtype == torch.uint8 for state in optimizer.state.values())


def same(one, other, start):
    vector = torch.nn.utils.parameters_to_vector
    way = (vector(one.parameters()) - vector(start.parameters())).norm()
    return way > 0 and (vector(one.parameters()) - vector(other.parameters())).norm() <= 1e-3 * way


ADAFACTOR = "from transformers.optimization import Adafactor\n"
PLAIN = "Adafactor({}, scale_parameter=False, relative_step=False)"


def of_a_classifier(dtype, steps):
    line = "    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)\n"
    edits = {
        line: f"    model.to({dtype})\n    optimizer = {PLAIN.format('model.parameters(), lr=5e-4')}\n"
        "    step_in_backward(optimizer)\n",
        "        train_one_epoch(model, train_loader, optimizer, scheduler)\n": "        model.train()\n"
        f"        train_small(model, optimizer, train_loader, loss_of, scheduler.step, {steps})\n",
        "args.epochs * len(train_loader)": f"args.epochs * len(train_loader) // {steps}",
    }
    mine = """
def loss_of(model, batch):
    batch = batch.to(device)
    logits = model(**{name: batch[name] for name in batch if name != "labels"}).logits
    return torch.nn.functional.cross_entropy(logits.float(), batch["labels"])
"""
    return strangers.load("classifier", ADAFACTOR + BOTH + mine, edits)


def test_in_a_strangers_classifier(stranger_files, capsys):
    """In fp32 the weights of the script with Adafactor; in bf16 as good, in two micro-batches."""

    def arguments(batch_size):
        files = dict(train=stranger_files / "train.csv", valid=stranger_files / "valid.csv")
        return SimpleNamespace(model=stranger_files / "bert", **files, epochs=1, batch_size=batch_size)

    line = "    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)\n"
    plain = strangers.load(
        "classifier",
        ADAFACTOR,
        {
            line: f"    optimizer = {PLAIN.format('model.parameters(), lr=5e-4')}\n",
            "        loss.backward()\n": "        loss.backward()\n        for p in model.parameters():\n"
            "            torch.nn.utils.clip_grad_norm_(p, 1.0)\n",
        },
    )
    before = plain.main(arguments(32))
    exact = of_a_classifier("torch.float32", 1).main(arguments(32))
    half = of_a_classifier("torch.bfloat16", 2).main(arguments(16))
    accuracies = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    torch.manual_seed(42)
    start = plain.AutoModelForSequenceClassification.from_pretrained(stranger_files / "bert", num_labels=4)
    assert same(before, exact, start)
    assert all(p.dtype == torch.bfloat16 and p.grad is None for p in half.parameters())
    assert accuracies[0] == accuracies[1] and accuracies[2] >= accuracies[0] - 0.15, accuracies


IN_A_COMPETITION = """
def loss_of(model, batch):
    inputs, labels = batch
    outputs = model({k: v.to(CFG.device) for k, v in inputs.items()})
    loss = nn.SmoothL1Loss()(outputs.float(), labels.to(CFG.device))
    losses.append(loss.item())
    return loss

losses = []
"""
OPTIMIZER = "    optimizer = torch.optim.AdamW(get_optimizer_params(model), eps=1e-6, betas=(0.9, 0.999))\n"
POOLING = "mask = attention_mask.unsqueeze(-1).expand(last_hidden_state.size()).float()"


def competition(files, monkeypatch, dtype=None, steps=1):
    """As published with Adafactor, or with the copied cell in a type."""
    monkeypatch.setenv("DATA", str(files / "scores"))
    monkeypatch.setenv("MODEL", str(files / "bert"))
    made = f"    optimizer = {PLAIN.format('get_optimizer_params(model)')}\n"
    edits = {OPTIMIZER: made, "    apex = True\n": "    apex = False\n", "    max_grad_norm = 1.0\n": ""}
    if dtype is None:
        clip = "        torch.nn.utils.clip_grad_norm_(model.parameters(), CFG.max_grad_norm)\n"
        edits[clip] = "        for p in model.parameters():\n            torch.nn.utils.clip_grad_norm_(p, 1.0)\n"
        return strangers.load("competition", ADAFACTOR, edits)
    edits |= {
        OPTIMIZER: f"    model.to({dtype})\n{made}    step_in_backward(optimizer)\n",
        "        loss = train_fn(train_loader, model, criterion, optimizer, scheduler, scaler)\n": ""
        "        model.train()\n"
        "        train_small(model, optimizer, train_loader, loss_of, scheduler.step,\n"
        f"                    {steps}, count=lambda batch: len(batch[1]))\n"
        "        loss = np.mean(losses)\n",
        "    batch_size = 32\n": f"    batch_size = {32 // steps}\n",
        "= len(train_loader) * CFG.epochs": f"= len(train_loader) // {steps} * CFG.epochs",
        "preds.append(model(inputs).cpu().numpy())": "preds.append(model(inputs).float().cpu().numpy())",
        POOLING: POOLING.replace(".float()", ".to(last_hidden_state.dtype)"),
    }
    return strangers.load("competition", ADAFACTOR + BOTH + IN_A_COMPETITION, edits)


def test_in_a_strangers_competition_script(stranger_files, monkeypatch):
    """Three groups of their own rates, a cosine, validation and a submission. In fp32: the same weights and rows."""
    plain = competition(stranger_files, monkeypatch)
    (before, submission) = plain.main()
    (exact, submitted) = competition(stranger_files, monkeypatch, "torch.float32").main()
    (half, in_halves) = competition(stranger_files, monkeypatch, "torch.bfloat16", 2).main()
    torch.manual_seed(42)
    start = plain.CustomModel()
    assert same(before, exact, start)
    assert (submission.id == submitted.id).all() and (submission.id == in_halves.id).all()
    assert (submission - submitted).abs().max().max() <= 1e-3
    assert in_halves.notna().all(axis=None) and (submission - in_halves).abs().max().max() <= 0.3
    assert all(p.dtype == torch.bfloat16 and p.grad is None for p in half.parameters())


def test_a_competition_script_takes_less_memory(stranger_files, monkeypatch):
    plain = competition(stranger_files, monkeypatch)
    changed = competition(stranger_files, monkeypatch, "torch.bfloat16")

    def peak(script, small):
        model = script.CustomModel().to(script.CFG.device)
        if small:
            model.to(torch.bfloat16)
            model.model.gradient_checkpointing_enable({"use_reentrant": False})
        make = adafactor if small else torch.optim.AdamW
        optimizer = make(script.get_optimizer_params(model))
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        frame = script.pd.read_csv(stranger_files / "scores" / "train.csv").iloc[:32]
        loader = DataLoader(script.TextDataset(frame, script.AutoTokenizer.from_pretrained(script.CFG.model)), 32)
        if small:
            script.step_in_backward(optimizer)

        def step():
            if small:
                given = dict(count=lambda batch: len(batch[1]))
                return script.train_small(model, optimizer, loader, script.loss_of, schedule.step, 1, **given)
            scaler = torch.amp.GradScaler(enabled=False)
            script.train_fn(loader, model, script.nn.SmoothL1Loss(), optimizer, schedule, scaler)

        return measure.memory(step, model, optimizer).peak

    ratio = peak(changed, True) / peak(plain, False)
    assert ratio < 0.5, ratio


def test_in_a_strangers_decoder(stranger_files, capsys):
    def script(dtype, steps):
        line = "    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)\n"
        made = f"    optimizer = {PLAIN.format('model.parameters(), lr=LR, weight_decay=0.1')}\n"
        if dtype is None:
            clip = "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
            edits = {
                line: made,
                clip: "        for p in model.parameters():\n    " + clip.replace("model.parameters()", "p"),
            }
            return strangers.load("decoder", ADAFACTOR, edits)
        call = f"train_small(model, optimizer, loaders[0], loss_of, scheduler.step, {steps}, count=tokens)"
        edits = {
            line: f"    model.to({dtype})\n{made}    step_in_backward(optimizer)\n",
            "        train(model, loaders[0], optimizer, scheduler)\n": f"        model.train()\n        {call}\n",
            "LR, BATCH_SIZE, EPOCHS = 96, 1e-3, 16, 1": f"LR, BATCH_SIZE, EPOCHS = 96, 1e-3, {16 // steps}, 1",
            "EPOCHS * len(loaders[0])": f"EPOCHS * len(loaders[0]) // {steps}",
        }
        mine = """
def loss_of(model, batch):
    return model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss

def tokens(batch):
    return (batch["labels"][:, 1:] != -100).sum().item()
"""
        return strangers.load("decoder", ADAFACTOR + BOTH + mine, edits)

    files = [stranger_files / name for name in ("llama", "bert", "train.jsonl", "valid.jsonl")]
    plain = script(None, 1)
    before, exact, half = (one.main(*files) for one in (plain, script("torch.float32", 4), script("torch.bfloat16", 4)))
    perplexities = strangers.perplexities(capsys)
    assert same(before, exact, plain.AutoModelForCausalLM.from_pretrained(stranger_files / "llama"))
    assert all(p.dtype == torch.bfloat16 and p.grad is None for p in half.parameters())
    assert perplexities[0] == pytest.approx(perplexities[1], rel=1e-3)
    assert perplexities[2] == pytest.approx(perplexities[0], rel=0.05)
