"""Values in the place of codes: for programs that know no codes, and for models that leave lowp."""

import copy
import inspect
import weakref

import torch

from ._args import like
from ._errors import LowpError
from ._linear import Linear
from ._memory import device_of
from ._tensor import Tensor
from ._torch_compat import local_of, own_parameters


@torch.no_grad()
def dequantize_state_dict(model, dtype=None, *, masters=False):
    """The state dictionary of a model with decoded values in the place of codes, as plain tensors.

    ``model`` may be a state dictionary, too. The values have the dtype of their weight, or ``dtype``. With ``masters`` they are the masters where there are some,
    in float32 or ``dtype``, which are not copied unless they are of another one. Shards stay shards, as DTensors of plain rows. Tensors that were not
    quantized stay as they are.
    """
    state, made = model.state_dict() if isinstance(model, torch.nn.Module) else model, {}
    return {name: _plain(value, dtype, masters, made) for name, value in state.items()}


def plain_state_dict(model):
    """The masters in the place of codes, and decoded values of weights without one: ``dequantize_state_dict(model, masters=True)``, all in
    float32.

    A model that is quantized by the same recipe loads it to the bit (``load_state_dict``), codes of delayed scales if the state of the optimizer is
    loaded after it.
    """
    return dequantize_state_dict(model, torch.float32, masters=True)


@torch.no_grad()
def dequantize_model_(model, dtype=None, *, masters=False):
    """Replaces the quantized weights of ``model`` by plain parameters, in place. Returns their names.

    The values are those of ``dequantize_state_dict``. Weights that layers share stay shared, and have their name once for each layer. Layers are
    ``torch.nn.Linear`` again. Optimizers hold the parameters from before: make a new one.

    Raises ``lowp.LowpError``, before anything is changed, if FSDP2 shards a weight or ``DistributedDataParallel`` wraps the model.
    """
    chosen = [
        (f"{path}.{name}" if path else name, name, module, param)
        for path, module in model.named_modules()
        for name, param in own_parameters(module).items()
        if isinstance(local_of(param), Tensor)
    ]
    for title, _, _, param in chosen:
        if local_of(param) is not param or param._store.full is not None:
            raise LowpError(
                f"{title} is sharded by FSDP2, which does not let parameters be replaced; make the model again without quantize_model_, call fully_shard, and load "
                "the values: again.load_state_dict(lowp.dequantize_state_dict(model))"
            )
    if chosen and any(isinstance(module, torch.nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise LowpError("DistributedDataParallel would not reduce gradients of the new parameters; call dequantize_model_(model.module), and wrap that again")
    for title, _, _, param in chosen:
        try:
            _takes_master(param._store, masters)
        except LowpError as error:
            raise LowpError(f"{title}: {error}") from None
    made = {}
    for _, name, module, param in chosen:
        if id(param) not in made:
            made[id(param)] = torch.nn.Parameter(_plain(param, dtype, masters, {}), requires_grad=param.requires_grad)
        setattr(module, name, made[id(param)])
        if type(module) is Linear:
            module.__class__ = torch.nn.Linear
    forget_values(model)
    return [title for title, *_ in chosen]


def _plain(value, dtype, masters, made):
    local = local_of(value)
    if not isinstance(local, Tensor):
        return value
    store = local._store
    if store not in made:  # weights that layers share stay one
        if _takes_master(store, masters):
            made[store] = store.known_master().to(torch.float32 if dtype is None else dtype)
        else:
            made[store] = store.decode_any(local.dtype if dtype is None else dtype)
    return like(value, made[store].view(local.shape))


def _takes_master(store, masters):
    """Whether the values are the master. Raises where they are decoded and there are no codes of all rows."""
    store.check_rows()
    if masters and store.master is not None:
        return True
    store.check_whole()
    device_of(store.device)
    return False


def save_values(model):
    """Has ``save_pretrained`` of transformers, which writes safetensors, write values."""
    for module in model.modules():
        save = getattr(type(module), "save_pretrained", None)
        if save is not None and "state_dict" in inspect.signature(save).parameters:
            module.save_pretrained = _SavesValues(module)


def forget_values(model):
    """Takes that back, of a model without codes."""
    for module in model.modules():
        if isinstance(vars(module).get("save_pretrained"), _SavesValues):
            del module.save_pretrained


class _SavesValues:
    """``save_pretrained`` of a model that holds codes. The model holds it, and it does not hold the model: a model that is deleted is freed at
    once, and not by Python's cyclic collector."""

    def __init__(self, model):
        self.ref = weakref.ref(model)

    def model(self):
        model = self.ref()
        if model is None:
            raise LowpError(
                "save_pretrained was called on a shallow copy (copy.copy) whose original was deleted; copy models with copy.deepcopy(model), or call "
                "type(model).save_pretrained(model, folder, state_dict=lowp.plain_state_dict(model))"
            )
        return model

    def __call__(self, save_directory, is_main_process=True, state_dict=None, *args, **kwargs):
        model = self.model()
        state_dict = plain_state_dict(model if state_dict is None else state_dict)
        return type(model).save_pretrained(model, save_directory, is_main_process, state_dict, *args, **kwargs)

    # Of a copy of the model.
    def __deepcopy__(self, memo):
        return _SavesValues(copy.deepcopy(self.model(), memo))

    def __reduce__(self):
        return _SavesValues, (self.model(),)
