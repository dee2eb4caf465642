"""The linear layer on codes: forward by rowwise codes, the gradient of its input by columnwise ones."""

import torch
from torch.autograd.function import once_differentiable

from . import _compile, _scaled


class Linear(torch.nn.Linear):
    """A linear layer whose weight is a ``lowp.Tensor``."""

    def forward(self, input):
        return linear(input, self.weight, self.bias)


def linear(input, weight, bias=None):
    """``torch.nn.functional.linear`` where the weight is a ``lowp.Tensor``."""
    if not isinstance(weight, _compile.Tensor):  # a layer that was given plain values again
        return torch.nn.functional.linear(input, weight, bias)
    kind = input.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        input = input.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    # Older versions of PyTorch also come by here with what a graph knows of the weight.
    if torch.compiler.is_compiling() or isinstance(weight._store, _compile.Traced):
        return _compile.linear(input, weight, bias)
    return _Linear.apply(input, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias):
        flat = input.reshape(-1, input.shape[-1])
        ctx.has_bias = bias is not None
        if _scaled.serves(flat, weight):
            out, codes, scale = _scaled.forward(flat, weight._store, bias)
            ctx.scaled = True
            ctx.save_for_backward(weight, codes, scale)
        else:
            ctx.scaled = False
            ctx.save_for_backward(weight, input)
            decoded = weight._store.decode("rowwise", input.dtype)
            out = torch.nn.functional.linear(flat, decoded, bias)
        ctx.shape, ctx.dtype = input.shape, input.dtype
        return out.view(*input.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        weight, *saved = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        of_input = of_weight = of_bias = None
        if ctx.scaled:
            of_input, of_weight = _scaled.backward(flat, weight._store, saved, ctx.needs_input_grad)
        else:
            if ctx.needs_input_grad[0]:
                of_input = flat @ weight._store.decode("columnwise", flat.dtype)
            if ctx.needs_input_grad[1]:
                input = saved[0].reshape(-1, ctx.shape[-1])
                of_weight = flat.t() @ input.to(flat.dtype)
        if ctx.needs_input_grad[0]:
            of_input = of_input.view(ctx.shape)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            of_bias = flat.sum(0)
        return of_input, None if of_weight is None else of_weight.to(weight.dtype), of_bias
