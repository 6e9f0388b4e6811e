"""Streams and events of CUDA, over CuPy's; imported only where there is a GPU."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, ParamSpec, TypeVar

import cupy
from cuda.pathfinder import DynamicLibNotFoundError
from cupy.cuda import driver, runtime

from ncclcomm.devices import cuda_driver
from ncclcomm.devices.base import EventImpl, StreamImpl
from ncclcomm.devices.elapsed import no_timing, not_complete, not_recorded, two_devices
from ncclcomm.errors import ArgumentError, BackendUnavailableError, DeviceError, NcclCommError

__all__ = [
    "CudaEvent",
    "CudaStream",
    "OpenedEvent",
    "device_error",
    "errors",
    "is_capturing",
    "marks",
    "on_device",
    "order",
    "raise_ours",
    "record_current",
    "refuse_to_wait_for_itself",
    "take_error",
    "translated",
    "translation",
    "using",
    "working",
]

P = ParamSpec("P")
R = TypeVar("R")

errors: dict[tuple[int, int], BaseException] = {}
"""The first error of the callables launched on a stream (device, handle) since its last synchronisation."""


working = threading.local()
"""In a thread that runs launched callables, `key` is their stream (device, handle)."""


def refuse_to_wait_for_itself(device: int, handle: int | None = None) -> None:
    """Raise in a launched callable that waits for its own stream, or its device (handle None), which waits for it."""
    key = getattr(working, "key", None)
    if key is not None and key[0] == device and handle in (None, key[1]):
        raise DeviceError(
            f"work launched on a stream of device {device} would wait for itself: it may not wait for that stream"
        )


def take_error(device: int, handle: int | None = None) -> None:
    """Raise the first error of the callables launched on a stream (None: on any of the device) since the last time."""
    keys = [key for key in list(errors) if key[0] == device and handle in (None, key[1])]
    first = [error for error in (errors.pop(key, None) for key in keys) if error is not None]
    if first:
        raise DeviceError(
            f"work launched on a stream of device {device} raised {type(first[0]).__name__}: {first[0]}",
            name=type(first[0]).__name__,
        ) from first[0]


def device_error(error: Any, call: str) -> DeviceError:
    """The DeviceError for a CUDARuntimeError that a call raised."""
    return DeviceError(
        f"{call}: {error}. An earlier kernel or copy may be the one that failed: CUDA_LAUNCH_BLOCKING=1 shows which",
        code=int(error.status),
        name=str(error).split(":", 1)[0],
        call=call.rpartition(".")[2],
    )


def translation(error: RuntimeError, call: str) -> NcclCommError | None:
    """Our error for one of the CUDA runtime or of CuPy's compiler; None for others.

    Args:
        error: what was raised.
        call: the call that raised it, such as CudaStream.query.
    """
    if isinstance(error, (runtime.CUDARuntimeError, driver.CUDADriverError)):
        return device_error(error, call)
    # CuPy has no class of its own for missing headers.
    if isinstance(error, DynamicLibNotFoundError) or (type(error) is RuntimeError and "CUDA headers" in str(error)):
        said = " ".join(str(error).split())
        return BackendUnavailableError(
            f"{call}: CuPy can't compile its kernels ({said}): pip install nvidia-cuda-nvrtc "
            "nvidia-cuda-runtime or, for CUDA 12, pip install nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12"
        )
    return None


def raise_ours(error: RuntimeError, call: str) -> NoReturn:
    """Raise our error for one of CUDA's, others as they are; see translation."""
    ours = translation(error, call)
    if ours is None:
        raise error
    raise ours from error


def translated(func: Callable[P, R]) -> Callable[P, R]:
    """Turn the CUDA runtime's errors into DeviceError, with the code, its name and the call; see translation."""

    @functools.wraps(func)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            raise_ours(error, func.__qualname__)

    return call


class on_device:  # noqa: N801
    """Make a device current inside the block; a default stream's handle means the current device's one."""

    __slots__ = ("_before", "_device")

    def __init__(self, device: int) -> None:
        self._device = device

    def __enter__(self) -> None:
        """Switch, if it is another one."""
        try:  # not by translated, whose call more each use would pay
            self._before = runtime.getDevice()
            if self._before != self._device:
                runtime.setDevice(self._device)
        except runtime.CUDARuntimeError as error:
            raise device_error(error, "on_device") from error

    def __exit__(self, *_: object) -> None:
        """Switch back."""
        try:
            if self._before != self._device:
                runtime.setDevice(self._before)
        except runtime.CUDARuntimeError as error:
            raise device_error(error, "on_device") from error


@contextmanager
def using(stream: CudaStream) -> Iterator[None]:
    """Run CuPy's kernels and allocations inside the block on a stream and its device."""
    with on_device(stream.device):
        before = cupy.cuda.get_current_stream()
        stream.cupy.use()
        try:
            yield
        finally:
            before.use()


_NOT_READY = 600


def _is_complete(status: int) -> bool:
    """What the status of a query says; CuPy hands out errors too, and its `done` takes them for work that runs."""
    if status not in (0, _NOT_READY):
        raise runtime.CUDARuntimeError(status)
    return status == 0


class CudaStream(StreamImpl):
    """A CUDA stream of a known device; CuPy's default stream object belongs to none."""

    __slots__ = ("cupy", "device", "handle")

    def __init__(self, device: int, stream: Any) -> None:
        self.device = device
        self.cupy = stream
        self.handle: int = stream.ptr

    @property
    def priority(self) -> int:  # type: ignore[override]
        """The effective priority."""
        return int(runtime.streamGetPriority(self.handle)) if self.handle > 2 else 0

    @translated
    def query(self) -> bool:
        """True if all work enqueued so far is complete."""
        with on_device(self.device):
            return _is_complete(runtime.streamQuery(self.handle))

    @translated
    def synchronize(self) -> None:
        """Wait for all work enqueued so far, and raise the first error of a launched callable since the last time."""
        refuse_to_wait_for_itself(self.device, self.handle)
        with on_device(self.device):
            self.cupy.synchronize()
        if errors:
            take_error(self.device, self.handle)

    @translated
    def launch(self, fn: Callable[..., object], *args: Any) -> None:
        """Enqueue a Python callable; see cuda_launch."""
        from ncclcomm.devices import cuda_launch

        cuda_launch.launch(self, fn, *args)


class CudaEvent(EventImpl):
    """A CUDA event, made on the device of the first stream that records it."""

    __slots__ = ("_blocking", "_interprocess", "_timing", "cupy", "device")

    def __init__(self, *, timing: bool, blocking: bool, interprocess: bool) -> None:
        self.device: int | None = None
        self.cupy: Any = None
        self._timing = timing
        self._blocking = blocking
        self._interprocess = interprocess

    def _make(self, device: int) -> None:
        """Make the event on a device."""
        with on_device(device):
            self.cupy = cupy.cuda.Event(
                block=self._blocking, disable_timing=not self._timing, interprocess=self._interprocess
            )
        self.device = device

    @translated
    def record(self, stream: StreamImpl) -> None:
        """Mark the end of the work now enqueued on the stream."""
        if self.device is None:
            self._make(stream.device)
        elif self.device != stream.device:
            raise ArgumentError(
                f"the event belongs to device {self.device}, where it was first recorded, and can't be recorded on a "
                f"stream of device {stream.device}; use another Event there (waiting across devices is fine)"
            )
        with on_device(stream.device):
            runtime.eventRecord(self.cupy.ptr, stream.handle)

    @translated
    def wait(self, stream: StreamImpl) -> None:
        """Make later work of the stream wait for the mark that is the latest now."""
        if self.cupy is not None:
            with on_device(stream.device):
                runtime.streamWaitEvent(stream.handle, self.cupy.ptr)

    @translated
    def query(self) -> bool:
        """True if the latest mark is reached or there is none."""
        return self.cupy is None or _is_complete(runtime.eventQuery(self.cupy.ptr))

    @translated
    def poll(self) -> bool:
        """True if the latest mark is reached or there is none; see EventImpl.poll."""
        return self.device is None or cuda_driver.is_complete(self.cupy.ptr, self.device)

    @translated
    def synchronize(self) -> None:
        """Wait for the latest mark."""
        if self.cupy is not None:
            self.cupy.synchronize()

    @translated
    def elapsed_ms(self, end: EventImpl) -> float:
        """Milliseconds from this mark to the end's, by the GPU's clock."""
        if not isinstance(end, CudaEvent):
            raise ArgumentError(f"elapsed_time: {type(end).__name__} is not an event of the CUDA backend")
        events = (("start", self), ("end", end))
        for which, event in events:
            if not event._timing:
                raise no_timing(which)
        for which, event in events:
            if event.cupy is None:
                raise not_recorded(which)
        if self.device != end.device:
            raise two_devices(self.device, end.device)
        for which, event in events:
            if not event.query():
                raise not_complete(which)
        assert self.device is not None
        with on_device(self.device):
            return float(cupy.cuda.get_elapsed_time(self.cupy, end.cupy))

    @translated
    def ipc_handle(self) -> bytes:
        """A handle from which another process opens the event."""
        if self.device is None:
            self._make(runtime.getDevice())
        assert self.device is not None
        with on_device(self.device):
            return bytes(runtime.ipcGetEventHandle(self.cupy.ptr))


class OpenedEvent(CudaEvent):
    """An event that another process made."""

    __slots__ = ()

    def __init__(self, handle: bytes, device: int) -> None:
        super().__init__(timing=False, blocking=False, interprocess=True)
        with on_device(device):
            event = cupy.cuda.Event.__new__(cupy.cuda.Event)
            event.ptr = runtime.ipcOpenEventHandle(handle)
        self.cupy = event
        self.device = device


_LEGACY_STREAM = 1
"""Handles up to this one mean the legacy default stream, which can't be captured; asked about it, CUDA may refuse."""


def is_capturing(handle: int) -> bool:
    """True if a stream's work is now captured into a graph, to run later."""
    return handle > _LEGACY_STREAM and bool(runtime.streamIsCapturing(handle))


def record_current(event: CudaEvent, device: int) -> bool:
    """Record an event on CuPy's current stream of the current device; see DeviceBackend.record_current."""
    stream = cupy.cuda.get_current_stream(device).ptr
    if is_capturing(stream):
        return False
    if event.device is None:
        event._make(device)
    runtime.eventRecord(event.cupy.ptr, stream)
    return True


class _Marks(threading.local):
    """A thread's events for ordering streams, one a device. A wait keeps the mark it was made for, so one is enough."""

    def __init__(self) -> None:
        self._events: dict[int, Any] = {}
        self._handles: dict[int, int] = {}

    def of(self, device: int) -> int:
        """The handle of a device's event; the device is the current one."""
        handle = self._handles.get(device)
        if handle is None:
            event = self._events[device] = cupy.cuda.Event(disable_timing=True)
            handle = self._handles[device] = event.ptr
        return handle


marks = _Marks()
"""The calling thread's."""


def order(first: CudaStream, later: CudaStream) -> None:
    """Make later's future work wait for first's present work; streams of any devices."""
    with on_device(first.device):
        mark = marks.of(first.device)
        runtime.eventRecord(mark, first.handle)
    with on_device(later.device):
        runtime.streamWaitEvent(later.handle, mark)
