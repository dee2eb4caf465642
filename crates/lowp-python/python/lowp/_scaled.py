"""Products of codes, by ``torch._scaled_mm``, where the GPU has them: FP8 with one scale for each tensor."""

import functools

import torch

from ._memory import device_of, memory, values
from ._plan import as_recipe
from ._store import casts_of

#: Multiple of every side of a product of FP8 codes.
SIDE = 16
_DTYPES = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
_DIRECTIONS = ("rowwise", "columnwise")
_OPERANDS = {}
#: Buffers of a cast operand: a scale for the tensor.
_BUFFERS = ("rowwise_data", "columnwise_data", "tensor_scale")


def serves(input, weight):
    """Whether both operands can be codes: on a GPU that multiplies FP8, by a recipe with one scale for each tensor."""
    if input.device.type != "cuda" or not _multiplies(input.device):
        return False
    if input.dtype not in (torch.bfloat16, torch.float32):
        return False
    sides = (*input.shape, weight.shape[0])
    return all(side and side % SIDE == 0 for side in sides) and operands(weight._store.recipe) is not None


def _multiplies(device):
    return torch.cuda.get_device_capability(device) >= (8, 9)


def operands(recipe):
    """The recipes of inputs and of gradients beside a weight of ``recipe``: its elements by role, with its options. ``None`` where
    ``torch._scaled_mm`` cannot multiply them."""
    if recipe not in _OPERANDS:
        _OPERANDS[recipe] = _operands_of(recipe)
    return _OPERANDS[recipe]


def _operands_of(recipe):
    def element(role):
        ways = {recipe.product(direction, role) for direction in _DIRECTIONS}
        name, scale = ways.pop()
        return name if not ways and scale == "tensor" and name in _DTYPES else None

    if element("weight") != "E4M3":
        return None
    elements = [element(role) for role in ("activation", "gradient")]
    if None in elements:
        return None
    # Scales of operands follow from their values, also beside weights whose scale is delayed.
    shared = as_recipe("fp8-current", {}).options.keys() - {"format"}
    options = {name: value for name, value in recipe.options.items() if name in shared}
    return [as_recipe("fp8-current", {**options, "format": name.lower()}) for name in elements]


def cast(source, recipe):
    """Contiguous values as codes of both directions, each row-major, and their scale. Plans stay for addresses that come again."""
    device, (rows, cols), element = source.device, source.shape, dtype_of(recipe)
    made = (
        torch.empty((rows, cols), dtype=element, device=device),
        torch.empty((cols, rows), dtype=element, device=device),
        torch.empty((), dtype=torch.float32, device=device),
    )
    spans = [(name, memory(tensor)) for name, tensor in zip(_BUFFERS, made)]
    dtype = "bfloat16" if source.dtype is torch.bfloat16 else "float32"
    casts_of(device).encode(device_of(device), recipe, (rows, cols), memory(source), dtype, spans)
    return made


@functools.cache
def dtype_of(recipe, orientation="rowwise"):
    """The dtype of codes."""
    return _DTYPES[recipe.product(orientation)[0]]


def codes(store, orientation):
    """The codes of an orientation of a weight, row-major, and their scale."""
    buffers = store.buffers
    data = buffers.get(f"{orientation}_data")
    if data is None:
        data = buffers["shared_data"]
    scale = buffers.get("tensor_scale")
    if scale is None:
        scale = buffers[f"{orientation}_scale_inv"]
    sides = store.shape if orientation == "rowwise" else store.shape[::-1]
    return data.view(dtype_of(store.recipe, orientation)).view(sides), scale.view(torch.float32)


def product(a, b, dtype, **options):
    """``a @ b.T`` of codes with their scales, summed in float32 and rounded to ``dtype``."""
    (a, of_a), (b, of_b) = a, b
    return torch._scaled_mm(a, b.t(), of_a, of_b, out_dtype=dtype, **options)


def multiply(a, store, orientation, dtype, bias=None):
    """The product of codes with those of a weight: with ``rowwise`` ones for the output of the layer, else for the gradient of its input."""
    store.check_serves(orientation)
    options = {}
    if orientation == "rowwise":
        options["use_fast_accum"] = True
    if bias is not None and dtype == torch.bfloat16:
        options["bias"] = bias.to(dtype)
    out = product(a, codes(store, orientation), dtype, **options)
    if bias is not None and "bias" not in options:
        out += bias  # the product adds no bias to float32
    return out


def forward(input, weight, bias):
    """The product in the dtype of the input, and what its backward needs."""
    store = weight._store
    rowwise, columnwise, scale = cast(input.contiguous(), operands(store.recipe)[0])
    return multiply((rowwise, scale), store, "rowwise", input.dtype, bias), (columnwise, scale)


def backward(grad, weight, saved, needs):
    """The gradients of the input and of the weight."""
    store = weight._store
    rowwise, columnwise, scale = cast(values(grad), operands(store.recipe)[1])
    of_input = of_weight = None
    if needs[0]:
        of_input = multiply((rowwise, scale), store, "columnwise", grad.dtype)
    if needs[1]:
        of_weight = product((columnwise, scale), tuple(saved), grad.dtype)
    return of_input, of_weight
