"""What an array is: where it lives, its plain form, and outputs of the caller's kind.

Every call looks at its arrays through `view` and makes its results through `empty_on`, so that a new kind of
array is added here and nowhere else.
"""

from __future__ import annotations

import numbers
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ncclcomm.devices.base import DeviceBackend
from ncclcomm.devices.host_array import HostArray
from ncclcomm.errors import ArgumentError, UnsupportedError

__all__ = [
    "HOST_MEMORY",
    "View",
    "check_dtype",
    "check_out",
    "contiguous_flat",
    "empty_on",
    "is_contiguous",
    "overlaps",
    "same_memory",
    "view",
]

HOST_MEMORY = -1
"""The device number of host memory: NumPy arrays, and 'cpu' as a destination."""


@dataclass(slots=True, eq=False)
class View:
    """One array as the layers below see it."""

    obj: Any
    """The caller's own object."""
    data: Any
    """Its plain form: a numpy.ndarray for host memory and virtual devices, a cupy.ndarray for GPUs."""
    device: int
    """The device that it lives on, or HOST_MEMORY."""


def view(obj: Any, what: str) -> View:
    """Look at an array of any supported kind; copies nothing.

    Args:
        obj: a NumPy array, an array of the host backend, or a CuPy array.
        what: how messages call it, such as 'broadcast: tensor'.

    Raises:
        UnsupportedError: another kind of object, or a dtype whose elements are not plain memory.
    """
    cls = type(obj)
    if cls is HostArray:
        found = View(obj, obj.view(np.ndarray), obj._device_id)
    elif cls is np.ndarray:
        found = View(obj, obj, HOST_MEMORY)
    else:
        found = _view_other(obj, what)
    check_dtype(found.data.dtype, what)
    return found


def check_dtype(dtype: np.dtype[Any], what: str) -> None:
    """Refuse dtypes whose elements are not plain memory.

    Raises:
        UnsupportedError: the dtype holds references.
    """
    if dtype.hasobject or dtype.kind == "T":
        raise UnsupportedError(
            f"{what}: dtype {dtype} holds references, not plain memory (an object); use a numeric or fixed-size one"
        )


def _view_other(obj: Any, what: str) -> View:
    """`view` for CuPy arrays and NumPy's subclasses."""
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(obj, cupy.ndarray):
        return View(obj, obj, int(obj.device.id))
    if isinstance(obj, HostArray):
        return View(obj, obj.view(np.ndarray), obj._device_id)
    if isinstance(obj, np.generic):
        return View(obj, np.asarray(obj), HOST_MEMORY)
    if isinstance(obj, np.ma.MaskedArray):
        raise UnsupportedError(
            f"{what}: {type(obj).__name__} would lose its mask; pass .filled(value), or .data and .mask"
        )
    if isinstance(obj, np.matrix):
        raise UnsupportedError(
            f"{what}: matrix keeps two dimensions in all that is made of it; pass numpy.asarray of it"
        )
    if isinstance(obj, np.ndarray):
        return View(obj, np.asarray(obj), HOST_MEMORY)
    kind = f"{type(obj).__module__}.{type(obj).__qualname__}".removeprefix("builtins.")
    if isinstance(obj, (numbers.Number, list, tuple, range)) or hasattr(obj, "__array__"):
        mend = "numpy.asarray makes one of it"
    else:
        # numpy.asarray would make an array of it that holds a reference, and is refused next.
        mend = "other objects go over ranks by mpi4py: comm.mpi_comm.bcast(obj); mpi_comm is None in a world of one"
    raise UnsupportedError(
        f"{what}: {kind} is not a supported array; pass a NumPy array, a CuPy array or an array of ncclcomm.asarray "
        f"({mend})"
    )


def is_contiguous(data: Any) -> bool:
    """True for C-contiguous memory."""
    return bool(data.flags.c_contiguous)


def contiguous_flat(data: Any) -> Any:
    """The elements in C order as one dimension: a view where they lie so, else a copy on the same device."""
    return data.reshape(-1) if data.flags.c_contiguous else _copy_c(data).reshape(-1)


def _copy_c(data: Any) -> Any:
    """A C-contiguous copy on the same device."""
    return data.copy(order="C")


def empty_on(backend: DeviceBackend, shape: tuple[int, ...], dtype: Any, device: int) -> View:
    """A new C-contiguous array on a device, in the backend's own kind, or a NumPy array in host memory."""
    if device == HOST_MEMORY:
        array = np.empty(shape, dtype)
        return View(array, array, HOST_MEMORY)
    array = backend.empty(shape, dtype, device)
    # Behind a new array of the host backend stands the plain one that it was made of.
    return View(array, array.base if type(array) is HostArray else array, device)


def _extent(data: Any) -> tuple[int, int]:
    """First address and the address behind the last byte; equal for no elements."""
    address = int(data.__array_interface__["data"][0]) if isinstance(data, np.ndarray) else int(data.data.ptr)
    if data.size == 0:
        return address, address
    if data.flags.c_contiguous:
        return address, address + data.nbytes
    low = sum(min(0, (n - 1) * s) for n, s in zip(data.shape, data.strides, strict=True))
    high = sum(max(0, (n - 1) * s) for n, s in zip(data.shape, data.strides, strict=True))
    return address + low, address + high + data.itemsize


def same_memory(a: Any, b: Any) -> bool:
    """True if two arrays are the same elements in the same order."""
    if a is b:
        return True
    if a.shape != b.shape or a.strides != b.strides or not _may_overlap(a, b):
        return False
    return _extent(a)[0] == _extent(b)[0]


def overlaps(a: Any, b: Any) -> bool:
    """True if two arrays of one memory may share a byte; for strided ones that interleave exactly when they do."""
    if not _may_overlap(a, b):
        return False
    return not isinstance(a, np.ndarray) or not isinstance(b, np.ndarray) or bool(np.shares_memory(a, b))


def _may_overlap(a: Any, b: Any) -> bool:
    """True if the stretches of memory that two arrays span have a byte in common."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return bool(np.may_share_memory(a, b))  # a tenth of the time that looking at their addresses takes here
    (a_low, a_high), (b_low, b_high) = _extent(a), _extent(b)
    return a_low < b_high and b_low < a_high


def _overlaps_itself(data: Any) -> bool:
    """True if two elements of one array may share memory, as after numpy.broadcast_to."""
    if data.size <= 1:
        return False
    reach = data.itemsize
    for stride, n in sorted((abs(s), n) for s, n in zip(data.strides, data.shape, strict=True) if n > 1):
        if stride < reach:
            return True
        reach = stride * (n - 1) + reach
    return False


def check_out(
    out: View, shape: Sequence[int], dtype: Any, what: str, inputs: Sequence[View] = (), alias_ok: bool = False
) -> None:
    """Check that an `out=` array can take a result.

    Args:
        out: the caller's array.
        shape: the shape that it must have.
        dtype: the dtype that it must have.
        what: how messages call it, such as 'gather: out'.
        inputs: arrays of the call that out must not overlap.
        alias_ok: True where out may be exactly one of the inputs (in place).

    Raises:
        ArgumentError: the shape or dtype differs, out is read-only, its elements overlap, or it overlaps an input.
    """
    data = out.data
    if data.shape != tuple(shape) or data.dtype != dtype:
        raise ArgumentError(
            f"{what} has shape {data.shape} and dtype {data.dtype}; the result has shape {tuple(shape)} and "
            f"dtype {dtype}"
        )
    flags = data.flags
    if isinstance(data, np.ndarray) and not flags.writeable:
        raise ArgumentError(f"{what} is read-only")
    if not flags.c_contiguous and _overlaps_itself(data):
        raise ArgumentError(f"{what}: elements of the array share memory (a broadcast view?); pass a plain array")
    for item in inputs:
        if item.device == out.device and overlaps(data, item.data):
            if alias_ok and same_memory(data, item.data):
                continue
            raise ArgumentError(f"{what} overlaps an input; pass the input itself, or an array apart from it")
