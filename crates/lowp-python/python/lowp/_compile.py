"""The linear layer as operators that ``torch.compile`` keeps as they are, and compiles around.

A compiled graph takes what a tensor holds for constant, and the codes that FSDP2 gathers for forward are others than those for backward. Graphs
therefore have the number of the weight's store, a tensor of one integer, and operators look the codes up when they run.
"""

import functools
import itertools
import weakref

import torch

from . import _native, _scaled
from ._errors import LowpError, UnsupportedOp
from ._lowp import VERSION
from ._plan import as_recipe
from ._torch_compat import skip_frame, without_modes

Tensor = is_frozen = None  # set by _tensor.py, which uses this file
layer_forward = layer_gradients = None  # set by _linear.py, which uses this file
_STORES = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def token_of(store):
    """The number of a store, as a tensor on the CPU: the same each time."""
    if store.token is None:
        store.number = number = next(_NUMBERS)
        with without_modes():
            store.token = torch.tensor([number])
        _STORES[number] = store
    return store.token


def store_of(token):
    """The store that a token is of."""
    return _store_numbered(int(token))


def _store_numbered(number):
    store = _STORES.get(number)
    if store is None:
        raise LowpError(f"weight {number} of a compiled graph no longer exists; keep the model for as long as its graphs run")
    return store


class Traced:
    """What is known of a store while a graph is made: everything but the codes."""

    def __init__(self, recipe, shape, device, token):
        self.recipe, self.shape, self.device, self.token = recipe, shape, device, token
        self.rows, self.cols = shape
        self.buffers, self.master, self.contexts, self.products = {}, None, {}, None

    def decode(self, orientation, dtype=torch.float32):
        return torch.ops.lowp.decode(self.token, orientation, self.shape, dtype, self.device)

    def forward(self, input, bias):
        # An operator of its own, so that layers of one input share its codes.
        rowwise, columnwise, scale = torch.ops.lowp.cast(input, _scaled.number_of(_scaled.operands(self.recipe)[0]))
        fused = _scaled.fused_beside(self.recipe, bias, input.dtype, self.rows, input.device)
        is_wide, biased = input.dtype is torch.float32, fused is not None
        out = torch.ops.lowp.multiply(rowwise, scale, self.token, self.rows, is_wide, fused if biased else scale, biased)
        return out if bias is None or biased else (out + bias).to(out.dtype), columnwise, scale

    def backward(self, grad, codes, scale, needs):
        made = torch.ops.lowp.backward(grad, codes, scale, self.token, self.cols, *needs)
        return [of if needed else None for of, needed in zip(made, needs)]

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedOp(
            f"a compiled graph has the shape of a lowp.Tensor but not its codes ({name}); only multiply by it or decode it in the graph, and put other "
            "operations into a function under torch.compiler.disable"
        )


def note_writes(tensors):
    """Has autograd know that tensors were written: graphs that saved them, or their tokens, are not walked with other values."""
    stores = [tensor._store for tensor in tensors if isinstance(tensor, Tensor)]
    tokens = [store.token for store in stores if store.token is not None]
    torch.autograd.graph.increment_version([*tensors, *tokens])


@functools.cache
def _skip_frames():
    """Has Dynamo make no graphs that begin in ``__torch_function__``, whose guards do not tell one attribute from another; it follows calls into it
    as before. Not when lowp is imported, as Dynamo takes a second to be."""
    skip_frame(Tensor.__torch_function__.__func__)


_INNER = ["_token"]


def flatten(tensor):
    """The tensor as its token, and what graphs take for constant."""
    _skip_frames()
    store, dtype, flat, frozen = tensor._store, tensor._dtype, tensor._flat, is_frozen(tensor)
    context = store.contexts.get((dtype, flat, frozen))
    if context is None:
        recipe = (store.recipe.name, tuple(sorted(store.recipe.options.items())))
        context = store.contexts[dtype, flat, frozen] = (recipe, store.shape, dtype, flat, str(store.device), frozen)
        _scaled.operands(store.recipe)  # graphs that were kept for other processes know them by number
    return _INNER, context


def cache_key(tensor):
    """What graphs that PyTorch keeps for other processes depend on."""
    return repr((VERSION, *_SCHEMAS, *flatten(tensor)))


def unflatten(inner, context):
    """The store that a token names, or what is known of the store while a graph is made; the dtype; whether the tensor is flat, and whether it is frozen."""
    recipe, shape, dtype, flat, device, frozen = context
    token = inner["_token"]
    if type(token) is torch.Tensor:
        return store_of(token), dtype, flat, frozen
    return Traced(as_recipe(recipe[0], dict(recipe[1])), tuple(shape), torch.device(device), token), dtype, flat, frozen


_LIBRARY = torch.library.Library("lowp", "DEF")
_SCHEMAS = []


def _operator(schema, fake):
    """An operator without gradients, by what it does and by the shapes that it returns."""
    name = schema.partition("(")[0]

    def register(function):
        _LIBRARY.define(schema)
        _SCHEMAS.append(schema)
        if function is not None:
            _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"lowp::{name}", fake, lib=_LIBRARY)
        return function

    return register


@_operator(
    "decode(Tensor token, str orientation, SymInt[] shape, ScalarType dtype, Device device) -> Tensor",
    lambda token, orientation, shape, dtype, device: torch.empty(shape, dtype=dtype, device=device),
)
def _decode(token, orientation, shape, dtype, device):
    return store_of(token).decode(orientation, dtype)


def _cast_shapes(values, operand):
    rows, cols = values.shape
    recipe = _scaled.numbered(operand)
    sides = (("rowwise", (rows, cols)), ("columnwise", (cols, rows)))
    codes = [values.new_empty(shape, dtype=_scaled.dtype_of(recipe, orientation)) for orientation, shape in sides]
    return *codes, values.new_empty(_scaled.scale_shape(recipe, rows, cols), dtype=torch.float32)


@_operator("cast(Tensor values, int operand) -> (Tensor, Tensor, Tensor)", _cast_shapes)
def _cast(values, operand):
    return _scaled.cast(values.contiguous(), _scaled.numbered(operand))


def _dtype(is_wide):
    return torch.float32 if is_wide else torch.bfloat16


@_operator(
    "multiply(Tensor codes, Tensor scale, Tensor token, SymInt width, bool is_wide, Tensor bias, bool biased) -> Tensor",
    lambda codes, scale, token, width, is_wide, bias, biased: codes.new_empty((codes.shape[0], width), dtype=_dtype(is_wide)),
)
def _multiply(codes, scale, token, width, is_wide, bias, biased):
    return _scaled.multiply((codes, scale), store_of(token), "rowwise", _dtype(is_wide), bias if biased else None)


def _forward_shapes(input, token, width, bias, biased):
    rows, cols = input.shape
    recipe = _scaled.operands(store_of(token).recipe)[0]
    codes = input.new_empty((cols, rows), dtype=_scaled.dtype_of(recipe, "columnwise"))
    return input.new_empty((rows, width)), codes, input.new_empty(_scaled.scale_shape(recipe, rows, cols), dtype=torch.float32)


@_operator("forward(Tensor input, Tensor token, SymInt width, Tensor bias, bool biased) -> (Tensor, Tensor, Tensor)", _forward_shapes)
def _forward_of_codes(input, token, width, bias, biased):
    return _scaled.forward(input, store_of(token), bias if biased else None)


def forward(input, store, bias):
    """The product of a layer by codes, and what its gradients need: outside of graphs."""
    fused, token = _scaled.fused_beside(store.recipe, bias, input.dtype, store.rows, input.device), token_of(store)
    biased = fused is not None
    out, codes, scale = _native.call(_FORWARD, input, token, store.rows, fused if biased else token, biased)
    return out if bias is None or biased else out.add_(bias), codes, scale


def backward(grad, codes, scale, store, needs):
    """The gradients of a layer's input and weight by codes; ``None`` for those that nobody needs."""
    codes = scale if codes is None else codes  # a frozen weight has no gradient, which needs them
    made = _native.call(_BACKWARD, grad, codes, scale, token_of(store), store.cols, *needs)
    return [of if needed else None for of, needed in zip(made, needs)]


def _backward_shapes(grad, codes, scale, token, width, of_input, of_weight):
    rows, cols = grad.shape
    made = grad.new_empty((rows, width) if of_input else 0)
    return made, grad.new_empty((cols, codes.shape[0]) if of_weight else 0)


@_operator(
    "backward(Tensor grad, Tensor codes, Tensor scale, Tensor token, SymInt width, bool of_input, bool of_weight) -> (Tensor, Tensor)",
    _backward_shapes,
)
def _backward_of_codes(grad, codes, scale, token, width, *needs):
    made = _scaled.backward(grad, store_of(token), (codes, scale), needs)
    return tuple(grad.new_empty(0) if of is None else of for of in made)


_operator("hold(int layer, bool columnwise, Tensor codes, Tensor scale, bool once) -> ()", lambda *_: None)(None)
_FORWARD, _BACKWARD = torch.ops.lowp.forward.default, torch.ops.lowp.backward.default
_native.store_of, _native.hold = _store_numbered, torch.ops.lowp.hold.default
_native.register()


def _no_such_weight(*_):
    raise LowpError("the operators lowp::linear and lowp::dequantize need a weight that is a lowp.Tensor")


# The one that a graph is first made of. With a weight that is a lowp.Tensor PyTorch calls ``linear_forward``, so that graphs for execution
# have the operators above, and plain ones around them.
_LIBRARY.define("linear(Tensor input, Tensor weight, Tensor? bias) -> (Tensor, Tensor, Tensor)")
_LIBRARY.impl("linear", _no_such_weight, "CompositeExplicitAutograd")


def linear_forward(func, input, weight, bias=None):
    """The product, and codes of the input and their scale, which its gradients need; both are empty where values are multiplied."""
    out, *saved = layer_forward(input, weight, bias)
    return out, *(input.new_empty(0) if tensor is None else tensor for tensor in saved)


# The values of a weight, as a copy that its gradient flows through. Graphs for execution have lowp::decode in its place.
_LIBRARY.define("dequantize(Tensor weight, str orientation, ScalarType dtype) -> Tensor")
_LIBRARY.impl("dequantize", _no_such_weight, "CompositeExplicitAutograd")


def dequantize(func, weight, orientation, dtype):
    return weight._store.decode(orientation, dtype).view(weight.shape)


def _note_dtype(ctx, inputs, output):
    ctx.dtype = inputs[0].dtype


torch.library.register_autograd(
    "lowp::dequantize", lambda ctx, grad: (grad.to(ctx.dtype), None, None), setup_context=_note_dtype, lib=_LIBRARY
)


def _save(ctx, inputs, output):
    input, weight, bias = inputs
    _, codes, scale = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(input, weight, codes, scale)


def _backward(ctx, grad, *_):
    input, weight, codes, scale = ctx.saved_tensors
    if grad is None:
        return None, None, None
    if not codes.numel():
        codes = scale = None
    return layer_gradients(grad, input, weight, codes, scale, ctx.needs_input_grad)


torch.library.register_autograd("lowp::linear", _backward, setup_context=_save, lib=_LIBRARY)


def linear(input, weight, bias):
    """The layer in a graph, for rows of input."""
    return torch.ops.lowp.linear(input, weight, bias)[0]
