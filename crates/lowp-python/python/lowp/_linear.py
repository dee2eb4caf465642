"""The linear layer on codes: forward by rowwise codes, the gradient of its input by columnwise ones."""

import torch

from . import _compile, _scaled
from ._errors import LowpError, UnsupportedOp
from ._memory import device_of


class Linear(torch.nn.Linear):
    """A linear layer whose weight is a ``lowp.Tensor``."""

    def forward(self, input):
        return linear(input, self.weight, self.bias)


def linear(input, weight, bias=None):
    """``torch.nn.functional.linear`` where the weight is a ``lowp.Tensor``."""
    if isinstance(input, _compile.Tensor) or isinstance(bias, _compile.Tensor):
        raise UnsupportedOp("the input or bias of a linear layer is a lowp.Tensor; only its weight may be one: decode the others first (.dequantize())")
    if not isinstance(weight, _compile.Tensor):  # a layer that was given plain values again
        return torch.nn.functional.linear(input, weight, bias)
    # Older versions of PyTorch also come by here with what a graph knows of the weight.
    in_graph = torch.compiler.is_compiling() or isinstance(weight._store, _compile.Traced)
    # Outside of graphs each attribute of PyTorch's tensors is a call of __torch_function__.
    is_matrix, sides = (weight.dim() == 2, weight.shape) if in_graph else (not weight._flat, weight._store.shape)
    if not is_matrix:
        raise UnsupportedOp("the weight of a linear layer is a flat lowp.Tensor; view it as a matrix first")
    rows, cols = sides
    if input.dim() == 0 or input.shape[-1] != cols:
        raise LowpError(f"an input has shape {tuple(input.shape)} and the weight is {rows}x{cols}; the last axis of the input must have {cols} values")
    if weight.device.type == "meta":
        device_of(weight.device)  # raises
    if input.layout != torch.strided or not input.is_floating_point():
        raise LowpError(f"an input has the dtype {input.dtype} and the layout {input.layout}; give dense floating-point values")
    kind = input.device.type
    if torch.is_autocast_enabled(kind) and input.dtype is not torch.float64:  # which PyTorch leaves as it is, too
        dtype = torch.get_autocast_dtype(kind)
        input = input.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    flat = input.reshape(-1, cols)
    if in_graph:
        out = _compile.linear(flat, weight, bias)
    else:
        out = _Linear.apply(flat, weight, bias)
    # Here, where autograd sees it: what a function of its own returns as a view may not be written to.
    return out if input.dim() == 2 else out.view(*input.shape[:-1], rows)


def forward(input, weight, bias):
    """The output for rows of input, and codes of the input and their scale, which the gradients need; both are ``None`` where values are
    multiplied."""
    store = weight._store
    if _scaled.serves(input, weight):
        return store.forward(input, bias)
    return torch.nn.functional.linear(input, store.decode("rowwise", input.dtype), bias), None, None


def gradients(grad, input, weight, codes, scale, needs):
    """Those of input, weight and bias that are needed. ``input`` is ``None`` beside its scale; the gradient of a weight alone needs it or its codes."""
    store = weight._store
    of_input = of_weight = None
    if scale is not None:
        of_input, of_weight = store.backward(grad, codes, scale, needs[:2])
    else:
        if needs[0]:
            of_input = grad @ store.decode("columnwise", grad.dtype)
        if needs[1]:
            of_weight = grad.t() @ input.to(grad.dtype)
    if of_weight is not None:
        of_weight = of_weight.to(weight._dtype)
    return of_input, of_weight, grad.sum(0) if needs[2] else None


def differentiable_gradients(grad, input, weight, codes, scale, needs):
    """The same where gradients of these gradients are wanted (``create_graph=True``)."""
    if scale is not None:
        raise UnsupportedOp("gradients of gradients of a layer that multiplies codes; multiply by decoded values there: linear(input, weight.dequantize())")
    of_input = grad @ weight.dequantize(orientation="columnwise", dtype=grad.dtype) if needs[0] else None
    of_weight = (grad.t() @ input.to(grad.dtype)).to(weight.dtype) if needs[1] else None
    return of_input, of_weight, grad.sum(0) if needs[2] else None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias):
        out, codes, scale = forward(input, weight, bias)
        if codes is not None or not ctx.needs_input_grad[1]:
            input = None
        if not ctx.needs_input_grad[1]:
            codes = None
        ctx.save_for_backward(input, weight, codes, scale)
        return out

    @staticmethod
    def backward(ctx, grad):
        work = differentiable_gradients if torch.is_grad_enabled() else gradients
        input, weight, codes, scale = ctx.saved_tensors
        if not isinstance(weight, _compile.Tensor):
            raise UnsupportedOp(
                "a hook of saved tensors put plain values in the place of the codes of a linear layer's weight, as torch.autograd.graph.save_on_cpu(pin_memory=True) "
                "does; use save_on_cpu(pin_memory=False), or have the hook return a lowp.Tensor as it is"
            )
        return work(grad, input, weight, codes, scale, ctx.needs_input_grad)


_compile.layer_forward, _compile.layer_gradients = forward, gradients
