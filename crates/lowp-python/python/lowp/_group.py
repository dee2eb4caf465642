"""Gathers of a group of FSDP2 whose weights were gathered before: in place of FSDP2's own, with what is the same in each gather made once.

The bytes that travel, their order and the streams are those of PyTorch, so that one rank may gather a group in this way while PyTorch does it on another.
"""

import torch

from . import _torch_compat as compat
from ._memory import device_of, empty
from ._ranks import between_gathers

#: What full tensors begin at multiples of, as in memory of their own.
_ALIGNMENT = 256
#: Plain rows of a group, cast as they are sent, stay in memory between its gathers if they have fewer bytes, as those of norms do.
_KEPT = 1 << 18


def follow(group):
    """From the next gather on, a group is gathered here, if all its weights were gathered before."""
    known = None if group is None else compat.gathers_of(group)
    if group is None or known is not None and known.is_current():
        return
    records = compat.records_of(group)
    if not all(compat.is_cut_by_rows(record) and compat.is_plain(record) for record in records):
        return
    is_weight = lambda record: hasattr(compat.local_of(record.sharded_param), "_store")
    params = [_Weight(record) if is_weight(record) else _Plain(record) for record in records]
    if any(isinstance(param, _Weight) for param in params) and all(param.is_gathered() for param in params):
        compat.gather_by(group, _Group(group, params))


class _Weight:
    """A weight of lowp in a group."""

    def __init__(self, record):
        self.record, self.shard, self.full = record, compat.local_of(record.sharded_param), compat.whole_of(record)
        self.store = self.shard._store
        self.gathers = self.store.gathers

    def is_gathered(self):
        """Whether PyTorch's gathers were of this shard."""
        gathers, store = self.gathers, getattr(self.full, "_store", None)
        return (
            gathers is not None
            and gathers.gathered is store
            and gathers.module() is compat.module_of(self.record)
            and not compat.is_offloaded(self.record)
        )


class _Plain:
    """Any other parameter of a group."""

    def __init__(self, record):
        self.record = record
        self.shard, self.dtype = compat.rows_of(record)

    def is_gathered(self):
        return self.shard is not None and len(compat.outputs_of(self.record)) == 1


class _Group:
    """The parameters of a group, and what is kept of its gathers."""

    def __init__(self, group, params):
        self.params, self.weights = params, [param for param in params if isinstance(param, _Weight)]
        self.device, self.world = self.weights[0].store.device, self.weights[0].gathers.world
        self.ranks = compat.shard_ranks(group)
        self.rank = self.ranks.rank()
        #: Which parameters of modules each is.
        self.users = [(param.record, compat.users_of(param.record)) for param in params]
        self.shards = [(param.record, param.shard, isinstance(param, _Weight)) for param in params]
        self.known = [(weight.shard, weight.store, weight.gathers, weight.full) for weight in self.weights]
        #: How what is sent and what arrives lies, by the gathers of the weights; that of the gather under way or there, and what it sent of each.
        self.layouts, self.layout, self.marks = {}, None, None
        self.is_there = False

    def is_current(self):
        """Whether the parameters have the shards and the full tensors that they had. Otherwise FSDP2 gathers them, and ``follow`` makes another group."""
        if not compat.have_shards(self.shards):
            return self._drop()
        for shard, store, gathers, full in self.known:
            if shard._store is not store or store.gathers is not gathers or full._store is not gathers.gathered:
                return self._drop()
        return bool(self.known)

    def _drop(self):
        """Holds no shard any more."""
        self.params = self.weights = self.users = self.shards = self.known = ()
        self.layouts, self.layout, self.marks = {}, None, None
        return False

    def send(self, group, allocate):
        """The buffer that the ranks gather into, and this rank's part of it, filled."""
        with between_gathers(self._ranks, self.device):
            kept, backward = compat.keeps_whole(group), compat.is_before_backward(group)
            for weight in self.weights:
                weight.store.check_whole()
            chosen = tuple([weight.gathers.choose(kept, backward) for weight in self.weights])
            layout = self.layouts.get(chosen)
            if layout is None:
                layout = self.layouts[chosen] = _Layout(chosen, self.params, self.weights, self.world, self.device)
            device = device_of(self.device)
            self.marks = [gather.pre(device) for gather in layout.gathers]
            whole = allocate((self.world * layout.bytes,), dtype=torch.uint8, device=self.device)
            own = whole.narrow(0, self.rank * layout.bytes, layout.bytes)
            layout.send(own)
        self.layout = layout
        return whole, own

    def arrive(self, whole):
        """Fills the full parameters with what arrived."""
        layout = self.layout
        layout.arrive(whole)
        with between_gathers(self._ranks, self.device):
            for weight, index, own, mark, arrived in zip(self.weights, layout.chosen, layout.own, self.marks, layout.arrived):
                weight.gathers.inner[:] = own
                weight.gathers.fill(index, mark, arrived)
        self.is_there = True

    def leave(self, kept):
        """The full parameters are needed no more. Their memory stays where it is ``kept``."""
        self.is_there = False
        if not kept:
            self.layout.free()
            for weight in self.weights:
                for buffer in weight.gathers.inner:
                    _free(buffer.untyped_storage())

    def _ranks(self):
        return self.ranks


class _Layout:
    """Where what is sent and what arrives lies, of a group in one phase: which gather was ``chosen`` for each weight."""

    def __init__(self, chosen, params, weights, world, device):
        self.chosen, self.world, end = chosen, world, 0
        gathers = [weight.gathers.gathers[index].made() for weight, index in zip(weights, chosen)]
        self.gathers, self.own = [gather.gather for gather in gathers], [[*gather.own.values()] for gather in gathers]
        #: What is sent, in order, and which of it are plain values that are cast to another dtype first.
        self.pieces, self.rows, self.casts = [], [], {}
        #: Where each piece of all ranks belongs: from where on in one memory for all weights, or where FSDP2 has a plain parameter.
        self.places = []
        # The full tensor of a rank alone is its shard.
        sends = {id(weight): gather.sends for weight, gather in zip(weights, gathers) if world > 1}
        for param in params:
            if isinstance(param, _Plain):
                rows = param.shard.detach()
                if rows.dtype != param.dtype:
                    self.rows.append(rows)
                    rows = self.casts[len(self.pieces)] = torch.empty_like(rows, dtype=param.dtype)
                self.pieces.append(rows.view(torch.uint8))
                self.places.append(compat.outputs_of(param.record)[0])
            for send in sends.get(id(param), ()):
                self.pieces.append(send)
                self.places.append(end)
                end += -(-send.numel() * world // _ALIGNMENT) * _ALIGNMENT
        self.sizes = [piece.numel() for piece in self.pieces]
        # A rank alone sends plain parameters, if any, and a gather is never of nothing.
        self.bytes = sum(self.sizes) or 1
        # A GPU copies words at once, and bytes one by one.
        self.word = torch.uint8 if any(piece.numel() % 8 or piece.storage_offset() % 8 for piece in self.pieces) else torch.int64
        self.pieces = [piece.view(self.word) for piece in self.pieces]
        self.counts = [len(sends.get(id(weight), ())) for weight in weights]
        self.memory, self.outputs, self.arrived = empty(end, device), None, None
        plain = [place for place in self.places if isinstance(place, torch.Tensor)]
        self.storages = [(tensor.untyped_storage(), tensor.nbytes) for tensor in (self.memory, *plain)]
        _free(self.storages[0][0])
        self.keeps = sum(cast.nbytes for cast in self.casts.values()) <= _KEPT
        if not self.keeps:
            self._forget_casts()

    def _forget_casts(self):
        for at, cast in self.casts.items():
            self.casts[at], self.pieces[at] = cast.dtype, None

    def send(self, own):
        """Copies what this rank sends."""
        if self.rows and not self.keeps:
            for (at, dtype), rows in zip(self.casts.items(), self.rows):
                self.casts[at] = torch.empty_like(rows, dtype=dtype)
                self.pieces[at] = self.casts[at].view(self.word)
        if self.rows:
            compat.copy_each([*self.casts.values()], self.rows)
        if self.pieces:
            torch.cat(self.pieces, out=own.view(self.word))
        if not self.keeps:
            self._forget_casts()

    def arrive(self, whole):
        """Copies what arrived to where each parameter has it."""
        for storage, bytes in self.storages:
            if storage.nbytes() != bytes:
                storage.resize_(bytes)
        if self.outputs is None:  # views are of memory that is there
            self._make_outputs()
        if self.outputs:
            torch.split_with_sizes_copy(whole.view(self.world, -1), self.sizes, dim=1, out=self.outputs)

    def _make_outputs(self):
        wholes, codes = [], []
        for place, size in zip(self.places, self.sizes):
            if isinstance(place, torch.Tensor):
                # Of .data, which counts writes by itself: what autograd saved stays as it is.
                wholes.append(place.data.view(torch.uint8))
            else:
                codes.append(self.memory[place : place + size * self.world])
                wholes.append(codes[-1])
        self.outputs = [whole.view(self.world, -1) for whole in wholes]
        codes = iter(codes)
        self.arrived = [[next(codes) for _ in range(count)] for count in self.counts]

    def free(self):
        """Frees the memory of the full parameters."""
        for storage, _ in self.storages:
            _free(storage)


def _free(storage):
    if storage.nbytes():
        storage.resize_(0)
