"""What kernels hold besides their arguments and results while they run, in bytes that an allocator is asked for."""

import math

import torch

from . import machine

aten = torch.ops.aten
# What adds up, with the place of its dimensions among the arguments.
SUMS = {aten.sum.default: 1, aten.sum.dim_IntList: 1, aten.mean.default: 1, aten.mean.dim: 1,
        aten.linalg_vector_norm.default: 2}  # fmt: skip
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
BACKWARDS = (
    aten._softmax_backward_data.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
)
HOLDING = PRODUCTS | SUMS.keys() | {*BACKWARDS}
# CUDA allocates their results in this order, which decides where a caching allocator puts them.
LAST_FIRST = {aten.native_dropout.default}
WARP, MOST_THREADS = 32, 512  # of a block that adds up
LEAST, MOST = 16, 256  # values for one thread, before blocks share an output
UNROLLED = 4  # elements that a thread reads at once


def on_cpu(func, args, _=0) -> tuple[torch.Tensor, ...]:
    """scatter_add_ adds up halves in fp32.

    Source: the accumulation buffer in ATen's cpu/ScatterGatherKernel.cpp.
    """
    if func is aten.scatter_add_.default and args[0].dtype in (torch.float16, torch.bfloat16):
        return (args[0].float(),)
    return ()


class OnCuda:
    """Of a card, or of any; what depends on the number of multiprocessors where it is known.

    products: by thread the number of the first operation that multiplies, and takes cuBLAS' workspace.
    """

    def __init__(self, gpu: machine.Gpu | None):
        self.gpu, self.products = gpu, {}

    def __call__(self, func, args, number):
        if func not in HOLDING:
            return ()
        if func in PRODUCTS:
            self.products.setdefault("forward" if torch._C._current_graph_task_id() == -1 else "backward", number)
        known = self.gpu is not None and self.gpu.multiprocessors
        softmax, efficient, flash = BACKWARDS
        if func is softmax:
            sizes = (args[0].nbytes,)  # the gradient times the output. Source: ATen's cuda/SoftMax.cu
        elif func in SUMS and known:
            sizes = sum_buffer(args[0].shape, args[0].stride(), _dims(args, SUMS[func]), self.gpu)
        elif func is efficient:
            sizes = efficient_buffers(args[1], args[2], self.gpu if known else None)
        elif func is flash:
            sizes = flash_buffers(args[1], args[2])
        elif func in PRODUCTS:
            sizes = [matrix.numel() * matrix.itemsize for matrix in args[-2:] if copied(matrix)]
        else:
            sizes = ()
        return [torch.empty(size, dtype=torch.uint8) for size in sizes]


def _dims(args, place):
    dims = args[place] if len(args) > place and args[place] else range(args[0].dim())
    return {dim % max(args[0].dim(), 1) for dim in dims}


def copied(matrix) -> bool:
    """Whether cuBLAS gets a copy: of a matrix with no dense dimension, such as the gradient of a sum or of a mean.

    Source: prepare_matrix_for_cublas in ATen's cuda/Blas.cpp.
    """
    (rows, columns), (down, across) = matrix.shape[-2:], matrix.stride()[-2:]
    dense = down == 1 and across >= max(1, rows) or across == 1 and down >= max(1, columns)
    return not (dense or matrix.is_contiguous() or matrix.mT.is_contiguous())


def efficient_buffers(query, key, gpu: machine.Gpu | None) -> tuple[int, ...]:
    """Bytes that memory-efficient attention holds in its backward pass: row sums, and a query's gradient in fp32.

    Gradients are added up in tiles of rows × columns, each with two locks. Source: the kernels of cutlassB.h and
    GradQTempStorage of kernel_backward.h in ATen's transformers/cuda/mem_eff_attention.
    """
    (batch, heads, length, width), half = query.shape, query.dtype != torch.float32
    large = gpu is not None and machine.multiprocessor(gpu.capability)["shared_kib"] >= 160
    rows, columns, whole = 64, 64, False  # whole: the gradients of keys and values too
    if width > 64 and half:
        rows, columns = 128, 128 if large else 64
        whole = width > 128 or not large and width > 96 and (gpu is None or gpu.capability >= (8, 0))
    elif width > 64 and large:
        rows = 128
    tiles = -(-length // rows) * -(-width // columns)
    keys = 2 * 4 * key.shape[-2] * width if whole else 0
    return 4 * batch * heads * length, batch * heads * (tiles * (4 * rows * columns + 16) + keys)


def flash_buffers(query, key) -> tuple[int, ...]:
    """Bytes that flash attention holds in its backward pass: row sums, and a query's gradient in fp32.

    Where queries share keys, the gradients of keys and values for each query too. Source: mha_bwd in ATen's
    transformers/cuda/flash_attn/flash_api.cpp.
    """
    batch, heads, length, width = query.shape
    rows, columns = -(-length // 128) * 128, -(-width // 32) * 32
    sizes = 4 * batch * heads * rows, 4 * batch * heads * rows * columns
    shared = (batch * heads * key.shape[-2] * width * query.itemsize,) * 2 if heads != key.shape[1] else ()
    return (*sizes, *shared)


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


def sum_buffer(shape, strides, dims, gpu: machine.Gpu) -> tuple[int, ...]:
    """Bytes in which blocks of threads that share an output leave their sums, and of their semaphores; () for none.

    Of a sum over the dimensions `dims`, accumulated in fp32. Source: setReduceConfig in ATen's cuda/Reduce.cuh; a sum
    over rows is split until each multiprocessor has as many blocks as it holds threads for.
    """
    reduced, kept = _merged(shape, strides, dims, True), _merged(shape, strides, dims, False)
    inputs, outputs = (math.prod(size for _, size in part) for part in (reduced, kept))
    along = not kept or bool(reduced) and reduced[0][0] < kept[0][0]  # whether it adds up what lies side by side
    fastest, width, height = (reduced or [(1, 1)], inputs, outputs) if along else (kept, outputs, inputs)
    together = 1  # outputs that a thread reads at once
    if fastest[0][0] == 1:
        if along and width > 128 and not kept and len(reduced) == 1:
            width //= UNROLLED
        elif not along:
            others = [stride for stride, _ in (*reduced, *kept[1:])]
            together = math.gcd(UNROLLED, kept[0][1], *others)
            width //= together
    most = MOST_THREADS // together
    width, height = min(_power(width), most), min(_power(height), most)
    block_height = min(height, most // min(width, WARP))
    block_width = min(width, most // block_height)
    values = -(-inputs // block_width) if along else inputs  # for one thread
    shared = values >= min(LEAST * block_height, MOST)
    values = -(-values // block_height) if shared else values
    at_once = (1 if along else block_width) * (1 if shared else block_height)
    blocks = -(-(outputs // together) // at_once)
    threads = machine.multiprocessor(gpu.capability)["threads"]
    wanted = gpu.multiprocessors * (threads // (block_width * block_height))
    if not shared or values < MOST or blocks > wanted:
        return ()
    split = max(min(-(-wanted // blocks), -(-values // LEAST)), -(-values // MOST))
    if split == 1:
        return ()
    return 4 * outputs * split * (1 if along else block_width * together), 4 * blocks


def _merged(shape, strides, dims, inside):
    """(stride, size) of the dimensions inside of `dims`, or of the others; fastest first, neighbours as one."""
    merged = []
    chosen = [(strides[d], n) for d, n in enumerate(shape) if (d in dims) == inside and n > 1]
    for stride, size in sorted(chosen):
        if merged and math.prod(merged[-1]) == stride:
            merged[-1] = merged[-1][0], merged[-1][1] * size
        else:
            merged.append((stride, size))
    return merged


def _power(number: int) -> int:
    """The highest power of two that is not above it, at least 1."""
    return 1 << max(number.bit_length() - 1, 0)
