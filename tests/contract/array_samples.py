"""Arrays for tests: every dtype that moves, the layouts an array can have, and the comparison by bits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from ncclcomm import asarray
from ncclcomm.devices import use_backend
from ncclcomm.devices.base import DeviceBackend
from ncclcomm.devices.host import HostBackend
from ncclcomm.reductions import ufunc_for

DEVICES = 4

_PLAIN = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
_OTHER = ["M8[ns]", "m8[s]", "S5", "U3", "V3", ">i2", ">u8", ">f4", ">f8", ">c16", ">M8[s]", ">U2"]
_RECORDS = [
    np.dtype([("a", "i1"), ("b", "f8"), ("c", "S3")]),
    np.dtype([("a", ">i4"), ("b", "<f4", (2, 3))]),
    np.dtype([("a", "i1"), ("b", "f8")], align=True),
]


def _extended() -> list[np.dtype[Any]]:
    """What ml_dtypes brings; nothing where it is missing."""
    try:
        import ml_dtypes
    except ImportError:
        return []
    return [np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")]


EXTENDED = _extended()
MOVABLE: list[np.dtype[Any]] = [*map(np.dtype, _PLAIN + _OTHER), *_RECORDS, *EXTENDED]
"""Every dtype that moves bit for bit."""

INTEGERS = [np.dtype(name) for name in _PLAIN if name[0] in "iu"]
FLOATS = [np.dtype("f2"), np.dtype("f4"), np.dtype("f8"), *EXTENDED[:1]]
COMPLEX = [np.dtype("c8"), np.dtype("c16")]
REDUCIBLE: dict[str, list[np.dtype[Any]]] = {
    "sum": [np.dtype("?"), *INTEGERS, *FLOATS, *COMPLEX],
    "prod": [*INTEGERS, *FLOATS, *COMPLEX],
    "min": [*INTEGERS, *FLOATS],
    "max": [*INTEGERS, *FLOATS],
    "avg": [*FLOATS, *COMPLEX],
}
"""The dtypes that each reduction takes, as the design lists them."""

LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[Any], Any]]] = {
    "plain": ((6, 4), lambda a: a),
    "every second row": ((12, 4), lambda a: a[::2]),
    "odd columns": ((6, 8), lambda a: a[:, 1::2]),
    "reversed": ((6, 4), lambda a: a[::-1, ::-1]),
    "Fortran": ((4, 6), lambda a: a.T),
    "offset": ((9, 4), lambda a: a[3:]),
    "one column": ((6, 3), lambda a: a[:, 1]),
    "reversed column": ((6, 3), lambda a: a[::-1, 0]),
    "no rows": ((0, 4), lambda a: a),
    "no columns": ((6, 0), lambda a: a),
    "one element": ((1,), lambda a: a),
}
"""For each layout the shape of an array, and a view of it that has the layout."""


def sample(dtype: Any, shape: int | tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    """An array of random bits (so with NaN payloads and NaT), valid for its dtype, different for each seed."""
    dtype = np.dtype(dtype)
    rng = np.random.default_rng([seed, 7])
    dims = (shape,) if isinstance(shape, int) else shape
    if dtype.kind == "b":
        return rng.integers(0, 2, dims).astype(bool)
    if dtype.kind == "U":
        return rng.integers(10, 99, dims).astype(dtype)
    count = int(np.prod(dims, dtype=np.int64))
    return np.frombuffer(bytearray(rng.bytes(count * dtype.itemsize)), dtype, count).reshape(dims)


def addends(dtype: Any, shape: int | tuple[int, ...], seed: int, op: str = "sum") -> np.ndarray[Any, Any]:
    """An array whose reduction over a few of its kind is exact in any order; integers wrap."""
    dtype = np.dtype(dtype)
    rng = np.random.default_rng([seed, 11])
    if dtype.kind in "biu":
        return sample(dtype, shape, seed)
    values: Any = rng.integers(1, 3, shape) if op == "prod" else rng.integers(-8, 9, shape)
    if dtype.kind == "c":
        values = values + 1j * rng.integers(-1, 2, shape)
    return np.asarray(values).astype(dtype)


def assert_same_bits(found: Any, expected: np.ndarray[Any, Any], what: object = "") -> None:
    """Fail unless two host arrays have the same dtype, shape and bits (but for a record's padding)."""
    assert type(found) is np.ndarray, (what, type(found))
    assert found.dtype == expected.dtype, (what, found.dtype, expected.dtype)
    assert found.shape == expected.shape, (what, found.shape, expected.shape)
    if expected.dtype.names:
        for name in expected.dtype.names:
            assert_same_bits(found[name], expected[name], what)
    else:
        assert found.tobytes() == expected.tobytes(), (what, found, expected)


@pytest.fixture(params=["host-sync", "host-async"])
def host_backend(request: pytest.FixtureRequest) -> Iterator[DeviceBackend]:
    """Four virtual devices in use, whose streams run work at once, and then ones whose streams run it later."""
    with use_backend(HostBackend(DEVICES, immediate=request.param == "host-sync")) as chosen:
        yield chosen


@pytest.fixture(params=["host-sync", "host-async"])
def eight_devices(request: pytest.FixtureRequest) -> Iterator[DeviceBackend]:
    """As host_backend, with eight devices."""
    with use_backend(HostBackend(8, immediate=request.param == "host-sync")) as chosen:
        yield chosen


ORDERS = [(3,), (1, 0), (2, 0, 1), (3, 1, 0, 2), (5, 7, 0, 1, 4, 2, 6, 3)]
"""Devices of the arrays of a reduction, in the order of its terms."""


def spread(values: list[np.ndarray[Any, Any]], order: Any) -> list[Any]:
    """The values on devices, in that order."""
    return [asarray(value, device=number) for value, number in zip(values, order, strict=True)]


def reduced(values: list[np.ndarray[Any, Any]], op: str) -> np.ndarray[Any, Any]:
    """NumPy's reduction, one after the other, in the native byte order."""
    dtype = values[0].dtype.newbyteorder("=")
    with np.errstate(all="ignore"):
        total = functools.reduce(ufunc_for("sum" if op == "avg" else op, dtype), values)
        if op == "avg":
            total = total / dtype.type(len(values))
    return np.asarray(total).astype(dtype, copy=False)
