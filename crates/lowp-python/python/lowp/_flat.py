"""``cast_master_weights``: full weights of which each rank has a flat slice of the masters."""

from types import SimpleNamespace

from . import _lowp
from ._compile import note_writes
from ._errors import LowpError
from ._memory import device_of, dtype_name, memory, values
from ._ranks import Ranks, together
from ._tensor import check_values
from ._torch_compat import is_known


def cast_master_weights(model_weights, master_weights, start_offsets, group=None):
    """Casts this rank's slices of master weights into full quantized weights, and gathers the other slices from the other ranks.

    ``model_weights`` are ``lowp.Tensor``, complete on every rank. For each, ``master_weights`` has this rank's slice of the
    flattened values in float32 or bfloat16, or ``None`` if the rank has none; ``start_offsets`` has the first element of each slice
    (``None`` without a slice). The slices of the ranks of ``group`` follow each other in rank order, and may be cut inside a row, a
    block or a byte. The arguments are those of TransformerEngine's call of the same name. This call is collective. After it every
    weight has the bytes that ``lowp.quantize`` makes of the whole masters.
    """
    device = model_weights[0]._store.device if model_weights else None
    ranks = None if device is None else Ranks.of(group, device)
    with together(ranks):
        if not len(model_weights) == len(master_weights) == len(start_offsets):
            raise LowpError(
                f"{len(model_weights)} weights, {len(master_weights)} masters and {len(start_offsets)} offsets; give one master and one offset "
                "for each weight"
            )
        args, alive = _args(model_weights, master_weights, start_offsets)
    if not model_weights:
        return
    _casts_of(ranks).run(device_of(device), args, ranks)
    del alive
    note_writes(model_weights)
    for weight in model_weights:
        weight._store.follow_codes()


#: The planned casts of each process group, which they hold, and those of this rank alone.
_CASTS, _ALONE = {}, _lowp.FlatCasts()


def _casts_of(ranks):
    if ranks is None:
        return _ALONE
    if ranks.group not in _CASTS:
        for group in [group for group in _CASTS if not is_known(group)]:
            del _CASTS[group]
        _CASTS[ranks.group] = _lowp.FlatCasts()
    return _CASTS[ranks.group]


def _args(model_weights, master_weights, start_offsets):
    """The weights as Rust takes them, and what must live until it has."""
    args, alive = [], []
    for weight, master, start in zip(model_weights, master_weights, start_offsets):
        store = weight._store
        if master is not None:
            check_values(master)
        store.begin_rewrite()
        read = values(weight.new_empty(0).float() if master is None else master.to(store.device).reshape(-1))
        alive.append(read)
        args.append(
            SimpleNamespace(
                recipe=store.recipe,
                shape=store.shape,
                buffers=store.named(),
                start=start or 0,
                master=memory(read),
                dtype=dtype_name(read.dtype),
            )
        )
    devices = {str(weight._store.device) for weight in model_weights}
    if len(devices) > 1:
        raise LowpError(f"the weights are on several devices, {', '.join(sorted(devices))}; make one call per device")
    return args, alive
