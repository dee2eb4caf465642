"""The state of an optimizer as PyTorch's optimizers give and take it: masters, states, counts and delayed scales."""

import torch

from . import _moments, _remainders
from ._args import ranks_of
from ._compile import note_writes
from ._errors import LowpError
from ._params import all_of
from ._ranks import together
from ._tensor import Tensor
from ._torch_compat import hooks_of_loads, like, loads_states, local_of

# What optimizers keep of a parameter beside its master.
_STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer")


class OptimizerState:
    """``state_dict`` and ``load_state_dict`` of an optimizer."""

    def _take_loaded(self):
        """Gives the plan the counts and delayed scales that were loaded."""
        if self._steps is not None:
            steps = [self._steps.get(param, 0) for param in self._built.params]
            self._built.rust.set_counts(max(self._applied, *steps), self._skipped, steps)
        for index, param in enumerate(self._built.params):
            if param in self._delayed:
                self._built.rust.set_delayed(index, self._delayed[param])
        self._steps, self._applied, self._skipped, self._delayed = None, 0, 0, {}

    def state_dict(self):
        """As of PyTorch's optimizers. ``step`` counts the steps that updated the parameter; ``skipped``, of all steps, and, of delayed scales,
        ``scales`` stand beside it, and so does ``applied``, all steps that updated parameters: random bits follow the sum of both."""
        if self._begun:
            self._note_state()
        packed = super().state_dict()
        for index, param in enumerate(all_of(self.param_groups)):
            store, state = getattr(local_of(param), "_store", None), packed["state"].get(index)
            if store is not None and store.loose is not None and state is not None:
                # The next step would make this master, unless a checkpoint has brought another one.
                packed["state"][index] = {**state, "master": like(state["master"], store.known_master())}
        return packed

    def _note_state(self):
        """Brings what the plan counts into the state. Scales that no cast has made yet are NaN."""
        applied, skipped, steps = self._built.rust.counts()
        for index, param in enumerate(self._built.params):
            if param not in self.state:
                continue  # frozen so far
            state = self.state[param]
            state["step"] = torch.tensor(float(steps[index]))
            state["skipped"] = torch.tensor(float(skipped))
            state["applied"] = torch.tensor(float(applied))
            delayed = self._built.rust.delayed(index)
            if delayed:
                scales = torch.tensor([[scale, *history] for scale, history in delayed])
                state["scales"] = scales if self._begun else torch.full_like(scales, torch.nan)
                scale = local_of(param)._store.encode_scale(local_of(state["master"]))
                state["encode_scale"] = torch.tensor(torch.nan if scale is None else scale)

    def load_state_dict(self, state_dict):
        """Takes the state of an optimizer of the same parameters and shards. The codes of the model come with its own state. There is no step after one that was
        not loaded, until another one was."""
        before, after = hooks_of_loads(self)
        # Every rank calls PyTorch's functions for states, which give some ranks what others refuse.
        ranks = ranks_of(all_of(self.param_groups)) if loads_states() else None
        try:
            with together(ranks):
                # As PyTorch does: a hook may change the dictionary, though not that of the caller, or give another one.
                state_dict = state_dict.copy()
                for hook in before:
                    changed = hook(self, state_dict)
                    state_dict = state_dict if changed is None else changed
                self._load(state_dict)
            if ranks is not None:
                ranks.collect("the state of the optimizer", "loaded")
        except Exception as error:
            self._refused = str(error)
            raise
        self._refused = None
        for hook in after:
            hook(self)

    @torch.no_grad()
    def _load(self, state_dict):
        groups, saved = self.param_groups, state_dict["param_groups"]
        if self._built is not None:
            self._built.check_groups(groups)
        sizes = [[len(group["params"]) for group in of] for of in (groups, saved)]
        if sizes[0] != sizes[1]:
            raise LowpError(
                f"the state has groups of {sizes[1]} parameters, and the optimizer has groups of {sizes[0]}; make it over the same "
                "groups"
            )
        self._steps, self._applied, self._skipped, self._delayed = None, 0, 0, {}
        for group, other in zip(groups, saved):
            group.update({key: value for key, value in other.items() if key != "params"})
            for param, number in zip(group["params"], other["params"]):
                values = state_dict["state"].get(number)
                if values is not None:
                    self._load_param(param, self._dtype_of(param, group), values)
                elif param in self.state:
                    self._forget(param)
        if self._built is not None and self._built.thawed():
            self._follow_moved()
        if self._begun:
            self._steps = self._steps or {}
            self._take_loaded()
        if self._built is not None:
            self._built.note_writes()

    def _forget(self, param):
        """Begins anew, as a new optimizer over the same master: what a state without this parameter says."""
        state = self.state[param]
        for key in self.states:
            for name in _moments.names(key, _moments.dtype_of(state, key)):
                local_of(state[name]).zero_()
        state["step"] = torch.tensor(0.0)
        for key in ("skipped", "applied", "scales", "encode_scale"):
            state.pop(key, None)

    def _load_param(self, param, dtype, values):
        state = self._param_state(param, dtype)
        # Where flat dictionaries lack a value, PyTorch gives an empty dictionary.
        values = {key: value for key, value in values.items() if not isinstance(value, dict)}
        found = [key for key in _STATES if key in values or f"{key}_codes" in values]
        if found != list(self.states):
            kept, found = (" and ".join(keys) or "nothing but masters" for keys in (self.states, found))
            raise LowpError(
                f"the loaded state of a parameter of shape {tuple(param.shape)} has {found}, and lowp.{type(self).__name__} keeps {kept}; load the "
                "state of an optimizer of the same kind"
            )
        of = f"a parameter of shape {tuple(param.shape)}"
        kind = next((key for key in ("master", "remainder") if key in state), None)
        if kind is not None:
            self._load_master(param, kind, values, of)
        for key in self.states:
            _moments.load(state, values, key, of)
        store = getattr(local_of(param), "_store", None)
        if store is not None and store.shape == tuple(local_of(state["master"]).shape):
            # Codes that were loaded without a master, into a shard that FSDP2 moved, have another one.
            store.hold(local_of(state["master"]), self)
        steps, skipped, applied = (int(values.get(key, 0)) for key in ("step", "skipped", "applied"))
        self._steps, self._skipped = {**(self._steps or {}), param: steps}, max(self._skipped, skipped)
        self._applied = max(self._applied, steps, applied)
        # PyTorch loads what state_dict() returned, too, whose dictionaries are those of this state.
        scales = values.get("scales")
        # Also for a state_dict before the first step.
        state["step"], state["skipped"], state["applied"] = (torch.tensor(float(number)) for number in (steps, skipped, self._applied))
        scale, local = values.get("encode_scale"), local_of(param)
        state.pop("scales", None)
        state.pop("encode_scale", None)
        if scales is not None:
            state["scales"] = scales.clone()
        if scales is not None and scales.isfinite().all():
            self._delayed[param] = [(scale, history) for scale, *history in scales.tolist()]
        if scale is not None:
            state["encode_scale"] = scale.clone()
        if scale is not None and scale.isfinite() and isinstance(local, Tensor) and local._store.is_delayed:
            # A model of values alone, as save_pretrained writes, was cast by another scale.
            local._store.follow_master(local_of(state["master"]), float(scale))
            self._saved.append(local._store)
            note_writes([param, local])

    def _load_master(self, param, kind, values, of):
        """Takes a master over, in float32 or as the remainder of the parameter, from either."""
        saved = next((key for key in ("master", "remainder") if key in values), None)
        if saved is None:
            raise LowpError(f"the loaded state of {of} has no master; load the state of a lowp.{type(self).__name__} over parameters of the same dtype")
        own, new, local = local_of(self.state[param][kind]), local_of(values[saved]), local_of(param)
        own_shape, new_shape = (tuple(of.shape[:-1] if key == "remainder" else of.shape) for of, key in ((own, kind), (new, saved)))
        if own_shape != new_shape:
            raise LowpError(f"the loaded master has shape {new_shape} instead of {own_shape}; load the state of the same model and shards")
        if saved == kind:
            own.copy_(new)
        elif saved == "remainder" and (isinstance(local, Tensor) or local.dtype != torch.bfloat16):
            raise LowpError(f"the loaded state of {of} has the remainder of a master of a bfloat16 parameter; load it into an optimizer over such a parameter")
        elif saved == "remainder":
            own.copy_(_remainders.join(local.detach(), new.to(local.device)))
        else:
            parameter, remainder = _remainders.split(new.to(local.device))
            local.copy_(parameter)
            own.copy_(remainder)
            note_writes([param, local])

    def _loaded_text(self, built, unknown):
        if self._steps is None:
            return "none"
        scales = f", and delayed scales but for parameters {unknown}" if unknown else ""
        lines = [f"{self._applied} applied and {self._skipped} skipped steps{scales}"]
        return "\n".join(lines + [f"{self._steps.get(param, 0)} steps of {built.title(param)}" for param in built.params])
