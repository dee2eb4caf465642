"""The parameters of an optimizer as its planned step takes them: memory, shards and ranks."""

from types import SimpleNamespace

import torch

from . import _remainders
from ._errors import LowpError
from ._fsdp import known_params
from ._memory import dtype_name, memory
from ._moments import dtype_of, memory_of, name_of
from ._params import cols_of, rows_of
from ._plan import as_recipe
from ._ranks import Ranks
from ._store import Store
from ._tensor import Tensor
from ._torch_compat import like as sharded_like
from ._torch_compat import local_of, whole_group

_F32, _BF16 = torch.float32, torch.bfloat16


def arg(name, group, param, state, grad, mesh, cut, keys):
    """A parameter as Rust takes it, with the states of ``keys``; ``grad`` is ``None`` if it has none, and so is ``cut`` where the rule does not need it."""
    local = local_of(param)
    shard = None
    if isinstance(local, Tensor):
        store = local._store
        recipe, shape = store.recipe, store.shape
        if local is not param:
            shard, buffers = _shard_of(store, param, mesh), []
        else:
            buffers = store.named(keep=True)
    else:
        recipe, shape = _recipe_of(local), (rows_of(local, param), cols_of(param))
        # A float32 parameter is its own master, and nothing is cast.
        names = [spec.name for spec in recipe.buffers(*shape)] if local.dtype == _BF16 else []
        buffers = [(name, memory(local.detach(), keep=True)) for name in names]
    key = next((key for key in ("master", "remainder") if key in state), None)
    master = local.detach() if key is None else local_of(state[key])
    return SimpleNamespace(
        name=name,
        group=group,
        recipe=recipe,
        shape=shape,
        shard=shard,
        buffers=buffers,
        cut=cut,
        first=_first_of(local, param),
        master=memory(master, keep=True),
        master_is=_remainders.NAME if key == "remainder" else dtype_name(master.dtype),
        states=[memory_of(state, key) for key in keys],
        states_are=name_of(dtype_of(state, keys[0])) if keys else "float32",
        grad=None if grad is None else ((*grad[:2], local.get_device(), None), grad[2]),
    )


def arg_of_no_rows(name, group, param, cut, keys, dtype, remainders):
    """A parameter that is frozen: as on a rank that has none of its rows, so that it takes no memory. ``None`` for what cannot be planned like that.
    A delayed scale begins with the values of the first step, so it needs them. States would have ``dtype``, and masters of bfloat16 be ``remainders``."""
    local = local_of(param)
    master = None
    if isinstance(local, Tensor):
        recipe, cols, names = local._store.recipe, local._store.shape[1], list(local._store.buffers)
        master = local._store.master
    else:
        recipe, cols = _recipe_of(local), cols_of(param)
        names = [spec.name for spec in recipe.buffers(0, cols)] if local.dtype == _BF16 else []
    store = Store.empty(recipe, 0, cols, local.device)
    none = memory(torch.empty(0, device=local.device), keep=True)
    return SimpleNamespace(
        name=name,
        group=group,
        recipe=recipe,
        shape=(0, cols),
        shard=None,
        buffers=[(key, memory(store.buffers[key], keep=True)) for key in names],
        cut=cut,
        first=0,
        master=none,
        master_is=_remainders.NAME if remainders and names and not isinstance(local, Tensor) else "float32" if master is None else dtype_name(master.dtype),
        states=[none] * len(keys),
        states_are=name_of(dtype),
        grad=None,
    )


def cut_of(param, mesh, frozen):
    """The rows of a matrix, and where the elements of each rank end, as FSDP2 cuts them; ``None`` where one process has all of them. A frozen one has no rows."""
    if mesh is None:
        return None
    rows, cols = 0 if frozen else param.shape[0], cols_of(param)
    most = -(-rows // mesh[1])
    return rows, [min(most * (rank + 1), rows) * cols for rank in range(mesh[1])]


def _first_of(local, param):
    """Where the rows of this rank begin in the flattened parameter; of no rows they begin nowhere."""
    if local is param or not local.numel():
        return 0
    mesh = param.device_mesh
    return -(-param.shape[0] // mesh.size(mesh.ndim - 1)) * mesh.get_local_rank(mesh.ndim - 1) * cols_of(param)


def _recipe_of(local):
    return as_recipe("bf16" if local.dtype == _BF16 else "fp32", {})


def may_train(param, first, mesh):
    """Whether a frozen parameter could be trained beside ``first``, over the same ranks."""
    local, other = local_of(param), local_of(first)
    if local.device != other.device or not (isinstance(local, Tensor) or local.dtype in (_F32, _BF16)):
        return False
    if mesh is None or local_of(first) is first:
        return local is param
    return local is not param and param.device_mesh == first.device_mesh and tuple(param.placements) == tuple(first.placements)


def _shard_of(store, param, mesh):
    """The rows of a DTensor as FSDP2's gathers have them, so that both know of each other's writes."""
    shards = param.device_mesh
    return store.as_shard(tuple(param.shape), 1 if mesh is None else mesh[1], shards.get_local_rank(shards.ndim - 1))


def follow(master, values):
    """Makes the master of bfloat16 values that PyTorch wrote of them. What rounds to its value already keeps its bits."""
    master.copy_(torch.where(master.to(_BF16) == values, master, values.float()))


def place(param):
    """Where a parameter lies: its codes, or the address of its values."""
    local = local_of(param)
    return local._store if isinstance(local, Tensor) else local.data_ptr()


def like(param, local):
    """``local`` as a tensor that is sharded as a parameter is, on its own device: that of the mesh may be another one (``CPUOffloadPolicy``)."""
    return sharded_like(param.detach(), local)


def ranks_of(params):
    """The ranks that share out the rows; ``None`` for parameters that every rank has whole."""
    first = next((param for param in params if local_of(param) is not param), None)
    return None if first is None else Ranks.of(whole_group(first.device_mesh), local_of(first).device)


def mesh_of(params):
    """How ranks share out the rows: replicas x shards. ``None`` for parameters that every rank has whole."""
    whole = {id(whole): name for _, whole, name in known_params() if whole is not None}
    for param in params:
        if id(param) in whole:
            raise LowpError(
                f"{whole[id(param)]} of shape {tuple(param.shape)} is unsharded, because FSDP2 keeps the root's parameters gathered after a forward without a "
                "backward; call reshard() on the model before you make the optimizer"
            )
    sharded = [p for p in params if local_of(p) is not p]
    if not sharded:
        return None
    first = sharded[0]
    mesh, placements = first.device_mesh, tuple(first.placements)
    for param in sharded:
        if param.device_mesh != mesh or tuple(param.placements) != placements:
            raise LowpError(
                f"some parameters are sharded over {mesh} as {placements} and others over {param.device_mesh} as {tuple(param.placements)}; make an "
                "optimizer for each"
            )
    last = placements[-1]
    if not (last.is_shard() and last.dim == 0) or any(not p.is_replicate() for p in placements[:-1]):
        raise LowpError(
            f"the parameters are sharded as {placements}; lowp.AdamW supports the placements of FSDP2, (Shard(0),), and of HSDP, (Replicate(), "
            "Shard(0))"
        )
    replicate, shard = mesh.size() // mesh.size(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
    if len(sharded) != len(params) and mesh.size() > 1:
        plain = next(tuple(p.shape) for p in params if local_of(p) is p)
        raise LowpError(f"a parameter of shape {plain} is not sharded, but others are; call fully_shard on the root, too")
    return replicate, shard
