"""The prediction against a real run on a CPU, its CUDA semantics, its refusals, its speed."""

import contextlib
import copy
import itertools
import pkgutil
import sys
import threading
import time

import pytest
import torch
import transformers
import truth
from test_forks import EVERY
from truth import SMALL

from notebooks import copied, lesson
from tutorial_utils import machine, measure, models, names, predict

GiB = 2**30
ARCHITECTURES = (("bert-base-uncased", "eager"), ("bert-base-uncased", "sdpa"), ("deberta-v3-base", None))
PLAIN = [
    dict(name=name, attention=attention, padded=padded, optimizer=optimizer, accumulate=accumulate)
    for row, (name, attention) in enumerate(ARCHITECTURES)
    for padded, optimizer, accumulate in itertools.product((False, True), ("adamw", "sgd"), (1, 3))
    if EVERY
    or (row + padded + (optimizer == "sgd") + accumulate // 3) % 2 == 0  # half, in which each pair of values occurs
]
# Two shapes: the peak at the turn from forward to backward, and in the optimizer's step. Each technique has one of them
# in two of the architectures, and the other one in the third; with COURSE_TEST_ALL=1 both in all.
TECHNIQUES = [
    dict(name=name, attention=attention, batch=batch, length=length, padded=length > 28, **technique)
    for row, (name, attention) in enumerate(ARCHITECTURES)
    for column, (batch, length) in enumerate(((4, 64), (1, 20)))
    for number, technique in enumerate(
        (
            dict(precision="bf16"),
            dict(precision="fp16", optimizer="sgd"),
            dict(precision="fp16", accumulate=2),
            dict(optimizer="adamw8bit"),
            dict(prepare=truth.checkpoint),
            dict(prepare=truth.freeze),
            dict(prepare=truth.checkpoint_and_freeze, precision="bf16", accumulate=2),
            dict(prepare=truth.freeze, optimizer="adamw8bit", precision="fp16"),
        )
    )
    if EVERY or (row + column + number) % 2 == 0
]


@pytest.mark.parametrize(
    "case",
    PLAIN + TECHNIQUES,
    ids=lambda case: named(case),
)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler:UserWarning")
def test_prediction_for_a_cpu_equals_the_profiler(case):
    step = dict(batch=8, length=64, prepare=None, optimizer="adamw", precision="fp32", accumulate=1) | case
    name, attention = step.pop("name"), step.pop("attention")
    torch.manual_seed(0)
    model = models.build(name, 4, attention=attention, **SMALL)
    if step["prepare"]:
        step["prepare"](model)
    chosen = truth.optimizer(step["optimizer"], model)
    batch = truth.inputs(step["batch"], step["length"], step["padded"])

    def train():
        truth.train(model, chosen, batch, step["accumulate"], step["precision"])

    real = truth.profiled_peak(train, model, batch)
    tracked = measure.memory(train, model, chosen, batch).peak
    predicted = predict.step_memory(models.config(name, 4, **SMALL), attention=attention, device="cpu", **step).peak
    for what, found in (("tracked", tracked), ("predicted", predicted)):
        assert abs(found / real - 1) <= 0.01, f"{what} {found:,}, torch.profiler {real:,} bytes"


# Each family of models gets half of these, and its neighbour the other half. With COURSE_TEST_ALL=1 each gets all, in
# tests that compare two predictions.
MORE = [
    dict(optimizer="adafactor"),
    dict(optimizer="fused"),
    dict(optimizer="foreach", precision="bf16-pure"),
    dict(optimizer="adafactor", precision="bf16-pure"),
    dict(lora=8),
    dict(lora=4, checkpointing=1, optimizer="adamw8bit"),
    dict(checkpointing=1, precision="bf16"),
    dict(checkpointing=2, optimizer="sgd"),
    dict(freeze_layers=2, precision="fp16"),
    dict(freeze_layers=1, checkpointing=1, precision="bf16"),
    dict(accumulate=2, precision="fp16"),
    dict(accumulate=3, optimizer="adamw8bit", attention="eager"),
]
FAMILY_CASES = [
    dict(name=name, padded=bool((row + column // 2) % 2)) | technique
    for row, name in enumerate(truth.FAMILIES)
    for column, technique in enumerate(MORE)
    if (row + column) % 2 == 0
]


def techniques_of(name):
    row = [*truth.FAMILIES].index(name)
    return [{}, *(one for column, one in enumerate(MORE) if EVERY or (row + column) % 2 == 0)]


def named(case):
    return "-".join(str(getattr(value, "__name__", value)) for value in case.values())


def by_name(optimizer):
    """As step_memory takes it: those it has no name for as functions."""
    return optimizer if optimizer in predict.OPTIMIZERS else lambda model: truth.optimizer(optimizer, model)


@pytest.mark.parametrize("case", FAMILY_CASES, ids=named)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler:UserWarning")
def test_prediction_for_every_family_equals_the_profiler(case):
    choices = dict(optimizer="adamw", precision="fp32", accumulate=1, attention=None) | case
    name, padded, attention = choices.pop("name"), choices.pop("padded"), choices.pop("attention")
    techniques = {key: choices[key] for key in ("lora", "freeze_layers", "checkpointing") if key in choices}
    torch.manual_seed(0)
    model = models.build(name, 4, attention=attention, **truth.FAMILIES[name])
    model = truth.family_prepared(name, model, precision=choices["precision"], **techniques)
    chosen = truth.optimizer(choices["optimizer"], model)
    batch = truth.family_inputs(model, 4, 64, padded)
    real = truth.profiled_peak(
        lambda: truth.train(model, chosen, batch, choices["accumulate"], choices["precision"]), model, batch
    )
    choices["optimizer"] = by_name(choices["optimizer"])
    settings = models.config(name, 4, **truth.FAMILIES[name])
    predicted = predict.step_memory(settings, 4, 64, padded=padded, attention=attention, device="cpu", **choices)
    assert abs(predicted.peak / real - 1) <= 0.02, f"predicted {predicted.peak:,}, torch.profiler {real:,} bytes"
    assert predicted.card_bytes is None and predicted.fits is None


of_two_families = pytest.mark.parametrize("name", truth.FAMILIES if EVERY else ["deberta-v3-small", "llama-2-7b"])


@of_two_families
def test_what_is_remembered_changes_nothing(name, monkeypatch):
    """With what is remembered, and with all traced afresh."""
    two = techniques_of("deberta-v3-small") + techniques_of("llama-2-7b")
    assert all(one in two for one in MORE), "choose two families that take other halves"
    settings = models.config(name, 4, **truth.FAMILIES[name])

    def predicted(choices):
        choices = choices | {"optimizer": by_name(choices.get("optimizer", "adamw"))}
        report = predict.step_memory(settings, 4, 64, padded=True, **choices)
        return report.parts, report.modules, report.card_parts, report.phases

    for technique in techniques_of(name):
        remembered = predicted(technique)
        with monkeypatch.context() as patched:
            patched.setattr(predict.fake, "_results", lambda *_: None)
            patched.setattr(predict.fake, "_known", {})
            assert remembered == predicted(technique), technique
    monkeypatch.setattr(predict.fake, "_known", {})
    monkeypatch.setattr(predict.fake, "MOST_KNOWN", 20)
    assert remembered == predicted(technique) and 0 < len(predict.fake._known) <= 20, "it forgets in time"


def test_what_is_remembered_of_another_type_is_not_taken():
    """A model's tensors are made of torch's default type, which no argument names."""
    sizes = dict(num_hidden_layers=1, hidden_size=48, num_attention_heads=4, intermediate_size=96, vocab_size=999)
    half, full = (models.config("bert-base-uncased", dtype=dtype, **sizes) for dtype in (torch.float16, torch.float32))
    weights = [
        predict.step_memory(settings, 2, 16, precision="fp32").parts["weights"] for settings in (full, half, full)
    ]
    assert weights[0] == weights[2] > 1.9 * weights[1], weights


def test_a_number_that_is_remembered_keeps_its_value():
    """Models look at numbers of their own, such as the root of a head's width, and may change them in place."""

    def looked_at(width):
        number = torch.tensor(width).sqrt()
        root = number.item()
        changed = torch.tensor(width)
        changed.add_(1)
        return root, number.item(), changed.item()

    with predict.fake.Shapes() as fake:
        fake.inside = "a model"
        assert [looked_at(width) for width in (4.0, 9.0, 4.0)] == [(2, 2, 5), (3, 3, 10), (2, 2, 5)]


def test_what_is_split_into_one_part_is_still_split():
    def loss(model, inputs):
        hidden = model.base_model(inputs["input_ids"])[0].flatten(0, 1)
        return sum(part.sum() for part in hidden.split(10_000))

    reports = [predict.step_memory(models.config("bert-base-uncased", **SMALL), 2, 16, loss=loss) for _ in range(2)]
    assert reports[0].parts == reports[1].parts


@of_two_families
def test_a_pass_that_is_counted_twice_is_one_that_runs_twice(name):
    """A limit is held to operations that run: with one, both passes do. Half of the techniques for each family."""
    settings = models.config(name, 4, **truth.FAMILIES[name])
    for technique in techniques_of(name):
        choices = technique | {"optimizer": by_name(technique.get("optimizer", "adamw")), "accumulate": 3}
        once, twice = (
            predict.step_memory(settings, 4, 64, padded=True, limit=most, **choices) for most in (None, 2**50)
        )
        for part in ("peak", "allocated", "reserved", "parts", "modules"):
            assert getattr(once, part) == getattr(twice, part), (technique, part)


@pytest.mark.parametrize("name", truth.FAMILIES)
def test_one_pass_for_several_optimizers_is_as_good_as_one_for_each(name):
    settings = models.config(name, 4, **truth.FAMILIES[name])
    several = ["adafactor", "adamw", "adamw8bit", "sgd"]
    three = [{}, {"precision": "fp16", "checkpointing": 1, "accumulate": 2, "card": "T4"}, {"device": "cpu"}]
    for choices in three if EVERY else [three[[*truth.FAMILIES].index(name) % 3]]:
        choices |= dict(batch=4, length=64, padded=True)
        together = predict.step_memory(settings, optimizer=[*map(by_name, several)], **choices)
        for optimizer, one in zip(several, together):
            alone = predict.step_memory(settings, optimizer=by_name(optimizer), **choices)
            for part in ("peak", "parts", "allocated", "reserved", "card_bytes", "fits", "modules"):
                assert getattr(one, part) == getattr(alone, part), (choices, optimizer, part)
            assert alone.timeline[-1][1] == one.timeline[-1][1] == 0, "gradients are freed at the end"


def test_a_step_of_ones_own_with_an_optimizer_in_hooks():
    """Gradients are used and dropped in the backward pass; the step names "cuda", and reads the loss."""

    def prepare(model):
        def update(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        optimizers = {p: torch.optim.Adam([p], lr=1e-4, foreach=False) for p in model.parameters()}
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)

    def step(model, optimizer, inputs, device="cuda"):
        with torch.autocast(device, torch.bfloat16):
            loss = model(**{name: tensor.to(device) for name, tensor in inputs.items()}).loss
        loss.backward()
        return loss.item()

    settings = models.config("bert-base-uncased", 4, **SMALL)
    torch.manual_seed(0)
    model = models.build("bert-base-uncased", 4, **SMALL)
    batch = truth.inputs(4, 64, padded=True)
    predicted = predict.step_memory(settings, step=step, inputs=batch, prepare=prepare, optimizer="sgd", device="cpu")
    prepare(model)
    real = truth.profiled_peak(lambda: step(model, None, batch, "cpu"), model, batch)
    assert abs(predicted.peak / real - 1) <= 0.02, f"predicted {predicted.peak:,}, torch.profiler {real:,} bytes"


def beside_the_profiler(build, batch, loss_of, on_paper=None):
    """A step of one's own on a CPU: predicted, of what `on_paper` builds, and as torch.profiler saw it."""

    def step(model, optimizer, inputs):
        loss_of(model, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()

    def optimizer_of(model):
        return torch.optim.AdamW([part for part in model.parameters() if part.requires_grad], lr=1e-4)

    torch.manual_seed(0)
    model = build().train()
    optimizer = optimizer_of(model)
    real = truth.profiled_peak(lambda: step(model, optimizer, batch), model, batch)
    build = on_paper or build
    predicted = predict.step_memory(build, step=step, inputs=batch, optimizer=optimizer_of, device="cpu").peak
    assert abs(predicted / real - 1) <= 0.02, f"predicted {predicted:,}, torch.profiler {real:,} bytes"


def own_loss(model, batch):
    return model(**batch).loss


@pytest.mark.parametrize("way", ["as usual", "in chunks"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_decoders_loss_equals_the_profiler(way, tied):
    """Lesson 24's cell, under checkpoints, over a vocabulary that is most of the memory."""

    def build():
        sizes = truth.FAMILIES["llama-2-7b"] | dict(vocab_size=20_000, num_key_value_heads=2, tie_word_embeddings=tied)
        network = models.build("llama-2-7b", causal=True, **sizes)
        names.checkpoint_layers(network)
        return network

    batch = truth.inputs(8, 64, padded=True)
    batch = {name: batch[name] for name in ("input_ids", "attention_mask")} | {"labels": batch["input_ids"]}
    beside_the_profiler(build, batch, own_loss if way == "as usual" else copied(lesson("24"))["chunked_loss"])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_pack_equals_the_profiler(attention):
    """Lesson 20's mask of every place against every place, and its positions."""
    batch = truth.inputs(6, 128)
    mask = torch.zeros(6, 1, 128, 128)
    mask[..., :64, 64:] = mask[..., 64:, :64] = torch.finfo(torch.float32).min
    batch |= {"attention_mask": mask, "position_ids": torch.arange(128).remainder(64).expand(6, -1).contiguous()}
    beside_the_profiler(lambda: models.build("bert-base-uncased", 4, attention=attention, **SMALL), batch, own_loss)


def test_adapters_over_4_bits_equal_the_profiler():
    """The weights are packed by bitsandbytes itself, and on paper by `pack_4bit`."""
    bitsandbytes, peft = pytest.importorskip("bitsandbytes"), pytest.importorskip("peft")
    sizes = truth.FAMILIES["llama-2-7b"] | dict(hidden_size=256, intermediate_size=1024)

    def packed(linear):
        packed = bitsandbytes.nn.Linear4bit(
            linear.in_features, linear.out_features, linear.bias is not None, torch.float32, quant_type="nf4"
        )
        packed.weight = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
        vars(linear).clear()
        vars(linear).update(vars(packed.to("cpu")))
        linear.__class__ = type(packed)

    def build(network, pack):
        for part in [part for part in network.base_model.modules() if type(part) is torch.nn.Linear]:
            pack(part)
        return peft.get_peft_model(network, peft.LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear"))

    def on_paper():
        network = models.untrained(models.config("llama-2-7b", **sizes), causal=True)
        return build(network, lambda part: predict.pack_4bit(part, torch.float32))

    batch = truth.inputs(8, 64, padded=True)
    batch = {name: batch[name] for name in ("input_ids", "attention_mask")} | {"labels": batch["input_ids"]}
    beside_the_profiler(
        lambda: build(models.build("llama-2-7b", causal=True, **sizes), packed), batch, own_loss, on_paper
    )


def compiled(parts, checkpointed, backend="aot_eager", **options):
    """A BERT of which "layers", the "whole" or a "wrapper" around it is compiled."""
    network = models.build("bert-base-uncased", 4, **SMALL)
    if checkpointed:
        names.checkpoint_layers(network)
    if parts == "wrapper":
        return torch.compile(network, backend=backend, **options)
    for part in network.base_model.encoder.layer if parts == "layers" else [network]:
        part.compile(backend=backend, **options)
    return network


@pytest.mark.skipif(torch.__version__ < (2, 11), reason="needs torch 2.11")
@pytest.mark.parametrize(
    ("parts", "checkpointed"), [("layers", False), ("layers", True), ("whole", True), ("wrapper", False)]
)
def test_compiled_modules_equal_the_profiler(parts, checkpointed):
    """Whatever the backend: their graphs are followed, as "aot_eager" runs them. Plain code would hold other bytes."""
    beside_the_profiler(
        lambda: compiled(parts, checkpointed),
        truth.inputs(8, 128, padded=True),
        own_loss,
        lambda: compiled(parts, checkpointed, "inductor", mode="max-autotune"),
    )


def test_functions_that_are_compiled_meanwhile_keep_their_backend(monkeypatch):
    """bitsandbytes compiles some of its own while it is imported, which may be in a prediction."""
    function, given = (lambda x: x), []
    for imported_now in (True, False):
        monkeypatch.setattr(sys.modules[__name__].__spec__, "_initializing", imported_now, raising=False)
        predict.patches._graphs_only(None, lambda *_, **options: given.append(options), function, mode="max-autotune")
    assert given == [{"mode": "max-autotune"}, {"backend": "aot_eager"}]


@pytest.mark.skipif(torch.__version__ < (2, 11), reason="needs torch 2.11")
def test_lesson_14s_cell_compiles_in_a_prediction():
    """It first compiles a small function, which without values must not reach a compiler's kernels."""
    settings, ways = models.config("bert-base-uncased", 4, **SMALL), []
    predict.step_memory(settings, 8, 128, prepare=lambda m: ways.append(copied(lesson("14"))["compile_layers"](m)))
    assert ways == [3]


def test_compiled_modules_are_refused_where_they_cannot_be_followed(monkeypatch):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.10.0"))
    with pytest.raises(ValueError, match="compiled modules.*torch 2.11"):
        predict.step_memory(lambda: compiled("whole", False), inputs=truth.inputs(8, 128), optimizer="sgd")


def test_any_module_from_a_function():
    def model():
        return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))

    def step(model, optimizer, inputs):
        model(inputs["x"]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    choices = dict(step=step, inputs={"x": torch.zeros(32, 64)}, optimizer="sgd")
    report = predict.step_memory(model, **choices)
    activations = max(moment[measure.ROLES.index("activations")] for moment in report.timeline)
    assert activations == 32 * 256 * 4 and list(report.modules)[0] in ("0", "1", "2", "(backward)")


# Bytes that PyTorch's allocator counted beside the result, on virtual cards: torch 2.13.0+cu130, 2026-11-29.
# tests/virtual_gpu counts them again.
SUMS = {  # shape, dimensions: on a T4, on an A100
    ((4096, 768), (0,)): (21_233_688, 25_165_848),
    ((131072, 4), (0,)): (4_100, 4_100),
    ((32, 12, 128, 128), (0, 2, 3)): (384, 1_776),
    ((1000, 1000), (0, 1)): (324, 496),
    ((8, 512, 1024), (0, 1)): (20_971_552, 33_554_464),
    ((64, 4096), (1,)): (0, 0),
    ((8, 512, 1024), (2,)): (0, 0),
}
ATTENTION = {  # type, width of a head, length; 2 texts, 3 heads: the largest buffer of its backward pass
    (torch.float32, 64, 100): (196_800, 196_800),
    (torch.float32, 96, 512): (1_574_400, 1_573_632),
    (torch.float32, 128, 100): (393_600, 393_408),
    (torch.float16, 64, 512): (787_200, 786_432),
    (torch.float16, 96, 100): (393_408, 294_912),
    (torch.float16, 128, 512): (1_573_632, 1_572_864),
}


@pytest.mark.parametrize(("number", "card"), enumerate(("T4", "A100")))
def test_the_buffers_of_kernels_are_those_that_the_allocator_counted(number, card):
    """Also what none of a small step shows."""
    gpu = machine.gpu(card)
    for (shape, dims), counted in SUMS.items():
        tensor = torch.empty(shape, device="meta")
        found = sum(predict.rules.sum_buffer(tensor.shape, tensor.stride(), set(dims), gpu))
        assert found == counted[number], (shape, dims)
    for (dtype, width, length), counted in ATTENTION.items():
        query = torch.empty(2, length, 3, width, dtype=dtype, device="meta").transpose(1, 2)
        kernel = predict.rules.attention_kernel(gpu, query, None, False, query)
        assert kernel == ("flash" if card == "A100" and dtype == torch.float16 else "efficient")
        flash, efficient = predict.rules.flash_buffers(query, query), predict.rules.efficient_buffers(query, query, gpu)
        assert max(flash if kernel == "flash" else efficient) == counted[number], (dtype, width, length)


def test_a_mask_whose_rows_are_no_multiple_of_8_is_copied_by_each_layer():
    """As of BERT-large in 8 rows, of 504, 507 and 512 places: a layer's copy waits for the backward pass."""
    for places, apart in ((504, 504), (507, 512), (512, 512)):
        query, mask = (torch.empty(8, *sizes, device="meta") for sizes in ((16, places, 64), (1, places, places)))
        made = predict.rules._bias(mask, query, query)
        shared = made.untyped_storage()._cdata == mask.untyped_storage()._cdata
        assert shared == (places % 8 == 0) and made.stride(-2) == apart, places


def test_where_a_step_clears_its_gradients_changes_little_in_what_is_reserved():
    def layers():
        return torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))

    def first(model, optimizer, inputs):
        model.zero_grad()
        model(inputs["x"]).square().mean().backward()
        optimizer.step()

    def last(model, optimizer, inputs):
        model(inputs["x"]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    at_first, at_last = (
        predict.step_memory(layers, step=step, inputs={"x": torch.zeros(8, 1024)}, optimizer="sgd", card="T4")
        for step in (first, last)
    )
    assert (at_first.allocated, at_first.reserved) == (at_last.allocated, at_last.reserved)


def test_cublas_gets_a_copy_of_what_has_no_dense_dimension():
    """The gradient of a sum is one number, as wide as the result."""

    def step(model, optimizer, inputs):
        result = model(inputs["x"])
        (result if inputs["dense"] else result.sum()).backward(torch.empty_like(result) if inputs["dense"] else None)
        model.zero_grad()

    def temporary(dense):
        inputs = {"x": torch.zeros(512, 64), "dense": dense}
        made = predict.step_memory(lambda: torch.nn.Linear(64, 4096), step=step, inputs=inputs, optimizer="sgd")
        return made.peak

    result = 512 * 4096 * 4
    assert temporary(True) - temporary(False) < result / 100  # a gradient of its own, or a copy: one of them


def activations(**choices):
    """The most that is ever saved for backward, in bytes."""
    report = predict.step_memory("bert-large-uncased", 8, 128, **choices)
    return max(moment[measure.ROLES.index("activations")] for moment in report.timeline)


def test_cuda_semantics_by_formula():
    """Per layer of BERT-large, 8 × 128: what CUDA's kernels save that a CPU's do not, and the reverse."""
    tokens, square, layers = 8 * 128, 8 * 16 * 128 * 128, 24
    # Dropout: one byte an element instead of four, after each of two projections and the embeddings.
    dropout = 3 * (2 * layers + 1) * tokens * 1024
    # Eager attention's dropout masks the probabilities as well; and the one behind the pooler.
    eager = activations(attention="eager", device="cpu") - activations(attention="eager")
    assert eager == pytest.approx(dropout + 3 * layers * square, rel=0.001)
    # SDPA on CUDA saves the log of the softmax's sums in place of the probabilities, their copy and its mask.
    saved = activations(attention="eager") - activations(attention="sdpa")
    sums = 4 * layers * 8 * 16 * 128
    assert saved == pytest.approx(layers * square * (4 + 4 + 1) - sums, rel=0.01)


def test_padding_costs_a_bias_in_every_layer():
    more = activations(attention="sdpa", padded=True) - activations(attention="sdpa")
    assert more == pytest.approx(24 * 8 * 128 * 128 * 4, rel=0.05)


def test_foreach_adamw_holds_a_copy_of_the_parameters():
    model = models.config("bert-large-uncased")
    parameters = sum(p.numel() for p in fake_parameters(model))
    report = predict.step_memory("bert-large-uncased", 1, 16)
    assert report.peak == pytest.approx(20 * parameters, rel=0.01)  # weights, gradients, state, copy


def test_state_that_is_replaced_at_every_step():
    """transformers' Adafactor stores a new tensor, RMS, in each step: the card's memory is still known."""
    from transformers.optimization import Adafactor

    def optimizer(model):
        return Adafactor(model.parameters(), lr=1e-3, relative_step=False, scale_parameter=False)

    peaks = [predict.step_memory("tiny", 2, 16, optimizer=kind) for kind in (optimizer, "adamw")]
    assert peaks[0].parts["optimizer state"] < peaks[1].parts["optimizer state"] / 50
    assert peaks[0].reserved <= peaks[1].reserved and peaks[0].card_bytes > peaks[0].peak


def fake_parameters(settings):
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return list(models.untrained(settings).parameters())


def test_torchscript_functions_are_run_as_python(monkeypatch):
    """As DeBERTa has them in transformers 5.17: fake tensors fail in the TorchScript interpreter."""
    import transformers.models.deberta_v2.modeling_deberta_v2 as deberta

    called = []

    def scaled(function):
        def python(query_layer, scale_factor: int):
            called.append(True)
            return function(query_layer, scale_factor)

        return python

    before = predict.step_memory("deberta-v3-base", 2, 32).peak
    scripted = torch.jit.script(torch.nn.functional.relu)  # any ScriptFunction
    original = deberta.scaled_size_sqrt
    scripted._torchdynamo_inline = scaled(getattr(original, "_torchdynamo_inline", original))
    monkeypatch.setattr(deberta, "scaled_size_sqrt", scripted)
    assert predict.step_memory("deberta-v3-base", 2, 32).peak == before and called
    assert deberta.scaled_size_sqrt is scripted


def test_dropout_and_attention_are_put_back():
    before = torch.nn.functional.dropout, torch.nn.functional.scaled_dot_product_attention
    with pytest.raises(torch.OutOfMemoryError):
        predict.step_memory("bert-large-uncased", 32, 128, limit=4 * GiB)
    assert before == (torch.nn.functional.dropout, torch.nn.functional.scaled_dot_product_attention)


@pytest.mark.alone
def test_bert_large_is_predicted_in_a_second(second):
    predict.step_memory("bert-base-uncased", 1, 16)  # imports
    seconds = min(predict.step_memory("bert-large-uncased", 32, 128, card="T4").seconds for _ in range(3))
    assert seconds <= second, f"tracing took {seconds:.1f} s"


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (dict(model="bert-huge"), "model was 'bert-huge'; accepted: .*bert-large-uncased"),
        (dict(batch=-1), "batch was -1; accepted: a whole number, 1 to 1,000,000"),
        (dict(batch=0), "batch was 0"),
        (dict(length=513), "length was 513; accepted: up to 512"),
        (dict(accumulate=0), "accumulate was 0"),
        (dict(optimizer="lion"), "optimizer was 'lion'; accepted: adamw, adamw8bit, adafactor, sgd, or a function"),
        (dict(precision="fp8"), "precision was 'fp8'; accepted: fp32, fp16, bf16, bf16-pure"),
        (dict(lora=-1), "lora was -1; accepted: a whole number, 0 to 1,000,000"),
        (dict(freeze_layers=25), "freeze_layers was 25; accepted: up to this model's 24"),
        (dict(card="T5000"), "card was 'T5000'; accepted: Tesla T4, .*or a size such as \"6 GiB\""),
        (dict(card=0), "card was 0"),
        (dict(model=transformers.ViTConfig()), "(?s)model was ViTConfig.*; accepted: .*classifier, or a function"),
        (dict(step=lambda *_: None, precision="bf16"), "a step of your own does it itself"),
        (dict(device="tpu"), "device was 'tpu'"),
        (dict(attention="flash"), "attention was 'flash'"),
        (dict(model="deberta-v3-base", attention="sdpa"), "attention of deberta-v2 was 'sdpa'; accepted: .eager"),
    ],
)
def test_refusals_name_what_was_given_and_what_is_accepted(choices, message):
    predict.step_memory("tiny", 1, 8)  # what it imports is no work of the call below
    started = time.process_time()  # a busy machine takes nothing of it
    with pytest.raises(ValueError, match=message):
        predict.step_memory(**({"model": "bert-large-uncased", "batch": 8, "length": 128} | choices))
    assert time.process_time() - started < 1, "the error came after long work"


def test_without_bitsandbytes_its_optimizer_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert predict.step_memory("bert-base-uncased", 1, 16).peak
    with pytest.raises(ImportError, match="adamw8bit is of bitsandbytes.*pip install bitsandbytes"):
        predict.step_memory("bert-base-uncased", 1, 16, optimizer="adamw8bit")


def test_overrides_of_bitsandbytes_stay_with_the_prediction():
    """They are kept by a parameter's place in its optimizer, for every optimizer of the process."""
    import bitsandbytes
    from bitsandbytes.optim import GlobalOptimManager

    def embeddings_in_fp32(model):
        words = model.base_model.embeddings.word_embeddings
        GlobalOptimManager.get_instance().register_module_override(words, "weight", {"optim_bits": 32})
        return bitsandbytes.optim.AdamW8bit(model.parameters())

    def state(optimizer):
        report = predict.step_memory("bert-base-uncased", 1, 16, optimizer=optimizer)
        return max(moment[measure.ROLES.index("optimizer state")] for moment in report.timeline)

    plain, words = state("adamw8bit"), 30522 * 768
    assert state(embeddings_in_fp32) - plain == 2 * words * 4 - 2 * (words + 4 * words // 256)
    assert state("adamw8bit") == plain
    manager = GlobalOptimManager.get_instance()
    assert not manager.module_weight_config_triple and not manager.index2config


def test_cuda_autocast_by_formula():
    """BERT-large, eager, 8 × 128: what is saved for backward in half precision, and the copies of the weights."""
    width, square, layers = 8 * 128 * 1024, 8 * 16 * 128 * 128, 24  # elements
    saved = activations(attention="eager") - activations(attention="eager", precision="fp16")
    # Each layer, in bytes: queries, keys and values; the context; the input of the feed-forward layer; gelu's
    # input and output, four times as wide. But the layer's input, saved once in fp32, is now copied three times.
    layer = 2 * width * (3 + 1 + 1 + 2 * 4) + (4 - 3 * 2) * width
    probabilities = 2 * square  # behind their dropout; softmax's own output stays fp32
    matrices = 2 * (layers * 12 + 1) * 1024**2
    assert saved == pytest.approx(layers * (layer + probabilities) - matrices, rel=0.05)


@pytest.mark.parametrize(
    "reads", [lambda x: x[x > 0].sum(), lambda x: x * 2 if x.mean() > 0 else x], ids=["sizes", "values"]
)
def test_a_forward_that_needs_data_is_refused_by_name(reads):
    class Picky(torch.nn.Linear):
        def forward(self, x):
            return reads(super().forward(x))

    def step(model, optimizer, inputs):
        model(inputs["x"]).sum().backward()

    with pytest.raises(
        ValueError, match=r"Picky needs the values of a tensor \(aten.*Run this one, with measure.memory"
    ):
        predict.step_memory(lambda: Picky(8, 8), step=step, inputs={"x": torch.zeros(4, 8)})


def test_memory_out_of_sight_is_refused():
    with pytest.raises(ValueError, match="recurrent modules.*not predicted"):
        predict.step_memory(lambda: torch.nn.LSTM(8, 8), step=plain_step, inputs=ROWS, optimizer="sgd")


def test_experts_chosen_by_value_are_refused():
    settings = transformers.MixtralConfig(
        vocab_size=2000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, pad_token_id=0, experts_implementation="eager",
    )  # fmt: skip
    with pytest.raises(ValueError, match="MixtralForSequenceClassification needs the values of a tensor"):
        predict.step_memory(settings, 2, 16)


def reserved(*requests, room=None):
    """Bytes reserved after requests: a size asked for, or the place of an earlier one, below zero, to free."""
    allocator = predict.allocator.Allocator(room)
    for place, request in enumerate(requests):
        allocator.allocate(place, request) if request > 0 else allocator.free(-request - 1)
    return allocator.reserved


MiB = 2**20


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ((1,), 2 * MiB),  # small blocks share a segment of 2 MiB
        ((1, MiB - 512), 2 * MiB),
        ((MiB, MiB, 1), 4 * MiB),
        ((MiB + 1,), 20 * MiB),  # up to 10 MiB they share one of 20
        ((9 * MiB, 9 * MiB, 2 * MiB), 20 * MiB),
        ((9 * MiB, 9 * MiB, 2 * MiB + 1), 40 * MiB),
        ((10 * MiB,), 10 * MiB),  # larger ones have their own, of whole 2 MiB
        ((33 * MiB,), 34 * MiB),
        ((40 * MiB, -1, 30 * MiB, 10 * MiB), 40 * MiB),  # split, and used again
        ((40 * MiB, -1, 39 * MiB, 1 * MiB), 42 * MiB),  # a rest of 1 MiB is not split off
        ((30 * MiB, 30 * MiB, -1, -2, 50 * MiB), 110 * MiB),  # two segments do not become one
        ((16 * MiB, -1, 6 * MiB, 6 * MiB, -3, -4, 16 * MiB), 16 * MiB),  # neighbours in one do
    ],
)
def test_the_allocator_reserves_as_documented(requests, expected):
    assert reserved(*requests) == expected


def test_a_full_allocator_returns_what_is_wholly_free():
    assert reserved(30 * MiB, 30 * MiB, -1, -2, 50 * MiB, room=60 * MiB) == 50 * MiB
    with pytest.raises(torch.OutOfMemoryError):
        reserved(30 * MiB, 30 * MiB, -1, 50 * MiB, room=60 * MiB)


def test_the_three_totals_of_a_card():
    report = predict.step_memory("bert-large-uncased", 32, 128, card="T4")
    assert report.peak < report.allocated <= report.reserved < report.card_bytes
    assert sum(report.card_parts.values()) == report.card_bytes and min(report.card_parts.values()) > 0
    assert report.card_parts["CUDA context"] == predict.context(None) == predict.allocator.CONTEXT
    assert predict.context(machine.gpu("H100 HBM3")) >= 789 * 2**20  # what one held after a hundred steps
    assert report.fits and not predict.step_memory("bert-large-uncased", 32, 256, card="T4").fits
    assert predict.step_memory("bert-large-uncased", 32, 128, card="11.5 GiB").fits
    assert not predict.step_memory("bert-large-uncased", 32, 128, card="10.8 GiB").fits


def test_modules_sum_to_the_peak():
    report = predict.step_memory("bert-large-uncased", 32, 128)
    assert sum(report.modules.values()) == report.peak
    assert list(report.modules)[0] == "bert.encoder.layer.*.intermediate.dense"


@pytest.mark.parametrize(
    ("card", "precision", "padded", "kernel"),
    [
        ("T4", "fp16", False, "efficient"),
        ("T4", "fp32", True, "efficient"),
        ("T4", "bf16", False, "math"),  # no bf16 in hardware
        ("A100", "fp32", False, "efficient"),
        ("A100", "bf16", False, "flash"),
        ("A100", "bf16", True, "efficient"),  # flash takes no mask
        ("6 GiB", "bf16", False, "efficient"),
    ],
)
def test_attention_is_the_cards_choice(card, precision, padded, kernel, monkeypatch):
    chosen, original = set(), predict.rules.attention_kernel
    monkeypatch.setattr(predict.rules, "attention_kernel", lambda *a: chosen.add(original(*a)) or original(*a))
    card = "NVIDIA A100-SXM4-40GB" if card == "A100" else card
    predict.step_memory("tiny", 2, 128, precision=precision, padded=padded, attention="sdpa", card=card)
    assert chosen == {kernel}


class Attention(torch.nn.Linear):
    """Scaled dot product attention of three views of a projection, after `change`."""

    def __init__(self, change):
        super().__init__(64, 192)
        self.change = change

    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(*self.change(*super().forward(x).chunk(3, -1)))


def plain_step(model, optimizer, inputs):
    model(**inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: (q[0], k[0], v[0]),
        lambda q, k, v: (q, k, v[..., :32]),
        lambda q, k, v: (q, k[:1], v[:1]),
        lambda q, k, v: (q, k, v, torch.ones(4, 128, 128, dtype=torch.bool)),
    ],
    ids=["three dimensions", "narrower values", "one key for all", "mask of three dimensions"],
)
def test_attention_that_flash_does_not_take_is_computed_in_parts(change):
    batch = {"x": torch.randn(4, 4, 128, 64)}
    model, choices = Attention(change), dict(step=plain_step, inputs=batch, optimizer="sgd")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    real = truth.profiled_peak(lambda: plain_step(model, optimizer, batch), model, batch)
    predicted = predict.step_memory(lambda: Attention(change), device="cpu", **choices).peak
    assert abs(predicted / real - 1) <= 0.01, f"predicted {predicted:,}, torch.profiler {real:,} bytes"


@pytest.mark.parametrize("card", [None, "T4", "NVIDIA A100-SXM4-40GB"])
def test_a_mask_that_no_kernel_takes(card):
    """T5's in transformers 5.17: its last dimension is not contiguous. An H100 computed its attention in parts."""
    gpu, query = card and machine.gpu(card), torch.empty(2, 4, 16, 64)
    mask = torch.empty(16, 16, 4).permute(2, 0, 1)[None]
    assert predict.rules.attention_kernel(gpu, query, mask, False, query) == "math"
    assert predict.rules.attention_kernel(gpu, query, mask.contiguous(), False, query) == "efficient"


@pytest.mark.parametrize("card", [None, "T4", "NVIDIA A100-SXM4-40GB"])
def test_three_dimensions_on_cuda_are_computed_in_parts(card):
    def peak(change):
        batch = {"x": torch.randn(4, 4, 128, 64)}
        return predict.step_memory(
            lambda: Attention(change), step=plain_step, inputs=batch, optimizer="sgd", card=card
        ).peak

    assert peak(lambda *qkv: [t.flatten(0, 1) for t in qkv]) > peak(lambda *qkv: qkv)


def linear():
    return torch.nn.Linear(256, 256)


ROWS = {"input": torch.zeros(4, 256)}


def test_a_copy_of_the_weights_that_only_lists_touch_is_counted():
    copies = []

    def step(model, optimizer, inputs):
        plain_step(model, optimizer, inputs)
        with torch.no_grad():
            torch._foreach_lerp_(list(copies[0].parameters()), list(model.parameters()), 0.1)

    choices = dict(inputs=ROWS, optimizer="sgd", device="cpu")
    plain = predict.step_memory(linear, step=plain_step, **choices).peak
    kept = predict.step_memory(linear, step=step, prepare=lambda model: copies.append(copy.deepcopy(model)), **choices)
    assert kept.peak - plain == 4 * (256 * 256 + 256)


def test_a_step_that_depends_on_a_value_is_refused():
    def step(model, optimizer, inputs):
        loss = model(**inputs).sum()
        if torch.isfinite(loss):
            loss.backward()

    with pytest.raises(ValueError, match="the step needs the values of a tensor"):
        predict.step_memory(linear, step=step, inputs=ROWS, optimizer="sgd")


def test_an_optimizer_that_divides_by_one_less_its_count():
    assert predict.step_memory(
        linear, step=plain_step, inputs=ROWS, optimizer=lambda model: torch.optim.NAdam(model.parameters())
    ).peak


def test_a_tokenizers_batch_can_be_moved_in_a_step():
    def step(model, optimizer, inputs):
        plain_step(model, optimizer, inputs.to("cuda"))

    assert predict.step_memory(linear, step=step, inputs=transformers.BatchEncoding(ROWS), optimizer="sgd").peak


def test_xlnet_has_no_longest_text():
    assert models.positions(transformers.XLNetConfig()) is None


def test_a_module_made_before_is_refused_and_left_as_it_was():
    model = linear()
    with pytest.raises(ValueError, match="model returned a module that was there before; accepted: a function"):
        predict.step_memory(lambda: model, step=plain_step, inputs=ROWS, optimizer="sgd")
    assert model.weight.grad is None and not model._forward_hooks


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("fails", [False, True], ids=["to its end", "with an error"])
def test_what_a_prediction_replaces_is_restored(device, fails, monkeypatch):
    """The patches, and the two things that no dotted name says: bitsandbytes' overrides and a model's TorchScript."""
    from bitsandbytes.optim import GlobalOptimManager
    from transformers.models.bert import modeling_bert

    scripted = torch.jit.script(torch.nn.functional.relu)
    scripted._torchdynamo_inline = torch.nn.functional.relu
    monkeypatch.setattr(modeling_bert, "scripted", scripted, raising=False)
    GlobalOptimManager.get_instance()

    def targets():
        found = {one.target: pkgutil.resolve_name(one.target) for one in predict.patches.PATCHES}
        return found | {"overrides": GlobalOptimManager._instance, "TorchScript": modeling_bert.scripted}

    def look(model):
        during.update(targets())
        assert not fails, "on purpose"

    before, during = targets(), {}
    with pytest.raises(AssertionError, match="on purpose") if fails else contextlib.nullcontext():
        predict.step_memory("tiny", 1, 16, device=device, prepare=look)
    replaced = {one.target for one in predict.patches.PATCHES if device in one.devices} | {"overrides", "TorchScript"}
    assert {name for name in before if during[name] is not before[name]} == replaced
    assert targets() == before
    assert all(one.reason and one.versions for one in predict.patches.PATCHES)


def test_predictions_of_several_threads_leave_torch_as_it_was():
    found, before = [], (torch.nn.functional.dropout, torch.Tensor.to, torch.amp.GradScaler.__init__)

    def predicted(delay):
        time.sleep(delay)
        found.append(predict.step_memory("bert-base-uncased", 1, 16).peak)

    threads = [threading.Thread(target=predicted, args=(0.05 * number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert before == (torch.nn.functional.dropout, torch.Tensor.to, torch.amp.GradScaler.__init__)
    assert len(found) == 3 and len(set(found)) == 1


def test_a_view_that_is_known_lies_where_its_own_tensor_does():
    """What an operation gives is remembered for tensors at any place of a storage, as the chunks of a decoder's are."""
    from tutorial_utils.predict.fake import Shapes

    with Shapes():
        whole = torch.empty(8, 4)
        for start in (4, 6, 0):
            part = whole[start : start + 2]
            assert part.t().storage_offset() == 4 * start
            assert part.as_strided((2,), (1,), 3).storage_offset() == 3
            assert part.t()[1:].storage_offset() == 4 * start + 1
