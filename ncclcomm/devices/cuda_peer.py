"""Copies and sums among the GPUs of one process, in the fewest calls; imported only where there is a GPU.

Only the plain case is here: C-contiguous CuPy arrays, on current streams. The rest goes the long way, by cuda_memory.
Either way all work waits for what is queued on the current stream of each device involved, and these then wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cupy
from cupy.cuda import get_current_stream, runtime

from ncclcomm.devices import cuda_driver
from ncclcomm.devices.cuda_held import hold_until, keep_for_good, unused_event
from ncclcomm.devices.cuda_memory import enable_peer
from ncclcomm.devices.cuda_streams import is_capturing, marks, raise_ours
from ncclcomm.devices.cuda_sum import MOST_TERMS, sum_kernel, sum_type

__all__ = ["Copy", "copy_plain", "sum_plain"]

Copy = tuple[Any, int, Any, int, int]
"""An array to copy to and the byte in it to begin at, the same of the array to copy from, and how many bytes."""

_Sum = tuple[Callable[[int, Sequence[int], int], None], Any, Sequence[Any]]
"""What launches a kernel, its result and its terms."""

_Uses = dict[int, dict[int, None]]
"""Devices that work, each with the other devices whose memory it reads."""

_WITHIN, _ANY = 3, 4
"""cudaMemcpyDeviceToDevice and cudaMemcpyDefault."""

_PER_THREAD = 2
"""Handle of the stream that each thread has of the current device, where CuPy is told to use these."""

_ndarray = cupy.ndarray


def copy_plain(copies: Sequence[Copy]) -> bool:
    """Copy bytes, each copy on the current stream of the device that it writes to; not ordered with each other.

    Returns:
        False, with nothing done, where an array isn't plain.

    Raises:
        DeviceError: CUDA refuses.
    """
    try:
        return _copy_plain(copies)
    except RuntimeError as error:
        raise_ours(error, "copy")


def _copy_plain(copies: Sequence[Copy]) -> bool:
    """See copy_plain."""
    uses: _Uses = {}
    for dst, _, src, _, _ in copies:
        if type(dst) is not _ndarray or type(src) is not _ndarray or not (dst._c_contiguous and src._c_contiguous):
            return False
        here, there = dst.data.device_id, src.data.device_id
        others = uses.get(here)
        if others is None:
            others = uses[here] = {}
        if here != there and there not in others:
            others[there] = None
            enable_peer(here, there)
    _run(uses, _copy, copies)
    return True


def _copy(copies: Sequence[Copy], streams: dict[int, int], is_captured: bool) -> None:
    """Enqueue copies; any device may be the current one afterwards."""
    now = -1
    for dst, dst_at, src, src_at, nbytes in copies:
        if not nbytes:
            continue
        to, source = dst.data, src.data
        here, there = to.device_id, source.device_id
        if here != now:
            runtime.setDevice(here)
            now = here
        if here == there:
            runtime.memcpyAsync(to.ptr + dst_at, source.ptr + src_at, nbytes, _WITHIN, streams[here])
        elif is_captured:  # which memcpyPeerAsync can't be
            runtime.memcpyAsync(to.ptr + dst_at, source.ptr + src_at, nbytes, _ANY, streams[here])
        else:
            runtime.memcpyPeerAsync(to.ptr + dst_at, here, source.ptr + src_at, there, nbytes, streams[here])


def sum_plain(jobs: Sequence[tuple[Any, Sequence[Any]]]) -> bool:
    """Add arrays of any devices in their order, each sum on the current stream of its result's device.

    Terms of other devices are loaded from there as they are added, with no memory in between.

    Args:
        jobs: results, each with its terms, of one shape and dtype; a result may be one of its own terms.

    Returns:
        False, with nothing done, where an array isn't plain or a device can't load from another.

    Raises:
        DeviceError: CUDA refuses.
        BackendUnavailableError: CuPy can't compile the kernel.
    """
    try:
        return _sum_plain(jobs)
    except RuntimeError as error:
        raise_ours(error, "sum")


def _sum_plain(jobs: Sequence[tuple[Any, Sequence[Any]]]) -> bool:
    """See sum_plain."""
    uses: _Uses = {}
    sums: list[_Sum] = []
    for out, terms in jobs:
        if type(out) is not _ndarray or not out._c_contiguous or not 2 <= len(terms) <= MOST_TERMS:
            return False
        dtype, here = out.dtype, out.data.device_id
        if not out.size or sum_type(dtype) is None:
            return False
        others = uses.setdefault(here, {})
        for term in terms:
            if type(term) is not _ndarray or not term._c_contiguous or term.dtype != dtype:
                return False
            there = term.data.device_id
            if there != here:
                if not (enable_peer(here, there) and cuda_driver.is_plainly_allocated(term.data.ptr)):
                    return False
                others[there] = None
        sums.append((sum_kernel(dtype, len(terms), here), out, terms))
    _run(uses, _sum, sums)
    return True


def _sum(sums: Sequence[_Sum], streams: dict[int, int], is_captured: bool) -> None:
    """Enqueue sums; any device may be the current one afterwards."""
    for launch, out, terms in sums:
        runtime.setDevice(out.data.device_id)
        launch(out.data.ptr, [term.data.ptr for term in terms], out.size)


def _run(uses: _Uses, enqueue: Callable[[Any, dict[int, int], bool], None], jobs: Sequence[Any]) -> None:
    """Enqueue work between the waits that order it."""
    streams: dict[int, int] = {}
    captured: list[int] = []
    home = runtime.getDevice()
    try:
        for here, others in uses.items():
            for device in (here, *others):
                if device not in streams:
                    stream = streams[device] = get_current_stream(device).ptr
                    if stream == _PER_THREAD:
                        runtime.setDevice(device)
                    if is_capturing(stream):
                        captured.append(device)
        if captured:
            _join_capture(captured[0], streams)
        _wait_before(uses, streams)
        try:
            enqueue(jobs, streams, bool(captured))
        finally:
            _wait_after(uses, streams, jobs, keep_for_good if captured else hold_until)
            for device in captured:
                _leave_capture(device, streams)
    finally:
        runtime.setDevice(home)


def _join_capture(captured: int, streams: dict[int, int]) -> None:
    """Have all streams of a call be captured into one graph; what was queued on the others is no part of it."""
    runtime.setDevice(captured)
    mark = marks.of(captured)
    runtime.eventRecord(mark, streams[captured])
    for device, stream in streams.items():
        runtime.setDevice(device)
        if not is_capturing(stream):
            runtime.streamWaitEvent(stream, mark)


def _leave_capture(captured: int, streams: dict[int, int]) -> None:
    """Have a stream that was captured before wait for the others: the one that began the capture can't end it else."""
    for device, stream in streams.items():
        if device != captured:
            runtime.setDevice(device)
            mark = marks.of(device)
            runtime.eventRecord(mark, stream)
            runtime.setDevice(captured)
            runtime.streamWaitEvent(streams[captured], mark)


def _wait_before(uses: _Uses, streams: dict[int, int]) -> None:
    """Make each device that works wait for what is queued on the others whose memory it uses."""
    queued: dict[int, int] = {}
    for others in uses.values():
        for device in others:
            if device not in queued:
                runtime.setDevice(device)
                mark = queued[device] = marks.of(device)
                runtime.eventRecord(mark, streams[device])
    for here, others in uses.items():
        if others:
            runtime.setDevice(here)
            stream = streams[here]
            for device in others:
                runtime.streamWaitEvent(stream, queued[device])


def _wait_after(uses: _Uses, streams: dict[int, int], used: Sequence[Any], keep: Callable[..., None]) -> None:
    """Make the others wait for each device's work, and keep what it uses until it is done."""
    for here, others in uses.items():
        runtime.setDevice(here)
        stream = streams[here]
        done = unused_event(here)
        runtime.eventRecord(done.ptr, stream)
        for device in others:
            runtime.setDevice(device)
            runtime.streamWaitEvent(streams[device], done.ptr)
        keep(done, here, stream, used)
