"""What an array is: its kind, device and memory, and what `out=` may be."""

from __future__ import annotations

import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from contract.array_samples import LAYOUTS, MOVABLE
from ncclcomm.arrays import (
    HOST_MEMORY,
    check_out,
    contiguous_flat,
    empty_on,
    is_contiguous,
    overlaps,
    same_memory,
    view,
)
from ncclcomm.devices.host import HostBackend
from ncclcomm.devices.host_array import HostArray, as_host_array
from ncclcomm.errors import ArgumentError, UnsupportedError


@pytest.mark.parametrize("dtype", MOVABLE, ids=str)
def test_views_share_memory(dtype: np.dtype[Any]) -> None:
    plain = np.zeros((2, 3), dtype)
    for array, device in ((plain, HOST_MEMORY), (as_host_array(plain, 2), 2)):
        found = view(array, "call")
        assert found.obj is array
        assert type(found.data) is np.ndarray
        assert found.device == device
        assert np.shares_memory(found.data, plain)
        assert found.data.dtype == dtype


def test_subclasses_that_are_plain_memory() -> None:
    class Mine(np.ndarray):
        """A subclass that changes nothing."""

    class Theirs(HostArray):
        """A subclass of a virtual device's array."""

    found = view(np.zeros(3).view(Mine), "call")
    assert (type(found.data), found.device) == (np.ndarray, HOST_MEMORY)
    theirs = as_host_array(np.zeros(3), 1)[:].view(Theirs)
    assert (type(view(theirs, "call").data), view(theirs, "call").device) == (np.ndarray, 1)


def test_cupy_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        """Stands for cupy.ndarray."""

        device = SimpleNamespace(id=3)
        dtype = np.dtype("f4")

    package = ModuleType("cupy")
    package.ndarray = Fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", package)
    array = Fake()
    found = view(array, "call")
    assert (found.obj, found.data, found.device) == (array, array, 3)


@pytest.mark.parametrize(
    "value",
    [None, 1, 2.5, "a", b"a", [1], (1,), {}, object(), memoryview(b"ab")],
    ids=lambda value: type(value).__name__,
)
def test_other_kinds_are_named(value: Any) -> None:
    name = type(value).__qualname__
    with pytest.raises(UnsupportedError, match=rf"^call: x: .*{name} is not a supported array; pass a NumPy array"):
        view(value, "call: x")


@pytest.mark.parametrize("dtype", [object, [("a", "i4"), ("b", object)], (object, 3)], ids=str)
def test_references_are_refused(dtype: Any) -> None:
    for array in (np.zeros(2, dtype), as_host_array(np.zeros(2, dtype), 0)):
        with pytest.raises(UnsupportedError, match="^call: x: dtype .*holds references, not plain memory"):
            view(array, "call: x")


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="NumPy 1 has no StringDType")
def test_variable_strings_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="references"):
        view(np.array(["a"], np.dtypes.StringDType()), "call: x")


@pytest.mark.parametrize(
    ("value", "mend"),
    [
        (2.5, "numpy.asarray makes one of it"),
        ([1, 2], "numpy.asarray makes one of it"),
        ({"lr": 1}, "other objects go over ranks by mpi4py: comm.mpi_comm.bcast(obj)"),
        ("a", "other objects go over ranks by mpi4py: comm.mpi_comm.bcast(obj)"),
        (b"a", "other objects go over ranks by mpi4py: comm.mpi_comm.bcast(obj)"),
        (np.ma.zeros(3), "MaskedArray would lose its mask; pass .filled(value), or .data and .mask"),
        (np.eye(2).view(np.matrix), "matrix keeps two dimensions in all that is made of it; pass numpy.asarray of it"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_to_pass_instead_is_told(value: Any, mend: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^call: x: .*{re.escape(mend)}"):
        view(value, "call: x")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_contiguous_flat(layout: str) -> None:
    shape, look = LAYOUTS[layout]
    array = look(np.arange(np.prod(shape)).reshape(shape))
    flat = contiguous_flat(array)
    np.testing.assert_array_equal(flat, array.ravel(order="C"))
    assert is_contiguous(array) == array.flags.c_contiguous
    assert flat.flags.c_contiguous
    assert flat.ndim == 1
    assert array.size == 0 or np.shares_memory(flat, array) == array.flags.c_contiguous
    array.flags.writeable = False
    np.testing.assert_array_equal(contiguous_flat(array), array.ravel(order="C"))


def test_contiguous_flat_keeps_the_byte_order() -> None:
    assert contiguous_flat(np.arange(6, dtype=">i4")[::2]).dtype == ">i4"
    assert contiguous_flat(np.array(3.0)).shape == (1,)


def test_empty_on() -> None:
    backend = HostBackend(3)
    for device in (HOST_MEMORY, 0, 2):
        for dtype in MOVABLE:
            found = empty_on(backend, (2, 3), dtype, device)
            assert (found.data.shape, found.data.dtype, found.device) == ((2, 3), dtype, device)
            assert type(found.data) is np.ndarray
            assert found.data.flags.c_contiguous
            assert np.shares_memory(found.data, found.obj.view(np.ndarray))
            assert type(found.obj) is (np.ndarray if device == HOST_MEMORY else HostArray)


def test_overlaps() -> None:
    base = np.arange(24.0).reshape(4, 6)
    assert overlaps(base, base)
    assert overlaps(base[1:3], base[2:])
    assert overlaps(base[::-1], base[:1])
    assert overlaps(base.T, base[:, 5])
    assert not overlaps(base[:2], base[2:])
    assert not overlaps(base[:, ::2], base[:, 1::2])
    assert not overlaps(base[:0], base)
    assert not overlaps(base, base.copy())
    assert overlaps(base.view("u1"), base[3:])


def test_same_memory() -> None:
    base = np.arange(24.0).reshape(4, 6)
    assert same_memory(base, base[:])
    assert same_memory(base[::-1], base[::-1])
    assert not same_memory(base, base[::-1])
    assert not same_memory(base[:2], base[2:])
    assert not same_memory(base, base.reshape(6, 4))
    square = base[:, :4]
    assert not same_memory(square, square.T)
    assert not same_memory(base, base.copy())


def _check(out: np.ndarray[Any, Any], *inputs: np.ndarray[Any, Any], alias_ok: bool = False) -> None:
    """`check_out` for a result like the first input, or 6 float64."""
    like = inputs[0] if inputs else np.zeros(6)
    views = [view(array, "x") for array in inputs]
    check_out(view(out, "out"), like.shape, like.dtype, "call: out", views, alias_ok)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_out_of_every_layout(layout: str) -> None:
    shape, look = LAYOUTS[layout]
    _check(look(np.zeros(shape)), look(np.ones(shape)).copy())


def test_out_may_be_the_input_itself_where_said() -> None:
    base = np.arange(24.0).reshape(4, 6)
    for array in (base, base[::2, ::-1], base.T):
        _check(array, array, alias_ok=True)
        with pytest.raises(ArgumentError, match="^call: out overlaps an input"):
            _check(array, array)
    square = base[:, :4]
    with pytest.raises(ArgumentError, match="^call: out overlaps an input"):
        _check(square.T, square, alias_ok=True)
    _check(base[:, ::2], base[:, 1::2], alias_ok=True)


def test_out_of_another_device_never_overlaps() -> None:
    base = np.zeros(6)
    check_out(view(as_host_array(base, 0), "out"), (6,), base.dtype, "call: out", [view(as_host_array(base, 1), "x")])


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (np.zeros(5), r"has shape \(5,\) and dtype float64; the result has shape \(6,\) and dtype float64"),
        (np.zeros((6, 1)), r"has shape \(6, 1\)"),
        (np.zeros(6, "f4"), "dtype float32; the result.*dtype float64"),
        (np.zeros(6, ">f8"), "dtype >f8; the result.*dtype float64"),
        (as_strided(np.zeros(6), (6,), (0,)), "share memory"),
        (as_strided(np.zeros(6), (6,), (4,)), "share memory"),
    ],
    ids=["shape", "dimensions", "dtype", "byte order", "repeating", "overlapping"],
)
def test_bad_out(out: np.ndarray[Any, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=f"^call: out.*{words}"):
        _check(out)


def test_read_only_out() -> None:
    out = np.zeros(6)
    out.flags.writeable = False
    with pytest.raises(ArgumentError, match="^call: out is read-only"):
        _check(out)


def test_sliding_windows_share_memory() -> None:
    windows = np.lib.stride_tricks.sliding_window_view(np.zeros(8), 3, writeable=True)
    with pytest.raises(ArgumentError, match="share memory"):
        _check(windows, np.zeros((6, 3)))


def test_numpy_numbers_are_arrays_of_no_dimension() -> None:
    found = view(np.int16(7), "call: x")
    assert (found.data.shape, found.data.dtype, found.device, int(found.data)) == ((), np.dtype("i2"), HOST_MEMORY, 7)
