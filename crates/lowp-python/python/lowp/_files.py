"""Values of a model for programs that know no codes: what files of safetensors hold."""

import copy
import inspect
import weakref

import torch

from ._optim import _like, _local
from ._tensor import Tensor


def plain_state_dict(model):
    """The state dictionary of a model with values in the place of codes: the float32 masters, and decoded values of weights without one.

    ``model`` may be a state dictionary, too. Shards stay shards, as DTensors of plain rows. Masters are not copied. A model that is quantized
    by the same recipe loads it to the bit (``load_state_dict``), where the scale is not a delayed one.
    """
    state, made = model.state_dict() if isinstance(model, torch.nn.Module) else model, {}
    return {name: _plain(value, made) for name, value in state.items()}


def _plain(value, made):
    local = _local(value)
    if not isinstance(local, Tensor):
        return value
    store = local._store
    if store not in made:  # weights that layers share stay one
        store.check_whole()
        made[store] = store.decode_any() if store.master is None else store.master
    return _like(value, made[store].view(local.shape))


def save_values(model):
    """Has ``save_pretrained`` of transformers, which writes safetensors, write values."""
    for module in model.modules():
        save = getattr(type(module), "save_pretrained", None)
        if save is not None and "state_dict" in inspect.signature(save).parameters:
            module.save_pretrained = _SavesValues(module)


class _SavesValues:
    """``save_pretrained`` of a model that holds codes. The model holds it, and it does not hold the model: a model that is deleted is freed at
    once, and not by Python's cyclic collector."""

    def __init__(self, model):
        self.model = weakref.ref(model)

    def __call__(self, save_directory, is_main_process=True, state_dict=None, *args, **kwargs):
        model = self.model()
        state_dict = plain_state_dict(model if state_dict is None else state_dict)
        return type(model).save_pretrained(model, save_directory, is_main_process, state_dict, *args, **kwargs)

    # Of a copy of the model.
    def __deepcopy__(self, memo):
        return _SavesValues(copy.deepcopy(self.model(), memo))

    def __reduce__(self):
        return _SavesValues, (self.model(),)
