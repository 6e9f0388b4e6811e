"""The CUDA backend, over CuPy.

Importing this file imports no CuPy, and asking what is there creates no CUDA context.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ncclcomm.devices.base import DeviceBackend, EventImpl, StreamImpl
from ncclcomm.errors import ArgumentError, BackendUnavailableError, UnsupportedError

if TYPE_CHECKING:
    import numpy as np

    from ncclcomm.devices.cuda_streams import CudaStream

__all__ = ["CudaBackend", "count_devices", "probe"]

_INSTALL = "pip install 'ncclcomm[cuda13]' or, for CUDA 12, pip install 'ncclcomm[cuda12]'"


def count_devices() -> int:
    """The number of usable GPUs, at least 1; creates no CUDA context.

    Raises:
        BackendUnavailableError: there is none; the message says why, and CuPy's own error is the cause.
    """
    try:
        from cupy.cuda import runtime
    except ModuleNotFoundError as error:
        raise BackendUnavailableError(f"CuPy is not installed ({error}): {_INSTALL}") from error
    except Exception as error:
        raise BackendUnavailableError(
            f"CuPy is installed but can't be imported ({type(error).__name__}: {error}); reinstall it: {_INSTALL}"
        ) from error
    try:
        count = int(runtime.getDeviceCount())
    except Exception as error:
        raise BackendUnavailableError(_why_no_count(runtime, error)) from error
    if count < 1:
        raise BackendUnavailableError(_none_visible())
    return count


def probe() -> tuple[int, str]:
    """The number of usable GPUs, and the reason where it is 0. Never raises; creates no CUDA context."""
    try:
        return count_devices(), ""
    except BackendUnavailableError as error:
        return 0, str(error)


def _none_visible() -> str:
    """The reason where the driver works and shows no device."""
    return "the NVIDIA driver shows no GPU to this process; check nvidia-smi and CUDA_VISIBLE_DEVICES"


def _why_no_count(runtime: object, error: Exception) -> str:
    """The reason where the runtime can't count its devices."""
    text = str(error)
    if "cudaErrorNoDevice" in text:
        return _none_visible()
    if "cudaErrorInsufficientDriver" in text:
        driver, needed = _version(runtime, "driverGetVersion"), _version(runtime, "runtimeGetVersion")
        if not driver:
            return f"no NVIDIA driver is loaded ({text}); install one, or run where there is a GPU"
        return (
            f"the NVIDIA driver is too old: it serves CUDA {driver}, CuPy here is built for {needed} ({text}); "
            f"update the driver, or install CuPy for the older CUDA: {_INSTALL}"
        )
    return f"CUDA can't count its GPUs ({type(error).__name__}: {text})"


def _version(runtime: object, call: str) -> str:
    """A version such as 12.4, '' where there is none."""
    try:
        number = int(getattr(runtime, call)())
    except Exception:
        return ""
    return f"{number // 1000}.{number % 1000 // 10}" if number else ""


_TRANSLATED = (
    "current_device",
    "set_device",
    "create_stream",
    "set_current_stream",
    "external_stream",
    "open_event",
    "order",
    "record_current",
    "blas_handle",
    "empty_pinned",
    "copy",
    "reduce",
    "must_snapshot",
    "refuse_capture",
    "touch",
    "uuid",
)
"""Calls whose CUDA errors become DeviceError."""


class CudaBackend(DeviceBackend):
    """The GPUs that this process sees, by CuPy's current device, current streams and memory pool."""

    name = "cuda"

    def __init__(self) -> None:
        import cupy
        from cupy.cuda import runtime

        from ncclcomm.devices import cuda_driver, cuda_held, cuda_memory, cuda_peer, cuda_pool, cuda_streams

        self._cupy = cupy
        self.array_class = cupy.ndarray
        self._alloc = cupy.cuda.alloc
        self._dtypes: set[np.dtype[Any]] = set()
        self._runtime = runtime
        self._streams = cuda_streams
        self._pool = cuda_pool
        self._driver = cuda_driver
        self._memory = cuda_memory
        self._held = cuda_held
        self.copy_plain = cuda_peer.copy_plain  # type: ignore[method-assign]
        self.sum_plain = cuda_peer.sum_plain  # type: ignore[method-assign]
        self._count = count_devices()
        for name in _TRANSLATED:
            setattr(self, name, cuda_streams.translated(getattr(self, name)))

    def device_count(self) -> int:
        """How many GPUs the process sees."""
        return self._count

    def current_device(self) -> int:
        """The calling thread's current device."""
        return int(self._runtime.getDevice())

    def set_device(self, device: int) -> None:
        """Make a device the calling thread's current one."""
        self._runtime.setDevice(device)

    def on_device(self, device: int) -> AbstractContextManager[object]:
        """A context in which the device is the current one."""
        return self._streams.on_device(device)

    def synchronize(self, device: int) -> None:
        """Wait for all streams of the device, and raise the first error of its launched callables."""
        self._streams.refuse_to_wait_for_itself(device)
        self._streams.translated(self._cupy.cuda.Device(device).synchronize)()
        self._streams.take_error(device)

    def priority_range(self) -> tuple[int, int]:
        """The range that CUDA clamps to."""
        least, most = (self._cupy.cuda.Stream(non_blocking=True, priority=p) for p in (1000, -1000))
        return int(least.priority), int(most.priority)

    def create_stream(self, device: int, priority: int) -> StreamImpl:
        """A non-blocking stream that nobody else has; CUDA clamps the priority."""
        with self._streams.on_device(device):
            return self._streams.CudaStream(device, self._pool.take(device, priority))

    def default_stream(self, device: int) -> StreamImpl:
        """The device's default stream; its handle is 0."""
        return self._streams.CudaStream(device, self._cupy.cuda.Stream.null)

    def current_stream(self, device: int) -> StreamImpl:
        """CuPy's current stream of the calling thread and the device."""
        return self._streams.CudaStream(device, self._cupy.cuda.get_current_stream(device))

    def set_current_stream(self, stream: StreamImpl) -> None:
        """Make a stream CuPy's current one for its device and the calling thread."""
        own = self._own(stream)
        with self._streams.on_device(own.device):
            own.cupy.use()

    def external_stream(self, pointer: int, device: int) -> StreamImpl:
        """A stream that another library made."""
        with self._streams.on_device(device):
            return self._streams.CudaStream(device, self._pool.external(int(pointer), device))

    def create_event(self, *, timing: bool, blocking: bool, interprocess: bool) -> EventImpl:
        """A new event."""
        return self._streams.CudaEvent(timing=timing, blocking=blocking, interprocess=interprocess)

    def order(self, first: StreamImpl, later: StreamImpl) -> None:
        """Make later's future work wait for first's present work."""
        self._streams.order(self._own(first), self._own(later))

    def record_current(self, event: EventImpl, device: int) -> bool:
        """Record an event of this backend, unless the stream is being captured."""
        assert isinstance(event, self._streams.CudaEvent)
        return self._streams.record_current(event, device)

    def open_event(self, handle: bytes, device: int) -> EventImpl:
        """The event behind another process's handle."""
        return self._streams.OpenedEvent(handle, device)

    def blas_handle(self) -> int:
        """The cuBLAS handle of the current device, bound to the current stream."""
        try:
            from cupy_backends.cuda.libs import cublas
        except ImportError as error:
            said = " ".join(str(error).split())
            raise BackendUnavailableError(
                f"CuPy can't load cuBLAS ({said}): pip install nvidia-cublas or, for CUDA 12, "
                "pip install nvidia-cublas-cu12"
            ) from error
        handle = int(self._cupy.cuda.get_cublas_handle())
        cublas.setStream(handle, self._cupy.cuda.get_current_stream().ptr)
        return handle

    def empty(self, shape: tuple[int, ...], dtype: Any, device: int) -> Any:
        """An uninitialised CuPy array, from the memory of the device's current stream."""
        runtime, before = self._runtime, device
        try:
            before = runtime.getDevice()
            if before != device:
                runtime.setDevice(device)
            nbytes = dtype.itemsize
            for n in shape:
                nbytes *= n
            if nbytes and dtype in self._dtypes:
                return self.array_class(shape, dtype, self._alloc(nbytes))  # sooner than with no memory given
            array = self.array_class(shape, dtype)
        except ValueError as error:
            raise UnsupportedError(
                f"CuPy has no arrays of dtype {dtype} ({error}); move its bits as an integer of the same size, "
                "x.view('u8') for 8 bytes"
            ) from error
        except self._cupy.cuda.memory.OutOfMemoryError:
            if not self._held.settle():
                raise
            return self.array_class(shape, dtype)  # what earlier calls held is free now
        except RuntimeError as error:
            self._streams.raise_ours(error, "empty")
        else:
            self._dtypes.add(dtype)
            return array
        finally:
            if before != device:
                runtime.setDevice(before)

    def empty_pinned(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Pinned host memory, as bytes."""
        import numpy as np

        memory = self._cupy.cuda.alloc_pinned_memory(max(nbytes, 1))
        return np.frombuffer(memory, np.uint8, nbytes)

    def array_namespace(self) -> Any:
        """CuPy."""
        return self._cupy

    def device_of(self, array: Any) -> int | None:
        """The device of a CuPy array."""
        return int(array.device.id) if isinstance(array, self._cupy.ndarray) else None

    def copy(self, dst: Any, src: Any, stream: StreamImpl) -> None:
        """Enqueue the copy, directly between devices where the machine can."""
        self._memory.copy(dst, src, self._own(stream))

    def reduce(self, out: Any, arrays: list[Any], op: str, stream: StreamImpl) -> None:
        """Enqueue the reduction."""
        self._memory.reduce(out, arrays, op, self._own(stream))

    def keep(self, device: int, *objects: Any) -> None:
        """See DeviceBackend.keep; for good, where the stream is captured."""
        self._held.hold(self._streams.CudaStream(device, self._cupy.cuda.get_current_stream(device)), *objects)

    def settle(self) -> bool:
        """See DeviceBackend.settle."""
        return self._held.settle()

    def must_snapshot(self, array: np.ndarray[Any, Any]) -> bool:
        """True for pinned memory; pageable memory is read inside the call."""
        return self._memory.is_pinned(array)

    def uuid(self, device: int) -> str:
        """The GPU's identity, the same in every process and under every CUDA_VISIBLE_DEVICES."""
        return self._driver.device_uuid(device)

    def touch(self, device: int) -> None:
        """Make the device's context, where there is none, and raise what an earlier kernel or copy has broken."""
        with self._streams.on_device(device):
            self._runtime.setDevice(device)
            self._runtime.memGetInfo()

    def refuse_capture(self, device: int, why: str) -> None:
        """See DeviceBackend.refuse_capture."""
        if self._streams.is_capturing(self._cupy.cuda.get_current_stream(device).ptr):
            raise UnsupportedError(f"{why}, which can't be captured into a CUDA graph: call it outside the capture")

    def _own(self, stream: StreamImpl) -> CudaStream:
        """A stream of this backend."""
        if not isinstance(stream, self._streams.CudaStream):
            raise ArgumentError(f"{type(stream).__name__} is not a stream of the CUDA backend")
        return stream
