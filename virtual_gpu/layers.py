"""The arithmetic of layers of which CUDA has kernels that the CPU computes in parts, or otherwise: plain, in fp32."""

import torch

from .arithmetic import own_kernel, write
from .attention import full

CONVOLUTION, TRANSPOSED, DEPTHWISE = "cudnn_convolution", "cudnn_convolution_transpose", "_conv_depthwise2d"
NORM, LSTM, GRU = "_fused_rms_norm", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell"


def kernels() -> dict:
    """Name of an operator → the kernel, which runs CUDA's own host code and then writes values."""
    return {
        CONVOLUTION: _convolution(), TRANSPOSED: _transposed(), DEPTHWISE: _depthwise(),
        NORM: _norm(), f"{NORM}_backward": _norm_backward(),
        LSTM: _lstm(), f"{LSTM}_backward_impl": _lstm_backward(), GRU: _gru(), f"{GRU}_backward": _gru_backward(),
    }  # fmt: skip


def _convolution():
    own = own_kernel(CONVOLUTION)

    def kernel(keys, x, weight, padding, stride, dilation, groups, *how):
        result = own(keys, x, weight, padding, stride, dilation, groups, *how)
        values = torch.convolution(*full(x, weight), None, stride, padding, dilation, False, [0] * len(stride), groups)
        write(result, values)
        return result

    return kernel


def _transposed():
    own = own_kernel(TRANSPOSED)

    def kernel(keys, x, weight, padding, output_padding, stride, dilation, groups, *how):
        result = own(keys, x, weight, padding, output_padding, stride, dilation, groups, *how)
        write(
            result, torch.convolution(*full(x, weight), None, stride, padding, dilation, True, output_padding, groups)
        )
        return result

    return kernel


def _norm():
    own = own_kernel(NORM)

    def kernel(keys, x, shape, weight, eps):
        result = own(keys, x, shape, weight, eps)
        values, scale = full(x, weight)
        eps = torch.finfo(values.dtype).eps if eps is None else eps  # of the type that it computes in, for halves too
        inverse = values.square().mean(tuple(range(-len(shape), 0)), keepdim=True).add(eps).rsqrt()
        write(result, (values * inverse * (1.0 if scale is None else scale), inverse))
        return result

    return kernel


def _norm_backward():
    own = own_kernel(f"{NORM}_backward")

    def kernel(keys, gradient, x, shape, inverse, weight, wanted):
        result = own(keys, gradient, x, shape, inverse, weight, wanted)
        g, values, scale, inverse = full(gradient, x, weight, inverse)
        normed, weighted = values * inverse, g * (1.0 if scale is None else scale)
        inner = (weighted * normed).mean(tuple(range(-len(shape), 0)), keepdim=True)
        found = inverse * (weighted - normed * inner), (g * normed).sum(tuple(range(g.dim() - len(shape))))
        for made, values in zip(result, found):
            if made is not None:
                write(made, values)
        return result

    return kernel


def _depthwise():
    own = own_kernel(DEPTHWISE)

    def kernel(keys, x, weight, size, bias, stride, padding, dilation):
        result = own(keys, x, weight, size, bias, stride, padding, dilation)
        write(result, torch.conv2d(*full(x, weight, bias), stride, padding, dilation, groups=x.shape[1]))
        return result

    return kernel


# Recurrent cells, with what they keep for backward. Source: lstm_cell_forward and the like in ATen's cuda/RNN.cu.


def _lstm():
    own = own_kernel(LSTM)

    def kernel(keys, of_input, of_hidden, cell, input_bias=None, hidden_bias=None):
        result = own(keys, of_input, of_hidden, cell, input_bias, hidden_bias)
        of_input, of_hidden, before, *biases = full(of_input, of_hidden, cell, input_bias, hidden_bias)
        gates = sum((bias for bias in biases if bias is not None), of_input + of_hidden)
        enters, forgets, new, leaves = gates.chunk(4, -1)
        enters, forgets, new, leaves = enters.sigmoid(), forgets.sigmoid(), new.tanh(), leaves.sigmoid()
        cell = forgets * before + enters * new
        write(result, (leaves * cell.tanh(), cell, torch.cat([enters, forgets, new, leaves], -1)))
        return result

    return kernel


def _lstm_backward():
    own = own_kernel(f"{LSTM}_backward_impl")

    def kernel(keys, of_output, of_cell, before, after, kept, has_bias):
        result = own(keys, of_output, of_cell, before, after, kept, has_bias)
        of_output, of_cell, before, after, kept = full(of_output, of_cell, before, after, kept)
        enters, forgets, new, leaves = kept.chunk(4, -1)
        through = 0.0 if of_output is None else of_output * leaves * (1 - after.tanh() ** 2)
        inner = through + (0.0 if of_cell is None else of_cell)
        of_leaves = torch.zeros_like(leaves) if of_output is None else of_output * after.tanh() * leaves * (1 - leaves)
        gates = [
            inner * new * enters * (1 - enters),
            inner * before * forgets * (1 - forgets),
            inner * enters * (1 - new**2),
            of_leaves,
        ]
        gates = torch.cat(gates, -1)
        write(result, (gates, inner * forgets, *([gates.sum(0)] if has_bias else [])))
        return result

    return kernel


def _gru():
    own = own_kernel(GRU)

    def kernel(keys, of_input, of_hidden, before, input_bias=None, hidden_bias=None):
        result = own(keys, of_input, of_hidden, before, input_bias, hidden_bias)
        of_input, of_hidden, before, *biases = full(of_input, of_hidden, before, input_bias, hidden_bias)
        of_input, of_hidden = (
            gates if bias is None else gates + bias for gates, bias in zip((of_input, of_hidden), biases)
        )
        (reset_x, update_x, new_x), (reset_h, update_h, new_h) = of_input.chunk(3, -1), of_hidden.chunk(3, -1)
        reset, update = (reset_x + reset_h).sigmoid(), (update_x + update_h).sigmoid()
        new = (new_x + reset * new_h).tanh()
        write(result, (new + update * (before - new), torch.cat([reset, update, new, before, new_h], -1)))
        return result

    return kernel


def _gru_backward():
    own = own_kernel(f"{GRU}_backward")

    def kernel(keys, gradient, kept, has_bias):
        result = own(keys, gradient, kept, has_bias)
        gradient, kept = full(gradient, kept)
        reset, update, new, before, new_h = kept.chunk(5, -1)
        of_update = gradient * (before - new) * update * (1 - update)
        of_new = gradient * (1 - update) * (1 - new**2)
        of_reset = of_new * new_h * reset * (1 - reset)
        of_input = torch.cat([of_reset, of_update, of_new], -1)
        of_hidden = torch.cat([of_reset, of_update, of_new * reset], -1)
        biases = [of_input.sum(0), of_hidden.sum(0)] if has_bias else []
        write(result, (of_input, of_hidden, gradient * update, *biases))
        return result

    return kernel
