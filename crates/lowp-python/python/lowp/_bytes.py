"""Tensors of codes as bytes that ranks send each other: buffers, what is known of the values, and masters."""

import torch

from ._store import Store

#: Each piece begins at a multiple of so many bytes.
_ALIGN = 16


def names_of(store):
    return sorted(store.buffers)


def sizes_of(store, master):
    """Bytes of each piece of a store."""
    buffers = [store.buffers[name].numel() for name in names_of(store)]
    return [*buffers, 8, *([4 * store.rows * store.cols] if master else [])]


def pieces_of(store, names):
    """The pieces: buffers of those names, the amax and whether it is known, and the master where there is one."""
    store.check_whole()
    store.derive()
    amax = torch.zeros(2, dtype=torch.float32, device=store.device)
    if store.amax is not None:
        amax[0], amax[1] = store.amax.reshape(()), 1
    plain = [amax] if store.master is None else [amax, store.known_master().float()]
    return [*(store.buffers[name] for name in names), *map(as_bytes, plain)]


def as_bytes(values):
    """Plain values as bytes."""
    return values.detach().contiguous().view(-1).view(torch.uint8)


def made_of(store, pieces):
    """A store like another one, of pieces that arrived."""
    names = names_of(store)
    amax, *master = (piece.view(torch.float32) for piece in pieces[len(names) :])
    made = Store(store.recipe, *store.shape, dict(zip(names, pieces)), store.device, master[0].view(store.shape) if master else None)
    made.cut = store.cut
    made.amax = amax[:1].clone() if bool(amax[1]) else None
    return made


def pack(pieces):
    """Pieces in one."""
    return torch.cat([torch.nn.functional.pad(piece, (0, padding(piece.numel()))) for piece in pieces])


def unpack(packed, sizes):
    """The pieces of ``pack``, as views."""
    at, found = 0, []
    for size in sizes:
        found.append(packed[at : at + size])
        at += size + padding(size)
    return found


def packed_bytes(sizes):
    return sum(size + padding(size) for size in sizes)


def padding(size):
    return -size % _ALIGN
