"""In-process broadcast and reduce_add of many arrays in one call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ncclcomm.arrays import HOST_MEMORY, View, check_one_library, empty_on
from ncclcomm.chunks import whole_number
from ncclcomm.comm._common import check_alike, destination_of, devices_of, list_of, peer_of, view_of
from ncclcomm.errors import ArgumentError
from ncclcomm.reductions import check_reduction

__all__ = ["broadcast_coalesced", "reduce_add_coalesced"]

_BUFFER_BYTES = 10485760
"""torch.cuda.comm's default."""


def broadcast_coalesced(
    tensors: Iterable[Any], devices: Iterable[Any], buffer_size: int = _BUFFER_BYTES
) -> tuple[tuple[Any, ...], ...]:
    """Copy several arrays to several devices of this process.

    As one `broadcast` an array, with less to wait for: each stream waits once for all the arrays' copies.

    Args:
        tensors: the arrays to copy, each of any shape and dtype, on a device or in host memory; there may be none.
        devices: the devices to copy to, by number or device object.
        buffer_size: taken as torch takes it, and of no effect: nothing is packed into buffers.

    Returns:
        A tuple with a tuple for each of devices, in their order, of one array for each of tensors, as `broadcast`
        gives it.

    Raises:
        ArgumentError: no device, an unknown one, or a buffer_size that is no number above 0.
        UnsupportedError: an entry is no supported array, or of a dtype that holds references.

    See: torch.cuda.comm.broadcast_coalesced.
    """
    call = "broadcast_coalesced"
    _check_buffer_size(buffer_size, call)
    sources = _views_of(tensors, call, "tensors")
    check_one_library(sources, call)
    kind = sources[0].kind if sources else None
    if sources and sources[0].device == HOST_MEMORY:
        # Its library makes the results, on its own streams: those of the arrays that are on GPUs too.
        check_one_library([View(None, None, 0, kind), *sources], call)
    peer = peer_of(kind)
    results, pairs = [], []
    for device in devices_of(devices, call):
        copies = []
        for source in sources:
            if device == source.device:
                copies.append(source)
                continue
            target = empty_on(peer.backend, source.data.shape, source.data.dtype, device, kind)
            pairs.append((target, source))
            copies.append(target)
        results.append(copies)
    peer.copy_all(pairs)
    return tuple([tuple([found.obj for found in copies]) for copies in results])


def reduce_add_coalesced(
    inputs: Iterable[Iterable[Any]], destination: Any = None, buffer_size: int = _BUFFER_BYTES
) -> tuple[Any, ...]:
    """Sum several arrays of several devices of this process onto one device.

    As one `reduce_add` an array, with less to wait for: each stream waits once for all the sums.

    Args:
        inputs: for each device a list of its arrays; the lists are of one length, and at each place in them the arrays
            are as `reduce_add` takes them.
        destination: the device that gets the sums: a number or device object, None for the current device, 'cpu' or -1
            for host memory.
        buffer_size: taken as torch takes it, and of no effect: nothing is packed into buffers.

    Returns:
        A tuple with the sum for each place in the lists, as `reduce_add` gives it.

    Raises:
        ArgumentError: no list, lists of different lengths, at one place shapes or dtypes that differ or an array in
            host memory, an unknown destination, or a buffer_size that is no number above 0.
        UnsupportedError: an entry is no supported array, or its dtype can't be summed.

    See: torch.cuda.comm.reduce_add_coalesced.
    """
    call = "reduce_add_coalesced"
    _check_buffer_size(buffer_size, call)
    lists = [
        _views_of(arrays, call, f"inputs[{index}]")
        for index, arrays in enumerate(list_of(inputs, call, "inputs", "lists of arrays"))
    ]
    if not lists:
        raise ArgumentError(f"{call}: inputs is empty; expected at least one list of arrays")
    for index, arrays in enumerate(lists):
        if len(arrays) != len(lists[0]):
            told = f"inputs[{index}] has {len(arrays)} arrays; expected {len(lists[0])} as inputs[0]"
            raise ArgumentError(f"{call}: {told}")
    device = destination_of(destination, call)
    terms = [list(some) for some in zip(*lists, strict=True)]
    for place, arrays in enumerate(terms):
        check_alike(arrays, call, "inputs", place=f"[{place}]")
        check_reduction("sum", arrays[0].data.dtype, call)
    kind = terms[0][0].kind if terms else None
    for arrays in terms:
        check_one_library((terms[0][0], *arrays), call)
    peer = peer_of(kind)
    results, jobs = [], []
    for arrays in terms:
        first = arrays[0]
        dtype = first.data.dtype
        if len(arrays) == 1 and first.device == device and dtype.isnative:
            results.append(first)
            continue
        target = empty_on(peer.backend, first.data.shape, dtype.newbyteorder("="), device, kind)
        jobs.append((target, arrays))
        results.append(target)
    peer.reduce_all(jobs, "sum")
    return tuple([found.obj for found in results])


def _views_of(arrays: Any, call: str, name: str) -> list[View]:
    """The arrays of a list argument that may be empty."""
    return [view_of(array, call, name, index) for index, array in enumerate(list_of(arrays, call, name, "arrays"))]


def _check_buffer_size(buffer_size: Any, call: str) -> None:
    """Check an argument that changes nothing as one that did would be."""
    if whole_number(buffer_size, f"{call}: buffer_size") <= 0:
        raise ArgumentError(f"{call}: buffer_size must be above 0, not {buffer_size}")
