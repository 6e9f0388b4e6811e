"""In-process all_reduce."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ncclcomm.arrays import empty_on
from ncclcomm.comm._common import check_outs, outs_of, peer_of, terms_of

__all__ = ["all_reduce"]

_CALL = "all_reduce"


def all_reduce(inputs: Iterable[Any], op: str = "sum", *, out: Iterable[Any] | None = None) -> tuple[Any, ...]:
    """Reduce arrays of several devices of this process, and give each of their devices the result.

    Args:
        inputs: arrays on devices, of one shape and dtype; a device may stand more than once.
        op: 'sum' (integers wrap; bool is logical or), 'prod', 'min', 'max' (both carry NaN) or 'avg'.
        out: arrays to fill, one for each input, on its device, of its shape and dtype (in the native byte order). One
            may be its input itself (in place), or share no memory with any.

    Returns:
        A tuple with one new C-contiguous array for each input, on its device: inputs[0] op inputs[1] op ..., in that
        order, with identical bits everywhere, each ordered on its device's current stream. With out: a tuple of out's
        arrays.

    Raises:
        ArgumentError: no array, one in host memory, shapes or dtypes that differ, no such op, an out that doesn't fit.
        UnsupportedError: an entry is no supported array, or op doesn't take the dtype.

    See: torch.distributed.all_reduce.
    """
    arrays, shape, dtype = terms_of(inputs, op, _CALL)
    peer = peer_of(arrays[0].kind)
    if out is None:
        outs = [empty_on(peer.backend, shape, dtype, array.device, array.kind) for array in arrays]
    else:
        outs = outs_of(out, arrays, _CALL)
        check_outs(outs, [shape] * len(outs), dtype, _CALL, arrays, alias_ok=True)
    peer.all_reduce_views(outs, arrays, op)
    return tuple([target.obj for target in outs])
