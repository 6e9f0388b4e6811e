"""In-process reduce_add."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ncclcomm.arrays import empty_on
from ncclcomm.comm._common import destination_of, peer_of, terms_of

__all__ = ["reduce_add"]

_CALL = "reduce_add"


def reduce_add(inputs: Iterable[Any], destination: Any = None) -> Any:
    """Sum arrays of several devices of this process onto one of them.

    Args:
        inputs: arrays on devices, of one shape and dtype: integers (which wrap), float16, bfloat16, float32, float64,
            complex64, complex128, or bool (logical or).
        destination: the device that gets the sum: a number or device object, None for the current device, 'cpu' or -1
            for host memory. No input needs to be there.

    Returns:
        A new C-contiguous array on destination: inputs[0] + inputs[1] + ..., added in that order in the inputs' dtype
        (in the native byte order), ordered on destination's current stream; in host memory a NumPy array, complete
        when the call returns. One input that is on destination is returned itself.

    Raises:
        ArgumentError: no array, one in host memory, shapes or dtypes that differ, an unknown destination.
        UnsupportedError: an entry is no supported array, or its dtype can't be summed.

    See: torch.cuda.comm.reduce_add.
    """
    arrays, shape, dtype = terms_of(inputs, "sum", _CALL)
    device = destination_of(destination, _CALL)
    if len(arrays) == 1 and arrays[0].device == device and arrays[0].data.dtype.isnative:
        return arrays[0].obj
    peer = peer_of(arrays[0].kind)
    out = empty_on(peer.backend, shape, dtype, device, arrays[0].kind)
    peer.reduce_views(out, arrays, "sum")
    return out.obj
