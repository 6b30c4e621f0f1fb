"""What kernels do that an operation does not say: what they hold, in which order, how a CPU multiplies halves."""

import warnings
from contextlib import contextmanager
from functools import partial

import torch

aten = torch.ops.aten
# Of a CPU that emulates bf16, as those without AVX-512 do: in up to 90 times fp32's time (torch 2.10 to 2.13). Its own
# kernels add up in fp32, too, and round once: only the order of the sums is another.
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_replaced = []  # the library whose kernels multiply now, if not torch's
# CUDA allocates their results in this order, which decides where a caching allocator puts them.
LAST_FIRST = {aten.native_dropout.default}


def on_cpu(func, args, _=0) -> tuple[torch.Tensor, ...]:
    """scatter_add_ adds up halves in fp32.

    Source: the accumulation buffer in ATen's cpu/ScatterGatherKernel.cpp.
    """
    if func is aten.scatter_add_.default and args[0].dtype in (torch.float16, torch.bfloat16):
        return (args[0].float(),)
    return ()


def accumulates_in_place(func, args) -> bool:
    """Whether autograd adds a gradient to one that came before and that nobody else has.

    Under a dispatch mode it makes a new tensor, and a CPU measured under one holds that. Source: accumulate in torch's
    autograd/input_buffer.cpp. An operation's own first argument counts 4: in the buffer, on its way here, and twice
    in Python.
    """
    if func is not aten.add.Tensor or len(args) != 2 or torch.is_grad_enabled():
        return False
    before, more = args
    if not (isinstance(before, torch.Tensor) and isinstance(more, torch.Tensor) and before.shape == more.shape):
        return False
    alone = before._use_count() == 4 and torch._C._storage_Use_Count(before.untyped_storage()._cdata) == 2
    return alone and before.dtype == more.dtype


def multiply_in_fp32():
    """From here on a CPU computes products of halves in fp32 and rounds them, as hardware does; fp32's are torch's."""
    if _replaced:
        return
    library, rounded = torch.library.Library("aten", "IMPL"), torch.compiler.disable(_rounded)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # that a kernel is replaced
        for name in PRODUCTS:
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
            library.impl(name, partial(rounded, kernel), "CPU", with_keyset=True)
    _replaced.append(library)


@contextmanager
def of_torch():
    """Torch's own kernels meanwhile: for times. Afterwards those that were there before."""
    before = bool(_replaced)
    _restore()
    try:
        yield
    finally:
        _restore()
        if before:
            multiply_in_fp32()


def _restore():
    while _replaced:
        _replaced.pop()._destroy()


def _rounded(kernel, keys, *factors, **options):
    kind = factors[-1].dtype
    wide = [factor.float() for factor in factors] if kind in (torch.bfloat16, torch.float16) else factors
    return kernel.call_boxed(keys, *wide, **options).to(kind)
