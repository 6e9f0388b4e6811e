"""CUDA streams that are used again, and streams of other libraries; imported only where there is a GPU.

CUDA may give the handle of a destroyed stream to the next one at once, while the work of the destroyed one still runs.
CuPy's memory pool, launched callables and their errors go by that handle: the new stream would get memory that the old
work reads. So a stream that was dropped is kept, and handed out again once its work is done.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import cupy

from ncclcomm.devices import cuda_driver
from ncclcomm.devices.cuda_streams import errors

__all__ = ["external", "take"]

MOST_UNUSED = 32
"""Dropped streams that are kept of a device and priority; of more, those whose work is done are destroyed."""

_Dropped = deque[Any]
_dropped: dict[tuple[int, int], _Dropped] = {}


class _Handle:
    """What CuPy asks for the handle of a stream that it doesn't own."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        """Version and handle, as the protocol has them."""
        return 0, self._handle


class _Lease(_Handle):
    """A stream in use: CuPy's objects of it hold this, and with the last of them the stream is dropped."""

    def __init__(self, owned: Any, dropped: _Dropped) -> None:
        super().__init__(owned.ptr)
        self._owned = owned
        self._dropped = dropped

    def __del__(self) -> None:
        """Keep the stream; nothing else, since the collector calls this anywhere."""
        self._dropped.append(self._owned)


def take(device: int, priority: int) -> Any:
    """A non-blocking CuPy stream that nobody uses, whose work is done: a dropped one or a new one.

    Args:
        device: the current device.
        priority: CUDA clamps it.
    """
    dropped = _dropped.setdefault((device, priority), deque())
    owned = _unused(device, dropped)
    if owned is None:
        owned = cupy.cuda.Stream(non_blocking=True, priority=priority)
    return _named(_Lease(owned, dropped), device)


def external(handle: int, device: int) -> Any:
    """A CuPy stream for the handle of another library's stream.

    Args:
        handle: its cudaStream_t.
        device: the current device, which is the stream's.
    """
    return _named(_Handle(handle), device)


def _named(owner: _Handle, device: int) -> Any:
    """A CuPy stream that holds the owner of its handle."""
    stream = cupy.cuda.Stream.from_external(owner)
    stream.device_id = device
    return stream


def _unused(device: int, dropped: _Dropped) -> Any:
    """A dropped stream whose work is done and whose errors were told; None if there is none."""
    for _ in range(min(len(dropped), 2 * MOST_UNUSED)):
        try:
            owned = dropped.popleft()
        except IndexError:  # another thread was quicker
            return None
        if (device, owned.ptr) in errors or not cuda_driver.is_idle(owned.ptr):
            dropped.append(owned)
        elif len(dropped) < MOST_UNUSED:
            return owned
    return None
