"""Products of codes, where the GPU has them: FP8 with one scale for each tensor."""

import functools
import hashlib

import torch

from . import _lowp
from ._memory import device_of, dtype_name, empty, memory
from ._plan import as_recipe
from ._torch_compat import scaled_mm

#: Multiple of every side of a product of FP8 codes.
SIDE = 16
_DTYPES = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
_DIRECTIONS = ("rowwise", "columnwise")
_VALUES = (torch.bfloat16, torch.float32)
_OPERANDS, _NUMBERED = {}, {}
#: Buffers of a cast operand: a scale for the tensor.
_BUFFERS = ("rowwise_data", "columnwise_data", "tensor_scale")


def serves(input, weight):
    """Whether both operands can be codes: on a GPU that multiplies FP8, by a recipe with one scale for each tensor."""
    store = weight._store
    if store.products is None:
        store.products = _multiplies(store.device) and all(_fits(side) for side in store.shape) and operands(store.recipe) is not None
    return store.products and input.dtype in _VALUES and _fits(input.shape[0]) and input.device == store.device


def _fits(side):
    return side > 0 and side % SIDE == 0


@functools.cache
def _multiplies(device):
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def operands(recipe):
    """The recipes of inputs and of gradients beside a weight of ``recipe``: its elements by role, with its options. ``None`` where
    products of codes cannot take them."""
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
    recipes = [as_recipe("fp8-current", {**options, "format": name.lower()}) for name in elements]
    for recipe, name in zip(recipes, elements):
        _NUMBERED[number_of(recipe)] = recipe
        if hasattr(_lowp, "describe_operand"):
            _lowp.describe_operand(number_of(recipe), recipe, name)
    return recipes


def number_of(recipe):
    """The number of a recipe of operands: the same in every process, as graphs are kept for others."""
    text = repr((recipe.name, sorted(recipe.options.items())))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little")


def numbered(number):
    """The recipe of a number."""
    return _NUMBERED[number]


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
    _casts_of(device).encode(device_of(device), recipe, (rows, cols), memory(source), dtype, spans)
    return made


@functools.cache
def _casts_of(device):
    """The planned casts of what layers take on a device, which comes at the same addresses again."""
    return _lowp.Casts(1024)


@functools.cache
def dtype_of(recipe, orientation="rowwise"):
    """The dtype of codes."""
    return _DTYPES[element_of(recipe, orientation)]


def element_of(recipe, orientation):
    """The element of codes, ``E4M3`` or ``E5M2``."""
    return recipe.product(orientation)[0]


def codes(store, orientation):
    """The codes of an orientation of a weight, row-major, and their scale: views, made once for each buffer. A transpose that the weight leaves out is
    made for each product."""
    buffers = store.buffers
    if orientation == "columnwise" and store.leaves_out_columnwise:
        of_rows, scale = codes(store, "rowwise")
        return of_rows.view(torch.uint8).t().contiguous().view(of_rows.dtype), scale
    data = buffers.get(f"{orientation}_data")
    if data is None:
        data = buffers["shared_data"]
    scale = buffers.get("tensor_scale")
    if scale is None:
        scale = buffers[f"{orientation}_scale_inv"]
    known = store.views.get(orientation)
    if known is not None and known[0] is data and known[1] is scale:
        return known[2]
    sides = store.shape if orientation == "rowwise" else store.shape[::-1]
    viewed = data.view(dtype_of(store.recipe, orientation)).view(sides), scale.view(torch.float32)
    store.views[orientation] = (data, scale, viewed)
    return viewed


_ELEMENTS = {dtype: name for name, dtype in _DTYPES.items()}
_PRODUCTS = {}
#: Bytes that a product works in, as many as PyTorch gives its own on a Hopper. They are PyTorch's: taken for each product, so that
#: nothing holds them behind it, and graphs that PyTorch captures have their own.
_WORKSPACE = 32 << 20


def product(a, b, dtype, bias=None, fast=False):
    """``a @ b.T`` of codes with their scales, summed in float32 and rounded to ``dtype``."""
    (a, of_a), (b, of_b) = a, b
    of_product = fused(bias, dtype, b.shape[0], a.device)
    if a.device.type == "cuda":
        (rows, depth), cols = a.shape, b.shape[0]
        out = torch.empty((rows, cols), dtype=dtype, device=a.device)
        left, right = ((memory(t), memory(scale), _ELEMENTS[t.dtype]) for t, scale in ((a, of_a), (b, of_b)))
        added = None if of_product is None else memory(of_product)
        products, workspace = _products_of(a.device), empty(_WORKSPACE, a.device)
        products.multiply((rows, cols, depth), left, right, memory(out), dtype_name(dtype), added, fast, memory(workspace))
    else:
        out = scaled_mm(a, b.t(), of_a, of_b, bias=of_product, out_dtype=dtype, use_fast_accum=fast)
    if bias is not None and of_product is None:
        out += bias  # the product adds no bias to float32
    return out


def _products_of(device):
    place = device_of(device)
    products = _PRODUCTS.get(place)
    if products is None:
        products = _PRODUCTS[place] = _lowp.Products(place)
    return products


def multiply(a, store, orientation, dtype, bias=None):
    """The product of codes with those of a weight: with ``rowwise`` ones for the output of the layer, else for the gradient of its input."""
    store.check_serves(orientation)
    return product(a, codes(store, orientation), dtype, bias, fast=orientation == "rowwise")


def fused(bias, dtype, width, device):
    """The bias as a product of so many columns adds it; ``None`` where it adds none: to float32, or of another shape, or from another device."""
    if bias is None or dtype is not torch.bfloat16 or bias.shape != (width,) or bias.device != device:
        return None
    return bias.to(dtype).contiguous()


def forward(input, store, bias):
    """The product in the dtype of the input, and what its backward needs."""
    rowwise, columnwise, scale = cast(input.contiguous(), operands(store.recipe)[0])
    return multiply((rowwise, scale), store, "rowwise", input.dtype, bias), columnwise, scale


def backward(grad, store, saved, needs):
    """The gradients of the input and of the weight that are needed."""
    rowwise, columnwise, scale = cast(grad.contiguous(), operands(store.recipe)[1])
    of_input = of_weight = None
    if needs[0]:
        of_input = multiply((rowwise, scale), store, "columnwise", grad.dtype)
    if needs[1]:
        of_weight = product((columnwise, scale), saved, grad.dtype)
    return of_input, of_weight
