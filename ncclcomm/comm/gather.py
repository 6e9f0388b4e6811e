"""In-process gather."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ncclcomm.arrays import View, check_out, empty_on
from ncclcomm.chunks import check_dim, chunk_slices
from ncclcomm.comm._common import check_alike, destination_of, peer_of, uniform_views_of, view_of
from ncclcomm.errors import ArgumentError

__all__ = ["gather", "join"]

_CALL = "gather"


def gather(tensors: Iterable[Any], dim: int = 0, destination: Any = None, *, out: Any = None) -> Any:
    """Concatenate arrays of several devices of this process on one of them.

    Args:
        tensors: arrays on devices, of one dtype, whose shapes agree except along dim; 0-d arrays give one dimension.
        dim: the dimension along which they are concatenated; a negative one counts from the last.
        destination: the device that gets the result: a number or device object, None for the current device, 'cpu' or
            -1 for host memory.
        out: in place of destination: an array to fill, of the result's shape and dtype, on any device or in host
            memory.

    Returns:
        A new C-contiguous array on destination, ordered on its current stream; in host memory a NumPy array, complete
        when the call returns. With out: out.

    Raises:
        ArgumentError: no array, one in host memory, shapes or dtypes that don't agree, an unknown destination, both
            destination and out, an out that doesn't fit.
        ArgumentIndexError: dim is out of range.
        UnsupportedError: an entry is no supported array.

    See: torch.cuda.comm.gather.
    """
    if out is not None and destination is not None:
        raise ArgumentError(f"{_CALL}: destination and out can't both be given; out says where the result goes")
    arrays, dim, shape, places = join(tensors, dim, _CALL, "tensors")
    dtype = arrays[0].data.dtype
    peer = peer_of(arrays[0].kind)
    if out is not None:
        target = view_of(out, _CALL, "out")
        check_out(target, shape, dtype, "gather: out", arrays)
    else:
        target = empty_on(peer.backend, shape, dtype, destination_of(destination, _CALL), arrays[0].kind)
    peer.gather_views(target, places, arrays)
    return target.obj


def join(tensors: Iterable[Any], dim: Any, call: str, name: str) -> tuple[list[View], int, tuple[int, ...], list[Any]]:
    """Arrays that are to be concatenated, the dimension, the shape of the whole, and the place of each in it.

    Raises:
        ArgumentError: no array, one in host memory, shapes or dtypes that don't agree.
        ArgumentIndexError: dim is out of range.
        UnsupportedError: an entry is no supported array.
    """
    arrays, alike = uniform_views_of(tensors, call, name)
    shape = arrays[0].data.shape
    if not shape and not any([array.data.ndim for array in arrays]):
        arrays = [View(array.obj, array.data.reshape(1), array.device, array.kind) for array in arrays]
        shape = (1,)
    dim = check_dim(dim, len(shape), call)
    if not alike:
        check_alike(arrays, call, name, dim)
    counts = [shape[dim]] * len(arrays) if alike else [array.data.shape[dim] for array in arrays]
    whole = (*shape[:dim], sum(counts), *shape[dim + 1 :])
    return arrays, dim, whole, chunk_slices(counts, dim)
