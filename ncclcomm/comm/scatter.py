"""In-process scatter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ncclcomm.arrays import View, empty_on
from ncclcomm.chunks import check_chunk_sizes, check_dim, chunk_slices, even_counts, torch_chunk_counts
from ncclcomm.comm._common import check_outs, devices_of, one_of, part_of, peer_of, view_of, views_of
from ncclcomm.devices.base import StreamImpl
from ncclcomm.devices.event import stream_impl
from ncclcomm.errors import ArgumentError

__all__ = ["scatter"]

_CALL = "scatter"


def scatter(
    tensor: Any,
    devices: Iterable[Any] | None = None,
    chunk_sizes: Iterable[int] | None = None,
    dim: int = 0,
    streams: Sequence[Any] | None = None,
    *,
    out: Iterable[Any] | None = None,
    balanced: bool = False,
) -> tuple[Any, ...]:
    """Cut an array along a dimension and give each device of this process a chunk.

    Args:
        tensor: the array to cut, on a device or in host memory, of one dimension or more.
        devices: the devices to scatter to, in the order of the chunks.
        chunk_sizes: elements along dim for each device; they sum to tensor.shape[dim]. None cuts as torch.chunk does:
            chunks of ceil(n / len(devices)), the last one smaller, and FEWER chunks than devices when n runs out
            (5 rows over 4 devices are chunks of 2, 2 and 1; the fourth device gets none).
        dim: the dimension to cut; a negative one counts from the last.
        streams: for each device (or array of out) a Stream of it to copy on, or None for its current one.
        out: in place of devices: arrays to fill, whose sizes along dim are the chunk sizes; not with chunk_sizes.
        balanced: without chunk_sizes, cut as numpy.array_split, so that every device gets a chunk.

    Returns:
        A tuple of the chunks. A chunk for tensor's own device is a view of tensor; the others are new and C-contiguous,
        ordered on their device's current stream, or on the given one. With out: a tuple of out's arrays.

    Raises:
        ArgumentError: bad devices, chunk sizes, streams or out; tensor has no dimension.
        ArgumentIndexError: dim is out of range.
        UnsupportedError: tensor is no supported array.

    See: torch.cuda.comm.scatter, torch.chunk.
    """
    one_of(devices, out, _CALL)
    source = view_of(tensor, _CALL, "tensor")
    data, home = source.data, source.device
    dim = check_dim(dim, data.ndim, _CALL)
    if out is not None:
        return _scatter_out(source, out, chunk_sizes, dim, streams)
    assert devices is not None
    n = data.shape[dim]
    targets = devices_of(devices, _CALL)
    if chunk_sizes is not None:
        counts = check_chunk_sizes(chunk_sizes, len(targets), n, _CALL, "devices")
    else:
        counts = (even_counts if balanced else torch_chunk_counts)(n, len(targets))
    impls = [] if streams is None else _streams_of(streams, targets)
    peer = peer_of(source.kind)
    shape, dtype = list(data.shape), data.dtype
    results, outs, places, used = [], [], [], []
    for index, place in enumerate(chunk_slices(counts, dim)):
        device = targets[index]
        if device == home:
            results.append(View(part_of(source, place), None, device))
            continue
        shape[dim] = counts[index]
        target = empty_on(peer.backend, tuple(shape), dtype, device, source.kind)
        outs.append(target)
        places.append(place)
        results.append(target)
        if impls:
            used.append(impls[index])
    peer.scatter_views(outs, source, places, used)
    return tuple([found.obj for found in results])


def _scatter_out(source: View, out: Iterable[Any], chunk_sizes: Any, dim: int, streams: Any) -> tuple[Any, ...]:
    """Scatter into the caller's arrays."""
    if chunk_sizes is not None:
        raise ArgumentError(f"{_CALL}: chunk_sizes doesn't go with out, whose sizes along dim say the chunks")
    outs = views_of(out, _CALL, "out")
    shape = source.data.shape
    counts = []
    for index, target in enumerate(outs):
        if target.data.ndim != len(shape):
            raise ArgumentError(
                f"{_CALL}: out[{index}] has {target.data.ndim} dimensions; expected {len(shape)} as tensor"
            )
        counts.append(target.data.shape[dim])
    if sum(counts) != shape[dim]:
        raise ArgumentError(f"{_CALL}: out's sizes along dim {dim} sum to {sum(counts)}; tensor has {shape[dim]}")
    shapes = [(*shape[:dim], count, *shape[dim + 1 :]) for count in counts]
    check_outs(outs, shapes, source.data.dtype, _CALL, (source,))
    impls = [] if streams is None else _streams_of(streams, [target.device for target in outs])
    peer_of(outs[0].kind).scatter_views(outs, source, chunk_slices(counts, dim), impls)
    return tuple([target.obj for target in outs])


def _streams_of(streams: Sequence[Any], devices: Sequence[int]) -> list[StreamImpl | None]:
    """The streams to copy on, one a device.

    Raises:
        ArgumentError: not a sequence of Stream or None, too few, or one of another device.
    """
    if isinstance(streams, (str, bytes)) or not isinstance(streams, Sequence):
        raise ArgumentError(f"{_CALL}: streams must be a sequence of Stream or None, not {streams!r}")
    if len(streams) != len(devices):
        raise ArgumentError(f"{_CALL}: streams has {len(streams)} entries for {len(devices)} devices")
    impls: list[StreamImpl | None] = []
    for index, (stream, device) in enumerate(zip(streams, devices, strict=True)):
        try:
            impl = None if stream is None else stream_impl(stream)
        except ArgumentError as error:
            raise ArgumentError(f"{_CALL}: streams[{index}]: {error}") from error
        if impl is not None and impl.device != device:
            raise ArgumentError(
                f"{_CALL}: streams[{index}] is of device {impl.device}; expected one of device {device}"
            )
        impls.append(impl)
    return impls
