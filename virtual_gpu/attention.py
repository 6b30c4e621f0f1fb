"""The arithmetic of attention, of which CUDA has kernels and the CPU has none: plain, in fp32."""

import torch

from .arithmetic import drawn_as_on_cuda, here, own_kernel, write

EFFICIENT, FLASH, CUDNN = (f"_scaled_dot_product_{name}_attention" for name in ("efficient", "flash", "cudnn"))


def kernels() -> dict:
    """Name of an operator → the kernel, which runs CUDA's own host code and then writes values."""
    return {
        EFFICIENT: _efficient(), f"{EFFICIENT}_backward": _efficient_backward(),
        FLASH: _flash(), f"{FLASH}_backward": _flash_backward(),
        CUDNN: _cudnn(), f"{CUDNN}_backward": _cudnn_backward(),
    }  # fmt: skip


def _mask(seed, query, key, p):
    """Dropout's mask of a call, drawn again from its seed."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    return (torch.rand(*query.shape[:-1], key.shape[-2], generator=generator) >= p).float() / (1 - p)


def _scores(query, key, bias, causal, scale):
    scores = query @ key.transpose(-2, -1) * scale
    if bias is not None:
        scores = scores + bias
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def forward(query, key, value, bias, causal, scale, dropped):
    """The output, and the logarithm of the sums. All of shape batch × heads × length × width."""
    scores = _scores(query, key, bias, causal, scale)
    weights = torch._safe_softmax(scores, -1)  # zeros where nothing may be looked at, as in the kernels
    return (weights * dropped) @ value, scores.logsumexp(-1)


def backward(gradient, query, key, value, bias, causal, scale, dropped):
    """Gradients of query, key, value and bias."""
    weights = torch._safe_softmax(_scores(query, key, bias, causal, scale), -1)
    inner = (gradient @ value.transpose(-2, -1)) * dropped
    scores = weights * (inner - (inner * weights).sum(-1, keepdim=True))
    return (
        scores @ key * scale,
        scores.transpose(-2, -1) @ query * scale,
        (weights * dropped).transpose(-2, -1) @ gradient,
        scores,
    )


def full(*tensors):
    """Each on the CPU, in fp32."""
    return (None if tensor is None else here(tensor).float() for tensor in tensors)


def _grouped(query, key, value):
    """Keys and values repeated for the queries that share them, and how many do."""
    groups = query.shape[1] // key.shape[1]
    return key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), groups


def _summed(gradient, groups):
    batch, heads, length, width = gradient.shape
    return gradient.view(batch, heads // groups, groups, length, width).sum(2)


def _drawn(state, query, key, p):
    """Dropout's mask of a forward, whose seed lies where CUDA keeps the state of its generator."""
    return _mask(int(here(state).flatten()[0]), query, key, p) if p else 1.0


def _new(state, query, key, p):
    """The mask of this forward, and its seed put into the state that backward will be given."""
    if not p:
        return 1.0
    with drawn_as_on_cuda():
        seed = torch.default_generator.initial_seed()
    here(state).flatten()[0] = seed
    return _mask(seed, query, key, p)


def _scale(scale, query):
    return query.shape[-1] ** -0.5 if scale is None else scale


def _attend(output, sums, state, query, key, value, bias, p, causal, scale):
    """The values of a forward, into its results. sums: batch × heads × length, some kernels' with more places."""
    q, k, v, b = full(query, key, value, bias)
    k, v, _ = _grouped(q, k, v)
    values, logarithms = forward(q, k, v, b, causal, _scale(scale, q), _new(state, q, k, p))
    write(output, values)
    if sums is not None and sums.numel():  # cuDNN's has none where no gradient will be asked for
        sums = sums.squeeze(-1) if sums.dim() == 4 else sums
        write(sums[..., : logarithms.shape[-1]], logarithms)


def _gradients(gradient, query, key, value, bias, seed, p, causal, scale):
    """Of query, key, value and bias."""
    g, q, k, v, b = full(gradient, query, key, value, bias)
    k, v, groups = _grouped(q, k, v)
    dropped = _drawn(seed, q, k, p)
    of_q, of_k, of_v, of_b = backward(g, q, k, v, b, causal, _scale(scale, q), dropped)
    return of_q, _summed(of_k, groups), _summed(of_v, groups), of_b


def _efficient():
    own = own_kernel(EFFICIENT)

    def kernel(keys, query, key, value, bias, with_sums, p=0.0, causal=False, *, scale=None):
        result = own(keys, query, key, value, bias, with_sums, p, causal, scale=scale)
        _attend(*result[:3], query, key, value, bias, p, causal, scale)
        return result

    return kernel


def _efficient_backward():
    own = own_kernel(f"{EFFICIENT}_backward")

    def kernel(
        keys, gradient, query, key, value, bias, output, sums, seed, offset, p, wanted, causal=False, *, scale=None
    ):
        result = own(keys, gradient, query, key, value, bias, output, sums, seed, offset, p, wanted, causal,
                                scale=scale)  # fmt: skip
        found = _gradients(gradient, query, key, value, bias, seed, p, causal, scale)
        for made, values in zip(result, found):
            if made is not None:
                write(made, values)
        return result

    return kernel


def _flash():
    own = own_kernel(FLASH)

    def kernel(keys, query, key, value, p=0.0, causal=False, with_mask=False, *, scale=None):
        result = own(keys, query, key, value, p, causal, with_mask, scale=scale)
        _attend(*result[:2], result[6], query, key, value, None, p, causal, scale)
        return result

    return kernel


def _flash_backward():
    own = own_kernel(f"{FLASH}_backward")

    def kernel(keys, gradient, query, key, value, output, *more, scale=None):
        sums, starts, starts_k, longest, longest_k, p, causal, seed, offset = more
        result = own(keys, gradient, query, key, value, output, *more, scale=scale)
        write(result, _gradients(gradient, query, key, value, None, seed, p, causal, scale)[:3])
        return result

    return kernel


def _cudnn():
    own = own_kernel(CUDNN)

    def kernel(keys, query, key, value, bias, with_sums, p=0.0, causal=False, with_mask=False, *, scale=None):
        result = own(keys, query, key, value, bias, with_sums, p, causal, with_mask, scale=scale)
        _attend(*result[:2], result[6], query, key, value, bias, p, causal, scale)
        return result

    return kernel


def _cudnn_backward():
    own = own_kernel(f"{CUDNN}_backward")

    def kernel(keys, gradient, query, key, value, output, sums, seed, offset, bias, *more, scale=None):
        *_, p, causal = more
        result = own(keys, gradient, query, key, value, output, sums, seed, offset, bias, *more, scale=scale)
        write(result, _gradients(gradient, query, key, value, bias, seed, p, causal, scale)[:3])
        return result

    return kernel
