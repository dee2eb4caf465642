"""Products of FP8 codes, where the GPU has them: with a scale for each tensor, for each row, or for each 128 values.

The scales of both directions of a cast operand are one tensor: those of rowwise codes, then, on an aligned place, those of columnwise ones.
"""

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
#: The product by its name in lowp-gemm: the recipe that casts its operands, and what the scales of those and of a weight belong to. A weight
#: whose scales are for squares has fewer of them than operands have.
_PRODUCTS = {
    "Fp8Tensor": ("fp8-current", "tensor"),
    "Fp8Rows": ("fp8-rowwise", "rows"),
    "Fp8Groups128": ("fp8-block-1d", "1x128"),
}
_SCALES = {recipe: scales for recipe, scales in _PRODUCTS.values()}
_GROUP = 128
_HOPPER = (9, 0)
#: Scales of columnwise codes begin at a multiple of so many.
_ALIGNED = 64


def serves(input, weight):
    """Whether both operands can be codes: on a GPU that multiplies those of the recipe, in sides that the product takes."""
    store = weight._store
    if store.products is None:
        store.products = _multiplies(store.device, store.recipe) and all(_fits(side) for side in store.shape)
    return store.products and input.dtype in _VALUES and _fits(input.shape[0]) and input.device == store.device


def _fits(side):
    return side > 0 and side % SIDE == 0


def _multiplies(device, recipe):
    if device.type != "cuda" or operands(recipe) is None:
        return False
    found = kind(recipe, torch.cuda.get_device_capability(device))
    return found is not None and (found == "Fp8Tensor" or _has_scaled())


@functools.cache
def _has_scaled():
    """Whether this PyTorch's cuBLASLt, 12.9 or later, has products with more than one scale for an operand."""
    version = torch.version.cuda
    return version is not None and tuple(map(int, version.split(".")[:2])) >= (12, 9)


def kind(recipe, capability=_HOPPER):
    """The name of the product that a GPU has for all three products of a layer; ``None`` where it decodes operands of one."""
    kinds = set(recipe.products(*capability))
    return kinds.pop() if len(kinds) == 1 and kinds <= _PRODUCTS.keys() else None


def operands(recipe):
    """The recipes of inputs and of gradients beside a weight of ``recipe``: its elements by role, with its options. ``None`` where no GPU
    has products of its codes here."""
    if recipe not in _OPERANDS:
        _OPERANDS[recipe] = _operands_of(recipe)
    return _OPERANDS[recipe]


def _operands_of(recipe):
    found = kind(recipe)
    if found is None:
        return None
    name, scales = _PRODUCTS[found]
    # Scales of operands follow from their values, also beside weights whose scale is delayed.
    shared = as_recipe(name, {}).options.keys() - {"format"}
    options = {option: value for option, value in recipe.options.items() if option in shared}
    elements = [recipe.product("rowwise", role)[0] for role in ("activation", "gradient")]
    recipes = [as_recipe(name, {**options, "format": element.lower()}) for element in elements]
    for operand, element in zip(recipes, elements):
        _NUMBERED[number_of(operand)] = operand
        if hasattr(_lowp, "describe_operand"):
            _lowp.describe_operand(number_of(operand), operand, element, scales)
    return recipes


@functools.cache
def scales_of(recipe):
    """What the scales of a weight belong to: ``tensor``, ``rows``, ``1x128`` or ``128x128``."""
    return recipe.product("rowwise")[1]


def count(scales, outer, depth):
    """How many scales codes of ``outer`` rows have that are contracted over ``depth``, as a product reads them."""
    if scales == "tensor":
        return 1
    if scales == "rows":
        return outer
    groups = (depth + _GROUP - 1) // _GROUP
    if scales == "1x128":
        return groups * outer
    return (outer + _GROUP - 1) // _GROUP * _padded(groups)


def _padded(groups):
    return (groups + 3) // 4 * 4


def _begin(scales, rows, cols):
    """Where scales of columnwise codes begin."""
    return 0 if scales == "tensor" else (count(scales, rows, cols) + _ALIGNED - 1) // _ALIGNED * _ALIGNED


def scale_shape(recipe, rows, cols):
    """The shape of the scales of a cast operand."""
    scales = _SCALES[recipe.name]
    return () if scales == "tensor" else (_begin(scales, rows, cols) + count(scales, cols, rows),)


def _side(codes, scale, recipe, orientation="rowwise"):
    """Codes of a cast operand as a product takes them: with the scales of their direction, and what those belong to."""
    scales = _SCALES[recipe.name]
    if scales == "tensor":
        return codes, scale, scales
    outer, depth = codes.shape
    start = 0 if orientation == "rowwise" else _begin(scales, depth, outer)
    return codes, scale[start : start + count(scales, outer, depth)], scales


def number_of(recipe):
    """The number of a recipe of operands: the same in every process, as graphs are kept for others."""
    text = repr((recipe.name, sorted(recipe.options.items())))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little")


def numbered(number):
    """The recipe of a number."""
    return _NUMBERED[number]


def cast(source, recipe):
    """Contiguous values as codes of both directions, each row-major, and their scales. Plans stay for addresses that come again."""
    device, (rows, cols), element = source.device, source.shape, dtype_of(recipe)
    rowwise = torch.empty((rows, cols), dtype=element, device=device)
    columnwise = torch.empty((cols, rows), dtype=element, device=device)
    scale = torch.empty(scale_shape(recipe, rows, cols), dtype=torch.float32, device=device)
    spans = [("rowwise_data", memory(rowwise)), ("columnwise_data", memory(columnwise))]
    if scale.dim() == 0:
        spans.append(("tensor_scale", memory(scale)))
    else:
        spans.append(("rowwise_scale_inv", memory(_side(rowwise, scale, recipe)[1])))
        spans.append(("columnwise_scale_inv", memory(_side(columnwise, scale, recipe, "columnwise")[1])))
    dtype = "bfloat16" if source.dtype is torch.bfloat16 else "float32"
    _casts_of(device).encode(device_of(device), recipe, (rows, cols), memory(source), dtype, spans)
    return rowwise, columnwise, scale


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
    """The codes of an orientation of a weight, row-major, their scales as products read them, and whether either was made for one product: codes
    that the weight leaves out, and scales whose rows are padded or do not begin where products read."""
    made = orientation == "columnwise" and store.leaves_out_columnwise
    viewed, scale = _views(store, "rowwise" if made else orientation)
    scales = scales_of(store.recipe)
    if made:
        viewed = viewed.view(torch.uint8).t().contiguous().view(viewed.dtype)
    if scales == "128x128":
        outer, groups = ((side + _GROUP - 1) // _GROUP for side in viewed.shape)
        scale = scale.view(groups, outer).t() if made else scale.view(outer, groups)
        if groups % 4:
            scale, made = torch.nn.functional.pad(scale, (0, -groups % 4)), True
        scale = scale.reshape(-1)
    if scales != "tensor" and scale.data_ptr() % 16:
        scale, made = scale.clone(), True
    return viewed, scale, made


def _views(store, orientation):
    """The codes of an orientation that a weight has, and their scales: views, made once for each buffer."""
    buffers = store.buffers
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
_BY_PLACE = {}
#: Bytes that a product works in, as many as PyTorch gives its own on a Hopper. They are PyTorch's: taken for each product, so that
#: nothing holds them after it, and graphs that PyTorch captures have their own.
_WORKSPACE = 32 << 20


def product(a, b, dtype, bias=None, fast=False):
    """``a @ b.T`` of codes with their scales and what those belong to, summed in float32 and rounded to ``dtype``."""
    (left, of_left, scales), (right, of_right, others) = a, b
    whole = scales == others == "tensor"
    of_product = fused(bias, dtype, right.shape[0], left.device) if whole else None
    if left.device.type == "cuda":
        (rows, depth), cols = left.shape, right.shape[0]
        out = torch.empty((rows, cols), dtype=dtype, device=left.device)
        sides = [(memory(codes), memory(scale), _ELEMENTS[codes.dtype], of) for codes, scale, of in (a, b)]
        added = None if of_product is None else memory(of_product)
        products, workspace = _products_of(left.device), empty(_WORKSPACE, left.device)
        # Sums of scaled groups are in float32 alone.
        products.multiply((rows, cols, depth), *sides, memory(out), dtype_name(dtype), added, fast and whole, memory(workspace))
    elif whole:
        out = scaled_mm(left, right.t(), of_left, of_right, bias=of_product, out_dtype=dtype, use_fast_accum=fast)
    else:
        out = (_values(*a) @ _values(*b).t()).to(dtype)
    if bias is not None and of_product is None:
        out += bias  # the product adds no bias to float32
    return out


def _values(codes, scale, scales):
    """What a product reads codes and scales as, for processors that have no such product."""
    outer, depth = codes.shape
    groups = (depth + _GROUP - 1) // _GROUP
    if scales == "rows":
        scale = scale[:, None]
    elif scales == "1x128":
        scale = scale.view(groups, outer).repeat_interleave(_GROUP, 0)[:depth].t()
    else:
        scale = scale.view(-1, _padded(groups)).repeat_interleave(_GROUP, 0).repeat_interleave(_GROUP, 1)[:outer, :depth]
    return codes.float() * scale


def _products_of(device):
    place = device_of(device)
    products = _BY_PLACE.get(place)
    if products is None:
        products = _BY_PLACE[place] = _lowp.Products(place)
    return products


def multiply(a, store, orientation, dtype, bias=None):
    """The product of a cast operand with codes of a weight: with ``rowwise`` ones for the output of the layer, else for the gradient of its input."""
    store.check_serves(orientation)
    weight, scale, _ = codes(store, orientation)
    side = _side(*a, operands(store.recipe)[orientation == "columnwise"])
    return product(side, (weight, scale, scales_of(store.recipe)), dtype, bias, fast=orientation == "rowwise")


def fused(bias, dtype, width, device):
    """The bias as a product of so many columns adds it; ``None`` where it adds none: to float32, or of another shape, or from another device."""
    if bias is None or dtype is not torch.bfloat16 or bias.shape != (width,) or bias.device != device:
        return None
    return bias.to(dtype).contiguous()


def fused_beside(recipe, bias, dtype, width, device):
    """The same beside a weight: products add a bias to sums with one scale alone."""
    return fused(bias, dtype, width, device) if scales_of(recipe) == "tensor" else None


def forward(input, store, bias):
    """The product in the dtype of the input, and what its backward needs."""
    rowwise, columnwise, scale = cast(input.contiguous(), operands(store.recipe)[0])
    return multiply((rowwise, scale), store, "rowwise", input.dtype, bias), columnwise, scale


def backward(grad, store, saved, needs):
    """The gradients of the input and of the weight that are needed."""
    input, gradient = operands(store.recipe)
    rowwise, columnwise, scale = cast(grad.contiguous(), gradient)
    of_input = of_weight = None
    if needs[0]:
        of_input = multiply((rowwise, scale), store, "columnwise", grad.dtype)
    if needs[1]:
        sides = zip(((columnwise, scale), saved), (gradient, input))
        of_weight = product(*(_side(*codes, recipe, "columnwise") for codes, recipe in sides), grad.dtype)
    return of_input, of_weight
