"""In-process reduce_add: sums of every dtype, destinations and refusals."""

from __future__ import annotations

import functools
import itertools
import warnings
from typing import Any

import numpy as np
import pytest

from contract.array_samples import (
    DEVICES,
    LAYOUTS,
    REDUCIBLE,
    addends,
    assert_same_bits,
    host_backend,  # noqa: F401
    sample,
)
from ncclcomm import ArgumentError, UnsupportedError, asarray, device, device_index, to_numpy
from ncclcomm.comm import reduce_add

pytestmark = pytest.mark.usefixtures("host_backend")


def _spread(values: list[np.ndarray[Any, Any]], order: Any) -> list[Any]:
    """The values on devices, in that order."""
    return [asarray(value, device=number) for value, number in zip(values, order, strict=True)]


def _sum(values: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """NumPy's sum, one after the other; a logical or of bool."""
    add = np.logical_or if values[0].dtype.kind == "b" else np.add
    with np.errstate(all="ignore"):
        return np.asarray(functools.reduce(add, values)).astype(values[0].dtype.newbyteorder("="), copy=False)


@pytest.mark.parametrize("destination", [-1, *range(DEVICES)])
def test_every_order_of_devices(destination: int) -> None:
    for n in range(2, DEVICES + 1):
        values = [np.random.default_rng([n, i]).normal(size=(3, 2)) for i in range(n)]
        for order in itertools.permutations(range(DEVICES), n):
            arrays = _spread(values, order)
            found = reduce_add(iter(arrays), destination)
            assert device_index(found) == destination
            assert found.flags.c_contiguous
            assert_same_bits(to_numpy(found), _sum(values), order)
            for array, value in zip(arrays, values, strict=True):
                assert_same_bits(to_numpy(array), value)


@pytest.mark.parametrize("dtype", REDUCIBLE["sum"], ids=str)
def test_every_dtype_and_layout(dtype: np.dtype[Any]) -> None:
    for layout, (shape, look) in LAYOUTS.items():
        bases = [addends(dtype, shape, i) for i in range(3)]
        arrays = [look(array) for array in _spread(bases, (2, 0, 1))]
        for destination in (0, 3, "cpu"):
            found = to_numpy(reduce_add(arrays, destination))
            assert_same_bits(found, _sum([look(base).copy() for base in bases]), layout)


@pytest.mark.parametrize("dtype", [">i2", ">u8", ">f4", ">f8", ">c16"])
def test_other_byte_order_comes_back_native(dtype: str) -> None:
    values = [addends(dtype, 5, i) for i in range(3)]
    found = to_numpy(reduce_add(_spread(values, (0, 1, 2))))
    assert found.dtype == np.dtype(dtype).newbyteorder("=")
    assert_same_bits(found, _sum(values))


def test_one_array_of_the_other_byte_order_comes_back_native() -> None:
    found = reduce_add([asarray(np.arange(3, dtype=">i4"), device=1)], 1)
    assert found.dtype.isnative
    np.testing.assert_array_equal(to_numpy(found), [0, 1, 2])


def test_integers_wrap_and_bools_are_or() -> None:
    small = _spread([np.array([120, -100], "i1"), np.array([100, -100], "i1")], (0, 1))
    np.testing.assert_array_equal(to_numpy(reduce_add(small)), np.array([-36, 56], "i1"))
    flags = _spread([np.array([True, True, False, False]), np.array([True, False, True, False])], (1, 0))
    found = to_numpy(reduce_add(flags))
    assert found.dtype == bool
    np.testing.assert_array_equal(found, [True, True, True, False])


def test_overflow_is_quiet_and_infinite() -> None:
    big = _spread([np.full(3, 60000, "f2")] * 3, (0, 1, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(to_numpy(reduce_add(big)), np.full(3, np.inf, "f2"))


def test_no_dimension() -> None:
    found = to_numpy(reduce_add(_spread([np.array(1.5), np.array(2.0)], (0, 1)), 2))
    assert_same_bits(found, np.array(3.5))


def test_read_only_and_repeating_inputs() -> None:
    row = np.arange(3.0)
    row.flags.writeable = False
    arrays = _spread([row, row], (0, 1))
    for array in arrays:
        array.flags.writeable = False
    np.testing.assert_array_equal(to_numpy(reduce_add(arrays)), 2 * row)
    tiled = [np.broadcast_to(array, (2, 3)) for array in arrays]
    np.testing.assert_array_equal(to_numpy(reduce_add(tiled, 1)), np.tile(2 * row, (2, 1)))


def test_same_array_twice() -> None:
    array = asarray(np.arange(4.0), device=1)
    np.testing.assert_array_equal(to_numpy(reduce_add([array, array, array], 1)), 3 * np.arange(4.0))
    np.testing.assert_array_equal(to_numpy(array), np.arange(4.0))


def test_one_array() -> None:
    array = asarray(np.arange(4.0), device=1)
    assert reduce_add([array], 1) is array
    for destination in (0, "cpu"):
        found = reduce_add([array], destination)
        assert device_index(found) == (-1 if destination == "cpu" else 0)
        np.testing.assert_array_equal(to_numpy(found), np.arange(4.0))


def test_destination_none_is_the_current_device() -> None:
    arrays = _spread([np.arange(3)] * 2, (0, 1))
    with device(3):
        assert device_index(reduce_add(arrays)) == 3


@pytest.mark.parametrize("destination", [99, -2, True, 1.0, "gpu", ""], ids=str)
def test_bad_destination(destination: Any) -> None:
    with pytest.raises(ArgumentError, match="^reduce_add: destination"):
        reduce_add(_spread([np.arange(3)] * 2, (0, 1)), destination)


@pytest.mark.parametrize(
    "dtype",
    ["M8[s]", "m8[s]", "S5", "U3", "V3", [("a", "i4")], "longdouble", "clongdouble", "float8_e4m3fn", "float8_e5m2"],
    ids=str,
)
def test_dtypes_that_cannot_be_summed(dtype: Any) -> None:
    if isinstance(dtype, str) and dtype.startswith("float8"):
        dtype = getattr(pytest.importorskip("ml_dtypes"), dtype)
    arrays = _spread([sample(dtype, 3, i) for i in range(2)], (0, 1))
    for given in (arrays, arrays[:1]):
        with pytest.raises(
            UnsupportedError, match="^reduce_add: sum of dtype .* is not supported; sum takes all integers"
        ):
            reduce_add(given)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (np.zeros(4), r"inputs\[1\] has shape \(4,\); expected \(3,\)"),
        (np.zeros((1, 3)), r"inputs\[1\] has shape \(1, 3\); expected \(3,\)"),
        (np.zeros(3, "i8"), r"inputs\[1\] has dtype int64; expected float64"),
        (np.zeros(3, ">f8"), r"inputs\[1\] has dtype >f8; expected float64"),
    ],
    ids=["shape", "dimensions", "dtype", "byte order"],
)
def test_arrays_that_disagree(second: np.ndarray[Any, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=f"^reduce_add: {words}"):
        reduce_add(_spread([np.zeros(3), second], (0, 1)))


def test_host_arrays_are_refused() -> None:
    with pytest.raises(
        ArgumentError, match=r"^reduce_add: inputs\[0\] is in host memory; expected an array of a device"
    ):
        reduce_add([np.zeros(3), asarray(np.zeros(3), device=0)])


@pytest.mark.parametrize(("inputs", "words"), [([], "inputs is empty"), (5, "iterable of arrays"), ("a", "iterable")])
def test_no_arrays(inputs: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=f"^reduce_add: inputs .*{words.removeprefix('inputs ')}"):
        reduce_add(inputs)


def test_no_array_in_the_list() -> None:
    with pytest.raises(UnsupportedError, match=r"^reduce_add: inputs\[1\]: int is not a supported array"):
        reduce_add([asarray(np.zeros(3), device=0), 4])
