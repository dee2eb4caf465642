"""The optimizers of ``lowp``: one fused update and cast of all parameters."""

import contextlib
import operator

import torch

from . import _lowp, _moments, _remainders
from ._args import arg, arg_of_no_rows, cut_of, follow, like, may_train, mesh_of, place, ranks_of
from ._compile import note_writes
from ._errors import LowpError
from ._fsdp import known_params
from ._memory import device_of
from ._optim_state import OptimizerState
from ._params import agree, all_of, check_once, list_params, listed, named, numbers, sharded_names, tensors, title
from ._ranks import is_heard, together
from ._store import Store
from ._tensor import Tensor
from ._torch_compat import local_of
from ._torch_compat import makes_state_only, outside_of_graphs, version_of, without_torch_function

_F32, _BF16 = torch.float32, torch.bfloat16
_Parameter = torch.nn.Parameter


class Optimizer(OptimizerState, torch.optim.Optimizer):
    """What all optimizers have in common. Each says its ``rule``, the ``states`` that the rule keeps of a parameter, and how the hyperparameters
    of a group are the ``numbers`` that Rust takes; and, where that is so, the ``moments_dtypes`` that states may have, and that the rule updates matrices as a
    whole."""

    moments_dtypes, is_of_matrices = (_F32, _BF16, _moments.FP8), False

    def __init__(self, params, defaults, *, max_norm=None, skip_nonfinite=False, moments_dtype=_F32, remainders=False, seed=0, capturable=False):
        params = listed(params)
        # First of all: whatever fails on this rank alone, the others hear of.
        ranks = ranks_of(tensors(params))
        self.max_norm, self.skip_nonfinite = max_norm, skip_nonfinite
        self.moments_dtype, self.remainders, self.seed, self.capturable = moments_dtype, bool(remainders), seed, capturable
        # Groups that have a dtype of states of their own, with it, by id: PyTorch's state dictionaries take no dtypes.
        self._dtypes = {}
        self._built = None
        self._begun = False  # whether a step was taken, or is
        self._captured = []  # what graphs of PyTorch launch, also once another plan was built
        # What was loaded, for the plan: the steps of parameters, those of the optimizer, those that were skipped, and delayed scales. ``None``: nothing.
        self._steps, self._applied, self._skipped, self._delayed = None, 0, 0, {}
        self._refused = None  # why the last state was not loaded
        self._saved = []  # stores that know the scale of a state that was loaded
        with together(ranks):
            if isinstance(seed, bool) or not hasattr(seed, "__index__") or not 0 <= seed < 1 << 64:
                raise LowpError(f"seed={seed!r}; give an integer from 0 to 2**64 - 1")
            self.seed = operator.index(seed)
            super().__init__(params, defaults)
        agree(self, ranks)

    def add_param_group(self, param_group):
        if getattr(self, "_built", None) is not None:
            raise LowpError("add_param_group was called after the first step, which planned all groups; make a new optimizer")
        if list_params(param_group):
            check_once([*named(self.param_groups), *named([param_group])])
        own = isinstance(param_group, dict) and "moments_dtype" in param_group
        if own:
            param_group = dict(param_group)
            dtype = param_group.pop("moments_dtype")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if own:
            self._dtypes[id(group)] = group, dtype
        try:
            _moments.check(self, group)
            numbers(len(self.param_groups) - 1, group, self)
        except LowpError:
            self.param_groups.pop()
            raise

    def __getstate__(self):
        raise LowpError(
            f"a lowp.{type(self).__name__} cannot be copied or pickled, because its step is planned over the memory of its parameters; make a new optimizer over "
            "the other parameters and load the state_dict() of this one"
        )

    # A step.

    @outside_of_graphs
    @torch.no_grad()
    def step(self, closure=None, *, grad_scale=1.0):
        """Updates every parameter that has a gradient. ``grad_scale`` multiplies gradients first: the inverse of a loss scale, or of the number of batches that
        were added up. Collective where parameters are sharded."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        built = self._built or self._build()
        with built.alone():
            built.check_groups(self.param_groups)
        if self._refused is not None:
            with built.alone():
                raise LowpError(f"step() after a state that was not loaded: {self._refused}; load another one, or make a new optimizer")
        if not self._begun and makes_state_only():
            self._note_state()
            return loss
        capturing = built.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        with built.alone():
            if not capturing:
                built = self._follow_moved() if built.moved() or built.thawed() else built
                for store in built.stores:
                    store.settle_master()
        if not self._begun:
            self._begin()
        grads, alive = built.ready(capturing)
        if capturing:
            if not self.capturable:
                raise LowpError("step() was called while a CUDA graph is captured; make the optimizer with capturable=True")
            if built not in self._captured:
                self._captured.append(built)
            if built.moved() or built.thawed():
                raise LowpError("step() was called while a CUDA graph is captured, and parameters have moved or were thawed since the last step; take a step before the capture")
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
        if not self._begun:
            raise LowpError("last_step() was called before the first step(); call step() first")
        return self._built.rust.report()

    def _groups(self):
        return [numbers(index, group, self) for index, group in enumerate(self.param_groups)]

    # State.

    def _dtype_of(self, param, group):
        """The dtype of the states of a parameter: that of its group, where that has one. In fp8 by default are whole rows of blocks, which no rank cuts."""
        _, dtype = self._dtypes.get(id(group), (group, None))
        if dtype is None:
            dtype = self.moments_dtype if self.moments_dtype is not _moments.FP8 or _moments.has_whole_rows(param) else _F32
        return dtype

    def _param_state(self, param, dtype):
        """Master and states of a parameter, like it in shape and shards, those in ``dtype``; ``master`` is left out where it is the parameter, and is a
        ``remainder`` where the parameter is a half of it."""
        state = self.state[param]
        local = local_of(param)
        if "step" in state:
            dtype_then = _BF16 if "master" in state or "remainder" in state else _F32
            if not isinstance(local, Tensor) and local.dtype != dtype_then:
                raise LowpError(
                    f"a parameter of shape {tuple(param.shape)} is {local.dtype} and was {dtype_then} when the optimizer made its "
                    "state; convert the model before the optimizer is made"
                )
            return state
        if not isinstance(local, Tensor) and local.dtype in (_F32, _BF16) and not local.is_contiguous():
            raise LowpError(
                f"a parameter of shape {tuple(local.shape)} with strides {tuple(local.stride())} is not contiguous; call .contiguous() before "
                "the optimizer is made"
            )
        if isinstance(local, Tensor):
            master = local._store.known_master()
            if master is None:
                master = local._store.decode("rowwise")
            local._store.hold(master.contiguous(), self)
            state["master"] = like(param, local._store.master)
        elif local.dtype == _BF16 and self.remainders:
            state["remainder"] = _remainders.zeros(param)
        elif local.dtype == _BF16:
            state["master"] = like(param, local.detach().float().contiguous())
        elif local.dtype != _F32:
            raise LowpError(
                f"a parameter of shape {tuple(local.shape)} has the dtype {local.dtype}; lowp.{type(self).__name__} updates float32, bfloat16 and lowp.Tensor: "
                "convert it"
            )
        for key in self.states:
            state.update(_moments.zeros(param, key, dtype))
        state["step"] = torch.tensor(0.0)
        return state

    def _build(self):
        self._built = _Built(self)
        return self._built

    def _begin(self):
        """Before the first step. Collective."""
        built, self._begun = self._built, True
        # Codes that were loaded stay as they are, where their delayed scales were, too.
        unknown = [index for index, param in enumerate(built.params) if param not in self._delayed and built.rust.delayed(index)]
        if built.ranks is not None:
            built.ranks.agree("the state that was loaded before the first step", self._loaded_text(built, unknown))
        if self._steps is None or unknown:
            with built.delayed_codes_kept(self._delayed):
                built.rust.calibrate()
        self._take_loaded()

    def _follow_moved(self):
        """Plans the step over parameters that lie elsewhere now, as after a load, which moves them on some ranks and not on others: nothing here
        may wait for another rank. Masters of codes follow them; those of bfloat16 keep what still rounds to the parameter."""
        old = self._built
        for param, at in zip(old.whole, old.places):
            local = local_of(param)
            if not isinstance(local, Tensor):
                master = self.state[param].get("master")
                if master is not None and local_of(master).device == local.device:
                    follow(local_of(master), local.detach())
                continue
            if local._store is at:
                continue
            master = local_of(self.state[param]["master"])
            if master.shape != tuple(local._store.shape) or master.device != local.device:
                continue  # what is planned says so
            store = local._store
            values = store.known_master()
            if values is not master:
                at.leave_master(master)
                master.copy_(store.decode_any() if values is None else values)
                store.hold(master, self)
        self._built = _Built(self, old)
        return self._built


class _Built:
    """The planned step, with the tensors that it works on."""

    def __init__(self, optimizer, old=None):
        self.all = all_of(optimizer.param_groups)
        self.groups = [list(group["params"]) for group in optimizer.param_groups] if old is None else old.groups
        # First of all: whatever fails on this rank alone, the others hear of. What ranks have in common stays as it was.
        self.ranks = ranks_of(self.all) if old is None else old.ranks
        with together(self.ranks if old is None else None):
            device, groups, args = self._collect(optimizer, old)
        if self.mesh is None:  # what is sharded is frozen
            self.ranks = None
        if old is None:
            agree(optimizer, self.ranks)
            self.rust = _lowp.Optimizer(device, optimizer.rule, optimizer.seed, groups, args, self.ranks, self.mesh)
        else:
            # Where memory lies is a matter of one rank.
            self.rust = old.rust.moved(device, groups, args)
        del self.alive

    def _collect(self, optimizer, old):
        """Parameters, device and hyperparameters as Rust takes them."""
        self.state = optimizer.state
        self.names = [name for name, _ in named(optimizer.param_groups)]
        known = sharded_names()
        titles = [(name or known.get(id(param)), index) for index, (name, param) in enumerate(zip(self.names, self.all))]
        # As ranks compare them: of old, where FSDP2 has let go of a model since.
        self.plan_names = [f"{index} ({name})" if name else str(index) for name, index in titles] if old is None else old.plan_names
        with without_torch_function():
            self.whole = [param for param in self.all if param.requires_grad or param.grad is not None or param in self.state]
        if not self.whole:
            raise LowpError(f"none of {len(self.all)} parameters requires gradients; call requires_grad_() on those to train")
        self.device = local_of(self.whole[0]).device
        others = {str(local_of(p).device) for p in self.whole} - {str(self.device)}
        if others:
            raise LowpError(f"the parameters are on {self.device} and {', '.join(sorted(others))}; make an optimizer for each device")
        self.mesh = mesh_of(self.whole) if old is None else old.mesh
        # Some programs shard a model after they made the optimizer, and give it the shards.
        for group in optimizer.param_groups:
            _moments.check(optimizer, group)
        if optimizer.is_of_matrices:
            self._check_ranks(type(optimizer).__name__)
        self._plan_frozen(old)
        return device_of(self.device), optimizer._groups(), self._args(optimizer)

    def _check_ranks(self, name):
        """Raises where the ranks have no way for the pieces of matrices."""
        if self.mesh is None or self.mesh[1] == 1:
            return
        if self.mesh[0] > 1:
            raise LowpError(f"lowp.{name} over {self.mesh[0]} replicas of {self.mesh[1]} shards: matrices travel among all ranks; shard over all of them")

    def _plan_frozen(self, old):
        """Finds what is planned: what is frozen has no rows in the plan until it has a gradient, or a state that is loaded. Ranks plan the same
        parameters, whatever they froze."""
        whole = {id(param) for param in self.whole}
        self.frozen, self.outside = [], []
        for param in self.all:
            if id(param) in whole:
                continue
            local = local_of(param)
            is_delayed = isinstance(local, Tensor) and local._store.is_delayed
            if not may_train(param, self.whole[0], self.mesh) or (is_delayed and local._store.master is None):
                self.outside.append(param)
            elif is_delayed:
                whole.add(id(param))  # its scale begins with the values of the first step
            else:
                self.frozen.append(param)
        outside = {id(param) for param in self.outside}
        self.params = [param for param in self.all if id(param) not in outside]
        self.whole = [param for param in self.params if id(param) in whole]
        if old is not None:
            planned = {id(param) for param in old.params}
            param = next((param for param in self.whole if id(param) not in planned), None)
            if param is not None:
                raise LowpError(
                    f"{self.title(param)} was frozen in the first step, and had another device, dtype or sharding than parameters that were trained, or a delayed "
                    "scale and no master; make a new optimizer and load the state_dict() of this one"
                )
            self.params = old.params

    def _args(self, optimizer):
        """The parameters as Rust takes them."""
        args = []
        groups = {id(p): (number, group) for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        dtypes = {id(param): optimizer._dtype_of(param, groups[id(param)][1]) for param in self.params}
        states = {id(param): optimizer._param_state(param, dtypes[id(param)]) for param in self.whole}
        self.places = [place(param) for param in self.whole]
        seen = {}
        for param, at in zip(self.whole, self.places):
            first = seen.setdefault(at, param)
            if first is not param and local_of(param).numel():
                raise LowpError(f"{self.title(param)} shares the memory of {self.title(first)}; give the optimizer only one of them")
        self.stores = [at for at in self.places if isinstance(at, Store)]
        self.spans = None  # addresses and dtypes of gradients, the list that Rust takes, and what a step over them writes
        self.known = None  # where the gradients of the last step lay
        places = [(param, at) for param, at in zip(self.whole, self.places) if type(param) is not _Parameter]
        self.codes = [(param, at) for param, at in places if isinstance(param, Tensor)]
        self.shards = [(param, at) for param, at in places if not isinstance(param, Tensor)]
        self.plain = [param for param in self.whole if type(param) is _Parameter]
        self.pointers = [param.data_ptr() for param in self.plain]
        copied = [(param, local_of(param)) for param in self.whole if local_of(param).dtype is _BF16]
        # Masters that are remainders follow what PyTorch writes by themselves.
        copied = [(param, local) for param, local in copied if not isinstance(local, Tensor) and "master" in optimizer.state[param]]
        self.steps = 0  # each counts as a write of every parameter
        self.copied = [(param, local, local_of(optimizer.state[param]["master"]), _version_of(param, local)) for param, local in copied]
        self.copy_of = {id(param): index for index, (param, _) in enumerate(copied)}
        grads, alive = self.grads()
        index_of = {id(param): index for index, param in enumerate(self.all)}
        for param, grad in zip(self.params, grads):
            index, group, state = index_of[id(param)], groups[id(param)][0], states.get(id(param))
            name = self.plan_names[index]
            cut = cut_of(param, self.mesh, state is None) if optimizer.is_of_matrices else None
            if state is None:
                args.append(arg_of_no_rows(name, group, param, cut, optimizer.states, dtypes[id(param)], optimizer.remainders))
                continue
            entries = [name for key in optimizer.states for name in _moments.names(key, _moments.dtype_of(state, key))]
            for key in ("master", "remainder", *entries):
                if key in state and local_of(state[key]).device != self.device:
                    raise LowpError(
                        f"{key} of parameter {index} is on {local_of(state[key]).device}, but the parameter is on {self.device}; make the optimizer "
                        "after the model was moved, and load its state then"
                    )
            args.append(arg(name, group, param, state, grad, self.mesh, cut, optimizer.states))
        self.alive = alive  # until Rust has them
        return args

    @contextlib.contextmanager
    def delayed_codes_kept(self, known):
        """Casts of all masters leave the codes of delayed scales that were loaded, or that this step leaves as they are."""
        kept = [param for param in self.params if param in known or param.grad is None]
        stores = [getattr(local_of(param), "_store", None) for param in kept]
        buffers = [buffer for store in stores if store is not None and store.is_delayed for buffer in store.buffers.values()]
        copies = [buffer.clone() for buffer in buffers]
        yield
        for buffer, copy in zip(buffers, copies):
            buffer.copy_(copy)

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
            if self.ranks is not None and not is_heard(error):
                self.rust.abort(f"{type(error).__name__}: {error}")
            raise

    def thawed(self):
        """Whether a parameter that was frozen has a gradient now, or a state that was loaded."""
        # Else each look at a lowp.Tensor is a call of __torch_function__.
        with without_torch_function():
            return any([param.grad is not None or param in self.state for param in self.frozen + self.outside])

    def title(self, param):
        """A parameter by its number, its name where somebody knows it, and its shape."""
        index = next(index for index, other in enumerate(self.all) if other is param)
        return title(index, self.names[index] or sharded_names().get(id(param)), param)

    def check_groups(self, groups):
        """Raises where the groups have other parameters than planned."""
        now = [group["params"] for group in groups]
        same = [len(a) == len(b) and all(map(operator.is_, a, b)) for a, b in zip(now, self.groups)]
        if len(now) == len(self.groups) and all(same):
            return
        index = same.index(False) if False in same else len(same)
        what = f"the parameters of group {index} changed" if index < len(same) else f"group {index} was {'added' if index < len(now) else 'removed'}"
        raise LowpError(
            f"{what} after the first step, which planned all groups; make a new optimizer, or freeze parameters (requires_grad_(False)) in place of taking them out"
        )

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
        """Has autograd know that a step wrote parameters: a graph that saved them is not walked with other values."""
        written, stores, unwritten = self.spans[3]
        note_writes(written)
        for store in stores:
            store.amax = None
        self.steps += 1
        for index in unwritten:
            *of, version = self.copied[index]
            self.copied[index] = (*of, version - _OF_STEP)

    def _writes(self, grads):
        """What a step over gradients writes: parameters and rows, codes; and the bfloat16 parameters that it leaves."""
        present = [param for param, grad in zip(self.params, grads) if grad is not None]
        locals = [local_of(param) for param in present]
        rows = [local for param, local in zip(present, locals) if local is not param]
        stores = [local._store for local in locals if isinstance(local, Tensor)]
        missing = [self.copy_of.get(id(param)) for param, grad in zip(self.params, grads) if grad is None]
        return present + rows, stores, [index for index in missing if index is not None]

    def note_writes(self):
        """Takes bfloat16 parameters for what their masters say."""
        self.copied = [(param, local, master, self._version(param, local)) for param, local, master, _ in self.copied]

    def follow_writes(self):
        """Brings masters of bfloat16 parameters that PyTorch wrote up to date. Those that round to the parameter stay."""
        for index, (param, local, master, version) in enumerate(self.copied):
            now = self._version(param, local)
            if now != version:
                follow(master, local)
                self.copied[index] = (param, local, master, now)

    def _version(self, param, local):
        """How often others than the optimizer wrote a parameter."""
        return _version_of(param, local) - _OF_STEP * self.steps

    def grads(self):
        """Where gradients lie, and those that were converted, to be kept for as long as they are read."""
        alive = []
        # Else each look at the gradient of a lowp.Tensor is a call of __torch_function__.
        with without_torch_function():
            grads = [param.grad for param in self.params]
        if any([type(grad) is not torch.Tensor for grad in grads]):
            grads = [g if type(g) is torch.Tensor or g is None else _local_grad(g) for g in grads]
            self._check_replaced(grads)
        dtypes = [None if grad is None else grad.dtype for grad in grads]
        if not all([grad is None or grad.is_contiguous() for grad in grads]) or not {*dtypes} <= {_F32, _BF16, None}:
            self._check_dense(grads)
            plain = []
            for grad, dtype in zip(grads, dtypes):
                kept = None if grad is None else grad.to(_BF16 if dtype is _BF16 else _F32).contiguous()
                if kept is not grad:
                    alive.append(kept)
                plain.append(kept)
            grads, dtypes = plain, [None if grad is None else grad.dtype for grad in plain]
        pointers = [None if grad is None else grad.data_ptr() for grad in grads]
        known = self.spans
        if known is not None and (pointers, dtypes) == known[:2]:
            return known[2], alive
        found = [
            None if grad is None else (pointer, grad.numel() * grad.element_size(), "float32" if dtype is _F32 else "bfloat16")
            for grad, pointer, dtype in zip(grads, pointers, dtypes)
        ]
        self.spans = (pointers, dtypes, found, self._writes(grads))
        return found, alive

    def _check_replaced(self, grads):
        """Raises where no parameter has a gradient, because FSDP2 has others in their place."""
        if any(grad is not None for grad in grads) or any(local_of(param) is not param for param in self.params):
            return
        if next(known_params(), None) is not None:
            raise LowpError(
                "no parameter of the optimizer has a gradient; fully_shard replaces parameters: if it was called after the optimizer was made, make the "
                "optimizer after it"
            )

    def _check_dense(self, grads):
        for param, grad in zip(self.params, grads):
            if grad is not None and grad.layout != torch.strided:
                raise LowpError(
                    f"the gradient of {self.title(param)} has the layout {grad.layout}; every value of a parameter is updated: make the "
                    "embedding with sparse=False, or give that parameter another optimizer"
                )


#: What a step adds to the number of a parameter's writes.
_OF_STEP = 2


def _version_of(param, local):
    """How often a parameter or its rows were written: what PyTorch writes by way of a DTensor counts for that alone. Those of a plain parameter count twice."""
    return version_of(param) + version_of(local)


def _local_grad(grad):
    """The gradient of the rows of a parameter that is sharded."""
    local = local_of(grad)
    return local.wait() if type(local) is not torch.Tensor and hasattr(local, "wait") else local


__all__ = ["Optimizer"]
