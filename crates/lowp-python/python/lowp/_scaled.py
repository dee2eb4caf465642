"""Products of codes, by ``torch._scaled_mm``, where the GPU has them: FP8 with one scale for each tensor."""

import torch

from ._memory import device_of, memory
from ._plan import as_recipe
from ._store import Store, casts_of

#: Multiple of every side of a product of FP8 codes.
SIDE = 16
_OPERANDS = {}


def serves(input, weight):
    """Whether both operands can be codes: on a GPU that multiplies FP8, by a recipe with one scale for each tensor."""
    if input.device.type != "cuda" or not _multiplies(input.device):
        return False
    if input.dtype not in (torch.bfloat16, torch.float32):
        return False
    sides = (*input.shape, weight.shape[0])
    return all(side and side % SIDE == 0 for side in sides) and _is_fp8(weight._store.recipe)


def _multiplies(device):
    return torch.cuda.get_device_capability(device) >= (8, 9)


def _is_fp8(recipe):
    ways = [recipe.product(orientation) for orientation in ("rowwise", "columnwise")]
    return all(way == ("E4M3", "tensor") for way in ways)


def _cast(values, recipe):
    """``values`` as codes of both directions. Plans stay for addresses that come again."""
    device = values.device
    # Scales of operands follow from their values, also beside weights whose scale is delayed.
    recipe = _OPERANDS.setdefault(recipe, as_recipe("fp8-current", {}))
    store = Store.empty(recipe, *values.shape, device)
    dtype = "bfloat16" if values.dtype == torch.bfloat16 else "float32"
    casts_of(device).encode(device_of(device), recipe, store.shape, memory(values), dtype, store.named())
    return store


def codes(store, orientation):
    """The codes of an orientation, row-major, and their scale."""
    name = f"{orientation}_data"
    data = store.buffers[name if name in store.buffers else "shared_data"].view(torch.float8_e4m3fn)
    sides = store.shape if orientation == "rowwise" else store.shape[::-1]
    scale = next(store.buffers[n] for n in (f"{orientation}_scale_inv", "tensor_scale") if n in store.buffers)
    return data.view(sides), scale.view(torch.float32)


def forward(input, weight, bias):
    """The product, and what its backward needs."""
    dtype = torch.bfloat16
    store = weight._store
    cast = _cast(input.contiguous(), store.recipe)
    bias = None if bias is None else bias.to(dtype)
    out = torch._scaled_mm(
        *_operands(codes(cast, "rowwise"), codes(store, "rowwise")), bias=bias, out_dtype=dtype, use_fast_accum=True
    )
    data, scale = codes(cast, "columnwise")
    return out.to(input.dtype), (data, scale)


def _operands(a, b):
    (a, of_a), (b, of_b) = a, b
    return a, b.t(), of_a, of_b


def backward(grad, weight, saved, needs):
    """The gradients of the input and of the weight."""
    store = weight._store
    cast = _cast(grad.contiguous(), store.recipe)
    of_input = of_weight = None
    if needs[0]:
        if store.full is not None:
            store.full.derive()
        out = torch._scaled_mm(*_operands(codes(cast, "rowwise"), codes(store, "columnwise")), out_dtype=torch.bfloat16)
        of_input = out.to(grad.dtype)
    if needs[1]:
        out = torch._scaled_mm(*_operands(codes(cast, "columnwise"), tuple(saved)), out_dtype=torch.bfloat16)
        of_weight = out
    return of_input, of_weight
