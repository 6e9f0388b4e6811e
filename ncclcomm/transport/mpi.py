"""Ranks that talk through MPI, on host memory.

Data moves as bytes, so that every dtype moves bit for bit. Sums and products of dtypes that MPI knows are MPI's own;
the rest (8- and 16-bit integers, float16, bfloat16, and max and min of floats, which must carry NaN) are NumPy's, as
MPI operations made once per process.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np
from mpi4py import MPI

from ncclcomm.arrays import same_memory
from ncclcomm.errors import ArgumentError, MpiError
from ncclcomm.reductions import ufunc_for
from ncclcomm.transport.base import Transport

__all__ = [
    "MPI",
    "MpiControl",
    "MpiTransport",
    "duplicate",
    "end_job",
    "first_rank_of_host",
    "free",
    "library_version",
    "split",
    "translated",
]

P = ParamSpec("P")
R = TypeVar("R")

_TAG = 0

_RECORD_BYTES = 256
"""What a rank says of a call takes 100 to 200."""

_LENGTH_BYTES = 4
"""In front of a record: how many bytes there are in all."""

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


def translated(func: Callable[P, R]) -> Callable[P, R]:
    """Turn MPI's exceptions into MpiError, with the call's name and MPI's words."""

    @functools.wraps(func)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return func(*args, **kwargs)
        except MPI.Exception as error:
            code, text = error.Get_error_code(), error.Get_error_string()
            raise MpiError(
                f"MPI {func.__name__} failed: {text} (error {code})", code=code, name=text, call=func.__name__
            ) from error

    return call


def _bytes(array: Any) -> Any:
    """The memory of a contiguous one-dimensional array as uint8."""
    return array.view(np.uint8)


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
def _reduction(op: str, dtype: np.dtype[Any]) -> tuple[MPI.Op, MPI.Datatype]:
    """The MPI operation and datatype that do a reduction as NumPy does it."""
    if dtype.kind == "b":
        return MPI.LOR, MPI.C_BOOL
    if dtype in _NATIVE and (dtype.kind in "iu" or op in ("sum", "prod")):
        return _NATIVE_OPS[op], _NATIVE[dtype]
    return _numpy_op(op, dtype), _element_type(dtype.itemsize)


class MpiTransport(Transport):
    """The ranks of an mpi4py communicator that nobody else uses; each drives itself.

    Args:
        comm: the communicator; the transport owns it and frees it in `close`.
        chunk_bytes: most bytes passed to MPI in one call.
    """

    name = "mpi"

    def __init__(self, comm: MPI.Intracomm | None, chunk_bytes: int) -> None:
        assert comm is not None
        self.comm = comm
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.members = (self.rank,)
        self.chunk_bytes = chunk_bytes
        self._closed = False

    def _chunks(self, array: Any, unit: int = 1) -> list[Any]:
        """An array's bytes in pieces that one MPI call takes, each of whole units; nothing for no elements."""
        data = _bytes(array)
        if 0 < data.size <= self.chunk_bytes:
            return [data]
        step = max(1, self.chunk_bytes // unit) * unit
        return [data[start : start + step] for start in range(0, data.size, step)]

    @translated
    def broadcast(self, buffers: Sequence[Any], root: int) -> None:
        """See Transport.broadcast."""
        for chunk in self._chunks(buffers[0]):
            self.comm.Bcast([chunk, MPI.BYTE], root=root)

    @translated
    def scatter(self, parts: Sequence[Any] | None, outs: Sequence[Any], root: int) -> None:
        """See Transport.scatter."""
        if self.rank != root:
            self._wait([self.comm.Irecv([chunk, MPI.BYTE], root, _TAG) for chunk in self._chunks(outs[0])])
            return
        assert parts is not None
        requests = []
        for member, part in enumerate(parts):
            if member != root:
                requests += [self.comm.Isend([chunk, MPI.BYTE], member, _TAG) for chunk in self._chunks(part)]
        self._copy_own(outs[0], parts[root])
        self._wait(requests)

    @translated
    def gather(self, arrays: Sequence[Any], parts: Sequence[Any] | None, root: int) -> None:
        """See Transport.gather."""
        if self.rank != root:
            self._wait([self.comm.Isend([chunk, MPI.BYTE], root, _TAG) for chunk in self._chunks(arrays[0])])
            return
        assert parts is not None
        requests = []
        for member, part in enumerate(parts):
            if member != root:
                requests += [self.comm.Irecv([chunk, MPI.BYTE], member, _TAG) for chunk in self._chunks(part)]
        self._copy_own(parts[root], arrays[0])
        self._wait(requests)

    @staticmethod
    def _copy_own(dst: Any, src: Any) -> None:
        """Copy this rank's own part, unless it is in its place."""
        if not same_memory(dst, src):
            np.copyto(dst, src)

    @staticmethod
    def _wait(requests: list[MPI.Request]) -> None:
        """Wait for all of them."""
        MPI.Request.Waitall(requests)

    @translated
    def reduce(self, arrays: Sequence[Any], outs: Sequence[Any | None], op: str, root: int) -> None:
        """See Transport.reduce."""
        array, out = arrays[0], outs[0]
        mpi_op, mpi_type = _reduction(op, array.dtype)
        in_place = out is not None and same_memory(array, out)
        sources = self._chunks(array, array.itemsize)
        targets = [None] * len(sources) if out is None else self._chunks(out, out.itemsize)
        for source, target in zip(sources, targets, strict=True):
            self.comm.Reduce(
                MPI.IN_PLACE if in_place else (source, mpi_type),
                None if target is None else (target, mpi_type),
                mpi_op,
                root=root,
            )

    @translated
    def all_reduce(self, arrays: Sequence[Any], outs: Sequence[Any], op: str) -> None:
        """See Transport.all_reduce."""
        array, out = arrays[0], outs[0]
        mpi_op, mpi_type = _reduction(op, array.dtype)
        if not mpi_op.is_predefined:
            # A NumPy operation on NaN or signed zeros depends on the order of its arguments, and MPI may choose
            # another order on each rank; one rank's result for all keeps the bits identical.
            self.reduce(arrays, outs if self.rank == 0 else [None], op, 0)
            self.broadcast(outs, 0)
            return
        in_place = same_memory(array, out)
        targets = self._chunks(out, out.itemsize)
        if in_place:
            for target in targets:
                self.comm.Allreduce(MPI.IN_PLACE, (target, mpi_type), mpi_op)
            return
        for source, target in zip(self._chunks(array, array.itemsize), targets, strict=True):
            self.comm.Allreduce((source, mpi_type), (target, mpi_type), mpi_op)

    @translated
    def move(self, array: Any | None, out: Any | None, source: int, dest: int) -> None:
        """See Transport.move."""
        if self.rank == source:
            for chunk in self._chunks(array):
                self.comm.Send([chunk, MPI.BYTE], dest, _TAG)
        else:
            for chunk in self._chunks(out):
                self.comm.Recv([chunk, MPI.BYTE], source, _TAG)

    @translated
    def barrier(self) -> None:
        """See Transport.barrier."""
        self.comm.Barrier()

    def close(self) -> None:
        """See Transport.close."""
        if not self._closed:
            self._closed = True
            if not MPI.Is_finalized():
                self.comm.Free()


class MpiControl:
    """Small objects between the ranks of a communicator; see communicator.checks.Control."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self._mine = bytearray(_RECORD_BYTES)
        self._all = bytearray(0)

    @translated
    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every rank's object, in rank order."""
        return self.comm.allgather(obj)

    @translated
    def broadcast_object(self, obj: Any, root: int) -> Any:
        """The root's object."""
        return self.comm.bcast(obj, root=root)

    @translated
    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes: in records of fixed size, and once more whole where one rank's don't fit."""
        if not self._all:
            self._all = bytearray(_RECORD_BYTES * self.comm.size)
        self._put(data)
        self.comm.Allgather((self._mine, MPI.BYTE), (self._all, MPI.BYTE))
        lengths = []
        found = []
        for start in range(0, len(self._all), _RECORD_BYTES):
            length = int.from_bytes(self._all[start : start + _LENGTH_BYTES], "little")
            lengths.append(length)
            found.append(bytes(self._all[start + _LENGTH_BYTES : start + _LENGTH_BYTES + length]))
        if max(lengths) <= _RECORD_BYTES - _LENGTH_BYTES:
            return found
        whole = bytearray(sum(lengths))
        self.comm.Allgatherv((data, MPI.BYTE), (whole, lengths, None, MPI.BYTE))
        ends = list(itertools.accumulate(lengths))
        return [bytes(whole[end - length : end]) for end, length in zip(ends, lengths, strict=True)]

    @translated
    def broadcast_bytes(self, data: bytes, root: int) -> bytes:
        """The root's bytes: in a record of fixed size, and once more whole where they don't fit."""
        if self.comm.rank == root:
            self._put(data)
        self.comm.Bcast((self._mine, MPI.BYTE), root)
        length = int.from_bytes(self._mine[:_LENGTH_BYTES], "little")
        if length <= _RECORD_BYTES - _LENGTH_BYTES:
            return bytes(self._mine[_LENGTH_BYTES : _LENGTH_BYTES + length])
        whole = bytearray(data) if self.comm.rank == root else bytearray(length)
        self.comm.Bcast((whole, MPI.BYTE), root)
        return bytes(whole)

    def _put(self, data: bytes) -> None:
        """Write a length, and what fits of the bytes, into this rank's record."""
        self._mine[:_LENGTH_BYTES] = len(data).to_bytes(_LENGTH_BYTES, "little")
        fitting = data[: _RECORD_BYTES - _LENGTH_BYTES]
        self._mine[_LENGTH_BYTES : _LENGTH_BYTES + len(fitting)] = fitting

    @translated
    def barrier_within(self, limit_s: float) -> bool:
        """A barrier that is given up after some seconds."""
        request = self.comm.Ibarrier()
        deadline = time.monotonic() + limit_s
        pause_s = 0.0
        while not request.Test():
            if time.monotonic() > deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(pause_s + 1e-5, 1e-3)
        return True


@translated
def duplicate(comm: Any) -> MPI.Intracomm:
    """A duplicate of a caller's communicator; collective.

    Raises:
        ArgumentError: not an intracommunicator of mpi4py.
    """
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        raise ArgumentError(f"mpi_comm is {comm!r}; expected an mpi4py intracommunicator, such as MPI.COMM_WORLD")
    return comm.Dup()


@translated
def split(comm: MPI.Intracomm, color: int | None, key: int) -> MPI.Intracomm | None:
    """The communicator of the ranks with the same color, or None without one; collective."""
    part = comm.Split(MPI.UNDEFINED if color is None else color, key)
    return part if isinstance(part, MPI.Intracomm) and part != MPI.COMM_NULL else None


@translated
def first_rank_of_host(comm: MPI.Intracomm) -> int:
    """The lowest rank among those that share memory with this one; collective."""
    host = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.Get_rank())
    first: int = host.allreduce(comm.Get_rank(), MPI.MIN)
    host.Free()
    return first


def library_version() -> str:
    """The MPI library's name and version, in one line."""
    return " ".join(MPI.Get_library_version().strip("\x00").split("\n")[0].split())


def end_job(status: int) -> None:
    """End all ranks; from any thread. It may return, and leaves it to the process's own end then."""
    if MPI.Is_initialized() and not MPI.Is_finalized() and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        MPI.COMM_WORLD.Abort(status)


@translated
def free(comm: MPI.Intracomm) -> None:
    """Free a communicator of ours; collective; nothing after MPI_Finalize."""
    if not MPI.Is_finalized():
        comm.Free()
