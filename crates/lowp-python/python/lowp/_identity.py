"""What ``data_ptr()`` of a quantized tensor returns: it tells tensors apart, and nothing can be read from it."""

import weakref

from ._errors import UnsupportedOp


class Identity:
    """Equal for tensors that share their buffers, and for no others, also after they are freed. Whoever takes it for a number gets an error."""

    __slots__ = ("_store",)

    def __init__(self, store):
        self._store = weakref.ref(store)
        hash(self._store)  # which is not possible later

    def __eq__(self, other):
        if isinstance(other, Identity):
            return self._store == other._store
        # Who asks for a null pointer reads memory next.
        return self._refuse() if other == 0 else NotImplemented

    def __hash__(self):
        return hash(self._store)

    def __repr__(self):
        return f"<identity of a lowp.Tensor, {hash(self):#x}>"

    def _refuse(self, *_):
        raise UnsupportedOp(
            "data_ptr() of a lowp.Tensor, which has no memory except its buffers of codes and scales, tells tensors apart and is no address; decode the tensor "
            "first (.dequantize()), or take the bytes of its .buffers; for safetensors save codes (lowp.save) or values (lowp.plain_state_dict(model)), and "
            "call dcp.save in place of dcp.async_save for a model that is not sharded"
        )

    __bool__ = __int__ = __index__ = __add__ = __radd__ = __sub__ = __rsub__ = __mod__ = __and__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    _as_parameter_ = property(_refuse)  # of ctypes
