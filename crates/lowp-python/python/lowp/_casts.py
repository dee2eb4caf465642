"""The planned casts of a device: what layers cast and decode comes at the same addresses again."""

from . import _lowp

_CASTS = {}


def casts_of(device):
    """The planned casts of a device."""
    casts = _CASTS.get(device)
    if casts is None:
        casts = _CASTS[device] = _lowp.Casts(1024)
    return casts
