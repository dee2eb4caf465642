"""The linear layer on codes: forward by rowwise codes, the gradient of its input by columnwise ones."""

import torch
from torch.autograd.function import once_differentiable

from . import _compile, _scaled
from ._errors import LowpError


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


def forward(input, weight, bias):
    """The output, and codes of the input and their scale, which the gradients need; both are ``None`` where values are multiplied."""
    store = weight._store
    if input.dim() == 0 or input.shape[-1] != store.cols:
        raise LowpError(f"an input of shape {tuple(input.shape)} for a weight of {store.rows}x{store.cols}; its last axis must have {store.cols} values")
    flat = input.reshape(-1, store.cols)
    codes = scale = None
    if _scaled.serves(flat, weight):
        out, codes, scale = store.forward(flat, bias)
    else:
        out = torch.nn.functional.linear(flat, store.decode("rowwise", input.dtype), bias)
    return out.view(*input.shape[:-1], store.rows), codes, scale


def gradients(grad, input, weight, codes, scale, needs):
    """Those of input, weight and bias that are needed. ``input`` is ``None`` beside its codes."""
    store, flat = weight._store, grad.reshape(-1, grad.shape[-1])
    of_input = of_weight = None
    if codes is not None:
        of_input, of_weight = store.backward(flat, codes, scale, needs[:2])
    else:
        if needs[0]:
            of_input = flat @ store.decode("columnwise", flat.dtype)
        if needs[1]:
            of_weight = flat.t() @ input.reshape(-1, input.shape[-1]).to(flat.dtype)
    if of_input is not None:
        of_input = of_input.view(*grad.shape[:-1], store.cols)
    if of_weight is not None:
        of_weight = of_weight.to(weight.dtype)
    return of_input, of_weight, flat.sum(0) if needs[2] else None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias):
        out, codes, scale = forward(input, weight, bias)
        ctx.save_for_backward(input if codes is None else None, weight, codes, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return gradients(grad, *ctx.saved_tensors, ctx.needs_input_grad)


_compile.layer_forward, _compile.layer_gradients = forward, gradients
