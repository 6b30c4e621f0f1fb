"""The arithmetic of layers of which CUDA has kernels that the CPU computes in parts, or otherwise: plain, in fp32."""

import torch

from .arithmetic import own_kernel, write
from .attention import full


def kernels() -> dict:
    """Name of an operator → the kernel, which runs CUDA's own host code and then writes values."""
    return {name: _kernel(name, compute) for name, compute in COMPUTED.items()} | {"pow.Scalar": _power}


def _kernel(name, compute):
    own = own_kernel(name)

    def kernel(keys, *arguments, **options):
        result = own(keys, *arguments, **options)
        write(result, compute(*arguments, **options))
        return result

    return kernel


def _power(keys, base, exponent):
    """Without CUDA's own host code, which hands its number on as a tensor of the GPU that Python may not have."""
    base = torch.full((), base, dtype=torch.result_type(base, exponent), device=exponent.device)
    return torch.pow(base, exponent)


def _log_sigmoid_backward(gradient, x, buffer):
    gradient, values = full(gradient, x)
    return gradient * (-values).sigmoid()


def _convolution(x, weight, padding, stride, dilation, groups, *_):
    return torch.convolution(*full(x, weight), None, stride, padding, dilation, False, [0] * len(stride), groups)


def _transposed(x, weight, padding, output_padding, stride, dilation, groups, *_):
    return torch.convolution(*full(x, weight), None, stride, padding, dilation, True, output_padding, groups)


def _depthwise(x, weight, size, bias, stride, padding, dilation):
    return torch.convolution(*full(x, weight, bias), stride, padding, dilation, False, [0] * len(stride), x.shape[1])


def _norm(x, shape, weight, eps):
    values, scale = full(x, weight)
    eps = torch.finfo(values.dtype).eps if eps is None else eps  # of the type that it computes in, for halves too
    inverse = values.square().mean(tuple(range(-len(shape), 0)), keepdim=True).add(eps).rsqrt()
    return values * inverse * (1.0 if scale is None else scale), inverse


def _norm_backward(gradient, x, shape, inverse, weight, wanted):
    gradient, values, scale, inverse = full(gradient, x, weight, inverse)
    normed, weighted = values * inverse, gradient * (1.0 if scale is None else scale)
    inner = (weighted * normed).mean(tuple(range(-len(shape), 0)), keepdim=True)
    return inverse * (weighted - normed * inner), (gradient * normed).sum(tuple(range(x.dim() - len(shape))))


# Recurrent cells, with what they keep for backward. Source: lstm_cell_forward and the like in ATen's cuda/RNN.cu.


def _lstm(of_input, of_hidden, cell, input_bias=None, hidden_bias=None):
    of_input, of_hidden, before, *biases = full(of_input, of_hidden, cell, input_bias, hidden_bias)
    gates = sum((bias for bias in biases if bias is not None), of_input + of_hidden)
    enters, forgets, new, leaves = gates.chunk(4, -1)
    enters, forgets, new, leaves = enters.sigmoid(), forgets.sigmoid(), new.tanh(), leaves.sigmoid()
    cell = forgets * before + enters * new
    return leaves * cell.tanh(), cell, torch.cat([enters, forgets, new, leaves], -1)


def _lstm_backward(of_output, of_cell, before, after, kept, has_bias):
    of_output, of_cell, before, after, kept = full(of_output, of_cell, before, after, kept)
    of_output, of_cell = (torch.zeros_like(after) if given is None else given for given in (of_output, of_cell))
    enters, forgets, new, leaves = kept.chunk(4, -1)
    inner = of_cell + of_output * leaves * (1 - after.tanh() ** 2)
    gates = [
        inner * new * enters * (1 - enters),
        inner * before * forgets * (1 - forgets),
        inner * enters * (1 - new**2),
        of_output * after.tanh() * leaves * (1 - leaves),
    ]
    gates = torch.cat(gates, -1)
    return gates, inner * forgets, gates.sum(0)


def _gru(of_input, of_hidden, before, input_bias=None, hidden_bias=None):
    of_input, of_hidden, before, *biases = full(of_input, of_hidden, before, input_bias, hidden_bias)
    of_input, of_hidden = (
        gates if bias is None else gates + bias for gates, bias in zip((of_input, of_hidden), biases)
    )
    (reset_x, update_x, new_x), (reset_h, update_h, new_h) = of_input.chunk(3, -1), of_hidden.chunk(3, -1)
    reset, update = (reset_x + reset_h).sigmoid(), (update_x + update_h).sigmoid()
    new = (new_x + reset * new_h).tanh()
    return new + update * (before - new), torch.cat([reset, update, new, before, new_h], -1)


def _gru_backward(gradient, kept, has_bias):
    gradient, kept = full(gradient, kept)
    reset, update, new, before, new_h = kept.chunk(5, -1)
    of_update = gradient * (before - new) * update * (1 - update)
    of_new = gradient * (1 - update) * (1 - new**2)
    of_reset = of_new * new_h * reset * (1 - reset)
    of_input = torch.cat([of_reset, of_update, of_new], -1)
    of_hidden = torch.cat([of_reset, of_update, of_new * reset], -1)
    return of_input, of_hidden, gradient * update, of_input.sum(0), of_hidden.sum(0)


# What a call did not ask for is None, or empty, among the results, and is not written.
COMPUTED = {
    "cudnn_convolution": _convolution,
    "cudnn_convolution_transpose": _transposed,
    "_conv_depthwise2d": _depthwise,
    "conv_depthwise3d": _depthwise,
    "log_sigmoid_backward": _log_sigmoid_backward,  # the CPU's wants a buffer that CUDA does not make
    "_fused_rms_norm": _norm,
    "_fused_rms_norm_backward": _norm_backward,
    "_thnn_fused_lstm_cell": _lstm,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_backward,
    "_thnn_fused_gru_cell": _gru,
    "_thnn_fused_gru_cell_backward": _gru_backward,
}
