"""The prediction against a real run on a CPU, its CUDA semantics, its refusals, its speed."""

import itertools
import time

import pytest
import torch
from truth import SMALL, inputs, profiled_peak, train

from tutorial_utils import measure, models, predict

GiB = 2**30
CASES = [
    (*architecture, padded, optimizer, accumulate)
    for architecture in (("bert-base-uncased", "eager"), ("bert-base-uncased", "sdpa"), ("deberta-v3-base", None))
    for padded, optimizer, accumulate in itertools.product((False, True), ("adamw", "sgd"), (1, 3))
]


@pytest.mark.parametrize(("name", "attention", "padded", "optimizer", "accumulate"), CASES)
def test_prediction_for_a_cpu_equals_the_profiler(name, attention, padded, optimizer, accumulate):
    torch.manual_seed(0)
    model = models.build(name, 4, attention=attention, **SMALL)
    chosen, batch = predict.OPTIMIZERS[optimizer](model.parameters(), lr=1e-4), inputs(padded=padded)
    truth = profiled_peak(lambda: train(model, chosen, batch, accumulate), model, batch)
    predicted = predict.step_memory(
        models.config(name, 4, **SMALL), 8, 128, optimizer=optimizer, attention=attention, padded=padded,
        accumulate=accumulate, device="cpu",
    )  # fmt: skip
    assert abs(predicted.peak / truth - 1) <= 0.02, f"predicted {predicted.peak:,}, torch.profiler {truth:,} bytes"


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
        predict.step_memory("bert-large-uncased", 32, 128, card=4 * GiB)
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
        (dict(optimizer="lion"), "optimizer was 'lion'; accepted: adamw, sgd"),
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


def test_an_architecture_it_does_not_cover_is_refused():
    from transformers import GPT2Config

    with pytest.raises(ValueError, match="architecture was 'gpt2'; accepted: bert, deberta-v2"):
        predict.step_memory(GPT2Config(), 1, 8)
