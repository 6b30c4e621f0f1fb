"""The prediction against a real run on a CPU, its CUDA semantics, its refusals, its speed."""

import itertools
import sys
import time

import pytest
import torch
import truth
from truth import SMALL

from tutorial_utils import measure, models, predict

GiB = 2**30
ARCHITECTURES = (("bert-base-uncased", "eager"), ("bert-base-uncased", "sdpa"), ("deberta-v3-base", None))
PLAIN = [
    dict(name=name, attention=attention, padded=padded, optimizer=optimizer, accumulate=accumulate)
    for name, attention in ARCHITECTURES
    for padded, optimizer, accumulate in itertools.product((False, True), ("adamw", "sgd"), (1, 3))
]
# Two shapes: the peak at the turn from forward to backward, and in the optimizer's step.
TECHNIQUES = [
    dict(name=name, attention=attention, batch=batch, length=length, padded=length > 28, **technique)
    for name, attention in ARCHITECTURES
    for batch, length in ((4, 64), (1, 20))
    for technique in (
        dict(precision="bf16"),
        dict(precision="fp16", optimizer="sgd"),
        dict(precision="fp16", accumulate=2),
        dict(optimizer="adamw8bit"),
        dict(prepare=truth.checkpoint),
        dict(prepare=truth.freeze),
        dict(prepare=truth.checkpoint_and_freeze, precision="bf16", accumulate=2),
        dict(prepare=truth.freeze, optimizer="adamw8bit", precision="fp16"),
    )
]


@pytest.mark.parametrize(
    "case",
    PLAIN + TECHNIQUES,
    ids=lambda case: "-".join(str(getattr(value, "__name__", value)) for value in case.values()),
)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler:UserWarning")
def test_prediction_for_a_cpu_equals_the_profiler(case):
    step = dict(batch=8, length=128, prepare=None, optimizer="adamw", precision="fp32", accumulate=1) | case
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


def test_bert_large_is_traced_in_four_seconds():
    predict.step_memory("bert-base-uncased", 1, 16)  # imports
    started = time.perf_counter()
    predict.step_memory("bert-large-uncased", 32, 128)
    seconds = time.perf_counter() - started
    assert seconds <= 4, f"tracing took {seconds:.1f} s"


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (dict(model="bert-huge"), "model was 'bert-huge'; accepted: .*bert-large-uncased"),
        (dict(batch=-1), "batch was -1; accepted: a whole number, 1 or more"),
        (dict(batch=0), "batch was 0"),
        (dict(length=513), "length was 513; accepted: up to 512"),
        (dict(accumulate=0), "accumulate was 0"),
        (dict(optimizer="lion"), "optimizer was 'lion'; accepted: adamw, sgd, adamw8bit, or a function"),
        (dict(precision="fp8"), "precision was 'fp8'; accepted: fp32, fp16, bf16"),
        (dict(device="tpu"), "device was 'tpu'"),
        (dict(attention="flash"), "attention was 'flash'"),
        (dict(model="deberta-v3-base", attention="sdpa"), "transformers has no SDPA attention for deberta-v2"),
    ],
)
def test_refusals_name_what_was_given_and_what_is_accepted(choices, message):
    started = time.perf_counter()
    with pytest.raises(ValueError, match=message):
        predict.step_memory(**({"model": "bert-large-uncased", "batch": 8, "length": 128} | choices))
    assert time.perf_counter() - started < 1, "the error came after long work"


def test_without_bitsandbytes_its_optimizer_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert predict.step_memory("bert-base-uncased", 1, 16).peak
    with pytest.raises(ImportError, match="adamw8bit is bitsandbytes' optimizer, which is not installed"):
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


def test_an_architecture_it_does_not_cover_is_refused():
    from transformers import GPT2Config

    with pytest.raises(ValueError, match="architecture was 'gpt2'; accepted: bert, deberta-v2"):
        predict.step_memory(GPT2Config(), 1, 8)
