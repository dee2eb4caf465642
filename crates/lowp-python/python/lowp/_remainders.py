"""Masters of bfloat16 parameters as 16 bits beside them (docs/numerics.md 23.5): with the parameter, which is the upper half, they are a float32.

Whatever the remainder, such a master rounds to its parameter. So parameters may be written by anyone, and a master is within half a step of its parameter.
"""

import torch

from ._torch_compat import like, local_of

_I16, _I32 = torch.int16, torch.int32

#: What the optimizer of Rust calls their dtype.
NAME = "bf16+16"


def zeros(param):
    """The remainders of masters that are a parameter, sharded as it is. Each is two bytes along a last axis: collectives of PyTorch take no int16."""
    local = local_of(param)
    return like(param.detach(), torch.zeros((*local.shape, 2), dtype=torch.uint8, device=local.device), (*param.shape, 2))


def join(parameter, remainder):
    """The masters, in float32. A parameter that was written alone may have a remainder that makes no number with it."""
    lower = remainder.contiguous().view(_I16)[..., 0].to(_I32)
    sum = ((parameter.contiguous().view(_I16).to(_I32) << 16) + lower).view(torch.float32)
    return torch.where(sum.isnan(), parameter.float(), sum)


def split(master):
    """The parameters, ties away from zero, and the remainders of masters in float32."""
    bits = torch.where(master.isnan(), torch.nan, master.float()).contiguous().view(_I32)
    return (bits + 0x8000 >> 16).to(_I16).view(torch.bfloat16), bits.to(_I16)[..., None].view(torch.uint8)
