"""Tensors of PyTorch as the addresses that Rust takes."""

import torch

from ._errors import LowpError
from ._torch_compat import raw_stream


def device_of(device):
    """A device with its current stream, as Rust takes it."""
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return ("cuda", index, raw_stream(index))
    if device.type == "meta":
        raise LowpError(
            "a lowp.Tensor on the meta device has no codes; allocate them (model.to_empty(device=..)), then set the values (reset_parameters(), nn.init, "
            "or load_state_dict)"
        )
    return (device.type, 0, 0)


def memory(tensor, keep=False):
    """A contiguous tensor's memory; with ``keep`` Rust holds the tensor for as long as it uses the memory."""
    if not tensor.is_contiguous():
        raise LowpError(
            f"a tensor of shape {tuple(tensor.shape)} has strides {tuple(tensor.stride())}; lowp reads and writes contiguous "
            "memory: call .contiguous()"
        )
    return (tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor.get_device(), tensor if keep else None)


def empty(bytes, device):
    """A buffer of bytes."""
    return torch.empty(bytes, dtype=torch.uint8, device=device)


def dtype_name(dtype):
    """``float32`` or ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def values(tensor):
    """``tensor`` as contiguous values that Rust reads: float32 or bfloat16."""
    tensor = tensor.detach()
    if tensor.dtype not in (torch.float32, torch.bfloat16):
        tensor = tensor.float()
    return tensor.contiguous()
