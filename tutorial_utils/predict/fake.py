"""The fake mode of a prediction: tensors with shapes, and no values."""

import torch
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves

from ..measure import DEVICE, Tracker, is_compiled

aten = torch.ops.aten
CPU, META = torch.device("cpu"), torch.device("meta")
_LIKE_THEIR_INPUT = {f"aten::_foreach_{name}" for name in ("add", "sub", "mul", "div", "sqrt", "neg", "pow", "lerp")}
_known = {}  # operation, arguments and torch's default type → how to make its results, or None
MOST_KNOWN = 50_000  # of 1.5 KB each; a large model has a thousand


class Shapes(FakeTensorMode):
    """Fake tensors that answer what only data could, where the answer changes no size, and refuse elsewhere.

    What an operation gives for arguments of the same shapes is remembered, as FakeTensorMode itself does, at a
    third of its cost: most operations of a Transformer come again in every layer.
    """

    def __init__(self):
        # Not only fake inputs: bitsandbytes' table of 8-bit values is computed when it is constructed.
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False  # it would remember the same
        self.inside = None  # the network's name, while its forward runs
        self._alike = vars(FakeTensor(self, torch.empty(0, device="meta"), CPU))  # of all that this mode makes

    def __deepcopy__(self, memo):
        return self  # a parameter's copy, as peft makes of a classifier, belongs to the same mode

    def _refusal(self, func):
        return ValueError(
            f"{self.inside or 'the step'} needs the values of a tensor ({func}), which a prediction does not have; "
            f"accepted: steps whose shapes follow from their inputs' shapes. Run this one, with measure.memory"
        )

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # as in Tracker

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is DEVICE:
            return args[0].fake_device
        kwargs = kwargs or {}
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs = kwargs | {"device": torch.device("cpu")}
        for answer in (self.remembered, self._scalar, _of_lists, _counted, self._end_of_sequence):
            if (found := answer(func, args, kwargs)) is not NotImplemented:
                return found
        key = _hashable(func, args, kwargs)
        try:
            result = self.dispatch(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
            raise self._refusal(func) from error
        if key is not None and key not in _known and key == _hashable(func, args, kwargs):
            if len(_known) >= MOST_KNOWN:
                _known.clear()
            _known[key] = _results(func, args, result)
        return result

    def run(self, func, args, kwargs):
        """An operation under a tracker: without a second dispatch where the results' shapes are known."""
        found = self.remembered(func, args, kwargs)
        return func(*args, **kwargs) if found is NotImplemented else found

    def remembered(self, func, args, kwargs):
        """The results, if their shapes are known from an operation before; else NotImplemented."""
        known = _known.get(_hashable(func, args, kwargs))
        if not known:
            return NotImplemented
        if known in ("in place", "nothing"):
            return args[0] if known == "in place" else None
        kind, results = known
        with torch._C._DisableTorchDispatch():
            made = [self._made(args, *sizes) for sizes in results]
        return tuple(made) if kind is tuple else made[0]

    def _scalar(self, func, args, _):
        """Outside the network a number is a norm, a count of steps or a loss to print; a truth value is a choice."""
        if func is aten._local_scalar_dense.default:
            if not self.inside and args[0].dtype != torch.bool:
                return 10.0 if args[0].is_floating_point() else 1
            if getattr(args[0], "constant", None) is None:
                raise self._refusal(func)
        return NotImplemented

    def _end_of_sequence(self, func, args, _):
        """T5's and BART's classifiers read each text's last token, after a look whether all have as many."""
        if self.inside and self.inside.endswith("ForSequenceClassification"):
            if func is aten.unique_consecutive.default:
                return args[0].new_empty(1), args[0].new_empty(0), args[0].new_empty(0)
            if func is aten.index.Tensor and args[0].dim() == 3 and [t.dtype for t in args[1]] == [torch.bool]:
                return args[0][:, 0].clone()
        return NotImplemented

    def _made(self, args, is_view, shape, stride, offset, dtype, constant):
        if is_view:
            storage, offset = args[0].untyped_storage(), args[0].storage_offset() + offset
            tensor = torch.empty(0, dtype=dtype, device=META).set_(storage, offset, shape, stride)
        else:
            tensor = torch.empty_strided(shape, stride, dtype=dtype, device=META)
        # As FakeTensor's constructor does it, which is an eighth of a prediction's time.
        made = torch.Tensor._make_subclass(FakeTensor, tensor, dispatch_device=True, device_for_backend_keys=CPU)
        vars(made).update(self._alike)
        if constant is not None:
            made.constant = constant.clone()
            self.fake_tensor_converter.add_constant_storage_mapping(made)  # which an operation in place takes back
        return made


class Graphs(Tracker):
    """A tracker of compiled modules: of the operations of their graphs."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls):
        return True  # after a graph break it would compile what follows the operations

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is run_and_save_rng_state:  # for checkpoints; the state is a few bytes of main memory
            return torch.empty(0), self.__torch_dispatch__(args[0], types, args[1:], kwargs)
        if func is run_with_rng_state:
            return self.__torch_dispatch__(args[1], types, args[2:], kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)


def follower(network, stack):
    """The tracker for it. Compiled modules are compiled anew, now and after the stack is left."""
    if not is_compiled(network):
        return Tracker
    if torch.__version__ < (2, 11):  # its compiler insists on a fake mode of its own
        raise ValueError("model has compiled modules, which are predicted with torch 2.11 and newer")
    torch._dynamo.reset()  # beyond a limit of graphs it would run the plain code, and say so in a log
    stack.callback(torch._dynamo.reset)
    return Graphs


def _of_lists(func, args, _):
    """Fake tensors would take the lists apart, which is three quarters of a prediction's time."""
    name = func._schema.name
    if name.startswith("bitsandbytes::optimizer_update"):
        return None  # in place; it has a table of values, by which nothing can be remembered
    if name.startswith(("aten::_foreach_", "aten::_fused_")):
        if name.endswith("_"):
            return None
        if name in _LIKE_THEIR_INPUT:
            return [torch.empty_like(tensor) for tensor in args[0]]
    return NotImplemented


def _counted(func, args, kwargs):
    """An optimizer counts each parameter's steps: a number, which the operation changes, by which none is known."""
    if func is aten.add_.Tensor and type(args[1]) is int and not kwargs and args[0].constant is not None:
        with no_dispatch():
            args[0].constant.add_(args[1])
        return args[0]
    return NotImplemented


def _hashable(func, args, kwargs):
    """By what its results are known, or None where a value cannot be compared."""
    where = args[0].storage_offset() if func is aten.as_strided.default else None  # it is told a place in the storage
    try:
        named = _metadata(tuple(kwargs.items())) if kwargs else ()  # few have any
        key = func, _metadata(args), named, torch.get_default_dtype(), where
        hash(key)
        return key
    except TypeError:
        return None


def _metadata(value):
    if type(value) is FakeTensor and value.constant is None:  # most are, and it is a tenth of a prediction's time
        return value.shape, value.stride(), value.dtype, None
    if isinstance(value, (list, tuple)):
        return tuple(map(_metadata, value))
    if isinstance(value, torch.Tensor):
        known = value.constant if isinstance(value, FakeTensor) else value
        return value.shape, value.stride(), value.dtype, None if known is None else _number(known)
    return type(value), value


def _number(tensor) -> tuple:
    """What an operation may look at, of a tensor with values: of one of many it would cost too much."""
    if tensor.dim():
        raise TypeError
    with no_dispatch():
        return (tensor.item(),)


def _results(func, args, result):
    """How to make the results again, if each is a view of the first argument, or has a whole storage of its own."""
    if result is None:
        return "nothing"
    if args and result is args[0] and func._schema.name.endswith("_"):
        return "in place"
    made = []
    storages = {t.untyped_storage()._cdata for t in tree_leaves(args) if isinstance(t, torch.Tensor)}
    for one in result if isinstance(result, tuple) else (result,):
        if not isinstance(one, FakeTensor) or any(one is a for a in args):
            return None
        storage, first = one.untyped_storage(), args[0] if args else None
        is_view = isinstance(first, torch.Tensor) and storage._cdata == first.untyped_storage()._cdata
        extent = 1 + sum((size - 1) * stride for size, stride in zip(one.shape, one.stride()))
        whole = not one.storage_offset() and storage.nbytes() == extent * one.itemsize
        if not is_view and (storage._cdata in storages or not whole):
            return None
        storages.add(storage._cdata)
        with no_dispatch():
            constant = None if one.constant is None else one.constant.clone()
        offset = one.storage_offset() - first.storage_offset() if is_view else 0
        made.append((is_view, tuple(one.shape), one.stride(), offset, one.dtype, constant))
    return (tuple, made) if isinstance(result, tuple) else (torch.Tensor, made)


def pack_4bit(linear: torch.nn.Linear, dtype=torch.float16):
    """Make a linear layer, or GPT-2's Conv1D, under fake tensors, bitsandbytes' Linear4bit (nf4, double quantisation).

    Fake tensors refuse bitsandbytes' kind of parameter: the layer is the library's own, with an ordinary parameter of
    packed bytes, and its scales as buffers. dtype: in which it computes.
    """
    import bitsandbytes

    blocks = -(-linear.weight.numel() // 64)
    state = bitsandbytes.functional.QuantState
    second = state(torch.empty(-(-blocks // 256)), code=torch.empty(256), blocksize=256, dtype=torch.float32)
    across = not hasattr(linear, "out_features")  # a Conv1D's weight is in × out
    shape = linear.weight.shape[::-1] if across else linear.weight.shape
    scales, table, offset = torch.empty(blocks, dtype=torch.uint8), torch.empty(16), torch.empty(())
    first = state(scales, shape, table, 64, "nf4", dtype, offset, second)
    packed = torch.nn.Parameter(torch.empty(32 * blocks, 1, dtype=torch.uint8), requires_grad=False)
    packed.quant_state, packed.quant_type, packed.compress_statistics = first, "nf4", True
    linear.__class__, linear.weight = bitsandbytes.nn.Linear4bit, packed
    linear.out_features, linear.in_features = shape
    vars(linear).update(compute_dtype=dtype, compute_type_is_set=True, support_avx512bf16_for_cpu=False,
                        quant_state=None, quant_storage=torch.uint8)  # fmt: skip
    for number, tensor in enumerate((scales, second.absmax, table, second.code, offset)):
        linear.register_buffer(f"scales_{number}", tensor)
