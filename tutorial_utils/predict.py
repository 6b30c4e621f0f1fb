"""What would this step cost on a GPU that is not here? `step_memory` runs it under fake tensors.

Every operation of the forward pass, the backward pass and the optimizer is executed with shapes
only: nothing is allocated or computed. `measure.Tracker` follows the storages as in a real run.
"""

import gc
import importlib.util
import sys
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily

from . import measure, models

ARCHITECTURES = ("bert", "deberta-v2")
OPTIMIZERS = ("adamw", "sgd", "adamw8bit")
PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def step_memory(
    model,
    batch: int,
    length: int,
    *,
    prepare: Callable | None = None,
    optimizer: str | Callable = "adamw",
    precision: str = "fp32",
    attention: str | None = None,
    padded: bool = False,
    accumulate: int = 1,
    device: str = "cuda",
    card: int | None = None,
    num_labels: int = 2,
) -> measure.Memory:
    """The memory of one training step of a sequence classifier, in steady state.

    model: a name of facts/models.toml or a transformers configuration, of BERT or DeBERTa-v2.
    batch, length: of one micro-batch; padded: whether the batch holds padding, by which
    transformers and CUDA choose the attention kernel. accumulate: micro-batches a step; the last
    one is executed, which is the most expensive, since it meets the gradients of the others.
    prepare: a function of the model, applied before the step: freezing, checkpointing.
    optimizer: "adamw", "sgd" or "adamw8bit" (bitsandbytes) over what requires gradients, or a
    function of the model that returns one; torch's default for the device is taken ("foreach" on
    CUDA) where it does not say. precision: "fp32", "bf16" (autocast) or "fp16" (with GradScaler);
    weights, gradients and state stay fp32.
    device: "cuda" or "cpu"; they save different tensors. card: limit in bytes, as in
    `measure.memory`: torch.OutOfMemoryError where the step does not fit.
    Raises ValueError for what it does not cover, ImportError where bitsandbytes is needed and missing.
    """
    settings = models.config(model, num_labels) if isinstance(model, str) else model
    _check(settings, batch, length, optimizer, precision, accumulate, device)
    models.check_attention(settings, attention)
    # Not only fake inputs: bitsandbytes' table of 8-bit values is computed when it is constructed.
    with FakeTensorMode(allow_non_fake_inputs=True), ExitStack() as stack:
        if device == "cuda":
            stack.enter_context(_cuda_semantics())
        if gc.isenabled():  # a fifth of the time, for nothing: what dies here dies by its reference count
            gc.disable()
            stack.callback(gc.enable)
        stack.enter_context(_own_overrides())
        network = models.untrained(settings, attention).train()
        stack.enter_context(_without_torchscript(network))
        if prepare is not None:
            prepare(network)
        chosen = _optimizer(optimizer, network, device)
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        chosen.step()  # the state of the steps before
        if accumulate == 1:  # else the micro-batches before have left theirs
            chosen.zero_grad()
        inputs = {
            "input_ids": torch.zeros(batch, length, dtype=torch.long),
            "token_type_ids": torch.zeros(batch, length, dtype=torch.long),
            # A real run drops a mask of ones; a fake one cannot look into it.
            "attention_mask": torch.ones(batch, length, dtype=torch.long) if padded else None,
        }
        labels = torch.zeros(batch, dtype=torch.long)
        scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
        scaler._maybe_opt_step = lambda optimizer, *_: optimizer.step()  # it would look for infinities
        autocast = torch.autocast("cpu", PRECISIONS[precision], enabled=precision != "fp32")
        with measure.Tracker(network, chosen, [inputs, labels], card, inside_kernels=device == "cpu") as tracker:
            with autocast:
                logits = network(**inputs).logits
                loss = torch.nn.functional.cross_entropy(logits, labels)
            scaler.scale(loss / accumulate if accumulate > 1 else loss).backward()
            del logits, loss
            scaler.step(chosen)
            scaler.update()
            chosen.zero_grad()
    return tracker.report()


def _optimizer(optimizer, network, device):
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    with unset_fake_temporarily():
        if callable(optimizer):
            chosen = optimizer(network)
        elif optimizer == "adamw8bit":
            import bitsandbytes

            chosen = bitsandbytes.optim.AdamW8bit(trained, lr=1e-3)
        else:
            chosen = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer](trained, lr=1e-3)
    for group in chosen.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = device == "cuda"  # torch's own default there; it would not choose it for fake tensors
    return chosen


@contextmanager
def _own_overrides():
    """Keep bitsandbytes' process-wide overrides away from this prediction, and its own from others.

    They are kept by a parameter's place in the optimizer, and apply to every optimizer that comes later.
    """

    def manager():
        module = sys.modules.get("bitsandbytes")  # the prediction itself may be the first to import it
        return vars(module.optim.GlobalOptimManager.get_instance()) if module else {}

    def none():
        return {"pid2config": {}, "index2config": {}, "module_weight_config_triple": []}

    kept = none() | {name: value for name, value in manager().items() if name in none()}
    manager().update(none())
    try:
        yield
    finally:
        manager().update(kept)


def _check(settings, batch, length, optimizer, precision, accumulate, device):
    if settings.model_type not in ARCHITECTURES:
        raise ValueError(f"architecture was {settings.model_type!r}; accepted: {', '.join(ARCHITECTURES)}")
    for name, value in (("batch", batch), ("length", length), ("accumulate", accumulate)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} was {value!r}; accepted: a whole number, 1 or more")
    longest = models.positions(settings)
    if longest is not None and length > longest:
        raise ValueError(f"length was {length}; accepted: up to {longest}, the positions this model has")
    if not callable(optimizer) and optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer was {optimizer!r}; accepted: {', '.join(OPTIMIZERS)}, or a function of the model")
    if optimizer == "adamw8bit" and importlib.util.find_spec("bitsandbytes") is None:
        raise ImportError("adamw8bit is bitsandbytes' optimizer, which is not installed: pip install bitsandbytes")
    if precision not in PRECISIONS:
        raise ValueError(f"precision was {precision!r}; accepted: {', '.join(PRECISIONS)}")
    if device not in ("cuda", "cpu"):
        raise ValueError(f'device was {device!r}; accepted: "cuda" or "cpu"')


@contextmanager
def _without_torchscript(network):
    """Run the Python that scripted functions were made from: TorchScript cannot see fake tensors.

    DeBERTa has such functions in the older of the supported transformers.
    """
    with ExitStack() as stack:
        for module in {sys.modules[type(part).__module__] for part in network.modules()}:
            for name, function in list(vars(module).items()):
                if isinstance(function, torch.jit.ScriptFunction):
                    stack.enter_context(patch.object(module, name, function._torchdynamo_inline))
        yield


@contextmanager
def _cuda_semantics():
    """Send operations to the operators and types that CUDA chooses.

    Functions are replaced, not a mode entered: a mode would not be in force while checkpointing
    computes the forward pass again.
    """
    functions = torch.nn.functional
    dropout, layer_norm, softmax, cross_entropy = (
        functions.dropout, functions.layer_norm, functions.softmax, functions.cross_entropy)  # fmt: skip

    def cuda_dropout(input, p=0.5, training=True, inplace=False):
        if not training or p == 0 or inplace:
            return dropout(input, p, training, inplace)
        return torch.native_dropout(input, p, True)[0]  # a mask of one byte an element

    def cuda_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
        # As a T4 does, which has no flash kernel: memory-efficient attention, masked or not.
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, _bias(attn_mask, query, key), True, dropout_p, is_causal, scale=scale
        )[0]

    # CUDA's autocast computes these in fp32, a CPU's does not. Source: AT_FORALL_FP32 in ATen's autocast_mode.h.
    def cuda_layer_norm(input, *arguments, **options):
        return layer_norm(input.float(), *arguments, **options)

    def cuda_softmax(input, dim=None, _stacklevel=3, dtype=None):
        if input.dtype == torch.float16:  # one kernel reads halves and writes floats
            return torch.ops.aten._softmax(input, dim, True)
        return softmax(input.float(), dim, dtype=dtype)

    def cuda_cross_entropy(input, *arguments, **options):
        return cross_entropy(input.float(), *arguments, **options)

    with (
        patch.object(functions, "dropout", cuda_dropout),
        patch.object(functions, "scaled_dot_product_attention", cuda_attention),
        patch.object(functions, "layer_norm", cuda_layer_norm),
        patch.object(functions, "softmax", cuda_softmax),
        patch.object(functions, "cross_entropy", cuda_cross_entropy),
    ):
        yield


def _bias(mask, query, key):
    """The additive bias that CUDA makes of a mask: batch × heads × length × length, rows aligned.

    Source: convert_boolean_attn_mask and preprocess_mask in ATen's transformers/attention.cpp.
    """
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    mask = mask.to(query.dtype)
    length = mask.shape[-1]
    if length % 16:
        mask = torch.nn.functional.pad(mask, (0, 16 - length % 16))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
