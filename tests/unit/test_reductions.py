"""Which dtypes each reduction takes, and what it makes of them."""

from __future__ import annotations

import functools
import re
import warnings
from typing import Any

import numpy as np
import pytest

from contract.array_samples import FLOATS, MOVABLE, REDUCIBLE, addends, assert_same_bits
from ncclcomm.errors import ArgumentError, UnsupportedError
from ncclcomm.reductions import OPS, check_reduction, reduce_into, ufunc_for

OTHERS = [np.dtype("longdouble"), np.dtype("clongdouble"), np.dtype("V8"), np.dtype("S1"), np.dtype(object)]
PAIRS = [(op, dtype) for op in OPS if op != "avg" for dtype in REDUCIBLE[op]]


def _takes(op: str, dtype: np.dtype[Any]) -> bool:
    """True if a reduction takes the dtype."""
    try:
        check_reduction(op, dtype, "call")
    except UnsupportedError:
        return False
    return True


@pytest.mark.parametrize("op", OPS)
def test_what_each_takes(op: str) -> None:
    dtypes = [*MOVABLE, *OTHERS]
    expected = [dtype for dtype in dtypes if not dtype.names and dtype.newbyteorder("=") in REDUCIBLE[op]]
    assert [dtype for dtype in dtypes if _takes(op, dtype)] == expected
    with pytest.raises(UnsupportedError, match=rf"^call: {op} of dtype \|S5 is not supported; {op} takes .*float16"):
        check_reduction(op, np.dtype("S5"), "call")


@pytest.mark.parametrize(
    ("op", "dtype", "mend"),
    [
        ("min", "?", "; for a logical and: min of array.astype('uint8')"),
        ("prod", "?", "; for a logical and: min of array.astype('uint8')"),
        ("max", "?", "; sum of bool is a logical or"),
        ("avg", "?", "; pass array.astype(float)"),
        ("avg", "i8", "; pass array.astype(float)"),
        ("avg", "S1", "complex128"),
        ("min", "c8", "float64"),
    ],
)
def test_what_to_use_instead(op: str, dtype: str, mend: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{re.escape(mend)}$"):
        check_reduction(op, np.dtype(dtype), "call")


@pytest.mark.parametrize("op", ["mean", "SUM", "", None, 1, np.add, ["sum"]], ids=str)
def test_no_reduction(op: Any) -> None:
    with pytest.raises(ArgumentError, match="^call: op .* is no reduction; use one of sum, prod, min, max, avg"):
        check_reduction(op, np.dtype("f4"), "call")


def _expected(arrays: list[np.ndarray[Any, Any]], op: str) -> np.ndarray[Any, Any]:
    """NumPy's own, one array after the other."""
    func = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[op]
    if arrays[0].dtype == bool:
        func = np.logical_or
    with np.errstate(all="ignore"):
        return np.asarray(functools.reduce(func, arrays))


@pytest.mark.parametrize(("op", "dtype"), PAIRS, ids=str)
def test_as_numpy(op: str, dtype: np.dtype[Any]) -> None:
    for count in range(1, 5):
        arrays = [addends(dtype, 17, seed, op) for seed in range(count)]
        kept = [array.copy() for array in arrays]
        out = np.zeros(17, dtype)
        reduce_into(out, arrays, op)
        assert_same_bits(out, _expected(kept, op), count)
        for array, was in zip(arrays, kept, strict=True):
            assert_same_bits(array, was, "input")


@pytest.mark.parametrize(("op", "dtype"), PAIRS, ids=str)
def test_in_place(op: str, dtype: np.dtype[Any]) -> None:
    for place in range(4):
        arrays = [addends(dtype, 17, seed, op) for seed in range(4)]
        kept = [array.copy() for array in arrays]
        reduce_into(arrays[place], arrays, op)
        assert_same_bits(arrays[place], _expected(kept, op), place)
        for other in set(range(4)) - {place}:
            assert_same_bits(arrays[other], kept[other], "input")


@pytest.mark.parametrize("order", ["C", "strided", "F"])
def test_layouts(order: str) -> None:
    look = {"C": lambda a: a, "strided": lambda a: a[::-2, 1:], "F": lambda a: a.T}[order]
    arrays = [look(addends("f8", (6, 6), seed)) for seed in range(3)]
    out = look(np.zeros((6, 6)))
    reduce_into(out, arrays, "sum")
    np.testing.assert_array_equal(out, arrays[0] + arrays[1] + arrays[2])


@pytest.mark.parametrize("dtype", [">i2", ">f8", ">c16", ">u4"])
def test_other_byte_order(dtype: str) -> None:
    arrays = [addends(dtype, 9, seed) for seed in range(3)]
    for count in (1, 2, 3):
        out = np.zeros(9, np.dtype(dtype).newbyteorder("="))
        reduce_into(out, arrays[:count], "sum")
        np.testing.assert_array_equal(out, _expected(arrays[:count], "sum"))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", ["min", "max"])
def test_extremes_carry_nan(op: str, dtype: np.dtype[Any]) -> None:
    for holder in range(3):
        arrays = [addends(dtype, 4, seed) for seed in range(3)]
        arrays[holder][1] = np.nan
        out = np.zeros(4, dtype)
        reduce_into(out, arrays, op)
        assert np.isnan(out.astype("f8")).tolist() == [False, True, False, False]


@pytest.mark.parametrize("place", [None, 0, 1, 2])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_overflow_is_quiet(dtype: np.dtype[Any], place: int | None) -> None:
    largest = np.full(
        3, 3e38 if dtype.itemsize == 4 or dtype.name == "bfloat16" else 6e4 if dtype.itemsize == 2 else 1e308
    )
    arrays = [largest.astype(dtype) for _ in range(3)]
    out = np.zeros(3, dtype) if place is None else arrays[place]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reduce_into(out, arrays, "sum")
    assert np.isposinf(out.astype("f8")).all()


def test_no_elements_and_no_dimension() -> None:
    out = np.zeros((0, 3))
    reduce_into(out, [np.zeros((0, 3))] * 2, "max")
    scalar = np.zeros(())
    reduce_into(scalar, [np.array(2.0), np.array(5.0)], "prod")
    assert scalar == 10.0


def test_functions() -> None:
    assert ufunc_for("sum", np.dtype(bool)) is np.logical_or
    assert [ufunc_for(op, np.dtype("f4")) for op in ("sum", "prod", "min", "max")] == [
        np.add,
        np.multiply,
        np.minimum,
        np.maximum,
    ]
