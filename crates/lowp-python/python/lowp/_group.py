"""Gathers of a group of FSDP2 whose weights were gathered before: in place of FSDP2's own, with what is the same in each gather made once.

The bytes that travel, their order and the streams are those of PyTorch, so that one rank may gather a group in this way while PyTorch does it on another.
"""

import torch

from . import _torch_compat as compat
from ._memory import device_of, empty
from ._ranks import between_gathers

#: What full tensors begin at multiples of, as in memory of their own.
_ALIGNMENT = 256


def follow(group):
    """From the next gather on, a group is gathered here, if all its weights were gathered before."""
    known = None if group is None else compat.gathers_of(group)
    if group is None or known is not None and known.is_current():
        return
    records = compat.records_of(group)
    if not all(compat.is_cut_by_rows(record) and compat.is_plain(record) for record in records):
        return
    members = [_Member(record) for record in records if hasattr(compat.local_of(record.sharded_param), "_store")]
    plain = [_Plain(record) for record in records if not hasattr(compat.local_of(record.sharded_param), "_store")]
    if members and all(member.is_gathered() for member in members) and all(of.is_gathered() for of in plain):
        compat.gather_by(group, _Group(group, records, members, plain))


class _Group:
    """The parameters of a group, and what is kept of its gathers."""

    def __init__(self, group, records, members, plain):
        self.members, self.plain = members, plain
        self.device, self.world = members[0].store.device, members[0].gathers.world
        self.ranks = compat.shard_ranks(group)
        self.rank = self.ranks.rank()
        #: Which modules have each parameter, in the order of what is sent.
        self.users = [(record, compat.users_of(record)) for record in records]
        of = {id(one.record): one for one in [*members, *plain]}
        self.order = [of[id(record)] for record in records]
        #: How what is sent and what arrives lies, by the gathers of the weights.
        self.layouts, self.layout = {}, None
        self.sent, self.is_there = None, False

    def is_current(self):
        """Whether its parameters have the shards and the full tensors that they had. Otherwise FSDP2 gathers them, and ``follow`` makes another group."""
        for one in self.order:
            if not one.is_current():
                self.members = self.plain = self.users = ()
                self.order = [_GONE]
                self.layouts, self.layout = {}, None
                return False
        return True

    def send(self, group, allocate):
        """The buffer that the ranks gather into, and what this rank sends."""
        with between_gathers(self._ranks, self.device):
            kept, backward = compat.keeps_whole(group), compat.is_before_backward(group)
            device = device_of(self.device)
            gathers = tuple([member.prepare(kept, backward, device) for member in self.members])
            layout = self.layouts.get(gathers)
            if layout is None:
                layout = self.layouts[gathers] = _Layout(self.order, self.world, self.device)
            whole, own = layout.sent(self.rank, allocate)
        self.layout, self.sent = layout, whole
        return whole, own

    def has_sent(self, whole):
        """Whether ``send`` made that buffer."""
        return whole is self.sent

    def arrive(self, whole):
        """Fills the full parameters with what arrived."""
        layout, self.sent = self.layout, None
        layout.arrive(self.members, whole)
        with between_gathers(self._ranks, self.device):
            for member, arrived in zip(self.members, layout.arrived):
                member.gathers.fill(member.index, member.sent, arrived)
                member.sent = None
        self.is_there = True

    def leave(self, kept):
        """The full parameters are needed no more. Their memory stays where it is ``kept``."""
        self.is_there = False
        if not kept:
            self.layout.free()
            for member in self.members:
                for buffer in member.gathers.inner:
                    _free(buffer.untyped_storage())

    def _ranks(self):
        return self.ranks


class _Member:
    """A weight of a group."""

    __slots__ = ("record", "tensor", "store", "gathers", "full", "index", "sent", "sends")

    def __init__(self, record):
        self.record = record
        self.tensor = compat.local_of(record.sharded_param)
        self.store = self.tensor._store
        self.gathers = self.store.gathers
        self.full = compat.whole_of(record)
        self.index = self.sent = self.sends = None

    def is_gathered(self):
        """Whether PyTorch's gathers were of this shard."""
        gathers, store = self.gathers, getattr(self.full, "_store", None)
        return (
            gathers is not None
            and gathers.world > 1
            and gathers.gathered is store
            and gathers.module() is compat.module_of(self.record)
            and not compat.is_offloaded(self.record)
        )

    def is_current(self):
        store, gathers = self.store, self.gathers
        return (
            compat.local_of(self.record.sharded_param) is self.tensor
            and self.tensor._store is store
            and store.gathers is gathers
            and self.full._store is gathers.gathered
        )

    def prepare(self, kept, backward, device):
        """Brings what is sent up to date. Returns which gather it is."""
        gathers = self.gathers
        self.store.check_whole()
        self.index = index = gathers.choose(kept, backward)
        gather = gathers.gathers[index].made()
        self.sent, self.sends = gather.gather.pre(device), gather.sends
        gathers.inner[:] = gather.own.values()
        return index


class _Plain:
    """A parameter of a group that is no weight of lowp."""

    __slots__ = ("record", "rows", "dtype")

    def __init__(self, record):
        self.record = record
        self.rows, self.dtype = compat.rows_of(record)

    def is_gathered(self):
        return self.rows is not None and len(compat.outputs_of(self.record)) == 1

    def is_current(self):
        return compat.has_rows(self.record, self.rows)


class _Gone:
    """A parameter that was replaced."""

    def is_current(self):
        return False


_GONE = _Gone()


class _Layout:
    """Where what is sent and what arrives lies, of a group in one phase."""

    def __init__(self, order, world, device):
        self.world, end = world, 0
        #: What is sent, in order, and the plain values of it that are cast to another dtype first.
        self.pieces, self.rows, self.casts = [], [], []
        #: Where each piece of all ranks belongs: from where on in one memory for all weights, or where FSDP2 has a plain parameter.
        self.wholes = []
        for one in order:
            if isinstance(one, _Plain):
                rows = one.rows.detach()
                if rows.dtype != one.dtype:
                    self.rows.append(rows)
                    self.casts.append(torch.empty_like(rows, dtype=one.dtype))
                    rows = self.casts[-1]
                self.pieces.append(rows.view(torch.uint8))
                self.wholes.append(compat.outputs_of(one.record)[0])
            for send in () if isinstance(one, _Plain) else one.sends:
                self.pieces.append(send)
                self.wholes.append(end)
                end += -(-send.numel() * world // _ALIGNMENT) * _ALIGNMENT
        self.sizes = [piece.numel() for piece in self.pieces]
        self.bytes = sum(self.sizes)
        # A GPU copies words at once, and bytes one by one.
        self.word = torch.uint8 if any(piece.numel() % 8 or piece.storage_offset() % 8 for piece in self.pieces) else torch.int64
        self.pieces = [piece.view(self.word) for piece in self.pieces]
        memory = empty(end, device)
        self.memory, self.outputs, self.arrived = memory, None, []
        plain = [whole for whole in self.wholes if isinstance(whole, torch.Tensor)]
        self.storages = [(tensor.untyped_storage(), tensor.numel() * tensor.itemsize) for tensor in [memory, *plain]]
        self.storages[0][0].resize_(0)

    def sent(self, rank, allocate):
        """The buffer that the ranks gather into, and this rank's part of it, filled."""
        whole = allocate((self.bytes * self.world,), dtype=torch.uint8, device=self.memory.device)
        own = whole.narrow(0, self.bytes * rank, self.bytes)
        if self.rows:
            compat.copy_each(self.casts, self.rows)
        torch.cat(self.pieces, out=own.view(self.word))
        return whole, own

    def arrive(self, members, whole):
        """Copies what arrived to where each parameter has it."""
        for storage, bytes in self.storages:
            if storage.size() != bytes:
                storage.resize_(bytes)
        if self.outputs is None:  # views are of memory that is there
            self._make_outputs(members)
        torch.split_with_sizes_copy(whole.view(self.world, -1), self.sizes, dim=1, out=self.outputs)

    def _make_outputs(self, members):
        wholes = [
            # Of .data, which counts writes by itself: what autograd saved stays as it is.
            whole.data.view(torch.uint8) if isinstance(whole, torch.Tensor) else self.memory[whole : whole + size * self.world]
            for whole, size in zip(self.wholes, self.sizes)
        ]
        self.outputs = [whole.view(self.world, -1) for whole in wholes]
        codes = iter(whole for whole, place in zip(wholes, self.wholes) if not isinstance(place, torch.Tensor))
        self.arrived = [[next(codes) for _ in member.sends] for member in members]

    def free(self):
        """Frees the memory of the full parameters."""
        for storage, _ in self.storages:
            _free(storage)


def _free(storage):
    if storage.size():
        storage.resize_(0)
