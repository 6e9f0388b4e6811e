"""Calls of the CUDA driver that leave the interpreter to other threads; imported only where there is a GPU.

CuPy holds the interpreter while it queries an event, which may wait inside the driver: where another thread holds the
driver's lock, as in a cudaFree that waits for a kernel. If that never ends, no thread could say so. ctypes lets go of
the interpreter.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import uuid
from typing import Any

from cupy.cuda import runtime

__all__ = ["device_uuid", "is_complete", "is_idle", "is_plainly_allocated", "watch"]

_NOT_READY = 600
_RELAXED_CAPTURE = 2
_IS_LEGACY_CUDA_IPC_CAPABLE = 13


class _Watching(threading.local):
    """What a thread that asks events has done once."""

    is_prepared = False


_watching = _Watching()


@functools.cache
def _driver() -> Any:
    """The driver's library, which CUDA has loaded."""
    library = ctypes.CDLL("libcuda.so.1")
    library.cuEventQuery.argtypes = [ctypes.c_void_p]
    library.cuStreamQuery.argtypes = [ctypes.c_void_p]
    library.cuDeviceGet.argtypes = [ctypes.POINTER(ctypes.c_int), ctypes.c_int]
    library.cuDeviceGetUuid_v2.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.cuPointerGetAttribute.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    library.cuThreadExchangeStreamCaptureMode.argtypes = [ctypes.POINTER(ctypes.c_int)]
    return library


def _check(code: int) -> None:
    """Raise the driver's error, whose numbers are the runtime's."""
    if code:
        raise runtime.CUDARuntimeError(code)


def watch(device: int) -> None:
    """Prepare the calling thread, one of our own, to wait for events or to ask them; once is enough.

    Args:
        device: becomes the thread's current device.

    Raises:
        CUDARuntimeError: the device is broken.
    """
    if not _watching.is_prepared:
        # Without a device of its own, a thread's first call makes a context on device 0.
        runtime.setDevice(device)
        # In the mode that threads begin with, a query here would break a graph capture of another thread.
        _exchange_capture_mode(_RELAXED_CAPTURE)
        _watching.is_prepared = True


def _exchange_capture_mode(mode: int) -> int:
    """Set how the calling thread minds graph captures; how it did before."""
    held = ctypes.c_int(mode)
    _check(_driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(held)))
    return held.value


def is_complete(event: int, device: int) -> bool:
    """True if an event's work is complete; for a thread that does nothing else with CUDA.

    Args:
        event: the event's handle.
        device: its device, which becomes the thread's current one.

    Raises:
        CUDARuntimeError: the device is broken.
    """
    watch(device)
    code = _driver().cuEventQuery(event)
    if code == _NOT_READY:
        return False
    _check(code)
    return True


def is_idle(stream: int) -> bool:
    """True if all work of a stream is complete; breaks no graph capture. False also where an error keeps it unknown.

    Args:
        stream: the handle of a stream of the current device, which is not a default one.

    Raises:
        CUDARuntimeError: the driver refuses.
    """
    if runtime.streamIsCapturing(stream):
        return False
    before = _exchange_capture_mode(_RELAXED_CAPTURE)
    try:
        return int(_driver().cuStreamQuery(stream)) == 0
    finally:
        _exchange_capture_mode(before)


def is_plainly_allocated(address: int) -> bool:
    """True for memory of cudaMalloc, which each device that may access this one's memory reaches.

    Memory that was mapped otherwise is reached by the devices it was mapped for.

    Args:
        address: an address on a GPU.
    """
    found = ctypes.c_int(0)
    code = _driver().cuPointerGetAttribute(ctypes.byref(found), _IS_LEGACY_CUDA_IPC_CAPABLE, address)
    return code == 0 and found.value != 0


def device_uuid(device: int) -> str:
    """A GPU's UUID, as `nvidia-smi -L` shows it; creates no CUDA context.

    CuPy's properties cut it at its first zero byte.

    Args:
        device: the device number.

    Raises:
        CUDARuntimeError: no such device.
    """
    library = _driver()
    _check(library.cuInit(0))
    handle, found = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    _check(library.cuDeviceGet(ctypes.byref(handle), device))
    _check(library.cuDeviceGetUuid_v2(found, handle))
    return str(uuid.UUID(bytes=bytes(found)))
