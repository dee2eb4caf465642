"""Values that are written into rows of a weight whose scale the rows of other ranks share: they are kept, and cast where all ranks meet next, when
the optimizer over the shards is made or in the first gather."""

from types import SimpleNamespace

import torch
import torch.distributed as dist

from . import _lowp
from . import _torch_compat as compat
from ._memory import device_of, dtype_name, memory
from ._ranks import Ranks, known, together
from ._store import Store


def write(store, values, encode_scale=None):
    """Casts values into a store and its master. Where the scale is that of rows of other ranks, too, the master alone has them until the ranks meet. Codes are
    those of the values that the master has."""
    if store.master is not None and store.master.dtype == torch.bfloat16:
        values = values.bfloat16()
    if encode_scale is None and _waits(store):
        if store.rows:
            store.keep_uncast(values)
        return
    store.quantize_(values, dtype_name(values.dtype), encode_scale)
    if store.master is not None:
        store.master.copy_(values)


def shares_scale(store):
    """Whether all rows of a weight have a scale in common."""
    return any(spec.entry_rows == 0 for spec in store.specs(stored=True).values())


def _waits(store):
    if store.device.type == "meta" or not shares_scale(store):
        return False
    if store.gathers is not None:
        # Ranks meet no more. The state of the optimizer knows delayed scales; other writes raise.
        return store.gathers.world > 1 and store.is_delayed
    return _shards(store) > 1


def _shards(store):
    """Over how many ranks FSDP2 shards the weight whose rows these are."""
    for group in compat.fsdp_groups():
        for _, sharded, *_ in compat.fsdp_params(group):
            if getattr(compat.local_of(sharded), "_store", None) is store:
                return sharded.device_mesh.size(sharded.device_mesh.ndim - 1)
    return 1


def cast_params(params, ranks):
    """Casts what was written into the rows of parameters of an optimizer, over the ranks of all of them. Collective."""
    found = [(param, getattr(compat.local_of(param), "_store", None)) for param in params if compat.local_of(param) is not param]
    found = [(param, store) for param, store in found if store is not None and shares_scale(store)]
    if ranks is None or not found:
        return
    for (param, store), states in zip(found, _states([store for _, store in found], ranks)):
        mesh = param.device_mesh
        _follow(store, states, ranks, tuple(param.shape), mesh.get_local_rank(mesh.ndim - 1), mesh.get_group(mesh.ndim - 1))


def cast_rows(store, ranks, full, rank, group):
    """Casts what was written into the rows of one weight that is gathered. Collective."""
    # Rows that come from the host for each gather are copies.
    if ranks is not None and shares_scale(store) and store.origin is None:
        _follow(store, *_states([store], ranks), ranks, full, rank, group)


#: The rows of a weight on one rank: none, cast, or written and not cast.
_NONE, _CAST, _UNCAST = "-cu"


def _states(stores, ranks):
    """The rows of each store on every rank."""
    own = "".join(_NONE if not store.rows else _CAST if store.uncast is None else _UNCAST for store in stores)
    return zip(*ranks.collect("values that were written into shards", own))


def _follow(store, states, ranks, full, rank, group):
    """Casts values that all ranks have written, and gives ranks without rows the scale of the others. Collective."""
    wrote, others = ([rank for rank, state in enumerate(states) if state == kind] for kind in (_UNCAST, _CAST))
    if wrote and others:
        raise known(
            f"values were written into rows of a weight of shape {full} and {store.recipe!r} on ranks {wrote} and not on ranks {others}, whose rows share its "
            "scale; write the values on every rank"
        )
    if wrote:
        _cast(store, full, rank, group)
    elif _NONE in states:
        _take_scale(store, ranks)


def _take_scale(store, ranks):
    """What rows share, on ranks without rows as on the others: values or codes that were loaded gave it to those alone. Collective."""
    shared = [store.buffers[name] for name, spec in store.specs(stored=True).items() if spec.entry_rows == 0]
    own = b"".join(buffer.cpu().numpy().tobytes() for buffer in shared)
    found = next((of for of in ranks.exchange("scales that rows share", own if store.rows else b"") if of), own)
    if found != own and not store.rows:
        store.begin_write()
        pieces = torch.frombuffer(bytearray(found), dtype=torch.uint8).split([buffer.numel() for buffer in shared])
        for buffer, piece in zip(shared, pieces):
            buffer.copy_(piece)


def _cast(store, full, rank, group):
    """Casts the rows of every rank as the whole matrix is cast, and keeps those of this rank. Collective."""
    ranks = Ranks.of(group, store.device)
    with together(ranks):
        rows, cols = full
        cut = -(-rows // dist.get_world_size(group))
        start = min(cut * rank, rows)
        whole = Store.empty(store.recipe, rows, cols, store.device, stored=True)
        values = store.uncast if store.uncast is not None else torch.empty(0, device=store.device)
        arg = SimpleNamespace(
            recipe=store.recipe,
            shape=full,
            buffers=whole.named(),
            start=start * cols if store.rows else 0,
            master=memory(values),
            dtype=dtype_name(values.dtype),
        )
    _lowp.FlatCasts().run(device_of(store.device), [arg], ranks)
    own = whole.rows_for(store, start, start + store.rows)
    own.master = store.master
    store.copy_(own)
