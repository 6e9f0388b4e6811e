"""What the in-process calls share: devices, arrays and outputs as their arguments name them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from ncclcomm.arrays import HOST_MEMORY, View, check_one_library, check_out, followed, overlaps, same_memory, view
from ncclcomm.devices.foreign import Foreign
from ncclcomm.devices.host_array import HostArray, as_host_array
from ncclcomm.devices.index import is_host_memory, resolve_device
from ncclcomm.devices.registry import current_backend
from ncclcomm.errors import ArgumentError
from ncclcomm.reductions import check_reduction
from ncclcomm.transport.peer import PeerTransport

__all__ = [
    "check_alike",
    "check_outs",
    "check_parts",
    "destination_of",
    "devices_of",
    "list_of",
    "one_of",
    "outs_of",
    "part_of",
    "peer_of",
    "terms_of",
    "uniform_views_of",
    "view_of",
    "views_of",
]

_MEMORY_KINDS = frozenset("biufcMmSU")
"""Kinds of dtypes that are plain memory, whatever the dtype."""

_LISTS = frozenset((list, tuple, range))
"""What is plainly iterable; asking of other types takes longer."""

_peer: PeerTransport | None = None
_gpu_array: Any = None
"""The class of plain arrays of GPUs, while these are in use."""


def peer_of(kind: Foreign | None = None) -> PeerTransport:
    """The transport between the devices of the backend in use, on the streams of a library where that has its own."""
    global _peer, _gpu_array
    backend, peer = current_backend(), _peer
    if peer is None or peer.backend is not backend:
        _peer = peer = PeerTransport(backend, ())
        _gpu_array = backend.array_class
    return peer if kind is None else followed(backend, kind, peer)


def view_of(array: Any, call: str, name: str, index: int | None = None) -> View:
    """As `view`, sooner for plain arrays of a backend; name, and the index in it, say what messages call it."""
    kind = type(array)
    if kind is HostArray and array.dtype.kind in _MEMORY_KINDS:
        return View(array, array.view(np.ndarray), array._device_id)
    if kind is _gpu_array and array.dtype.kind in _MEMORY_KINDS:
        return View(array, array, array.data.device_id)
    return view(array, f"{call}: {name}" if index is None else f"{call}: {name}[{index}]")


def list_of(values: Any, call: str, name: str, what: str) -> Iterable[Any]:
    """A list argument, unread.

    Raises:
        ArgumentError: one value in place of a list.
    """
    if type(values) in _LISTS:
        found: Iterable[Any] = values
        return found
    if hasattr(values, "dtype") or isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise ArgumentError(f"{call}: {name} must be an iterable of {what}, not one {type(values).__name__}")
    return values


def devices_of(devices: Iterable[Any], call: str) -> list[int]:
    """Device numbers, in the caller's order; a device may stand more than once.

    Raises:
        ArgumentError: not an iterable, empty, or an entry is no device of this process.
    """
    if type(devices) not in _LISTS and (isinstance(devices, (str, bytes)) or not isinstance(devices, Iterable)):
        raise ArgumentError(f"{call}: devices must be an iterable of device numbers, not {devices!r}")
    count = current_backend().device_count()
    numbers = []
    for index, device in enumerate(devices):
        if type(device) is int and 0 <= device < count:
            numbers.append(device)  # as resolve_device says, sooner
            continue
        try:
            numbers.append(resolve_device(device))
        except ArgumentError as error:
            raise ArgumentError(f"{call}: devices[{index}]: {error}") from error
    if not numbers:
        raise ArgumentError(f"{call}: devices is empty; expected at least one device")
    return numbers


def destination_of(destination: Any, call: str) -> int:
    """The device a result goes to: None is the current device, 'cpu' and -1 are host memory."""
    backend = current_backend()
    if destination is None:
        return backend.current_device()
    if type(destination) is int and 0 <= destination < backend.device_count():
        return destination
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
    found = [view_of(array, call, name, index) for index, array in enumerate(list_of(arrays, call, name, "arrays"))]
    if not found:
        raise ArgumentError(f"{call}: {name} is empty; expected at least one array")
    return found


def uniform_views_of(arrays: Iterable[Any], call: str, name: str) -> tuple[list[View], bool]:
    """As views_of, and True where it was plain to see that the arrays are alike, so that check_alike finds nothing."""
    found: list[View] = []
    shape = dtype = None
    uniform = True
    for index, array in enumerate(list_of(arrays, call, name, "arrays")):
        kind = type(array)
        if kind is HostArray:
            data = array.view(np.ndarray)
            if data.dtype is dtype and data.shape == shape:
                found.append(View(array, data, array._device_id))
                continue
        elif kind is _gpu_array and array.dtype == dtype and array.shape == shape:
            found.append(View(array, array, array.data.device_id))
            continue
        one = view_of(array, call, name, index)
        found.append(one)
        uniform = index == 0 and one.device != HOST_MEMORY and one.kind is None
        if uniform:
            shape, dtype = one.data.shape, one.data.dtype
    if not found:
        raise ArgumentError(f"{call}: {name} is empty; expected at least one array")
    return found, uniform


def check_alike(arrays: Sequence[View], call: str, name: str, dim: int | None = None, place: str = "") -> None:
    """Check that arrays are on devices, of one dtype, and of one shape except along dim.

    Args:
        arrays: the arrays.
        call: the call's name, for messages.
        name: the list argument they are in.
        dim: the dimension along which they may differ.
        place: where each is within its entry of the list, such as '[2]'.

    Raises:
        ArgumentError: they aren't; the message names the first that isn't.
    """
    first = arrays[0].data
    shape, dtype = first.shape, first.dtype
    for index, array in enumerate(arrays):
        data = array.data
        which, other = f"{call}: {name}[{index}]{place}", f"{name}[0]{place}"
        if array.device == HOST_MEMORY:
            raise ArgumentError(f"{which} is in host memory; expected an array of a device")
        if dim is not None and data.ndim != first.ndim:
            raise ArgumentError(f"{which} has {data.ndim} dimensions; expected {first.ndim} as {other}")
        if array.kind is not arrays[0].kind:
            check_one_library((arrays[0], array), which)
        if data.dtype != dtype:
            raise ArgumentError(f"{which} has dtype {data.dtype}; expected {dtype} as {other}")
        expected = shape if dim is None else (*shape[:dim], data.shape[dim], *shape[dim + 1 :])
        if data.shape != expected:
            along = "" if dim is None else f" except along dim {dim}"
            raise ArgumentError(f"{which} has shape {data.shape}; expected {expected} as {other}{along}")


def terms_of(inputs: Iterable[Any], op: Any, call: str) -> tuple[list[View], tuple[int, ...], np.dtype[Any]]:
    """The arrays of a reduction, which are alike; their shape, and the result's dtype, in the native byte order.

    Raises:
        ArgumentError: no array, one in host memory, shapes or dtypes that differ, no such op.
        UnsupportedError: an entry is no supported array, or op doesn't take the dtype.
    """
    arrays, alike = uniform_views_of(inputs, call, "inputs")
    if not alike:
        check_alike(arrays, call, "inputs")
    first = arrays[0].data
    check_reduction(op, first.dtype, call)
    return arrays, first.shape, first.dtype if first.dtype.isnative else first.dtype.newbyteorder("=")


def check_outs(
    outs: Sequence[View],
    shapes: Sequence[Sequence[int]],
    dtype: Any,
    call: str,
    inputs: Sequence[View] = (),
    alias_ok: bool = False,
) -> None:
    """Check that `out=` arrays, one a device, can take results of these shapes, as `check_out`.

    Raises:
        ArgumentError: one is in host memory, doesn't fit, or overlaps an input or another one.
    """
    taken = {HOST_MEMORY, *[item.device for item in inputs]}
    for index, target in enumerate(outs):
        data, device, shape = target.data, target.device, shapes[index]
        plainly_fits = (
            device not in taken
            and type(data) is np.ndarray
            and data.dtype is dtype
            and data.shape == shape
            and data.flags.carray
        )
        if not plainly_fits:
            name = f"{call}: out[{index}]"
            if device == HOST_MEMORY:
                raise ArgumentError(f"{name} is in host memory; expected an array of a device")
            check_out(target, shape, dtype, name, (*inputs, *outs[:index]), alias_ok)
        taken.add(device)


def outs_of(out: Iterable[Any], inputs: Sequence[View], call: str) -> list[View]:
    """The arrays of `out=`, one for each input and on its device.

    Raises:
        ArgumentError: another number of them, or one on another device.
        UnsupportedError: an entry is no array.
    """
    outs = views_of(out, call, "out")
    if len(outs) != len(inputs):
        raise ArgumentError(f"{call}: out has {len(outs)} arrays for {len(inputs)} inputs")
    for index, (target, source) in enumerate(zip(outs, inputs, strict=True)):
        if target.device not in (source.device, HOST_MEMORY):
            raise ArgumentError(
                f"{call}: out[{index}] is on device {target.device}; expected device {source.device} as inputs[{index}]"
            )
    return outs


def check_parts(wholes: Sequence[View], parts: Sequence[View], places: Sequence[Any], message: str) -> None:
    """Check that arrays share memory with their own places in others at most, element by element.

    Args:
        wholes: arrays that have a place for each part.
        parts: the arrays.
        places: where each part belongs in every one of the wholes.
        message: the error's, with {whole} and {part} for the numbers of the two.

    Raises:
        ArgumentError: two overlap in any other way.
    """
    for i, whole in enumerate(wholes):
        for j, part in enumerate(parts):
            if whole.device != part.device or not overlaps(whole.data, part.data):
                continue
            if not same_memory(whole.data[places[j]], part.data):
                raise ArgumentError(message.format(whole=i, part=j))


def one_of(devices: Any, out: Any, call: str) -> None:
    """Check that exactly one of devices and out was given."""
    if (devices is None) == (out is None):
        which = "both" if out is not None else "neither"
        raise ArgumentError(f"{call}: exactly one of devices and out must be given; got {which}")


def part_of(array: View, place: Any) -> Any:
    """A part of the caller's own array, as an array of its kind."""
    if type(array.obj) is HostArray:
        return as_host_array(array.data[place], array.device)  # a third of the time that indexing takes
    return array.obj[place] if hasattr(array.obj, "__getitem__") else array.data[place]
