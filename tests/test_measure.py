"""The tracker against formulas and against torch.profiler; timing."""

import time

import pytest
import torch
from truth import SMALL, inputs, profiled_peak, train

from tutorial_utils import measure, models

ARCHITECTURES = [("bert-base-uncased", "eager"), ("bert-base-uncased", "sdpa"), ("deberta-v3-base", None)]


def training(name="bert-base-uncased", attention=None, optimizer=torch.optim.AdamW, padded=False, **sizes):
    torch.manual_seed(0)
    model = models.build(name, 4, attention=attention, **(SMALL | sizes))
    optimizer, batch = optimizer(model.parameters(), lr=1e-4), inputs(padded=padded)
    return (lambda: train(model, optimizer, batch)), model, optimizer, batch


def test_a_first_step_that_a_scaler_skips_is_made_again():
    """Else the measured step has no optimizer state yet, and takes 8 bytes a parameter too little."""
    _, model, adamw, batch = training()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)  # of fp32's largest: the first gradients are infinite

    def step():
        scaler.scale(100 * model(**batch).loss).backward()
        scaler.step(adamw)
        scaler.update()
        adamw.zero_grad()

    report = measure.memory(step, model, adamw, batch)
    assert report.parts["optimizer state"] >= 8 * sum(p.numel() for p in model.parameters())


def test_an_optimizer_that_accelerate_prepared_is_measured():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    step, model, adamw, batch = training()
    expected = measure.memory(step, model, adamw, batch)
    AcceleratorState._reset_state(True)  # of a test before
    prepared = Accelerator(cpu=True).prepare(adamw)
    AcceleratorState._reset_state(True)
    assert not hasattr(prepared, "_optimizer_step_pre_hooks")
    assert measure.memory(step, model, prepared, batch).parts == expected.parts


def test_an_optimizer_without_hooks_leaves_none_of_the_trackers():
    class Own(torch.optim.SGD):
        register_step_pre_hook = None

    step, model, _, _ = training()
    with pytest.raises(TypeError):
        measure.memory(step, model, Own(model.parameters(), lr=0.1))
    hooks = torch.nn.modules.module
    assert not hooks._global_forward_pre_hooks and not hooks._global_forward_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_an_addition_that_a_checkpoint_computes_again_stays_one():
    """Below autograd, writing into its argument would change what the second run still needs."""
    layer, rows = torch.nn.Linear(4, 4), torch.arange(3)

    def twice_added(x):
        added = x.index_add(0, rows, layer(x))
        return added.index_add(0, rows, x).square().sum()

    def gradient():
        layer.zero_grad()
        torch.utils.checkpoint.checkpoint(twice_added, start, use_reentrant=False).backward()
        return layer.weight.grad.clone()

    start, found = torch.ones(3, 4, requires_grad=True), []
    expected = gradient()
    measure.memory(lambda: found.append(gradient()), layer)
    assert torch.equal(found[0], expected) and torch.equal(start, torch.ones(3, 4))


def test_roles_are_the_formula_to_the_byte():
    step, model, optimizer, batch = training()
    report = measure.memory(step, model, optimizer, batch)
    highest = dict(zip(measure.ROLES, map(max, zip(*report.timeline, strict=True)), strict=True))
    parameters = sum(p.numel() for p in model.parameters())
    buffers = sum(b.untyped_storage().nbytes() for b in model.buffers())
    assert highest["weights"] == 4 * parameters + buffers
    assert highest["gradients"] == 4 * parameters
    assert highest["optimizer state"] == 8 * parameters + 4 * len(list(model.parameters()))
    assert highest["inputs"] == sum(t.nbytes for t in batch.values())
    assert sum(report.parts.values()) == report.peak == max(map(sum, report.timeline))


def test_activations_of_one_layer_are_what_backward_needs():
    # linear saves its input, relu its output (the second linear's input): batch × width × 4 bytes each.
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    text = torch.randn(32, 64)
    report = measure.memory(lambda: model(text).sum().backward(), model, inputs=[text])
    activations = max(moment[measure.ROLES.index("activations")] for moment in report.timeline)
    assert activations == 32 * 256 * 4  # the first linear's input counts as an input


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize(("name", "attention"), [*ARCHITECTURES, ("distilbert", None)])
def test_peak_equals_the_profiler(name, attention, padded):
    if name == "distilbert":
        from transformers import DistilBertConfig, DistilBertForSequenceClassification

        def make():
            torch.manual_seed(0)
            config = DistilBertConfig(n_layers=3, dim=128, n_heads=4, hidden_dim=512, vocab_size=2000, num_labels=4)
            model, batch = DistilBertForSequenceClassification(config).train(), inputs(padded=padded)
            del batch["token_type_ids"]
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            return (lambda: train(model, optimizer, batch)), model, optimizer, batch
    else:

        def make():
            return training(name, attention, padded=padded)

    step, model, _, batch = make()
    truth = profiled_peak(step, model, batch)
    peak = measure.memory(*make()).peak
    assert abs(peak / truth - 1) <= 0.02, f"tracked {peak:,}, torch.profiler {truth:,} bytes"


def test_a_kind_of_tensor_left_out_would_be_noticed(monkeypatch):
    """The comparison above can fail: without dropout's masks the peak is off by more than 2 %."""
    step, model, optimizer, batch = training()
    truth = measure.memory(step, model, optimizer, batch).peak
    mark = measure.Tracker._mark
    left_out = (torch.ops.aten.bernoulli_.float, torch.ops.aten.empty_like.default)

    def blind(self, tensor, role, func=None, owner=""):
        if func not in left_out and (func is not torch.ops.aten.div_.Scalar):
            mark(self, tensor, role, func, owner)

    monkeypatch.setattr(measure.Tracker, "_mark", blind)
    assert abs(measure.memory(step, model, optimizer, batch).peak / truth - 1) > 0.02


def test_checkpointing_recomputes_activations_not_temporaries():
    step, model, optimizer, batch = training(num_hidden_layers=6)
    plain = measure.memory(step, model, optimizer, batch)
    model.gradient_checkpointing_enable()
    saved = measure.memory(step, model, optimizer, batch)
    assert saved.peak < 0.6 * plain.peak
    assert saved.parts["activations"] > saved.parts["temporary"]


def test_virtual_card_raises_and_the_session_goes_on():
    step, model, optimizer, batch = training()
    peak = measure.memory(step, model, optimizer, batch).peak
    with pytest.raises(torch.OutOfMemoryError, match=r"virtual card of .* MiB: .* asked for .* were held \(weights"):
        measure.memory(step, model, optimizer, batch, card=peak - 1)
    optimizer.zero_grad()
    assert measure.memory(step, model, optimizer, batch, card=peak).peak == peak


@pytest.mark.parametrize("where", ["the whole model", "one layer"])
def test_a_compiled_model_is_refused(where):
    """Under a mode its plain code would run, and the figure would be of that."""
    step, model, optimizer, batch = training()
    (model if where == "the whole model" else model.base_model.encoder.layer[0]).compile(backend="eager")
    with pytest.raises(ValueError, match="compiled modules.*ask the allocator"):
        measure.memory(step, model, optimizer, batch)


def test_a_graph_dropped_without_backward_is_freed():
    _, model, _, batch = training()

    def passes(count):
        return measure.memory(lambda: [model(**batch).loss.item() for _ in range(count)], model, inputs=batch).peak

    assert passes(4) == passes(1)


def test_tracking_leaves_nothing_behind():
    step, model, optimizer, batch = training()
    measure.memory(step, model, optimizer, batch)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    model.to(torch.bfloat16)  # refused while anything holds weak references to parameters


def test_timing_is_interleaved_and_a_ratio_of_rounds(monkeypatch):
    monkeypatch.setattr("tutorial_utils.times._disturbed", lambda *_: False)
    monkeypatch.setattr("tutorial_utils.times._agree", lambda values: True)
    order = []

    def slow(name, seconds):
        return lambda: (order.append(name), time.sleep(seconds))

    timing = measure.timing({"a": slow("a", 0.01), "b": slow("b", 0.03)}, rounds=3, warmup=1)
    assert order == ["a", "b"] * 4
    assert 2 < timing.ratio("b", to="a") < 4
    assert timing.spread("a")[0] <= timing.median("a") <= timing.spread("a")[1]
    assert len(timing.rounds["a"]) == 3


def test_timing_refuses_no_rounds():
    with pytest.raises(ValueError, match="rounds was 0"):
        measure.timing({"a": lambda: None}, rounds=0)
