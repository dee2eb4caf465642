"""A group of FSDP2 whose weights were gathered before: it is gathered as PyTorch does it, but what is the same in each gather is kept.

The bytes that travel, their order and the streams are those of PyTorch, so that one rank may gather a group in this way while PyTorch does it on another.
"""

import weakref

import torch

from . import _torch_compat as compat
from ._memory import device_of
from ._ranks import between_gathers

_KNOWN = weakref.WeakKeyDictionary()


def follow(group):
    """From the next gather on, a group is gathered here, if all its weights were gathered before."""
    if group is None:
        return
    known = _KNOWN.get(group)
    if known is not None and known.is_current():
        return
    records = compat.records_of(group)
    members = [_Member(record) for record in records if hasattr(compat.local_of(record.sharded_param), "_store")]
    if members and all(member.is_gathered() for member in members):
        compat.on_gathers(records, _Group(group, members))
        _KNOWN[group] = records[0].lowp_group


class _Group:
    """The weights of a group, and what is kept of its gathers."""

    def __init__(self, group, members):
        self.of, self.members = weakref.ref(group), members
        self.device, self.world = members[0].store.device, members[0].gathers.world
        self.kept, self.layout, self.is_prepared = {}, None, False
        for member in members:
            member.group = weakref.ref(self)  # FSDP2's record holds both, and a cycle would keep replaced shards until it is collected
            compat.answer(member.record(), member)

    def is_current(self):
        """Whether its weights have the shards and the full tensors that they had."""
        for member in self.members:
            if not member.is_current():
                return False
        return True

    def prepare(self):
        """Whether each weight has what it sends. Otherwise a weight changed, and PyTorch asks the hook of each."""
        for member in self.members:
            member.sends = member.sent = None
        group = self.of()
        if group is None or not self.is_current():
            self._drop()
            return False
        if compat.reshards_to_some(group):
            return False
        with between_gathers(self._ranks, self.device):
            kept, backward = compat.keeps_whole(group), compat.is_before_backward(group)
            device = device_of(self.device)
            for member in self.members:
                member.prepare(kept, backward, device)
        return True

    def gather(self, records, rank, allocate):
        """The buffer that the ranks gather into with this rank's part of it, filled, and how PyTorch describes it; ``None`` where PyTorch is to do it."""
        self.layout, self.is_prepared = None, False
        if torch.is_inference_mode_enabled() or not self.prepare():
            return None
        indices = tuple([member.index for member in self.members])
        if indices not in self.kept or self.kept[indices] is not None and not self.kept[indices].is_of(records):
            self.kept[indices] = _Layout.of(records, self.members, self.world, self.device)
        layout = self.kept[indices]
        if layout is None:
            self.is_prepared = True
            return None
        self.layout = layout
        return *layout.sent(rank, allocate), layout.described

    def arrive(self, records, gathered):
        """Copies what arrived to where each parameter has it. Returns whether it did."""
        layout, self.layout = self.layout, None
        return layout is not None and layout.arrive(records, gathered)

    def fill(self):
        """Makes the full tensors of what arrived, which is where it belongs."""
        with between_gathers(self._ranks, self.device):
            for member in self.members:
                member.make()

    def _drop(self):
        """Holds no weight any more: ``follow`` makes another group of those that replaced them."""
        self.kept = {}
        for member in self.members:
            member.tensor = member.store = member.gathers = member.full = None

    def _ranks(self):
        return self.members[0].gathers.group


class _Member:
    """A weight of a group, and what it sends in the gather that FSDP2 is at."""

    __slots__ = ("record", "tensor", "store", "gathers", "full", "group", "sends", "index", "sent", "is_filled")

    def __init__(self, record):
        # FSDP2's record holds this.
        self.record = weakref.ref(record)
        self.tensor = compat.local_of(record.sharded_param)
        self.store = self.tensor._store
        self.gathers = self.store.gathers
        self.full = compat.whole_of(record)
        self.sends = self.sent = None
        self.is_filled = False

    def is_gathered(self):
        """Whether PyTorch's gathers were of this shard."""
        gathers, store = self.gathers, getattr(self.full, "_store", None)
        return gathers is not None and gathers.world > 1 and gathers.gathered is store and not compat.is_offloaded(self.record())

    def is_current(self):
        record, store, gathers = self.record(), self.store, self.gathers
        return (
            record is not None
            and store is not None
            and compat.local_of(record.sharded_param) is self.tensor
            and self.tensor._store is store
            and store.gathers is gathers
            and self.full._store is gathers.gathered
            and gathers.module() is compat.module_of(record)
            and compat.whole_of(record) is self.full
        )

    def prepare(self, kept, backward, device):
        gathers = self.gathers
        self.store.check_whole()
        self.index = index = gathers.choose(kept, backward)
        gather = gathers.gathers[index].made()
        self.sent = gather.gather.pre(device)
        gathers.inner[:] = gather.own.values()
        if index != gathers.last:
            gathers.place(index, self.record())
        self.sends, self.is_filled = gather.sends, False

    def make(self):
        if self.sent is not None:
            self.gathers.fill(self.index, self.sent, compat.outputs_of(self.record()))
            self.sent, self.is_filled = None, True

    # What PyTorch asks where it gathers the group.

    def send(self):
        """The bytes that are gathered; ``None`` where PyTorch is to call the hook."""
        group = self.group()
        if group is not None and group.members[0] is self:
            if not group.is_prepared:
                group.prepare()
            group.is_prepared = False
        return self.sends

    def fill(self):
        """Whether the full tensor is there; otherwise PyTorch calls the hook."""
        if self.sends is None:
            return False
        if not self.is_filled:
            self.group().fill()
        self.sends = None
        return True


class _Layout:
    """Where what is sent and what arrives lies, of a group in one phase."""

    @classmethod
    def of(cls, records, members, world, device):
        """``None`` where PyTorch gathers the group: of parameters that are not cut by rows, or whose values do not begin where those
        of their dtype may."""
        made = cls()
        members = {id(member.record()): member for member in members}
        made.world, made.device, made.sizes = world, device, []
        made.codes, made.places, made.runs, made.plain = [], [], [], []
        numels, dtypes, start = [], [], 0
        for record in records:
            member = members.get(id(record))
            if not compat.is_cut_by_rows(record):
                return None
            if member is not None:
                made.places += range(len(made.sizes), len(made.sizes) + len(member.sends))
                made.codes += member.sends
                sizes = [send.numel() for send in member.sends]
                numels.append(sizes)
                dtypes.append([torch.uint8] * len(sizes))
            else:
                rows, dtype = compat.rows_of(record)
                if rows is None or start % dtype.itemsize:
                    return None
                made.plain.append((len(numels), rows))
                made.runs.append((len(made.sizes), dtype))
                sizes = [rows.numel() * dtype.itemsize]
                numels.append([rows.numel()])
                dtypes.append([dtype])
            made.sizes += sizes
            start += sum(sizes)
        made.bytes, made.rows = start, [rows for _, rows in made.plain]
        made.described = (dtypes, numels, made.sizes)
        made.outputs = []
        # Parts lie in the order of ranks.
        fits = all(start % dtype.itemsize == 0 for _, dtype in made.runs)
        return made if made.codes and fits else None

    def is_of(self, records):
        """Whether the plain parameters have the memory that they had."""
        for index, rows in self.plain:
            if not compat.has_rows(records[index], rows):
                return False
        return True

    def sent(self, rank, allocate):
        whole = allocate((self.bytes * self.world,), dtype=torch.uint8, device=self.device)
        own = whole.narrow(0, self.bytes * rank, self.bytes)
        parts = own.split(self.sizes)
        compat.copy_each([parts[place] for place in self.places], self.codes)
        if self.rows:
            compat.copy_each([parts[place].view(dtype) for place, dtype in self.runs], self.rows)
        return whole, own

    def arrive(self, records, gathered):
        """Whether it copied what arrived: not into tensors of inference mode."""
        outputs = [compat.outputs_of(record) for record in records]
        if not self._are_known(outputs):
            dtypes, numels, _ = self.described
            for record, *what in zip(records, numels, dtypes):
                record.init_all_gather_outputs(*what, self.world, self.device)
            outputs = self.outputs = [compat.outputs_of(record) for record in records]
            tensors = [tensor for of in outputs for tensor in of]
            if any(tensor.is_inference() for tensor in tensors):
                self.outputs = []
                return False
            self.storages = [(tensor.untyped_storage(), tensor.numel() * tensor.itemsize) for tensor in tensors]
            self.views = None
        for storage, bytes in self.storages:
            if storage.size() != bytes:
                storage.resize_(bytes)
        if self.views is None:  # views are of memory that is there
            # Of .data, which counts writes by itself: what autograd saved stays as it is.
            self.views = [tensor.data.view(self.world, -1).view(torch.uint8) for of in outputs for tensor in of]
        torch.split_with_sizes_copy(gathered.view(self.world, -1), self.sizes, dim=1, out=self.views)
        return True

    def _are_known(self, outputs):
        if len(outputs) != len(self.outputs):
            return False
        for of, known in zip(outputs, self.outputs):
            if of is not known:
                return False
        return True
