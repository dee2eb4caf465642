"""Weights that nobody trains (``requires_grad=False``), such as those under adapters: arithmetic reads their values, and values may be added to them.

What is refused for a weight that is trained, since its optimizer would lose changes smaller than a step of the codes, is a single write here: an adapter
that is merged (``weight.data += delta``, ``weight.data = values``).
"""

import torch

from . import _ops
from ._errors import LowpError, UnsupportedOp
from ._ops import aten, handles
from ._torch_compat import is_parameter, schema_of, tree_leaves, without_torch_function


def is_frozen(tensor):
    """Whether a tensor is a parameter without gradients, or comes from one: ``"weight"`` of it by ``.data`` and ``.detach()``, ``"copy"`` by copies."""
    with without_torch_function():  # else each look at it is a call of __torch_function__
        return not tensor.requires_grad and (tensor._frozen is not None or is_parameter(tensor))


def reads(func, args, kwargs):
    """Whether an operation reads values of frozen weights alone, into memory of its own."""
    held = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _ops.Tensor)]
    if func.namespace != "aten" or not all(map(is_frozen, held)):
        return False
    if any(result.alias_info for result in schema_of(func).returns):
        raise UnsupportedOp(
            f"{func} of a lowp.Tensor, whose codes have no such view; decode it first (.dequantize()): what is written to those values stays there"
        )
    return True


@handles(aten.add_, aten.sub_)
def _add(func, tensor, other, alpha=1):
    """Casts the sum of the decoded values and ``other``, in float32."""
    if not isinstance(tensor, _ops.Tensor) or not is_frozen(tensor) or isinstance(other, _ops.Tensor) and not is_frozen(other):
        return _ops.read_or_refuse(func, (tensor, other), {"alpha": alpha})
    if tensor._frozen == "copy" and not is_parameter(tensor):
        raise UnsupportedOp(
            f"{func} of a copy of a frozen lowp.Tensor, which would round the sum to codes; decode it first (.dequantize()), or add to the .data of the weight "
            "itself, which is cast once: merge adapters of peft with safe_merge=False"
        )
    store = tensor._store
    total = store.decode_any().view(tensor.shape)
    func(total, other.dequantize(dtype=torch.float32) if isinstance(other, _ops.Tensor) else other, alpha=alpha)
    _ops.store_values(tensor, total.view(store.shape))
    return tensor


@torch.no_grad()
def assign(tensor, values):
    """``tensor.data = values``: copies them into the buffers of a frozen weight."""
    if not is_frozen(tensor):
        raise UnsupportedOp(
            "an assignment to .data of a lowp.Tensor, which has no memory except its buffers of codes and scales; copy the values or the codes into "
            "the tensor that is there (.copy_()), or freeze the weight first (requires_grad_(False)), if an adapter is merged into it"
        )
    if not isinstance(values, torch.Tensor) or values.shape != tensor.shape or not values.is_floating_point():
        found = f"{values.dtype} {tuple(values.shape)}" if isinstance(values, torch.Tensor) else type(values).__name__
        raise LowpError(f"{found} was assigned to .data of a lowp.Tensor of {tuple(tensor.shape)}; give floating-point values of the same shape")
    tensor.copy_(values)
