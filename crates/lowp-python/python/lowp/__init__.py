"""Weights in 8 and 4 bits for PyTorch: quantized tensors, FSDP2 gathers of codes, optimizers fused with the cast.

>>> import torch, lowp
>>> weight = lowp.quantize(torch.randn(64, 64), "mxfp8-2d")
>>> weight.dequantize().shape
torch.Size([64, 64])
"""

from ._errors import LowpError, UnsupportedOp
from ._lowp import HAS_CUDA, Recipe, recipes
from ._lowp import VERSION as __version__
from ._optimizers import SGD, AdamW, Lion, Muon
from ._model import quantize_model_
from ._files import load, save
from ._flat import cast_master_weights
from ._plain import dequantize_model_, dequantize_state_dict, plain_state_dict
from ._tensor import Tensor, quantize
from ._plan import Plan, plan
from . import _full, _replicas  # what DTensor gathers by, and what DistributedDataParallel broadcasts by

__all__ = [
    "SGD",
    "AdamW",
    "HAS_CUDA",
    "Lion",
    "Muon",
    "LowpError",
    "Plan",
    "Recipe",
    "Tensor",
    "UnsupportedOp",
    "__version__",
    "cast_master_weights",
    "dequantize_model_",
    "dequantize_state_dict",
    "load",
    "plain_state_dict",
    "plan",
    "quantize",
    "quantize_model_",
    "recipes",
    "save",
]
