"""A process group of ``torch.distributed``, as Rust uses it."""

import contextlib
import weakref

import torch
import torch.distributed as dist

from ._errors import LowpError

#: The first byte of what a rank says in a round, as in ranks.rs.
_WELL, _FAILED = b"\0", b"\1"
_HOST = weakref.WeakKeyDictionary()


class Ranks:
    """The ranks of a group: rounds of small values on the host, and two collectives on the device."""

    def __init__(self, group, device):
        self.group, self.device = group, device
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.on_device = device.type == "cuda"
        self.host = _host_group(group)

    @classmethod
    def of(cls, group, device):
        """``None`` where there is one rank alone. Collective for a group without collectives of the host."""
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) == 1:
            return None
        return cls(group, device)

    def exchange(self, tag, own):
        """The bytes of all ranks. ``tag`` says what they are."""
        all = [None] * self.world
        dist.all_gather_object(all, (tag, own), group=self.host)
        for rank, (other, _) in enumerate(all):
            # A rank that failed says so in whatever round the others are in.
            if "failure" not in (tag, other) and other != tag:
                raise RuntimeError(f"rank {rank} is at '{other}' where rank {self.rank} is at '{tag}'")
        return [bytes for _, bytes in all]

    def agree(self, what, text):
        """Raises on every rank unless all give the same text."""
        for rank, other in enumerate(self.collect(what, text)):
            if other != text:
                raise LowpError(f"ranks disagree on {what}: rank {self.rank} has {text}; rank {rank} has {other}")

    def collect(self, what, text):
        """The texts of all ranks. Raises on every rank where one failed."""
        texts = self.exchange(f"agree on {what}", _WELL + text.encode())
        for rank, bytes in enumerate(texts):
            if bytes[:1] == _FAILED:
                raise LowpError(f"rank {rank} failed: {bytes[1:].decode()}")
        return [bytes[1:].decode() for bytes in texts]

    def fail(self, message):
        """Tells the others, in the round in which they wait, that this rank failed."""
        # If it fails, too, the time limit of the process group ends them.
        with contextlib.suppress(Exception):
            self.exchange("failure", _FAILED + message.encode())

    def all_gather(self, spans, stream):
        """Every rank's bytes, on ``stream``."""
        own, all = (self._bytes(*span) for span in spans)
        with self._on(stream):
            dist.all_gather_into_tensor(all, own, group=self.group)

    def maximum(self, spans, stream):
        """The maximum of every float32 over the ranks, on ``stream``."""
        values = self._bytes(*spans[0]).view(torch.float32)
        with self._on(stream):
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
    except Exception as error:
        if ranks is not None:
            ranks.fail(f"{type(error).__name__}: {error}")
        raise


def _host_group(group):
    """The group for rounds on the host: the same, or one of gloo beside a group that has collectives of GPUs alone, whose rounds
    would wait behind the work of the device."""
    group = dist.group.WORLD if group is None else group
    if torch.device("cpu") in getattr(group, "_device_types", [torch.device("cpu")]) or not dist.is_gloo_available():
        return group
    if group not in _HOST:
        _HOST[group] = dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)
    return _HOST[group]


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
