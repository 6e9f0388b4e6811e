"""The public `Event`, as torch.cuda.Event."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from ncclcomm.devices.base import DeviceBackend, EventImpl, StreamImpl
from ncclcomm.devices.elapsed import no_timing, not_recorded
from ncclcomm.devices.foreign_torch import event_of_torch, stream_of_torch
from ncclcomm.devices.index import resolve_device
from ncclcomm.devices.registry import current_backend
from ncclcomm.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from ncclcomm.devices.stream import Stream

__all__ = ["Event", "as_event", "backend_and_stream", "stream_impl"]

_HANDLE_BYTES = 64
"""CUDA's, and the host backend's too."""

_creation = threading.Lock()


class Event:
    """A mark in a stream's work, by which other streams and the host wait, and which measures time.

    It is made on a device when it is first recorded, and belongs to that device; before that `query()` is True and
    waiting for it does nothing. Recording it again moves the mark: waits that were enqueued before keep the old one.
    An error of the work before the mark is raised by the synchronisation of its stream or device, not by the event.

    Args:
        enable_timing: `elapsed_time` may be asked of it.
        blocking: `synchronize` sleeps instead of spinning.
        interprocess: `ipc_handle` may be asked of it; not together with `enable_timing`.
        _handle: an `ipc_handle` of another process, to open on the current device; see `from_ipc_handle`.
        external: as torch has it for CUDA graphs; True is not supported.

    Raises:
        ArgumentError: both `enable_timing` and `interprocess`, which CUDA doesn't have, or `_handle` is no handle.
        DeviceError: `_handle` can't be opened; see `from_ipc_handle`.
        UnsupportedError: `external`.

    See: torch.cuda.Event.
    """

    __slots__ = ("__weakref__", "_backend", "_blocking", "_impl", "_interprocess", "_timing")

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        _handle: bytes | None = None,
        *,
        external: bool = False,
    ) -> None:
        if external:
            raise UnsupportedError(
                "Event(external=True): CuPy has no events that a graph records for work outside of it; record one on "
                "the stream, after the graph's launch"
            )
        if enable_timing and interprocess:
            raise ArgumentError("Event: enable_timing and interprocess exclude each other; make two events")
        self._timing = bool(enable_timing)
        self._blocking = bool(blocking)
        self._interprocess = bool(interprocess)
        self._backend: DeviceBackend | None = None
        self._impl: EventImpl | None = None
        if _handle is not None:
            self._open(_handle, current_backend().current_device())

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: bytes) -> Event:
        """The event behind another process's `ipc_handle`; processes of one host.

        Args:
            device: the device to open it on, as `resolve_device` takes it.
            handle: what `ipc_handle` gave.

        Returns:
            An event that can be waited for, and recorded.

        Raises:
            ArgumentError: no such device, or what is no handle.
            DeviceError: it can't be opened, because the process that made the event has ended, for one.
        """
        event = cls()
        event._open(handle, resolve_device(device, optional=True))
        return event

    def _open(self, handle: Any, device: int) -> None:
        """Be the event of a handle."""
        if not isinstance(handle, bytes) or len(handle) != _HANDLE_BYTES:
            given = f"{len(handle)} bytes" if isinstance(handle, bytes) else type(handle).__name__
            raise ArgumentError(f"from_ipc_handle: a handle has {_HANDLE_BYTES} bytes, this is {given}")
        backend = current_backend()
        self._impl = backend.open_event(handle, device)
        self._backend = backend
        self._interprocess = True

    @property
    def device(self) -> int | None:
        """The number of the device it belongs to; None before its first record."""
        return None if self._impl is None else self._impl.device

    def record(self, stream: Stream | None = None) -> None:
        """Move the mark to the end of the work now enqueued on a stream; returns at once.

        Args:
            stream: the stream, or one of PyTorch's; None: the current stream of the current device.

        Raises:
            ArgumentError: not a stream, or a stream of another device than that of the first record.
        """
        if stream is None:
            backend = current_backend()
            impl = backend.current_stream(backend.current_device())
        else:
            backend, impl = backend_and_stream(stream)
        self._made_by(backend).record(impl)

    def wait(self, stream: Stream | None = None) -> None:
        """Make all later work of a stream wait for the mark as it is now; the host doesn't wait.

        Args:
            stream: a stream of any device, or one of PyTorch's; None: the current stream of the current device.

        Raises:
            ArgumentError: not a stream.
        """
        if stream is None:
            backend = current_backend()
            impl = backend.current_stream(backend.current_device())
        else:
            impl = stream_impl(stream)
        if self._impl is not None:
            self._impl.wait(impl)

    def query(self) -> bool:
        """True if all work before the mark is complete, or the event was never recorded; never waits."""
        return self._impl is None or self._impl.query()

    def synchronize(self) -> None:
        """Wait on the host until all work before the mark is complete; nothing if never recorded."""
        if self._impl is not None:
            self._impl.synchronize()

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event's mark to another's.

        Args:
            end_event: recorded on the same device.

        Returns:
            The time in milliseconds; negative if the other mark came first.

        Raises:
            ArgumentError: with a message of its own for each, an event was made without enable_timing, was never
                recorded, belongs to another device, or is not complete.
        """
        end = as_event(end_event)
        for which, event in (("start", self), ("end", end)):
            if not event._timing:
                raise no_timing(which)
        if self._impl is None:
            raise not_recorded("start")
        if end._impl is None:
            raise not_recorded("end")
        return self._impl.elapsed_ms(end._impl)

    def ipc_handle(self) -> bytes:
        """A handle that `from_ipc_handle` opens in another process of this host; keep the event while it is used there.

        An event that was never recorded belongs to the current device from then on.

        Raises:
            ArgumentError: the event was made without interprocess=True.
        """
        if not self._interprocess:
            raise ArgumentError("ipc_handle: the event is this process's own; make it with Event(interprocess=True)")
        return self._made_by(self._backend or current_backend()).ipc_handle()

    def __repr__(self) -> str:
        """As `<ncclcomm.Event of device 1>`."""
        return "<ncclcomm.Event, not recorded>" if self.device is None else f"<ncclcomm.Event of device {self.device}>"

    def _made_by(self, backend: DeviceBackend) -> EventImpl:
        """The backend's event, made at first use."""
        impl = self._impl
        if impl is not None and self._backend is backend:
            return impl
        with _creation:
            if self._impl is None:
                self._impl = backend.create_event(
                    timing=self._timing, blocking=self._blocking, interprocess=self._interprocess
                )
                self._backend = backend
            elif self._backend is not backend:
                raise ArgumentError("the event and the stream belong to two backends; make both under one")
            return self._impl


def as_event(event: Any) -> Event:
    """The argument if it is an event; one of PyTorch's as ours.

    Raises:
        ArgumentError: it is no event, in which case the message names its type, or one of a GPU where none is in use.
    """
    if isinstance(event, Event):
        return event
    of_torch = event_of_torch(event)
    if of_torch is not None:
        made = Event(enable_timing=True)  # it may have been made without; PyTorch says so then
        made._backend, made._impl = of_torch
        return made
    raise ArgumentError(f"expected an ncclcomm.Event, not {event!r} of type {_type_name(event)}")


def stream_impl(stream: Any) -> StreamImpl:
    """The backend's stream behind a public one, or for one of PyTorch's; see backend_and_stream."""
    return backend_and_stream(stream)[1]


def backend_and_stream(stream: Any) -> tuple[DeviceBackend, StreamImpl]:
    """The backend of a public stream or of one of PyTorch's, and its own stream behind it.

    Raises:
        ArgumentError: it is no stream, in which case the message names its type, or one of a GPU where none is in use.
    """
    impl = getattr(stream, "_impl", None)
    if isinstance(impl, StreamImpl):
        return stream._backend, impl
    of_torch = stream_of_torch(stream)
    if of_torch is not None:
        return of_torch
    raise ArgumentError(f"expected an ncclcomm.Stream, not {stream!r} of type {_type_name(stream)}")


def _replace_lock() -> None:
    """In a forked child: a thread of the parent may hold the lock for good."""
    global _creation
    _creation = threading.Lock()


os.register_at_fork(after_in_child=_replace_lock)


def _type_name(value: object) -> str:
    """A type's name with its module."""
    return f"{type(value).__module__}.{type(value).__qualname__}"
