"""In-process scatter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ncclcomm.arrays import HOST_MEMORY, View, check_out, empty_on, view
from ncclcomm.chunks import check_chunk_sizes, check_dim, chunk_slices, even_counts, torch_chunk_counts
from ncclcomm.comm._common import devices_of, one_of, peer_of, views_of
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
        streams: for each device a Stream of it to copy on, or None for its current one; not with out.
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
    source = view(tensor, f"{_CALL}: tensor")
    dim = check_dim(dim, source.data.ndim, _CALL)
    n = source.data.shape[dim]
    if out is not None:
        return _scatter_out(source, out, chunk_sizes, dim, streams)
    assert devices is not None
    targets = devices_of(devices, _CALL)
    if chunk_sizes is not None:
        counts = check_chunk_sizes(chunk_sizes, len(targets), n, _CALL, "devices")
    else:
        counts = (even_counts if balanced else torch_chunk_counts)(n, len(targets))
    impls = _streams_of(streams, targets)
    peer = peer_of()
    results = []
    for device, index, stream in zip(targets, chunk_slices(counts, dim), impls, strict=False):
        if device == source.device:
            results.append(source.obj[index])
            continue
        part = View(None, source.data[index], source.device)
        target = empty_on(peer.backend, part.data.shape, part.data.dtype, device)
        peer.copy(target, part, stream)
        results.append(target.obj)
    return tuple(results)


def _scatter_out(source: View, out: Iterable[Any], chunk_sizes: Any, dim: int, streams: Any) -> tuple[Any, ...]:
    """Scatter into the caller's arrays."""
    if chunk_sizes is not None or streams is not None:
        raise ArgumentError(f"{_CALL}: chunk_sizes and streams don't go with out, whose sizes along dim say the chunks")
    outs = views_of(out, _CALL, "out")
    n = source.data.shape[dim]
    for index, target in enumerate(outs):
        if target.device == HOST_MEMORY:
            raise ArgumentError(f"{_CALL}: out[{index}] is in host memory; expected an array of a device")
        if target.data.ndim != source.data.ndim:
            raise ArgumentError(
                f"{_CALL}: out[{index}] has {target.data.ndim} dimensions; expected {source.data.ndim} as tensor"
            )
    counts = [target.data.shape[dim] for target in outs]
    if sum(counts) != n:
        raise ArgumentError(f"{_CALL}: out's sizes along dim {dim} sum to {sum(counts)}; tensor has {n}")
    for index, target in enumerate(outs):
        shape = list(source.data.shape)
        shape[dim] = counts[index]
        check_out(target, shape, source.data.dtype, f"{_CALL}: out[{index}]", [source, *outs[:index]])
    peer = peer_of()
    for target, place in zip(outs, chunk_slices(counts, dim), strict=True):
        peer.copy(target, View(None, source.data[place], source.device))
    return tuple(target.obj for target in outs)


def _streams_of(streams: Sequence[Any] | None, devices: Sequence[int]) -> list[StreamImpl | None]:
    """The streams to copy on, one a device.

    Raises:
        ArgumentError: not a sequence of Stream or None, too few, or one of another device.
    """
    if streams is None:
        return [None] * len(devices)
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
