"""Layers in native code: on GPUs PyTorch calls their operators without Python.

Native code knows a layer by the number of its store. It asks ``prepare`` for the codes of a phase when it uses them first, and after each gather
by FSDP2.
"""

import os
import warnings
import weakref

import torch

from . import _lowp, _scaled

store_of = hold = None  # set by _compile.py, which uses this file


def register():
    """Registers the operators for GPUs, whose schemas are there. Elsewhere, Python implements them."""
    if not hasattr(_lowp, "register_operators") or torch.version.cuda is None:
        return
    try:
        _lowp.register_operators(os.path.join(os.path.dirname(torch.__file__), "lib"), prepare)
    except _lowp.LowpError as error:
        warnings.warn(f"{error}; layers on GPUs cost the host more time with torch {torch.__version__}: use another version", stacklevel=2)


def prepare(number, columnwise):
    """Describes the layer of a number, and, where ``columnwise`` is not ``None``, gives the codes of that direction."""
    store = store_of(number)
    if not store.described:
        _describe(number, store)
    if columnwise is not None:
        orientation = "columnwise" if columnwise else "rowwise"
        store.check_serves(orientation)
        hold(number, columnwise, *_scaled.codes(store, orientation))


def _describe(number, store):
    elements = [_scaled.element_of(store.recipe, orientation) for orientation in ("rowwise", "columnwise")]
    numbers = [_scaled.number_of(recipe) for recipe in _scaled.operands(store.recipe)]
    _lowp.describe_layer(number, store.shape, numbers, elements, _scaled.scales_of(store.recipe))
    weakref.finalize(store, _lowp.release_layer, number).atexit = False
    store.described = True


def forget(store):
    """The codes of a store are those of another phase, or lie elsewhere."""
    if store.described:
        _lowp.forget_codes(store.number)


def call(operator, *args):
    """Calls an operator. What native code fails with comes as a C++ exception, which has but the text."""
    try:
        return operator(*args)
    except RuntimeError as error:
        cause = _lowp.take_error() if hasattr(_lowp, "take_error") else None
        if cause is None or str(cause) not in str(error):
            raise
        if "CUDA out of memory" in str(cause):
            raise torch.OutOfMemoryError(str(cause)) from None
        raise cause from None
