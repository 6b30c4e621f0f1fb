"""What a device chooses: which operators, in which type, for a function of torch.

Each stands in for the function of `patches.PATCHES` that names it, with what is predicted, the original, and the
arguments.
"""

import torch

aten, functions = torch.ops.aten, torch.nn.functional


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
