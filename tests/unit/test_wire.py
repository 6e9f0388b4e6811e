"""What ranks say of their calls, as bytes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from ncclcomm.communicator.wire import Statement, decode, dtype_code, dtype_of, encode

DTYPES = [
    np.dtype(name) for name in ("f8", ">i4", "?", "c8", "M8[ns]", "S3", "U5", "V6", "i4,f8", "(2,3)f4", "i2,(2,)c16")
] + [np.dtype(ml_dtypes.bfloat16), np.dtype({"names": ["a"], "formats": ["i4"], "offsets": [4], "itemsize": 12})]
DTYPES += [
    np.dtype([(("title", "b"), "i4"), ("c", "f8")]),
    np.dtype([("in", [("x", ml_dtypes.bfloat16, (3,))]), ("y", ">M8[s]")]),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_dtype_comes_back_from_its_code(dtype: np.dtype) -> None:
    statement = decode(encode(Statement("broadcast", 0, own={"dtype": dtype_code(dtype)})))
    back = dtype_of(statement.own["dtype"])
    assert (back, back.itemsize, back.fields) == (dtype, dtype.itemsize, dtype.fields)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.dtype("f8,f8"), np.dtype("f8,f8").newbyteorder("=")),
        (np.dtype("f8,f8"), np.dtype([("f0", "f8"), ("f1", "f8")], align=True)),
        (np.dtype("f8,f8"), np.dtype(np.rec.fromarrays([np.ones(2), np.ones(2)]).dtype.descr)),
        (np.dtype([("a", "q")]), np.dtype([("a", "l")])),
        (np.dtype("q"), np.dtype("l")),
    ],
)
def test_equal_dtypes_have_equal_codes(one: np.dtype, other: np.dtype) -> None:
    assert one == other
    dtype_code.cache_clear()  # it takes equal ones for one
    code = dtype_code(one)
    dtype_code.cache_clear()
    assert dtype_code(other) == code


def test_dtypes_that_differ_have_other_codes() -> None:
    assert len({dtype_code(dtype) for dtype in DTYPES}) == len(DTYPES)


@pytest.mark.parametrize(
    "statement",
    [
        Statement("barrier", 3),
        Statement("reduce", 0, {"op": "sum", "shape": (4, 3), "root": 1}, {}, ("ArgumentError", "ä: no")),
        Statement("scatter", 2**40, {"dim": -1}, {"chunk sizes": (1, 2, 3), "out": ((), "float64", "host memory")}),
        Statement("gather", 1, {"dim": 1}, {"shape": None, "is": True}),
    ],
    ids=lambda s: s.call,
)
def test_a_statement_comes_back(statement: Statement) -> None:
    assert decode(encode(statement)) == statement


def test_equal_statements_have_equal_bytes_however_their_values_came_about() -> None:
    words = "".join(["host ", "memory"])  # another object than the literal
    once = Statement("all_reduce", 300, {"shape": (7, 7), "memory kind": words, "again": words})
    other = Statement("all_reduce", int("300"), {"shape": tuple([7, 7]), "memory kind": "host memory", "again": words})
    assert encode(once) == encode(other)
