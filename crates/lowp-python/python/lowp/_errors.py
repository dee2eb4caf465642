"""What lowp raises."""

from ._lowp import LowpError


class UnsupportedOp(LowpError, NotImplementedError):
    """An operation of PyTorch that a quantized tensor cannot do exactly. The message names it, and what to do."""
