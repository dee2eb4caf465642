"""A group of FSDP2 whose weights were gathered before: the first one prepares the gather of all of them, and FSDP2 asks none of them for what it knows.

Each weight still sends its own bytes, in its own place. So a rank may gather a group in this way while another one calls the hooks of each weight.
"""

import weakref

from . import _torch_compat as compat
from ._memory import device_of
from ._ranks import between_gathers

_KNOWN = weakref.WeakKeyDictionary()


def follow(group):
    """From the next gather on, a group is gathered at once, if all its weights were gathered before."""
    if group is None:
        return
    known = _KNOWN.get(group)
    if known is not None and known.is_current():
        return
    records = [record for record in compat.records_of(group) if hasattr(compat.local_of(record.sharded_param), "_store")]
    members = [_Member(record) for record in records]
    if members and all(member.is_gathered() for member in members):
        _KNOWN[group] = _Group(group, members)
        for record, member in zip(records, members):
            compat.answer(record, member)


class _Group:
    """The weights of a group."""

    def __init__(self, group, members):
        self.of, self.members = weakref.ref(group), members
        self.device = members[0].store.device
        for member in members:
            member.group = self

    def is_current(self):
        """Whether its weights have the shards and the full tensors that they had."""
        return all([member.is_current() for member in self.members])

    def send(self):
        """Prepares what each weight sends, unless a weight changed: then PyTorch asks the hook of each."""
        for member in self.members:
            member.sends = member.sent = None
        group = self.of()
        if group is None or compat.reshards_to_some(group) or not self.is_current():
            return
        with between_gathers(self._ranks, self.device):
            kept, backward = compat.keeps_whole(group), compat.is_before_backward(group)
            device = device_of(self.device)
            for member in self.members:
                member.prepare(kept, backward, device)

    def fill(self):
        """Makes the full tensors of what arrived, which FSDP2 has copied to where it belongs."""
        with between_gathers(self._ranks, self.device):
            for member in self.members:
                member.make()

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
            and compat.local_of(record.sharded_param) is self.tensor
            and self.tensor._store is store
            and store.gathers is gathers
            and self.full._store is gathers.gathered
            and gathers.module() is record._module_info.module
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

    # What PyTorch asks.

    def send(self):
        """The bytes that are gathered; ``None`` where PyTorch is to call the hook."""
        if self.group.members[0] is self:
            self.group.send()
        return self.sends

    def fill(self):
        """Whether the full tensor is there; otherwise PyTorch calls the hook."""
        if self.sends is None:
            return False
        if not self.is_filled:
            self.group.fill()
        self.sends = None
        return True
