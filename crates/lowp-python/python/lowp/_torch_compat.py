"""What the package uses of PyTorch that PyTorch promises nobody, and the versions that it was tested with.

Everything private of PyTorch is here, each under a name that says what it is for: where another version has it otherwise, this file changes.
"""

import contextlib
import functools
import inspect
import sys
import warnings
import weakref

import torch
import torch.distributed as dist
import torch.utils._pytree as _pytree
from torch.utils._python_dispatch import _disable_current_modes

#: The first and the last version.
TESTED = ((2, 10), (2, 15))


def is_tested(version):
    """Whether a version of torch is one of those."""
    parts = version.split(".")[:2]
    return all(part.isdecimal() for part in parts) and TESTED[0] <= tuple(map(int, parts)) <= TESTED[1]


if not is_tested(torch.__version__):
    warnings.warn(
        f"lowp was tested with torch {' to '.join('.'.join(map(str, version)) for version in TESTED)}, and this is torch {torch.__version__}; the internals "
        "that it uses may differ there: install a tested version, or run the tests of lowp (crates/lowp-python/tests)",
        stacklevel=2,
    )

# Tensors.

tree_leaves, tree_map_only = _pytree.tree_leaves, _pytree.tree_map_only
#: A context in which operators work on plain tensors, whatever follows the calls of PyTorch.
without_modes = _disable_current_modes
#: A context in which functions of PyTorch come to no ``__torch_function__``.
without_torch_function = torch._C.DisableTorchFunctionSubclass
#: A ``__torch_function__`` that leaves everything to PyTorch.
plain_torch_function = torch._C._disabled_torch_function_impl
make_wrapper = torch.Tensor._make_wrapper_subclass
scaled_mm = torch._scaled_mm
#: Copies each tensor of a list into the one at its place in another.
copy_each = torch._foreach_copy_


def local_of(tensor):
    """The rows of this rank, of a DTensor; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def version_of(tensor):
    """How often a tensor was written, as autograd counts."""
    return tensor._version


def storage_id(tensor):
    """What a tensor's storage is known by."""
    return tensor.untyped_storage()._cdata


def is_parameter(tensor):
    """Whether a tensor of a class of its own is a parameter."""
    return getattr(tensor, "_is_param", False)


def schema_of(operator):
    """The schema of an operator."""
    return operator._schema


def own_parameters(module):
    """The parameters of a module alone, by name."""
    return module._parameters


def in_backward():
    """Whether autograd walks a graph, on this thread."""
    return torch._C._current_graph_task_id() != -1


def raw_stream(index):
    """The current stream of a GPU, as CUDA has it."""
    return torch.cuda.current_stream(index).cuda_stream


# The same without an object for it, where PyTorch has that: each call of lowp asks.
raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", raw_stream)

# Graphs.

#: A decorator of functions that graphs call as they are.
outside_of_graphs = torch._disable_dynamo


def skip_frame(function):
    """Has Dynamo make no graphs that begin in ``function``."""
    from torch._dynamo import eval_frame

    skip = getattr(eval_frame, "skip_code", None)
    if skip is not None:
        skip(function.__code__)


# Process groups.


def default_store():
    """The store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def group_named(name):
    """The process group of a name."""
    return dist.distributed_c10d._resolve_process_group(name)


def is_known(group):
    """Whether a process group was not destroyed."""
    return dist.is_initialized() and group in dist.distributed_c10d._world.pg_map


def post_all_gather(group, all, sent, timeout):
    """An all-gather that nobody waits for here."""
    from torch._C._distributed_c10d import AllgatherOptions

    options = AllgatherOptions()
    options.timeout = timeout
    group.allgather([all], [sent], options)


def abort(group):
    """Ends what this process waits for in collectives of a group of GPUs."""
    group._get_backend(torch.device("cuda")).abort()


def serves_cpu(group):
    """Whether a group has collectives of tensors on the CPU."""
    return torch.device("cpu") in getattr(group, "_device_types", [torch.device("cpu")])


def coalesces(group, device):
    """Whether a group can run several collectives as one."""
    return group._get_backend(device).supports_coalescing


def coalesced(group, device):
    """A context whose collectives run as one."""
    return dist.distributed_c10d._coalescing_manager(group, device, async_ops=True)


def whole_group(mesh):
    """The group of all ranks of a mesh."""
    return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()


# State dictionaries.


@functools.cache
def on_full_states(load):
    """Has ``load`` see what PyTorch is about to load of full state dictionaries into a model: both dictionaries, whether rank 0 alone has the full
    one, and the group. It loads what it can, and returns the names of that, and those of them that the full one has not."""
    from torch.distributed.checkpoint import state_dict as module

    def extend(name, from_rank_0):
        of_torch = getattr(module, name, None)
        if of_torch is None:
            return  # codes raise in the collectives of that version

        @functools.wraps(of_torch)
        def call(full, local, *args, pg=None, strict=False, **kwargs):
            taken, missing = load(full, local, from_rank_0, pg)
            rest = {key: value for key, value in local.items() if key not in taken}
            known = {key: value for key, value in full.items() if key not in taken}
            how = {"strict": strict} if from_rank_0 else {}
            of_torch(known, rest, *args, pg=pg, **how, **kwargs)
            gone = local.keys() - taken - rest.keys() | (set(missing) if strict else set())
            local.update(rest)
            for key in gone:
                local.pop(key)

        setattr(module, name, call)

    extend("_broadcast_state_dict", True)
    extend("_distribute_state_dict", False)


@functools.cache
def on_checkpoints(contents):
    """Has ``contents``, which is made of all values of a checkpoint, say what is ``written`` of a value, and have values ``copied`` that are written later;
    what it returns ``None`` for, PyTorch copies."""
    from torch.distributed.checkpoint import _state_dict_stager, default_planner, staging

    known = weakref.WeakKeyDictionary()

    def resolve_data(self, item, of_torch=default_planner.DefaultSavePlanner.resolve_data):
        if self not in known or known[self][0] is not self.state_dict:
            known[self] = self.state_dict, contents(list(self.state_dict.values()))
        return known[self][1].written(of_torch(self, item))

    default_planner.DefaultSavePlanner.resolve_data = resolve_data

    def extend(stager):
        of_torch = stager.stage

        @functools.wraps(of_torch)
        def stage(self, state_dict, *args, **kwargs):
            leaves, spec = _pytree.tree_flatten(state_dict)
            of = contents(leaves)
            copies = [of.copied(leaf) for leaf in leaves]
            rest = [leaf if copy is None else None for leaf, copy in zip(leaves, copies)]
            leaves, spec = _pytree.tree_flatten(of_torch(self, _pytree.tree_unflatten(rest, spec), *args, **kwargs))
            return _pytree.tree_unflatten([leaf if copy is None else copy for leaf, copy in zip(leaves, copies)], spec)

        stager.stage = stage

    extend(_state_dict_stager.StateDictStager)
    extend(staging.BlockingAsyncStager)


def asks_for_size():
    """Whether a checkpoint is written, and asks how large the storage of a tensor is, as that of PyTorch 2.10 does."""
    loader = getattr(sys.modules.get("torch.distributed.checkpoint.filesystem"), "_SerialCpuLoader", None)
    return _is_called_by(getattr(loader, "values", None))


def like(tensor, local, shape=None):
    """``local`` as a tensor that is sharded as another one is, on whatever device, and of another whole ``shape`` where one is given."""
    if local_of(tensor) is tensor:
        return local
    spec = tensor._spec
    meta = spec.tensor_meta._replace(dtype=local.dtype)
    if shape is not None:
        meta = meta._replace(shape=torch.Size(shape), stride=torch.empty(shape, device="meta").stride())
    if meta != spec.tensor_meta:
        spec = type(spec)(spec.mesh, spec.placements, tensor_meta=meta)
    return type(tensor)(local, spec, requires_grad=tensor.requires_grad)


def hooks_of_loads(optimizer):
    """The hooks of ``load_state_dict`` of an optimizer: those before it, and those after it."""
    return [list(getattr(optimizer, f"_optimizer_load_state_dict_{when}_hooks").values()) for when in ("pre", "post")]


def makes_state_only():
    """Whether PyTorch calls a step only for the state that it makes: before states of an optimizer without steps are saved or loaded."""
    return _is_called_by(getattr(sys.modules.get("torch.distributed.checkpoint.state_dict"), "_init_optim_state", None))


def loads_states():
    """Whether PyTorch loads states of optimizers that ranks share."""
    return _is_called_by(getattr(sys.modules.get("torch.distributed.checkpoint.state_dict"), "_load_optim_state_dict", None))


def _is_called_by(function):
    """Whether a function is on the stack of this thread."""
    code = getattr(function, "__code__", None)
    frame = sys._getframe() if code is not None else None
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


# FSDP2.


def fsdp_groups():
    """The groups of parameters of every module that fully_shard was called for."""
    from torch.distributed._composable_state import _module_state_mapping

    for state in list(_module_state_mapping.values()):
        state = state() if isinstance(state, weakref.ReferenceType) else state
        for group in getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]:
            if group is not None:
                yield group


def fsdp_params(group):
    """What FSDP2 says of each parameter of a group: the modules that use it, the sharded one, the whole one (``None`` before the first gather),
    and the name."""
    for param in getattr(group, "fsdp_params", ()):
        info = param._module_info
        name = getattr(param, "_param_fqn", None) or info.param_name
        yield [info.module, *info.shared_modules], param.sharded_param, getattr(param, "_unsharded_param", None), name


def records_of(group):
    """FSDP2's records of the parameters of a group."""
    return getattr(group, "fsdp_params", ())


def whole_of(record):
    """The full parameter of a record; ``None`` before the first gather."""
    return getattr(record, "_unsharded_param", None)


def is_offloaded(record):
    """Whether the rows of a parameter are on the host between gathers."""
    return record.offload_to_cpu


def module_of(record):
    """The module that has a parameter."""
    return record._module_info.module


def is_cut_by_rows(record):
    """Whether the parameter of a record is cut by rows."""
    return record.fsdp_placement.dim == 0


def rows_of(record):
    """What FSDP2 sends of a plain parameter, padded, and the dtype that it is sent in; ``None`` of what comes from the host or has hooks."""
    rows, dtype = record._sharded_param_data, record.param_dtype
    plain = not (record.offload_to_cpu or hasattr(local_of(record.sharded_param), "fsdp_pre_all_gather"))
    return rows if plain else None, rows.dtype if dtype is None else dtype


def have_shards(shards):
    """Whether records still have their shards: of a weight a tensor of lowp, of any other what FSDP2 sends."""
    for record, shard, is_weight in shards:
        if (record.sharded_param._local_tensor if is_weight else record._sharded_param_data) is not shard:
            return False
    return True


def is_plain(record):
    """Whether what FSDP2 does with a parameter beside its gathers is what it does with most: the full one is memory that it may free, and users of it are
    modules that take parameters as they are."""
    info, of_torch = record._module_info, torch.nn.Module.__setattr__
    return all(not output.is_inference() for output in outputs_of(record)) and all(
        getattr(module.__setattr__, "__func__", None) is of_torch for module in (info.module, *info.shared_modules)
    )


def users_of(record):
    """The parameters of modules, by name, that have a parameter, with its names there."""
    info = record._module_info
    return [(info.module._parameters, info.param_name), *((m._parameters, name) for m, name in zip(info.shared_modules, info.shared_param_names))]


def shard_ranks(group):
    """The ranks that a group of parameters is gathered over."""
    return group._all_gather_process_group


def gathers_of(group):
    """What gathers a group in place of FSDP2; ``None`` where nothing does."""
    return getattr(group, "lowp", None)


def keeps_storage(records):
    """Whether the memory of full parameters stays between their gathers; ``None`` where some of them differ."""
    kept = {getattr(record, "keep_unsharded_storage", False) for record in records}
    return kept.pop() if len(kept) == 1 else None


#: What gathers of a group read of it, of each of its records, and of what its groups share.
_OF_GROUP = (
    "unshard wait_for_unshard _to_sharded unshard_in_backward post_forward_mesh_info mesh_info device_handle comm_ctx"
    " _all_gather_result _all_gather_comm _sharded_state _training_state _reshard_after_forward_event _with_fqn"
).split()
_OF_RECORD = "sharded_param sharded_state _sharded_param_data _unsharded_param".split()
_OF_ALL = "get_all_gather_streams all_gather_state".split()


def _is_known(group):
    """Whether a group of this version of FSDP2 has all names that its gathers read."""
    has = lambda owner, names: all(hasattr(owner, name) for name in names)
    return (
        has(group, _OF_GROUP)
        and has(group.comm_ctx, _OF_ALL)
        and has(group._all_gather_comm, ["allocate"])
        and has(group.device_handle, ["stream", "current_stream", "Event"])
        and all(has(record, _OF_RECORD) for record in records_of(group))
    )


def gather_by(group, gathers):
    """Has ``gathers`` gather a group of parameters where it can; elsewhere, FSDP2 does."""
    of = type(group)
    if hasattr(of, "lowp"):
        group.lowp = gathers
        return
    made = _gathering(of) if _is_known(group) else None
    if made is not None:
        group.lowp, group.__class__ = gathers, made


@functools.cache
def _gathering(of):
    """The class of groups that are gathered in another way; ``None`` where that version of FSDP2 is not as this expects it."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group as module

    shared = [getattr(module, name, None) for name in ("AllGatherResult", "AllGatherState", "TrainingState", "ShardedState")]
    if None in shared:
        return None
    result_of, state_of, phases, states = shared
    fields = ("all_gather_output", "all_gather_event", "all_gather_work")
    known = result_of._fields[:3] == fields and len(result_of._fields) == 6 and state_of._fields == ("all_gather_result", "event")
    if not known or tuple(inspect.signature(of.unshard).parameters) != ("self", "async_op"):
        return None
    copies_out = getattr(_fsdp_collectives, "_default_all_gather_output_fn", None)
    in_functorch = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
    profiles, requires_grad = torch.autograd._profiler_enabled, torch.Tensor.requires_grad.__get__

    def order_gathers_after(group, event):
        """Orders the streams of gathers after an event."""
        comm = group.comm_ctx
        if event is not None and hasattr(comm, "all_gather_stream"):
            comm.all_gather_copy_in_stream.wait_event(event)
            comm.all_gather_stream.wait_event(event)

    def named(group, what):
        return torch.profiler.record_function(group._with_fqn(what)) if profiles() else contextlib.nullcontext()

    class Sent(result_of):
        """What was sent here."""

        __slots__ = ()

    class Gathering(of):
        lowp = None

        def takes_gather(self):
            """Whether a gather that is asked for is done here: of a group that is sharded, as FSDP2 does it when nothing was changed."""
            mesh = self.post_forward_mesh_info
            return (
                self._all_gather_result is None
                and self._sharded_state is states.SHARDED
                and (self.unshard_in_backward or self._training_state is not phases.PRE_BACKWARD)
                and self._reshard_after_forward_event is None
                and (mesh is None or mesh is self.mesh_info)
                and getattr(self, "_all_gather_output_fn", copies_out) is copies_out
                and not (torch.is_inference_mode_enabled() or in_functorch())
                and keeps_storage(record for record, _ in self.lowp.users) is not None
                and self.lowp.is_current()
            )

        def unshard(self, async_op=False):
            if not self.takes_gather():
                return of.unshard(self, async_op)
            streams, comm = self.device_handle, self._all_gather_comm
            copies, stream = self.comm_ctx.get_all_gather_streams(async_op, self._training_state)
            with named(self, "FSDP::all_gather"):
                with streams.stream(copies):
                    whole, own = self.lowp.send(self, comm.allocate)
                stream.wait_stream(copies)
                with streams.stream(stream):
                    work = comm(output_tensor=whole, input_tensor=own, group=self.lowp.ranks, async_op=async_op)
                    self._all_gather_result = Sent(whole, stream.record_event(), work, [], [], [])

        def wait_for_unshard(self):
            result = self._all_gather_result
            if type(result) is not Sent:
                return of.wait_for_unshard(self)
            whole, sent, work, *_ = result
            is_forward, comm = self._training_state is phases.FORWARD, self.comm_ctx
            # What the gather before arrived in is free for the next one once it was copied.
            if is_forward and comm.all_gather_state is not None:
                order_gathers_after(self, comm.all_gather_state.event)
                comm.all_gather_state = None
            with named(self, "FSDP::all_gather_copy_out"):
                if sent is not None:
                    self.device_handle.current_stream().wait_event(sent)
                if isinstance(work, dist.Work):
                    work.wait()
                self.lowp.arrive(whole)
            with without_torch_function():
                for record, users in self.lowp.users:
                    whole, needs = record._unsharded_param, record.sharded_param.requires_grad
                    if requires_grad(whole) != needs:
                        whole.requires_grad_(needs)
                    for params, name in users:
                        params[name] = whole
                    record.sharded_state = states.UNSHARDED
            self._sharded_state = states.UNSHARDED
            copied = self.device_handle.Event()
            copied.record()
            if is_forward and work is None:
                comm.all_gather_state = state_of(result, copied)
            else:
                order_gathers_after(self, copied)
            self._all_gather_result = None

        def _to_sharded(self):
            if not self.lowp.is_there:
                return of._to_sharded(self)
            kept = keeps_storage(record for record, _ in self.lowp.users)
            for record, users in self.lowp.users:
                sharded = record.sharded_param
                for params, name in users:
                    params[name] = sharded
                record.sharded_state = states.SHARDED
            self._sharded_state = states.SHARDED
            # Where some parameters began to keep their memory after the gather, all keep it.
            self.lowp.leave(kept is not False)

    Gathering.__name__, Gathering.__qualname__ = of.__name__, of.__qualname__
    return Gathering


def fsdp_param_of(group, store):
    """FSDP2's record of the parameter that has a store, or the copy of one on a GPU; ``None`` where there is none."""
    owner = store if store.origin is None else store.origin()
    found = (param for param in getattr(group, "fsdp_params", ()) if getattr(local_of(param.sharded_param), "_store", ...) is owner)
    return next(found, None)


def copies_for_gather():
    """Whether FSDP2 copies rows that it keeps on the host to its device, for one gather."""
    of_param = getattr(sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param"), "FSDPParam", None)
    return _is_called_by(getattr(getattr(of_param, "all_gather_inputs", None), "fget", None))


def outputs_of(param):
    """The memory that FSDP2 copies what arrives for a parameter into, which it allocates in the first gather."""
    return param.all_gather_outputs


def set_outputs(param, outputs):
    """Gives a parameter that memory of a gather before; without, FSDP2 allocates it."""
    param.all_gather_outputs = outputs


def forget_gathers(group):
    """Drops what was gathered ahead after one group of a model failed: FSDP2 would wait for what was gathered ahead in each later forward."""
    for other in fsdp_groups():
        if other.comm_ctx is group.comm_ctx:
            other._all_gather_result = None


def keeps_whole(group):
    """Whether full parameters of a group stay from forward to backward, or after it."""
    return not group._reshard_after_forward or not getattr(group, "reshard_after_backward", True)


def reshards_to_some(group):
    """Whether a group reshards to a number of ranks after forward."""
    return getattr(group, "_use_post_forward_mesh", False)


def is_before_backward(group):
    """Whether what a group gathers now is for backward."""
    return group._training_state.name == "PRE_BACKWARD"
