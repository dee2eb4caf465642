"""Gathers by FSDP2: what travels and what is made of it is decided in Rust (``lowp_shard::GatherHooks``)."""

import weakref

import torch
import torch.distributed as dist

from . import _group, _lowp, _native, _store, _uncast, _watch
from ._errors import LowpError, UnsupportedOp
from ._memory import device_of, empty, memory
from ._ranks import Ranks, between_gathers, together
from ._store import Store
from . import _torch_compat as compat


#: Which gather of a shard: what rowwise codes are made of for forward, what columnwise ones are made of for backward, or both.
FORWARD, BACKWARD, WHOLE = range(3)


class Gathers:
    """The gathers of one shard.

    The store of the shard holds them, and they do not hold it: memory of a model that is deleted is freed at once, and not by Python's cyclic
    collector. Making them is collective, unless ``agreed`` says what the ranks agreed on for this parameter before.
    """

    def __init__(self, store, full, world, rank, group, agreed=None):
        self.recipe, self.full, self.world, self.rank, self.group = store.recipe, full, world, rank, group
        ranks = None if agreed or world == 1 else Ranks.of(group, store.device)
        if world > 1:
            _watch.begin(group, store.device)
        _uncast.cast_rows(store, ranks, full, rank, group)
        with together(ranks):
            self.shard = store.as_shard(full, world, rank)
            gathers = [*_lowp.Gather.of(self.shard, False), *_lowp.Gather.of(self.shard, True)]
        # Whether this rank has fewer rows than others.
        self.is_short = store.rows != -(-full[0] // world)
        self.mesh = self.module = None
        #: The store that FSDP2 shards: for a shard on the host `gathers` belongs to its copy on the GPU, and `owner` is the shard.
        self.owner = weakref.ref(store) if store.origin is None else store.origin
        self.text = " | ".join(gather.text() for gather in gathers)
        if agreed not in (None, self.text):
            raise LowpError(f"the gathers of a parameter were {agreed} and are now {self.text}; call fully_shard on a new model")
        if ranks is not None:
            ranks.agree("the gathers of a parameter", self.text)
        self.gathers = [_Gather(gather, store) for gather in gathers]
        # What FSDP2 frees with the full tensor: the memory of the gather before.
        self.inner = []
        self.gathered = Store(store.recipe, *full, {}, store.device)
        self.gathered.full = Gathered(self)
        self.backward = _Backward()
        # Where FSDP2 copies what arrives, by gather: it allocates that once, and gathers have other bytes.
        self.outputs, self.last = {}, None
        #: The gather that the full tensor is of.
        self.filled = None

    def check_cut(self, full, world):
        """Raises where FSDP2 gathers another tensor than these gathers are of."""
        if (self.full, self.world) != (full, world):
            raise LowpError(
                f"FSDP2 gathers {full} over {world} ranks, and this shard is one of {self.full} over {self.world}; call fully_shard once"
            )

    def choose(self, kept, backward):
        """The gather that FSDP2 asks for: of codes of both directions where the full tensor may serve both."""
        # In a backward FSDP2 keeps what it gathers for a forward that is repeated.
        both = kept or (not backward and compat.in_backward())
        if backward:
            both = self.backward.begin() or both
        return WHOLE if both else BACKWARD if backward else FORWARD

    def place(self, index, param):
        """Gives FSDP2's parameter the memory that it allocated for this gather before, if it did."""
        if param is not None:
            if self.last is not None:
                self.outputs[self.last] = compat.outputs_of(param)
            compat.set_outputs(param, self.outputs.get(index, []))
            self.last = index

    def fill(self, index, sent, arrived):
        """The full tensor, with what arrived in it."""
        try:
            return self._fill(index, sent, arrived)
        except Exception:
            group = None if self.module is None else _group_of(self.module())
            if group is not None:
                compat.forget_gathers(group)
            raise

    def _fill(self, index, sent, arrived):
        gather = self.gathers[index]
        if self.world == 1:
            arrived = gather.sends
        for buffer in gather.own.values():
            storage = buffer.untyped_storage()
            if storage.size() != buffer.numel():
                storage.resize_(buffer.numel())
        full = self.gathered
        full.buffers, moved = gather.buffers(arrived)
        full.full.follow(gather, sent, arrived)
        # Native layers find the codes of one phase where they were. Those of both they ask for in each gather, which notes what a backward reads.
        if moved or WHOLE in (index, self.filled):
            _native.forget(full)
        self.filled = index
        return full

    def peers(self):
        """The gathers of the group of FSDP2 that this is in, in an order that all ranks have. What a backward of one of its weights needs is gathered for
        all of them: ranks may read weights in another order, as of experts."""
        group = _group_of(self.module())
        stores = [getattr(compat.local_of(sharded), "_store", None) for _, sharded, *_ in compat.fsdp_params(group)] if group is not None else []
        found = [store.gathers for store in stores if store is not None and store.gathers is not None]
        return found if self in found else [self]

    def repeat(self):
        """Gathers codes of both directions, in a backward that reads those of the other one, too. Collective: the graph is that of every rank."""
        if self.gathered.serves("rowwise") and self.gathered.serves("columnwise"):
            return
        gather = self.gathers[WHOLE].made()
        with between_gathers(lambda: self.group, gather.device):
            sent = gather.gather.pre(device_of(gather.device))
            arrived = [empty(self.world * send.numel(), gather.device) for send in gather.sends]
            for whole, send in zip(arrived, gather.sends) if self.world > 1 else ():
                dist.all_gather_into_tensor(whole, send, group=self.group)
            # FSDP2 frees what is in that list.
            self.inner += [*gather.own.values(), *arrived]
            self.fill(WHOLE, sent, arrived)
        self.backward.repeats = True

    def adopt(self, full):
        """Fills the full tensor of another shard from here on: the one before a checkpoint or a move replaced the shard."""
        if (full.recipe, full.shape) != (self.recipe, self.full):
            raise LowpError(
                f"FSDP2 holds a full tensor of {full.recipe!r} {full.shape} for a shard of {self.recipe!r} {self.full}; call fully_shard "
                "on a new model"
            )
        # FSDP2 holds that list.
        inner = full.full.inner
        inner[:] = self.inner
        self.inner, self.gathered = inner, full
        full.full = Gathered(self)
        # Whatever native layers hold is of that shard.
        self.filled = WHOLE


class _Backward:
    """Whether the backward repeats forwards, and whether one was seen since the last gather for it: of a parameter, whose shard soever."""

    repeats = repeated = False

    def begin(self):
        """Whether the gather for a backward is of codes of both directions."""
        self.repeats, self.repeated = self.repeats and self.repeated, False
        return self.repeats


class _Gather:
    """One gather, with the memory that Python allocates for it when it is used."""

    def __init__(self, gather, store):
        self.gather, self.device = gather, store.device
        self.stored, self.views = store.buffers, None
        #: The list that the views are of: FSDP2 fills one again and again, and frees what is in it.
        self.arrived = None

    def made(self):
        """The same, with its memory."""
        if hasattr(self, "sends"):
            return self
        inputs, outputs = self.gather.inputs(), self.gather.outputs()
        padded = [empty(sent.bytes, self.device).zero_() for sent in inputs if sent.is_padded]
        self.gather.attach(device_of(self.device), [memory(buffer, keep=True) for buffer in padded])
        padded = iter(padded)
        self.sends = [next(padded) if sent.is_padded else self.stored[sent.name] for sent in inputs]
        # Parts of what arrives, buffers of the shard, and memory of its own, without storage until the gather is there.
        self.parts = [(o.name, o.input, o.start, o.start + o.bytes) for o in outputs if o.place == "arrived"]
        self.shared = {o.name: self.stored[o.name] for o in outputs if o.place == "shard"}
        self.own = {o.name: empty(o.bytes, self.device) for o in outputs if o.place == "memory"}
        for buffer in self.own.values():
            buffer.untyped_storage().resize_(0)
        # Without work that everybody needs, all of it waits for the first who needs what is derived.
        self.is_derived = any(o.is_derived for o in outputs)
        self.waits = all(o.place != "memory" or o.is_derived for o in outputs)
        return self

    def buffers(self, arrived):
        """The buffers of the full tensor, and whether they are others than before. FSDP2 frees storages and fills them again: views of them stay."""
        if arrived is self.arrived:
            return dict(self.views[1]), False
        storages = [compat.storage_id(piece) for piece in arrived]
        moved = self.views is None or self.views[0] != storages
        if moved:
            flat = [piece.reshape(-1) for piece in arrived]
            views = {name: flat[input][start:end] for name, input, start, end in self.parts}
            self.views = (storages, {**views, **self.own, **self.shared})
        self.arrived = arrived
        return dict(self.views[1]), moved

    def fill(self, sent, arrived):
        """Makes what is there at once of what arrived, on the stream that is current."""
        own = [memory(buffer) for buffer in self.own.values()]
        self.gather.post(device_of(self.device), sent, [memory(piece) for piece in arrived], own)


class Gathered:
    """The gather of a full tensor: makes what was left for later."""

    def __init__(self, gathers):
        self.gathers = weakref.ref(gathers)
        self.inner = gathers.inner
        self.gather = None
        self.waiting = None
        self.derived = False

    def follow(self, gather, sent, arrived):
        """A gather is there."""
        self.gather, self.derived, self.waiting = gather, not gather.is_derived, None
        if gather.waits:
            gather.gather.check(sent)
            self.waiting = (sent, arrived)
        else:
            gather.fill(sent, arrived)

    def check_there(self, buffers):
        """Raises where FSDP2 freed the memory of buffers."""
        if any(buffer.untyped_storage().size() < buffer.numel() for buffer in buffers):
            raise LowpError(
                "a gathered weight was used after FSDP2 freed it, at the end of the forward or backward of its module; use it before that, "
                "or call unshard() before"
            )

    def serve(self, store, orientation):
        """Gathers the codes of both directions where a backward reads those of the one that it has not."""
        gathers = self.gathers()
        if gathers is None or not compat.in_backward():
            return
        repeats, missing = orientation == "rowwise" and not gathers.backward.repeated, not store.serves(orientation)
        if not (repeats or missing):
            return
        peers = gathers.peers()
        for peer in peers:
            peer.backward.repeated = peer.backward.repeated or repeats
        if missing:
            self.check_there(store.buffers.values())
            # Not for what follows the operators of a model, as selective checkpointing does.
            with compat.without_modes():
                for peer in peers:
                    peer.repeat()

    def derive(self):
        """Makes what was left for later, once."""
        if self.derived or self.gather is None:
            return
        self.check_there(self.gather.own.values())
        if self.waiting is not None:
            self.gather.fill(*self.waiting)
            self.waiting = None
        self.gather.gather.derive(device_of(self.gather.device))
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

    __torch_function__ = compat.plain_torch_function


def pre_all_gather(store, mesh, outer_size, module):
    """What this rank sends, and what ``post_all_gather`` must know of it."""
    with between_gathers(mesh.get_group, store.device):
        return _pre_all_gather(store, mesh, outer_size, module)


def _pre_all_gather(store, mesh, outer_size, module):
    gathers = store.gathers
    if gathers is None or gathers.module() is not module:
        gathers = store.gathers = _gathers_of(store, tuple(outer_size), mesh, module)
    store.check_whole()
    # The same mesh has the same size, which it counts each time.
    if gathers.mesh is not mesh:
        gathers.check_cut(tuple(outer_size), mesh.size())
        gathers.mesh = mesh
    group = _group_of(module)
    index = gathers.choose(group is None or compat.keeps_whole(group), _is_backward(group))
    gather = gathers.gathers[index].made()
    sent = gather.gather.pre(device_of(store.device))
    gathers.inner[:] = gather.own.values()
    if gathers.world == 1:
        # FSDP2 copies one buffer and gathers none: the shard is the tensor.
        return (empty(1, store.device),), (gathers, index, sent)
    if index != gathers.last:
        gathers.place(index, compat.fsdp_param_of(group, store))
    sends = gather.sends
    if gathers.is_short:
        sends = [send.as_subclass(_Piece) for send in sends]
    return tuple(sends), (gathers, index, sent)


#: What ranks agreed on, by module and name of the parameter: the text of the gathers, and what backwards read. A load gives some ranks a new
#: shard and leaves others theirs, so that a shard without gathers says nothing of the others'.
_AGREED = weakref.WeakKeyDictionary()


def _gathers_of(store, full, mesh, module):
    """The gathers of a parameter of ``module``. Collective when that is gathered for the first time, whose shard soever."""
    of = lambda param: getattr(compat.local_of(param), "_store", None)
    # A shard that comes from the host for each gather is none of the module's.
    name = next((name for name, param in compat.own_parameters(module).items() if of(param) is store), (store.recipe, full))
    known = _AGREED.setdefault(module, {})
    agreed, backward = known.get(name, (None, None))
    gathers = Gathers(store, full, mesh.size(), mesh.get_local_rank(), mesh.get_group(), agreed)
    gathers.backward = backward or gathers.backward
    known[name], gathers.module = (gathers.text, gathers.backward), weakref.ref(module)
    return gathers


def with_columnwise(store):
    """The buffers of a store and those that it leaves out because they follow from them: the gather of a rank alone, in memory of its own."""
    if not store.rows * store.cols:
        return Store.empty(store.recipe, *store.shape, store.device).buffers | store.buffers
    alone = Store(store.recipe, *store.shape, dict(store.buffers), store.device)
    gathers = Gathers(alone, store.shape, 1, 0, None)
    gather = gathers.gathers[WHOLE].made()
    full = gathers.fill(WHOLE, gather.gather.pre(device_of(store.device)), [])
    full.derive()
    return dict(full.buffers)


_store.with_columnwise = with_columnwise


def post_all_gather(store, arrived, metadata, full=None):
    """The store of the full tensor, the same in every gather, and the list of what FSDP2 frees with it. ``full`` is the store that the first
    gather made."""
    gathers, index, sent = metadata
    if gathers.owner() is store:  # and not one that replaced it since
        store.gathers = gathers  # those of a shard on the host are of its copy on the GPU
    with between_gathers(lambda: gathers.group, store.device):
        # A shard that comes back had that full tensor before.
        if full is not None and full.full.gathers() is not gathers:
            gathers.adopt(full)
        made = gathers.fill(index, sent, arrived), gathers.inner
        if full is not None:
            _group.follow(_group_of(gathers.module()))
        return made


_GROUPS = weakref.WeakKeyDictionary()


def _group_of(module):
    """The group of parameters of FSDP2 that a module's are in; ``None`` where FSDP2 does not say."""
    known = _GROUPS.get(module)
    group = known() if known is not None else None
    if group is None:
        group = _find_group(module)
        if group is not None:
            _GROUPS[module] = weakref.ref(group)
    if group is not None and compat.reshards_to_some(group):
        raise UnsupportedOp(
            "reshard_after_forward is a number of ranks, which FSDP2 supports only for plain parameters; give True or False"
        )
    return group


def _find_group(module):
    for group in compat.fsdp_groups():
        if any(any(user is module for user in users) for users, *_ in compat.fsdp_params(group)):
            return group
    return None


def known_params():
    """What FSDP2 says of each of its parameters: the sharded one, the whole one (``None`` before the first gather), and the name."""
    for group in compat.fsdp_groups():
        for _, sharded, whole, name in compat.fsdp_params(group):
            yield sharded, whole, name


def _is_backward(group):
    return group is not None and compat.is_before_backward(group)
