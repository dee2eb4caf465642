"""Codes in checkpoints of ``torch.distributed.checkpoint``: what is written of them, at once or later (``async_save``).

A master that the checkpoint has in the state of an optimizer, too, is written there alone.
"""

import torch

from . import _ops
from ._store import Store
from ._torch_compat import like, local_of


def written(value, places):
    """What is written of codes, or of any other value. ``places`` are those of the tensors in the checkpoint, as ``place_of`` says."""
    local = local_of(value)
    if not isinstance(local, _ops.Tensor) or local._store.master is None or place_of(local._store.master) not in places:
        return value
    return _like(value, _without_master(local._store))


@torch.no_grad()
def copied(value, places):
    """A copy of codes on the host, and ``None`` of any other value."""
    local = local_of(value)
    if not isinstance(local, _ops.Tensor):
        return None
    local._store.check_whole()
    return _like(value, local_of(written(value, places))._store.map(lambda buffer: buffer.to("cpu", copy=True)))


def place_of(tensor):
    """Where a tensor lies; ``None`` for what has no memory."""
    local = local_of(tensor)
    plain = isinstance(local, torch.Tensor) and not isinstance(local, _ops.Tensor) and local.numel()
    return (local.data_ptr(), local.numel()) if plain else None


def _without_master(store):
    store.check_whole()
    made = Store(store.recipe, store.rows, store.cols, store.buffers, store.device)
    made.amax, made.usage = store.amax, store.usage
    return made


def _like(value, store):
    local = local_of(value)
    return like(value, _ops.Tensor(store, local.dtype, local.dim() == 1))
