"""Arrays of any library that exports them by DLPack, or GPU memory by `__cuda_array_interface__`."""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np

from ncclcomm.devices.base import DeviceBackend, StreamImpl
from ncclcomm.devices.foreign import Foreign
from ncclcomm.devices.index import DLPACK_HOST_MEMORY, DLPACK_ON_GPU
from ncclcomm.devices.registry import current_backend
from ncclcomm.errors import ArgumentError, UnsupportedError

__all__ = ["Producer", "look_at_producer", "producer_named"]

_HOST_MEMORY = -1


_OF_NUMPY = 1
"""What dtype.isbuiltin says of NumPy's own dtypes, which are all that its DLPack knows."""


class Producer(Foreign):
    """A library known by what its arrays export.

    Args:
        namespace: the module that its arrays name by `__array_namespace__`, if that takes DLPack; else None.
        on_gpu: its arrays seen were on a GPU. Whether the library has any elsewhere is not known.
        can_be_filled: they may be written to; for host memory NumPy's flag says it.
    """

    own_streams = False

    def __init__(self, namespace: Any, on_gpu: bool, can_be_filled: bool) -> None:
        self._namespace = namespace
        self.name = "" if namespace is None else str(getattr(namespace, "__name__", ""))
        self._on_gpu = on_gpu
        self._can_be_filled = can_be_filled

    @property
    def namespace(self) -> Any:
        """The module that its arrays name, if it takes DLPack."""
        return self._namespace

    def wraps(self, backend: DeviceBackend, device: int) -> bool:
        """True in the kind of memory that its arrays seen were in."""
        if self._namespace is None:
            return False
        return device != _HOST_MEMORY and backend.name == "cuda" if self._on_gpu else device == _HOST_MEMORY

    def wrap(self, data: Any) -> Any:
        """The library's array of some memory, or of a copy of it."""
        if isinstance(data, np.ndarray) and data.dtype.isbuiltin != _OF_NUMPY:
            return self._namespace.asarray(data)
        return self._namespace.from_dlpack(data)

    def before_fill(self, obj: Any, what: str) -> None:
        """Refuse memory on a GPU that may be constant."""
        if not self._can_be_filled:
            raise ArgumentError(
                f"{what}: {_type_name(obj)} doesn't say whether its memory on the GPU may be written to; pass a CuPy "
                "array, or one over that memory: cupy.from_dlpack(array)"
            )

    def current_stream(self, backend: DeviceBackend, device: int) -> StreamImpl | None:
        """None: DLPack orders the library's work before CuPy's current stream, when the array is looked at."""
        return None


_producer = functools.lru_cache(maxsize=64)(Producer)


def producer_named(name: str, on_gpu: bool) -> Producer | None:
    """The library that another rank's arrays are of; None where this process has not imported it."""
    namespace = sys.modules.get(name) if name else None
    return None if _from_dlpack(namespace) is None else _producer(namespace, on_gpu, False)


def look_at_producer(obj: Any, what: str) -> tuple[Any, int, Foreign | None] | None:
    """An array's plain form, which shares its memory, its device, and its library; None if it exports no memory.

    Args:
        obj: anything.
        what: how messages call it.

    Raises:
        ArgumentError: it is in a GPU's memory, and no GPU is in use.
        UnsupportedError: it exports memory of another kind, or in a way that NumPy or CuPy doesn't take.
    """
    if not hasattr(obj, "__dlpack__") or not hasattr(obj, "__dlpack_device__"):
        return _look_at_gpu_memory(obj, what) if hasattr(obj, "__cuda_array_interface__") else None
    data: Any = None
    try:
        place = int(obj.__dlpack_device__()[0])
        if place in DLPACK_HOST_MEMORY:
            data = _from_host_memory(obj)
        elif place in DLPACK_ON_GPU:
            data = _cupy(obj, what).from_dlpack(obj)
    except ArgumentError:
        raise
    except Exception as error:  # each library has its own; the cause tells
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise UnsupportedError(
            f"{what}: {_type_name(obj)} can't be taken by DLPack ({first}); pass numpy.asarray of it, or its bits as "
            "an integer of the same size"
        ) from error
    if place in DLPACK_HOST_MEMORY:
        namespace = _namespace_of(obj)
        return data, _HOST_MEMORY, None if namespace is None else _producer(namespace, False, True)
    if place in DLPACK_ON_GPU:
        return data, int(data.device.id), _producer(_namespace_of(obj), True, False)
    raise UnsupportedError(
        f"{what}: {_type_name(obj)} is on a device that DLPack gives the number {place}; supported are host memory and "
        "CUDA's"
    )


def _from_host_memory(obj: Any) -> np.ndarray[Any, Any]:
    """A NumPy array over an exporter's memory, read-only where the exporter doesn't say that it may be written to."""
    data: np.ndarray[Any, Any]
    try:
        try:
            data = np.from_dlpack(obj, copy=False)
        except TypeError:  # the exporter, or NumPy 1, is of before there were such arguments; then nothing is copied
            data = np.from_dlpack(obj)
    except (BufferError, RuntimeError):
        if not hasattr(obj, "__array__"):
            raise
        # Such as bfloat16, which NumPy's DLPack lacks. This may be a copy, so it is no place to write results to.
        data = np.asarray(obj).view()
        data.flags.writeable = False
    return data


def _look_at_gpu_memory(obj: Any, what: str) -> tuple[Any, int, Foreign]:
    """As look_at_producer, by `__cuda_array_interface__`."""
    is_constant = bool(obj.__cuda_array_interface__["data"][1])
    cupy = _cupy(obj, what)
    try:
        data = cupy.asarray(obj)
    except ValueError as error:
        raise UnsupportedError(f"{what}: CuPy doesn't take the memory of {_type_name(obj)} ({error})") from error
    return data, int(data.device.id), _producer(None, True, not is_constant)


def _cupy(obj: Any, what: str) -> Any:
    """CuPy, where the CUDA backend is in use."""
    backend = current_backend()
    if backend.name != "cuda":
        raise ArgumentError(
            f"{what}: {_type_name(obj)} is in a GPU's memory, and the {backend.name} backend is in use; "
            "NCCLCOMM_DEVICES=cuda demands GPUs, and says what is missing"
        )
    return backend.array_namespace()


def _namespace_of(obj: Any) -> Any:
    """The module that makes arrays like obj of DLPack; None if none is named."""
    name = getattr(obj, "__array_namespace__", None)
    namespace = None if name is None else name()
    return namespace if namespace is not np and _from_dlpack(namespace) is not None else None


def _from_dlpack(namespace: Any) -> Any:
    """A module's function of that name, or None."""
    return getattr(namespace, "from_dlpack", None)


def _type_name(obj: Any) -> str:
    """A type's name with its module."""
    return f"{type(obj).__module__}.{type(obj).__qualname__}"
