"""Codes in checkpoints of ``torch.distributed.checkpoint``: what is written of them, at once or later (``async_save``)."""

import torch

from . import _ops
from ._store import Store
from ._torch_compat import like, local_of


class Contents:
    """The values of a checkpoint. A master that it has in the state of an optimizer, too, is written there alone."""

    def __init__(self, values):
        self.places = {_place(value) for value in values}
        stores = [local_of(value)._store for value in values if _is_codes(value)]
        #: Codes that were loaded since the state of the optimizer was taken, by where their master lies: the next step would make it of them.
        self.loose = {_place(store.master): store for store in stores if store.loose is not None}

    def written(self, value):
        """What is written of a value, or of its rows of this rank."""
        if not _is_codes(value):
            store = self.loose.get(_place(value)) if self.loose else None
            return value if store is None else like(value, store.known_master())
        store = local_of(value)._store
        return _like(value, _without_master(store)) if store.master is not None and _place(store.master) in self.places else value

    @torch.no_grad()
    def copied(self, value):
        """A copy of what is written, on the host; ``None`` where that is the value itself and PyTorch copies it."""
        written = self.written(value)
        if not _is_codes(value):
            return None if written is value else written
        store = local_of(written)._store
        store.check_whole()
        return _like(value, store.map(lambda buffer: buffer.to("cpu", copy=True)))


def _is_codes(value):
    return isinstance(local_of(value), _ops.Tensor)


def _place(value):
    """Where a plain tensor lies; ``None`` for what has no memory."""
    local = local_of(value)
    plain = isinstance(local, torch.Tensor) and not isinstance(local, _ops.Tensor) and local.numel()
    return (local.data_ptr(), local.numel()) if plain else None


def _without_master(store):
    store.check_whole()
    made = Store(store.recipe, store.rows, store.cols, store.buffers, store.device)
    made.amax, made.usage, made.cut = store.amax, store.usage, store.cut
    return made


def _like(value, store):
    local = local_of(value)
    return like(value, _ops.Tensor(store, local.dtype, local.dim() == 1))
