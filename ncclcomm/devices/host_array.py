"""The host backend's array: a NumPy array that knows which virtual device it lives on.

It keeps the rules that CuPy arrays keep, so that a program that is right here is right on GPUs: operations between
arrays of two devices raise, as do operations with plain NumPy arrays, and reductions to one value give 0-d arrays.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ncclcomm.errors import ArgumentError, UnsupportedError

__all__ = ["HostArray", "HostDevice", "arrays_in", "as_host_array"]


@dataclass(frozen=True)
class HostDevice:
    """What `array.device` is for an array of the host backend, as `cupy.cuda.Device` is for CuPy's."""

    id: int

    def __int__(self) -> int:
        """The device number."""
        return self.id

    def __index__(self) -> int:
        """The device number."""
        return self.id

    def __repr__(self) -> str:
        """As `<host device 1>`."""
        return f"<host device {self.id}>"


class HostArray(np.ndarray):
    """An array on a virtual device. Made by `ncclcomm.asarray`, `empty`, `zeros` or `ncclcomm.xp`, not directly."""

    __slots__ = ("_device_id",)

    _device_id: int

    def __array_finalize__(self, obj: Any) -> None:
        """Views and results stay on the device of the array they come from."""
        self._device_id = obj._device_id if isinstance(obj, HostArray) else 0

    @property
    def device(self) -> HostDevice:  # type: ignore[override]
        """The device it lives on; `.id` is its number."""
        return HostDevice(self._device_id)

    def get(self) -> np.ndarray[Any, Any]:
        """A copy in host memory, as a plain NumPy array."""
        return np.array(self, subok=False)

    def __getitem__(self, key: Any) -> Any:
        """Indexing gives arrays of this device, 0-d ones for single elements."""
        item = super().__getitem__(key)
        if isinstance(item, np.ndarray):
            return item
        return super().__getitem__((*key, ...) if isinstance(key, tuple) else (key, ...))

    def __setitem__(self, key: Any, value: Any) -> None:
        """Assign from arrays of this device, and from numbers."""
        if isinstance(value, np.ndarray) and not (value.ndim == 0 and not isinstance(value, HostArray)):
            _common_device("assignment", (self, value))
        super().__setitem__(key, value)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **kwargs: Any) -> Any:
        """Run a ufunc among arrays of one device."""
        outs = out or ()
        device = _common_device(f"numpy.{ufunc.__name__}", (*inputs, *outs, *arrays_in(kwargs)))
        if outs:
            kwargs["out"] = tuple(_plain(o) for o in outs)
        result = getattr(ufunc, method)(*(_plain(x) for x in inputs), **{k: _plain(v) for k, v in kwargs.items()})
        if method == "at":
            return None
        if outs:
            return outs[0] if len(outs) == 1 else outs
        return _wrap(result, device)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run a NumPy function among arrays of one device."""
        device = _common_device(f"numpy.{func.__name__}", [*arrays_in(args), *arrays_in(kwargs)])
        result = func(*(_plain_deep(a) for a in args), **{k: _plain_deep(v) for k, v in kwargs.items()})
        out = kwargs.get("out")
        return out if isinstance(out, HostArray) else _wrap(result, device)

    def __repr__(self) -> str:
        """As a NumPy array's. NumPy would show each element by `self[index]`, which is a 0-d array, no number."""
        return textwrap.indent(repr(_plain(self)), " " * len("Host")).replace("    array", "HostArray", 1)

    def __str__(self) -> str:
        """As a NumPy array's."""
        return str(_plain(self))

    def dot(self, other: Any, out: Any = None) -> Any:
        """As numpy.dot, among arrays of one device."""
        return np.dot(self, other) if out is None else np.dot(self, other, out=out)

    def __reduce__(self) -> Any:
        """Pickled with its device."""
        return _rebuild, (self.get(), self._device_id)


def _total(name: str) -> Callable[..., Any]:
    """A method of ndarray that reduces, whose total is a 0-d array of the device and not a NumPy number."""
    method = getattr(np.ndarray, name)

    @functools.wraps(method)
    def call(self: HostArray, *args: Any, **kwargs: Any) -> Any:
        _common_device(f"numpy.ndarray.{name}", [self, *arrays_in(args), *arrays_in(kwargs)])
        result = method(_plain(self), *_plain_deep(args), **_plain_deep(kwargs))
        out = kwargs.get("out")
        return out if out is not None else _wrap(result, self._device_id)

    return call


for _name in ("all", "any", "argmax", "argmin", "max", "mean", "min", "prod", "std", "sum", "trace", "var"):
    setattr(HostArray, _name, _total(_name))


_view = np.ndarray.view


def as_host_array(array: np.ndarray[Any, Any], device: int) -> HostArray:
    """View a NumPy array's memory as an array of a virtual device; no copy."""
    view: HostArray = _view(array, HostArray)
    view._device_id = device
    return view


def _rebuild(array: np.ndarray[Any, Any], device: int) -> HostArray:
    """Make a pickled array again."""
    return as_host_array(array, device)


def _plain(value: Any) -> Any:
    """The plain NumPy view of a HostArray; anything else as it is."""
    return value.view(np.ndarray) if isinstance(value, HostArray) else value


def _plain_deep(value: Any) -> Any:
    """`_plain`, also inside lists, tuples and dicts."""
    if isinstance(value, (list, tuple)):
        return type(value)(_plain_deep(v) for v in value)
    if isinstance(value, dict):
        return {k: _plain_deep(v) for k, v in value.items()}
    return _plain(value)


def arrays_in(value: Any) -> Iterator[Any]:
    """The arrays in nested lists, tuples and dicts."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, dict):
        for v in value.values():
            yield from arrays_in(v)
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from arrays_in(v)


def _common_device(what: str, values: Any) -> int:
    """The one device that all arrays among the values live on."""
    devices = set()
    for value in values:
        if isinstance(value, HostArray):
            devices.add(value._device_id)
        elif isinstance(value, np.ndarray):
            raise UnsupportedError(
                f"{what}: a NumPy array in host memory and an array of a device can't be mixed; "
                "move one with ncclcomm.asarray or ncclcomm.to_numpy"
            )
    if len(devices) > 1:
        raise ArgumentError(
            f"{what}: arrays of devices {sorted(devices)} can't be mixed; move one with ncclcomm.asarray(x, device=...)"
        )
    return int(devices.pop())


def _wrap(result: Any, device: int) -> Any:
    """Put what NumPy returned on the device: arrays, and single values as 0-d arrays."""
    if isinstance(result, HostArray):
        return result
    if isinstance(result, (np.ndarray, np.generic)):
        return as_host_array(np.asarray(result), device)
    if isinstance(result, (list, tuple)):
        items = [_wrap(r, device) for r in result]
        return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)
    return result
