"""The public functions that make, move and look at arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ncclcomm
from contract.array_samples import LAYOUTS, MOVABLE, assert_same_bits, host_backend, sample  # noqa: F401
from ncclcomm import (
    ArgumentError,
    UnsupportedError,
    array_module,
    asarray,
    device,
    device_index,
    empty,
    to_numpy,
    zeros,
)
from ncclcomm.devices.host_array import HostArray

pytestmark = pytest.mark.usefixtures("host_backend")


@pytest.mark.parametrize("dtype", MOVABLE, ids=str)
def test_there_and_back(dtype: np.dtype[Any]) -> None:
    for shape, look in LAYOUTS.values():
        value = look(sample(dtype, shape, 4))
        there = asarray(value, device=3)
        assert type(there) is HostArray
        assert device_index(there) == 3
        assert there.flags.c_contiguous
        back = to_numpy(there)
        assert_same_bits(back, value.copy())
        assert not np.shares_memory(back, there.view(np.ndarray))
        assert_same_bits(to_numpy(look(asarray(sample(dtype, shape, 4), device=1))), value.copy())


def test_from_device_to_device() -> None:
    value = sample("f8", (3, 2), 1)
    array = asarray(value, device=2)
    for target in range(4):
        moved = asarray(array, device=target)
        assert (moved is array) == (target == 2)
        assert device_index(moved) == target
        assert_same_bits(to_numpy(moved), value)
    assert asarray(array) is array
    for name in ("cpu", -1, np.int64(-1)):
        back = asarray(array, device=name)
        assert_same_bits(back, value)


def test_default_device() -> None:
    with device(2):
        for made in (asarray([1, 2]), asarray(np.arange(2)), empty(2), zeros(2)):
            assert device_index(made) == 2
        assert device_index(asarray(asarray([1], device=1))) == 1


def test_host_memory() -> None:
    value = np.arange(3)
    assert asarray(value, device="cpu") is value
    for made in (asarray([1, 2], device=-1), empty((2, 2), "i4", "cpu"), zeros(3, device=-1)):
        assert type(made) is np.ndarray
        assert device_index(made) == -1


@pytest.mark.parametrize("obj", [3, 2.5, True, 1j, [1, 2], [[1.0], [2.0]], (1, 2), np.float32(3), range(3)], ids=repr)
def test_what_numpy_takes(obj: Any) -> None:
    found = asarray(obj, device=1)
    assert device_index(found) == 1
    assert_same_bits(to_numpy(found), np.asarray(obj))


@pytest.mark.parametrize("source", [-1, 0, 2])
@pytest.mark.parametrize("target", [-1, 0, 2, None])
def test_dtype(source: int, target: int | None) -> None:
    value = np.array([[1.5, -2.5], [3.0, 4.0]])
    array = asarray(value, device=source)
    for dtype in ("f4", "i8", ">f8", "c16"):
        found = asarray(array, target, dtype)
        assert device_index(found) == (max(source, 0) if target is None else target)
        assert_same_bits(to_numpy(found), value.astype(dtype))
    assert_same_bits(to_numpy(array), value)
    assert asarray(array, source, "f8") is array


def test_host_data_are_copied() -> None:
    value = np.arange(3.0)
    there = asarray(value, device=0)
    value[:] = -1
    np.testing.assert_array_equal(to_numpy(there), [0, 1, 2])


@pytest.mark.parametrize("make", [empty, zeros])
@pytest.mark.parametrize("shape", [3, (), (0,), (2, 3), [2, 3], np.int64(3), (np.int64(2), 1)], ids=repr)
def test_shapes(make: Any, shape: Any) -> None:
    for where in (0, 1, "cpu"):
        found = make(shape, "i2", where)
        assert found.shape == np.empty(shape).shape
        assert found.dtype == np.int16
        assert found.flags.c_contiguous


@pytest.mark.parametrize("dtype", MOVABLE, ids=str)
def test_zeros(dtype: np.dtype[Any]) -> None:
    for where in (1, "cpu"):
        assert_same_bits(to_numpy(zeros((2, 3), dtype, where)), np.zeros((2, 3), dtype))
    assert zeros(2).dtype == empty(2).dtype == float


@pytest.mark.parametrize("where", [99, -2, True, 1.0, "gpu", "", [0]], ids=str)
def test_no_such_device(where: Any) -> None:
    for call in (lambda: asarray([1.0], device=where), lambda: empty(2, device=where), lambda: zeros(2, device=where)):
        with pytest.raises(ArgumentError, match="device"):
            call()


@pytest.mark.parametrize("source", [-1, 0])
@pytest.mark.parametrize("target", [-1, 0, 1])
def test_references_are_refused(source: int, target: int) -> None:
    array = asarray(np.arange(3), device=source)
    with pytest.raises(UnsupportedError, match="object"):
        asarray(array, device=target, dtype=object)
    with pytest.raises(UnsupportedError, match="object"):
        asarray(np.array([None, 1]), device=target)


@pytest.mark.parametrize("make", [empty, zeros])
@pytest.mark.parametrize("where", [-1, 1])
def test_no_array_of_references_is_made(make: Any, where: int) -> None:
    with pytest.raises(UnsupportedError, match="object"):
        make(3, object, where)


@pytest.mark.parametrize("call", [device_index, to_numpy, array_module])
@pytest.mark.parametrize("obj", [[1, 2], 3, "a"], ids=repr)
def test_no_array(call: Any, obj: Any) -> None:
    with pytest.raises(UnsupportedError, match=f"{call.__name__}: obj: {type(obj).__name__} is not a supported array"):
        call(obj)


def test_array_module() -> None:
    assert array_module(np.zeros(1)) is np
    assert array_module() is ncclcomm.xp
    assert array_module(zeros(1, device=2)) is ncclcomm.xp


def test_to_numpy_of_host_memory_copies() -> None:
    value = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    found = to_numpy(value)
    assert not np.shares_memory(found, value)
    assert found.flags.c_contiguous
    np.testing.assert_array_equal(found, value)
