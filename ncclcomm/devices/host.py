"""Virtual devices in host memory: the backend of machines with no GPU, and of tests.

With `immediate` every stream runs its work inside the call that enqueues it; else every stream, the default ones too,
has a worker thread that runs it later. Streams, events and errors mean the same in both: an error of enqueued work is
raised by the next synchronisation of its stream or device, never by the call that enqueued it.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from ncclcomm.devices.base import DeviceBackend, EventImpl, StreamImpl
from ncclcomm.devices.elapsed import no_timing, not_complete, not_recorded, two_devices
from ncclcomm.devices.host_array import HostArray, as_host_array
from ncclcomm.devices.host_namespace import HostNamespace
from ncclcomm.devices.host_queue import Group, Mark, Queue, queues_of
from ncclcomm.devices.host_work import copy_each, reduce_each
from ncclcomm.devices.host_workers import InlineQueue, WorkerQueue
from ncclcomm.errors import ArgumentError, BackendUnavailableError

__all__ = ["HostBackend", "HostEvent", "HostStream", "queue_of"]

LEAST_PRIORITY, MOST_PRIORITY = 0, -5

_NOTHING = nullcontext()


class HostStream(StreamImpl):
    """A stream of a virtual device."""

    def __init__(self, group: Group, priority: int, handle: int, *, immediate: bool) -> None:
        self.device = group.device
        self.priority = priority
        self.handle = handle
        kind = InlineQueue if immediate else WorkerQueue
        self.queue: Queue = kind(group, str(handle) if handle else "0 (the default)")
        finalizer = weakref.finalize(self, self.queue.retire)
        finalizer.atexit = False

    def query(self) -> bool:
        """True if all work enqueued so far is complete."""
        return self.queue.idle()

    def synchronize(self) -> None:
        """Wait for all work enqueued so far, and raise the first error of this stream since the last time."""
        self.queue.wait_idle()
        self.queue.group.raise_first(self.queue)

    def is_settled(self) -> bool:
        """True if `synchronize` would find nothing to wait for, and no error to raise."""
        return self.queue.idle() and not self.queue.group.has_errors()

    def launch(self, fn: Callable[..., object], *args: Any) -> None:
        """Enqueue a Python callable."""
        self.queue.submit(fn, *args)


class HostEvent(EventImpl):
    """An event of a virtual device."""

    def __init__(self, *, timing: bool) -> None:
        self.device: int | None = None
        self._timing = timing
        self._mark: Mark | None = None

    def record(self, stream: StreamImpl) -> None:
        """Mark the end of the work now enqueued on the stream."""
        self.check_device(stream)
        self._mark = queue_of(stream).mark()
        self.device = stream.device

    def check_device(self, stream: StreamImpl) -> None:
        """Raise for a stream of another device than the event's."""
        if self.device not in (None, stream.device):
            raise ArgumentError(
                f"the event belongs to device {self.device}, where it was first recorded or opened, and can't be "
                f"recorded on a stream of device {stream.device}; use another Event there (waiting across devices is "
                "fine)"
            )

    def wait(self, stream: StreamImpl) -> None:
        """Make later work of the stream wait for the mark that is the latest now."""
        mark = self._mark
        if mark is not None:
            queue_of(stream).wait_mark(mark)

    def query(self) -> bool:
        """True if the latest mark is reached or there is none."""
        mark = self._mark
        if mark is None or mark.done:
            return True
        mark.check_generation()
        return False

    def synchronize(self) -> None:
        """Wait for the latest mark."""
        mark = self._mark
        if mark is not None:
            mark.wait()

    def elapsed_ms(self, end: EventImpl) -> float:
        """Milliseconds from this mark to the end's, by the host's monotonic clock."""
        if not isinstance(end, HostEvent):
            raise ArgumentError(f"elapsed_time: {type(end).__name__} is not an event of the host backend")
        events = (("start", self), ("end", end))
        for which, event in events:
            if not event._timing:
                raise no_timing(which)
        for which, event in events:
            if event._mark is None:
                raise not_recorded(which)
        if self.device != end.device:
            raise two_devices(self.device, end.device)
        first, last = self._reached("start"), end._reached("end")
        return (last - first) * 1e3

    def _reached(self, which: str) -> float:
        """When the latest mark was reached, in seconds."""
        mark = self._mark
        if mark is None or not mark.done:
            raise not_complete(which)
        return mark.time_s

    def ipc_handle(self) -> bytes:
        """Refused: SharedEvent has one."""
        raise ArgumentError("ipc_handle: the event was made without interprocess=True")


class _ThreadState(threading.local):
    """What a thread has made current; a new thread starts on device 0, on default streams."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, StreamImpl] = {}


class HostBackend(DeviceBackend):
    """A number of virtual devices, whose memory is the host's.

    Args:
        devices: how many there are, at least 1.
        immediate: streams run their work inside the call that enqueues it; else each has a worker that runs it later.
    """

    name = "host"

    def __init__(self, devices: int, *, immediate: bool = True) -> None:
        self.immediate = immediate
        self._groups = [Group(device) for device in range(devices)]
        self._defaults = [HostStream(group, LEAST_PRIORITY, 0, immediate=immediate) for group in self._groups]
        self._handles = itertools.count(1)
        self._current = _ThreadState()
        self._namespace = HostNamespace(np, self.current_device)

    def device_count(self) -> int:
        """How many virtual devices there are."""
        return len(self._groups)

    def current_device(self) -> int:
        """The calling thread's current device."""
        return self._current.device

    def set_device(self, device: int) -> None:
        """Make a device the calling thread's current one."""
        self._current.device = device

    def on_device(self, device: int) -> AbstractContextManager[object]:
        """A context that does nothing: arrays are made on the device that is named."""
        return _NOTHING

    def synchronize(self, device: int) -> None:
        """Wait for all streams of the device, and raise the first error of their work since the last time."""
        group = self._groups[device]
        for queue in queues_of(group):
            queue.wait_idle()
        group.raise_first()

    def priority_range(self) -> tuple[int, int]:
        """The range of CUDA's present GPUs. Here priorities are kept, and change nothing."""
        return LEAST_PRIORITY, MOST_PRIORITY

    def create_stream(self, device: int, priority: int) -> HostStream:
        """A new stream."""
        effective = min(max(priority, MOST_PRIORITY), LEAST_PRIORITY)
        return HostStream(self._groups[device], effective, next(self._handles), immediate=self.immediate)

    def default_stream(self, device: int) -> HostStream:
        """The device's default stream; its handle is 0."""
        return self._defaults[device]

    def current_stream(self, device: int) -> StreamImpl:
        """The calling thread's current stream of the device."""
        return self._current.streams.get(device) or self._defaults[device]

    def set_current_stream(self, stream: StreamImpl) -> None:
        """Make a stream the calling thread's current one of its device."""
        self._current.streams[stream.device] = stream

    def create_event(self, *, timing: bool, blocking: bool, interprocess: bool) -> HostEvent:
        """A new event. Waiting for it never spins, so `blocking` changes nothing."""
        if interprocess:
            from ncclcomm.devices.host_ipc import SharedEvent

            return SharedEvent(self.current_device)
        return HostEvent(timing=timing)

    def open_event(self, handle: bytes, device: int) -> EventImpl:
        """The event behind another process's handle."""
        from ncclcomm.devices.host_ipc import SharedEvent

        return SharedEvent.opened(handle, device)

    def blas_handle(self) -> int:
        """Refused: virtual devices have no cuBLAS."""
        raise BackendUnavailableError(
            "current_blas_handle: the host backend has no cuBLAS; it needs a GPU and NCCLCOMM_DEVICES=cuda"
        )

    def empty(self, shape: tuple[int, ...], dtype: Any, device: int) -> HostArray:
        """An uninitialised array on the device."""
        return as_host_array(np.empty(shape, dtype), device)

    def array_namespace(self) -> HostNamespace:
        """NumPy's functions, making arrays of the calling thread's current device."""
        return self._namespace

    def device_of(self, array: Any) -> int | None:
        """The number of a HostArray's device."""
        return array.device.id if isinstance(array, HostArray) else None

    def copy(self, dst: Any, src: Any, stream: StreamImpl) -> None:
        """Enqueue the copy, on plain views that hold both arrays."""
        queue_of(stream).submit(copy_each, [(np.asarray(dst), np.asarray(src))])

    def reduce(self, out: Any, arrays: list[Any], op: str, stream: StreamImpl) -> None:
        """Enqueue the reduction, on plain views that hold the arrays."""
        queue_of(stream).submit(reduce_each, np.asarray(out), [np.asarray(array) for array in arrays], op)

    def must_snapshot(self, array: Any) -> bool:
        """True where workers run copies later."""
        return not self.immediate

    def uuid(self, device: int) -> str:
        """A name of this process alone: other processes' virtual devices are other ones."""
        return f"host-{os.getpid()}-{device}"


def queue_of(stream: StreamImpl) -> Queue:
    """The queue of a stream of this backend."""
    if not isinstance(stream, HostStream):
        raise ArgumentError(f"{type(stream).__name__} is not a stream of the host backend")
    return stream.queue
