"""The parameters of an optimizer, as messages and other ranks know them."""

import torch

from ._errors import LowpError
from ._fsdp import known_params
from ._ranks import together
from ._tensor import Tensor
from ._torch_compat import local_of
from ._uncast import cast_params


def all_of(groups):
    return [param for group in groups for param in group["params"]]


def list_params(group):
    """Makes a list of the parameters of a group, which are read more than once. Returns whether it is a group that has some in order."""
    params = group.get("params") if isinstance(group, dict) else None
    if params is None or isinstance(params, set):
        return False
    group["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
    return True


def listed(params):
    """What an optimizer is given, in lists: parameters, pairs of names and parameters, or groups of either. PyTorch refuses a tensor alone."""
    if isinstance(params, torch.Tensor):
        return params
    params = list(params)
    for group in params:
        list_params(group)
    return params


def tensors(params):
    """The parameters of what ``listed`` returned."""
    for of in [params] if isinstance(params, torch.Tensor) else params:
        for param in (of.get("params") or ()) if isinstance(of, dict) else [of]:
            param = param[1] if isinstance(param, tuple) and len(param) == 2 else param
            if isinstance(param, torch.Tensor):
                yield param


def rows_of(local, param):
    """Rows of a parameter, of which ranks may have other numbers than others."""
    return local.shape[0] if param.dim() and param.shape[0] else 1


def cols_of(param):
    return param.numel() // param.shape[0] if param.dim() and param.shape[0] else param.numel()


def named(groups):
    """The parameters of groups with their names; ``None`` for those that have none. PyTorch takes pairs of both, too."""
    for group in groups:
        names = group.get("param_names") or [None] * len(group["params"])
        for name, param in zip(names, group["params"]):
            yield param if isinstance(param, tuple) else (name, param)


def sharded_names():
    """What FSDP2 calls its parameters, by id."""
    return {id(sharded): name for sharded, _, name in known_params()}


def title(index, name, param):
    """A parameter by its number, its name where somebody knows it, and its shape."""
    return f"parameter {index}{f' ({name})' if name else ''} of shape {tuple(param.shape)}"


def check_once(named):
    """Raises where a parameter is there twice."""
    seen = {}
    for index, (name, param) in enumerate(named):
        first = seen.setdefault(id(param), index)
        if first != index and isinstance(param, torch.Tensor):
            raise LowpError(f"{title(index, name, param)} is also parameter {first}; give the optimizer each parameter once")


def numbers(index, group, optimizer):
    """The hyperparameters of a group as Rust takes them: lr, beta1, beta2, eps, weight decay."""
    try:
        return tuple(float(number) for number in optimizer.numbers(group))
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{key}={group[key]!r}" for key in optimizer.defaults)
        betas = ", and two numbers as betas" if "betas" in optimizer.defaults else ""
        raise LowpError(f"the hyperparameters of group {index} are {given}; give numbers{betas} ({error})") from None


def agree(optimizer, ranks):
    """Raises on every rank where ranks have other parameters, or codes of other recipes. Else gathers of FSDP2 would wait for others, or abort.
    Casts values that were written into shards."""
    if ranks is None:
        return
    groups, names = optimizer.param_groups, sharded_names()
    groups_of = {id(param): number for number, group in enumerate(groups) for param in group["params"]}

    def line(index, name, param):
        local = local_of(param)
        kind = f"codes of {local._store.recipe!r}" if isinstance(local, Tensor) else str(local.dtype)
        if isinstance(local, Tensor) and local._store.master is not None and local._store.master.dtype == torch.bfloat16:
            kind += ", a master in bfloat16"
        group = groups_of[id(param)]
        kind += f", moments in {optimizer._dtype_of(param, groups[group])}" if optimizer.states else ""
        return f"{title(index, name or names.get(id(param)), param)} in group {group}: {kind}"

    with together(ranks):
        text = "\n".join([f"seed {optimizer.seed}", *(line(index, *of) for index, of in enumerate(named(groups)))])
    ranks.agree("the parameters of the optimizer", text)
    cast_params(all_of(groups), ranks)
