"""What would this step cost on a GPU that is not here? `step_memory` runs it under fake tensors.

Every operation of the forward pass, the backward pass and the optimizer is executed with shapes
only: nothing is allocated or computed. `measure.Tracker` follows the storages as in a real run.
"""

import copy
import gc
import importlib.util
import inspect
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_map_only

from .. import kernels, machine, measure, models, names
from ..check import accept
from ..names import lora_targets
from . import patches, rules
from .allocator import add_card, context
from .fake import Shapes, follower, pack_4bit

__all__ = ["OPTIMIZERS", "PRECISIONS", "Prediction", "context", "lora_targets", "pack_4bit", "step_memory"]
MOST = 1_000_000  # of texts, tokens and the like: beyond it sizes in bytes overflow
OPTIMIZERS = ("adamw", "adamw8bit", "adafactor", "sgd")
PRECISIONS = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16, "bf16-pure": None}  # of autocast

_one_at_a_time = threading.RLock()  # functions of torch are replaced for the whole process


@dataclass
class Prediction(measure.Memory):
    """The cost of a step that did not run, in bytes: the fields of `measure.Memory`, and

    card_bytes: what the card must have, at most: `reserved` and the CUDA context; card_parts says what for.
    fits: whether the named card has that; seconds: what it took to know. None where the device is a CPU, or
    no card was named.
    """

    card_bytes: int | None = None
    card_parts: dict[str, int] = field(default_factory=dict)
    fits: bool | None = None
    seconds: float = 0.0


@measure.interrupted_later()
def step_memory(
    model,
    batch: int | None = None,
    length: int | None = None,
    *,
    optimizer: str | Callable | list = "adamw",
    precision: str = "fp32",
    attention: str | None = None,
    padded: bool = False,
    accumulate: int = 1,
    checkpointing: int = 0,
    freeze_layers: int = 0,
    lora: int = 0,
    prepare: Callable | None = None,
    loss: Callable | None = None,
    step: Callable | None = None,
    inputs: dict | None = None,
    num_labels: int = 2,
    device: str | machine.Machine = "cuda",
    card: str | int | None = None,
    limit: int | None = None,
) -> "Prediction | list[Prediction]":
    """The memory of one training step, in steady state. Nothing is allocated, downloaded or computed.

    model: a name of facts/models.toml or a transformers configuration, for a sequence classifier; or a
    function without arguments that returns any module.
    batch, length: of one micro-batch; padded: whether the batch holds padding, by which transformers and CUDA
    choose the attention kernel. inputs: the forward's arguments by name, as tensors, in their place.
    Of a mask that it is given nobody looks at the values: without padding, leave it out.
    Compiled modules run their graphs by PyTorch's own kernels, as the backend "aot_eager" does, whatever theirs is;
    after it all code of this process is compiled anew. From torch 2.11.
    accumulate: micro-batches a step; one is executed, and counted twice: the second is the most expensive, since it
    meets the gradients of the first, as all others do.
    optimizer: one of OPTIMIZERS over what requires gradients, or a function of the model that returns one; torch's
    default for the device is taken ("foreach" on CUDA) where it does not say. A list of them: a prediction for each,
    for little more than the time of one.
    precision: "fp32", "bf16" (autocast), "fp16" (autocast with GradScaler), or "bf16-pure" (the weights too).
    checkpointing: every how many layers; 0 is none. freeze_layers: the first so many, and what comes before them.
    lora: the rank of peft's adapters. prepare: a function of the model, for anything else before training.
    loss: loss(model, inputs) in place of the classifier's cross-entropy, in the step that is built.
    step: a reader's own step(model, optimizer, inputs) in place of the built one; "cuda" in it is understood.
    device: "cuda" or "cpu", which save different tensors; or this machine, as `machine.start` gives it, with its card.
    card: a GPU of facts/gpus.toml or a size such as "6 GiB", by which kernels are chosen and the verdict given; else
    memory-efficient attention, which every card has, and no buffers that depend on the number of multiprocessors.
    limit: on tensor memory in bytes, as `card` in `measure.memory`: torch.OutOfMemoryError where it is passed.
    Raises ValueError for what it does not cover, ImportError where bitsandbytes or peft is needed and missing.
    """
    from transformers import PretrainedConfig

    started = time.perf_counter()
    if isinstance(device, machine.Machine):
        card, device = card or machine.this_gpu(), device.device
    gpu = None if card is None else machine.gpu(card)
    settings = models.config(model, num_labels) if isinstance(model, str) else model
    sizes = dict(accumulate=accumulate, checkpointing=checkpointing, freeze_layers=freeze_layers, lora=lora)
    names = {"precision": precision, "device": device}
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    known = isinstance(settings, PretrainedConfig) or callable(settings) and not isinstance(settings, torch.nn.Module)
    accept(known, "model", model, "a name, a configuration, or a function that returns a module")
    alone = step is None and limit is None or len(optimizers) == 1
    accept(optimizers and alone, "optimizer", optimizer, "one, or a list for the step that is built, without a limit")
    for one in optimizers:
        known = one in OPTIMIZERS if isinstance(one, str) else callable(one) and not inspect.isclass(one)
        accept(known, "optimizer", optimizer, f"{', '.join(OPTIMIZERS)}, or a function of the model that makes one")
    for name, given in (("prepare", prepare), ("loss", loss), ("step", step)):
        accept(given is None or callable(given), name, given, "a function")
    known = inputs is None or isinstance(inputs, Mapping) and ("labels" in inputs if step is None else inputs)
    accept(known, "inputs", inputs, "the forward's arguments by name, and the labels for the step that is built")
    accept(type(padded) is bool, "padded", padded, "True or False")
    accept(limit is None or type(limit) is int and limit >= 1, "limit", limit, "bytes, 1 or more")
    _check(settings, sizes | ({"batch": batch, "length": length} if inputs is None else {}), names, optimizers, lora)
    if step is not None and (accumulate > 1 or PRECISIONS[precision] is not None):
        raise ValueError("accumulate and precision say what the built step does; a step of your own does it itself")
    with _one_at_a_time, Shapes() as fake, ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        # A copy asks whether there is data; what wraps a module, for the hooks of a tracker.
        warnings.filterwarnings("ignore", "Accessing the data pointer|Using `torch.compile")
        if gc.isenabled():  # a fifth of the time, for nothing: what dies here dies by its reference count
            gc.disable()
            stack.callback(gc.enable)
        stack.enter_context(patches.own_overrides())
        stack.enter_context(patches.applied(device, patches.Here(gpu, fake)))
        network = settings() if callable(settings) else models.untrained(settings, attention)
        accept(isinstance(network, torch.nn.Module), "what model returned", network, "a torch.nn.Module")
        network.train()
        if not all(isinstance(parameter, FakeTensor) for parameter in network.parameters()):
            raise ValueError("model returned a module that was there before; accepted: a function that makes it")
        stack.enter_context(patches.without_torchscript(network))
        network = _prepared(network, precision, checkpointing, freeze_layers, lora, prepare)
        if any(isinstance(module, torch.nn.RNNBase) for module in network.modules()):
            raise ValueError("model has recurrent modules, whose memory is in their kernels: not predicted")
        name = type(getattr(network, "get_base_model", lambda: network)()).__name__  # under peft
        network.register_forward_pre_hook(lambda *_: setattr(fake, "inside", name))
        network.register_forward_hook(lambda *_: setattr(fake, "inside", None), always_call=True)
        chosen = [_optimizer(one, network, device) for one in optimizers]
        in_hooks = any(parameter._post_accumulate_grad_hooks for parameter in network.parameters())
        accept(len(chosen) == 1 or not in_hooks, "optimizer", optimizer, "one, where it steps in the backward pass")
        if inputs is None:
            inputs = _text(network, batch, length, padded)
        inputs = copy.copy(inputs)  # a tokenizer's is no dict, and has .to
        inputs.update(tree_map_only(torch.Tensor, fake.from_tensor, dict(inputs)))
        if step is None:
            _make_states(network, chosen)
        held = rules.OnCuda(gpu) if device == "cuda" else kernels.on_cpu
        with follower(network, stack)(network, chosen[0], inputs, limit, held, fake.run) as tracker:
            if step is None:
                scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
                _pass(network, inputs, scaler, precision, accumulate, loss, tracker)
            else:
                step(network, chosen[0], inputs)
                tracker.restart()
                step(network, chosen[0], inputs)
        trackers = [tracker, *map(tracker.beside, chosen[1:])]
        for one, other in zip(chosen, trackers) if step is None else ():
            with other:
                scaler.step(one)
                scaler.update()
                # As zero_grad does, but the optimizers that follow still have them.
                other.freed(parameter.grad for group in one.param_groups for parameter in group["params"])
        results = [Prediction(**vars(one.report())) for one in trackers]
        for one, result in zip(trackers, results):
            if device == "cuda":
                add_card(result, one, gpu)
            result.seconds = time.perf_counter() - started
    return results if isinstance(optimizer, list) else results[0]


def _make_states(network, optimizers):
    """Of the steps before."""
    for optimizer in optimizers:
        for parameter in (one for one in network.parameters() if one.requires_grad):
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        optimizer.zero_grad()


def _pass(network, inputs, scaler, precision, accumulate, loss_of, tracker):
    again = accumulate > 1 and tracker.card is None  # a limit is held to operations that run
    for _ in range(1 if again else min(accumulate, 2)):
        with torch.autocast("cpu", PRECISIONS[precision], enabled=PRECISIONS[precision] is not None):
            loss, logits = (loss_of(network, inputs), None) if loss_of else _loss(network, inputs)
        scaler.scale(loss / accumulate if accumulate > 1 else loss).backward()
        del logits, loss
    if again:
        tracker.again()


def _loss(network, inputs):
    output = network(**{name: value for name, value in inputs.items() if name != "labels"})
    accept(hasattr(output, "logits"), "what the model returned", output, "its logits, or a step of your own")
    return torch.nn.functional.cross_entropy(output.logits, inputs["labels"]), output.logits


def _text(network, batch, length, padded):
    accepted = inspect.signature(getattr(network, "get_base_model", lambda: network)().forward).parameters
    names = [name for name in ("input_ids", "token_type_ids", "attention_mask") if name in accepted]
    text = {name: torch.ones(batch, length, dtype=torch.long) for name in names}
    if not padded and getattr(network, "_supports_sdpa", True):
        text["attention_mask"] = None  # a real run drops a mask of ones; a fake one cannot look into it
    return text | {"labels": torch.zeros(batch, dtype=torch.long)}


def _prepared(network, precision, checkpointing, freeze_layers, lora, prepare):
    if precision == "bf16-pure":
        network.to(torch.bfloat16)
    if freeze_layers:
        layers = max((p for p in network.modules() if isinstance(p, torch.nn.ModuleList)), key=len, default=())
        accept(freeze_layers <= len(layers), "freeze_layers", freeze_layers, f"up to this model's {len(layers)}")
        parameters = list(network.parameters())  # in the order of the model's parts
        last = list(layers[freeze_layers - 1].parameters())[-1]
        for parameter in parameters[: 1 + next(i for i, p in enumerate(parameters) if p is last)]:
            parameter.requires_grad_(False)
    if lora:
        targets = lora_targets(network.config.model_type)
        from peft import LoraConfig, get_peft_model

        network = get_peft_model(network, LoraConfig(task_type="SEQ_CLS", r=lora, target_modules=targets))
    if checkpointing:
        names.checkpoint_layers(network, checkpointing)
    if prepare is not None:
        prepare(network)
    return network


def _optimizer(optimizer, network, device):
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    with unset_fake_temporarily():
        if callable(optimizer):
            chosen = optimizer(network)
            accept(hasattr(chosen, "param_groups"), "what optimizer returned", chosen, "a torch.optim.Optimizer")
        elif optimizer == "adamw8bit":
            import bitsandbytes

            chosen = bitsandbytes.optim.AdamW8bit(trained, lr=1e-3)
        else:
            by_name = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adafactor": torch.optim.Adafactor}
            chosen = by_name[optimizer](trained, lr=1e-3)
    for group in chosen.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            # torch's own default on CUDA, which it would not choose for fake tensors; not for Adafactor
            group["foreach"] = device == "cuda" and not isinstance(chosen, torch.optim.Adafactor)
    return chosen


def _check(settings, sizes, names, optimizers, lora):
    for name, value in sizes.items():
        least = 0 if name in ("checkpointing", "freeze_layers", "lora") else 1
        accept(type(value) is int and least <= value <= MOST, name, value, f"a whole number, {least} to {MOST:,}")
    longest, length = None if callable(settings) else models.positions(settings), sizes.get("length", 0)
    accept(longest is None or length <= longest, "length", length, f"up to {longest}, the positions this model has")
    for name, accepted in {"precision": tuple(PRECISIONS), "device": ("cuda", "cpu")}.items():
        accept(isinstance(names[name], str) and names[name] in accepted, name, names[name], ", ".join(accepted))
    for package, wanted in (("bitsandbytes", "adamw8bit" in optimizers), ("peft", lora)):
        if wanted and importlib.util.find_spec(package) is None:
            raise ImportError(f"adamw8bit is of bitsandbytes, lora of peft; not installed: pip install {package}")
