"""What did this step cost? `memory` (peak, by role, over time) and `timing` (interleaved medians).

Tensor memory is the sum of the bytes of all live tensor storages: a storage counts once, however
many tensors view it. Its peak over a step is the figure that every lesson reports.
"""

import collections.abc
import copy
import gc
import itertools
import re
import signal
import threading
import weakref
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from . import kernels
from .check import accept
from .times import Figure, Timing, timing

__all__ = ["Figure", "Memory", "Timing", "Tracker", "memory", "timing"]

MiB, GiB = 2**20, 2**30
MOST_SKIPPED = 8  # steps: a GradScaler's scale has then come from 65,536 to 256
ROLES = ("weights", "gradients", "optimizer state", "inputs", "activations", "temporary")

# Autograd fills a tensor of zeros in place, and takes a copy only when a dispatch mode looks on.
# Source: the uses of areAnyTensorSubclassLike in FunctionsManual.cpp.
aten = torch.ops.aten
DEVICE = torch.ops.prim.device.default  # a fake tensor's .device, which is no operation
IN_PLACE = {
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_put.default: aten.index_put_.default,
}


@dataclass
class Memory:
    """The cost of one training step, in bytes.

    peak: the highest tensor memory. parts: bytes by role at that moment; they sum to the peak.
    timeline: bytes by role (in the order of ROLES) after each operation; phases: what each was
    part of ("start", "forward", "backward" or "optimizer"). modules: bytes at the peak by the module that
    owns or made them, the most first; equal layers are taken together, as in "encoder.layer.*.output".
    On CUDA, peak is the allocator's requested_bytes, less what else lives in this process. allocated
    adds rounding and the cuBLAS workspace, reserved is what the allocator holds in all; they are of
    the whole process, and None elsewhere.
    """

    peak: int
    parts: dict[str, int]
    timeline: list[tuple[int, ...]] = field(repr=False)
    phases: list[str] = field(repr=False)
    allocated: int | None = None
    reserved: int | None = None
    modules: dict[str, int] = field(default_factory=dict, repr=False)


@contextmanager
def interrupted_later():
    """Hold back Ctrl-C until the end: where it comes inside Python that C++ calls, torch may abort or swallow it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = []
    before = signal.signal(signal.SIGINT, lambda *_: asked.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.default_int_handler)
    if asked:
        raise KeyboardInterrupt


@interrupted_later()
def memory(step: Callable[[], object], model, optimizer=None, inputs=(), card: int | None = None) -> Memory:
    """Measure one run of `step`, after one that does not count, or more, where the optimizer has no state yet.

    inputs: the batch, or any nesting of tensors. card: a limit on tensor memory in bytes; the operation that
    would pass it raises torch.OutOfMemoryError, as on a card of that size. ValueError for a compiled model, and for
    what is not accepted. An interrupt comes when the step is done.
    """
    accept(callable(step), "step", step, "a function without arguments that makes one training step")
    trained = isinstance(model, torch.nn.Module) and next(model.parameters(), None) is not None
    accept(trained, "model", model, "a torch.nn.Module with parameters")
    keeps = optimizer is None or isinstance(getattr(optimizer, "state", None), collections.abc.Mapping)
    accept(keeps, "optimizer", optimizer, "an optimizer of torch's kind, or None")
    device, optimizer = next(model.parameters()).device, getattr(optimizer, "optimizer", optimizer)  # in Accelerate's
    first = Tracker(model, optimizer, inputs, card)  # refuses what it cannot follow
    if optimizer is not None and not optimizer.state:
        with first if card else nullcontext():
            _first_step(step, optimizer)
    if device.type != "cuda":
        with Tracker(model, optimizer, inputs, card) as tracker:
            step()
        return tracker.report()
    gc.collect()  # or what dies in the step and is not of it would be counted
    with Tracker(model, optimizer, inputs, card) as tracker:
        known = tracker.bytes
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # or reserved would be that of an earlier, larger step
        torch.cuda.reset_peak_memory_stats(device)
        others = torch.cuda.memory_stats(device)["requested_bytes.all.current"] - known
        step()
        torch.cuda.synchronize(device)
        after = torch.cuda.memory_stats(device)
    report = tracker.report()

    # What lives before and after is not of this step; what dies in it was left by the one before, and is.
    others = min(others, after["requested_bytes.all.current"] - tracker.bytes)
    # What the allocator saw and the tracker did not are buffers inside kernels.
    peak = after["requested_bytes.all.peak"] - others
    report.parts["temporary"] += peak - report.peak
    report.peak = peak
    report.allocated = after["allocated_bytes.all.peak"]
    report.reserved = after["reserved_bytes.all.peak"]
    return report


def _first_step(step, optimizer):
    """One that is made: a GradScaler skips the first, whose gradients overflow, and leaves the optimizer no state.

    Where it does not move the optimizer at all, it is made as often as a scaler would skip it.
    """
    made = []
    with optimizer.register_step_post_hook(lambda *_: made.append(True)):
        for _ in itertools.takewhile(lambda _: not (made or optimizer.state), range(MOST_SKIPPED)):
            step()


def is_compiled(model) -> bool:
    return hasattr(model, "_orig_mod") or any(module._compiled_call_impl for module in model.modules())


class Tracker(TorchDispatchMode):
    """Follows every tensor storage of a step from birth to death. Also works under FakeTensorMode.

    A storage has one role for its whole life, the first of ROLES that it ever took: the buffer
    that becomes a gradient counts as a gradient from its birth.
    """

    def __init__(self, model, optimizer=None, inputs=(), card: int | None = None, held: Callable | None = None,
                 run: Callable = lambda func, args, kwargs: func(*args, **kwargs)):  # fmt: skip
        super().__init__()
        accept(card is None or type(card) is int and card >= 1, "card", card, 'bytes, such as machine.gpu("T4").usable')
        if is_compiled(model) and not self.ignore_compile_internals():
            raise ValueError("model has compiled modules, whose plain code would run here: ask the allocator")
        self.model, self.optimizer, self.card = model, optimizer, card
        self.device = next(model.parameters()).device
        self.run = run  # operation, positional and named arguments → its results
        # operation, arguments and its number → what its kernel holds besides its results
        self.held = held or (kernels.on_cpu if self.device.type == "cpu" else lambda *_: ())
        self.bytes = 0
        self._blocks = {}  # address of a live storage → _Block
        self.events = []  # (operation, bytes born or less than 0 for died, block)
        self.phases = []  # of each operation: "forward", "backward" or "optimizer"
        self._stepping, self._recording = False, True
        self._owners = {}  # module or parameter → name
        self._inside = []  # names of the modules whose forward is running
        for name, module in model.named_modules():
            owner = self._owners[module] = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
            for parameter in module.parameters(recurse=False):
                self._owners.setdefault(parameter, owner)
                self._mark(parameter, "weights", owner=owner)
                self._mark(parameter.grad, "gradients", owner=owner)
            for buffer in module.buffers(recurse=False):
                self._mark(buffer, "weights", owner=owner)
        # A tokenizer's batch is a mapping, but no dict.
        for tensor in tree_leaves(dict(inputs) if isinstance(inputs, collections.abc.Mapping) else inputs):
            self._mark(tensor, "inputs")
        self._mark_state()

    def __enter__(self):
        self._handles = []
        if self.optimizer is not None:  # first: one that knows no hooks leaves nothing behind
            self._handles.append(self.optimizer.register_step_pre_hook(lambda *_: setattr(self, "_stepping", True)))
            self._handles.append(self.optimizer.register_step_post_hook(self._step_ended))
        self._handles += [
            p.register_post_accumulate_grad_hook(lambda p: self._mark(p.grad, "gradients", owner=self._owners[p]))
            for p in self.model.parameters()
            if p.requires_grad
        ]
        self._handles.append(register_module_forward_pre_hook(self._entered))
        self._handles.append(register_module_forward_hook(self._left, always_call=True))
        self._saved = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._saved.__enter__()
        self._recording = True
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._saved.__exit__(*error)
        for handle in self._handles:
            handle.remove()
        self._recording = False

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # to keep dynamo out is a tenth of a prediction's time

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is DEVICE:
            return args[0].fake_device
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and not torch.is_grad_enabled():  # autograd's own, not what checkpointing computes again
            func = IN_PLACE.get(func, func)
            if self.held is not kernels.on_cpu and kernels.accumulates_in_place(func, args):
                func = aten.add_.Tensor
        if self.held is kernels.on_cpu and (kernel := _python_kernel(func)):
            super().__enter__()  # this mode is not in force while it handles an operation
            try:
                return kernel(*args, **(kwargs or {}))
            finally:
                super().__exit__(None, None, None)
        result = self.run(func, args, kwargs or {})
        self.phases.append("optimizer" if self._stepping else "backward" if in_backward else "forward")
        # Gradients are off in backward, unless checkpointing computes the forward pass again.
        role = "activations" if in_backward and torch.is_grad_enabled() else "temporary"
        if isinstance(result, torch.Tensor):
            self._mark(result, role, func)
        else:
            made = tree_leaves(args if result is None else result)  # of lists, in place
            # CUDA allocates this one's last result first, which decides where a caching allocator puts them.
            for tensor in reversed(made) if func is aten.native_dropout.default else made:
                self._mark(tensor, role, func)
        for tensor in self.held(func, args, len(self.phases)):
            self._mark(tensor, "temporary", func)
        return result

    def restart(self):
        """Forget what has happened, but not what lives: the next step is the first of the report."""
        self.phases.clear()
        self.events = [(0, block.size, block) for block in self._blocks.values()]
        for block in self._blocks.values():
            block.born = 0

    def again(self):
        """What has happened, once more, beside the gradients it made: these are born again, added to them, and die."""
        operations, dead = len(self.phases), {block for _, size, block in self.events if size < 0}
        made = {block for _, _, block in self.events if block.born and (block in dead or block.role == "gradients")}
        copies = {block: replace(block, born=block.born + operations) for block in made}
        for block in made - dead:
            copies[block].role, copies[block].owner = "temporary", "(backward)"
        added = [(block.kept, -block.size, block) for block in made - dead]
        events = sorted(self.events + added, key=lambda event: event[0])
        self.events += [(number + operations, size, copies[block]) for number, size, block in events if block in made]
        self.phases += self.phases

    def beside(self, optimizer) -> "Tracker":
        """One that goes on from here with another optimizer, as if its state had been there in place of this one's."""
        other = copy.copy(self)
        TorchDispatchMode.__init__(other)
        copies = {block: replace(block) for block in self._blocks.values() if block.role != "optimizer state"}
        other._blocks = {key: copies[block] for key, block in self._blocks.items() if block in copies}
        for key, block in other._blocks.items():
            other._watch(key, block, block.reference())
        other.optimizer, other.events, other.phases = optimizer, [], []
        other._mark_state()
        gone = set(self._blocks.values()) - copies.keys()
        events = [(number, size, copies.get(block, block)) for number, size, block in self.events if block not in gone]
        start = sum(not number for number, _, _ in events)
        other.events = events[:start] + other.events + events[start:]
        other.phases = [*self.phases]
        other.bytes = sum(block.size for block in other._blocks.values())
        return other

    def freed(self, tensors):
        """Take these for dead, though they live on for a tracker beside this one."""
        for tensor in tensors:
            if tensor is not None:
                self._died(tensor.untyped_storage()._cdata)
        self.phases.append("optimizer")

    def report(self) -> Memory:
        """The peak since the tracker was made, its parts, its modules, and the timeline."""
        totals = list(itertools.accumulate(size for _, size, _ in self.events))
        modules = collections.Counter()
        for _, size, block in self.events[: totals.index(max(totals)) + 1]:
            modules[block.owner] += size
        counters, timeline = dict.fromkeys(ROLES, 0), []
        events = zip(totals, self.events)
        total, event = next(events, (0, None))
        for operation in range(len(self.phases) + 1):
            most, moment = -1, None  # within the operation: its arguments die after its results are born
            while event is not None and event[0] <= operation:
                counters[event[2].role] += event[1]
                if total > most:
                    most, moment = total, tuple(counters.values())
                total, event = next(events, (0, None))
            timeline.append(moment or tuple(counters.values()))
        highest = max(timeline, key=sum)
        modules = {name: size for name, size in modules.most_common() if size}
        return Memory(sum(highest), dict(zip(ROLES, highest)), timeline, ["start", *self.phases], modules=modules)

    def _entered(self, module, _):
        if not torch.compiler.is_compiling():
            self._inside.append(self._owners.get(module, self._inside[-1] if self._inside else ""))

    def _left(self, *_):
        if not torch.compiler.is_compiling():
            self._inside.pop()

    def _mark(self, tensor, role: str, func=None, owner: str = ""):
        """Give the storage of `tensor` this role, unless it has one that comes earlier in ROLES."""
        if not isinstance(tensor, torch.Tensor):
            return
        storage = tensor.untyped_storage()
        block = self._blocks.get(storage._cdata)
        if block is None:
            device = getattr(tensor, "fake_device", None) or tensor.device  # of a fake one without a dispatch
            if device.type != self.device.type:
                return
            size = storage.nbytes()
            if self.card is not None and self.bytes + size > self.card:
                raise torch.OutOfMemoryError(self._out_of_memory(size, func))
            outside = f"({self.phases[-1] if self.phases else 'start'})"
            owner = owner or (self._inside[-1] if self._inside else outside)
            block = self._blocks[storage._cdata] = _Block(size, role, owner, len(self.phases))
            self._watch(storage._cdata, block, storage)
            self.bytes += size
            self.events.append((len(self.phases), size, block))
        elif role != block.role and ROLES.index(role) < ROLES.index(block.role):
            block.role, block.owner, block.kept = role, owner or block.owner, len(self.phases)

    def _watch(self, key, block, storage):
        died = weakref.WeakMethod(self._died)
        block.reference = weakref.ref(storage, lambda _: (alive := died()) and alive(key))

    def _died(self, key):
        if self._recording:
            block = self._blocks.pop(key)
            self.bytes -= block.size
            self.events.append((len(self.phases), -block.size, block))

    def _pack(self, tensor):
        block = self._blocks.get(tensor.untyped_storage()._cdata)
        if block is None:
            return tensor
        self._mark(tensor, "activations")
        # An operation's own output would hold the graph that holds it, and never be freed without backward.
        is_output = block.born == len(self.phases) or tensor._version > 0
        return tensor.detach() if is_output and not tensor.is_leaf else tensor

    def _mark_state(self, parameters=None):
        if self.optimizer is not None:
            for parameter in self.optimizer.state if parameters is None else parameters:
                for tensor in tree_leaves(self.optimizer.state.get(parameter)):
                    self._mark(tensor, "optimizer state", owner=self._owners.get(parameter, ""))

    def _step_ended(self, *_):
        self._stepping = False
        # Of what has just been stepped: one parameter, where it is done in the backward pass.
        self._mark_state(parameter for group in self.optimizer.param_groups for parameter in group["params"])

    def _out_of_memory(self, size: int, func) -> str:
        parts = dict.fromkeys(ROLES, 0)
        for block in self._blocks.values():
            parts[block.role] += block.size
        held = ", ".join(f"{role} {size / MiB:,.0f}" for role, size in parts.items() if size)
        return (
            f"virtual card of {self.card / MiB:,.0f} MiB: {func or 'set-up'} in the {(self.phases or ['set-up'])[-1]} "
            f"asked for {size / MiB:,.1f} MiB more while {self.bytes / MiB:,.0f} MiB were held ({held}, in MiB)"
        )


def _python_kernel(func):
    """The Python that a kernel of bitsandbytes is on a CPU: it allocates out of the mode's sight."""
    if func.namespace != "bitsandbytes":
        return None
    from bitsandbytes.backends.cpu import ops

    return getattr(ops, f"_{func._opname}_cpu", None)


@dataclass(eq=False)
class _Block:
    size: int
    role: str
    owner: str
    born: int  # the number of the operation
    kept: int = 0  # and of that by which it took its role, if not when it was born
    reference: object = None
