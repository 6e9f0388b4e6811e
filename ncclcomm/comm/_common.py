"""What the in-process calls share: devices, arrays and outputs as their arguments name them."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any

from ncclcomm.arrays import HOST_MEMORY, View, view
from ncclcomm.devices.base import DeviceBackend
from ncclcomm.devices.index import is_host_memory, resolve_device
from ncclcomm.devices.registry import current_backend
from ncclcomm.errors import ArgumentError
from ncclcomm.transport.peer import PeerTransport

__all__ = ["destination_of", "devices_of", "one_of", "peer_of", "views_of"]


def peer_of(backend: DeviceBackend | None = None) -> PeerTransport:
    """The transport between the devices of the backend in use."""
    return PeerTransport(backend or current_backend(), ())


def devices_of(devices: Iterable[Any], call: str) -> list[int]:
    """Device numbers, in the caller's order; a device may stand more than once.

    Raises:
        ArgumentError: not an iterable, empty, or an entry is no device of this process.
    """
    if isinstance(devices, (str, bytes)) or not isinstance(devices, Iterable):
        raise ArgumentError(f"{call}: devices must be an iterable of device numbers, not {devices!r}")
    numbers = []
    for index, device in enumerate(devices):
        try:
            numbers.append(resolve_device(device))
        except ArgumentError as error:
            raise ArgumentError(f"{call}: devices[{index}]: {error}") from error
    if not numbers:
        raise ArgumentError(f"{call}: devices is empty; expected at least one device")
    return numbers


def destination_of(destination: Any, call: str) -> int:
    """The device a result goes to: None is the current device, 'cpu' and -1 are host memory."""
    if destination is None:
        return current_backend().current_device()
    if is_host_memory(destination):
        return HOST_MEMORY
    try:
        return resolve_device(destination, optional=not isinstance(destination, Integral))
    except ArgumentError as error:
        raise ArgumentError(f"{call}: destination: {error}; host memory is 'cpu' or -1") from error


def views_of(arrays: Iterable[Any], call: str, name: str) -> list[View]:
    """The arrays of a list argument.

    Raises:
        ArgumentError: one array in place of a list, or no array at all.
        UnsupportedError: an entry is no array.
    """
    if hasattr(arrays, "dtype") or isinstance(arrays, (str, bytes)) or not isinstance(arrays, Iterable):
        raise ArgumentError(f"{call}: {name} must be an iterable of arrays, not one {type(arrays).__name__}")
    found = [view(array, f"{call}: {name}[{index}]") for index, array in enumerate(arrays)]
    if not found:
        raise ArgumentError(f"{call}: {name} is empty; expected at least one array")
    return found


def one_of(devices: Any, out: Any, call: str) -> None:
    """Check that exactly one of devices and out was given."""
    if (devices is None) == (out is None):
        which = "both" if out is not None else "neither"
        raise ArgumentError(f"{call}: exactly one of devices and out must be given; got {which}")
