"""In-process all_gather."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ncclcomm.arrays import empty_on
from ncclcomm.comm._common import check_outs, check_parts, outs_of, peer_of
from ncclcomm.comm.gather import join

__all__ = ["all_gather"]

_CALL = "all_gather"


def all_gather(inputs: Iterable[Any], dim: int = 0, *, out: Iterable[Any] | None = None) -> tuple[Any, ...]:
    """Concatenate arrays of several devices of this process, and give each of their devices the result.

    Args:
        inputs: arrays on devices, of one dtype, whose shapes agree except along dim; 0-d arrays give one dimension. A
            device may stand more than once.
        dim: the dimension along which they are concatenated; a negative one counts from the last.
        out: arrays to fill, one for each input, on its device, of the result's shape and dtype. An input may be its own
            place in one (in place); they share no other memory.

    Returns:
        A tuple with one new C-contiguous array for each input, on its device, each ordered on its device's current
        stream. With out: a tuple of out's arrays.

    Raises:
        ArgumentError: no array, one in host memory, shapes or dtypes that don't agree, an out that doesn't fit.
        ArgumentIndexError: dim is out of range.
        UnsupportedError: an entry is no supported array.

    See: torch.distributed.all_gather_into_tensor.
    """
    arrays, _, shape, places = join(inputs, dim, _CALL, "inputs")
    dtype = arrays[0].data.dtype
    peer = peer_of(arrays[0].kind)
    if out is None:
        outs = [empty_on(peer.backend, shape, dtype, array.device, array.kind) for array in arrays]
    else:
        outs = outs_of(out, arrays, _CALL)
        check_outs(outs, [shape] * len(outs), dtype, _CALL)
        check_parts(
            outs,
            arrays,
            places,
            _CALL + ": out[{whole}] overlaps inputs[{part}] other than at its own place in the result",
        )
    peer.all_gather_views(outs, places, arrays)
    return tuple([target.obj for target in outs])
