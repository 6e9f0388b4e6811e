"""The device functions of torch.cuda, over the backend in use."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from ncclcomm.devices.base import DeviceBackend
from ncclcomm.devices.index import DLPACK_HOST_MEMORY, DLPACK_ON_GPU, device_or_noop, resolve_device
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


_NOT_GIVEN = object()  # None means the current device


class device:  # noqa: N801
    """A context manager inside which a device is the calling thread's current one.

    On exit, after an exception too, it restores the device that was current at entry. One object may be entered again,
    and by several threads.

    Args:
        idx: as `resolve_device` takes it; None: the device current now; a negative number changes nothing.
        device: the same argument, by the name that it has in torch today.

    Attributes:
        idx: the device's number.

    Raises:
        ArgumentError: no such device, or none or two were given.

    See: torch.cuda.device.
    """

    __slots__ = ("idx",)

    def __init__(self, idx: Any = _NOT_GIVEN, *, device: Any = _NOT_GIVEN) -> None:
        if (idx is _NOT_GIVEN) == (device is _NOT_GIVEN):
            raise ArgumentError("device: pass one device, such as device(1); `device` is another name of `idx`")
        self.idx = device_or_noop(device if idx is _NOT_GIVEN else idx)

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


_HOST_MEMORY = -1


def _device_number_of(obj: Any) -> int:
    """The number of the device that an object's memory is on; -1 for host memory."""
    backend = current_backend()
    own = backend.device_of(obj)
    if own is not None:
        return own
    if hasattr(obj, "is_cuda"):  # PyTorch's tensors and storages
        return _on_gpu(backend, obj, "device") if obj.is_cuda else _HOST_MEMORY
    if hasattr(obj, "device_id"):  # CuPy's memory and pointers to it
        return _on_gpu(backend, obj, "device_id")
    if hasattr(obj, "__dlpack_device__"):
        return _by_dlpack(backend, obj)
    if hasattr(obj, "__cuda_array_interface__"):
        return _by_pointer(backend, obj)
    if hasattr(obj, "__array_interface__") or _is_buffer(obj):
        return _HOST_MEMORY
    raise ArgumentError(f"device_of: expected an array, tensor, storage or memory pointer, not {type(obj).__name__}")


def _need_gpus(backend: DeviceBackend, obj: Any) -> None:
    """Raise where memory of a GPU is on none of the devices in use."""
    if backend.name != "cuda":
        raise ArgumentError(
            f"device_of: {type(obj).__name__} is in a GPU's memory, and the {backend.name} backend is in use"
        )


def _on_gpu(backend: DeviceBackend, obj: Any, attribute: str) -> int:
    """The number of the device that an attribute names."""
    _need_gpus(backend, obj)
    return resolve_device(getattr(obj, attribute))


def _by_dlpack(backend: DeviceBackend, obj: Any) -> int:
    """The number of the device that an array names by DLPack; that exports nothing, and orders no streams."""
    kind, number = (int(part) for part in obj.__dlpack_device__())
    if kind in DLPACK_HOST_MEMORY:
        return _HOST_MEMORY
    if kind not in DLPACK_ON_GPU:
        raise ArgumentError(
            f"device_of: {type(obj).__name__} is on a device that DLPack gives the number {kind}; known are host "
            "memory and CUDA's"
        )
    _need_gpus(backend, obj)
    return resolve_device(number)


def _by_pointer(backend: DeviceBackend, obj: Any) -> int:
    """The number of the device that CUDA says a pointer is of; `__cuda_array_interface__` names none."""
    _need_gpus(backend, obj)
    from ncclcomm.devices.cuda_streams import raise_ours

    pointer = obj.__cuda_array_interface__["data"][0]
    if not pointer:  # no elements, on no device
        return _HOST_MEMORY
    try:
        memory = backend.array_namespace().cuda.UnownedMemory(pointer, 0, obj)
    except RuntimeError as error:
        raise_ours(error, "device_of")
    return device_or_noop(memory.device_id)


def _is_buffer(obj: Any) -> bool:
    """True for bytes and whatever else shows its memory to Python."""
    try:
        memoryview(obj).release()
    except TypeError:
        return False
    return True
