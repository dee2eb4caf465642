"""Full state dictionaries in models that are sharded: every rank takes its rows of the codes, and of the masters.

PyTorch cuts and broadcasts plain tensors. Values are quantized whole, so that all rows have the scale of the whole.
"""

import collections

import torch
import torch.distributed as dist

from . import _bytes, _cut, _ops, _staging
from . import _torch_compat as compat
from ._errors import LowpError
from ._ranks import Ranks, together
from ._torch_compat import local_of

quantize = None  # set by _tensor.py, which uses this file


def follow():
    """From here on lowp loads the weights of full state dictionaries that have codes in the model, and says what checkpoints have of codes."""
    compat.on_full_states(load)
    compat.on_checkpoints(_staging.Contents)


@torch.no_grad()
def load(full, local, from_rank_0, group):
    """Loads what has codes in the model, and returns its names, and those of them that ``full`` has not."""
    codes = {key: value for key, value in local.items() if isinstance(local_of(value), _ops.Tensor)}
    if not codes:
        return set(), []
    if from_rank_0:
        return codes.keys(), _from_rank_0(full, codes, group)
    # Rows that were cut before are PyTorch's.
    codes = {key: param for key, param in codes.items() if key not in full or local_of(full[key]) is full[key]}
    shards = [param for param in codes.values() if local_of(param) is not param]
    ranks = Ranks.of(group, local_of(shards[0]).device) if shards else None
    with together(ranks):
        _check_memory(codes)
        for key, param in codes.items():
            if key in full:
                _take(param, _whole(full[key], param, key).rows_for(local_of(param)._store, *_rows(param)))
    missing = [key for key in codes if key not in full]
    if ranks is not None:
        ranks.agree("the weights that a full state dictionary has", "\n".join(key for key in codes if key in full))
    return codes.keys(), missing


def _check_memory(codes):
    """Raises for a model on the meta device."""
    key = next((key for key, param in codes.items() if local_of(param).is_meta), None)
    if key is not None:
        raise LowpError(f"{key} is on the meta device, and a full state dictionary is loaded into memory; call model.to_empty(device=..) before")


def _from_rank_0(full, codes, group):
    """Sends each rank its rows of what rank 0 has, and returns the names of what that has not. Collective."""
    ranks, missing = Ranks.of(group, local_of(next(iter(codes.values()))).device), []
    with together(ranks):
        _check_memory(codes)
        lines = [f"{key} of shape {tuple(param.shape)}: codes of {local_of(param)._store.recipe!r}" for key, param in codes.items()]
    if ranks is not None:
        ranks.agree("the weights that a full state dictionary is loaded into", "\n".join(lines))
    for key, param in codes.items():
        own, whole = local_of(param)._store, None
        # What is wrong with the dictionary, rank 0 finds here, and the others hear of it.
        with together(ranks):
            if dist.get_rank() == 0 and key in full:
                whole = _whole(full[key], param, key)
        here = (whole is not None, whole is not None and whole.master is not None)
        each = [_Rank(*here, *_rows(param), *(_bytes.packed_bytes(_bytes.sizes_of(own, master)) for master in (False, True)))]
        if ranks is not None:
            texts = ranks.collect(f"the rows of {key}", " ".join(str(int(number)) for number in each[0]))
            each = [_Rank(*map(int, text.split())) for text in texts]
        if not each[0].has:
            missing.append(key)
            continue
        parts = [] if whole is None else [_bytes.pack(_bytes.pieces_of(whole.rows_for(own, of.start, of.end), _bytes.names_of(own))) for of in each]
        longest = max(of.bytes_with_master if each[0].has_master else of.bytes for of in each)
        arrived = _scattered(parts, longest, own.device, group)
        _take(param, _bytes.made_of(own, _bytes.unpack(arrived, _bytes.sizes_of(own, each[0].has_master))))
    return missing


#: What each rank says of a weight: whether it has the whole, and its master; which rows it needs, and how many bytes those are.
_Rank = collections.namedtuple("_Rank", "has has_master start end bytes bytes_with_master")


def _scattered(parts, longest, device, group):
    """The part of this rank, of those that rank 0 has."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return parts[0]
    # Codes that FSDP2 keeps on the host travel over a group of GPUs.
    place = device if device.type != "cpu" or compat.serves_cpu(group or dist.group.WORLD) else torch.device("cuda")
    parts = [torch.nn.functional.pad(part, (0, longest - part.numel())).to(place) for part in parts]
    arrived = torch.empty(longest, dtype=torch.uint8, device=place)
    dist.scatter(arrived, parts or None, src=0, group=group)
    return arrived.to(device)


def _whole(value, param, name):
    """The store of a whole weight, of codes or of values."""
    own = local_of(param)._store
    if tuple(value.shape) != tuple(param.shape):
        raise LowpError(
            f"{name} of shape {tuple(value.shape)} in a full state dictionary, and of {tuple(param.shape)} in the model; load the state of the "
            "same model"
        )
    value = value.detach().to(own.device)
    if not isinstance(value, _ops.Tensor):
        try:
            return quantize(value, own.recipe, **own.kept_master)._store
        except LowpError as error:
            raise LowpError(f"{name} in a full state dictionary: {error}") from None
    if not (own.recipe == value.recipe or own.recipe.has_weights_of(value.recipe)):
        raise LowpError(
            f"{name} of {value.recipe!r} in a full state dictionary, and of {own.recipe!r} in the model; load its values (lowp.plain_state_dict), which are "
            "quantized then"
        )
    value._store.check_whole()
    missing = own.buffers.keys() - value._store.buffers.keys()
    if own.cut is not None:  # whose rows take scales that follow from others
        missing = {name for name in missing if _cut.whole_of(value._store, name) is None}
    if missing:
        raise LowpError(f"{name} without {', '.join(sorted(missing))} in a full state dictionary; quantize it for both directions (usage='both')")
    return value._store


def _rows(param):
    """The rows of this rank, as FSDP2 cuts them."""
    rows = param.shape[0]
    if local_of(param) is param:
        return 0, rows
    mesh = param.device_mesh
    cut = -(-rows // mesh.size(mesh.ndim - 1))
    start = min(cut * mesh.get_local_rank(mesh.ndim - 1), rows)
    return start, min(start + cut, rows)


def _take(param, rows):
    local = local_of(param)
    local.copy_(_ops.Tensor(rows, local.dtype))
