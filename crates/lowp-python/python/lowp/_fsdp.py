"""Gathers by FSDP2: what travels and what is made of it is decided in Rust (``lowp_shard::GatherHooks``)."""

import weakref

import torch

from . import _lowp
from ._errors import LowpError, UnsupportedOp
from ._memory import device_of, empty, memory
from ._ranks import Ranks
from ._store import Store


class Exchange:
    """The gathers of one shard: one for each phase, or one for both where the full tensor is kept in between."""

    def __init__(self, store, full, world, rank, kept, group):
        self.store, self.full, self.world, self.rank, self.kept = store, full, world, rank, kept
        device = device_of(store.device)
        self.shard = store.shard
        if self.shard is None:
            self.shard = _lowp.Shard(device, store.recipe, full, world, rank, store.named(keep=True))
            store.shard = self.shard
        gathers = _lowp.Gather.of(self.shard, kept)
        ranks = Ranks.of(group, store.device)
        if ranks is not None:
            ranks.agree("the gathers of a parameter", " | ".join(gather.text() for gather in gathers))
        self.gathers = [_Gather(gather, store) for gather in gathers]
        # What FSDP2 frees with the full tensor: the memory of the phase that was gathered last.
        self.inner = []
        self.gathered = Store(store.recipe, *full, {}, store.device)
        self.gathered.full = Gathered(self)

    def adopt(self, full):
        """Fills the full tensor of another shard from here on: the one before a checkpoint or a move replaced the shard."""
        if (full.recipe, full.shape) != (self.store.recipe, self.full):
            raise LowpError(
                f"FSDP2 holds a full tensor of {full.recipe!r} {full.shape} for a shard of {self.store.recipe!r} {self.full}; call fully_shard "
                "on a new model"
            )
        # FSDP2 holds that list.
        inner = full.full.inner
        inner[:] = self.inner
        self.inner, self.gathered = inner, full
        full.full = Gathered(self)


class _Gather:
    """One gather, with the memory that Python allocated for it."""

    def __init__(self, gather, store):
        self.gather = gather
        self.inputs, self.outputs = gather.inputs(), gather.outputs()
        padded = [empty(sent.bytes, store.device).zero_() for sent in self.inputs if sent.is_padded]
        gather.attach(device_of(store.device), [memory(buffer, keep=True) for buffer in padded])
        padded = iter(padded)
        self.sends = [next(padded) if sent.is_padded else store.buffers[sent.name] for sent in self.inputs]
        self.memory = None

    def own_memory(self, device):
        """Memory of the outputs that have their own, without storage until the gather is there."""
        if self.memory is None:
            self.memory = {}
            for output in self.outputs:
                if output.place == "memory":
                    self.memory[output.name] = empty(output.bytes, device)
                    self.memory[output.name].untyped_storage().resize_(0)
        return self.memory


class Gathered:
    """What stands behind a full tensor: makes what was left for later."""

    def __init__(self, exchange):
        self.exchange = weakref.ref(exchange)
        self.inner = exchange.inner
        self.gather = None
        self.derived = False

    def derive(self):
        if not self.derived and self.gather is not None:
            self.gather.gather.derive(device_of(self.exchange().store.device))
            self.derived = True


class _AnySize(tuple):
    """The size of a piece of bytes. FSDP2 compares sizes of what ranks with fewer rows send with that of the padded rows, which scales
    never have; pieces of all ranks are of equal length already."""

    def __ne__(self, other):
        return False


class _Piece(torch.Tensor):
    """Bytes of a rank with fewer rows than others."""

    def size(self, *dim):
        return _AnySize(super().size()) if not dim else super().size(*dim)

    __torch_function__ = torch._C._disabled_torch_function_impl


def pre_all_gather(store, mesh, outer_size, module):
    """What this rank sends, and what ``post_all_gather`` must know of it."""
    store.check_whole()
    full, world = tuple(outer_size), mesh.size()
    group = _group_of(module)
    exchange = store.exchange
    # Codes of both directions at once, wherever the full tensor may serve both.
    kept = group is None or not group._reshard_after_forward or not getattr(group, "reshard_after_backward", True)
    if kept and exchange is not None and not exchange.kept:
        raise UnsupportedOp(
            "set_reshard_after_forward(False) or set_reshard_after_backward(False) was called after the first gather, when FSDP2 had allocated "
            "memory for the codes of one phase; call it before the first forward"
        )
    if exchange is None:
        exchange = store.exchange = Exchange(store, full, world, mesh.get_local_rank(), kept, mesh.get_group())
    if (exchange.full, exchange.world) != (full, world):
        raise LowpError(
            f"FSDP2 gathers {full} over {world} ranks, and this shard is one of {exchange.full} over {exchange.world}; call fully_shard once"
        )
    index = 0 if exchange.kept else int(_is_backward(group))
    gather = exchange.gathers[index]
    sent = gather.gather.pre(device_of(store.device))
    exchange.inner[:] = gather.own_memory(store.device).values()
    if world == 1:
        # FSDP2 copies one buffer and gathers none: the shard is the tensor.
        return (empty(1, store.device),), (index, sent)
    sends = gather.sends
    if store.rows != -(-full[0] // world):
        sends = [send.as_subclass(_Piece) for send in sends]
    return tuple(sends), (index, sent)


def post_all_gather(store, arrived, metadata, full=None):
    """The store of the full tensor, the same in every gather, and the list of what FSDP2 frees with it. ``full`` is the store that the first
    gather made."""
    exchange = store.exchange
    if full is not None and full is not exchange.gathered:
        exchange.adopt(full)
    return fill(exchange, *metadata, arrived), exchange.inner


def fill(exchange, index, sent, arrived):
    """The store of the full tensor, with what arrived in it."""
    store, gather = exchange.store, exchange.gathers[index]
    if exchange.world == 1:
        arrived = gather.sends
    own = gather.own_memory(store.device)
    for buffer in own.values():
        storage = buffer.untyped_storage()
        if storage.size() != buffer.numel():
            storage.resize_(buffer.numel())
    arrived = [piece.reshape(-1) for piece in arrived]
    device = device_of(store.device)
    gather.gather.post(device, sent, [memory(piece) for piece in arrived], [memory(buffer) for buffer in own.values()])
    buffers = {}
    for output in gather.outputs:
        name = output.name
        if output.place == "arrived":
            piece, start, end = arrived[output.input], output.start, output.start + output.bytes
            buffers[name] = piece if (start, end) == (0, piece.numel()) else piece[start:end]
        elif output.place == "memory":
            buffers[name] = own[name]
        else:
            buffers[name] = store.buffers[name]
    full = exchange.gathered
    full.buffers = buffers
    full.full.gather, full.full.derived = gather, not any(output.is_derived for output in gather.outputs)
    return full


_GROUPS = weakref.WeakKeyDictionary()


def _group_of(module):
    """The group of parameters of FSDP2 that a module's are in; ``None`` where FSDP2 does not say."""
    known = _GROUPS.get(module)
    group = known() if known is not None else None
    if group is None:
        group = _find_group(module)
        if group is not None:
            _GROUPS[module] = weakref.ref(group)
    if group is not None and getattr(group, "_use_post_forward_mesh", False):
        raise UnsupportedOp(
            "reshard_after_forward is a number of ranks, which FSDP2 supports for plain parameters only; give True or False"
        )
    return group


def _find_group(module):
    from torch.distributed._composable_state import _module_state_mapping

    for state in list(_module_state_mapping.values()):
        state = state() if isinstance(state, weakref.ReferenceType) else state
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            for param in getattr(group, "fsdp_params", ()):
                info = param._module_info
                if info.module is module or module in info.shared_modules:
                    return group
    return None


def _is_backward(group):
    return group is not None and group._training_state.name == "PRE_BACKWARD"
