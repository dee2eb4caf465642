"""``lowp.Tensor``: a quantized matrix as a tensor of PyTorch."""

import inspect
from multiprocessing.reduction import ForkingPickler

import torch

from . import _compile, _frozen, _fsdp, _linear, _ops, _states, _uncast
from ._errors import LowpError, UnsupportedOp
from ._identity import Identity
from ._memory import dtype_name, values
from ._plan import as_recipe
from ._store import MASTER_DTYPES, Store
from ._torch_compat import is_parameter, make_wrapper, without_torch_function


_SET_DATA = torch.Tensor.data.__set__


def _plain(name):
    """An attribute of PyTorch's tensors that comes to no ``__torch_function__``: FSDP2 reads and writes it several times in each step."""
    of_torch = getattr(torch.Tensor, name)

    def get(self):
        with without_torch_function():
            return of_torch.__get__(self)

    def put(self, value):
        with without_torch_function():
            of_torch.__set__(self, value)

    def delete(self):
        with without_torch_function():
            of_torch.__delete__(self)

    return property(get, put, delete, of_torch.__doc__)


class _PreAllGather:
    """The hook of FSDP2, with the signature that it asks for in each gather of each weight."""

    __slots__ = ("store",)

    def __init__(self, store):
        self.store = store

    def __call__(self, mesh, outer_size, outer_stride, module, mp_policy):
        return _fsdp.pre_all_gather(self.store, mesh, outer_size, module)

    __signature__ = inspect.Signature(list(inspect.signature(__call__).parameters.values())[1:])


class Tensor(torch.Tensor):
    """A matrix that is stored as codes and scales. ``lowp.quantize`` makes it.

    It has the shape of the values. Its dtype is that of gradients and decoded values; the memory holds no values of that dtype.
    ``torch.nn.functional.linear`` multiplies by it, FSDP2 shards and gathers its codes, and ``lowp.AdamW`` updates it. An operation
    that codes cannot do exactly raises ``lowp.UnsupportedOp``.
    """

    # What the tensor is, and what PyTorch would be asked for in each call.
    __slots__ = ("_store", "_dtype", "_flat", "_frozen", "_hook")

    @staticmethod
    def __new__(cls, store, dtype, flat=False, requires_grad=False):
        shape = (store.rows * store.cols,) if flat else (store.rows, store.cols)
        tensor = make_wrapper(cls, shape, dtype=dtype, device=store.device, requires_grad=requires_grad)
        tensor._store, tensor._dtype, tensor._flat, tensor._frozen, tensor._hook = store, dtype, flat, None, None
        return tensor

    def __init__(self, *args, **kwargs):
        pass

    grad, requires_grad = _plain("grad"), _plain("requires_grad")
    if hasattr(torch.Tensor, "grad_dtype"):  # torch 2.10 has it
        grad_dtype = _plain("grad_dtype")

    @property
    def recipe(self):
        """The recipe with its options."""
        return self._store.recipe

    @property
    def buffers(self):
        """The buffers by name, as bytes; views, not copies."""
        self._store.check_cast()
        self._store.derive()
        return dict(self._store.buffers)

    @property
    def stored_bytes(self):
        """Bytes of all buffers."""
        return self._store.bytes

    @property
    def master(self):
        """The values that the codes were made of, in float32 or bfloat16, or ``None``: ``lowp.AdamW`` updates them."""
        return self._store.known_master()

    def dequantize(self, *, orientation="rowwise", dtype=None):
        """The values of the codes, in the order of rows.

        ``orientation`` chooses the codes of ``"rowwise"`` or ``"columnwise"`` blocks, whose values differ if blocks are not
        square. ``dtype`` is by default the dtype of the tensor. The gradient of the values is the gradient of the tensor.
        """
        dtype = self.dtype if dtype is None else dtype
        if self.requires_grad and torch.is_grad_enabled():
            return torch.ops.lowp.dequantize(self, orientation, dtype)
        return _compile.dequantize(None, self, orientation, dtype)

    @torch.no_grad()
    def quantize_(self, source, *, encode_scale=None):
        """Casts ``source``, of the same shape, into the buffers."""
        check_values(source)
        if source.shape != self.shape:
            raise LowpError(f"the values have shape {tuple(source.shape)}, but the lowp.Tensor has {tuple(self.shape)}; give values of the same shape")
        source = values(source.to(self._store.device))
        _uncast.write(self._store, source, encode_scale)
        _compile.note_writes([self])
        return self

    def __repr__(self, *, tensor_contents=None):
        defaults = as_recipe(self.recipe.name, {}).options
        options = self.recipe.options.items()
        options = "".join(f", {name}={value}" for name, value in options if defaults[name] != value)
        grad = ", requires_grad=True" if self.requires_grad else ""
        held = "in a graph" if isinstance(self._store, _compile.Traced) else f"{self.stored_bytes:,} bytes"
        return (
            f"lowp.Tensor({self.recipe.name}{options}, shape={list(self.shape)}, {held}, "
            f"dtype={self.dtype}, device={self.device}{grad})"
        )

    def __format__(self, spec):
        return format(repr(self), spec)

    # What PyTorch calls.

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.linear:
            return _linear.linear(*args, **(kwargs or {}))
        if func in _ops.FINITE:
            return _ops.finite(func, *args, **(kwargs or {}))
        if not torch.compiler.is_compiling():
            if func is torch.Tensor.data_ptr:
                return Identity(args[0]._store)
            if func == _SET_DATA:
                return _set_data(*args) if isinstance(args[1], Tensor) else _frozen.assign(*args)
            _ops.check_memory(func)
        # What comes of it is what __torch_dispatch__ returns: plain tensors stay plain.
        with without_torch_function():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _ops.dispatch(cls, func, args, kwargs or {})

    @property
    def fsdp_pre_all_gather(self):
        """What this rank sends of its rows: bytes of the direction that the phase needs. FSDP2 asks for it when it shards, too, and four times in each
        gather."""
        hook = self._hook
        if hook is None or hook.store is not self._store:
            _states.follow()
            hook = self._hook = _PreAllGather(self._store)
        return hook

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        """The full tensor of what arrived; ``out`` is filled again in place."""
        if out is not None and not isinstance(out, Tensor):
            raise LowpError(f"FSDP2 gathers a lowp.Tensor into a {type(out).__name__}; call fully_shard on a new model")
        full = None if out is None else out._store
        store, inner = _fsdp.post_all_gather(self._store, all_gather_outputs, metadata, full)
        if out is not None:
            return None
        return Tensor(store, param_dtype), inner

    @property
    def _token(self):
        return _compile.token_of(self._store)

    def __tensor_flatten__(self):
        return _compile.flatten(self)

    def _stable_hash_for_caching(self):
        return _compile.cache_key(self)

    @classmethod
    def __tensor_unflatten__(cls, inner, context, outer_size, outer_stride):
        *of, frozen = _compile.unflatten(inner, context)
        made = cls(*of)
        made._frozen = "copy" if frozen else None
        return made

    def __getattr__(self, name):
        # Buffers by their names.
        store = object.__getattribute__(self, "_store")
        if name in store.buffers:
            store.check_cast()
            store.derive()
            return store.buffers[name]
        raise AttributeError(f"lowp.Tensor has no attribute {name!r}")

    def __reduce_ex__(self, protocol):
        store = self._store
        if isinstance(store, _compile.Traced):
            # A part of the key by which PyTorch keeps graphs.
            return (str, (_compile.cache_key(self),))
        if store.full is not None:
            raise LowpError("a tensor that FSDP2 gathered cannot be saved, since its memory is freed; save the state_dict of the sharded model")
        store.check_whole()
        recipe = (store.recipe.name, dict(store.recipe.options))
        flat, is_param = self.dim() == 1, is_parameter(self)
        cut = () if store.cut is None else (store.cut,)
        return (_rebuild, (recipe, store.shape, self.dtype, flat, dict(store.buffers), store.known_master(), self.requires_grad, is_param, *cut))

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            copy = _ops.like(self, self._store.map(torch.clone))
            copy.requires_grad_(self.requires_grad)
            memo[id(self)] = _as_parameter(copy) if is_parameter(self) else copy
        return memo[id(self)]


def _set_data(tensor, data):
    """Has a tensor share the buffers of another one, and take its dtype."""
    if tensor.shape != data.shape or tensor.recipe != data.recipe:
        raise LowpError(
            f"a lowp.Tensor of {data.recipe!r} {tuple(data.shape)} was assigned to .data of one of {tensor.recipe!r} {tuple(tensor.shape)}; make a new parameter "
            "(torch.nn.Parameter) for another recipe or shape"
        )
    with without_torch_function():
        _SET_DATA(tensor, data)
    tensor._store, tensor._dtype, tensor._flat, tensor._hook = data._store, data._dtype, data._flat, None


def _as_parameter(tensor):
    return torch.nn.Parameter(tensor, requires_grad=tensor.requires_grad)


def _rebuild(recipe, shape, dtype, flat, buffers, master, requires_grad, is_param=False, cut=None):
    """A tensor of what ``torch.save`` wrote."""
    name, options = recipe
    store = Store.of(as_recipe(name, options), shape, buffers, master, cut)
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise LowpError(f"a saved lowp.Tensor has the dtype {dtype!r}, which is not a floating-point dtype; save the tensor again")
    tensor = Tensor(store, dtype, bool(flat)).requires_grad_(bool(requires_grad))
    return _as_parameter(tensor) if is_param else tensor


torch.serialization.add_safe_globals([_rebuild])


def _send(tensor):
    """A tensor for another process, which shares its buffers: PyTorch moves them to shared memory."""
    store = tensor._store
    if store.held and not all(buffer.is_shared() for buffer in store.buffers.values()):
        raise UnsupportedOp(
            "a lowp.Tensor cannot be sent to another process after its first gather or step: these are planned over its memory, and sharing "
            "moves it; send a copy (.detach().clone()), or send the tensor earlier"
        )
    return tensor.__reduce_ex__(2)


ForkingPickler.register(Tensor, _send)


def check_values(source):
    """Raises for what holds no values that lowp quantizes."""
    if not isinstance(source, torch.Tensor):
        raise LowpError(f"values must be a torch.Tensor, not a {type(source).__name__}")
    if isinstance(source, Tensor):
        raise LowpError(
            f"the values are a lowp.Tensor of {source.recipe!r}, which is already quantized; give its master (.master), or its decoded values "
            "(.dequantize()), which are then rounded twice"
        )
    if source.layout != torch.strided:
        raise LowpError(f"the values have the layout {source.layout}; give dense values (.to_dense())")
    if source.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise LowpError(f"values of {source.dtype}; lowp quantizes float32, bfloat16 and float16 as they are: convert them first")


@torch.no_grad()
def quantize(source, recipe, *, usage="both", keep_master=False, master_dtype=torch.float32, encode_scale=None, **options):
    """Quantizes a matrix.

    ``source`` is a tensor of two axes on the CPU or a GPU, of float32, bfloat16 or float16; other dtypes are an error. ``recipe`` is a name of
    ``lowp.recipes()``, with its options as keywords, or a ``lowp.Recipe``. ``usage`` is ``"both"``, ``"rowwise"`` (forward alone) or
    ``"columnwise"``. The bytes are those of ``lowp quantize``, on every device. ``encode_scale`` gives the scale of a delayed recipe;
    every other scale follows from the values. ``keep_master`` keeps the values in ``master_dtype`` next to the codes, for ``lowp.AdamW``; in bfloat16 they are
    rounded first, and the codes are those of the rounded values. Of a tensor on the meta device it makes a ``lowp.Tensor`` on that device, which has no bytes.

    Raises ``lowp.LowpError`` if the recipe cannot take the matrix.
    """
    recipe = as_recipe(recipe, options)
    check_values(source)
    if source.dim() != 2:
        raise LowpError(f"a tensor has {source.dim()} axes, {tuple(source.shape)}, but lowp quantizes matrices; reshape it to two axes")
    if master_dtype not in MASTER_DTYPES:
        raise LowpError(f"master_dtype={master_dtype}; give {' or '.join(map(str, MASTER_DTYPES))}")
    if master_dtype != torch.float32 and not keep_master:
        raise LowpError(f"master_dtype={master_dtype} without a master; add keep_master=True, or leave master_dtype out")
    read = values(source)
    if master_dtype == torch.bfloat16:
        read = read.bfloat16()
    store = Store.empty(recipe, *source.shape, source.device, usage)
    store.quantize_(read, dtype_name(read.dtype), encode_scale)
    if keep_master:
        store.master = read.to(master_dtype, copy=read.data_ptr() == source.data_ptr())
    return Tensor(store, source.dtype)


_ops.Tensor = _compile.Tensor = Tensor
_ops.is_frozen = _compile.is_frozen = _frozen.is_frozen
_ops.reads_frozen = _frozen.reads
_states.quantize = quantize
_ops.handles(torch.ops.lowp.linear)(_compile.linear_forward)
_ops.handles(torch.ops.lowp.dequantize)(_compile.dequantize)
