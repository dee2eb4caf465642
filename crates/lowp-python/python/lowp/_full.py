"""Full tensors of codes: what ``DTensor.full_tensor()`` and full state dictionaries make of the rows of all ranks.

DTensor pads the rows of a rank, gathers them, waits, and cuts the padding off. Here the padding is a number of rows that a store claims to
have, and the gather is that of FSDP2 for both phases, so that every buffer has the bytes of the whole tensor.
"""

import torch.distributed as dist

from . import _ops
from ._errors import UnsupportedOp
from ._fsdp import WHOLE, Gathers
from ._memory import device_of, empty
from ._ops import aten, handles
from ._ranks import Ranks, between_gathers, together
from ._store import Store
from ._torch_compat import group_named


def _claiming(store, rows):
    """A store that claims ``rows`` rows and has those of another one; nothing reads its buffers."""
    padded = Store(store.recipe, rows, store.cols, {}, store.device)
    padded.unpadded = store
    return padded


@handles(aten.constant_pad_nd)
def _pad(func, tensor, pad, value=0):
    below = pad[-1]
    if tensor.dim() != 2 or len(pad) != 4 or any(pad[:-1]) or below < 0 or value:
        raise UnsupportedOp(
            f"{func} of a lowp.Tensor by {list(pad)} with {value}; only rows of zeros can be appended: decode it first "
            "(.dequantize())"
        )
    return _ops.Tensor(_claiming(tensor._store, tensor._store.rows + below), tensor.dtype)


@handles("_c10d_functional::all_gather_into_tensor")
def _all_gather(func, tensor, group_size, group_name):
    store = tensor._store
    group = group_name if isinstance(group_name, dist.ProcessGroup) else group_named(group_name)
    full, rows = gather_rows(store.unpadded or store, group), store.rows * group_size
    return _ops.Tensor(full if full.rows == rows else _claiming(full, rows), tensor.dtype)


@handles("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")
def _wait(func, tensor):
    # The gather is on the stream that was current already.
    return _ops.alias(tensor)


def gather_rows(store, group):
    """The store of all rows, of which each rank of ``group`` has its own as FSDP2 cuts them. Without masters. Collective."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    ranks = Ranks.of(group, store.device)
    with together(ranks):
        store.check_rows()
    counts = [store.rows] if ranks is None else [int(text) for text in ranks.collect("the rows of a full tensor", str(store.rows))]
    rows = sum(counts)
    cut = -(-rows // world)
    if counts != [min(cut, max(rows - cut * rank, 0)) for rank in range(world)]:
        raise UnsupportedOp(
            f"a full tensor from {counts} rows on {world} ranks; lowp gathers rows only as FSDP2 cuts them, at most {cut} per rank: decode the rows first "
            "(.to_local().dequantize())"
        )
    with between_gathers(lambda: group, store.device):
        gathers = Gathers(store, (rows, store.cols), world, rank, group)
        gather = gathers.gathers[WHOLE].made()
        sent = gather.gather.pre(device_of(store.device))
    arrived = []
    for send in gather.sends if world > 1 else ():
        arrived.append(empty(world * send.numel(), store.device))
        dist.all_gather_into_tensor(arrived[-1], send, group=group)
    full = gathers.fill(WHOLE, sent, arrived)
    full.check_serves("columnwise")
    # In memory of its own: gathered pieces are parts of larger ones, and a rank alone gives its own rows.
    buffers = {name: buffer.clone() for name, buffer in full.buffers.items()}
    return Store(store.recipe, rows, store.cols, buffers, store.device)
