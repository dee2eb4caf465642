"""``quantize_model_``: linear weights of a model as quantized tensors."""

import fnmatch
import warnings

import torch

from ._errors import LowpError
from ._files import save_values
from ._linear import Linear
from ._plan import as_recipe
from ._tensor import Tensor, check_values, quantize
from ._torch_compat import local_of, own_parameters


#: The output projection of torch.nn.MultiheadAttention, which is a linear layer by class alone: attention reads its weight.
_OF_ATTENTION = torch.nn.modules.linear.NonDynamicallyQuantizableLinear


def quantize_model_(model, recipe, *, ignore=(), keep_master=True, **options):
    """Quantizes the weight of every ``torch.nn.Linear`` of ``model`` in place, before ``fully_shard``.

    ``ignore`` has patterns as of a shell, of names of modules (``"lm_head"``, ``"*.norm"``) or parameters. The values stay beside the
    codes in float32 as masters of ``lowp.AdamW`` (``keep_master``), and are sharded with them. A weight that linear layers share becomes
    one tensor. Weights that hold codes of the recipe already stay as they are. Returns the names of the parameters that were quantized.

    ``save_pretrained`` of a model of transformers writes values from then on: ``lowp.plain_state_dict``.

    Raises ``lowp.LowpError``, before anything is changed, where a weight does not fit the recipe, where a module that is not a linear
    layer uses it, too, such as a tied embedding, and for the projection of ``torch.nn.MultiheadAttention``: name it in ``ignore``. Warns of a
    model without linear layers.
    """
    recipe = as_recipe(recipe, options)
    ignore = [ignore] if isinstance(ignore, str) else list(ignore)
    chosen, unused = [], set(ignore)
    for module_name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear):
            hit = {p for p in ignore if fnmatch.fnmatchcase(module_name, p)}
            unused -= hit
            continue
        name = f"{module_name}.weight" if module_name else "weight"
        hit = {p for p in ignore if fnmatch.fnmatchcase(module_name, p) or fnmatch.fnmatchcase(name, p)}
        unused -= hit
        if not hit:
            chosen.append((name, module))
    if unused:
        raise LowpError(f"ignore={sorted(unused)!r} names no module of the model; give names as model.named_modules() has them, or patterns")
    if not any(isinstance(module, torch.nn.Linear) for module in model.modules()):
        warnings.warn(
            f"quantize_model_ found no torch.nn.Linear in {type(model).__name__}, and quantized nothing; its layers may be of a class of their own, "
            "as the Conv1D of GPT-2 in transformers is",
            stacklevel=2,
        )
    chosen = [(name, module) for name, module in chosen if not _has_codes(name, module, recipe)]
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
                f"{name} is {', '.join(others)}, too, which is not quantized, so they would be tied no longer; leave it out: "
                f"ignore=[{name!r}], or give the layer a weight of its own"
            )
        if local_of(weight) is not weight:
            raise LowpError(
                f"{name} is a DTensor; call quantize_model_ before fully_shard, and where parallelize_module cut it, leave it out: "
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
            tensor = quantize(weight, recipe, keep_master=keep_master)
            # The old one stays alive until the end, so that no other has its id.
            made[id(weight)] = (weight, torch.nn.Parameter(tensor, requires_grad=weight.requires_grad))
        module.weight = made[id(weight)][1]
        if type(module) is torch.nn.Linear:
            module.__class__ = Linear
    save_values(model)
    return [name for name, _ in chosen]


def _has_codes(name, module, recipe):
    """Whether a layer holds codes of the recipe already. Raises where they are of another one."""
    held = local_of(own_parameters(module).get("weight"))
    if isinstance(held, Tensor) and held.recipe != recipe:
        raise LowpError(
            f"{name} holds codes of {held.recipe!r} already, and not of {recipe!r}; make the model again to quantize it otherwise, or leave it "
            f"as it is: ignore=[{name!r}]"
        )
    return isinstance(held, Tensor)


def _users(model):
    """The modules that use each parameter, by its id, with its name in them."""
    users = {}
    for module_name, module in model.named_modules():
        for name, param in own_parameters(module).items():
            if param is not None:
                users.setdefault(id(param), []).append((module, f"{module_name}.{name}" if module_name else name))
    return users
