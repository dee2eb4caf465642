"""Broadcasts of codes, as ``DistributedDataParallel`` makes them of parameters when it is made.

It joins flat parameters, broadcasts what it joined, and copies the parts back. Here bytes travel: all buffers of codes, their masters, and plain values.
"""

import torch
import torch.distributed as dist

from . import _bytes, _ops, _states
from ._ops import aten, handles
from ._ranks import Ranks, together
from ._torch_compat import make_wrapper

class _Joined(torch.Tensor):
    """Flat tensors, some of codes, that PyTorch joined. It can be broadcast, and cut into the tensors again; everything else raises."""

    __slots__ = ("_parts", "_refused")

    @staticmethod
    def __new__(cls, parts, func):
        first = parts[0]
        joined = make_wrapper(cls, (sum(part.numel() for part in parts),), dtype=first.dtype, device=first.device)
        joined._parts, joined._refused = parts, func
        return joined

    def __init__(self, *args, **kwargs):
        pass

    def __repr__(self, *, tensor_contents=None):
        return f"{len(object.__getattribute__(self, '_parts'))} tensors, some of codes, joined by torch.cat"

    def __reduce_ex__(self, protocol):
        raise _ops.refused(self._refused)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        joined = next(leaf for leaf in _ops.tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        raise _ops.refused(joined._refused)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func.overloadpacket is aten.slice:
            return _part(*args)
        if func.name() == "c10d::broadcast_":
            return broadcast(func, *args, **(kwargs or {}))
        joined = next(leaf for leaf in _ops.tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        raise _ops.refused(joined._refused)


def _part(joined, dim=0, start=0, end=None, step=1):
    """The tensor that was joined there."""
    at = 0
    for part in joined._parts:
        if (at, at + part.numel(), step) == (start, end, 1):
            return part
        at += part.numel()
    raise _ops.refused(joined._refused)


@handles(aten.cat)
def _cat(func, tensors, dim=0):
    if all(tensor.dim() == 1 for tensor in tensors):
        return _Joined(list(tensors), func)
    return _ops.read_or_refuse(func, (tensors, dim), {})


@handles("c10d::broadcast_")
def broadcast(func, tensors, group, *args, **kwargs):
    """Gives every rank the bytes of one. Collective."""
    _states.follow()
    (tensor,) = tensors
    parts = tensor._parts if isinstance(tensor, _Joined) else [tensor]
    ranks = Ranks.of(dist.ProcessGroup.unbox(group), parts[0].device)
    with together(ranks):
        pieces = [_pieces(part) for part in parts]
        text = "\n".join(_text(part, of) for part, of in zip(parts, pieces))
        packed = _bytes.pack([piece for of in pieces for piece in of])
    if ranks is not None:
        ranks.agree("parameters that are broadcast", text)
    _, work = func([packed], group, *args, **kwargs)
    # The parts are copied back at once, by whoever joined them or here.
    work.wait()
    arrived = iter(_bytes.unpack(packed, [piece.numel() for of in pieces for piece in of]))
    made = [_made(part, [next(arrived) for _ in of]) for part, of in zip(parts, pieces)]
    if isinstance(tensor, _Joined):
        tensor._parts = made
    else:
        tensor.copy_(made[0])
    return tensors, work


def _pieces(part):
    return _bytes.pieces_of(part._store, _bytes.names_of(part._store)) if isinstance(part, _ops.Tensor) else [_bytes.as_bytes(part)]


def _text(part, pieces):
    """What ranks must have in common."""
    sizes = [piece.numel() for piece in pieces]
    if not isinstance(part, _ops.Tensor):
        return f"{part.dtype} of {sizes} bytes"
    store = part._store
    master = "without master" if store.master is None else f"with a master in {store.master.dtype}"
    return f"{store.recipe!r} {store.rows}x{store.cols} of {_bytes.names_of(store)} of {sizes} bytes, {master}"


def _made(part, pieces):
    """A tensor like ``part``, of bytes that arrived."""
    if not isinstance(part, _ops.Tensor):
        return pieces[0].view(part.dtype)
    return _ops.Tensor(_bytes.made_of(part._store, pieces), part.dtype, flat=part.dim() == 1)
