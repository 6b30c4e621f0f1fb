"""Products of halves on a CPU that emulates them: fp32's, rounded; torch's own for times, and when it is over."""

import contextlib
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from test_faults import Interrupt

from notebooks import ROOT
from tutorial_utils import kernels, measure, models

HALVES = torch.bfloat16, torch.float16


@pytest.fixture
def asked(monkeypatch):
    """The types of the products that the course computed."""
    kinds, rounded = [], kernels._rounded
    monkeypatch.setattr(
        kernels, "_rounded", lambda *given, **more: kinds.append(given[-1].dtype) or rounded(*given, **more)
    )
    kernels.multiply_in_fp32()
    return kinds


def products(kind) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    left, right, more = (torch.randn(3, *shape, generator=random) for shape in ((40, 64), (64, 48), (40, 48)))
    left, right, more = (tensor.to(kind) for tensor in (left, right, more))
    return {
        "mm": left[0] @ right[0],
        "addmm": torch.addmm(more[0], left[0], right[0], beta=0.5, alpha=2),
        "bmm": left @ right,
        "baddbmm": torch.baddbmm(more, left, right, beta=0.5, alpha=2),
    }


@pytest.mark.parametrize("kind", [*HALVES, torch.float32, torch.float64])
def test_a_product_is_as_torchs(asked, kind):
    """Of halves to one rounding: the order of the sums is another. Of others to the bit."""
    ours = products(kind)
    assert list(ours) == list(kernels.PRODUCTS) and asked == [kind] * 4
    with kernels.of_torch():
        theirs = products(kind)
    assert len(asked) == 4, "torch's own were asked for"
    for name, product in theirs.items():
        assert ours[name].dtype == kind
        step = torch.finfo(kind).eps if kind in HALVES else 0.0
        torch.testing.assert_close(
            ours[name], product, rtol=step, atol=step / 8, msg=lambda m, name=name: f"{name}: {m}"
        )
    torch.ones(2, 2) @ torch.ones(2, 2)
    assert len(asked) == 5, "afterwards they are the course's again"


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("place", [0, 1])
def test_factors_of_two_types_are_refused_as_by_torch(asked, half, place):
    factors = [torch.ones(4, 4), torch.ones(4, 4)]
    factors[place] = factors[place].to(half)
    for product in (torch.mm, lambda *both: torch.addmm(torch.ones(4), *both)):
        with pytest.raises(RuntimeError, match="dtype"):
            product(*factors)
    with pytest.raises(RuntimeError, match="dtype"):
        torch.addmm(torch.ones(4), factors[place], factors[place])


@pytest.mark.parametrize("fails", [False, True])
def test_after_a_timing_they_are_the_courses_again(asked, fails):
    def step():
        torch.ones(2, 2) @ torch.ones(2, 2)
        assert not fails

    with contextlib.suppress(AssertionError):
        measure.timing({"step": step}, rounds=1)
    with kernels.of_torch(), kernels.of_torch():
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert not asked
    kernels.multiply_in_fp32()  # a second time: it is theirs already
    torch.ones(2, 2) @ torch.ones(2, 2)
    assert len(asked) == 1


@pytest.mark.parametrize("seconds", [0.02, 0.1, 0.3])
def test_an_interrupted_training_goes_on(asked, seconds):
    """An interrupt comes inside Python that C++ has called."""
    model = models.build("tiny").to(torch.bfloat16).eval()
    ids, started = torch.ones(4, 32, dtype=torch.long), time.perf_counter()

    def gradients():
        model.zero_grad()
        model(ids).logits.float().sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    expected = gradients()
    with pytest.raises(KeyboardInterrupt), Interrupt(seconds):
        while time.perf_counter() < started + 60:
            gradients()
    assert torch.equal(gradients(), expected)


def test_training_in_halves_needs_what_it_needs(asked):
    """Memory, and gradients to their rounding: what is computed in fp32 is no tensor of the step."""
    model, texts = torch.nn.Linear(64, 64), torch.randn(32, 64, generator=torch.Generator().manual_seed(0))

    def step():
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(texts).float().square().mean()
        loss.backward()

    peak = measure.memory(step, model).peak
    gradient = model.weight.grad.clone()
    assert {*asked} == {torch.bfloat16} and len(asked) == 2
    with kernels.of_torch():
        assert measure.memory(step, model).peak == peak
    torch.testing.assert_close(model.weight.grad, gradient, rtol=2**-7, atol=1e-5)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert model(texts).dtype == torch.bfloat16 and len(asked) == 3


def test_graphs_that_torch_runs_multiply_so_too(asked):
    @torch.compile(backend="aot_eager")
    def product(left, right):
        return (left @ right).relu()

    left = torch.ones(4, 4, dtype=torch.bfloat16, requires_grad=True)
    product(left, left).sum().backward()
    assert left.grad.dtype == torch.bfloat16 and (left.grad == 8).all() and asked


def test_dynamo_makes_no_graph_of_it(asked):
    """Of the frames of torch.nn it makes none, from torch 2.15 on its own; what multiplies there is not the program."""

    def graphs():
        made = []

        def backend(graph, _):
            made.append(graph.code)
            return graph

        torch._dynamo.reset()
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        layer.compile(backend=backend)
        layer(torch.ones(2, 5, 16))
        return made

    ours = graphs()
    assert asked
    with kernels.of_torch():
        assert graphs() == ours


@pytest.mark.parametrize("time", [0.3, 57.3])
def test_a_lesson_begins_so_where_the_cpu_emulates_bf16(time):
    code = f"""
    import dataclasses
    from tutorial_utils import machine
    found = dataclasses.replace(machine.facts(), device="cpu", bf16_time={time})
    machine.facts = lambda: found
    machine.start()
    from tutorial_utils import kernels
    print("replaced:", len(kernels._replaced))
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True)
    assert f"replaced: {int(time > 3)}" in run.stdout, run.stdout + run.stderr
    assert "Overriding" not in run.stderr, "torch's warning that a kernel is replaced is expected, and no news"
    assert ("emulates bf16" in run.stdout) == (time > 3)
