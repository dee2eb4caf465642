"""What each operation of PyTorch does to a quantized tensor: exactly that, or ``lowp.UnsupportedOp``."""

import torch

from . import _uncast
from ._errors import LowpError, UnsupportedOp
from ._memory import values
from ._torch_compat import asks_for_size, copies_for_gather, in_backward, is_parameter, schema_of, tree_leaves, tree_map_only

aten = torch.ops.aten
Tensor = None  # set by _tensor.py, which uses this file
is_frozen = reads_frozen = None  # set by _tensor.py, too
HANDLERS = {}


def handles(*ops):
    """Registers what does ``ops``: overloads, all overloads of one operation, or names of those that are not there yet."""

    def register(handler):
        for op in ops:
            HANDLERS[op] = handler
        return handler

    return register


def dispatch(cls, func, args, kwargs):
    handler = HANDLERS.get(func)
    if handler is None:
        handler = HANDLERS.get(func.overloadpacket) or HANDLERS.get(func.name())
    if handler is not None and func.is_view and torch.is_inference_mode_enabled() and not args[0].is_inference():
        # What PyTorch takes for a view of a tensor from outside is no inference tensor either.
        with torch.inference_mode(False):
            return handler(func, *args, **kwargs)
    if handler is not None:
        return handler(func, *args, **kwargs)
    if torch.is_inference_mode_enabled():
        # Outside inference mode PyTorch decomposes these operations before it calls this.
        found = func.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found
    return read_or_refuse(func, args, kwargs)


def read_or_refuse(func, args, kwargs):
    """What only reads gets the decoded values; everything else raises."""
    name, writes = schema_of(func).name, _written(func, args, kwargs)
    if any(isinstance(tensor, Tensor) for tensor in writes):
        raise UnsupportedOp(f"{func} cannot change the codes of a lowp.Tensor in place; {_WRITE}; {_FROZEN}")
    is_read = _REDUCTION in func.tags or name in _READS or (name == "aten::lerp" and not isinstance(args[0], Tensor))
    if writes or is_read or in_backward() or reads_frozen(func, args, kwargs):
        read = _magnitudes if name == "aten::abs" else _compared if name in _COMPARISONS else _values
        args, kwargs = tree_map_only(Tensor, read, (args, kwargs))
        return func(*args, **kwargs)
    raise refused(func)


def refused(func):
    """The error of an operation that codes have not."""
    name = schema_of(func).name
    return UnsupportedOp(f"{func} of a lowp.Tensor, which holds codes; {_REMEDIES.get(name) or _REMEDIES.get(func.namespace, f'{_DECODE}; {_FROZEN}')}")


def _values(tensor):
    return tensor._store.decode("rowwise", tensor.dtype).view(tensor.shape)


def _compared(tensor):
    """Values for comparisons: nn.init.trunc_normal_ looks at those that it wrote, which may wait for their cast."""
    uncast = tensor._store.uncast
    return _values(tensor) if uncast is None else uncast.view(tensor.shape)


def _magnitudes(tensor):
    """Values for ``abs``, which isfinite and isinf of shards are made of. Raises where the dtype takes a finite one for infinite."""
    found = _values(tensor)
    if tensor.dtype == torch.float16 and bool(found.isinf().any()):
        whole = tensor._store.decode("rowwise").view(tensor.shape)
        lost = int((whole.isfinite() & found.isinf()).sum())
        if lost:
            raise UnsupportedOp(
                f"abs of a lowp.Tensor of float16 with {lost} finite values above 65504, which are inf in float16; read "
                ".dequantize(dtype=torch.float32) instead; for a DTensor, call it on .to_local()"
            )
    return found


def _written(func, args, kwargs):
    """The tensors that an operation of PyTorch writes to. A collective says that of all that it takes."""
    if func.namespace != "aten":
        return []
    arguments = schema_of(func).arguments
    given = {**dict(zip((argument.name for argument in arguments), args)), **kwargs}
    written = [given.get(argument.name) for argument in arguments if argument.alias_info is not None and argument.alias_info.is_write]
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, torch.Tensor)]


# The decoded values answer what only reads: norms, sums and the like, comparisons, and what is written to a plain tensor, such as an average of weights.
# Arithmetic that returns a tensor is refused: its result, copied back, would lose what is smaller than a step of the codes. Gradients of reads
# are arithmetic of them in backward.
_REDUCTION = getattr(torch.Tag, "reduction", None)  # newer versions of PyTorch say it of each operation
_COMPARISONS = {f"aten::{name}" for name in "eq ne lt le gt ge".split()}
_READS = _COMPARISONS | {f"aten::{name}" for name in "abs pow linalg_vector_norm _foreach_norm _foreach_max".split()}

#: What asks whether values are finite.
FINITE = frozenset(getattr(of, name) for name in "isfinite isinf isnan isposinf isneginf".split() for of in (torch, torch.Tensor))


def finite(func, input, **kwargs):
    """Of the values themselves: PyTorch asks for magnitudes, which the dtype may not hold."""
    if isinstance(kwargs.get("out"), Tensor):
        raise UnsupportedOp(f"{func.__name__} cannot write into a lowp.Tensor; give a plain tensor of booleans as out=")
    return func(input.dequantize(dtype=torch.float32), **kwargs)


_DECODE = "decode it first (.dequantize()), or leave the parameter out of quantize_model_ (ignore=[..])"
_WRITE = (
    "update weights with lowp.AdamW instead of an optimizer of torch.optim, write other values with .quantize_(values), and keep averages of weights in "
    "plain tensors (AveragedModel of the model before quantize_model_); make initial values of several operations (nn.init.trunc_normal_, "
    "orthogonal_) in a plain tensor, and copy them with .copy_(values): values that such a call wrote before this error are not undone"
)
_FROZEN = (
    "freeze a weight that is not trained (requires_grad_(False)): arithmetic then reads its values, and adapters of peft are merged into it, before fully_shard"
)
_STATES = "load a full state dictionary by set_model_state_dict, with full_state_dict=True"
_SHARDS = (
    "shard rows with fully_shard, which gathers codes; codes do not support tensor parallelism (parallelize_module, distribute_tensor): leave such layers out of "
    "quantize_model_ (ignore=[..])"
)
#: By the name of an operation or of its namespace.
_REMEDIES = {
    "aten::where": f"{_DECODE}; make initial values of several operations (nn.init.trunc_normal_) in a plain tensor, and copy them with .copy_(values): values that "
    "such a call wrote before this error are not undone",
    **dict.fromkeys((f"aten::{name}" for name in "add sub mul div lerp _foreach_add _foreach_sub _foreach_mul _foreach_div".split()), f"{_DECODE}; {_FROZEN}; {_WRITE}"),
    "c10d": f"{_SHARDS}; {_STATES}",
    "_c10d_functional": f"{_SHARDS}; {_STATES}",
}


#: What reads the memory that other tensors have, by what to do in its place.
_BYTES = "decode it first (.dequantize()), or take the bytes of its .buffers"
_MEMORY = {
    **{getattr(torch.Tensor, name): _BYTES for name in ("const_data_ptr", "mutable_data_ptr") if hasattr(torch.Tensor, name)},
    torch.Tensor.numpy: _BYTES,
    torch.Tensor.tolist: _BYTES,
    torch.Tensor.storage: _BYTES,
    torch.Tensor.__array__: _BYTES,
    torch.Tensor.__dlpack__: _BYTES,
    torch.Tensor.__dlpack_device__: _BYTES,
    torch.Tensor.__cuda_array_interface__.__get__: _BYTES,
    torch.Tensor.share_memory_: "send the tensor through a queue of torch.multiprocessing, which shares its buffers, or share its .buffers",
}


def check_memory(func):
    """Raises where a function needs memory that a quantized tensor has not: PyTorch would give a null pointer."""
    remedy = _MEMORY.get(func)
    if remedy is not None and not (func is torch.Tensor.storage and asks_for_size()):
        name = {"__get__": "__cuda_array_interface__"}.get(func.__name__, func.__name__)
        raise UnsupportedOp(f"{name} of a lowp.Tensor, which has no memory except its buffers of codes and scales; {remedy}")


def alias(tensor, flat=None):
    flat = tensor.dim() == 1 if flat is None else flat
    return like(tensor, tensor._store, flat=flat)


def like(tensor, store, dtype=None, flat=None):
    """A tensor of a store that is ``tensor``, or a copy of it."""
    made = Tensor(store, tensor.dtype if dtype is None else dtype, tensor.dim() == 1 if flat is None else flat)
    if is_frozen(tensor):
        made._frozen = "copy" if store is not tensor._store else "weight" if is_parameter(tensor) else tensor._frozen
    return made


@handles(aten.detach, aten.alias, aten.lift_fresh)
def _alias(func, tensor):
    return alias(tensor)


@handles(aten.clone, aten.contiguous)
def _clone(func, tensor, memory_format=None):
    return like(tensor, tensor._store.map(torch.clone))


def _check_not_meta(tensor, device):
    if device is not None and torch.device(device).type == "meta" and tensor.device.type != "meta":
        raise UnsupportedOp(
            "a lowp.Tensor cannot be moved to the meta device, since it would lose its codes; keep it on its device; for FSDP2 through accelerate set "
            "cpu_ram_efficient_loading=False, and load the model on every rank"
        )


@handles(aten._to_copy)
def _to_copy(func, tensor, dtype=None, layout=None, device=None, pin_memory=None, non_blocking=False, memory_format=None):
    store = tensor._store
    _check_not_meta(tensor, device)

    def move(buffer):
        moved = buffer.to(device=device, non_blocking=non_blocking, copy=True)
        return moved.pin_memory() if pin_memory else moved

    dtype = tensor.dtype if dtype is None else dtype
    if not dtype.is_floating_point:
        raise UnsupportedOp(f"a lowp.Tensor cannot have the dtype {dtype}, only a floating-point dtype; decode it first (.dequantize())")
    return like(tensor, store.map(move, with_master=not copies_for_gather()), dtype)


@handles(aten.copy_)
def _copy(func, target, source, non_blocking=False):
    if not isinstance(target, Tensor):
        return target.copy_(source.dequantize(dtype=target.dtype).view(source.shape), non_blocking)
    if not isinstance(source, torch.Tensor):
        source = torch.full(target._store.shape, source, dtype=torch.float32, device=target.device)
    if target.shape != source.shape:
        raise LowpError(f"a source of shape {tuple(source.shape)} cannot be copied into a lowp.Tensor of {tuple(target.shape)}; give a source of the same shape")
    if isinstance(source, Tensor):
        if source._store is not target._store:
            target._store.copy_(source._store.map(lambda b: b.to(target.device)) if source.device != target.device else source._store)
        return target
    if in_backward():
        raise UnsupportedOp(
            "values were copied into a lowp.Tensor in a hook of backward; this would round an update of the decoded weight, and lose changes smaller than a step of "
            "the codes: update weights with lowp.AdamW after backward, or write other values with .quantize_(values)"
        )
    store_values(target, source.reshape(target._store.shape))
    return target


@handles(aten.set_)
def _set(func, tensor, *_):
    raise UnsupportedOp(f"{func} of a lowp.Tensor, whose memory is only its buffers and cannot be shared; copy its values (.copy_())")


def store_values(tensor, source):
    """Casts plain values into a tensor, and its master."""
    store = tensor._store
    read = values(source.to(store.device))
    # A state that was loaded before the values of its model knows the scale that its codes had.
    scale = store.saved_scale
    is_saved = scale is not None and torch.equal(read.float(), store.master.float())
    _uncast.write(store, read, scale if is_saved else None)
    if is_saved:
        store.saved_scale = scale


@handles(aten.new_zeros)
def _new_zeros(func, tensor, size, dtype=None, device=None, **_):
    size, dtype = tuple(size), tensor.dtype if dtype is None else dtype
    device = tensor.device if device is None else device
    if len(size) != 2 or size[1] != tensor._store.cols:
        return torch.zeros(size, dtype=dtype, device=device)
    # FSDP2 copies the rows of its shard into it.
    return Tensor(tensor._store.blank_like(size[0], device=device), dtype)


@handles(aten.new_empty, aten.new_full, aten.new_ones)
def _new_plain(func, tensor, size, *fill, dtype=None, device=None, **_):
    # Gradients, moments and the like: plain values.
    make = {aten.new_empty: torch.empty, aten.new_full: torch.full, aten.new_ones: torch.ones}[func.overloadpacket]
    dtype, device = tensor.dtype if dtype is None else dtype, tensor.device if device is None else device
    return make(tuple(size), *fill, dtype=dtype, device=device)


@handles(aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like)
def _plain_like(func, tensor, *fill, dtype=None, device=None, **_):
    plain = torch.empty(
        tensor.shape, dtype=tensor.dtype if dtype is None else dtype, device=tensor.device if device is None else device
    )
    return func(plain, *fill)


@handles(aten.empty_like)
def _empty_like(func, tensor, dtype=None, device=None, **_):
    _check_not_meta(tensor, device)
    store = tensor._store.map(lambda buffer: torch.empty_like(buffer, device=device))
    store.uncast = store.origin = None
    store.blank, store._prefixes = False, {}
    return Tensor(store, tensor.dtype if dtype is None else dtype, tensor.dim() == 1)


@handles(aten.split)
def _split(func, tensor, size, dim=0):
    sizes = [size] * -(-tensor.shape[dim] // size) if isinstance(size, int) else list(size)
    return _parts(func, tensor, sizes, dim)


@handles(aten.split_with_sizes)
def _split_with_sizes(func, tensor, sizes, dim=0):
    return _parts(func, tensor, list(sizes), dim)


def _parts(func, tensor, sizes, dim):
    if dim % tensor.dim() != 0 or tensor.dim() != 2:
        raise UnsupportedOp(
            f"{func} of a lowp.Tensor along axis {dim}; only its rows (axis 0) can be cut: decode it first (.dequantize()), or {_SHARDS}"
        )
    store = tensor._store
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    quantum = store.recipe.row_quantum
    off = [start for start in starts if start % quantum and start < store.rows]
    if off and store.cut is None:
        try:
            store.recipe.check_cut_blocks()
        except LowpError as error:
            raise LowpError(
                f"{store.rows} rows in parts of {sizes[0]}: {store.recipe.name} is cut at multiples of {quantum} rows, and {off[0]} is not one ({error}); "
                f"choose a matrix of a multiple of {quantum * len(sizes)} rows, another number of ranks, or leave it out of quantize_model_ (ignore=[..])"
            ) from None
    # Parts have one layout: that of rows within blocks if any part has such rows.
    cuts_blocks = off and store.cut is None and not store.blank
    part = store.slice_within_blocks if cuts_blocks else store.slice
    return [Tensor(part(*(min(at, store.rows) for at in (start, start + size))), tensor.dtype) for start, size in zip(starts, sizes)]


@handles(aten.slice)
def _slice(func, tensor, dim=0, start=None, end=None, step=1):
    length = tensor.shape[dim]
    start = 0 if start is None else start
    end = length if end is None else end
    start, end = (max(x + length, 0) if x < 0 else min(x, length) for x in (start, end))
    if step == 1 and (start, end) == (0, length):
        return alias(tensor)
    if step != 1 or dim % tensor.dim() != 0 or tensor.dim() != 2:
        raise UnsupportedOp(
            f"slice {start}:{end}:{step} along axis {dim} of a lowp.Tensor; only its rows (axis 0) can be cut, in steps of 1: decode it first "
            "(.dequantize())"
        )
    return Tensor(tensor._store.slice(start, max(start, end)), tensor.dtype)


@handles(aten.view, aten._unsafe_view, aten.reshape)
def _view(func, tensor, size):
    if isinstance(size, torch.dtype):
        raise UnsupportedOp(f"a view of a lowp.Tensor as {size}, which would read the memory of its values; {_BYTES}")
    size, store = list(size), tensor._store
    if -1 in size:
        known = 1
        for n in size:
            known *= n if n != -1 else 1
        size[size.index(-1)] = tensor.numel() // max(known, 1)
    if tuple(size) == store.shape:
        return alias(tensor, flat=False)
    if size == [store.rows * store.cols]:
        return alias(tensor, flat=True)
    raise UnsupportedOp(
        f"a view of a lowp.Tensor of {tuple(tensor.shape)} as {tuple(size)}; it can be {store.shape} or flat: decode it first "
        "(.dequantize())"
    )


@handles(aten.as_strided)
def _as_strided(func, tensor, size, stride, storage_offset=None):
    store = tensor._store
    if tuple(size) == store.shape and tuple(stride) == (store.cols, 1) and not storage_offset:
        return alias(tensor, flat=False)
    raise UnsupportedOp(
        f"as_strided of a lowp.Tensor of {tuple(tensor.shape)} as {tuple(size)} with strides {tuple(stride)}; decode it first "
        "(.dequantize())"
    )


@handles(aten.equal)
def _equal(func, a, b):
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        raise UnsupportedOp("a lowp.Tensor cannot be compared with plain values; decode it first (.dequantize())")
    a, b = a._store, b._store
    a.check_cast()
    b.check_cast()
    a.derive()
    b.derive()
    names = a.buffers.keys()
    if names != b.buffers.keys():
        if not (a.leaves_out_columnwise and b.serves("rowwise") or b.leaves_out_columnwise and a.serves("rowwise")):
            return False
        names &= b.buffers.keys()  # the others follow from these
    return (a.recipe, a.shape, a.cut) == (b.recipe, b.shape, b.cut) and all(torch.equal(a.buffers[name], b.buffers[name]) for name in names)


@handles(aten.is_set_to)
def _is_set_to(func, a, b):
    return all(isinstance(tensor, Tensor) for tensor in (a, b)) and a._store is b._store and a.dim() == b.dim()


@handles(aten.is_pinned)
def _is_pinned(func, tensor, device=None):
    return all(buffer.is_pinned() for buffer in tensor._store.buffers.values())


@handles(aten._pin_memory)
def _pin_memory(func, tensor, device=None):
    return Tensor(tensor._store.map(lambda buffer: buffer.pin_memory()), tensor.dtype, tensor.dim() == 1)


@handles(aten.record_stream)
def _record_stream(func, tensor, stream):
    for buffer in tensor._store.buffers.values():
        buffer.record_stream(stream)


@handles(aten.normal_, aten.uniform_, aten.zero_, aten.fill_)
def _initial(func, tensor, *args, **kwargs):
    """Initial values: made in float32, then cast."""
    store = tensor._store
    plain = torch.empty(store.shape, dtype=torch.float32, device=store.device)
    func(plain, *args, **kwargs)
    store_values(tensor, plain)
    return tensor
