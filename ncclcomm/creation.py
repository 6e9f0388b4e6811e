"""Public functions that make, move and look at arrays, the same on GPUs and on virtual devices."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ncclcomm.arrays import HOST_MEMORY, View, check_dtype, empty_on, view
from ncclcomm.devices.foreign import joined
from ncclcomm.devices.index import is_host_memory, resolve_device
from ncclcomm.devices.registry import current_backend
from ncclcomm.errors import ArgumentError
from ncclcomm.transport.peer import PeerTransport

if TYPE_CHECKING:
    from ncclcomm.devices.base import DeviceBackend

__all__ = ["array_module", "asarray", "device_index", "empty", "to_numpy", "zeros"]


def _device_number(device: Any, default: int) -> int:
    """The device that an argument means: None is the default, 'cpu' and -1 are host memory."""
    if device is None:
        return default
    if is_host_memory(device):
        return HOST_MEMORY
    return resolve_device(device)


def asarray(obj: Any, device: Any = None, dtype: Any = None) -> Any:
    """An array on a device, from any array or from what numpy.asarray takes.

    The copy, if one is needed, is enqueued on the current stream of the device; host memory may be reused at once.

    Args:
        obj: an array of any shape, of this or another library, a number, or nested lists of numbers.
        device: a device number or object, 'cpu' (or -1) for host memory; None: where obj is, or the current device
            where obj is in host memory.
        dtype: the dtype of the result; None keeps obj's.

    Returns:
        A CuPy array or an array of a virtual device; a NumPy array in host memory, complete when the call returns. obj
        itself where it already is there, of that dtype; one over obj's memory where obj is of another library.

    Raises:
        ArgumentError: no such device.
        UnsupportedError: a dtype whose elements are not plain memory.

    See: cupy.asarray.
    """
    backend = current_backend()
    source = view(_as_array(obj), "asarray: obj")
    default = backend.current_device() if source.device == HOST_MEMORY else source.device
    number = _device_number(device, default)
    wanted = source.data.dtype if dtype is None else np.dtype(dtype)
    check_dtype(wanted, "asarray: dtype")
    with joined(backend, source.kind, source.device):
        if wanted != source.data.dtype:
            source = _cast(backend, source, wanted)
        if source.device != number:
            target = empty_on(backend, source.data.shape, wanted, number)
            PeerTransport(backend, ()).copy(target, source)
            return target.obj
    if source.kind is None:
        return source.obj if isinstance(source.obj, type(source.data)) else source.data
    if source.device != HOST_MEMORY:
        source.kind.lend(backend, source.obj, source.device)
    return source.data


_ARRAYS = ("dtype", "__dlpack__", "__cuda_array_interface__")
"""What arrays have, of any library."""


def _as_array(obj: Any) -> Any:
    """Numbers and lists as a NumPy array; anything that has a dtype or memory, and is no NumPy number, as it is."""
    is_array = any(hasattr(obj, name) for name in _ARRAYS) and not isinstance(obj, np.generic)
    return obj if is_array else np.asarray(obj)


def _cast(backend: DeviceBackend, source: View, dtype: Any) -> View:
    """The array in another dtype, where it is."""
    if source.device == HOST_MEMORY:
        return view(source.data.astype(dtype), "asarray")
    if isinstance(source.data, np.ndarray):
        target = empty_on(backend, source.data.shape, dtype, source.device)
        backend.current_stream(source.device).launch(np.copyto, target.data, source.data, "unsafe")
        return target
    with backend.on_device(source.device):
        cast = view(source.data.astype(dtype), "asarray")
        if source.kind is not None:
            backend.keep(source.device, source.data)  # its library may not know of this use
        return cast


def empty(shape: int | Sequence[int], dtype: Any = float, device: Any = None) -> Any:
    """An uninitialised C-contiguous array.

    Args:
        shape: its shape.
        dtype: its dtype.
        device: a device number or object, 'cpu' (or -1) for host memory; None: the current device.

    Raises:
        ArgumentError: no such device, or a negative length.

    See: numpy.empty.
    """
    backend = current_backend()
    number = _device_number(device, backend.current_device())
    dims = tuple([operator.index(n) for n in (shape if isinstance(shape, Sequence) else (shape,))])
    if any(n < 0 for n in dims):
        raise ArgumentError(f"empty: shape {dims} has a negative entry")
    wanted = np.dtype(dtype)
    check_dtype(wanted, "empty: dtype")
    return empty_on(backend, dims, wanted, number).obj


def zeros(shape: int | Sequence[int], dtype: Any = float, device: Any = None) -> Any:
    """A C-contiguous array of zeros, filled on the current stream of its device.

    Args:
        shape: its shape.
        dtype: its dtype.
        device: a device number or object, 'cpu' (or -1) for host memory; None: the current device.

    Raises:
        ArgumentError: no such device.

    See: numpy.zeros.
    """
    backend = current_backend()
    array = empty(shape, dtype, device)
    found = view(array, "zeros")
    if not isinstance(found.data, np.ndarray):
        with backend.on_device(found.device):
            found.data.data.memset_async(0, found.data.nbytes)
    elif found.device == HOST_MEMORY or backend.immediate:
        np.copyto(found.data, np.zeros((), found.data.dtype))
    else:
        backend.copy(found.data, np.zeros(found.data.shape, found.data.dtype), backend.current_stream(found.device))
    return array


def device_index(obj: Any) -> int:
    """The number of the device that an array is on; -1 for host memory.

    Raises:
        UnsupportedError: no array.
    """
    return view(obj, "device_index: obj").device


def to_numpy(obj: Any) -> np.ndarray[Any, Any]:
    """A copy of an array in host memory, once the work queued on its device's current stream is done.

    Args:
        obj: an array of any kind. Of a PyTorch tensor, the work on PyTorch's current stream counts.

    Returns:
        A new C-contiguous NumPy array.

    Raises:
        UnsupportedError: no array.

    See: cupy.asnumpy.
    """
    source = view(obj, "to_numpy: obj")
    backend = current_backend()
    target = empty_on(backend, source.data.shape, source.data.dtype, HOST_MEMORY)
    with joined(backend, source.kind, source.device):
        PeerTransport(backend, ()).copy(target, source)
    array: np.ndarray[Any, Any] = target.data
    return array


def array_module(obj: Any = None) -> Any:
    """The module whose functions make and take arrays like obj.

    Args:
        obj: an array; None: arrays of the backend in use, which is `ncclcomm.xp`.

    Returns:
        CuPy; NumPy for NumPy arrays; on the host backend a namespace with NumPy's functions whose arrays live on the
        current virtual device. For an array of another library that module of it, where it is known: torch for tensors.

    Raises:
        UnsupportedError: no array.

    See: cupy.get_array_module.
    """
    found = None if obj is None else view(obj, "array_module: obj")
    if found is not None and found.kind is not None and found.kind.namespace is not None:
        return found.kind.namespace
    if found is not None and found.device == HOST_MEMORY:
        return np
    return current_backend().array_namespace()
