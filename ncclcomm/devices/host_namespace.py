"""`ncclcomm.xp` on the host backend: NumPy's names, making arrays of the current virtual device.

A function that makes an array puts it on the calling thread's current device; one that takes arrays of a device gives
its results there. Names that are not functions (dtypes, constants) are NumPy's own.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from ncclcomm.devices.host_array import HostArray, arrays_in, as_host_array
from ncclcomm.errors import UnsupportedError

__all__ = ["HostNamespace"]

_TAKES_HOST_DATA = frozenset({"array", "asarray", "ascontiguousarray", "asfortranarray", "asanyarray"})
"""Functions that bring host data to a device, so that a NumPy array is a fit argument."""


class HostNamespace:
    """A NumPy module (or random generator) whose arrays live on the current virtual device."""

    def __init__(self, wrapped: Any, current_device: Callable[[], int]) -> None:
        self._wrapped = wrapped
        self._current_device = current_device

    ndarray = HostArray

    def __getattr__(self, name: str) -> Any:
        """Look a name up in NumPy; functions are wrapped, and kept."""
        value = getattr(self._wrapped, name)
        if isinstance(value, types.ModuleType):
            value = HostNamespace(value, self._current_device)
        elif isinstance(value, np.ufunc):
            value = _HostUfunc(value, self._current_device)
        elif callable(value) and not isinstance(value, type):
            value = self._wrap(name, value)
        else:
            return value
        setattr(self, name, value)
        return value

    @property
    def __name__(self) -> str:
        """The name of what is wrapped, such as 'numpy'."""
        return str(getattr(self._wrapped, "__name__", type(self._wrapped).__name__))

    def __dir__(self) -> list[str]:
        """NumPy's names."""
        return dir(self._wrapped)

    def __repr__(self) -> str:
        """Name what is wrapped."""
        return f"<ncclcomm host namespace of {self.__name__!r}>"

    def asnumpy(self, array: Any) -> np.ndarray[Any, Any]:
        """A copy in host memory, as `cupy.asnumpy`."""
        return np.array(array, subok=False)

    def _wrap(self, name: str, func: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose results are arrays of a virtual device."""
        takes_host_data = name in _TAKES_HOST_DATA

        @functools.wraps(func)
        def call(*args: Any, **kwargs: Any) -> Any:
            if takes_host_data:
                return self._bring(func, args, kwargs)
            for value in (*arrays_in(args), *arrays_in(kwargs)):
                if not isinstance(value, HostArray):
                    raise UnsupportedError(
                        f"xp.{name}: a NumPy array is in host memory; bring it to the device with xp.asarray first"
                    )
            return self._place(func(*args, **kwargs))

        return call

    def _bring(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make an array on the current device from host data, or keep one where it is.

        Host data is always copied, as a move to a GPU would, so that later writes to it don't show in the array.
        """
        source = args[0] if args else kwargs.get("object", kwargs.get("a"))
        if isinstance(source, HostArray):
            plain = (source.view(np.ndarray), *args[1:])
            return as_host_array(func(*plain, **kwargs), source._device_id)
        made = func(*args, **kwargs)
        if isinstance(source, np.ndarray) and np.may_share_memory(made, source):
            made = made.copy(order="K")
        return as_host_array(np.asarray(made), self._current_device())

    def _place(self, value: Any) -> Any:
        """Put what NumPy made on the current device."""
        if isinstance(value, HostArray):
            return value
        if isinstance(value, (np.ndarray, np.generic)):
            return as_host_array(np.asarray(value), self._current_device())
        if isinstance(value, (np.random.Generator, np.random.RandomState)):
            return HostNamespace(value, self._current_device)
        if type(value) in (list, tuple):
            return type(value)(self._place(v) for v in value)
        return value


class _HostUfunc(HostNamespace):
    """A NumPy ufunc, with its methods."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply it."""
        return self._wrap(self._wrapped.__name__, self._wrapped)(*args, **kwargs)
