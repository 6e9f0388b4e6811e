"""The contract of a device backend: devices, streams, events and the memory on them.

A backend (`host.py`, `cuda.py`) implements these classes; the `torch.cuda`-style functions and the public `Stream` and
`Event` are written once, on top of them. A device knows no ranks.

Ordering, for every backend: a stream runs its work in the order in which it was enqueued; two streams are unordered
unless an event, or a synchronisation of the host, orders them. All calls enqueue and return unless they say they wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["DeviceBackend", "EventImpl", "StreamImpl"]


class EventImpl(ABC):
    """A backend's event: a mark in a stream's work. It exists on a device from its first record on."""

    device: int | None
    """Device of the stream that recorded it; None before the first record."""

    @abstractmethod
    def record(self, stream: StreamImpl) -> None:
        """Mark the end of the work now enqueued on `stream`, replacing an earlier mark."""

    @abstractmethod
    def wait(self, stream: StreamImpl) -> None:
        """Make later work of `stream` wait for the mark; nothing if never recorded."""

    @abstractmethod
    def query(self) -> bool:
        """True if the marked work is complete, or the event was never recorded."""

    def poll(self) -> bool:
        """As `query`, for a thread that only watches: it breaks no graph capture of another thread.

        Where the answer has to wait inside a driver, the interpreter's other threads go on.

        Raises:
            DeviceError: the device is broken, so that its work never completes.
        """
        return self.query()

    @abstractmethod
    def synchronize(self) -> None:
        """Wait on the host for the marked work; nothing if never recorded."""

    @abstractmethod
    def elapsed_ms(self, end: EventImpl) -> float:
        """Milliseconds between this mark and `end`'s.

        Raises:
            ArgumentError: with a message of its own each: made without timing, not recorded, not completed, recorded
                on different devices.
        """

    @abstractmethod
    def ipc_handle(self) -> bytes:
        """A handle from which another process of this host opens the event."""


class StreamImpl(ABC):
    """A backend's stream: a queue of work on one device."""

    device: int
    priority: int
    """The effective priority; a lower number is more urgent."""
    handle: int
    """The runtime's own handle (cudaStream_t), or a number that is unique in the process."""

    @abstractmethod
    def query(self) -> bool:
        """True if all work enqueued so far is complete."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait on the host for all work enqueued so far; an error that the work raised is raised here."""

    @abstractmethod
    def launch(self, fn: Callable[..., object], *args: Any) -> None:
        """Enqueue a Python callable: it runs once, after the work before it and before the work after it."""


class DeviceBackend(ABC):
    """The devices of one kind that this process sees. Device numbers run from 0 to device_count() - 1."""

    name: str
    """'host' or 'cuda'."""

    array_class: Any = None
    """Arrays of exactly this class need no look at what they are; None where there is no such class."""

    immediate: bool = False
    """True where every stream runs its work inside the call that enqueues it, so that waits have nothing to order."""

    @abstractmethod
    def device_count(self) -> int:
        """How many devices there are; starts no runtime."""

    @abstractmethod
    def current_device(self) -> int:
        """The calling thread's current device; 0 in a new thread."""

    @abstractmethod
    def set_device(self, device: int) -> None:
        """Make a valid device number the calling thread's current device."""

    @abstractmethod
    def on_device(self, device: int) -> AbstractContextManager[object]:
        """A context in which the device is the current one, where making and copying arrays depends on that."""

    @abstractmethod
    def synchronize(self, device: int) -> None:
        """Wait on the host for all streams of the device."""

    @abstractmethod
    def priority_range(self) -> tuple[int, int]:
        """(least urgent, most urgent) stream priority, such as (0, -5)."""

    @abstractmethod
    def create_stream(self, device: int, priority: int) -> StreamImpl:
        """A new stream that does not synchronise with the default stream; the priority is clamped to the range."""

    @abstractmethod
    def default_stream(self, device: int) -> StreamImpl:
        """The device's default stream."""

    @abstractmethod
    def current_stream(self, device: int) -> StreamImpl:
        """The calling thread's current stream of that device; the default stream in a new thread."""

    @abstractmethod
    def set_current_stream(self, stream: StreamImpl) -> None:
        """Make it the calling thread's current stream of its own device; the current device stays."""

    @abstractmethod
    def create_event(self, *, timing: bool, blocking: bool, interprocess: bool) -> EventImpl:
        """A new, unrecorded event."""

    def order(self, first: StreamImpl, later: StreamImpl) -> None:
        """Make later's future work wait for first's present work; streams of any devices."""
        event = self.create_event(timing=False, blocking=False, interprocess=False)
        event.record(first)
        event.wait(later)

    def record_current(self, event: EventImpl, device: int) -> bool:
        """Record an event on the calling thread's current stream of a device, which must be its current device.

        Args:
            event: the event, for `poll`.
            device: the device.

        Returns:
            False where that stream is being captured into a graph: its work doesn't run now, and nothing was recorded.
        """
        event.record(self.current_stream(device))
        return True

    @abstractmethod
    def open_event(self, handle: bytes, device: int) -> EventImpl:
        """The event behind an `ipc_handle` of another process of this host."""

    @abstractmethod
    def blas_handle(self) -> int:
        """The BLAS library's handle of the current device, bound to the current stream.

        Raises:
            BackendUnavailableError: the backend has no such library.
        """

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: Any, device: int) -> Any:
        """An uninitialised C-contiguous array on the device, in the backend's own array class."""

    @abstractmethod
    def array_namespace(self) -> Any:
        """The module, or what acts as one, whose functions make and take the backend's arrays."""

    @abstractmethod
    def device_of(self, array: Any) -> int | None:
        """The device number of one of the backend's own arrays; None for anything else."""

    @abstractmethod
    def copy(self, dst: Any, src: Any, stream: StreamImpl) -> None:
        """Enqueue `dst[...] = src` on a stream; same shape and dtype, any strides, either side on any device or host.

        Both arrays are held until the copy is done. A copy to host memory may be done later than the call.
        """

    @abstractmethod
    def reduce(self, out: Any, arrays: list[Any], op: str, stream: StreamImpl) -> None:
        """Enqueue out = arrays[0] op arrays[1] op ..., in that order, on a stream of out's device.

        All are of one shape; arrays may be of any devices, and out may be any one of them. They are held until it is
        done.

        Args:
            out: the result, in native byte order.
            arrays: the terms, of out's dtype in any byte order.
            op: 'sum', 'prod', 'min' or 'max', as `ncclcomm.reductions` defines them.
            stream: the stream.
        """

    def copy_plain(self, copies: Sequence[tuple[Any, int, Any, int, int]]) -> bool:
        """Enqueue copies of bytes, ordered with all of them, where the backend has a quicker way for these.

        Args:
            copies: an array to copy to and the byte in it to begin at, the same of the array to copy from, and how many
                bytes; each is done on the current stream of the device that it writes to.

        Returns:
            False, with nothing done, where it hasn't.
        """
        return False

    def sum_plain(self, jobs: Sequence[tuple[Any, Sequence[Any]]]) -> bool:
        """As copy_plain, for sums: results, each with its terms, in their order, of one shape and dtype."""
        return False

    def keep(self, device: int, *objects: Any) -> None:
        """Keep objects alive until the work now on the device's current stream is done, where that runs later."""
        if not self.immediate:
            self.current_stream(device).launch(lambda *_: None, *objects)

    def refuse_capture(self, device: int, why: str) -> None:
        """Raise where the device's current stream is captured into a graph, for what can't be.

        Args:
            device: the device.
            why: what it is, such as 'data of this call goes through host memory'.

        Raises:
            UnsupportedError: it is captured.
        """
        return

    def settle(self) -> bool:
        """Wait until nothing is kept for work of streams any more, some seconds at the most; False if nothing was."""
        return False

    @abstractmethod
    def must_snapshot(self, array: Any) -> bool:
        """True if a copy from this NumPy array may read it later than the call that enqueues the copy."""

    @abstractmethod
    def uuid(self, device: int) -> str:
        """The device's identity, by which processes of one host tell whether they share it."""
