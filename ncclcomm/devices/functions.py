"""The device functions of torch.cuda, over the backend in use."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from ncclcomm.devices.index import device_or_noop, resolve_device
from ncclcomm.devices.registry import current_backend
from ncclcomm.devices.restore import enter_device, leave
from ncclcomm.errors import ArgumentError

__all__ = [
    "current_blas_handle",
    "current_device",
    "device",
    "device_count",
    "device_of",
    "is_available",
    "set_device",
    "synchronize",
]


def is_available() -> bool:
    """True if the backend in use is CUDA's. Never raises; creates no CUDA context.

    False on virtual host devices, and where the configuration can't be met: any other call then says what is wrong.

    See: torch.cuda.is_available.
    """
    try:
        return current_backend().name == "cuda"
    except Exception:
        return False


def device_count() -> int:
    """The number of devices of the backend in use, GPUs or virtual host devices; creates no CUDA context.

    Raises:
        BackendUnavailableError: GPUs were demanded, or allotted by SLURM, and can't be used.

    See: torch.cuda.device_count.
    """
    return current_backend().device_count()


def current_device() -> int:
    """The number of the calling thread's current device; 0 in a new thread.

    See: torch.cuda.current_device.
    """
    return current_backend().current_device()


def set_device(device: Any) -> None:
    """Make a device the calling thread's current one.

    To give a process one GPU, CUDA_VISIBLE_DEVICES is better; for a part of a program, `with device(...)` is.

    Args:
        device: as `resolve_device` takes it; a negative number changes nothing.

    Raises:
        ArgumentError: no such device.

    See: torch.cuda.set_device.
    """
    if type(device) is int and device < 0:
        return
    number = device_or_noop(device) if device is not None else resolve_device(None)
    if number >= 0:
        current_backend().set_device(number)


class device:  # noqa: N801
    """A context manager inside which a device is the calling thread's current one.

    On exit, after an exception too, it restores the device that was current at entry. One object may be entered again,
    and by several threads.

    Args:
        idx: as `resolve_device` takes it; None: the device current now; a negative number changes nothing.

    Attributes:
        idx: the device's number.

    Raises:
        ArgumentError: no such device.

    See: torch.cuda.device.
    """

    __slots__ = ("idx",)

    def __init__(self, idx: Any) -> None:
        self.idx = device_or_noop(idx)

    def __enter__(self) -> device:
        """Make the device current."""
        enter_device(self, current_backend(), self.idx)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Restore the device."""
        leave(self)

    def __repr__(self) -> str:
        """As `<ncclcomm.device 1>`."""
        return f"<ncclcomm.{type(self).__name__} {self.idx}>"


class device_of(device):  # noqa: N801
    """A context manager inside which an object's device is the calling thread's current one.

    Args:
        obj: an array or tensor, a storage or a memory pointer; one in host memory changes nothing.

    Raises:
        ArgumentError: not an object that has memory, or memory of a device that the backend in use doesn't have.

    See: torch.cuda.device_of.
    """

    __slots__ = ()

    def __init__(self, obj: Any) -> None:
        super().__init__(_device_number_of(obj))


def synchronize(device: Any = None) -> None:
    """Wait on the host for all work enqueued so far on all streams of a device.

    Args:
        device: as `resolve_device` takes it; None or negative: the current device.

    Raises:
        ArgumentError: no such device.
        DeviceError: work of one of its streams raised since that stream's last synchronisation; the first error is the
            cause.

    See: torch.cuda.synchronize.
    """
    number = resolve_device(device, optional=True)
    current_backend().synchronize(number)


def current_blas_handle() -> int:
    """The cuBLAS handle (cublasHandle_t) of the current device, bound to the current stream.

    Raises:
        BackendUnavailableError: the backend has none, as virtual host devices.

    See: torch.cuda.current_blas_handle.
    """
    return current_backend().blas_handle()


_MEMORY_ATTRIBUTES = ("__array_interface__", "__dlpack__", "__buffer__", "device", "data_ptr")


def _device_number_of(obj: Any) -> int:
    """The number of the device that an object's memory is on; -1 for host memory."""
    backend = current_backend()
    own = backend.device_of(obj)
    if own is not None:
        return own
    on_gpu = getattr(obj, "is_cuda", None)
    if on_gpu is None:
        on_gpu = hasattr(obj, "__cuda_array_interface__") or hasattr(obj, "device_id")
    if on_gpu:
        if backend.name != "cuda":
            raise ArgumentError(
                f"device_of: {type(obj).__name__} is in a GPU's memory, and the {backend.name} backend is in use"
            )
        return resolve_device(getattr(obj, "device_id", obj.device))
    if isinstance(obj, (bytes, bytearray, memoryview)) or any(hasattr(obj, name) for name in _MEMORY_ATTRIBUTES):
        return -1
    raise ArgumentError(f"device_of: expected an array, tensor, storage or memory pointer, not {type(obj).__name__}")
