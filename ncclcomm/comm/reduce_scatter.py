"""In-process reduce_scatter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ncclcomm.arrays import View, empty_on
from ncclcomm.chunks import check_chunk_sizes, check_dim, chunk_slices, even_counts
from ncclcomm.comm._common import check_outs, check_parts, outs_of, peer_of, terms_of

__all__ = ["reduce_scatter"]

_CALL = "reduce_scatter"


def reduce_scatter(
    inputs: Iterable[Any],
    op: str = "sum",
    chunk_sizes: Iterable[int] | None = None,
    dim: int = 0,
    *,
    out: Iterable[Any] | None = None,
) -> tuple[Any, ...]:
    """Reduce arrays of several devices of this process, and give each of their devices a chunk of the result.

    Args:
        inputs: arrays on devices, of one shape and dtype, of one dimension or more; a device may stand more than once.
        op: 'sum' (integers wrap; bool is logical or), 'prod', 'min', 'max' (both carry NaN) or 'avg'.
        chunk_sizes: elements along dim for each input's device; they sum to the inputs' size there. None cuts as
            numpy.array_split.
        dim: the dimension to cut; a negative one counts from the last.
        out: arrays to fill, one for each input, on its device, of its chunk's shape and dtype (in the native byte
            order). One may be its own chunk of an input (in place); they share no other memory.

    Returns:
        A tuple with one new C-contiguous array for each input, on its device: chunk i of inputs[0] op inputs[1] op ...,
        in that order, each ordered on its device's current stream. With out: a tuple of out's arrays.

    Raises:
        ArgumentError: no array, one in host memory, shapes or dtypes that differ, no such op, bad chunk sizes, an out
            that doesn't fit.
        ArgumentIndexError: dim is out of range.
        UnsupportedError: an entry is no supported array, or op doesn't take the dtype.

    See: torch.distributed.reduce_scatter.
    """
    arrays, shape, dtype = terms_of(inputs, op, _CALL)
    dim = check_dim(dim, len(shape), _CALL)
    if chunk_sizes is None:
        counts = even_counts(shape[dim], len(arrays))
    else:
        counts = check_chunk_sizes(chunk_sizes, len(arrays), shape[dim], _CALL, "inputs")
    shapes = [(*shape[:dim], count, *shape[dim + 1 :]) for count in counts]
    places = chunk_slices(counts, dim)
    peer = peer_of(arrays[0].kind)
    if out is None:
        outs = [
            empty_on(peer.backend, part, dtype, array.device, array.kind)
            for part, array in zip(shapes, arrays, strict=True)
        ]
    else:
        outs = outs_of(out, arrays, _CALL)
        check_outs(outs, shapes, dtype, _CALL)
        message = _CALL + ": out[{part}] overlaps inputs[{whole}] other than at its own chunk of it"
        check_parts(arrays, outs, places, message)
    peer.reduce_all(
        [
            (target, [View(None, array.data[place], array.device) for array in arrays])
            for target, place in zip(outs, places, strict=True)
        ],
        op,
    )
    return tuple([target.obj for target in outs])
