"""In-process gather: results, layouts, destinations and refusals."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ncclcomm
from contract.array_samples import DEVICES, LAYOUTS, MOVABLE, assert_same_bits, host_backend, sample  # noqa: F401
from ncclcomm import ArgumentError, ArgumentIndexError, UnsupportedError, asarray, device, device_index, to_numpy
from ncclcomm.comm import gather

pytestmark = pytest.mark.usefixtures("host_backend")


def _spread(values: list[np.ndarray[Any, Any]], order: Any) -> list[Any]:
    """The values on devices, in that order."""
    return [asarray(value, device=number) for value, number in zip(values, order, strict=True)]


@pytest.mark.parametrize("destination", [-1, *range(DEVICES)])
def test_every_order_of_devices(destination: int) -> None:
    for n in range(1, DEVICES + 1):
        values = [sample("f8", (i + 1, 3), i) for i in range(n)]
        for order in itertools.permutations(range(DEVICES), n):
            arrays = _spread(values, order)
            found = gather(arrays, destination=destination)
            assert device_index(found) == destination
            assert found.flags.c_contiguous
            assert_same_bits(to_numpy(found), np.concatenate(values), order)
            for array, value in zip(arrays, values, strict=True):
                assert not np.shares_memory(found.view(np.ndarray), array.view(np.ndarray))
                assert_same_bits(to_numpy(array), value)


@pytest.mark.parametrize("dtype", MOVABLE, ids=str)
def test_every_dtype_and_layout(dtype: np.dtype[Any]) -> None:
    for layout, (shape, look) in LAYOUTS.items():
        bases = [sample(dtype, shape, i) for i in range(3)]
        arrays = [look(array) for array in _spread(bases, (2, 0, 1))]
        rows = [look(base).copy() for base in bases]
        expected = np.empty((sum(len(row) for row in rows), *rows[0].shape[1:]), dtype)
        # np.concatenate would lose the byte order.
        for start, row in zip(np.cumsum([0, *map(len, rows)]), rows, strict=False):
            expected[start : start + len(row)] = row
        for destination in (0, "cpu"):
            found = gather(arrays, destination=destination)
            assert_same_bits(to_numpy(found), expected, layout)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_uneven_along_any_dim(dim: int) -> None:
    values = []
    for i, n in enumerate((2, 0, 5)):
        shape = [4, 4, 4]
        shape[dim] = n
        values.append(sample("i2", tuple(shape), i))
    found = gather(iter(_spread(values, (3, 0, 1))), dim, 2)
    assert_same_bits(to_numpy(found), np.concatenate(values, axis=dim))


def test_arrays_without_dimensions_give_one() -> None:
    arrays = _spread([np.array(float(i)) for i in range(4)], (3, 1, 0, 2))
    for dim in (0, -1):
        np.testing.assert_array_equal(to_numpy(gather(arrays, dim)), np.arange(4.0))


def test_two_arrays_of_one_device() -> None:
    array = asarray(np.arange(3), device=1)
    np.testing.assert_array_equal(to_numpy(gather([array, array], destination=1)), [0, 1, 2, 0, 1, 2])


def test_destinations() -> None:
    arrays = _spread([np.arange(3)] * 2, (0, 1))
    with device(2):
        assert device_index(gather(arrays)) == 2
        assert device_index(gather(arrays, 0, None)) == 2
    for destination in (3, np.int64(3), "cuda:3", "host:3", device(3), asarray(np.zeros(1), device=3).device):
        assert device_index(gather(arrays, destination=destination)) == 3
    for destination in ("cpu", -1, np.int64(-1), SimpleNamespace(type="cpu", index=None)):
        found = gather(arrays, destination=destination)
        assert type(found) is np.ndarray
        np.testing.assert_array_equal(found, [0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize("destination", [99, -2, True, 1.0, "gpu", [0], ""], ids=str)
def test_bad_destination(destination: Any) -> None:
    with pytest.raises(ArgumentError, match="^gather: destination"):
        gather(_spread([np.arange(3)] * 2, (0, 1)), destination=destination)


@pytest.mark.parametrize("where", [-1, 0, 2])
@pytest.mark.parametrize("dtype", ["i4", ">f8", "S5"])
@pytest.mark.parametrize("layout", ["plain", "every second row", "odd columns", "reversed", "Fortran", "offset"])
def test_out_views_are_filled_in_place(layout: str, dtype: str, where: int) -> None:
    shape, look = LAYOUTS[layout]
    base = sample(dtype, shape, 9)
    whole = asarray(base.copy(), device=where)
    out = look(whole)
    values = [sample(dtype, (n, 4), n) for n in (2, 1, 3)]
    assert gather(_spread(values, (0, 1, 3)), out=out) is out
    expected = base.copy()
    look(expected)[...] = np.concatenate(values).astype(dtype)
    assert_same_bits(to_numpy(whole), expected, layout)


def _bad_out(kind: str, source: Any) -> Any:
    """An array that can't take a result of 6."""
    frozen = asarray(np.zeros(6), device=2)
    frozen.flags.writeable = False
    return {
        "shape": asarray(np.zeros(5), device=2),
        "dtype": asarray(np.zeros(6, "f4"), device=2),
        "byte order": asarray(np.zeros(6, ">f8"), device=2),
        "read-only": frozen,
        "repeating": np.broadcast_to(np.zeros(1), (6,)),
        "input": source,
    }[kind]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("shape", r"out has shape \(5,\).*the result has shape \(6,\)"),
        ("dtype", "out.*float32; the result.*float64"),
        ("byte order", "out.*>f8; the result.*float64"),
        ("read-only", "out is read-only"),
        ("repeating", "out.*(read-only|share memory)"),
        ("input", "out overlaps an input"),
    ],
)
def test_bad_out_writes_nothing(kind: str, words: str) -> None:
    whole = asarray(np.arange(9.0), device=1)
    arrays = [whole[:3], asarray(np.arange(3.0), device=0)]
    out = _bad_out(kind, whole[2:8])
    before = to_numpy(out)
    with pytest.raises(ArgumentError, match=f"^gather: {words}"):
        gather(arrays, out=out)
    assert_same_bits(to_numpy(out), before)
    np.testing.assert_array_equal(to_numpy(whole), np.arange(9.0))


def test_both_destination_and_out() -> None:
    out = asarray(np.zeros(6), device=1)
    with pytest.raises(ArgumentError, match="^gather: destination and out"):
        gather(_spread([np.arange(3.0)] * 2, (0, 1)), destination=1, out=out)
    assert not to_numpy(out).any()


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (np.zeros((2, 4)), r"tensors\[1\] has shape \(2, 4\); expected \(2, 3\)"),
        (np.zeros(3), r"tensors\[1\] has 1 dimensions; expected 2"),
        (np.zeros(()), r"tensors\[1\] has 0 dimensions; expected 2"),
        (np.zeros((2, 3), "f4"), r"tensors\[1\] has dtype float32; expected float64"),
        (np.zeros((2, 3), ">f8"), r"tensors\[1\] has dtype >f8; expected float64"),
    ],
    ids=["shape", "dimensions", "no dimension", "dtype", "byte order"],
)
def test_arrays_that_disagree(second: np.ndarray[Any, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=f"^gather: {words}"):
        gather(_spread([np.zeros((2, 3)), second], (0, 1)))


def test_host_arrays_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"^gather: tensors\[1\] is in host memory; expected an array of a device"):
        gather([asarray(np.zeros(3), device=0), np.zeros(3)])


@pytest.mark.parametrize("tensors", [[], (), iter(())], ids=["list", "tuple", "iterator"])
def test_no_arrays(tensors: Any) -> None:
    with pytest.raises(ArgumentError, match="^gather: tensors is empty; expected at least one array"):
        gather(tensors)


def test_one_array_is_no_list() -> None:
    for tensors in (asarray(np.zeros((2, 2)), device=0), 5, "ab"):
        with pytest.raises(ArgumentError, match="^gather: tensors must be an iterable of arrays"):
            gather(tensors)


@pytest.mark.parametrize("dim", [1, -2, 7])
def test_dim_out_of_range(dim: int) -> None:
    with pytest.raises(ArgumentIndexError, match=f"^gather: dim {dim} is out of range"):
        gather([asarray(np.zeros(3), device=0)], dim)


@pytest.mark.parametrize("dim", [None, 0.0, "0", True], ids=str)
def test_dim_is_a_whole_number(dim: Any) -> None:
    with pytest.raises(ArgumentError, match="^gather: dim must be a whole number, not"):
        gather([asarray(np.zeros(3), device=0)], dim)


def test_no_array_in_the_list() -> None:
    with pytest.raises(UnsupportedError, match=r"^gather: tensors\[1\]: NoneType is not a supported array"):
        gather([asarray(np.zeros(3), device=0), None])


def test_current_device_stays() -> None:
    with device(1):
        gather(_spread([np.arange(3)] * 2, (0, 2)), destination=3)
        assert ncclcomm.current_device() == 1
