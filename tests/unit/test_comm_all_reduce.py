"""In-process all_reduce: every dtype and op, in place, outs and refusals."""

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
    sample,
    spread,
)
from ncclcomm import ArgumentError, UnsupportedError, asarray, device_index, to_numpy
from ncclcomm.comm import all_reduce
from ncclcomm.transport import peer

pytestmark = pytest.mark.usefixtures("eight_devices")


@pytest.fixture(params=[1 << 20, 0], ids=["whole", "sliced"], autouse=True)
def _form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The form for small arrays, and the one for large ones."""
    monkeypatch.setattr(peer, "SLICED_BYTES", request.param)


@pytest.mark.parametrize("order", ORDERS, ids=len)
@pytest.mark.parametrize("op", REDUCIBLE)
def test_every_dtype_and_op(op: str, order: tuple[int, ...]) -> None:
    for dtype in REDUCIBLE[op]:
        values = [addends(dtype, (5, 3), i, op) for i in range(len(order))]
        arrays = spread(values, order)
        results = all_reduce(iter(arrays), op)
        assert type(results) is tuple
        assert [device_index(result) for result in results] == list(order)
        for result, array, value in zip(results, arrays, values, strict=True):
            assert_same_bits(to_numpy(result), reduced(values, op), dtype)
            assert result.flags.c_contiguous
            assert not np.shares_memory(result.view(np.ndarray), array.view(np.ndarray))
            assert_same_bits(to_numpy(array), value, "an input")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_in_and_out_and_in_place(layout: str) -> None:
    shape, look = LAYOUTS[layout]
    bases = [addends("i4", shape, i) for i in range(3)]
    expected = reduced([look(base).copy() for base in bases], "sum")
    whole = spread(bases, (1, 2, 0))
    for result in all_reduce([look(array) for array in whole]):
        assert_same_bits(to_numpy(result), expected, layout)
    targets = spread([np.full(shape, -1, "i4")] * 3, (1, 2, 0))
    views = [look(target) for target in targets]
    found = all_reduce([look(array) for array in whole], out=iter(views))
    assert all(a is b for a, b in zip(found, views, strict=True))
    for target in targets:
        filled = np.full(shape, -1, "i4")
        look(filled)[...] = expected
        assert_same_bits(to_numpy(target), filled, layout)
    all_reduce([look(array) for array in whole], out=[look(array) for array in whole])
    for array, base in zip(whole, bases, strict=True):
        filled = base.copy()
        look(filled)[...] = expected
        assert_same_bits(to_numpy(array), filled, layout)


def test_rounding_is_the_same_everywhere_and_as_in_order() -> None:
    values = [np.random.default_rng(i).normal(size=1001).astype("f4") for i in range(8)]
    for result in all_reduce(spread(values, range(8))):
        assert_same_bits(to_numpy(result), reduced(values, "sum"))


def test_extremes_carry_nan() -> None:
    values = [np.array([1.0, np.nan, 3.0]), np.array([2.0, 5.0, np.nan])]
    for result in all_reduce(spread(values, (0, 1)), "max"):
        np.testing.assert_array_equal(to_numpy(result), [2.0, np.nan, np.nan])


def test_no_dimension_no_element_and_one_device_for_all() -> None:
    for result in all_reduce(spread([np.array(i + 0.5) for i in range(3)], (0, 1, 2))):
        assert_same_bits(to_numpy(result), np.array(4.5))
    for result in all_reduce(spread([np.zeros((0, 2))] * 2, (0, 1)), "max"):
        assert to_numpy(result).shape == (0, 2)
    twice = [asarray(np.arange(4.0), device=1), asarray(np.ones(4), device=1)]
    for result in all_reduce(twice):
        assert device_index(result) == 1
        np.testing.assert_array_equal(to_numpy(result), np.arange(4.0) + 1)


@pytest.mark.parametrize("dtype", [">i2", ">f8", ">c16"])
def test_other_byte_order_comes_back_native(dtype: str) -> None:
    values = [addends(dtype, 5, i) for i in range(3)]
    arrays = spread(values, (0, 1, 2))
    for result in all_reduce(arrays):
        assert result.dtype.isnative
        assert_same_bits(to_numpy(result), reduced(values, "sum"))
    with pytest.raises(ArgumentError, match=r"^all_reduce: out\[0\] has shape \(5,\) and dtype >"):
        all_reduce(arrays, out=arrays)
    (one,) = all_reduce(arrays[:1])
    assert_same_bits(to_numpy(one), reduced(values[:1], "sum"))


def _outs(kind: str, inputs: list[Any]) -> list[Any]:
    """Outs of which the last is unfit."""
    good = asarray(np.zeros(6), device=0)
    shared = asarray(np.zeros(9), device=1)
    return {
        "few": [good],
        "device": [good, asarray(np.zeros(6), device=2)],
        "host": [good, np.zeros(6)],
        "shape": [good, asarray(np.zeros(5), device=1)],
        "dtype": [good, asarray(np.zeros(6, "f4"), device=1)],
        "reversed input": [good, inputs[1][::-1]],
        "each other": [shared[:6], shared[3:]],
    }[kind]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("few", "out has 1 arrays for 2 inputs"),
        ("device", r"out\[1\] is on device 2; expected device 1 as inputs\[1\]"),
        ("host", r"out\[1\] is in host memory; expected an array of a device"),
        ("shape", r"out\[1\] has shape \(5,\)"),
        ("dtype", r"out\[1\] has .*float32; the result .*float64"),
        ("reversed input", r"out\[1\] overlaps an input"),
        ("each other", r"out\[0\] is on device 1; expected device 0 as inputs\[0\]"),
    ],
)
def test_bad_out_writes_nothing(kind: str, words: str) -> None:
    inputs = spread([np.arange(6.0), np.ones(6)], (0, 1))
    outs = _outs(kind, inputs)
    before = [to_numpy(out) for out in outs]
    with pytest.raises(ArgumentError, match=f"^all_reduce: {words}"):
        all_reduce(inputs, out=outs)
    for out, was in zip([*outs, *inputs], [*before, np.arange(6.0), np.ones(6)], strict=True):
        assert_same_bits(to_numpy(out), was, kind)


def test_outs_that_overlap_each_other() -> None:
    shared = asarray(np.zeros(9), device=1)
    inputs = spread([np.arange(6.0), np.ones(6)], (1, 1))
    with pytest.raises(ArgumentError, match=r"^all_reduce: out\[1\] overlaps"):
        all_reduce(inputs, out=[shared[:6], shared[3:]])
    assert not to_numpy(shared).any()


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (np.zeros(4), r"inputs\[1\] has shape \(4,\); expected \(3,\) as inputs\[0\]"),
        (np.zeros(3, "i8"), r"inputs\[1\] has dtype int64; expected float64"),
        (np.zeros(3, ">f8"), r"inputs\[1\] has dtype >f8; expected float64"),
    ],
    ids=["shape", "dtype", "byte order"],
)
def test_arrays_that_disagree(second: np.ndarray[Any, Any], words: str) -> None:
    arrays = spread([np.zeros(3), second], (0, 1))
    for given in (arrays, [*arrays, arrays[0]]):
        with pytest.raises(ArgumentError, match=f"^all_reduce: {words}"):
            all_reduce(given)


def test_other_refusals() -> None:
    good = asarray(np.zeros(3), device=0)
    for given in ([np.zeros(3), good], [good, np.zeros(3)], [good, np.zeros(3), good]):
        with pytest.raises(ArgumentError, match=r"^all_reduce: inputs\[[01]\] is in host memory"):
            all_reduce(given)
    with pytest.raises(ArgumentError, match="^all_reduce: inputs is empty"):
        all_reduce([])
    with pytest.raises(ArgumentError, match="^all_reduce: inputs must be an iterable of arrays, not one HostArray"):
        all_reduce(good)
    with pytest.raises(UnsupportedError, match=r"^all_reduce: inputs\[1\]: int is not a supported array"):
        all_reduce([good, 4])
    with pytest.raises(ArgumentError, match="^all_reduce: op 'mean' is no reduction"):
        all_reduce([good], "mean")
    for dtype, op in (("M8[s]", "sum"), ("?", "prod"), ("c8", "max"), ("i4", "avg")):
        arrays = spread([sample(dtype, 3, i) for i in range(2)], (0, 1))
        with pytest.raises(UnsupportedError, match=f"^all_reduce: {op} of dtype .* is not supported"):
            all_reduce(arrays, op)
