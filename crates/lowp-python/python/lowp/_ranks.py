"""A process group of ``torch.distributed``, as Rust uses it.

What ranks tell each other on the host goes in rounds: one small frame of every rank, and a second collective where something is longer. A
rank that fails says so in its frame of the next round and waits for nobody, since the others may be in a collective of the device that it
will never join. Its message is on its stderr and in the store of the process group before that.
"""

import contextlib
import datetime
import itertools
import struct
import sys
import threading
import weakref

import torch
import torch.distributed as dist

from . import _watch
from ._errors import LowpError
from ._torch_compat import coalesced, coalesces, default_store, post_all_gather, serves_cpu

#: Whether the rank failed, the number of the round, bytes of the call's name, bytes of the content; those follow, as far as there is room.
_HEAD = struct.Struct("<?QBQ")
_FRAME, _NAME = 1024, 255
_ROOM = _FRAME - _HEAD.size - _NAME
#: How long the frame of a rank that failed waits for the others, and how long a store may take.
_LINGER, _PATIENCE = datetime.timedelta(seconds=30), 5.0
#: Bytes that a gather of many or uneven pieces stages, and those from which on an even piece goes without.
_STAGED, _DIRECT = 256 << 20, 16 << 20
_HOST = weakref.WeakKeyDictionary()
#: Rounds that are over, by group, with those that failed: a message in the store is of one of them. Frames carry the number, as a rank
#: that failed and went on is ahead.
_ROUNDS = weakref.WeakKeyDictionary()


def known(message, **found):
    """The error of what every rank of the group hears of: it is not sent again. ``failed`` is the rank that failed and its message, ``calls`` what
    each rank is at."""
    error = LowpError(message)
    error.__dict__.update(found, _lowp_heard=True)
    return error


def is_heard(error):
    """Whether every rank hears of an error already."""
    return getattr(error, "_lowp_heard", False)


class Ranks:
    """The ranks of a group: rounds of small values on the host, and gathers, maxima and moves on the device."""

    def __init__(self, group, device, make=True):
        self.group, self.device = dist.group.WORLD if group is None else group, device
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.on_device, self.may_move = device.type == "cuda", False
        self.host = _host_group(self.group, make)
        # Where its tensors lie.
        self.place = torch.device("cpu") if serves_cpu(self.host) else device

    @classmethod
    def of(cls, group, device):
        """``None`` where there is one rank alone. Collective for a group without collectives of the host."""
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) == 1:
            return None
        return cls(group, device)

    # Rounds.

    def exchange(self, tag, own):
        """The bytes of all ranks. ``tag`` says what they are. Raises where a rank failed, or is at something else."""
        frames = [_parts(frame) for frame in self._gather(tag, self._frame(False, tag, own))]
        failures = [(rank, *frame[3:]) for rank, frame in enumerate(frames) if frame[0]]
        error = self._heard(*failures[0]) if failures else None
        _ROUNDS[self.host] = max(round for _, round, _, _, _ in frames) + 1
        if error is not None:
            raise error
        calls = [call for _, _, call, _, _ in frames]
        if any(call != calls[0] for call in calls):
            raise known("; ".join(f"rank {rank} is at '{call}'" for rank, call in enumerate(calls)), calls=calls)
        contents, lengths = ([frame[part] for frame in frames] for part in (3, 4))
        if max(lengths) > _ROOM:
            wholes = self._gather(tag, own.ljust(max(lengths), b"\0"))
            contents = [whole[:length] for whole, length in zip(wholes, lengths)]
        return contents

    def agree(self, what, text):
        """Raises on every rank unless all give the same text. Of many lines it names the first that differ."""
        for rank, other in enumerate(self.collect(what, text)):
            if other != text:
                lines = itertools.zip_longest(text.split("\n"), other.split("\n"), fillvalue="nothing more")
                own, other = next((own, of_other) for own, of_other in lines if own != of_other)
                raise known(f"ranks disagree on {what}: rank {self.rank} has {own}; rank {rank} has {other}; every rank must have the same")

    def collect(self, what, text):
        """The texts of all ranks. Raises on every rank where one failed."""
        tag = f"agree on {what}"
        try:
            return [text.decode() for text in self.exchange(tag, text.encode())]
        except LowpError:
            raise
        except Exception as error:
            raise LowpError(
                f"{tag} failed on rank {self.rank}: {error} (if another rank ended, that rank has the cause: see the output of each rank)"
            ) from error

    def _gather(self, tag, own):
        sent, all = self._frames(own)
        with self._named(tag):
            dist.all_gather(all, sent, group=self.host)
        return [piece.cpu().numpy().tobytes() for piece in all]

    def _frames(self, own):
        """Bytes that this rank sends, and room for those of all."""
        sent = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(self.place)
        return sent, [torch.empty_like(sent) for _ in range(self.world)]

    def _frame(self, failed, tag, content):
        """What a rank sends first in a round."""
        name, inline = tag.encode()[:_NAME], content
        if len(content) > _ROOM:
            inline = content[:_ROOM] if failed else b""
        return (_HEAD.pack(failed, self._round(), len(name), len(content)) + name + inline).ljust(_FRAME, b"\0")

    def _round(self):
        return _ROUNDS.get(self.host, 0)

    # Failures.

    def fail(self, message, gathers=False):
        """Tells the others that this rank failed. Waits for none of them. With ``gathers`` they may be in a collective of PyTorch, which takes
        no frame."""
        _watch.settle()
        print(f"lowp: rank {self.rank} of {self.world} failed: {message}", file=sys.stderr, flush=True)
        store, key = default_store(), self._key()
        _within(_PATIENCE, lambda: store.set(key, f"{self.rank}:{message}"))
        if gathers:
            _within(_PATIENCE, lambda: _watch.tell(self.group, self.rank, message))
        if self.place.type == "cpu" and not (gathers and self.host is self.group):
            frame = self._frame(True, "failure", message.encode())
            _within(_PATIENCE, lambda: self._post(frame))
        _ROUNDS[self.host] = self._round() + 1

    def _post(self, frame):
        """Its part of the next round, which nobody waits for here."""
        sent, all = self._frames(frame)
        post_all_gather(self.host, all, sent, _LINGER)

    def _heard(self, rank, content, length):
        """The error of a rank that said in its frame that it failed."""
        message = content.decode(errors="ignore")
        if length > len(content):
            stored = self._stored()
            message = stored[1] if stored and stored[0] == rank else f"{message}.. (the rest is on the stderr of rank {rank})"
        return self._failed(rank, message)

    def _failed(self, rank, message):
        _watch.settle()
        return known(f"rank {rank} failed: {message}", failed=(rank, message))

    def _key(self, ahead=0):
        return f"lowp/{self.host.group_name}/{self._round() + ahead}"

    def _stored(self):
        """Who failed since the last round, and its message, where the store knows: the last one of a rank that went on and failed again."""
        store, ahead, found = default_store(), 0, None
        while (more := _within(_PATIENCE, lambda: store.get(self._key(ahead)) if store.check([self._key(ahead)]) else None)) is not None:
            ahead, found = ahead + 1, more
        if found is None:
            return None
        rank, message = found.decode().split(":", 1)
        return int(rank), message

    @contextlib.contextmanager
    def _named(self, tag):
        """A collective whose error may be that another rank is gone: the cause is that rank's, where it left one."""
        try:
            yield
        except Exception as error:
            stored = self._stored()
            if stored is None or stored[0] == self.rank:
                raise
            _ROUNDS[self.host] = self._round() + 1
            raise self._failed(*stored) from error

    # The device.

    def all_gather(self, items, stream):
        """Every rank's bytes of each item, on ``stream``: what this rank sends, and where those of each rank belong."""
        with self._named("all_gather"), self._on(stream):
            direct, rest = [], []
            for (source, length), dests in items:
                even = length and all(dest == (dests[0][0] + rank * length, length) for rank, dest in enumerate(dests))
                if even and (len(items) == 1 or self.world * length >= _DIRECT):
                    direct.append((self._bytes(dests[0][0], self.world * length), self._bytes(source, length)))
                else:
                    rest.append((source, dests))
            self._gather_direct(direct)
            self._gather_staged(rest)

    def _gather_direct(self, pairs):
        """Even pieces, where they belong and where this rank has its own."""
        if len(pairs) < 2 or not coalesces(self.group, self.device):
            for whole, own in pairs:
                dist.all_gather_into_tensor(whole, own, group=self.group)
            return
        with coalesced(self.group, self.device) as sent:
            for whole, own in pairs:
                dist.all_gather_into_tensor(whole, own, group=self.group)
        sent.wait()

    def _gather_staged(self, items):
        """Pieces that follow each other in memory of their own, those of each rank in one part of it."""
        total = sum(length for _, dests in items for _, length in dests)
        memory = torch.empty(min(total, _STAGED), dtype=torch.uint8, device=self.device)
        for pieces in _batches(items, self.rank):
            starts = [0, *itertools.accumulate(length for _, _, _, length in pieces)]
            parts = [memory[start:end] for start, end in itertools.pairwise(starts)]
            for part, (owner, source, _, length) in zip(parts, pieces):
                if owner == self.rank:
                    part.copy_(self._bytes(source, length))
            self._share(memory, [(owner, length) for owner, _, _, length in pieces])
            for part, (owner, source, dest, length) in zip(parts, pieces):
                if owner != self.rank or source != dest:
                    self._bytes(dest, length).copy_(part)

    def _share(self, memory, lengths):
        """Gives every rank the part of each one in ``memory``, in rank order: as many bytes move as there are."""
        sizes = [sum(length for owner, length in lengths if owner == rank) for rank in range(self.world)]
        whole = memory[: sum(sizes)]
        of_ranks = [(rank, part) for rank, part in enumerate(whole.split(sizes)) if sizes[rank]]
        if len({*sizes}) == 1:
            dist.all_gather_into_tensor(whole, of_ranks[self.rank][1], group=self.group)
            return
        send = lambda: [dist.broadcast(part, group=self.group, group_src=rank, async_op=True) for rank, part in of_ranks]
        if coalesces(self.group, self.device):
            with coalesced(self.group, self.device) as sent:
                send()
            sent.wait()
        else:
            for work in send():
                work.wait()

    def maximum(self, span, stream):
        """The maximum of every float32 over the ranks, on ``stream``."""
        values = self._bytes(*span).view(torch.float32)
        with self._named("maximum"), self._on(stream):
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)

    def move(self, pieces, stream):
        """Pieces of memory from rank to rank, on ``stream``: where each lies here, and the ranks that send and receive it. Every rank calls,
        and those of one pair of ranks come in the same order on both."""
        with self._named("move"), self._on(stream):
            if not self.may_move:
                # Where a group makes its communicator with its first collective, every rank takes part in that.
                dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
                self.may_move = True
            sends = [
                dist.P2POp(dist.isend if sender == self.rank else dist.irecv, self._bytes(*span), group=self.group, group_peer=receiver if sender == self.rank else sender)
                for span, (sender, receiver) in pieces
            ]
            for work in dist.batch_isend_irecv(sends) if sends else ():
                work.wait()

    def _on(self, stream):
        """That stream as the current one: lowp's work before and after the collective is there."""
        if torch.cuda.current_stream(self.device).cuda_stream == stream:
            return contextlib.nullcontext()
        if stream == 0:
            return torch.cuda.stream(torch.cuda.default_stream(self.device))
        return torch.cuda.stream(torch.cuda.ExternalStream(stream, device=self.device))

    def _bytes(self, pointer, bytes):
        return torch.as_tensor(_Span(pointer, bytes), device=self.device)


@contextlib.contextmanager
def together(ranks):
    """A part of a collective call that may fail on one rank: the others get its message in their next round."""
    try:
        yield
    except Exception as error:
        if ranks is not None:
            _tell(ranks, error)
        raise


class between_gathers:
    """A part of what PyTorch's own gathers call, which may fail on one rank while others are in the gather already: the cause is on stderr
    and in the store, and no collective says it. ``group`` gives the ranks of the gather."""

    # A context of two methods, as each gather of each weight has two.
    __slots__ = ("group", "device")

    def __init__(self, group, device):
        self.group, self.device = group, device

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        _watch.passed()
        if isinstance(error, Exception) and dist.is_available() and dist.is_initialized() and dist.get_world_size(self.group()) > 1:
            _tell(Ranks(self.group(), self.device, make=False), error, gathers=True)


def _tell(ranks, error, **how):
    """Once for each error, and not what others said."""
    if not is_heard(error):
        error._lowp_heard = True
        ranks.fail(f"{type(error).__name__}: {error}", **how)


def _host_group(group, make):
    """The group for rounds on the host: the same, or one of gloo beside a group that has collectives of GPUs alone, whose rounds
    would wait after the work of the device. To ``make`` it is collective."""
    if serves_cpu(group) or not dist.is_gloo_available():
        return group
    if group not in _HOST:
        if not make:
            return group
        _HOST[group] = dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)
    return _HOST[group]


def _parts(frame):
    """Whether the rank failed, its round, its call, its content as far as it is there, and the length of that."""
    failed, round, name, length = _HEAD.unpack_from(frame)
    rest = frame[_HEAD.size :]
    return failed, round, rest[:name].decode(errors="ignore"), rest[name : name + min(length, _ROOM)], length


def _within(seconds, call):
    """What ``call`` returns; ``None`` where it fails or takes longer, as a store does whose rank is gone."""
    found = []

    def work():
        with contextlib.suppress(Exception):
            found.append(call())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def _batches(items, rank):
    """Pieces that are staged at once, in the order of their ranks: the rank, where it has the bytes, where they belong, and how many."""
    batch, room = [], _STAGED
    for source, dests in items:
        for owner, (dest, length) in enumerate(dests):
            done = 0
            while done < length:
                part = min(length - done, room)
                batch.append((owner, source + done, dest + done, part))
                done, room = done + part, room - part
                if room == 0:
                    yield sorted(batch, key=lambda piece: piece[0])
                    batch, room = [], _STAGED
    if batch:
        yield sorted(batch, key=lambda piece: piece[0])


class _Span:
    """Memory of lowp on a GPU, as other libraries take it."""

    def __init__(self, pointer, bytes):
        self.__cuda_array_interface__ = {
            "shape": (bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }
