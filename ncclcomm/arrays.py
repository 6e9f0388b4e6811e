"""What an array is: where it lives, its plain form, and outputs of the caller's kind.

Every call looks at its arrays through `view` and makes its results through `empty_on`, so that a new kind of
array is added here and nowhere else.
"""

from __future__ import annotations

import numbers
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from ncclcomm.devices.base import DeviceBackend
from ncclcomm.devices.foreign import Following, Foreign, follow
from ncclcomm.devices.foreign_dlpack import look_at_producer, producer_named
from ncclcomm.devices.foreign_torch import TORCH, is_torch_loaded, look_at_tensor
from ncclcomm.devices.host_array import HostArray
from ncclcomm.errors import ArgumentError, UnsupportedError

__all__ = [
    "HOST_MEMORY",
    "View",
    "check_dtype",
    "check_one_library",
    "check_out",
    "contiguous_flat",
    "empty_on",
    "followed",
    "is_contiguous",
    "kind_named",
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
    kind: Foreign | None = None
    """The library it is of; None for NumPy's, CuPy's and the host backend's arrays."""


class _Late(View):
    """A result in the array of a library that makes it of memory which is filled already."""

    __slots__ = ("_made",)

    def __init__(self, data: Any, device: int, kind: Foreign) -> None:
        self.data, self.device, self.kind = data, device, kind
        self._made: Any = None

    @property
    def obj(self) -> Any:
        """The library's array; to be asked for when the work that fills it is enqueued, not before."""
        if self._made is None:
            assert self.kind is not None
            self._made = self.kind.wrap(self.data)
        return self._made


def view(obj: Any, what: str) -> View:
    """Look at an array of any supported kind; copies nothing.

    Args:
        obj: a NumPy array, an array of the host backend, a CuPy array, a PyTorch tensor, or an object that exports its
            memory by DLPack or `__cuda_array_interface__`.
        what: how messages call it, such as 'broadcast: tensor'.

    Raises:
        ArgumentError: memory of a GPU, where the backend in use is the host's.
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
    """`view` for CuPy arrays, NumPy's subclasses and other libraries' arrays."""
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
    return _view_foreign(obj, what) or _refuse(obj, what)


def _view_foreign(obj: Any, what: str) -> View | None:
    """`view` for other libraries' arrays; None for what is none."""
    tensor = look_at_tensor(obj, what)
    found = look_at_producer(obj, what) if tensor is None else (*tensor, TORCH)
    if found is None:
        return None
    data, device, kind = found
    if kind is not None:
        follow(kind, device, data)
    return View(obj, data, device, kind)


def _refuse(obj: Any, what: str) -> NoReturn:
    """Say what an object is, and what to pass instead."""
    kind = f"{type(obj).__module__}.{type(obj).__qualname__}".removeprefix("builtins.")
    if isinstance(obj, (numbers.Number, list, tuple, range)) or hasattr(obj, "__array__"):
        mend = "numpy.asarray makes one of it"
    else:
        # numpy.asarray would make an array of it that holds a reference, and is refused next.
        mend = "other objects go over ranks by mpi4py: comm.mpi_comm.bcast(obj); mpi_comm is None in a world of one"
    raise UnsupportedError(
        f"{what}: {kind} is not a supported array; pass a NumPy array, a CuPy array, a PyTorch tensor, an array that "
        f"exports DLPack, or an array of ncclcomm.asarray ({mend})"
    )


def kind_named(name: Any, device: int) -> Foreign | None:
    """The library that another rank calls by this name; None where this process has not imported it.

    Args:
        name: the `name` of the kind of that rank's array; None if it has none.
        device: the device that the result is to be on, or HOST_MEMORY.
    """
    if name == TORCH.name:
        return TORCH if is_torch_loaded() else None
    return producer_named(name, device != HOST_MEMORY) if name else None


def followed(backend: DeviceBackend, kind: Foreign | None, transport: Any) -> Any:
    """A transport whose calls are made on the streams that a library works on, on each device of their views."""
    return transport if kind is None or backend.name != "cuda" else _Followed(backend, kind, transport)


class _Followed:
    """See `followed`."""

    def __init__(self, backend: DeviceBackend, kind: Foreign, transport: Any) -> None:
        self.backend = backend
        self._kind = kind
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        """A call of the transport."""
        call = getattr(self._transport, name)

        def on_their_streams(*args: Any) -> Any:
            block = Following(self.backend)
            try:
                with block:
                    for found in _views_in(args):
                        if found.device != HOST_MEMORY:
                            block.add(self._kind, found.device, found.data)
                    return call(*args)
            finally:
                block.end()

        return on_their_streams


def _views_in(values: Any) -> Iterator[View]:
    """The views in nested lists and tuples."""
    if isinstance(values, View):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _views_in(value)


def check_one_library(arrays: Sequence[View], what: str) -> None:
    """Check that arrays on GPUs are all worked on by the current streams of one library.

    Raises:
        ArgumentError: tensors of PyTorch and others are mixed.
    """
    kinds = {
        array.kind if array.kind is not None and array.kind.own_streams else None
        for array in arrays
        if array.device != HOST_MEMORY
    }
    if len(kinds) > 1:
        raise ArgumentError(
            f"{what}: PyTorch's tensors and CuPy's arrays can't be mixed on GPUs, as each library has a current stream "
            "of its own; ncclcomm.asarray(tensor) is a CuPy array over a tensor's memory"
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


def empty_on(
    backend: DeviceBackend, shape: tuple[int, ...], dtype: Any, device: int, kind: Foreign | None = None
) -> View:
    """A new C-contiguous array on a device, in the backend's own kind, or a NumPy array in host memory.

    Args:
        backend: the devices.
        shape: its shape.
        dtype: its dtype.
        device: where it is to be, HOST_MEMORY for host memory.
        kind: the library that it is to be of, where that has arrays there; None: no other. Its `obj` is to be asked for
            when the work that fills it is enqueued.
    """
    if kind is not None:
        made = kind.empty(backend, shape, dtype, device)
        if made is not None:
            follow(kind, device)
            return View(*made, device, kind)
        if kind.wraps(backend, device):
            return _Late(empty_on(backend, shape, dtype, device).data, device, kind)
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
        ArgumentError: the shape or dtype differs, out is read-only, its elements overlap, it overlaps an input, or it
            and an input on GPUs are of libraries with streams of their own.
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
        if item.kind is not out.kind:
            check_one_library((item, out), what)
        if item.device == out.device and overlaps(data, item.data):
            if alias_ok and same_memory(data, item.data):
                continue
            raise ArgumentError(f"{what} overlaps an input; pass the input itself, or an array apart from it")
    if out.kind is not None:
        out.kind.before_fill(out.obj, what)
