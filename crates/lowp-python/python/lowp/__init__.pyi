from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal

import torch
from torch.distributed import ProcessGroup

from ._errors import LowpError as LowpError
from ._errors import UnsupportedOp as UnsupportedOp

HAS_CUDA: bool
__version__: str

Orientation = Literal["rowwise", "columnwise"]
Role = Literal["weight", "activation", "gradient"]
Usage = Literal["both", "rowwise", "columnwise"]

class _Buffer:
    """A buffer of a tensor: rows that share an entry (0: all), bytes of a physical row, bits of an entry."""

    name: str
    bytes: int
    rows_first: bool
    entry_rows: int
    row_bytes: int
    entry_bits: int
    is_transpose: bool

class Recipe:
    """A recipe with its options. Equal recipes with equal options are equal."""

    def __init__(self, name: str, **options: str | int | float | bool) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def options(self) -> dict[str, str]: ...
    @property
    def row_quantum(self) -> int: ...
    @property
    def is_low_precision(self) -> bool: ...
    @property
    def keeps_amax(self) -> bool: ...
    def has_weights_of(self, other: Recipe) -> bool: ...
    def check(self, rows: int, cols: int) -> None: ...
    def check_cut_blocks(self) -> None: ...
    def buffers(
        self, rows: int, cols: int, usage: Usage = "both", stored: bool = False, cut_of: int | None = None
    ) -> list[_Buffer]: ...
    def check_encode_scale(self, encode_scale: float) -> None: ...
    def product(self, orientation: Orientation, role: Role = "weight") -> tuple[str, str | None]: ...
    def __hash__(self) -> int: ...

def recipes() -> list[str]: ...

class Plan(dict[str, Any]): ...

def plan(
    recipe: str | Recipe,
    rows: int,
    cols: int,
    world_size: int,
    *,
    reshard_after_forward: bool = True,
    recompute: bool = False,
    **options: str | int | float | bool,
) -> Plan: ...

class Tensor(torch.Tensor):
    @property
    def recipe(self) -> Recipe: ...
    @property
    def buffers(self) -> dict[str, torch.Tensor]: ...
    @property
    def stored_bytes(self) -> int: ...
    @property
    def master(self) -> torch.Tensor | None: ...
    def dequantize(self, *, orientation: Orientation = "rowwise", dtype: torch.dtype | None = None) -> torch.Tensor: ...
    def quantize_(self, source: torch.Tensor, *, encode_scale: float | None = None) -> Tensor: ...

def quantize(
    source: torch.Tensor,
    recipe: str | Recipe,
    *,
    usage: Usage = "both",
    keep_master: bool = False,
    master_dtype: torch.dtype = ...,
    encode_scale: float | None = None,
    **options: str | int | float | bool,
) -> Tensor: ...
def quantize_model_(
    model: torch.nn.Module,
    recipe: str | Recipe,
    *,
    ignore: str | Iterable[str] = (),
    keep_master: bool | None = None,
    master_dtype: torch.dtype = ...,
    **options: str | int | float | bool,
) -> list[str]: ...
def load(path: str | PathLike[str], *, device: str | torch.device = "cpu") -> dict[str, torch.Tensor]: ...
def save(
    path: str | PathLike[str],
    tensors: Mapping[str, torch.Tensor],
    recipe: str | Recipe | None = None,
    *,
    ignore: str | Iterable[str] = (),
    **options: str | int | float | bool,
) -> None: ...
def dequantize_state_dict(
    model: torch.nn.Module | Mapping[str, Any], dtype: torch.dtype | None = None, *, masters: bool = False
) -> dict[str, Any]: ...
def dequantize_model_(model: torch.nn.Module, dtype: torch.dtype | None = None, *, masters: bool = False) -> list[str]: ...
def plain_state_dict(model: torch.nn.Module | Mapping[str, Any]) -> dict[str, Any]: ...
def cast_master_weights(
    model_weights: Sequence[Tensor],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    group: ProcessGroup | None = None,
) -> None: ...

class _Optimizer(torch.optim.Optimizer):
    def step(self, closure: Callable[[], Any] | None = None, *, grad_scale: float = 1.0) -> Any: ...
    def last_step(self) -> dict[str, Any]: ...

class AdamW(_Optimizer):
    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        max_norm: float | None = None,
        skip_nonfinite: bool = False,
        moments_dtype: torch.dtype = ...,
        remainders: bool = ...,
        seed: int = 0,
        capturable: bool = False,
    ) -> None: ...

class Lion(_Optimizer):
    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        max_norm: float | None = None,
        skip_nonfinite: bool = False,
        moments_dtype: torch.dtype = ...,
        remainders: bool = ...,
        seed: int = 0,
        capturable: bool = False,
    ) -> None: ...

class Muon(_Optimizer):
    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        *,
        adjust_lr_fn: str | None = None,
        max_norm: float | None = None,
        skip_nonfinite: bool = False,
        seed: int = 0,
        remainders: bool = ...,
        capturable: bool = False,
    ) -> None: ...

class SGD(_Optimizer):
    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        max_norm: float | None = None,
        skip_nonfinite: bool = False,
        moments_dtype: torch.dtype = ...,
        remainders: bool = ...,
        seed: int = 0,
        capturable: bool = False,
    ) -> None: ...
