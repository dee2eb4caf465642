"""Files of quantized tensors, which Rust reads and writes."""

import fnmatch
import os
from types import SimpleNamespace

import torch

from . import _lowp
from ._args import like
from ._cut import title
from ._errors import LowpError
from ._memory import memory
from ._plan import as_recipe
from ._store import Store
from ._tensor import Tensor
from ._torch_compat import local_of

#: The dtypes of files, by their names there.
_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
_DTYPES = {name: getattr(torch, of) for name, of in _NAMES.items() if hasattr(torch, of)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def load(path, *, device="cpu"):
    """Returns the tensors of a file by name. Tensors that ``lowp quantize`` or ``lowp.save`` quantized are ``lowp.Tensor``, byte for byte; others are
    plain tensors.

    ``path`` is a safetensors file, the index of several, or a folder with one of them. Leading dimensions of quantized tensors are flattened to
    rows. Raises ``lowp.LowpError`` for a file that is missing, cut off or malformed, and for the rows of one rank (``lowp unshard``).
    """
    file, tensors = _lowp.File(os.fspath(path)), {}
    for name, dtype, shape, kept in file.tensors():
        if dtype not in _DTYPES:
            raise LowpError(f"'{name}' has the dtype {dtype}, which this version of PyTorch does not have; convert it first")
        if kept is None:
            tensor = torch.empty(shape, dtype=_DTYPES[dtype])
            file.read(name, memory(tensor))
            tensors[name] = tensor.to(device)
            continue
        recipe, usage = kept
        store = Store.empty(recipe, *shape, torch.device("cpu"), usage)
        store.amax = file.read_codes(name, store.named())
        tensors[name] = Tensor(store, _DTYPES[dtype]).to(device)
    return tensors


def save(path, tensors, recipe=None, *, ignore=(), **options):
    """Writes tensors by name to the safetensors file ``path``, which appears when it is complete.

    Each ``lowp.Tensor`` is written as its codes, without its master. With ``recipe``, other tensors of two or more axes are quantized as
    ``lowp quantize`` does, with E4M3 codes for FP8 unless ``format`` says otherwise. Integers, names that a pattern of ``ignore`` matches, and all
    other tensors keep their bytes. ``lowp inspect``, ``verify``, ``dequantize`` and ``export`` take the file.

    Raises ``lowp.LowpError`` if a tensor does not fit the recipe, and for shards.
    """
    if isinstance(recipe, str):
        known = as_recipe(recipe, options).options
        options = {**{name: value for name, value in _lowp.FILE_DEFAULTS if name in known}, **options}
    elif options and recipe is None:
        raise LowpError(f"options {sorted(options)} were given without a recipe; give the name of their recipe")
    recipe = None if recipe is None else as_recipe(recipe, options)
    ignore = [ignore] if isinstance(ignore, str) else list(ignore)
    unused = [pattern for pattern in ignore if not any(fnmatch.fnmatchcase(name, pattern) for name in tensors)]
    if unused:
        raise LowpError(f"ignore={unused!r} matches no tensor; give names of the dictionary, or patterns")
    saved = []
    for name, value in sorted(tensors.items()):
        if not isinstance(value, torch.Tensor):
            raise LowpError(f"'{name}' is a {type(value).__name__}, and a file holds only tensors; leave it out")
        if local_of(value) is not value:
            raise LowpError(f"'{name}' is a shard; gather it on every rank (.full_tensor(), or the full state dictionary), and save on one")
        ignored = any(fnmatch.fnmatchcase(name, pattern) for pattern in ignore)
        saved.append(_saved_codes(name, value) if isinstance(value, Tensor) else _saved(name, value.detach(), None if ignored else recipe))
    _lowp.save(os.fspath(path), saved)


def _saved(name, value, recipe):
    """A plain tensor as Rust takes it."""
    if value.dtype not in _NAMES or value.layout != torch.strided:
        raise LowpError(f"'{name}' is {value.dtype}, {value.layout}, which safetensors files cannot store; convert it first")
    values = value.resolve_conj().resolve_neg().cpu().contiguous()
    if value.dim() < 2 or not (value.dtype.is_floating_point or value.dtype.is_complex):
        recipe = None
    return _arg(name, values.dtype, values.shape, values, recipe=recipe)


def _saved_codes(name, tensor):
    """A quantized tensor as Rust takes it."""
    store = tensor._store
    store.derive()
    store.check_whole()
    if store.cut is not None:
        raise LowpError(f"'{name}' has {title(store)}; save the whole tensor")
    named = lambda usage: {spec.name for spec in store.recipe.buffers(*store.shape, usage)}
    usages = [usage for usage in (store.usage, "both", "rowwise", "columnwise") if usage and named(usage) == store.buffers.keys()]
    if not usages:
        raise LowpError(f"'{name}' has only the buffers {', '.join(store.buffers)}, which are not complete for either direction; save the whole tensor")
    amax = store.known_amax() if store.recipe.keeps_amax else None
    buffers = {name: buffer.cpu().contiguous() for name, buffer in store.buffers.items()}
    values = torch.empty(0, dtype=torch.uint8)
    return _arg(name, tensor.dtype, store.shape, values, store.recipe, usages[0], buffers, None if amax is None else float(amax))


def _arg(name, dtype, shape, values, recipe=None, usage="both", buffers=None, amax=None):
    held = {buffer: memory(of) for buffer, of in (buffers or {}).items()}
    return SimpleNamespace(
        name=name,
        dtype=_NAMES[dtype],
        shape=list(shape),
        memory=memory(values),
        recipe=recipe,
        usage=usage,
        buffers=list(held.items()),
        amax=amax,
        alive=(values, buffers),
    )
