"""A process group of ``torch.distributed``, as Rust uses it.

What ranks tell each other on the host goes in rounds: one small frame of every rank, and a second collective where something is longer. A
rank that fails says so in its frame of the next round and waits for nobody, since the others may be in a collective of the device that it
will never join. Its message is on its stderr and in the store of the process group before that.
"""

import contextlib
import datetime
import struct
import sys
import threading
import weakref

import torch
import torch.distributed as dist

from ._errors import LowpError

#: Whether the rank failed, bytes of the call's name, bytes of the content; those follow, as far as there is room.
_HEAD = struct.Struct("<?BQ")
_FRAME, _NAME = 1024, 255
_ROOM = _FRAME - _HEAD.size - _NAME
#: How long the frame of a rank that failed waits for the others, and how long a store may take.
_LINGER, _PATIENCE = datetime.timedelta(seconds=30), 5.0
#: Bytes of all ranks that one collective of many or uneven pieces stages.
_STAGED = 256 << 20
_HOST = weakref.WeakKeyDictionary()
#: Rounds that are done, by group: ranks are in the same one.
_ROUNDS = weakref.WeakKeyDictionary()


class Known(LowpError):
    """What every rank of the group hears of: nobody is told again. ``failed`` is the rank that failed and its message, ``calls`` what each
    rank is at."""

    failed = calls = None


class Ranks:
    """The ranks of a group: rounds of small values on the host, and two collectives on the device."""

    def __init__(self, group, device):
        self.group, self.device = group, device
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.on_device = device.type == "cuda"
        self.host = _host_group(group)
        # Where its tensors lie.
        self.place = torch.device("cpu") if _has_cpu(self.host) else device

    @classmethod
    def of(cls, group, device):
        """``None`` where there is one rank alone. Collective for a group without collectives of the host."""
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) == 1:
            return None
        return cls(group, device)

    # Rounds.

    def exchange(self, tag, own):
        """The bytes of all ranks. ``tag`` says what they are. Raises ``Known`` where a rank failed, or is at something else."""
        frames = [_parts(frame) for frame in self._gather(tag, _frame(False, tag, own))]
        for rank, (failed, _, content, length) in enumerate(frames):
            if failed:
                raise self._failed(rank, content.decode(errors="ignore"), length)
        calls = [call for _, call, _, _ in frames]
        if any(call != calls[0] for call in calls):
            error = Known("; ".join(f"rank {rank} is at '{call}'" for rank, call in enumerate(calls)))
            error.calls = calls
            raise error
        contents, longest = [content for _, _, content, _ in frames], max(length for _, _, _, length in frames)
        if longest > _ROOM:
            wholes = self._gather(tag, own.ljust(longest, b"\0"))
            contents = [whole[:length] for whole, (_, _, _, length) in zip(wholes, frames)]
        _ROUNDS[self.host] = self._round() + 1
        return contents

    def agree(self, what, text):
        """Raises on every rank unless all give the same text."""
        for rank, other in enumerate(self.collect(what, text)):
            if other != text:
                raise Known(f"ranks disagree on {what}: rank {self.rank} has {text}; rank {rank} has {other}")

    def collect(self, what, text):
        """The texts of all ranks. Raises on every rank where one failed."""
        return [text.decode() for text in self.exchange(f"agree on {what}", text.encode())]

    def _gather(self, tag, own):
        sent, all = self._frames(own)
        with self._named(tag):
            dist.all_gather(all, sent, group=self.host)
        return [piece.cpu().numpy().tobytes() for piece in all]

    def _frames(self, own):
        """Bytes that this rank sends, and room for those of all."""
        sent = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(self.place)
        return sent, [torch.empty_like(sent) for _ in range(self.world)]

    def _round(self):
        return _ROUNDS.get(self.host, 0)

    # Failures.

    def fail(self, message):
        """Tells the others that this rank failed. Waits for none of them."""
        print(f"lowp: rank {self.rank} of {self.world} failed: {message}", file=sys.stderr, flush=True)
        store, key = dist.distributed_c10d._get_default_store(), self._key()
        _within(_PATIENCE, lambda: store.set(key, f"{self.rank}:{message}"))
        if self.place.type == "cpu":
            _within(_PATIENCE, lambda: self._post(_frame(True, "failure", message.encode())))

    def _post(self, frame):
        """Its part of the next round, which nobody waits for here."""
        from torch._C._distributed_c10d import AllgatherOptions

        sent, all = self._frames(frame)
        options = AllgatherOptions()
        options.timeout = _LINGER
        self.host.allgather([all], [sent], options)

    def _failed(self, rank, message, length=None):
        if length is not None and length > len(message.encode()):
            stored = self._stored()
            message = stored[1] if stored and stored[0] == rank else f"{message}.. (the rest is on the stderr of rank {rank})"
        error = Known(f"rank {rank} failed: {message}")
        error.failed = (rank, message)
        return error

    def _key(self):
        return f"lowp/{self.host.group_name}/{self._round()}"

    def _stored(self):
        """Who failed in this round, and its message, where the store knows."""
        store, key = dist.distributed_c10d._get_default_store(), self._key()
        found = _within(_PATIENCE, lambda: store.get(key) if store.check([key]) else None)
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
            raise self._failed(*stored) from error

    # The device.

    def all_gather(self, items, stream):
        """Every rank's bytes of each item, on ``stream``: what this rank sends, and where those of each rank belong."""
        with self._named("all_gather"), self._on(stream):
            for batch in _batches(items):
                (_, length), dests = batch[0]
                if length and len(batch) == 1 and all(dest == (dests[0][0] + rank * length, length) for rank, dest in enumerate(dests)):
                    whole = self._bytes(dests[0][0], self.world * length)
                    dist.all_gather_into_tensor(whole, self._bytes(*batch[0][0]), group=self.group)
                else:
                    self._gather_staged(batch)

    def _gather_staged(self, items):
        """Pieces that follow each other in memory of their own, as many bytes from every rank."""
        longest = max(sum(dests[rank][1] for _, dests in items) for rank in range(self.world))
        if longest == 0:
            return
        make = lambda bytes: torch.empty(bytes, dtype=torch.uint8, device=self.device)
        sent, arrived = make(longest), make(self.world * longest)
        for part, span in _cut(sent, [source for source, _ in items]):
            part.copy_(self._bytes(*span))
        dist.all_gather_into_tensor(arrived, sent, group=self.group)
        for rank in range(self.world):
            for part, span in _cut(arrived[rank * longest :], [dests[rank] for _, dests in items]):
                self._bytes(*span).copy_(part)

    def maximum(self, span, stream):
        """The maximum of every float32 over the ranks, on ``stream``."""
        values = self._bytes(*span).view(torch.float32)
        with self._named("maximum"), self._on(stream):
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)

    def _on(self, stream):
        """That stream as the current one: lowp's work before and behind the collective is there."""
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
    except Known:
        raise
    except Exception as error:
        if ranks is not None:
            ranks.fail(f"{type(error).__name__}: {error}")
        raise


def _host_group(group):
    """The group for rounds on the host: the same, or one of gloo beside a group that has collectives of GPUs alone, whose rounds
    would wait behind the work of the device."""
    group = dist.group.WORLD if group is None else group
    if _has_cpu(group) or not dist.is_gloo_available():
        return group
    if group not in _HOST:
        _HOST[group] = dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)
    return _HOST[group]


def _has_cpu(group):
    return torch.device("cpu") in getattr(group, "_device_types", [torch.device("cpu")])


def _frame(failed, tag, content):
    """What a rank sends first in a round."""
    name, inline = tag.encode()[:_NAME], content
    if len(content) > _ROOM:
        inline = content[:_ROOM] if failed else b""
    return (_HEAD.pack(failed, len(name), len(content)) + name + inline).ljust(_FRAME, b"\0")


def _parts(frame):
    """Whether the rank failed, its call, its content as far as it is there, and the length of that."""
    failed, name, length = _HEAD.unpack_from(frame)
    rest = frame[_HEAD.size :]
    return failed, rest[:name].decode(errors="ignore"), rest[name : name + min(length, _ROOM)], length


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


def _batches(items):
    """Items that one collective moves: the same on every rank."""
    batch, bytes = [], 0
    for item in items:
        more = sum(length for _, length in item[1])
        if batch and bytes + more > _STAGED:
            yield batch
            batch, bytes = [], 0
        batch.append(item)
        bytes += more
    if batch:
        yield batch


def _cut(memory, spans):
    """Parts of ``memory`` that follow each other, as long as ``spans``; those without bytes are left out."""
    start = 0
    for pointer, length in spans:
        if length:
            yield memory[start : start + length], (pointer, length)
        start += length


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
