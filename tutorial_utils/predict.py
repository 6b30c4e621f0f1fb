"""What would this step cost on a GPU that is not here? `step_memory` runs it under fake tensors.

Every operation of the forward pass, the backward pass and the optimizer is executed with shapes
only: nothing is allocated or computed. `measure.Tracker` follows the storages as in a real run.
"""

import gc
import sys
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch._subclasses import FakeTensorMode

from . import measure, models

ARCHITECTURES = ("bert", "deberta-v2")
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def step_memory(
    model,
    batch: int,
    length: int,
    *,
    optimizer: str = "adamw",
    attention: str | None = None,
    padded: bool = False,
    accumulate: int = 1,
    device: str = "cuda",
    card: int | None = None,
    num_labels: int = 2,
) -> measure.Memory:
    """The memory of one fp32 training step of a sequence classifier, in steady state.

    model: a name of facts/models.toml or a transformers configuration, of BERT or DeBERTa-v2.
    batch, length: of one micro-batch; padded: whether the batch holds padding, by which
    transformers and CUDA choose the attention kernel. accumulate: micro-batches a step; the last
    one is executed, which is the most expensive, since it meets the gradients of the others.
    optimizer: "adamw" or "sgd" with torch's default arguments for the device ("foreach" on CUDA).
    device: "cuda" or "cpu"; they save different tensors. card: limit in bytes, as in
    `measure.memory`: torch.OutOfMemoryError where the step does not fit.
    Raises ValueError for what it does not cover.
    """
    settings = models.config(model, num_labels) if isinstance(model, str) else model
    _check(settings, batch, length, optimizer, accumulate, device)
    models.check_attention(settings, attention)
    with FakeTensorMode(), ExitStack() as stack:
        if device == "cuda":
            stack.enter_context(_cuda_semantics())
        if gc.isenabled():  # a fifth of the time, for nothing: what dies here dies by its reference count
            gc.disable()
            stack.callback(gc.enable)
        network = models.untrained(settings, attention).train()
        stack.enter_context(_without_torchscript(network))
        foreach = device == "cuda"  # torch's own default there; it would not choose it for fake tensors
        chosen = OPTIMIZERS[optimizer](network.parameters(), lr=1e-3, foreach=foreach)
        for parameter in network.parameters():
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
        with measure.Tracker(network, chosen, [inputs, labels], card) as tracker:
            logits = network(**inputs).logits
            loss = torch.nn.functional.cross_entropy(logits, labels)
            (loss / accumulate if accumulate > 1 else loss).backward()
            del logits, loss
            chosen.step()
            chosen.zero_grad()
    return tracker.report()


def _check(settings, batch, length, optimizer, accumulate, device):
    if settings.model_type not in ARCHITECTURES:
        raise ValueError(f"architecture was {settings.model_type!r}; accepted: {', '.join(ARCHITECTURES)}")
    for name, value in (("batch", batch), ("length", length), ("accumulate", accumulate)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} was {value!r}; accepted: a whole number, 1 or more")
    longest = models.positions(settings)
    if longest is not None and length > longest:
        raise ValueError(f"length was {length}; accepted: up to {longest}, the positions this model has")
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer was {optimizer!r}; accepted: {', '.join(OPTIMIZERS)}")
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
    """Send dropout and scaled-dot-product attention to the operators that CUDA chooses.

    Functions are replaced, not a mode entered: a mode would not be in force while checkpointing
    computes the forward pass again.
    """
    dropout = torch.nn.functional.dropout

    def cuda_dropout(input, p=0.5, training=True, inplace=False):
        if not training or p == 0 or inplace:
            return dropout(input, p, training, inplace)
        return torch.native_dropout(input, p, True)[0]  # a mask of one byte an element

    def cuda_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
        # In fp32 no card has a flash kernel: memory-efficient attention, masked or not.
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, _bias(attn_mask, query, key), True, dropout_p, is_causal, scale=scale
        )[0]

    with (
        patch.object(torch.nn.functional, "dropout", cuda_dropout),
        patch.object(torch.nn.functional, "scaled_dot_product_attention", cuda_attention),
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
    length = mask.shape[-1]
    if length % 16:
        mask = torch.nn.functional.pad(mask, (0, 16 - length % 16))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
