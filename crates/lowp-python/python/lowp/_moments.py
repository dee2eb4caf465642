"""What an optimizer keeps of a parameter beside its master: values or, in fp8, codes of a byte with the scale of each block (docs/numerics.md 23.3).

The codes of a state have the shape of the parameter. A block of 32 elements of the flattened parameter has a byte as its scale; those of as many rows as
whole blocks need are a row of scales, so that FSDP2 and checkpoints cut scales as they cut codes.
"""

import math

import torch

from . import _lowp
from ._errors import LowpError
from ._memory import device_of, dtype_name, memory
from ._params import cols_of, named, rows_of, sharded_names, title
from ._torch_compat import like, local_of

#: The dtype of states in fp8, whatever their codes are.
FP8 = torch.float8_e4m3fn

_BLOCK = 32


def names(key, dtype):
    """What a state is called in the dictionary of a parameter. Codes have other names than values, which nothing takes them for."""
    return (f"{key}_codes", f"{key}_scales") if dtype is FP8 else (key,)


def zeros(param, key, dtype):
    """A state before the first step, sharded as the parameter is."""
    local = local_of(param)
    if dtype is not FP8:
        return {key: like(param.detach(), torch.zeros(tuple(local.shape), dtype=dtype, device=local.device))}
    cols, size = cols_of(param), local.numel()
    own, whole = (_scales_of(rows, cols) for rows in (rows_of(local, param), rows_of(param, param)))
    # Rust takes codes and scales as one piece of memory. PyTorch stages DTensors (``async_save``) only from the beginning of a storage, which each has here.
    both = torch.zeros(size + math.prod(own), dtype=torch.uint8, device=local.device)
    codes, scales = (torch.from_dlpack(part.view(shape)) for part, shape in ((both[:size], tuple(local.shape)), (both[size:], own)))
    return dict(zip(names(key, dtype), (like(param.detach(), codes), like(param.detach(), scales, whole))))


def _scales_of(rows, cols):
    """The shape of the scales of a matrix, whose rows are each of as many rows as whole blocks need."""
    together = _BLOCK // math.gcd(_BLOCK, cols)
    return -(-rows // together), together * cols // _BLOCK


def dtype_of(state, key):
    """The dtype of a state."""
    return state[key].dtype if key in state else FP8


def name_of(dtype):
    """A dtype as Rust takes it."""
    return "fp8" if dtype is FP8 else dtype_name(dtype)


def memory_of(state, key):
    """The memory of a state as Rust takes it."""
    if dtype_of(state, key) is not FP8:
        return memory(local_of(state[key]), keep=True)
    codes, scales = (local_of(state[name]) for name in names(key, FP8))
    pointer, size, device, owner = memory(codes, keep=True)
    if size and memory(scales)[0] != pointer + size:
        raise LowpError(
            f"{key}_codes of shape {tuple(codes.shape)} and {key}_scales are not in one piece of memory, as the optimizer made them; write into the tensors of "
            "its state (copy_), and leave them where they are"
        )
    return pointer, size + -(-size // _BLOCK), device, owner


def load(state, values, key, of):
    """Takes a state of any dtype, of the parameter that ``of`` names. Values are rounded to nearest; those of codes have the same codes again."""
    has_codes = f"{key}_codes" in values
    if has_codes and key in values:
        raise LowpError(
            f"the loaded state of {of} has {key} and {key}_codes: a full state dictionary was loaded into an optimizer of another moments_dtype; load it into one "
            "of its own moments_dtype, and then the state_dict() of that optimizer into this one"
        )
    own, new = names(key, dtype_of(state, key)), names(key, FP8 if has_codes else None)
    missing = [name for name in new if name not in values]
    if missing:
        raise LowpError(f"the loaded state of {of} has no {missing[0]}; load the state of an optimizer that keeps {key}")
    # Codes have the shape of values.
    for one, other in zip(own, new):
        shapes = [tuple(local_of(of[name]).shape) for of, name in ((state, one), (values, other))]
        if shapes[0] != shapes[1]:
            raise LowpError(f"the loaded {other} has shape {shapes[1]} instead of {shapes[0]}; load the state of the same model and shards")
    to, given = [local_of(state[name]) for name in own], [local_of(values[name]) for name in new]
    if len(to) == len(given):
        for one, other in zip(to, given):
            one.copy_(other)
    elif has_codes:
        to[0].copy_(_decoded(key, *given, of))
    else:
        _encode(state, key, given[0].to(to[0].device, torch.float32).contiguous(), of)


def _decoded(key, codes, scales, of):
    """The values of codes, exactly."""
    out = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    size = codes.numel() + -(-codes.numel() // _BLOCK)
    both = torch.cat((codes.flatten(), scales.flatten()))[:size]
    if both.numel() != size:
        raise LowpError(
            f"the loaded {key}_scales of {of} has shape {tuple(scales.shape)} for codes of shape {tuple(codes.shape)}; load the state as it was saved"
        )
    _lowp.decode_state(device_of(codes.device), key, memory(both), memory(out))
    return out


def _encode(state, key, values, of):
    """Rounds values to nearest."""
    fits = values.isfinite() & (values >= 0) if key == "exp_avg_sq" else values.isfinite()
    if not bool(fits.all()):
        what = "below zero or not finite" if key == "exp_avg_sq" else "not finite"
        raise LowpError(f"the loaded {key} of {of} has {int((~fits).sum())} values that are {what}, which fp8 does not keep; load a state before they appeared")
    _lowp.encode_state(device_of(values.device), key, memory(values), memory_of(state, key))


def has_whole_rows(param):
    """Whether every row of a parameter is whole blocks."""
    return param.dim() > 1 and cols_of(param) % _BLOCK == 0


def check(optimizer, group):
    """Raises where a group of an optimizer cannot have the dtypes of its moments and masters."""
    number = next(number for number, other in enumerate(optimizer.param_groups) if other is group)
    _, own = optimizer._dtypes.get(id(group), (group, None))
    dtype = optimizer.moments_dtype if own is None else own
    if dtype not in optimizer.moments_dtypes:
        of = "" if own is None else f" of group {number}"
        raise LowpError(f"moments_dtype={dtype}{of}; give {' or '.join(map(str, optimizer.moments_dtypes))}")
    if optimizer.capturable:
        _check_capturable(group, dtype)
    cut = [param for param in group["params"] if _elements(param) % _BLOCK] if own is FP8 else []
    if cut:
        known = sharded_names()
        index, name = next((index, name) for index, (name, param) in enumerate(named(optimizer.param_groups)) if param is cut[0])
        raise LowpError(
            f"moments_dtype={FP8} of group {number}: {title(index, name or known.get(id(cut[0])), cut[0])} has {_elements(cut[0])} elements on each rank, and "
            f"states in fp8 have blocks of {_BLOCK}, which ranks do not cut; put it and others like it ({len(cut)} of {len(group['params'])} parameters of the "
            "group) into a group with moments_dtype=torch.float32 or torch.bfloat16, or give the dtype to the optimizer instead of the group: then such "
            "parameters have moments in float32"
        )


def _check_capturable(group, dtype):
    stores = [getattr(local_of(param), "_store", None) for param in group["params"]]
    narrow = any(store is not None and store.master is not None and store.master.dtype == torch.bfloat16 for store in stores)
    if narrow or dtype is FP8:
        what = f"moments_dtype={dtype}" if dtype is FP8 else f"masters in {torch.bfloat16} (master_dtype=)"
        raise LowpError(f"capturable=True with {what}: each replay of a captured step would round by the same random bits; leave one of the two out")


def _elements(param):
    """Elements of each rank but the last ones, where ranks share out the rows."""
    mesh = getattr(param, "device_mesh", None)
    ranks = 1 if mesh is None else mesh.size(mesh.ndim - 1)
    most = -(-param.shape[0] // ranks) if ranks > 1 and param.dim() else 0
    return most * cols_of(param) if most < rows_of(param, param) else 0
