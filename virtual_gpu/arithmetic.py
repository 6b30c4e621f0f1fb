"""What kernels would have computed: when an operator's own host code has allocated, its values are made on the CPU.

The virtual GPU's memory is this process's, so the operator runs once more on views of the same bytes, as tensors of the
CPU, and its results are written where the kernel would have written them. With "all" for every operator that CUDA has;
with "small" for OPERATORS, by which programs branch (`attention_mask.all()`), on whole numbers and truth values up to
MOST elements, on anything of at most FEW, and for what is copied, filled or drawn at random, up to MOST elements.
"""

import ctypes
import threading
import warnings
from contextlib import contextmanager, nullcontext

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

MOST, FEW = 1 << 18, 16
EXACT = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
HALVES = (torch.float16, torch.bfloat16)
OPERATORS = """
sum.dim_IntList cumsum max min bitwise_and.Tensor bitwise_or.Tensor bitwise_not
logical_not logical_and logical_or logical_xor where.self add.Tensor sub.Tensor mul.Tensor index.Tensor cat
arange.start_out
""".split()  # noqa: SIM905
# What these give is a whole number, a truth value or a random number, whatever they are given: a class, an index, a
# choice. What lies where a kernel would have written may be a NaN: for them it is 0, so that nothing stops a script.
NUMBERS = """
argmax argmin max.dim min.dim topk sort sort.stable kthvalue multinomial bucketize.Tensor searchsorted.Tensor
eq.Scalar eq.Tensor ne.Scalar ne.Tensor lt.Scalar lt.Tensor le.Scalar le.Tensor gt.Scalar gt.Tensor ge.Scalar ge.Tensor
random_ random_.from random_.to randperm.generator_out
fill_.Scalar fill_.Tensor masked_fill_.Scalar masked_fill_.Tensor copy_
uniform_ bernoulli_.Tensor bernoulli_.float bernoulli.out
""".split()  # noqa: SIM905
# Of truth values however many: a script goes by all the gradients of a large layer.
OF_TRUTHS = ("all", "all.dim", "any", "any.dim")
# What "small" says of a float that nobody computed, so that no script is stopped for what lay there before.
OF_FLOATS = {"isnan": False, "isinf": False, "isfinite": True}
# Their results' shapes are values, or they are no tensors, or their host code goes by values that lie in between: what
# they give is what the CPU gives, moved. What CUDA allocates inside is not seen.
SHAPED_BY_VALUES = ("nonzero", "nonzero.out", "unique_consecutive", "_unique2", "unique_dim", "masked_select",
                    "masked_select.out", "bincount", "repeat_interleave.Tensor", "equal",
                    "isin.Tensor_Tensor")  # fmt: skip
# By these words, operators that may ask a library for what is not here: with "small" they name it too.
OF_LIBRARIES = ("_fft", "linalg", "cholesky", "triangular", "geqrf", "ormqr", "cudnn", "addmm", "bmm")
# They compute nothing, or copy values themselves.
WITHOUT_VALUES = {
    "_local_scalar_dense", "record_stream", "_pin_memory", "is_pinned", "empty.memory_format", "empty_strided",
    "resize_", "_efficientzerotensor", "set_", "set_.source_Storage", "set_.source_Tensor",
    "set_.source_Storage_storage_offset", "_copy_from", "_copy_from_and_resize",
}  # fmt: skip
# Kinds of tensors of which nothing is computed here, by torch's key for their kernels.
KINDS = {"SparseCUDA": "sparse", "SparseCsrCUDA": "sparse", "NestedTensorCUDA": "nested", "QuantizedCUDA": "quantized"}
MADE = {  # and what makes such a tensor of a dense one
    "quantized": "quantize_per_tensor quantize_per_tensor_dynamic quantize_per_channel",
    "nested": "_nested_tensor_from_mask _nested_from_padded",
}
_libraries = {}  # by namespace: what replaces kernels as long as it lives
_running = threading.local()  # .depth: of kernels whose own host code is running
_runtime = []  # libcudart, which knows what was called that is not here


def start(values: str, runtime: ctypes.CDLL):
    """Wrap the CUDA kernels of torch, for this process."""
    _runtime.append(runtime)
    runtime.vgpu_unknown_name.restype = ctypes.c_char_p
    _untraced(*(made.__code__ for made in globals().values() if hasattr(made, "__code__")))
    torch._C._jit_set_texpr_fuser_enabled(False)  # of TorchScript: it compiles kernels of its own, which nothing runs
    with _replacing("aten"):
        if values == "small":
            for name in registered():
                if name == "mm" or any(word in name for word in OF_LIBRARIES):
                    _replace(name, own_kernel(name), with_keyset=True)
            for name in OPERATORS:
                _replace(name, _computed(name, _is_known), with_keyset=True)
            for name in NUMBERS:
                _replace(name, _computed(name, _is_small), with_keyset=True)
            for name in OF_TRUTHS:
                _replace(name, _computed(name, _is_of_truths), with_keyset=True)
            for name, said in OF_FLOATS.items():
                _replace(name, _always_says(name, said), with_keyset=True)
            _replace("_local_scalar_dense", _read(), with_keyset=True)
        if values == "all":
            from . import attention, layers

            written = attention.kernels() | layers.kernels()
            for name in registered():
                _replace(name, written.get(name) or _valued(name), with_keyset=True)
            torch._C._cuda_jiterator_compile_and_launch_kernel = torch.cuda._compile_kernel = _of_ones_own
        if values != "none":
            for name in SHAPED_BY_VALUES:
                _replace(name, _shaped_by_values(name))
            for key, kind in KINDS.items():
                for name in torch._C._dispatch_get_registrations_for_dispatch_key(key):
                    if name.startswith("aten::"):
                        _replace(name, _of_a_kind(name, kind), key)
            for kind, names in MADE.items():
                for name in names.split():
                    _replace(name, _of_a_kind(name, kind))


def _untraced(*codes):
    """Dynamo takes kernels for the program's own Python, where it is between two graphs."""
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for code in codes:
        frames.set_code_exec_strategy(code, skip)
        _untraced(*(inner for inner in code.co_consts if hasattr(inner, "co_code")))


def start_bitsandbytes():
    """Wrap its kernels, once it is imported: its own for a CPU, or those in plain torch, compute the values."""
    with _replacing("bitsandbytes"):
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
            if name.startswith("bitsandbytes::"):
                _replace(name, _valued(name), with_keyset=True)


@contextmanager
def _replacing(namespace):
    _libraries[namespace] = torch.library.Library(namespace, "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        yield


def registered() -> list[str]:
    """torch's operators of CUDA that compute something, without those whose results' shapes are values."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    # copy_ is registered for every device at once.
    names = ["copy_", *(name.removeprefix("aten::") for name in names if name.startswith("aten::"))]
    names = [n for n in names if n not in WITHOUT_VALUES and n not in SHAPED_BY_VALUES]
    return [n for n in names if not (_is_view(operator(n)) or _is_choice(operator(n)))]


IN_FULL = {"half_to_float": False, "input_dtype": torch.float32}  # what a softmax is told of its halves


def operator(name: str):
    namespace, _, name = _qualified(name).partition("::")
    packet, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def _qualified(name: str) -> str:
    return name if "::" in name else f"aten::{name}"


def has_kernel(name: str, key: str) -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has(_qualified(name), one) for one in (key, "CompositeExplicitAutograd"))


def own_kernel(name: str):
    """CUDA's own host code, to be called with what the kernel in its place was called with.

    NotImplementedError where it asks a library for what is not here, of which torch's own error knows a number only.
    """
    own = torch.library.get_kernel(_qualified(name), "CUDA").call_boxed
    refusals = ctypes.c_long.in_dll(_runtime[0], "vgpu_refusals")

    def run(*arguments, **options):
        _running.depth = getattr(_running, "depth", 0) + 1
        before = refusals.value
        try:
            return own(*arguments, **options)
        except RuntimeError as error:
            if refusals.value == before or isinstance(error, NotImplementedError):
                raise
            asked = _runtime[0].vgpu_unknown_name().decode()
            raise NotImplementedError(
                f"{_qualified(name)} asked for {asked}, which the virtual GPU does not have.{_without_cudnn(asked)}"
            ) from error
        finally:
            _running.depth -= 1

    return run


def _is_view(op) -> bool:
    infos = [argument.alias_info for argument in op._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


def _is_choice(op) -> bool:
    """Whether it gives a number or a truth value, which host code finds: of two kernels, which to take."""
    kinds = [str(one.type) for one in op._schema.returns]
    return bool(kinds) and not any("Tensor" in kind for kind in kinds)


def _replace(name, kernel, key="CUDA", **options):
    namespace, _, name = _qualified(name).partition("::")
    _libraries[namespace].impl(name, kernel, key, allow_override=True, **options)


def _of_a_kind(name, kind):
    def kernel(*_, **__):
        raise NotImplementedError(
            f"{name} of a {kind} tensor has no values on the virtual GPU: use dense tensors, or values='none', which "
            f"computes nothing"
        )

    return kernel


def _of_ones_own(*_, **__):
    raise NotImplementedError(
        "a kernel of one's own (torch.cuda.jiterator, torch.cuda._compile_kernel) has no values on the virtual GPU: "
        "values='small' computes none"
    )


def _valued(name):
    return _computed(name, _always) if has_kernel(name, "CPU") else _missing(name)


def _computed(name, judged):
    own, op = own_kernel(name), operator(name)
    tensors = [str(argument.type) == "Tensor" for argument in op._schema.arguments]
    random = torch.Tag.nondeterministic_seeded in op.tags

    def kernel(keys, *arguments, **options):
        if any(is_tensor and isinstance(a, (bool, int, float)) for is_tensor, a in zip(tensors, arguments)):
            beside = next(leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor))
            arguments = [_number(a, beside) if is_tensor else a for is_tensor, a in zip(tensors, arguments)]
        with drawn_as_on_cuda() if random else nullcontext():
            result = own(keys, *arguments, **options)
            if judged(
                [result, *(leaf for leaf in tree_leaves((arguments, options)) if isinstance(leaf, torch.Tensor))]
            ):
                try:
                    given = _no_nan(arguments) if judged is _is_small and not op._schema.is_mutable else arguments
                    values = _on_cpu(op, given, options)
                except (IndexError, RuntimeError):  # an index, a probability that only a kernel would have made
                    if judged is _always:
                        raise
                    _zero(result)
                    return result
                write(_made(op, result), _made(op, values))
            else:
                _zero(result if judged is _is_small else _made(op, result))
        return result

    return kernel


def _always_says(name, said: bool):
    own = own_kernel(name) if has_kernel(name, "CUDA") else lambda _, *given: operator(name).decompose(*given)

    def kernel(*given):
        result = own(*given)
        view(result).fill_(said)
        return result

    return kernel


def _no_nan(value):
    return tree_map_only(torch.Tensor, lambda t: view(t).nan_to_num(0.0, torch.inf, -torch.inf), value)


def _made(op, results):
    """Of an operator's results those that are none of its arguments: what is in place has its values already."""
    results = results if len(op._schema.returns) > 1 else (results,)
    return [result for result, one in zip(results, op._schema.returns) if one.alias_info is None]


def _read():
    """item(): the number that lies there, but no NaN, which only whole numbers that lay there before would make."""
    own = own_kernel("_local_scalar_dense")

    def kernel(keys, tensor):
        value = own(keys, tensor)
        return 0.0 if value != value else value

    return kernel


def _zero(results):
    """Whole numbers and truth values that are not computed are zeros: what lay there may be no class and no index."""
    for result in tree_leaves(results):
        if isinstance(result, torch.Tensor) and result.dtype in EXACT and result.numel():
            view(result).zero_()


def _on_cpu(op, arguments, options):
    arguments, options = here(arguments), here(options)
    options = {name: value for name, value in options.items() if name != "pin_memory"}
    if options.get("device") is not None:
        options["device"] = torch.device("cpu")
    options = {name: value for name, value in options.items() if not isinstance(value, torch.Generator)}
    with torch.no_grad():
        try:
            return op(*arguments, **options)
        except RuntimeError as error:  # a kernel that the CPU has for float alone, or not for halves beside floats
            if any(a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments):
                raise  # what is in place would be lost
            types = EXACT if "not implemented for 'Int'" in str(error) else HALVES
            names = [argument.name for argument in op._schema.arguments]
            arguments = [IN_FULL.get(name, given) for name, given in zip(names, arguments)]
            return op(*_in_full(arguments, types), **_in_full(options, types))


def _in_full(value, types):
    return tree_map_only(torch.Tensor, lambda t: t.float() if t.dtype in types else t, value)


def _without_cudnn(name):
    return " torch.backends.cudnn.enabled = False takes torch's own kernel in its place" if "cudnn" in name else ""


def _missing(name):
    own = own_kernel(name)
    way_out = _without_cudnn(name) or ' With values="small" it is not computed'

    def kernel(keys, *arguments, **options):
        if getattr(_running, "depth", 0):  # inside of an operator whose values are computed as a whole
            return own(keys, *arguments, **options)
        raise NotImplementedError(
            f"{_qualified(name)} has no values on the virtual GPU: the CPU has no kernel of it, and none is written "
            f"here.{way_out}"
        )

    return kernel


def _shaped_by_values(name):
    op = operator(name.removesuffix(".out"))

    def kernel(*arguments, out=None, **options):
        device = next(leaf.device for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor))
        if out is not None:
            values = _on_cpu(op, arguments, options)
            write(out.resize_(values.shape), values)
            return out
        return tree_map_only(torch.Tensor, lambda values: _onto(values, device), _on_cpu(op, arguments, options))

    return kernel


@contextmanager
def drawn_as_on_cuda():
    """Random numbers by the state of CUDA's generator: the same state, the same numbers, as checkpoints need."""
    generator = torch.cuda.default_generators[0]
    seed = (generator.initial_seed() * 6364136223846793005 + generator.get_offset() * 1442695040888963407) % 2**63
    kept = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(kept)


def write(results, values):
    """The values into the results' own bytes, tensor by tensor.

    What a CPU leaves empty, as a batch norm's statistics in evaluation, is for its own backward pass: not a number.
    """
    for result, value in zip(tree_leaves(results), tree_leaves(values)):
        if isinstance(result, torch.Tensor) and result.numel() and result.device.type == "cuda":
            view(result).copy_(value if value.numel() else torch.tensor(torch.nan))


def _number(value, beside):
    """A number as the tensor that it was, of a type that changes no result's type."""
    if not isinstance(value, (bool, int, float)):
        return value
    kinds = [bool, int, float]
    found = 2 if beside.is_floating_point() else 0 if beside.dtype == torch.bool else 1
    own = (torch.bool, torch.int64, torch.get_default_dtype())[kinds.index(type(value))]
    return torch.tensor(value, dtype=beside.dtype if found >= kinds.index(type(value)) else own)


def _onto(values, device):
    result = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device=device)
    write(result, values)
    return result


def _is_known(tensors):
    most = max(tensor.numel() for tensor in tree_leaves(tensors) if isinstance(tensor, torch.Tensor))
    return most <= FEW or most <= MOST and all(tensor.dtype in EXACT for tensor in tree_leaves(tensors))


def _is_small(tensors):
    return max(tensor.numel() for tensor in tree_leaves(tensors) if isinstance(tensor, torch.Tensor)) <= MOST


def _is_of_truths(tensors):
    return _is_known(tensors) or all(tensor.dtype in EXACT for tensor in tree_leaves(tensors))


def _always(_):
    return True


def here(value):
    """Any nesting with its tensors as tensors of the CPU, over the same bytes."""
    return tree_map_only(torch.Tensor, view, value)


def view(tensor):
    """The same bytes, as a tensor of the CPU."""
    if tensor.device.type != "cuda" or not tensor.numel():
        return tensor if tensor.device.type == "cpu" else torch.empty(tensor.shape, dtype=tensor.dtype)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    block = (ctypes.c_char * (extent * tensor.itemsize)).from_address(tensor.data_ptr())
    found = torch.frombuffer(block, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride(), 0)
    found = found.conj() if tensor.is_conj() else found  # not carried out yet: a bit beside the bytes
    return found._neg_view() if tensor.is_neg() else found
