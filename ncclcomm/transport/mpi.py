"""Ranks that talk through MPI, on host memory.

Data moves as bytes, so that every dtype moves bit for bit; mpi_ops.py says what reduces it.
"""

from __future__ import annotations

import functools
import itertools
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np
from mpi4py import MPI

from ncclcomm.arrays import same_memory
from ncclcomm.errors import ArgumentError, MpiError
from ncclcomm.transport.base import Transport
from ncclcomm.transport.mpi_messages import post_and_wait
from ncclcomm.transport.mpi_ops import reduction_of

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
    "translate",
    "translated",
]

P = ParamSpec("P")
R = TypeVar("R")

_TAG = 0

_RECORD_BYTES = 256
"""What a rank says of a call takes 100 to 200."""

_HEADER_BYTES = 512
"""The same where few data may come with it."""

_LENGTH = struct.Struct("<I")
"""In front of a record: how many bytes there are in all."""


def translated(func: Callable[P, R]) -> Callable[P, R]:
    """Turn MPI's exceptions into MpiError, with the call's name and MPI's words."""

    @functools.wraps(func)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return func(*args, **kwargs)
        except MPI.Exception as error:
            raise translate(error, func.__name__) from error

    return call


def translate(error: BaseException, call: str) -> BaseException:
    """MPI's exception as MpiError, with the call's name and MPI's words; another one as it is."""
    if not isinstance(error, MPI.Exception):
        return error
    code, text = error.Get_error_code(), error.Get_error_string()
    return MpiError(f"MPI {call} failed: {text} (error {code})", code=code, name=text, call=call)


def _own(target: Any, source: Any) -> list[tuple[Any, Any]]:
    """The copy of this rank's own part, unless it is in its place."""
    return [] if same_memory(target, source) else [(target, source)]


def _bytes(array: Any) -> Any:
    """The memory of a contiguous one-dimensional array as uint8."""
    return array.view(np.uint8)


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
            self.comm.Bcast((chunk, chunk.size, MPI.BYTE), root)

    @translated
    def scatter(self, parts: Sequence[Any] | None, outs: Sequence[Any], root: int) -> None:
        """See Transport.scatter."""
        if self.rank != root:
            self._receive(outs[0], root)
            return
        assert parts is not None
        post_and_wait(self.comm.Isend, *self._messages(parts, root), _own(outs[0], parts[root]))

    @translated
    def gather(self, arrays: Sequence[Any], parts: Sequence[Any] | None, root: int) -> None:
        """See Transport.gather."""
        if self.rank != root:
            self._send(arrays[0], root)
            return
        assert parts is not None
        post_and_wait(self.comm.Irecv, *self._messages(parts, root), _own(parts[root], arrays[0]))

    def _messages(self, parts: Sequence[Any], root: int) -> tuple[list[tuple[Any, int, MPI.Datatype]], list[int]]:
        """The memory of all parts but the root's, as MPI takes it, and whose each piece is."""
        messages, members = [], []
        for member, part in enumerate(parts):
            if member != root:
                for chunk in self._chunks(part):
                    messages.append((chunk, chunk.size, MPI.BYTE))
                    members.append(member)
        return messages, members

    def _send(self, array: Any, dest: int) -> None:
        """Send an array to one member; in turn, since that one has asked for all of it."""
        for chunk in self._chunks(array):
            self.comm.Send((chunk, chunk.size, MPI.BYTE), dest, _TAG)

    def _receive(self, out: Any, source: int) -> None:
        """Fill an array with what one member sends."""
        for chunk in self._chunks(out):
            self.comm.Recv((chunk, chunk.size, MPI.BYTE), source, _TAG)

    @translated
    def reduce(self, arrays: Sequence[Any], outs: Sequence[Any | None], op: str, root: int) -> None:
        """See Transport.reduce."""
        array, out = arrays[0], outs[0]
        mpi_op, mpi_type = reduction_of(op, array.dtype)
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
        mpi_op, mpi_type, to_all = self.reduction(op, array.dtype)
        targets = self._chunks(out, out.itemsize)
        if same_memory(array, out):
            for target in targets:
                to_all(MPI.IN_PLACE, (target, mpi_type), mpi_op)
            return
        for source, target in zip(self._chunks(array, array.itemsize), targets, strict=True):
            to_all((source, mpi_type), (target, mpi_type), mpi_op)

    def reduction(self, op: str, dtype: np.dtype[Any]) -> tuple[MPI.Op, MPI.Datatype, Callable[..., object]]:
        """MPI's operation and datatype of a reduction, and what does it to all ranks in Allreduce's way."""
        mpi_op, mpi_type = reduction_of(op, dtype)
        return mpi_op, mpi_type, self.comm.Allreduce if mpi_op.is_predefined else self._reduce_once

    def _reduce_once(self, source: Any, target: tuple[Any, MPI.Datatype], op: MPI.Op) -> None:
        """Reduce on one rank, for all of them.

        A NumPy operation on NaN or signed zeros depends on the order of its arguments, and MPI may choose another order
        on each rank; one rank's result for all keeps the bits identical.
        """
        if self.rank == 0:
            self.comm.Reduce(source, target, op, 0)
        else:
            self.comm.Reduce(target if source is MPI.IN_PLACE else source, None, op, 0)
        self.comm.Bcast(target, 0)

    @translated
    def move(self, array: Any | None, out: Any | None, source: int, dest: int) -> None:
        """See Transport.move."""
        if self.rank == source:
            self._send(array, dest)
        else:
            self._receive(out, source)

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
        self._rank = comm.Get_rank()
        self._mine = bytearray(_RECORD_BYTES)
        self._all = bytearray(0)
        self._header = bytearray(_HEADER_BYTES)
        self._headers = bytearray(0)

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
        _put(self._mine, data)
        self.comm.Allgather((self._mine, MPI.BYTE), (self._all, MPI.BYTE))
        lengths = []
        found = []
        for start in range(0, len(self._all), _RECORD_BYTES):
            (length,) = _LENGTH.unpack_from(self._all, start)
            lengths.append(length)
            found.append(bytes(self._all[start + _LENGTH.size : start + _LENGTH.size + length]))
        if max(lengths) <= _RECORD_BYTES - _LENGTH.size:
            return found
        whole = bytearray(sum(lengths))
        self.comm.Allgatherv((data, MPI.BYTE), (whole, lengths, None, MPI.BYTE))
        ends = list(itertools.accumulate(lengths))
        return [bytes(whole[end - length : end]) for end, length in zip(ends, lengths, strict=True)]

    @translated
    def broadcast_bytes(self, data: bytes, root: int) -> bytes:
        """The root's bytes: in a record of fixed size, and once more whole where they don't fit."""
        record = self._header
        if self._rank == root:
            _put(record, data)
        self.comm.Bcast((record, _HEADER_BYTES, MPI.BYTE), root)
        (length,) = _LENGTH.unpack_from(record)
        if length <= _HEADER_BYTES - _LENGTH.size:
            return data if self._rank == root else bytes(record[_LENGTH.size : _LENGTH.size + length])
        whole = bytearray(data) if self._rank == root else bytearray(length)
        self.comm.Bcast((whole, MPI.BYTE), root)
        return bytes(whole)

    @translated
    def gather_bytes(self, data: bytes, root: int) -> list[bytes]:
        """Every rank's bytes on the root: in records of fixed size, and those that don't fit once more whole."""
        _put(self._header, data)
        if self._rank != root:
            self.comm.Gather((self._header, _HEADER_BYTES, MPI.BYTE), None, root)
            if len(data) > _HEADER_BYTES - _LENGTH.size:
                self.comm.Send((data, MPI.BYTE), root, _TAG)
            return []
        if not self._headers:
            self._headers = bytearray(_HEADER_BYTES * self.comm.size)
        self.comm.Gather((self._header, _HEADER_BYTES, MPI.BYTE), (self._headers, _HEADER_BYTES, MPI.BYTE), root)
        found = []
        start = _LENGTH.size
        for rank in range(self.comm.size):
            if rank == root:
                found.append(data)
            else:
                (length,) = _LENGTH.unpack_from(self._headers, start - _LENGTH.size)
                if length <= _HEADER_BYTES - _LENGTH.size:
                    found.append(bytes(self._headers[start : start + length]))
                else:
                    whole = bytearray(length)
                    self.comm.Recv((whole, MPI.BYTE), rank, _TAG)
                    found.append(bytes(whole))
            start += _HEADER_BYTES
        return found

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


def _put(record: bytearray, data: bytes) -> None:
    """Write a length, and what fits of the bytes, into a record."""
    nbytes = len(data)
    _LENGTH.pack_into(record, 0, nbytes)
    room = len(record) - _LENGTH.size
    if nbytes <= room:
        record[_LENGTH.size : _LENGTH.size + nbytes] = data
    else:
        record[_LENGTH.size :] = data[:room]


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
