"""In-process gather."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ncclcomm.arrays import HOST_MEMORY, View, check_out, empty_on, view
from ncclcomm.chunks import check_dim, chunk_slices
from ncclcomm.comm._common import destination_of, peer_of, views_of
from ncclcomm.errors import ArgumentError

__all__ = ["gather"]

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
    arrays = _lift_scalars(views_of(tensors, _CALL, "tensors"))
    dim = check_dim(dim, arrays[0].data.ndim, _CALL)
    shape = _result_shape(arrays, dim)
    dtype = arrays[0].data.dtype
    peer = peer_of()
    if out is not None:
        target = view(out, f"{_CALL}: out")
        check_out(target, shape, dtype, f"{_CALL}: out", arrays)
    else:
        target = empty_on(peer.backend, shape, dtype, destination_of(destination, _CALL))
    counts = [array.data.shape[dim] for array in arrays]
    for array, index in zip(arrays, chunk_slices(counts, dim), strict=True):
        peer.copy(View(None, target.data[index], target.device), array)
    return target.obj


def _lift_scalars(arrays: list[View]) -> list[View]:
    """0-d arrays as arrays of one element."""
    if any(array.data.ndim for array in arrays):
        return arrays
    return [View(array.obj, array.data.reshape(1), array.device) for array in arrays]


def _result_shape(arrays: list[View], dim: int) -> tuple[int, ...]:
    """The shape of the result, once all inputs agree."""
    first = arrays[0].data
    total = 0
    for index, array in enumerate(arrays):
        name = f"{_CALL}: tensors[{index}]"
        if array.device == HOST_MEMORY:
            raise ArgumentError(f"{name} is in host memory; expected an array of a device")
        if array.data.ndim != first.ndim:
            raise ArgumentError(f"{name} has {array.data.ndim} dimensions; expected {first.ndim} as tensors[0]")
        if array.data.dtype != first.dtype:
            raise ArgumentError(f"{name} has dtype {array.data.dtype}; expected {first.dtype} as tensors[0]")
        expected = (*first.shape[:dim], array.data.shape[dim], *first.shape[dim + 1 :])
        if array.data.shape != expected:
            raise ArgumentError(
                f"{name} has shape {array.data.shape}; expected {expected} as tensors[0] except along dim {dim}"
            )
        total += array.data.shape[dim]
    return (*first.shape[:dim], total, *first.shape[dim + 1 :])
