"""Which MPI operation and datatype do a reduction.

Sums and products of dtypes that MPI knows are MPI's own; the rest (8- and 16-bit integers, float16, bfloat16, and max
and min of floats, which must carry NaN) are NumPy's, as MPI operations made once per process.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from mpi4py import MPI

from ncclcomm.reductions import ufunc_for

__all__ = ["reduction_of"]

_NATIVE = {
    np.dtype(np.int32): MPI.INT32_T,
    np.dtype(np.int64): MPI.INT64_T,
    np.dtype(np.uint32): MPI.UINT32_T,
    np.dtype(np.uint64): MPI.UINT64_T,
    np.dtype(np.float32): MPI.FLOAT,
    np.dtype(np.float64): MPI.DOUBLE,
    np.dtype(np.complex64): MPI.C_FLOAT_COMPLEX,
    np.dtype(np.complex128): MPI.C_DOUBLE_COMPLEX,
}
"""Dtypes whose sums and products every MPI does as NumPy does. Integers must wrap: Open MPI's vectorised sums of 8 and
16 bits saturate, so these are left to NumPy."""

_NATIVE_OPS = {"sum": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}


@functools.cache
def _numpy_op(op: str, dtype: np.dtype[Any]) -> MPI.Op:
    """An MPI operation that NumPy does, on elements of one dtype."""
    func = ufunc_for(op, dtype)

    def combine(source: Any, target: Any, _: MPI.Datatype) -> None:
        total = np.frombuffer(target, dtype)
        with np.errstate(all="ignore"):
            func(np.frombuffer(source, dtype), total, out=total)

    return MPI.Op.Create(combine, commute=True)


@functools.cache
def _element_type(itemsize: int) -> MPI.Datatype:
    """An MPI datatype of that many bytes, for operations that NumPy does."""
    return MPI.BYTE.Create_contiguous(itemsize).Commit()


@functools.cache
def reduction_of(op: str, dtype: np.dtype[Any]) -> tuple[MPI.Op, MPI.Datatype]:
    """The MPI operation and datatype that do a reduction as NumPy does it."""
    if dtype.kind == "b":
        return MPI.LOR, MPI.C_BOOL
    if dtype in _NATIVE and (dtype.kind in "iu" or op in ("sum", "prod")):
        return _NATIVE_OPS[op], _NATIVE[dtype]
    return _numpy_op(op, dtype), _element_type(dtype.itemsize)
