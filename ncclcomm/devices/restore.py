"""What the `with` blocks of this thread restore when they are left.

It is kept per thread and not on the object that is entered, so that one object may be entered twice, and by two
threads.
"""

from __future__ import annotations

import threading

from ncclcomm.devices.base import DeviceBackend, StreamImpl
from ncclcomm.errors import ArgumentError

__all__ = ["enter_device", "enter_stream", "leave"]

_Entry = tuple[object, DeviceBackend, int, tuple[StreamImpl, ...]]


class _Entries(threading.local):
    """The blocks that a thread is in: their owner, and the backend, device (-1: none) and streams to restore."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []


_thread = _Entries()


def enter_device(owner: object, backend: DeviceBackend, device: int) -> None:
    """Make a device current until `leave(owner)`; a negative one changes and restores nothing."""
    before = -1
    if device >= 0:
        before = backend.current_device()
        if before != device:
            backend.set_device(device)
    _thread.entries.append((owner, backend, before, ()))


def enter_stream(owner: object, backend: DeviceBackend, stream: StreamImpl | None) -> None:
    """Make a stream and its device current until `leave(owner)`; None changes and restores nothing."""
    if stream is None:
        _thread.entries.append((owner, backend, -1, ()))
        return
    device = backend.current_device()
    streams: tuple[StreamImpl, ...] = (backend.current_stream(device),)
    if stream.device != device:
        streams = (backend.current_stream(stream.device), *streams)
    entry: _Entry = (owner, backend, device, streams)
    try:
        backend.set_current_stream(stream)
        if stream.device != device:
            backend.set_device(stream.device)
    except BaseException:
        _restore(entry)
        raise
    _thread.entries.append(entry)


def leave(owner: object) -> None:
    """Restore what the owner's last block of this thread found.

    Raises:
        ArgumentError: this thread is in no block of the owner.
    """
    entries = _thread.entries
    # Blocks of generators and coroutines may end in another order than last in, first out.
    for place in range(len(entries) - 1, -1, -1):
        if entries[place][0] is owner:
            _restore(entries.pop(place))
            return
    raise ArgumentError(f"{owner!r} was left in a thread that had not entered it")


def _restore(entry: _Entry) -> None:
    """Put an entry's streams and device back."""
    _, backend, device, streams = entry
    for stream in streams:
        backend.set_current_stream(stream)
    if device >= 0 and backend.current_device() != device:
        backend.set_device(device)
