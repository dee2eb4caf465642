"""A process group of ``torch.distributed``, as Rust uses it."""

import torch
import torch.distributed as dist


class Ranks:
    """The ranks of a group: rounds of small values on the host, and two collectives on the device."""

    def __init__(self, group, device):
        self.group, self.device = group, device
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.on_device = device.type == "cuda"

    @classmethod
    def of(cls, group, device):
        """``None`` where there is one rank alone."""
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) == 1:
            return None
        return cls(group, device)

    def exchange(self, tag, own):
        """The bytes of all ranks. ``tag`` says what they are."""
        all = [None] * self.world
        dist.all_gather_object(all, (tag, own), group=self.group)
        for rank, (other, _) in enumerate(all):
            # A rank that failed says so in whatever round the others are in.
            if "failure" not in (tag, other) and other != tag:
                raise RuntimeError(f"rank {rank} is at '{other}' where rank {self.rank} is at '{tag}'")
        return [bytes for _, bytes in all]

    def all_gather(self, spans):
        """Every rank's bytes, on the current stream."""
        own, all = (self._bytes(*span) for span in spans)
        dist.all_gather_into_tensor(all, own, group=self.group)

    def maximum(self, spans):
        """The maximum of every float32 over the ranks, on the current stream."""
        values = self._bytes(*spans[0]).view(torch.float32)
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)

    def _bytes(self, pointer, bytes):
        return torch.as_tensor(_Span(pointer, bytes), device=self.device)


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
