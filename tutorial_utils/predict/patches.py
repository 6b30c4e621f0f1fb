"""What a prediction replaces, while it lasts: for the whole process, and put back at its end.

Functions are replaced, and no mode is entered: a mode would not be in force while checkpointing computes the forward
pass again. PATCHES are all that have a name before there is a model; `own_overrides` and `without_torchscript` follow
from what is imported and from the model. One test holds that all of them are put back.
"""

import functools
import pkgutil
import sys
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import patch

import torch

from . import rules

BOTH = ("cpu", "cuda")


@dataclass(frozen=True)
class Patch:
    """target: the dotted name of a function; by: what is called in its place, with the prediction's `Here`, the
    original and the arguments; reason: why; devices: for which it is done; versions: where the target is as expected.
    """

    target: str
    by: Callable
    reason: str
    devices: tuple[str, ...] = BOTH
    versions: str = "torch 2.10 to 2.15"


@dataclass
class Here:
    """What is predicted: for which GPU, or None, under which fake mode."""

    gpu: object
    fake: object


def _on_cpu(value):
    return "cpu" if isinstance(value, (str, torch.device)) and str(value).startswith("cuda") else value


def _to(_, original, tensor, *arguments, **options):
    return original(tensor, *map(_on_cpu, arguments), **{name: _on_cpu(value) for name, value in options.items()})


def _for_device(_, original, self, device="cuda", *arguments, device_type=None, **options):
    return original(self, _on_cpu(device_type or device), *arguments, **options)


def _swap(here, original, first, second):
    here.fake.fake_tensor_converter.meta_converter.tensor_memo.clear()
    return original(first, second)


def _graphs_only(_, original, model=None, **options):
    spec = getattr(sys.modules.get(getattr(model, "__module__", None)), "__spec__", None)
    if model is not None and not getattr(spec, "_initializing", False):  # no function of a package that is imported now
        others = {name: value for name, value in options.items() if name not in ("backend", "mode", "options")}
        options = others | {"backend": "aot_eager"}
    return original(model, **options)


_SAYS_CUDA, _BY_VALUE = "a reader's step may say cuda where torch has none", "it looks at the values of a tensor"
_IN_FULL = "CUDA's autocast computes it in fp32, a CPU's does not: AT_FORALL_FP32 in ATen's autocast_mode.h"
PATCHES = (
    Patch("torch.utils.swap_tensors", _swap, "the fake mode's weak references keep tensors from swapping"),
    Patch("torch.Tensor.to", _to, _SAYS_CUDA),
    Patch("torch.Tensor.cuda", lambda here, original, tensor, *_, **__: tensor, _SAYS_CUDA),
    Patch(
        "torch.compile", _graphs_only, "the graphs are followed, operation by operation; kernels of a compiler are not"
    ),
    Patch("torch.amp.autocast_mode.autocast.__init__", _for_device, _SAYS_CUDA),
    Patch("torch.amp.GradScaler.__init__", _for_device, _SAYS_CUDA),
    Patch(
        "torch.amp.GradScaler._maybe_opt_step",
        lambda here, original, self, optimizer, *_: optimizer.step(),
        f"{_BY_VALUE}: whether a gradient is infinite",
    ),
    Patch(
        "transformers.masking_utils.find_packed_sequence_indices",
        lambda *_: None,
        f"{_BY_VALUE}: positions, for packed texts",
        versions="transformers 5.0 to 5.24",
    ),
    Patch(
        "torch.nn.functional.scaled_dot_product_attention",
        rules.cpu_attention,
        "fake tensors do not choose the kernel that a CPU does",
        ("cpu",),
    ),
    Patch(
        "torch.nn.functional.scaled_dot_product_attention",
        rules.cuda_attention,
        "a CPU's dispatcher would choose a CPU's kernel",
        ("cuda",),
    ),
    Patch("torch.nn.functional.dropout", rules.cuda_dropout, "CUDA keeps a byte an element, a CPU a float", ("cuda",)),
    Patch("torch.nn.functional.softmax", rules.cuda_softmax, _IN_FULL, ("cuda",)),
    Patch("torch.nn.functional.cross_entropy", rules.cuda_cross_entropy, _IN_FULL, ("cuda",)),
    Patch("torch.nn.functional.layer_norm", rules.in_full, _IN_FULL, ("cuda",)),
    Patch("torch.pow", rules.in_full, _IN_FULL, ("cuda",)),
)


@contextmanager
def applied(device: str, here: Here):
    with ExitStack() as stack:
        for one in PATCHES:
            if device in one.devices:
                original = pkgutil.resolve_name(one.target)
                stack.enter_context(patch(one.target, _function(one.by, here, original)))
        yield


def _function(by, here, original):
    @functools.wraps(original)
    def replaced(*arguments, **options):
        return by(here, original, *arguments, **options)

    return replaced


@contextmanager
def own_overrides():
    """Keep bitsandbytes' process-wide overrides away from this prediction, and its own from others."""

    def manager():  # the prediction itself may be the first to import it
        module = sys.modules.get("bitsandbytes")
        return module.optim.GlobalOptimManager if module else SimpleNamespace(_instance=None)

    kept, manager()._instance = manager()._instance, None
    try:
        yield
    finally:
        manager()._instance = kept


@contextmanager
def without_torchscript(network):
    """Run the Python of TorchScript functions, which cannot see fake tensors: DeBERTa's in the older transformers."""
    with ExitStack() as stack:
        for module in {sys.modules[type(part).__module__] for part in network.modules()}:
            for name, function in list(vars(module).items()):
                if isinstance(function, torch.jit.ScriptFunction):
                    stack.enter_context(patch.object(module, name, function._torchdynamo_inline))
        yield
