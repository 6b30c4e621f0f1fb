import pytest
import torch
from stranger import Ratings, regressor
from torch.utils.data import DataLoader

from notebooks import copied, lesson, proof_fails
from tutorial_utils import measure

LESSON = lesson("05")
COPIED = copied(LESSON)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('{"use_reentrant": False, **options}', '{"use_reentrant": False, "preserve_rng_state": False, **options}'),
        ("use_reentrant=False, **options", "use_reentrant=False, preserve_rng_state=False, **options"),
        ("checkpoint(module, *inputs", "checkpoint(module, *[x.detach() for x in inputs]"),
        ("use_reentrant=False, **options", "use_reentrant=True, **options"),
        ("= number % every_n_layers == 0", "= False"),
        ("return checkpoint(module, *inputs, use_reentrant=False, **options)", "return module(*inputs)"),
    ],
    ids=[
        "random state not restored, transformers",
        "random state not restored, own module",
        "a lost gradient",
        "reentrant over data",
        "never switched on",
        "nothing recomputed",
    ],
)
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


def test_copied():
    """Another architecture, a regression: the same step with dropout on, in less memory, without a warning."""
    batch = next(iter(DataLoader(Ratings(64), batch_size=64)))

    def model_with(options):
        model = regressor(layers=4)
        if options:
            COPIED["checkpoint_layers"](model, **options)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def stepped(**options):
        model, optimizer = model_with(options)
        torch.manual_seed(3)
        loss = COPIED["train_step"](model, optimizer, batch)
        return [loss, *(parameter.detach() for parameter in model.parameters())]

    def peak(**options):
        model, optimizer = model_with(options)
        return measure.memory(lambda: COPIED["train_step"](model, optimizer, batch), model, optimizer, batch).peak

    plain = stepped()
    for options in ({"every_n_layers": 1}, {"every_n_layers": 2}):
        assert all(torch.equal(a, b) for a, b in zip(plain, stepped(**options), strict=True)), options
    assert peak(every_n_layers=1) < peak(every_n_layers=2) < peak()
    assert peak(every_n_layers=1) < 0.6 * peak()


def test_own_module_computed_twice():
    calls, layer = [], torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Tanh())
    layer[0].register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(4, 8)

    def gradient(run):
        layer.zero_grad()
        torch.manual_seed(0)
        run(x).sum().backward()
        return layer[0].weight.grad.clone()

    plain = gradient(layer)
    assert torch.equal(plain, gradient(lambda x: COPIED["checkpointed"](layer, x))) and len(calls) == 3
