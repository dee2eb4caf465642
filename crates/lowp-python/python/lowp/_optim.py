"""``lowp.AdamW``: one fused update and cast of all parameters."""

import contextlib
from types import SimpleNamespace

import torch

from . import _lowp
from ._compile import note_writes
from ._errors import LowpError
from ._fsdp import known_params
from ._memory import device_of, dtype_name, memory
from ._params import agree, all_of, check_once, list_params, listed, named, numbers, sharded_names, tensors, title
from ._plan import as_recipe
from ._ranks import Ranks, is_told, together
from ._store import Store
from ._tensor import Tensor
from ._torch_compat import local_of
from ._torch_compat import outside_of_graphs, version_of, whole_group, without_torch_function

_F32, _BF16 = torch.float32, torch.bfloat16
_Parameter = torch.nn.Parameter


class AdamW(torch.optim.Optimizer):
    """AdamW over any mix of quantized and plain parameters, in one planned launch.

    Masters are float32: the masters that ``quantize_model_`` kept, copies of bfloat16 parameters, and float32 parameters themselves.
    A step updates masters and casts them to codes in the same pass. Under FSDP2 each rank updates its rows, and the ranks agree on
    scales and on the norm. Every rank must make the optimizer; the ranks then compare parameters and recipes.

    ``max_norm`` clips the global norm of gradients on the device. With ``max_norm`` or ``skip_nonfinite``, all ranks skip the step if a gradient
    is not finite on any rank (``last_step()`` reports it). Without either only the update reads gradients, and there is no norm. ``moments_dtype`` may be ``torch.bfloat16``. With ``capturable``
    a step may be captured in a CUDA graph, after a step over the same gradients; the graph keeps the hyperparameters of that step.

    >>> opt = lowp.AdamW(model.parameters(), lr=3e-4, max_norm=1.0)
    >>> loss.backward(); opt.step(); opt.zero_grad()
    """

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=1e-2,
        *,
        max_norm=None,
        skip_nonfinite=False,
        moments_dtype=_F32,
        capturable=False,
    ):
        params = listed(params)
        # First of all: whatever fails on this rank alone, the others hear of.
        ranks = _ranks_of(tensors(params))
        self.max_norm, self.skip_nonfinite = max_norm, skip_nonfinite
        self.moments_dtype, self.capturable = moments_dtype, capturable
        self._built = None
        self._captured = []  # what graphs of PyTorch launch, also behind another plan
        # What was loaded, for the plan: (applied, skipped), and the delayed scales of parameters.
        self._counts, self._delayed = None, {}
        self._saved = []  # stores that know the scale of a state that was loaded
        with together(ranks):
            if moments_dtype not in (_F32, _BF16):
                raise LowpError(f"moments_dtype={moments_dtype}; give torch.float32 or torch.bfloat16")
            super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        agree(self.param_groups, ranks)

    def add_param_group(self, param_group):
        if getattr(self, "_built", None) is not None:
            raise LowpError("add_param_group was called after the first step, which planned all groups; make a new optimizer")
        if list_params(param_group):
            check_once([*named(self.param_groups), *named([param_group])])
        super().add_param_group(param_group)
        self._groups()

    def __getstate__(self):
        raise LowpError(
            "a lowp.AdamW cannot be copied or pickled, because its step is planned over the memory of its parameters; make a new optimizer over "
            "the other parameters and load the state_dict() of this one"
        )

    # A step.

    @outside_of_graphs
    @torch.no_grad()
    def step(self, closure=None, *, grad_scale=1.0):
        """Updates every parameter. ``grad_scale`` multiplies gradients first: the inverse of a loss scale, or of the number of batches that
        were added up. Collective where parameters are sharded."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        built = self._built or self._build()
        capturing = built.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        with built.alone():
            built.check_trained()
            if not capturing and built.moved():
                built = self._follow_moved()
        grads, alive = built.ready(capturing)
        if capturing:
            if not self.capturable:
                raise LowpError("step() was called while a CUDA graph is captured; make the optimizer with capturable=True")
            if built not in self._captured:
                self._captured.append(built)
            if built.moved():
                raise LowpError("step() was called while a CUDA graph is captured, and parameters have moved since the last step; take a step before the capture")
            built.rust.again(device_of(built.device), grads)
        else:
            same, built.known = grads is built.known, None
            with built.alone():
                args = (None if same else grads, self._groups(), float(grad_scale), self.max_norm, self.skip_nonfinite)
            built.rust.step(device_of(built.device), *args)
            built.known = grads
        built.note_step()
        while self._saved:
            self._saved.pop().saved_scale = None
        del alive
        return loss

    def last_step(self):
        """Reports the last step: ``applied``, ``grad_norm`` (``None`` if it was not computed), ``nonfinite``, ``clip``, ``steps``,
        ``skipped``. Waits for the step."""
        if self._built is None:
            raise LowpError("last_step() was called before the first step(); call step() first")
        return self._built.rust.report()

    def _groups(self):
        return [numbers(index, group) for index, group in enumerate(self.param_groups)]

    # State.

    def _param_state(self, param):
        """Master and moments of a parameter, like it in shape and shards; ``master`` is left out where it is the parameter."""
        state = self.state[param]
        if "exp_avg" in state:
            return state
        local = local_of(param)
        if not isinstance(local, Tensor) and local.dtype in (_F32, _BF16) and not local.is_contiguous():
            raise LowpError(
                f"a parameter of shape {tuple(local.shape)} with strides {tuple(local.stride())} is not contiguous; call .contiguous() before "
                "the optimizer is made"
            )
        if isinstance(local, Tensor):
            master = local._store.master
            if master is None:
                master = local._store.decode("rowwise")
            local._store.master = master = master.contiguous()
            state["master"] = _like(param, master)
        elif local.dtype == _BF16:
            state["master"] = _like(param, local.detach().float().contiguous())
        elif local.dtype != _F32:
            raise LowpError(
                f"a parameter of shape {tuple(local.shape)} has the dtype {local.dtype}; lowp.AdamW updates float32, bfloat16 and lowp.Tensor: "
                "convert it"
            )
        zeros = lambda: torch.zeros(tuple(local.shape), dtype=self.moments_dtype, device=local.device)
        state["exp_avg"], state["exp_avg_sq"] = _like(param, zeros()), _like(param, zeros())
        state["step"] = torch.tensor(0.0)
        return state

    def _build(self):
        built = _Built(self)
        # Codes that were loaded stay as they are, where their delayed scales were, too.
        unknown = [index for index, param in enumerate(built.params) if param not in self._delayed and built.rust.delayed(index)]
        if built.ranks is not None:
            built.ranks.agree("the state that was loaded before the first step", self._loaded_text(unknown))
        if self._counts is None or unknown:
            built.rust.calibrate()
        self._built = built
        self._take_loaded()
        return built

    def _loaded_text(self, unknown):
        if self._counts is None:
            return "none"
        scales = f", and delayed scales but for parameters {unknown}" if unknown else ""
        return f"{self._counts[0]} applied and {self._counts[1]} skipped steps{scales}"

    def _follow_moved(self):
        """Plans the step over parameters that lie elsewhere now, as after a load, which moves them on some ranks and not on others: nothing here
        may wait for another rank. Masters of codes follow them; those of bfloat16 keep what still rounds to the parameter."""
        old = self._built
        for param, place in zip(old.params, old.places):
            local = local_of(param)
            if not isinstance(local, Tensor):
                master = self.state[param].get("master")
                if master is not None and local_of(master).device == local.device:
                    _follow(local_of(master), local.detach())
                continue
            if local._store is place:
                continue
            master = local_of(self.state[param]["master"])
            if master.shape != tuple(local._store.shape) or master.device != local.device:
                continue  # what is planned says so
            store = local._store
            values = store.master
            if values is not master:
                master.copy_(store.decode_any() if values is None else values)
                store.master = master
        self._built = _Built(self, old)
        return self._built

    def _take_loaded(self):
        """Gives the plan the counts and delayed scales that were loaded."""
        if self._counts is not None:
            self._built.rust.set_counts(*self._counts)
        for index, param in enumerate(self._built.params):
            if param in self._delayed:
                self._built.rust.set_delayed(index, self._delayed[param])
        self._counts, self._delayed = None, {}

    def state_dict(self):
        """As of PyTorch's optimizers. ``step`` counts applied steps; ``skipped`` and, of delayed scales, ``scales`` stand beside it."""
        if self._built is not None:
            applied, skipped = self._built.rust.counts()
            for index, param in enumerate(self._built.params):
                state = self.state[param]
                state["step"] = torch.tensor(float(applied))
                state["skipped"] = torch.tensor(float(skipped))
                delayed = self._built.rust.delayed(index)
                if delayed:
                    state["scales"] = torch.tensor([[scale, *history] for scale, history in delayed])
                    scale = local_of(param)._store.encode_scale(local_of(state["master"]))
                    state["encode_scale"] = torch.tensor(torch.nan if scale is None else scale)
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Takes the state of an optimizer of the same parameters and shards. The codes of the model come with its own state."""
        groups, saved = self.param_groups, state_dict["param_groups"]
        sizes = [[len(group["params"]) for group in of] for of in (groups, saved)]
        if sizes[0] != sizes[1]:
            raise LowpError(
                f"the state has groups of {sizes[1]} parameters, and the optimizer has groups of {sizes[0]}; make it over the same "
                "groups"
            )
        self._counts, self._delayed = None, {}
        for group, other in zip(groups, saved):
            group.update({key: value for key, value in other.items() if key != "params"})
            for param, number in zip(group["params"], other["params"]):
                if not param.requires_grad:
                    continue
                values = state_dict["state"].get(number)
                if values is not None:
                    self._load_param(param, values)
        if not state_dict["state"]:
            self._forget()
        if self._built is not None:
            self._take_loaded()
            self._built.note_writes()

    def _forget(self):
        """Begins anew, as a new optimizer over the same masters: what the state of one without steps says."""
        for state in self.state.values():
            local_of(state["exp_avg"]).zero_()
            local_of(state["exp_avg_sq"]).zero_()
            state["step"] = torch.tensor(0.0)
            for key in ("skipped", "scales", "encode_scale"):
                state.pop(key, None)
        if self._built is not None:
            self._counts = (0, 0)

    def _load_param(self, param, values):
        state = self._param_state(param)
        for key in ("master", "exp_avg", "exp_avg_sq"):
            if key not in state:
                continue
            if key not in values:
                raise LowpError(
                    f"the loaded state of a parameter of shape {tuple(param.shape)} has no {key}; load the state of a lowp.AdamW over parameters of "
                    "the same dtype"
                )
            own, new = local_of(state[key]), local_of(values[key])
            if own.shape != new.shape:
                raise LowpError(
                    f"the loaded {key} has shape {tuple(new.shape)} instead of {tuple(own.shape)}; load the state of the same model and "
                    "shards"
                )
            own.copy_(new)
        store = getattr(local_of(param), "_store", None)
        if store is not None and store.shape == tuple(local_of(state["master"]).shape):
            # Codes that were loaded without a master, into a shard that FSDP2 moved, have another one.
            store.master = local_of(state["master"])
        self._counts = (int(values.get("step", 0)), int(values.get("skipped", 0)))
        # PyTorch loads what state_dict() returned, too, whose dictionaries are those of this state.
        scales = values.get("scales")
        # Also for a state_dict before the first step.
        state["step"], state["skipped"] = (torch.tensor(float(count)) for count in self._counts)
        scale, local = values.get("encode_scale"), local_of(param)
        state.pop("scales", None)
        state.pop("encode_scale", None)
        if scales is not None:
            state["scales"] = scales.clone()
            self._delayed[param] = [(scale, history) for scale, *history in scales.tolist()]
        if scale is not None:
            state["encode_scale"] = scale.clone()
        if scale is not None and scale.isfinite() and isinstance(local, Tensor) and local._store.is_delayed:
            # A model of values alone, as save_pretrained writes, was cast by another scale.
            local._store.follow_master(local_of(state["master"]), float(scale))
            self._saved.append(local._store)
            note_writes([param, local])


class _Built:
    """The planned step, with the tensors that it works on."""

    def __init__(self, optimizer, old=None):
        self.all = all_of(optimizer.param_groups)
        # First of all: whatever fails on this rank alone, the others hear of. What ranks have in common stays as it was.
        self.ranks = _ranks_of(self.all) if old is None else old.ranks
        with together(self.ranks if old is None else None):
            device, groups, args = self._collect(optimizer, old)
        if self.mesh is None:  # what is sharded is frozen
            self.ranks = None
        if old is None:
            agree(optimizer.param_groups, self.ranks)
            self.rust = _lowp.AdamW(device, groups, args, self.ranks, self.mesh)
        else:
            # Where memory lies is a matter of one rank.
            self.rust = old.rust.moved(device, groups, args)
        del self.alive

    def _collect(self, optimizer, old):
        """Parameters, device and hyperparameters as Rust takes them."""
        self.names = [name for name, _ in named(optimizer.param_groups)]
        with without_torch_function():
            self.trained = [param.requires_grad for param in self.all]
        self.params = [param for param, trained in zip(self.all, self.trained) if trained]
        if not self.params:
            raise LowpError(f"none of {len(self.all)} parameters requires gradients; call requires_grad_() on those to train")
        self.device = local_of(self.params[0]).device
        others = {str(local_of(p).device) for p in self.params} - {str(self.device)}
        if others:
            raise LowpError(f"the parameters are on {self.device} and {', '.join(sorted(others))}; make an optimizer for each device")
        self.mesh = _mesh_of(self.params) if old is None else old.mesh
        return device_of(self.device), optimizer._groups(), self._args(optimizer)

    def _args(self, optimizer):
        """The parameters as Rust takes them."""
        args = []
        states = [optimizer._param_state(param) for param in self.params]
        self.places = [_place(param) for param in self.params]
        seen = {}
        for param, place in zip(self.params, self.places):
            first = seen.setdefault(place, param)
            if first is not param and local_of(param).numel():
                raise LowpError(f"{self.title(param)} shares the memory of {self.title(first)}; give the optimizer only one of them")
        self.spans = None  # addresses and dtypes of gradients, and the list that Rust takes
        self.known = None  # where the gradients of the last step lay
        places = [(param, place) for param, place in zip(self.params, self.places) if type(param) is not _Parameter]
        self.stores = [place for place in self.places if isinstance(place, Store)]
        self.codes = [(param, place) for param, place in places if isinstance(param, Tensor)]
        self.shards = [(param, place) for param, place in places if not isinstance(param, Tensor)]
        self.plain = [param for param in self.params if type(param) is _Parameter]
        self.pointers = [param.data_ptr() for param in self.plain]
        grads, alive = self.grads()
        numbers = {id(p): n for n, group in enumerate(optimizer.param_groups) for p in group["params"]}
        for index, (param, state, grad) in enumerate(zip(self.params, states, grads)):
            for key in ("master", "exp_avg", "exp_avg_sq"):
                if key in state and local_of(state[key]).device != self.device:
                    raise LowpError(
                        f"{key} of parameter {index} is on {local_of(state[key]).device}, but the parameter is on {self.device}; make the optimizer "
                        "after the model was moved, and load its state then"
                    )
            args.append(_arg(f"parameter {index}", numbers[id(param)], param, state, grad, self.mesh))
        halves = [(param, local_of(param)) for param in self.params if local_of(param).dtype is _BF16]
        halves = [(param, local) for param, local in halves if not isinstance(local, Tensor)]
        self.steps = 0  # each counts as one write of every parameter
        self.halves = [(local, local_of(optimizer.state[param]["master"]), version_of(local)) for param, local in halves]
        self.written = self.params + [local_of(param) for param, _ in self.shards]
        self.alive = alive  # until Rust has them
        return args

    def ready(self, capturing):
        """Gradients of a step, for which this rank may fail alone: the others get its message."""
        with self.alone():
            if not capturing:
                self.follow_writes()
            return self.grads()

    @contextlib.contextmanager
    def alone(self):
        """What may fail on this rank alone: the others get its message."""
        try:
            yield
        except Exception as error:
            if self.ranks is not None and not is_told(error):
                self.rust.abort(f"{type(error).__name__}: {error}")
            raise

    def check_trained(self):
        """Raises where other parameters require gradients than in the step that was planned."""
        # Else each look at a lowp.Tensor is a call of __torch_function__.
        with without_torch_function():
            now = [param.requires_grad for param in self.all]
        if now == self.trained:
            return
        index = next(index for index, (new, old) in enumerate(zip(now, self.trained)) if new != old)
        change = "requires gradients now and did not in the first step" if now[index] else "required gradients in the first step and is frozen now"
        raise LowpError(
            f"{self.title(self.all[index])} {change}; the optimizer is planned for a fixed set of parameters, and all of them share one step "
            "count: make a new optimizer, and load the state_dict() of this one to keep its moments"
        )

    def title(self, param):
        """A parameter by its number, its name where somebody knows it, and its shape."""
        index = next(index for index, other in enumerate(self.all) if other is param)
        return title(index, self.names[index] or sharded_names().get(id(param)), param)

    def moved(self):
        """Whether a parameter lies elsewhere than planned."""
        if [param.data_ptr() for param in self.plain] != self.pointers:
            return True
        for param, place in self.codes:
            if param._store is not place:
                return True
        for param, place in self.shards:
            local = local_of(param)
            now = local._store if isinstance(local, Tensor) else local.data_ptr()
            if now is not place and now != place:
                return True
        return False

    def note_step(self):
        """Has autograd know that a step wrote the parameters: a graph that saved them is not walked with other values."""
        note_writes(self.written)
        for store in self.stores:
            store.amax = None
        self.steps += 1

    def note_writes(self):
        """Takes bfloat16 parameters for what their masters say."""
        self.halves = [(local, local_of(master), version_of(local) - self.steps) for local, master, _ in self.halves]

    def follow_writes(self):
        """Brings masters of bfloat16 parameters that PyTorch wrote up to date. Those that round to the parameter stay."""
        for index, (local, master, version) in enumerate(self.halves):
            if version_of(local) - self.steps != version:
                _follow(master, local)
                self.halves[index] = (local, master, version_of(local) - self.steps)

    def grads(self):
        """Where gradients lie, and those that were converted, to be kept for as long as they are read."""
        alive = []
        # Else each look at the gradient of a lowp.Tensor is a call of __torch_function__.
        with without_torch_function():
            grads = [param.grad for param in self.params]
        if any([type(grad) is not torch.Tensor for grad in grads]):
            grads = [g if type(g) is torch.Tensor else self._local_grad(index, g) for index, g in enumerate(grads)]
        dtypes = [grad.dtype for grad in grads]
        if not all([grad.is_contiguous() for grad in grads]) or not {*dtypes} <= {_F32, _BF16}:
            self._check_dense(grads)
            plain = []
            for grad, dtype in zip(grads, dtypes):
                kept = grad.to(_BF16 if dtype is _BF16 else _F32).contiguous()
                if kept is not grad:
                    alive.append(kept)
                plain.append(kept)
            grads, dtypes = plain, [grad.dtype for grad in plain]
        pointers = [grad.data_ptr() for grad in grads]
        known = self.spans
        if known is not None and (pointers, dtypes) == known[:2]:
            return known[2], alive
        found = [
            (pointer, grad.numel() * grad.element_size(), "float32" if dtype is _F32 else "bfloat16")
            for grad, pointer, dtype in zip(grads, pointers, dtypes)
        ]
        self.spans = (pointers, dtypes, found)
        return found, alive

    def _check_dense(self, grads):
        for param, grad in zip(self.params, grads):
            if grad.layout != torch.strided:
                raise LowpError(
                    f"the gradient of {self.title(param)} has the layout {grad.layout}; lowp.AdamW updates every value of a parameter: make the "
                    "embedding with sparse=False, or give that parameter another optimizer"
                )

    def _local_grad(self, index, grad):
        """The gradient of the rows of a parameter that is sharded."""
        if grad is None:
            param, replaced = self.params[index], ""
            if param is local_of(param) and next(known_params(), None) is not None:
                replaced = "; fully_shard replaces parameters: if it was called after the optimizer was made, make the optimizer after it"
            raise LowpError(
                f"{self.title(param)} has no gradient; remove it from the optimizer, or give it a gradient of zeros: a step updates every parameter "
                f"once{replaced}"
            )
        local = local_of(grad)
        return local.wait() if type(local) is not torch.Tensor and hasattr(local, "wait") else local


def _arg(name, group, param, state, grad, mesh):
    """A parameter as Rust takes it."""
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
        # Rows, which ranks may have other numbers of.
        shape = (local.shape[0], param.numel() // param.shape[0]) if param.dim() and param.shape[0] else (1, param.numel())
        recipe = as_recipe("bf16" if local.dtype == _BF16 else "fp32", {})
        # A float32 parameter is its own master, and nothing is cast.
        names = [spec.name for spec in recipe.buffers(*shape)] if local.dtype == _BF16 else []
        buffers = [(name, memory(local.detach(), keep=True)) for name in names]
    master = local_of(state["master"]) if "master" in state else local.detach()
    exp_avg, exp_avg_sq = local_of(state["exp_avg"]), local_of(state["exp_avg_sq"])
    return SimpleNamespace(
        name=name,
        group=group,
        recipe=recipe,
        shape=shape,
        shard=shard,
        buffers=buffers,
        master=memory(master, keep=True),
        exp_avg=memory(exp_avg, keep=True),
        exp_avg_sq=memory(exp_avg_sq, keep=True),
        moments=dtype_name(exp_avg.dtype),
        grad=(*grad[:2], local.get_device(), None),
        grad_dtype=grad[2],
    )


def _shard_of(store, param, mesh):
    """The rows of a DTensor as FSDP2's gathers have them, so that both know of each other's writes."""
    shards = param.device_mesh
    return store.as_shard(tuple(param.shape), 1 if mesh is None else mesh[1], shards.get_local_rank(shards.ndim - 1))


def _follow(master, values):
    """Makes the master of bfloat16 values that PyTorch wrote of them. What rounds to its value already keeps its bits."""
    master.copy_(torch.where(master.to(_BF16) == values, master, values.float()))


def _place(param):
    """Where a parameter lies: its codes, or the address of its values."""
    local = local_of(param)
    return local._store if isinstance(local, Tensor) else local.data_ptr()


def _like(param, local):
    """``local`` as a tensor that is sharded as a parameter is."""
    if local_of(param) is param:
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def _ranks_of(params):
    """The ranks that share out the rows; ``None`` for parameters that every rank has whole."""
    first = next((param for param in params if local_of(param) is not param), None)
    return None if first is None else Ranks.of(whole_group(first.device_mesh), local_of(first).device)


def _mesh_of(params):
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


__all__ = ["AdamW"]
