"""In-process all_gather: results, layouts, in place, outs and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from contract.array_samples import LAYOUTS, MOVABLE, assert_same_bits, eight_devices, sample  # noqa: F401
from ncclcomm import ArgumentError, ArgumentIndexError, UnsupportedError, asarray, device_index, to_numpy
from ncclcomm.comm import all_gather

pytestmark = pytest.mark.usefixtures("eight_devices")

ORDERS = [(3,), (1, 0), (2, 0, 1), (3, 1, 0, 2), (5, 7, 0, 1, 4, 2, 6, 3)]


def _spread(values: list[np.ndarray[Any, Any]], order: Any) -> list[Any]:
    """The values on devices, in that order."""
    return [asarray(value, device=number) for value, number in zip(values, order, strict=True)]


def _joined(values: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """The rows one after the other, in their own byte order, which np.concatenate would lose."""
    whole = np.empty((sum(len(value) for value in values), *values[0].shape[1:]), values[0].dtype)
    start = 0
    for value in values:
        whole[start : start + len(value)] = value
        start += len(value)
    return whole


@pytest.mark.parametrize("order", ORDERS, ids=len)
def test_every_order_of_devices(order: tuple[int, ...]) -> None:
    for rows in (lambda i: 3, lambda i: i):
        values = [sample("f8", (rows(i), 2), i) for i in range(len(order))]
        arrays = _spread(values, order)
        results = all_gather(iter(arrays))
        assert type(results) is tuple
        assert [device_index(result) for result in results] == list(order)
        for result in results:
            assert_same_bits(to_numpy(result), _joined(values))
            assert result.flags.c_contiguous
            assert not any(np.shares_memory(result.view(np.ndarray), array.view(np.ndarray)) for array in arrays)
        for array, value in zip(arrays, values, strict=True):
            assert_same_bits(to_numpy(array), value, "an input")


@pytest.mark.parametrize("dtype", MOVABLE, ids=str)
def test_every_dtype_and_layout(dtype: np.dtype[Any]) -> None:
    for layout, (shape, look) in LAYOUTS.items():
        bases = [sample(dtype, shape, i) for i in range(3)]
        arrays = [look(array) for array in _spread(bases, (2, 0, 1))]
        for result in all_gather(arrays):
            assert_same_bits(to_numpy(result), _joined([look(base).copy() for base in bases]), layout)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_uneven_along_any_dim_in_place_and_into_views(dim: int) -> None:
    values = []
    for i, n in enumerate((2, 0, 5)):
        shape = [4, 4, 4]
        shape[dim] = n
        values.append(sample("i2", tuple(shape), i))
    expected = np.concatenate(values, axis=dim)
    for result in all_gather(_spread(values, (3, 0, 1)), dim):
        assert_same_bits(to_numpy(result), expected)
    wholes = _spread([np.zeros((2, *expected.shape), "i2")] * 3, (3, 0, 1))
    outs = [whole[1] for whole in wholes]
    found = all_gather(_spread(values, (3, 0, 1)), dim, out=outs)
    assert all(a is b for a, b in zip(found, outs, strict=True))
    for whole in wholes:
        assert not to_numpy(whole)[0].any()
        assert_same_bits(to_numpy(whole)[1], expected)
    lead = (slice(None),) * (dim % 3)
    places = [(*lead, slice(start, stop)) for start, stop in ((0, 2), (2, 2), (2, 7))]
    bases = [np.zeros_like(expected) for _ in places]
    for base, place, value in zip(bases, places, values, strict=True):
        base[place] = value
    outs = _spread(bases, (3, 0, 1))
    all_gather([out[place] for out, place in zip(outs, places, strict=True)], dim, out=outs)
    for out in outs:
        assert_same_bits(to_numpy(out), expected, "in place")


def test_arrays_without_dimensions_give_one() -> None:
    for result in all_gather(_spread([np.array(float(i)) for i in range(4)], (3, 1, 0, 2))):
        assert_same_bits(to_numpy(result), np.arange(4.0))


def test_one_device_for_all() -> None:
    array = asarray(np.arange(3), device=1)
    for result in all_gather([array, array]):
        assert device_index(result) == 1
        np.testing.assert_array_equal(to_numpy(result), [0, 1, 2, 0, 1, 2])


def test_input_out_of_its_place() -> None:
    wholes = _spread([np.arange(6.0), np.arange(6.0)], (0, 1))
    inputs = [wholes[0][3:], asarray(np.ones(3), device=1)]
    with pytest.raises(ArgumentError, match=r"^all_gather: out\[0\] overlaps inputs\[0\] other than at its own place"):
        all_gather(inputs, out=wholes)
    for whole in wholes:
        np.testing.assert_array_equal(to_numpy(whole), np.arange(6.0))


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ([(6, 0)], "out has 1 arrays for 2 inputs"),
        ([(6, 0), (6, 2)], r"out\[1\] is on device 2; expected device 1 as inputs\[1\]"),
        ([(6, 0), (6, "cpu")], r"out\[1\] is in host memory"),
        ([(6, 0), (5, 1)], r"out\[1\] has shape \(5,\) .* the result has shape \(6,\)"),
    ],
    ids=["few", "device", "host", "shape"],
)
def test_bad_out_writes_nothing(out: list[Any], words: str) -> None:
    outs = [asarray(np.zeros(n), device=device) for n, device in out]
    with pytest.raises(ArgumentError, match=f"^all_gather: {words}"):
        all_gather(_spread([np.ones(3)] * 2, (0, 1)), out=outs)
    assert not any(to_numpy(each).any() for each in outs)


def test_other_refusals() -> None:
    good = asarray(np.zeros((3, 2)), device=0)
    with pytest.raises(ArgumentIndexError, match="^all_gather: dim 2 is out of range"):
        all_gather([good, good], 2)
    with pytest.raises(ArgumentError, match=r"^all_gather: inputs\[1\] has shape \(3, 3\); expected \(3, 2\)"):
        all_gather([good, asarray(np.zeros((3, 3)), device=1)])
    with pytest.raises(ArgumentError, match=r"^all_gather: inputs\[1\] has 1 dimensions; expected 2"):
        all_gather([good, asarray(np.zeros(3), device=1)])
    with pytest.raises(ArgumentError, match=r"^all_gather: inputs\[1\] has dtype float32"):
        all_gather([good, asarray(np.zeros((3, 2), "f4"), device=1)])
    with pytest.raises(ArgumentError, match=r"^all_gather: inputs\[0\] is in host memory"):
        all_gather([np.zeros((3, 2)), good])
    with pytest.raises(ArgumentError, match="^all_gather: inputs is empty"):
        all_gather([])
    with pytest.raises(UnsupportedError, match=r"^all_gather: inputs\[0\]: str is not a supported array"):
        all_gather(["a"])
