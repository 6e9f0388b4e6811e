"""What a device argument may be, and which device number it means."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from ncclcomm.devices.base import DeviceBackend
from ncclcomm.devices.registry import current_backend
from ncclcomm.errors import ArgumentError

__all__ = ["DLPACK_HOST_MEMORY", "DLPACK_ON_GPU", "device_or_noop", "is_host_memory", "resolve_device"]

DLPACK_HOST_MEMORY = (1, 3)
"""DLPack's device types for plain and for pinned host memory."""
DLPACK_ON_GPU = (2, 13)
"""And for CUDA's device and managed memory."""

_EXPECTED = (
    "an int, 'cuda:1', 'host:1', or an object that names one (torch.device, cupy.cuda.Device, ncclcomm.device, "
    "an array's .device)"
)


def resolve_device(value: Any, *, optional: bool = False) -> int:
    """The device number that a device argument means, checked against the backend in use.

    Taken are ints (NumPy's too), the strings 'cuda:N' (on every backend, so that programs run anywhere) and 'host:N'
    (on the host backend), objects with `.index` (torch.device), `.id` (cupy.cuda.Device, the device of a host array) or
    `.idx` (ncclcomm.device).

    Args:
        value: the argument.
        optional: None, a negative number, and a device without a number ('cuda') mean the calling thread's current
            device; else they are errors.

    Returns:
        A number from 0 to device_count() - 1.

    Raises:
        ArgumentError: the value names no device, or one that is not there.
    """
    backend = current_backend()
    number = _number(value, backend)
    if number is None or number < 0:
        if optional:
            return backend.current_device()
        raise ArgumentError(f"device {value!r} names no particular device: pass a number of 0 or more, or 'cuda:0'")
    return _checked(number, backend)


def is_host_memory(value: Any) -> bool:
    """True for what means host memory as a destination: 'cpu' (or 'cpu:0'), -1 and torch's CPU device."""
    if isinstance(value, str):
        kind, colon, digits = value.partition(":")
        return kind == "cpu" and bool(colon) == (digits.isascii() and digits.isdecimal())
    if isinstance(value, Integral):
        return int(value) == -1
    return getattr(value, "type", None) == "cpu"


def device_or_noop(value: Any) -> int:
    """As `resolve_device(value, optional=True)`, but a negative number stays and is to change nothing."""
    backend = current_backend()
    number = _number(value, backend)
    if number is None:
        return backend.current_device()
    return number if number < 0 else _checked(number, backend)


def _checked(number: int, backend: DeviceBackend) -> int:
    """The number, if there is such a device."""
    count = backend.device_count()
    if number < count:
        return number
    more = f"NCCLCOMM_DEVICES=host:{number + 1} gives more" if backend.name == "host" else "see CUDA_VISIBLE_DEVICES"
    raise ArgumentError(
        f"device {number} is not there: the {backend.name} backend has {count} device{'s' * (count != 1)}, "
        f"numbered from 0; {more}"
    )


def _number(value: Any, backend: DeviceBackend) -> int | None:
    """The number that the value states, maybe negative; None where it states none."""
    if type(value) is int:
        return value
    if value is None:
        return None
    if isinstance(value, str):
        return _number_of_text(value, backend)
    if not isinstance(value, bool) and isinstance(value, Integral):
        return int(value)
    if getattr(value, "type", "cuda") != "cuda":
        raise ArgumentError(f"device {value!r} is not a device of the {backend.name} backend: pass {_EXPECTED}")
    for name in ("idx", "id", "index"):
        number = getattr(value, name, value)
        # Lists and strings have an `index` too, a method.
        if number is None or (isinstance(number, int) and not isinstance(number, bool)):
            return number
    raise ArgumentError(f"device {value!r} ({type(value).__name__}) is not a device: pass {_EXPECTED}")


def _number_of_text(text: str, backend: DeviceBackend) -> int | None:
    """The number in 'cuda:1' or 'host:1'; None for 'cuda' and 'host'."""
    kind, colon, digits = text.partition(":")
    if kind not in ("cuda", backend.name) or bool(colon) != (digits.isascii() and digits.isdecimal()):
        raise ArgumentError(f"device {text!r} is not a device of the {backend.name} backend: pass {_EXPECTED}")
    return int(digits) if colon else None
