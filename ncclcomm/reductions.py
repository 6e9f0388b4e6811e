"""Which dtypes each reduction takes, and the NumPy function that does it; one table for every path."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ncclcomm.errors import ArgumentError, UnsupportedError

__all__ = ["OPS", "check_reduction", "divide_by", "reduce_into", "ufunc_for"]

OPS = ("sum", "prod", "min", "max", "avg")

_FLOATS = {"float16": "f", "bfloat16": "f", "float32": "f", "float64": "f", "complex64": "c", "complex128": "c"}
"""By name: ml_dtypes gives some of its small floats NumPy's kind of floats, others none."""

_TAKES = {
    "sum": "all integers, float16, bfloat16, float32, float64, complex64, complex128 and bool (logical or)",
    "prod": "all integers, float16, bfloat16, float32, float64, complex64 and complex128",
    "min": "all integers, float16, bfloat16, float32 and float64",
    "max": "all integers, float16, bfloat16, float32 and float64",
    "avg": "float16, bfloat16, float32, float64, complex64 and complex128",
}

_CLASSES = {"sum": "biufc", "prod": "iufc", "min": "iuf", "max": "iuf", "avg": "fc"}


def _class_of(dtype: np.dtype[Any]) -> str:
    """One of b, i, u, f, c for dtypes that can be reduced; '' for the others."""
    return dtype.kind if dtype.kind in "biu" else _FLOATS.get(dtype.name, "")


@functools.lru_cache(maxsize=512)
def _takes(op: str, dtype: np.dtype[Any]) -> bool:
    """True if a reduction takes a dtype."""
    cls = _class_of(dtype)
    return bool(cls) and cls in _CLASSES[op]


def _instead(op: str, dtype: np.dtype[Any]) -> str:
    """What to use where a reduction could be expected to take a dtype and doesn't; '' elsewhere."""
    if op == "avg" and dtype.kind in "biu":
        return "; pass array.astype(float)"
    if dtype.kind == "b":
        return "; sum of bool is a logical or" if op == "max" else "; for a logical and: min of array.astype('uint8')"
    return ""


def check_reduction(op: Any, dtype: np.dtype[Any], call: str) -> None:
    """Check that a reduction exists and takes the dtype.

    Raises:
        ArgumentError: no such reduction.
        UnsupportedError: the reduction doesn't take the dtype.
    """
    if not isinstance(op, str) or op not in _CLASSES:
        raise ArgumentError(f"{call}: op {op!r} is no reduction; use one of {', '.join(OPS)}")
    if not _takes(op, dtype):
        raise UnsupportedError(
            f"{call}: {op} of dtype {dtype} is not supported; {op} takes {_TAKES[op]}{_instead(op, dtype)}"
        )


_UFUNCS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


def ufunc_for(op: str, dtype: np.dtype[Any]) -> Callable[..., Any]:
    """The two-argument NumPy function of a reduction: sums of bool are logical or, max and min carry NaN."""
    if op == "sum" and dtype.kind == "b":
        return np.logical_or
    return _UFUNCS[op]


def divide_by(total: Any, count: int) -> None:
    """Make an average of a sum, in its place and its own dtype; silently, as warnings may have been made errors.

    Args:
        total: the sum.
        count: of how many arrays.
    """
    with np.errstate(all="ignore"):
        np.divide(total, total.dtype.type(count), out=total)


def reduce_into(out: np.ndarray[Any, Any], arrays: Sequence[np.ndarray[Any, Any]], op: str) -> None:
    """Reduce plain arrays of one shape and dtype into out, in their order; out may be any one of them."""
    if len(arrays) == 1:
        if out is not arrays[0]:
            np.copyto(out, arrays[0])
        return
    dtype = out.dtype
    func = ufunc_for(op, dtype)
    aliased = len(arrays) > 2 and any([np.may_share_memory(out, array) for array in arrays[2:]])
    total = np.empty_like(out) if aliased else out
    # Whole numbers give nothing to be quiet about, and being quiet takes longer than a small sum.
    reduce_apart = _reduce_apart if dtype.kind in "biu" else _reduce_apart_quietly
    reduce_apart(func, total, arrays)
    if aliased:
        np.copyto(out, total)


def _reduce_apart(func: Callable[..., Any], out: np.ndarray[Any, Any], arrays: Sequence[np.ndarray[Any, Any]]) -> None:
    """Reduce into memory that only the first two arrays may share."""
    func(arrays[0], arrays[1], out=out)
    for array in arrays[2:]:
        func(out, array, out=out)


def _reduce_apart_quietly(*args: Any) -> None:
    """As _reduce_apart, with no warning of overflow."""
    with np.errstate(all="ignore"):
        _reduce_apart(*args)


if int(np.__version__.partition(".")[0]) >= 2:  # before, one such decorator was not fit for several threads
    _reduce_apart_quietly = np.errstate(all="ignore")(_reduce_apart)  # half the time
