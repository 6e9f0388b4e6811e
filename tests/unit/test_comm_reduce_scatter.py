"""In-process reduce_scatter: every dtype and op, chunks, in place, outs and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from contract.array_samples import (
    LAYOUTS,
    ORDERS,
    REDUCIBLE,
    addends,
    assert_same_bits,
    eight_devices,  # noqa: F401
    reduced,
    spread,
)
from ncclcomm import ArgumentError, ArgumentIndexError, UnsupportedError, asarray, device_index, to_numpy
from ncclcomm.comm import reduce_scatter

pytestmark = pytest.mark.usefixtures("eight_devices")


@pytest.mark.parametrize("order", ORDERS, ids=len)
@pytest.mark.parametrize("op", REDUCIBLE)
def test_every_dtype_and_op(op: str, order: tuple[int, ...]) -> None:
    for dtype in REDUCIBLE[op]:
        for rows in (2 * len(order), 5):  # as many for each, and more for the first or none for the last
            values = [addends(dtype, (rows, 2), i, op) for i in range(len(order))]
            arrays = spread(values, order)
            results = reduce_scatter(iter(arrays), op)
            assert type(results) is tuple
            assert [device_index(result) for result in results] == list(order)
            for result, part in zip(results, np.array_split(reduced(values, op), len(order)), strict=True):
                assert_same_bits(to_numpy(result), part.copy(), dtype)
                assert result.flags.c_contiguous
            for array, value in zip(arrays, values, strict=True):
                assert_same_bits(to_numpy(array), value, "an input")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    shape, look = LAYOUTS[layout]
    bases = [addends(">i4", shape, i) for i in range(3)]
    arrays = [look(array) for array in spread(bases, (1, 2, 0))]
    expected = reduced([look(base).copy() for base in bases], "sum")
    for dim in range(expected.ndim):
        for result, part in zip(reduce_scatter(arrays, dim=dim), np.array_split(expected, 3, axis=dim), strict=True):
            assert_same_bits(to_numpy(result), np.ascontiguousarray(part), (layout, dim))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_chunk_sizes_in_place_and_into_views(dim: int) -> None:
    values = [addends("i8", (6, 6), i) for i in range(3)]
    expected = np.split(reduced(values, "sum"), [4, 4], axis=dim)
    sizes = (4, 0, 2)
    for result, part in zip(reduce_scatter(spread(values, (2, 0, 1)), "sum", sizes, dim), expected, strict=True):
        assert_same_bits(to_numpy(result), np.ascontiguousarray(part))
    wholes = [asarray(np.zeros((2, *part.shape), "i8"), device=d) for part, d in zip(expected, (2, 0, 1), strict=True)]
    outs = [whole[1] for whole in wholes]
    found = reduce_scatter(spread(values, (2, 0, 1)), "sum", iter(sizes), dim, out=outs)
    assert all(a is b for a, b in zip(found, outs, strict=True))
    for whole, part in zip(wholes, expected, strict=True):
        assert not to_numpy(whole)[0].any()
        assert_same_bits(to_numpy(whole)[1], np.ascontiguousarray(part))
    inputs = spread(values, (2, 0, 1))
    starts = (0, 4, 4)
    lead = (slice(None),) * (dim % 2)
    places = [(*lead, slice(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
    reduce_scatter(inputs, "sum", sizes, dim, out=[array[place] for array, place in zip(inputs, places, strict=True)])
    for array, value, place, part in zip(inputs, values, places, expected, strict=True):
        filled = value.copy()
        filled[place] = part
        assert_same_bits(to_numpy(array), filled, "in place")


def test_one_device_for_all() -> None:
    arrays = [asarray(np.arange(4.0), device=1), asarray(np.ones(4), device=1)]
    first, second = reduce_scatter(arrays)
    np.testing.assert_array_equal(to_numpy(first), [1, 2])
    np.testing.assert_array_equal(to_numpy(second), [3, 4])


def test_out_that_is_another_chunk() -> None:
    arrays = spread([np.arange(4.0), np.ones(4)], (0, 1))
    outs = [arrays[0][2:], asarray(np.zeros(2), device=1)]
    with pytest.raises(ArgumentError, match=r"^reduce_scatter: out\[0\] overlaps inputs\[0\] other than at its own"):
        reduce_scatter(arrays, out=outs)
    np.testing.assert_array_equal(to_numpy(arrays[0]), np.arange(4.0))


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ([(2, 0)], "out has 1 arrays for 2 inputs"),
        ([(2, 0), (2, 2)], r"out\[1\] is on device 2; expected device 1 as inputs\[1\]"),
        ([(2, 0), (2, "cpu")], r"out\[1\] is in host memory"),
        ([(2, 0), (3, 1)], r"out\[1\] has shape \(3,\) .* the result has shape \(2,\)"),
    ],
    ids=["few", "device", "host", "shape"],
)
def test_bad_out_writes_nothing(out: list[Any], words: str) -> None:
    outs = [asarray(np.zeros(n), device=device) for n, device in out]
    with pytest.raises(ArgumentError, match=f"^reduce_scatter: {words}"):
        reduce_scatter(spread([np.ones(4)] * 2, (0, 1)), out=outs)
    assert not any(to_numpy(each).any() for each in outs)


def test_other_refusals() -> None:
    arrays = spread([np.zeros(4)] * 2, (0, 1))
    with pytest.raises(ArgumentIndexError, match="^reduce_scatter: dim 1 is out of range"):
        reduce_scatter(arrays, dim=1)
    with pytest.raises(ArgumentIndexError, match="^reduce_scatter: dim 0 is out of range.*no dimension"):
        reduce_scatter([array.sum() for array in arrays])
    with pytest.raises(ArgumentError, match=r"^reduce_scatter: chunk_sizes \[1, 1\] sum to 2"):
        reduce_scatter(arrays, "sum", [1, 1])
    with pytest.raises(ArgumentError, match="^reduce_scatter: chunk_sizes has 1 entries for 2 inputs"):
        reduce_scatter(arrays, "sum", [4])
    with pytest.raises(ArgumentError, match="^reduce_scatter: op 5 is no reduction"):
        reduce_scatter(arrays, 5)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="^reduce_scatter: avg of dtype int64 is not supported"):
        reduce_scatter(spread([np.arange(4)] * 2, (0, 1)), "avg")
    with pytest.raises(ArgumentError, match=r"^reduce_scatter: inputs\[1\] has shape \(5,\); expected \(4,\)"):
        reduce_scatter([arrays[0], asarray(np.zeros(5), device=1)])
    with pytest.raises(ArgumentError, match="^reduce_scatter: inputs is empty"):
        reduce_scatter([])
