"""The public `Stream`, and what makes one current; as torch.cuda.Stream, torch.cuda.stream."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from types import TracebackType
from typing import Any

from ncclcomm.devices.base import DeviceBackend, StreamImpl
from ncclcomm.devices.event import Event, as_event, backend_and_stream, stream_impl
from ncclcomm.devices.index import resolve_device
from ncclcomm.devices.registry import current_backend
from ncclcomm.devices.restore import enter_stream, leave
from ncclcomm.errors import ArgumentError, UnsupportedError

__all__ = ["ExternalStream", "Stream", "StreamContext", "current_stream", "default_stream", "stream"]


class Stream:
    """A queue of work on one device, run in order and independently of other streams.

    It doesn't synchronise with the default stream. Used as a context manager it is as `stream(s)`.

    Args:
        device: the device, as `resolve_device` takes it; None or negative: the current one.
        priority: lower is more urgent; out of the device's range it is clamped, and `priority` says to what.
        **kwargs: none is known; torch's own (stream_id, device_index, device_type) mean nothing here.

    Raises:
        ArgumentError: no such device, a priority that is no int, or an unknown keyword.

    See: torch.cuda.Stream.
    """

    __slots__ = ("__weakref__", "_backend", "_impl")

    _backend: DeviceBackend
    _impl: StreamImpl

    def __init__(self, device: Any = None, priority: Any = 0, **kwargs: Any) -> None:
        if kwargs:
            raise ArgumentError(f"Stream: unknown keyword {', '.join(sorted(kwargs))}; it takes device and priority")
        if isinstance(priority, bool) or not isinstance(priority, Integral):
            raise ArgumentError(f"Stream: priority={priority!r} is not an int; 0 is the least urgent, lower is more")
        number = resolve_device(device, optional=True)
        self._backend = current_backend()
        self._impl = self._backend.create_stream(number, int(priority))

    @property
    def device(self) -> int:
        """The number of its device."""
        return self._impl.device

    @property
    def priority(self) -> int:
        """The effective priority; lower is more urgent."""
        return self._impl.priority

    @property
    def handle(self) -> int:
        """The runtime's handle, on CUDA the cudaStream_t; on the host a number, 0 for each device's default stream."""
        return self._impl.handle

    @property
    def cuda_stream(self) -> int:
        """The handle, by torch's name for it."""
        return self._impl.handle

    def query(self) -> bool:
        """True if all work enqueued so far is complete; never waits."""
        return self._impl.query()

    def synchronize(self) -> None:
        """Wait on the host for all work enqueued so far.

        Raises:
            DeviceError: the stream's work raised since its last synchronisation; the first error is the cause.
        """
        self._impl.synchronize()

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event at the end of the work enqueued so far.

        Args:
            event: the event; None: a new one, without timing.

        Returns:
            The recorded event.

        Raises:
            ArgumentError: not an event, or one that belongs to another device.
        """
        given = Event() if event is None else event
        as_event(given).record(self)
        return given

    def wait_event(self, event: Event) -> None:
        """Make all later work wait for an event's mark as it is now; the host doesn't wait.

        Args:
            event: an event of any device, or one of PyTorch's; one that was never recorded is not waited for.

        Raises:
            ArgumentError: not an event.
        """
        impl = as_event(event)._impl
        if impl is not None:
            impl.wait(self._impl)

    def wait_stream(self, stream: Stream) -> None:
        """Make all later work wait for the work that is enqueued on another stream now; the host doesn't wait.

        Args:
            stream: a stream of any device, or one of PyTorch's.

        Raises:
            ArgumentError: not a stream.
        """
        other = stream_impl(stream)
        mark = self._backend.create_event(timing=False, blocking=False, interprocess=False)
        mark.record(other)
        mark.wait(self._impl)

    def launch(self, fn: Callable[..., object], *args: Any) -> None:
        """Enqueue a Python callable: it runs once, after the work before it and before the work after it.

        It may run in another thread, and later than this call: read what it writes after a synchronisation. What it
        raises is raised by the stream's or the device's next `synchronize`. It must not itself use streams or wait for
        them, and should be short. On CUDA about two dozen can wait for their turn; then this call waits.

        Args:
            fn: the callable; what it returns is dropped.
            *args: its arguments, held until it has run.

        Raises:
            ArgumentError: not callable.
        """
        if not callable(fn):
            raise ArgumentError(f"Stream.launch: {fn!r} of type {type(fn).__name__} can't be called")
        self._impl.launch(fn, *args)

    def __enter__(self) -> Stream:
        """Make it, and its device, current."""
        enter_stream(self, self._backend, self._impl)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Restore the device and both streams."""
        leave(self)

    def __eq__(self, other: object) -> bool:
        """True for another object of the same stream."""
        if not isinstance(other, Stream):
            return NotImplemented
        mine, theirs = self._impl, other._impl
        same_handle = mine.handle == theirs.handle and mine.device == theirs.device
        return mine is theirs or (same_handle and self._backend is other._backend)

    def __hash__(self) -> int:
        """Equal for objects of the same stream."""
        return hash((self._backend.name, self._impl.device, self._impl.handle))

    def __repr__(self) -> str:
        """As `<ncclcomm.Stream 0x5 of host device 1>`."""
        return f"<ncclcomm.{type(self).__name__} {self.handle:#x} of {self._backend.name} device {self.device}>"


class ExternalStream(Stream):
    """A stream that another library made and goes on owning.

    Args:
        stream_ptr: its cudaStream_t, as an int; it must outlive this object.
        device: the device it is on; None: the current one.

    Raises:
        UnsupportedError: the backend can't take one; the host backend never can.

    See: torch.cuda.ExternalStream.
    """

    __slots__ = ()

    def __init__(self, stream_ptr: int, device: Any = None) -> None:
        number = resolve_device(device, optional=True)
        backend = current_backend()
        wrap = getattr(backend, "external_stream", None)
        if wrap is None:
            raise UnsupportedError(
                f"ExternalStream: the {backend.name} backend takes no streams of other libraries; use Stream()"
            )
        self._backend = backend
        self._impl = wrap(stream_ptr, number)


class StreamContext:
    """What `stream(s)` gives; one object may be entered again, and by several threads."""

    __slots__ = ("_found", "stream")

    def __init__(self, stream: Stream | None) -> None:
        self._found = None if stream is None else backend_and_stream(stream)
        self.stream = stream

    def __enter__(self) -> Stream | None:
        """Make the stream, and its device, current."""
        enter_stream(self, *(self._found or (current_backend(), None)))
        return self.stream

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Restore the device and both streams."""
        leave(self)


def stream(stream: Stream | None) -> StreamContext:
    """A context manager inside which a stream, and its device, are the calling thread's current ones.

    On exit, after an exception too, it restores the device, that device's stream and the current stream of the stream's
    own device, as they were at entry. It orders nothing: see `Stream.wait_stream`.

    Args:
        stream: the stream; None changes nothing. One of PyTorch's becomes CuPy's current one, not PyTorch's.

    Raises:
        ArgumentError: not a stream.

    See: torch.cuda.stream.
    """
    return StreamContext(stream)


def current_stream(device: Any = None) -> Stream:
    """The calling thread's current stream of a device; in a new thread the default stream.

    Args:
        device: as `resolve_device` takes it; None or negative: the current device.

    Raises:
        ArgumentError: no such device.
    """
    backend = current_backend()
    number = backend.current_device() if device is None else resolve_device(device, optional=True)
    return _wrap(backend, backend.current_stream(number))


def default_stream(device: Any = None) -> Stream:
    """The default stream of a device.

    Args:
        device: as `resolve_device` takes it; None or negative: the current device.

    Raises:
        ArgumentError: no such device.
    """
    backend = current_backend()
    number = backend.current_device() if device is None else resolve_device(device, optional=True)
    return _wrap(backend, backend.default_stream(number))


def _wrap(backend: DeviceBackend, impl: StreamImpl) -> Stream:
    """A public object for a backend's stream."""
    made = object.__new__(Stream)
    made._backend = backend
    made._impl = impl
    return made
