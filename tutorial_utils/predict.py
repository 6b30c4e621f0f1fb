"""What would this step cost on a GPU that is not here? `step_memory` runs it under fake tensors.

Every operation of the forward pass, the backward pass and the optimizer is executed with shapes
only: nothing is allocated or computed. `measure.Tracker` follows the storages as in a real run.
"""

import copy
import gc
import importlib.util
import inspect
import itertools
import sys
import threading
import time
import warnings
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.utils._pytree import tree_leaves, tree_map_only

from . import kernels, machine, measure, models, names
from .check import accept
from .measure import MiB

MOST = 1_000_000  # of texts, tokens and the like: beyond it sizes in bytes overflow
OPTIMIZERS = ("adamw", "adamw8bit", "adafactor", "sgd")
PRECISIONS = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16, "bf16-pure": None}  # of autocast

# What a card holds besides PyTorch's memory, at most, now that kernels are loaded when they are first used. Readings:
# about 300 and 400 MB (pytorch issues 107667 and 109888), 287 MB (pull request 86509); on an H100, of 132
# multiprocessors, 527 MiB at the start and 789 after a hundred steps of all kinds, 6 for each. 7.5 leave 200 MiB there
# for gaps that nobody predicted: in processes of their own the worst of 194 steps had 100, and in a process that did
# something before, 91 of 94 had less.
CONTEXT, CONTEXT_OF_ONE = 512 * MiB, 15 * MiB // 2
# cuBLAS allocates one for each thread that multiplies: the forward pass has one, the backward pass another.
# Source: CUBLAS_WORKSPACE_CONFIG :4096:2:16:8, from compute capability 9.0 on 32 MiB, in ATen's CublasHandlePool.cpp.
WORKSPACE, WORKSPACE_90 = 8_519_680, 32 * MiB

aten = torch.ops.aten
_LIKE_THEIR_INPUT = {f"aten::_foreach_{name}" for name in ("add", "sub", "mul", "div", "sqrt", "neg", "pow", "lerp")}
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
    optimizer: str | Callable = "adamw",
    precision: str = "fp32",
    attention: str | None = None,
    padded: bool = False,
    accumulate: int = 1,
    checkpointing: int = 0,
    freeze_layers: int = 0,
    lora: int = 0,
    prepare: Callable | None = None,
    step: Callable | None = None,
    inputs: dict | None = None,
    num_labels: int = 2,
    device: str | machine.Machine = "cuda",
    card: str | int | None = None,
    limit: int | None = None,
) -> Prediction:
    """The memory of one training step, in steady state. Nothing is allocated, downloaded or computed.

    model: a name of facts/models.toml or a transformers configuration, for a sequence classifier; or a
    function without arguments that returns any module.
    batch, length: of one micro-batch; padded: whether the batch holds padding, by which transformers and CUDA
    choose the attention kernel. inputs: the forward's arguments by name, as tensors, in their place.
    Of a mask that it is given nobody looks at the values: without padding, leave it out.
    accumulate: micro-batches a step; two are executed, the second of which is the most expensive, since it meets
    the gradients of the first, as all others do.
    optimizer: one of OPTIMIZERS over what requires gradients, or a function of the model that returns one; torch's
    default for the device is taken ("foreach" on CUDA) where it does not say.
    precision: "fp32", "bf16" (autocast), "fp16" (autocast with GradScaler), or "bf16-pure" (the weights too).
    checkpointing: every how many layers; 0 is none. freeze_layers: the first so many, and what comes before them.
    lora: the rank of peft's adapters. prepare: a function of the model, for anything else before training.
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
    names = {"precision": precision, "device": device} | ({} if callable(optimizer) else {"optimizer": optimizer})
    known = isinstance(settings, PretrainedConfig) or callable(settings) and not isinstance(settings, torch.nn.Module)
    accept(known, "model", model, "a name, a configuration, or a function that returns a module")
    accept(not inspect.isclass(optimizer), "optimizer", optimizer, "a name, or a function of the model that makes one")
    for name, given in (("prepare", prepare), ("step", step)):
        accept(given is None or callable(given), name, given, "a function")
    known = inputs is None or isinstance(inputs, Mapping) and ("labels" in inputs if step is None else inputs)
    accept(known, "inputs", inputs, "the forward's arguments by name, and the labels for the step that is built")
    accept(type(padded) is bool, "padded", padded, "True or False")
    accept(limit is None or type(limit) is int and limit >= 1, "limit", limit, "bytes, 1 or more")
    _check(settings, sizes | ({"batch": batch, "length": length} if inputs is None else {}), names, lora)
    if step is not None and (accumulate > 1 or PRECISIONS[precision] is not None):
        raise ValueError("accumulate and precision say what the built step does; a step of your own does it itself")
    with _one_at_a_time, _Shapes() as fake, ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Accessing the data pointer")  # a copy asks whether there is one
        if gc.isenabled():  # a fifth of the time, for nothing: what dies here dies by its reference count
            gc.disable()
            stack.callback(gc.enable)
        stack.enter_context(_own_overrides())
        stack.enter_context(_semantics(device, gpu))
        stack.enter_context(_understood(fake))
        network = settings() if callable(settings) else models.untrained(settings, attention)
        accept(isinstance(network, torch.nn.Module), "what model returned", network, "a torch.nn.Module")
        network.train()
        if not all(isinstance(parameter, FakeTensor) for parameter in network.parameters()):
            raise ValueError("model returned a module that was there before; accepted: a function that makes it")
        stack.enter_context(_without_torchscript(network))
        network = _prepared(network, precision, checkpointing, freeze_layers, lora, prepare)
        if any(isinstance(module, torch.nn.RNNBase) for module in network.modules()):
            raise ValueError("model has recurrent modules, whose memory is in their kernels: not predicted")
        network.register_forward_pre_hook(lambda *_: setattr(fake, "inside", type(network).__name__))
        network.register_forward_hook(lambda *_: setattr(fake, "inside", None), always_call=True)
        chosen = _optimizer(optimizer, network, device)
        if inputs is None:
            inputs = _text(network, batch, length, padded)
        inputs = copy.copy(inputs)  # a tokenizer's is no dict, and has .to
        inputs.update(tree_map_only(torch.Tensor, fake.from_tensor, dict(inputs)))
        if step is None:
            for parameter in network.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.empty_like(parameter)
            chosen.step()  # the state of the steps before
            chosen.zero_grad()
        held = kernels.OnCuda(gpu) if device == "cuda" else kernels.on_cpu
        with measure.Tracker(network, chosen, inputs, limit, held) as tracker:
            if step is None:
                _step(network, chosen, inputs, precision, accumulate)
            else:
                step(network, chosen, inputs)
                tracker.restart()
                step(network, chosen, inputs)
    result = Prediction(**vars(tracker.report()))
    if device == "cuda":
        _add_card(result, tracker, gpu)
    result.seconds = time.perf_counter() - started
    return result


def _step(network, optimizer, inputs, precision, accumulate):
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    for _ in range(min(accumulate, 2)):
        with torch.autocast("cpu", PRECISIONS[precision], enabled=PRECISIONS[precision] is not None):
            output = network(**{name: value for name, value in inputs.items() if name != "labels"})
            accept(hasattr(output, "logits"), "what the model returned", output, "its logits, or a step of your own")
            logits, output = output.logits, None
            loss = torch.nn.functional.cross_entropy(logits, inputs["labels"])
        scaler.scale(loss / accumulate if accumulate > 1 else loss).backward()
        del logits, loss
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


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
        machine.hide_old_torchao()
        from peft import LoraConfig, get_peft_model
        from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

        targets = KNOWN.get(network.config.model_type, ["Wqkv", "q_lin", "v_lin"])  # ModernBERT's, DistilBERT's
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


@contextmanager
def _own_overrides():
    """Keep bitsandbytes' process-wide overrides away from this prediction, and its own from others."""

    def manager():  # the prediction itself may be the first to import it
        module = sys.modules.get("bitsandbytes")
        return module.optim.GlobalOptimManager if module else SimpleNamespace(_instance=None)

    kept, manager()._instance = manager()._instance, None
    try:
        yield
    finally:
        manager()._instance = kept


def _check(settings, sizes, names, lora):
    for name, value in sizes.items():
        least = 0 if name in ("checkpointing", "freeze_layers", "lora") else 1
        accept(type(value) is int and least <= value <= MOST, name, value, f"a whole number, {least} to {MOST:,}")
    longest, length = None if callable(settings) else models.positions(settings), sizes.get("length", 0)
    accept(longest is None or length <= longest, "length", length, f"up to {longest}, the positions this model has")
    accepted = {"optimizer": OPTIMIZERS, "precision": tuple(PRECISIONS), "device": ("cuda", "cpu")}
    for name, value in names.items():
        more = ", or a function of the model" if name == "optimizer" else ""
        accept(isinstance(value, str) and value in accepted[name], name, value, ", ".join(accepted[name]) + more)
    for package, wanted in (("bitsandbytes", names.get("optimizer") == "adamw8bit"), ("peft", lora)):
        if wanted and importlib.util.find_spec(package) is None:
            raise ImportError(f"adamw8bit is of bitsandbytes, lora of peft; not installed: pip install {package}")


class _Shapes(FakeTensorMode):
    """Fake tensors that answer what only data could, where the answer changes no size, and refuse elsewhere.

    What an operation gives for arguments of the same shapes is remembered, as FakeTensorMode itself does, at a
    third of its cost: most operations of a Transformer come again in every layer.
    """

    def __init__(self):
        # Not only fake inputs: bitsandbytes' table of 8-bit values is computed when it is constructed.
        super().__init__(allow_non_fake_inputs=True)
        self.inside = None  # the network's name, while its forward runs
        self.known = {}  # operation and arguments → shape, stride and type of each result, or None

    def __deepcopy__(self, memo):
        return self  # a parameter's copy, as peft makes of a classifier, belongs to the same mode

    def _refusal(self, func):
        return ValueError(
            f"{self.inside or 'the step'} needs the values of a tensor ({func}), which a prediction does not have; "
            f"accepted: steps whose shapes follow from their inputs' shapes. Run this one, with measure.memory"
        )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs = kwargs | {"device": torch.device("cpu")}
        if func is aten._local_scalar_dense.default:
            if not self.inside and args[0].dtype != torch.bool:  # a norm, a count of steps, a loss to print
                return 10.0 if args[0].is_floating_point() else 1
            if getattr(args[0], "constant", None) is None:  # a truth value, by which a step chooses what to do
                raise self._refusal(func)
        name = func._schema.name
        if name.startswith("aten::_foreach_"):  # fake tensors would take the lists apart, in three quarters of the time
            if name.endswith("_"):
                return None
            if name in _LIKE_THEIR_INPUT:
                return [torch.empty_like(tensor) for tensor in args[0]]
        if self.inside and self.inside.endswith("ForSequenceClassification"):
            # T5's and BART's read each text's end-of-sequence token, after a look whether all have as many.
            if func is aten.unique_consecutive.default:
                return args[0].new_empty(1), args[0].new_empty(0), args[0].new_empty(0)
            if func is aten.index.Tensor and args[0].dim() == 3 and [t.dtype for t in args[1]] == [torch.bool]:
                return args[0][:, 0].clone()
        try:
            key = func, _metadata(args), _metadata(tuple(kwargs.items()))
            known = self.known.get(key)
        except TypeError:
            key, known = None, None  # not to be compared
        if known == "in place":
            return args[0]
        if known:
            made = [self._made(args, *sizes) for sizes in known]
            return made[0] if len(made) == 1 else tuple(made)
        try:
            result = self.dispatch(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
            raise self._refusal(func) from error
        if key is not None and key not in self.known and key[1] == _metadata(args):
            self.known[key] = _results(func, args, result)
        return result

    def _made(self, args, is_view, shape, stride, offset, dtype):
        if is_view:
            tensor = torch.empty(0, dtype=dtype, device="meta").set_(args[0].untyped_storage(), offset, shape, stride)
        else:
            tensor = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return FakeTensor(self, tensor, torch.device("cpu"))


def _metadata(value):
    if isinstance(value, FakeTensor) and value.constant is None:
        return value.shape, value.stride(), value.storage_offset(), value.dtype
    if isinstance(value, torch.Tensor):
        raise TypeError
    if isinstance(value, (list, tuple)):
        return tuple(map(_metadata, value))
    return type(value), value


def _results(func, args, result):
    """How to make the results again, if each is a view of the first argument, or has a whole storage of its own."""
    if result is not None and args and result is args[0] and func._schema.name.endswith("_"):
        return "in place"
    made = []
    storages = {t.untyped_storage()._cdata for t in tree_leaves(args) if isinstance(t, torch.Tensor)}
    for one in result if isinstance(result, tuple) else (result,):
        if not isinstance(one, FakeTensor) or one.constant is not None or any(one is a for a in args):
            return None
        storage, first = one.untyped_storage(), args[0] if args else None
        is_view = func.is_view and storage._cdata == first.untyped_storage()._cdata
        extent = 1 + sum((size - 1) * stride for size, stride in zip(one.shape, one.stride()))
        whole = not one.storage_offset() and storage.nbytes() == extent * one.itemsize
        if not is_view and (storage._cdata in storages or not whole):
            return None
        storages.add(storage._cdata)
        made.append((is_view, tuple(one.shape), one.stride(), one.storage_offset(), one.dtype))
    return made


@contextmanager
def _understood(fake):
    """Let a reader's step say "cuda" where torch has none, a scaler step without looking, a model change its type."""
    autocast, scaler = torch.amp.autocast_mode.autocast.__init__, torch.amp.GradScaler.__init__

    def on_cpu(original):
        return lambda self, device="cuda", *a, device_type=None, **o: original(
            self, here(device_type or device), *a, **o
        )

    def here(value):
        return "cpu" if isinstance(value, (str, torch.device)) and str(value).startswith("cuda") else value

    def to(self, *arguments, original=torch.Tensor.to, **options):
        return original(self, *map(here, arguments), **{name: here(value) for name, value in options.items()})

    def swap(first, second, original=torch.utils.swap_tensors):
        fake.fake_tensor_converter.meta_converter.tensor_memo.clear()  # weak references keep tensors from swapping
        original(first, second)

    with (
        patch.object(torch.utils, "swap_tensors", swap),
        patch.object(torch.Tensor, "to", to),
        patch.object(torch.Tensor, "cuda", lambda self, *_, **__: self),
        patch("transformers.masking_utils.find_packed_sequence_indices", lambda *_: None),  # it looks at positions
        patch.object(torch.amp.autocast_mode.autocast, "__init__", on_cpu(autocast)),
        patch.object(torch.amp.GradScaler, "__init__", on_cpu(scaler)),
        patch.object(torch.amp.GradScaler, "_maybe_opt_step", lambda self, optimizer, *_: optimizer.step()),
    ):
        yield


@contextmanager
def _without_torchscript(network):
    """Run the Python of TorchScript functions, which cannot see fake tensors: DeBERTa's in the older transformers."""
    with ExitStack() as stack:
        for module in {sys.modules[type(part).__module__] for part in network.modules()}:
            for name, function in list(vars(module).items()):
                if isinstance(function, torch.jit.ScriptFunction):
                    stack.enter_context(patch.object(module, name, function._torchdynamo_inline))
        yield


@contextmanager
def _semantics(device, gpu):
    """Send operations to the operators and types that the device chooses.

    Functions are replaced, not a mode entered: a mode would not be in force while checkpointing
    computes the forward pass again.
    """
    functions = torch.nn.functional
    attention, dropout, softmax = functions.scaled_dot_product_attention, functions.dropout, functions.softmax
    cross_entropy = functions.cross_entropy

    def cpu_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        shapes = {(t.dim(), *t.shape[:-2], t.shape[-1]) for t in (query, key, value)}
        masked = attn_mask is not None and (attn_mask.requires_grad or attn_mask.dim() not in (2, 4))
        if dropout_p or enable_gqa or masked or query.dim() != 4 or len(shapes) > 1:
            return attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        query, key, value, attn_mask = map(_autocast, (query, key, value, attn_mask))
        mask = None if attn_mask is None else _additive(attn_mask, query.dtype)
        flash = aten._scaled_dot_product_flash_attention_for_cpu  # which fake tensors do not choose themselves
        return flash(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]

    def cuda_dropout(input, p=0.5, training=True, inplace=False):
        if not training or p == 0 or inplace:
            return dropout(input, p, training, inplace)
        return torch.native_dropout(input, p, True)[0]  # a mask of one byte an element

    def cuda_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        query, key, value, attn_mask = map(_autocast, (query, key, value, attn_mask))
        kernel = _attention_kernel(gpu, query, attn_mask, enable_gqa, value)
        if kernel == "flash":
            return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        if kernel == "efficient":
            efficient = aten._scaled_dot_product_efficient_attention
            bias = None if attn_mask is None else _bias(attn_mask, query, key)
            return efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]
        # Source: _scaled_dot_product_attention_math in ATen's transformers/attention.cpp. Halves are computed in fp32.
        root = (scale or query.shape[-1] ** -0.5) ** 0.5
        groups = query.shape[-3] // key.shape[-3] if enable_gqa else 1
        if groups > 1:
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        if is_causal:
            attn_mask = query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
        with torch.autocast("cpu", enabled=False):
            query, key, value, kind = query.float(), key.float(), value.float(), query.dtype  # they live to the end
            scores = (query * root) @ (key * root).transpose(-2, -1)
            if attn_mask is not None:
                scores.add_(_additive(attn_mask, torch.float32))
            weights, full = softmax(scores, -1), scores.eq(-torch.inf)  # _safe_softmax looks for rows without a key
            del scores, full
            weights = cuda_dropout(weights, dropout_p)
            output = weights @ value
            _ = weights.to(kind)  # which it returns, and nobody takes
            return output.to(kind)

    def cuda_softmax(input, dim=None, _stacklevel=3, dtype=None):
        if input.dtype == torch.float16 and (dtype == torch.float32 or torch.is_autocast_enabled("cpu")):
            return aten._softmax(input, dim, True)  # one kernel reads halves and writes floats
        return softmax(_autocast(input, torch.float32), dim, dtype=dtype)

    def cuda_cross_entropy(input, target, *arguments, label_smoothing=0.0, **options):
        if not torch.is_autocast_enabled("cpu") or label_smoothing or target.is_floating_point():
            return cross_entropy(input, target, *arguments, label_smoothing=label_smoothing, **options)
        with torch.autocast("cpu", enabled=False):  # CUDA's has nll_loss in fp32, but no log_softmax of a given type
            logs = torch.log_softmax(input, min(input.dim() - 1, 1))
            return functions.nll_loss(logs.float(), target, *arguments, **options)

    def in_full(function):
        return lambda input, *arguments, **options: function(_autocast(input, torch.float32), *arguments, **options)

    if device == "cpu":
        replaced, power = {"scaled_dot_product_attention": cpu_attention}, torch.pow
    else:
        # CUDA's autocast computes these in fp32, a CPU's does not. Source: AT_FORALL_FP32 in ATen's autocast_mode.h.
        replaced = {"scaled_dot_product_attention": cuda_attention, "dropout": cuda_dropout, "softmax": cuda_softmax,
                    "cross_entropy": cuda_cross_entropy, "layer_norm": in_full(functions.layer_norm)}  # fmt: skip
        power = in_full(torch.pow)
    with patch.multiple(functions, **replaced), patch.object(torch, "pow", power):
        yield


def _autocast(value, dtype=None):
    """The value as autocast hands it to a kernel, in this type or in the reduced one."""
    if not torch.is_autocast_enabled("cpu") or not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.to(dtype or torch.get_autocast_dtype("cpu"))


def _attention_kernel(gpu, query, mask, enable_gqa, value) -> str:
    """Of "flash", "efficient" and "math", the one that CUDA takes. cuDNN's, on sm90, saves what flash saves.

    Source: the checks of sdp_utils.cpp in ATen's transformers/cuda.
    """
    capability, width = gpu.capability if gpu else None, query.shape[-1]
    if any(one is not None and one.stride(-1) != 1 < one.shape[-1] for one in (query, value, mask)):
        return "math"
    if capability is None or query.dim() != 4:
        return "efficient" if query.dim() == 4 and not enable_gqa else "math"
    half = query.dtype != torch.float32
    if capability >= (8, 0) and half and mask is None and width == value.shape[-1] <= 256:
        return "flash"
    alignment = 8 if half and capability >= (7, 0) else 4 if capability >= (8, 0) else 1
    known = query.dtype != torch.bfloat16 or capability >= (8, 0)
    return "efficient" if known and width % alignment == 0 and not enable_gqa else "math"


def _additive(mask, dtype):
    if mask.dtype == torch.bool:
        mask = torch.where(mask, torch.zeros((), dtype=dtype), torch.full((), -torch.inf, dtype=dtype))
    return mask.to(dtype)


def _bias(mask, query, key):
    """The additive bias that CUDA makes of a mask: batch × heads × length × length, rows aligned.

    Source: convert_boolean_attn_mask and preprocess_mask in ATen's transformers/attention.cpp.
    """
    mask = _additive(mask, query.dtype)
    length = mask.shape[-1]
    if length % 16:
        mask = torch.nn.functional.pad(mask, (0, 16 - length % 16))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _add_card(prediction, tracker, gpu):
    """What the caching allocator reserves for two steps, the first of which makes the optimizer's state."""
    workspace = WORKSPACE_90 if gpu and gpu.capability and gpu.capability >= (9, 0) else WORKSPACE
    cleared = {block for operation, size, block in tracker.events if operation == 0 and size < 0}  # old gradients
    held = {}  # at the start of a step, by role
    for operation, _, block in tracker.events:
        if operation == 0 and block not in cleared:
            held.setdefault(block.role, []).append((block, True))
    state = held.pop("optimizer state", [])
    first = list(itertools.chain(*held.values()))
    before = [*tracker.phases, "optimizer"].index("optimizer")  # operations that come before it
    until, stepping, multiplied = [], [], []  # events up to the optimizer, in it; how many until a thread multiplies
    for operation, size, block in tracker.events:
        if operation == 0:
            continue
        for thread, product in tracker.held.products.items():
            if thread not in dict(multiplied) and (operation, size < 0) > (product, False):
                multiplied.append((thread, len(until)))
        (until if operation <= before else stepping).append((block, size > 0))
    step = [*until, *stepping]
    lives = dict(step)  # whether, after the step
    left = [(block, False) for block, born in step if born and lives[block]]
    again = [(block, True) for block, _ in first if not lives.get(block, True)]
    once = list(until)
    for thread, position in reversed(multiplied):
        once.insert(position, (thread, True))
    sequence = [*first, *once, *state, *stepping, *left, *again, *step]

    def run(room=None):
        allocator = _Allocator(room)
        for block, born in sequence:
            if (size := workspace if isinstance(block, str) else block.size) and (born or block in allocator.held):
                allocator.allocate(block, size) if born else allocator.free(block)
        return allocator

    allocator = None
    if gpu:
        with suppress(torch.OutOfMemoryError):
            allocator = run(gpu.usable - context(gpu))
        prediction.fits = allocator is not None
    allocator = allocator or run()
    prediction.allocated, prediction.reserved = allocator.used_peak, allocator.reserved_peak
    prediction.card_bytes = allocator.reserved_peak + context(gpu)
    parts = {"cuBLAS workspaces": 2 * workspace, "CUDA context": context(gpu)}
    gaps = prediction.card_bytes - prediction.peak - sum(parts.values())
    prediction.card_parts = {"tensors": prediction.peak, "rounding and gaps": gaps, **parts}


def context(gpu: machine.Gpu | None) -> int:
    """Bytes of a card that no tensor can have, at most: the driver's own, more with more multiprocessors."""
    return max(CONTEXT, CONTEXT_OF_ONE * (gpu and gpu.multiprocessors or 0))


class _Allocator:
    """PyTorch's caching allocator, with its default settings: what it reserves for a sequence of requests.

    Source: roundup_size, get_allocation_size, should_split and free_block in c10's CUDACachingAllocator.cpp.
    """

    def __init__(self, room: int | None = None):
        self.room = room  # the most that can be reserved, in bytes
        self.reserved = self.reserved_peak = self.used = self.used_peak = self.end = 0
        self.segments = {}  # address → size
        self.pools = {True: [], False: []}  # of small and of large blocks: the free ones, (size, address), sorted
        self.starts, self.ends = {}, {}  # of free blocks: address → size, address of the end → address
        self.held = {}  # key of a request → (size, address, small)

    def allocate(self, key, size: int):
        """torch.OutOfMemoryError where there is no room."""
        size = -(-size // 512) * 512
        small = size <= MiB
        pool = self.pools[small]
        if not pool or pool[-1][0] < size:
            self._segment(size, small)
        have, address = pool[bisect_left(pool, (size, 0))]  # the smallest that is large enough
        self._take(have, address, small)
        if have - size >= (512 if small else MiB + 1):
            self._give(have - size, address + size, small)
            have = size
        self.held[key] = have, address, small
        self.used += have
        self.used_peak = max(self.used_peak, self.used)

    def free(self, key):
        size, address, small = self.held.pop(key)
        self.used -= size
        before, after = self.ends.get(address), self.starts.get(address + size)
        if after is not None:
            self._take(after, address + size, small)
            size += after
        if before is not None:
            length = self.starts[before]
            self._take(length, before, small)
            size, address = size + length, before
        self._give(size, address, small)

    def _take(self, size, address, small):
        del self.pools[small][bisect_left(self.pools[small], (size, address))]
        del self.starts[address], self.ends[address + size]

    def _give(self, size, address, small):
        insort(self.pools[small], (size, address))
        self.starts[address], self.ends[address + size] = size, address

    def _segment(self, size, small):
        size = 2 * MiB if small else 20 * MiB if size < 10 * MiB else -(-size // (2 * MiB)) * 2 * MiB
        if self.room is not None and self.reserved + size > self.room:
            for address in [a for a, whole in self.segments.items() if self.starts.get(a) == whole]:
                whole = self.segments.pop(address)  # as the allocator does before it gives up: return what is free
                self._take(whole, address, (whole, address) in self.pools[True])
                self.reserved -= whole
            if self.reserved + size > self.room:
                raise torch.OutOfMemoryError(f"{self.reserved + size:,} bytes in a room of {self.room:,}")
        self.segments[self.end] = size
        self._give(size, self.end, small)
        self.end += size + 1  # a gap: blocks of two segments are never neighbours
        self.reserved += size
        self.reserved_peak = max(self.reserved_peak, self.reserved)
