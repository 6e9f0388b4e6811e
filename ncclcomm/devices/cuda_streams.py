"""Streams and events of CUDA, over CuPy's; imported only where there is a GPU."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import cupy
import numpy as np
from cupy.cuda import runtime

from ncclcomm.devices.base import EventImpl, StreamImpl
from ncclcomm.devices.elapsed import no_timing, not_complete, not_recorded, two_devices
from ncclcomm.errors import ArgumentError, BackendUnavailableError, DeviceError

__all__ = ["CudaEvent", "CudaStream", "OpenedEvent", "hold", "on_device", "take_error", "translated", "using"]

P = ParamSpec("P")
R = TypeVar("R")

_STREAM_WAIT_GEQ = 0


def translated(func: Callable[P, R]) -> Callable[P, R]:
    """Turn the CUDA runtime's errors into DeviceError, with the code, its name and the call."""

    @functools.wraps(func)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return func(*args, **kwargs)
        except runtime.CUDARuntimeError as error:
            raise DeviceError(
                f"{func.__qualname__}: {error}. An earlier kernel or copy may be the one that failed: "
                "CUDA_LAUNCH_BLOCKING=1 shows which",
                code=int(error.status),
                name=str(error).split(":", 1)[0],
                call=func.__name__,
            ) from error

    return call


@contextmanager
def on_device(device: int) -> Iterator[None]:
    """Make a device current inside the block; a default stream's handle means the current device's one."""
    before = runtime.getDevice()
    if before == device:
        yield
        return
    runtime.setDevice(device)
    try:
        yield
    finally:
        runtime.setDevice(before)


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
            return bool(self.cupy.done)

    @translated
    def synchronize(self) -> None:
        """Wait for all work enqueued so far, and raise the first error of a launched callable since the last time."""
        with on_device(self.device):
            self.cupy.synchronize()
        take_error(self.device, self.handle)

    @translated
    def launch(self, fn: Callable[..., object], *args: Any) -> None:
        """Enqueue a Python callable.

        A host function would need the interpreter's lock inside the driver. Instead the stream waits on a word of
        pinned memory, which a thread writes once the work before is done and fn has run.
        """
        driver = _driver()
        with on_device(self.device):
            reached = cupy.cuda.Event(block=True, disable_timing=True)
            reached.record(self.cupy)
            memory = cupy.cuda.alloc_pinned_memory(4)
            flag: np.ndarray[Any, Any] = np.frombuffer(memory, np.uint32, 1)
            flag[0] = 0
            (code,) = driver.cuStreamWaitValue32(self.handle, memory.ptr, 1, _STREAM_WAIT_GEQ)
            if code != driver.CUresult.CUDA_SUCCESS:
                raise DeviceError(f"cuStreamWaitValue32 failed: {code.name}", code=int(code), name=code.name)
        hold(self, memory)
        threading.Thread(
            target=_run, args=(self.device, self.handle, reached, flag, fn, args), name="ncclcomm-launch", daemon=True
        ).start()


def _driver() -> Any:
    """The driver's calls."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise BackendUnavailableError(
            "Stream.launch needs cuda-bindings: pip install 'ncclcomm[cuda13]' or 'ncclcomm[cuda12]'"
        ) from error
    return driver


_errors: dict[tuple[int, int], BaseException] = {}


def _run(device: int, handle: int, reached: Any, flag: Any, fn: Callable[..., object], args: tuple[Any, ...]) -> None:
    """Run a launched callable once the stream has come to it, and let the stream go on whatever happens."""
    try:
        with on_device(device):
            reached.synchronize()
        fn(*args)
    except BaseException as error:
        _errors.setdefault((device, handle), error)
    finally:
        flag[0] = 1


def take_error(device: int, handle: int | None = None) -> None:
    """Raise the first error of the callables launched on a stream (None: on any of the device) since the last time."""
    keys = [key for key in list(_errors) if key[0] == device and handle in (None, key[1])]
    first = [error for error in (_errors.pop(key, None) for key in keys) if error is not None]
    if first:
        raise DeviceError(
            f"work launched on a stream of device {device} raised {type(first[0]).__name__}: {first[0]}"
        ) from first[0]


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
        return self.cupy is None or bool(self.cupy.done)

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
            if not event.cupy.done:
                raise not_complete(which)
        return float(cupy.cuda.get_elapsed_time(self.cupy, end.cupy))

    @translated
    def ipc_handle(self) -> bytes:
        """A handle from which another process opens the event."""
        if self.cupy is None:
            self._make(runtime.getDevice())
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


_held: queue.SimpleQueue[tuple[Any, tuple[Any, ...]]] = queue.SimpleQueue()
_reaper: threading.Thread | None = None
_reaper_lock = threading.Lock()


def hold(stream: CudaStream, *objects: Any) -> None:
    """Keep objects alive until the work now enqueued on a stream is done.

    CuPy's memory pool gives freed memory to later work of the stream that was current when it was allocated, which may
    not be ordered after this one.
    """
    global _reaper
    with on_device(stream.device):
        done = cupy.cuda.Event(block=True, disable_timing=True)
        done.record(stream.cupy)
    _held.put((done, objects))
    if _reaper is None:
        with _reaper_lock:
            if _reaper is None:
                _reaper = threading.Thread(target=_reap, name="ncclcomm-reaper", daemon=True)
                _reaper.start()


def _reap() -> None:
    """Drop what is held, each when its work is done."""
    while True:
        done, objects = _held.get()
        try:
            done.synchronize()
        except runtime.CUDARuntimeError:
            # The device's context is broken, which the next call of the program reports; nothing runs there any more.
            return
        del done, objects
