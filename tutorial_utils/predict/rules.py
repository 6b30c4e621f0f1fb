"""What a device chooses, and what CUDA's kernels hold while they run.

Which operators, in which type, for a function of torch: each stands in for the function of `patches.PATCHES` that
names it, with what is predicted, the original, and the arguments. `OnCuda`: bytes that an allocator is asked for
besides arguments and results.
"""

import math

import torch

from .. import machine

aten, functions = torch.ops.aten, torch.nn.functional
# What adds up, with the place of its dimensions among the arguments.
SUMS = {aten.sum.default: 1, aten.sum.dim_IntList: 1, aten.mean.default: 1, aten.mean.dim: 1,
        aten.linalg_vector_norm.default: 2}  # fmt: skip
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
WARP, MOST_THREADS = 32, 512  # of a block that adds up
LEAST, MOST = 16, 256  # values for one thread, before blocks share an output
UNROLLED = 4  # elements that a thread reads at once


def cpu_attention(
    _, original, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    shapes = {(t.dim(), *t.shape[:-2], t.shape[-1]) for t in (query, key, value)}
    masked = attn_mask is not None and (attn_mask.requires_grad or attn_mask.dim() not in (2, 4))
    if dropout_p or enable_gqa or masked or query.dim() != 4 or len(shapes) > 1:
        return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    query, key, value, attn_mask = map(_autocast, (query, key, value, attn_mask))
    mask = None if attn_mask is None else _additive(attn_mask, query.dtype)
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    return flash(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]


def cuda_attention(
    here, _, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    query, key, value, attn_mask = map(_autocast, (query, key, value, attn_mask))
    kernel = attention_kernel(here.gpu, query, attn_mask, enable_gqa, value)
    if kernel == "flash":
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if kernel == "efficient":
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        efficient = aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]
    return _math_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _math_attention(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa):
    """Source: _scaled_dot_product_attention_math in ATen's transformers/attention.cpp. Halves are computed in fp32."""
    root = (scale or query.shape[-1] ** -0.5) ** 0.5
    groups = query.shape[-3] // key.shape[-3] if enable_gqa else 1
    if groups > 1:
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    if is_causal:
        mask = query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    with torch.autocast("cpu", enabled=False):
        query, key, value, kind = query.float(), key.float(), value.float(), query.dtype  # they live to the end
        scores = (query * root) @ (key * root).transpose(-2, -1)
        if mask is not None:
            scores.add_(_additive(mask, torch.float32))
        weights, full = functions.softmax(scores, -1), scores.eq(-torch.inf)  # it looks for rows without a key
        del scores, full
        weights = functions.dropout(weights, dropout_p)
        output = weights @ value
        _ = weights.to(kind)  # which it returns, and nobody takes
        return output.to(kind)


def cuda_dropout(_, original, input, p=0.5, training=True, inplace=False):
    if not training or p == 0 or inplace:
        return original(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def cuda_softmax(_, original, input, dim=None, _stacklevel=3, dtype=None):
    if input.dtype == torch.float16 and (dtype == torch.float32 or torch.is_autocast_enabled("cpu")):
        return aten._softmax(input, dim, True)  # one kernel reads halves and writes floats
    return original(_autocast(input, torch.float32), dim, dtype=dtype)


def cuda_cross_entropy(
    _, original, input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean",
    label_smoothing=0.0,
):  # fmt: skip
    rest = weight, size_average, ignore_index, reduce, reduction
    if not torch.is_autocast_enabled("cpu") or label_smoothing or target.is_floating_point():
        return original(input, target, *rest, label_smoothing)
    with torch.autocast("cpu", enabled=False):  # CUDA's has nll_loss in fp32, but no log_softmax of a given type
        logs = torch.log_softmax(input, min(input.dim() - 1, 1))
        return functions.nll_loss(logs.float(), target, *rest)


def in_full(_, original, input, *arguments, **options):
    return original(_autocast(input, torch.float32), *arguments, **options)


def attention_kernel(gpu, query, mask, enable_gqa, value) -> str:
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


def _autocast(value, dtype=None):
    """The value as autocast hands it to a kernel, in this type or in the reduced one."""
    if not torch.is_autocast_enabled("cpu") or not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.to(dtype or torch.get_autocast_dtype("cpu"))


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
    if length % 8:
        mask = functions.pad(mask, (0, 8 - length % 8))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


class OnCuda:
    """Of a card, or of any; what depends on the number of multiprocessors where it is known.

    products: by thread the number of the first operation that multiplies, and takes cuBLAS' workspace.
    """

    def __init__(self, gpu: machine.Gpu | None):
        self.gpu, self.products = gpu, {}

    def __call__(self, func, args, number):
        sizes, known = (), self.gpu is not None and self.gpu.multiprocessors
        if func in PRODUCTS:
            self.products.setdefault("forward" if torch._C._current_graph_task_id() == -1 else "backward", number)
            sizes = [matrix.numel() * matrix.itemsize for matrix in args[-2:] if copied(matrix)]
        elif func in SUMS and known:
            sizes = sum_buffer(args[0].shape, args[0].stride(), _dims(args, SUMS[func]), self.gpu)
        elif func is aten._softmax_backward_data.default:
            sizes = (args[0].nbytes,)  # the gradient times the output. Source: ATen's cuda/SoftMax.cu
        elif func is aten._scaled_dot_product_efficient_attention_backward.default:
            sizes = efficient_buffers(args[1], args[2], self.gpu if known else None)
        elif func is aten._scaled_dot_product_flash_attention_backward.default:
            sizes = flash_buffers(args[1], args[2])
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
