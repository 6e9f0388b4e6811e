"""PyTorch's tensors, streams and events. It is not imported here: who passes one of them has imported it."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np

from ncclcomm.devices.base import DeviceBackend, EventImpl, StreamImpl
from ncclcomm.devices.foreign import Foreign
from ncclcomm.devices.registry import current_backend
from ncclcomm.errors import ArgumentError, BackendUnavailableError, UnsupportedError

__all__ = ["TORCH", "TorchEvent", "event_of_torch", "is_torch_loaded", "look_at_tensor", "stream_of_torch"]

_HOST_MEMORY = -1

_OF_NUMPY = frozenset(
    ("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
    + ("float16", "float32", "float64", "complex64", "complex128")
)
"""Dtypes by the names that both libraries give them."""
_OF_ML_DTYPES = {
    "bfloat16": "int16",
    "float8_e4m3fn": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2": "uint8",
    "float8_e5m2fnuz": "uint8",
    "float8_e8m0fnu": "uint8",
}
"""Dtypes that NumPy knows from ml_dtypes, each with one of the same size that both libraries have."""

_DEFAULT_STREAMS = (0, 1)
"""Handles of the legacy default stream."""


class _Dtype(NamedTuple):
    """A dtype of PyTorch's in NumPy's terms."""

    numpy: np.dtype[Any]
    bits: Any
    """PyTorch's dtype by which `Tensor.numpy` gives the elements; None where it takes them as they are."""


_known: dict[Any, _Dtype] = {}
_made: dict[np.dtype[Any], Any] = {}
"""PyTorch's dtype of each of NumPy's; None where there is none."""


def _torch() -> Any:
    """PyTorch, once the program has imported it; else None."""
    torch = sys.modules.get("torch")
    # A thread may be importing it.
    return torch if torch is not None and hasattr(torch, "Tensor") and hasattr(torch, "cuda") else None


def is_torch_loaded() -> bool:
    """True once the program has imported PyTorch."""
    return _torch() is not None


def look_at_tensor(obj: Any, what: str) -> tuple[Any, int] | None:
    """A tensor's plain form, which shares its memory, and its device; None for anything but a tensor.

    Args:
        obj: anything.
        what: how messages call it.

    Raises:
        ArgumentError: it is on a GPU, and no GPU is in use.
        BackendUnavailableError: its dtype needs ml_dtypes, which is not installed.
        UnsupportedError: a tensor without strided memory in the host or on a GPU, one that autograd follows, or a dtype
            that NumPy lacks.
    """
    torch = _torch()
    if torch is None or not isinstance(obj, torch.Tensor):
        return None
    tensor = obj
    if type(obj) is not torch.Tensor:
        tensor = _without_class(torch, obj, what)
    if tensor.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            f"{what}: the tensor requires grad, and autograd would not know of this call; pass tensor.detach(), or "
            "make the call under torch.no_grad()"
        )
    dtype = _known.get(tensor.dtype) or _learn(torch, tensor, what)
    if tensor.is_cuda:
        return _on_gpu(torch, tensor, dtype.numpy, what), int(tensor.get_device())
    try:
        data = tensor.numpy() if dtype.bits is None else tensor.view(dtype.bits).numpy().view(dtype.numpy)
    except (RuntimeError, TypeError) as error:
        why = _why_not(torch, tensor) or str(error).partition("\n")[0]
        raise UnsupportedError(f"{what}: the tensor {why}") from error
    if data.flags.owndata and data.size:  # NumPy's own memory, where the tensor's pointer is null
        raise UnsupportedError(f"{what}: the tensor {_why_not(torch, tensor) or _FREED}")
    return data, _HOST_MEMORY


_FREED = "has no memory: its storage was resized or freed"


def _without_class(torch: Any, obj: Any, what: str) -> Any:
    """A tensor of a subclass as a plain one, of the same memory.

    Raises:
        UnsupportedError: its elements are not what its own memory holds.
    """
    if type(obj).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise UnsupportedError(
            f"{what}: {type(obj).__module__}.{type(obj).__qualname__} is made of other tensors; pass a plain one, such "
            "as its local part or its values"
        )
    with torch._C.DisableTorchFunctionSubclass():
        return obj.as_subclass(torch.Tensor)


def _learn(torch: Any, tensor: Any, what: str) -> _Dtype:
    """Keep what a tensor's dtype is in NumPy's terms."""
    dtype = tensor.dtype
    name = str(dtype).removeprefix("torch.")
    bits = None
    if name in _OF_NUMPY:
        made = np.dtype(name)
    elif name in _OF_ML_DTYPES:
        bits = getattr(torch, _OF_ML_DTYPES[name])
        made = np.dtype(_scalar_type(name, what))
    else:
        mend = "tensor.int_repr(), with its scale" if tensor.is_quantized else "the bits: tensor.view(torch.uint8)"
        raise UnsupportedError(f"{what}: NumPy has no dtype for {dtype}; pass {mend}")
    _known[dtype] = found = _Dtype(made, bits)
    _made[made] = dtype
    return found


def _scalar_type(name: str, what: str) -> Any:
    """A type of ml_dtypes."""
    try:
        import ml_dtypes
    except ModuleNotFoundError as error:
        raise BackendUnavailableError(f"{what}: tensors of {name} need ml_dtypes: pip install ml_dtypes") from error
    found = getattr(ml_dtypes, name, None)
    if found is None:
        raise BackendUnavailableError(f"{what}: tensors of {name} need a later ml_dtypes: pip install -U ml_dtypes")
    return found


def _why_not(torch: Any, tensor: Any) -> str:
    """What keeps a tensor's memory from being its elements, in words; '' for nothing."""
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout}; pass tensor.to_dense(), or its parts"
    if tensor.is_nested:
        return "is nested; pass its parts, or torch.nested.to_padded_tensor of it"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"is on {tensor.device}; supported are the CPU's and CUDA's tensors"
    if tensor.is_conj():
        return "is a conjugate that was not computed; pass tensor.resolve_conj()"
    if tensor.is_neg():
        return "is a negative that was not computed; pass tensor.resolve_neg()"
    if tensor._is_zerotensor():
        return "has no memory, as all its elements are 0; pass tensor.clone()"
    return ""


def _on_gpu(torch: Any, tensor: Any, dtype: np.dtype[Any], what: str) -> Any:
    """A CuPy array over a tensor's memory, which keeps the tensor."""
    backend = current_backend()
    if backend.name != "cuda":
        raise ArgumentError(
            f"{what}: the tensor is on {tensor.device}, and the {backend.name} backend is in use; "
            "NCCLCOMM_DEVICES=cuda demands GPUs, and says what is missing"
        )
    why = _why_not(torch, tensor)
    if why:
        raise UnsupportedError(f"{what}: the tensor {why}")
    return _array_over(backend.array_namespace(), tensor, dtype, what)


def _array_over(cupy: Any, tensor: Any, dtype: np.dtype[Any], what: str) -> Any:
    """See _on_gpu. Not by DLPack, which lacks dtypes, and would order streams."""
    try:
        pointer = int(tensor.data_ptr())
    except RuntimeError as error:  # inside torch.vmap and the like
        raise UnsupportedError(f"{what}: the tensor has no memory ({str(error).partition(chr(10))[0]})") from error
    shape, size = tuple(tensor.shape), tensor.numel()
    if size and not pointer:
        raise UnsupportedError(f"{what}: the tensor {_FREED}")
    strides, reach = None, size
    if not tensor.is_contiguous():
        steps = tensor.stride()
        strides = tuple(step * dtype.itemsize for step in steps)
        reach = 1 + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
    memory = cupy.cuda.UnownedMemory(pointer, reach * dtype.itemsize, tensor, tensor.get_device())
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)


class _Torch(Foreign):
    """PyTorch."""

    name = "torch"
    own_streams = True

    @property
    def namespace(self) -> Any:
        """The module."""
        return _torch()

    def empty(self, backend: DeviceBackend, shape: tuple[int, ...], dtype: Any, device: int) -> tuple[Any, Any] | None:
        """A tensor of PyTorch's own allocator; None on virtual devices, and on GPUs where PyTorch has no CUDA."""
        torch = _torch()
        kind = _torch_dtype(torch, np.dtype(dtype))
        if kind is None:
            return None
        if device == _HOST_MEMORY:
            tensor = torch.empty(shape, dtype=kind, device="cpu")
        elif backend.name == "cuda" and (torch.cuda.is_initialized() or torch.cuda.is_available()):
            try:
                tensor = torch.empty(shape, dtype=kind, device=torch.device("cuda", device))
            except torch.cuda.OutOfMemoryError:
                if not backend.settle():
                    raise
                tensor = torch.empty(shape, dtype=kind, device=torch.device("cuda", device))
        else:
            return None
        found = look_at_tensor(tensor, "a result")
        assert found is not None
        return tensor, found[0]

    def before_fill(self, obj: Any, what: str) -> None:
        """Have autograd know, which else would compute gradients with what a graph saved of the tensor."""
        if not obj.is_inference():
            _torch().autograd.graph.increment_version(obj)

    def current_stream(self, backend: DeviceBackend, device: int) -> StreamImpl:
        """PyTorch's current stream of the calling thread and a GPU."""
        torch = _torch()
        return _stream(backend, int(torch.cuda.current_stream(device).cuda_stream), device)

    def lend(self, backend: DeviceBackend, obj: Any, device: int) -> None:
        """Order CuPy's stream after PyTorch's, and have PyTorch keep the memory until what uses it there is done."""
        theirs, ours = self.current_stream(backend, device), backend.current_stream(device)
        if theirs.handle != ours.handle:
            backend.order(theirs, ours)
            obj.record_stream(_stream_for_torch(ours))


TORCH = _Torch()
"""PyTorch, as a kind of arrays."""


def _torch_dtype(torch: Any, dtype: np.dtype[Any]) -> Any:
    """PyTorch's dtype for one of NumPy's; None where it has none."""
    try:
        return _made[dtype]
    except KeyError:
        is_known = dtype.isnative and (dtype.name in _OF_NUMPY or dtype.name in _OF_ML_DTYPES)
        found = _made[dtype] = getattr(torch, dtype.name, None) if is_known else None
        return found


def _stream(backend: Any, handle: int, device: int) -> StreamImpl:
    """The backend's stream of a handle."""
    made: StreamImpl = (
        backend.default_stream(device) if handle in _DEFAULT_STREAMS else backend.external_stream(handle, device)
    )
    return made


def _stream_for_torch(stream: StreamImpl) -> Any:
    """PyTorch's stream for one of the backend's."""
    cuda = _torch().cuda
    if stream.handle in _DEFAULT_STREAMS:
        return cuda.default_stream(stream.device)
    return cuda.ExternalStream(stream.handle, device=stream.device)


def _backend_of_gpus(obj: Any) -> DeviceBackend:
    """The backend in use, if it can take PyTorch's streams and events."""
    backend = current_backend()
    if backend.name != "cuda":
        raise ArgumentError(f"{obj!r} is of a GPU, and the {backend.name} backend is in use")
    return backend


def stream_of_torch(stream: Any) -> tuple[DeviceBackend, StreamImpl] | None:
    """The backend, and its stream for one of PyTorch's; None for anything but a torch.cuda.Stream.

    Raises:
        ArgumentError: no GPU is in use.
    """
    torch = _torch()
    if torch is None or not isinstance(stream, torch.cuda.Stream):
        return None
    backend = _backend_of_gpus(stream)
    return backend, _stream(backend, int(stream.cuda_stream), int(stream.device.index))


def event_of_torch(event: Any) -> tuple[DeviceBackend, TorchEvent] | None:
    """The backend, and what records and waits for one of PyTorch's events; None for anything but a torch.cuda.Event.

    Raises:
        ArgumentError: no GPU is in use.
    """
    torch = _torch()
    if torch is None or not isinstance(event, torch.cuda.Event):
        return None
    return _backend_of_gpus(event), TorchEvent(event)


class TorchEvent(EventImpl):
    """An event of PyTorch's."""

    __slots__ = ("_event",)

    def __init__(self, event: Any) -> None:
        self._event = event

    @property
    def device(self) -> int | None:  # type: ignore[override]
        """Device of the stream that recorded it; None before the first record."""
        place = self._event.device
        return None if place is None else int(place.index)

    def record(self, stream: StreamImpl) -> None:
        """Mark the end of the work now enqueued on the stream."""
        self._event.record(_stream_for_torch(stream))

    def wait(self, stream: StreamImpl) -> None:
        """Make later work of the stream wait for the mark."""
        self._event.wait(_stream_for_torch(stream))

    def query(self) -> bool:
        """True if the marked work is complete, or the event was never recorded."""
        return bool(self._event.query())

    def synchronize(self) -> None:
        """Wait on the host for the marked work."""
        self._event.synchronize()

    def elapsed_ms(self, end: EventImpl) -> float:
        """Milliseconds between two of PyTorch's events."""
        if not isinstance(end, TorchEvent):
            raise ArgumentError("elapsed_time: one event is PyTorch's and one is not; time with two of one library")
        return float(self._event.elapsed_time(end._event))

    def ipc_handle(self) -> bytes:
        """A handle from which another process of this host opens the event."""
        return bytes(self._event.ipc_handle())
