"""What kernels do that an operation does not say: what they hold, in which order, how a CPU multiplies halves."""

import warnings
from contextlib import contextmanager
from functools import partial

import torch

aten = torch.ops.aten
# Where a CPU emulates bf16, matrix products of halves take far longer than in fp32: with AVX2 alone some 60 times,
# by machine._bf16_time with torch 2.10 and 2.13. Computed in fp32 and rounded, they differ in the order of the sums.
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_replaced = []  # the library whose kernels multiply now, if not torch's


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
    if func is not aten.add.Tensor or len(args) != 2:
        return False
    before, more = args
    if not (isinstance(before, torch.Tensor) and isinstance(more, torch.Tensor) and before.shape == more.shape):
        return False
    alone = before._use_count() == 4 and torch._C._storage_Use_Count(before.untyped_storage()._cdata) == 2
    return alone and before.dtype == more.dtype


def multiply_in_fp32():
    """From here on matrix products of halves on a CPU are computed in fp32 and rounded, as hardware does.

    Other products are torch's, and so are attention's fused kernel and the code of a compiler. For one thread: a
    product holds Python's lock.
    """
    if _replaced:
        return
    _replaced.append(library := torch.library.Library("aten", "IMPL"))
    rounded = torch.compiler.disable(_rounded)  # Dynamo takes it for the program's own Python
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # that a kernel is replaced
        for name in PRODUCTS:
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
            library.impl(name, partial(rounded, kernel), "CPU", with_keyset=True)


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
    if kind in (torch.bfloat16, torch.float16) and all(factor.dtype == kind for factor in factors):
        factors = [factor.float() for factor in factors]
    return kernel.call_boxed(keys, *factors, **options).to(kind)
