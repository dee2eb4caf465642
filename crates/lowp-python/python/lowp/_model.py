"""``quantize_model_``: linear weights of a model as quantized tensors."""

import fnmatch
import warnings

import torch

from ._errors import LowpError
from ._linear import Linear
from ._plain import save_values
from ._plan import as_recipe
from ._store import MASTER_DTYPES, rowwise_suffices
from ._tensor import Tensor, check_values, quantize
from ._torch_compat import local_of, own_parameters


#: The output projection of torch.nn.MultiheadAttention, which is a linear layer by class alone: attention reads its weight.
_OF_ATTENTION = torch.nn.modules.linear.NonDynamicallyQuantizableLinear


def quantize_model_(model, recipe, *, ignore=(), keep_master=None, master_dtype=torch.float32, **options):
    """Quantizes the weight of every ``torch.nn.Linear`` of ``model`` in place, before ``fully_shard``.

    ``ignore`` has shell patterns for names of modules (``"lm_head"``, ``"*.norm"``) or parameters; a module that contains linear layers leaves out all of
    them (``"vision_tower"``). With ``keep_master`` the values stay
    next to the codes in ``master_dtype``, as masters for ``lowp.AdamW``, and are sharded with the codes; the default keeps those of weights that require
    gradients. In ``torch.bfloat16`` they are rounded before they are quantized, and each step of ``lowp.AdamW`` rounds them stochastically. A frozen weight (``requires_grad=False``) has no codes that follow from others. Adapters of peft stay as they are. A weight that several
    linear layers share becomes one tensor. Weights that already have codes of the recipe do not change. Returns the names of the parameters that were
    quantized. Weights on the meta device get their codes when values are written or loaded, after ``to_empty``, or assigned
    (``load_state_dict(.., assign=True)``).

    After this call, ``save_pretrained`` of a transformers model writes values, those of ``lowp.plain_state_dict``.

    Raises ``lowp.LowpError``, before anything is changed, if a weight does not fit the recipe, if a module that is not a linear
    layer also uses it, such as a tied embedding, and for the projection of ``torch.nn.MultiheadAttention``: put such weights into ``ignore``.
    Warns if the model has no linear layers.
    """
    recipe = as_recipe(recipe, options)
    if master_dtype not in MASTER_DTYPES:
        raise LowpError(f"master_dtype={master_dtype}; give {' or '.join(map(str, MASTER_DTYPES))}")
    ignore = [ignore] if isinstance(ignore, str) else list(ignore)
    chosen, unused, adapters = [], set(ignore), _adapters(model)
    for module_name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear):
            unused -= _hits(ignore, [module_name])
            continue
        name = f"{module_name}.weight" if module_name else "weight"
        hit = _hits(ignore, [name, *_with_containers(module_name)])
        unused -= hit
        if not hit and module not in adapters:
            chosen.append((name, module))
    if unused:
        raise LowpError(f"ignore={sorted(unused)!r} matches no module of the model; give names of model.named_modules(), or patterns")
    if not any(isinstance(module, torch.nn.Linear) for module in model.modules()):
        warnings.warn(
            f"quantize_model_ found no torch.nn.Linear in {type(model).__name__}, and quantized nothing; its layers may have another class, "
            "such as the Conv1D of GPT-2 in transformers",
            stacklevel=2,
        )
    chosen = [(name, module) for name, module in chosen if not _has_codes(name, module, recipe, master_dtype)]
    users = _users(model)
    modules = {id(module) for _, module in chosen}
    for name, module in chosen:
        weight = module.weight
        if "weight" not in own_parameters(module):
            raise LowpError(
                f"{name} is computed by a parametrization; remove it (torch.nn.utils.parametrize.remove_parametrizations), or leave the layer "
                f"out: ignore=[{name!r}]"
            )
        if torch.nn.parameter.is_lazy(weight):
            raise LowpError(f"{name} has no shape yet; run the model once before quantize_model_, or leave it out: ignore=[{name!r}]")
        if isinstance(module, _OF_ATTENTION):
            raise LowpError(
                f"{name} is used by torch.nn.MultiheadAttention, which multiplies by plain values; leave it out: ignore=[{name!r}], or "
                "ignore=['*.out_proj'] for all of them"
            )
        others = [other for user, other in users[id(weight)] if id(user) not in modules]
        if others:
            raise LowpError(
                f"{name} is tied to {', '.join(others)}, which is not quantized, and quantizing it would untie them; leave it out: "
                f"ignore=[{name!r}], or give the layer a separate weight"
            )
        if local_of(weight) is not weight:
            raise LowpError(
                f"{name} is a DTensor; call quantize_model_ before fully_shard; if parallelize_module made the DTensor, leave it out: "
                f"ignore=[{name!r}]"
            )
        try:
            check_values(weight)
            recipe.check(*weight.shape)
        except LowpError as error:
            raise LowpError(f"{name}: {error}; or leave it out: ignore=[{name!r}]") from None
    made = {}
    for name, module in chosen:
        weight = module.weight
        if id(weight) not in made:
            trained = weight.requires_grad
            usage = "rowwise" if not trained and rowwise_suffices(recipe, tuple(weight.shape)) else "both"
            keeps = trained if keep_master is None else keep_master
            tensor = quantize(weight, recipe, usage=usage, keep_master=keeps, master_dtype=master_dtype if keeps else torch.float32)
            # The old one stays alive until the end, so that no other has its id.
            made[id(weight)] = (weight, torch.nn.Parameter(tensor, requires_grad=weight.requires_grad))
        module.weight = made[id(weight)][1]
        if type(module) is torch.nn.Linear:
            module.__class__ = Linear
        if weight.is_meta:
            module.register_load_state_dict_pre_hook(_quantize_assigned)
    save_values(model)
    return [name for name, _ in chosen]


def _hits(patterns, names):
    """The patterns that match one of some names."""
    return {pattern for pattern in patterns if any(fnmatch.fnmatchcase(name, pattern) for name in names)}


def _with_containers(name):
    """The names of a module and of those that contain it, without the model itself."""
    parts = name.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


def _quantize_assigned(module, state_dict, prefix, local_metadata, *_):
    """Makes codes of the values that ``load_state_dict(.., assign=True)`` puts in the place of a weight on the meta device."""
    name, weight = f"{prefix}weight", local_of(module.weight)
    value = state_dict.get(name)
    assigned = local_metadata.get("assign_to_params_buffers", False) and isinstance(weight, Tensor) and weight.is_meta
    if not assigned or not isinstance(value, torch.Tensor) or isinstance(local_of(value), Tensor):
        return
    if local_of(value) is not value:
        raise LowpError(f"{name} has values of a shard for a weight on the meta device; call model.to_empty(device=..), and load them without assign=True")
    state_dict[name] = quantize(value, weight.recipe, usage=weight._store.usage or "both", **weight._store.kept_master)


def _has_codes(name, module, recipe, master_dtype):
    """Whether a layer holds codes of the recipe already. Raises where they are of another one, or have a wider master."""
    held = local_of(own_parameters(module).get("weight"))
    if isinstance(held, Tensor) and held.recipe != recipe:
        raise LowpError(
            f"{name} already has codes of {held.recipe!r}, not of {recipe!r}; make the model again to use another recipe, or leave it "
            f"as it is: ignore=[{name!r}]"
        )
    master = held._store.master if isinstance(held, Tensor) else None
    if master is not None and master.dtype != master_dtype == torch.bfloat16:
        raise LowpError(
            f"{name} already has codes with a master in {master.dtype}, not in {master_dtype}; make the model again to have another one, or leave it as it is: "
            f"ignore=[{name!r}]"
        )
    return isinstance(held, Tensor)


def _adapters(model):
    """The modules of adapters, as peft's layers name them."""
    found = [getattr(module, name, None) for module in model.modules() for name in getattr(module, "adapter_layer_names", ())]
    return {module for adapter in found if isinstance(adapter, torch.nn.Module) for module in adapter.modules()}


def _users(model):
    """The modules that use each parameter, by its id, with its name in them."""
    users = {}
    for module_name, module in model.named_modules():
        for name, param in own_parameters(module).items():
            if param is not None:
                users.setdefault(id(param), []).append((module, f"{module_name}.{name}" if module_name else name))
    return users
