"""NCCL's own calls through CuPy's binding, with nothing around them: over ranks, and over the GPUs of one process."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import cupy
from cupy.cuda import nccl

from ncclcomm.bench.case import Case
from ncclcomm.bench.peers.base import Absent, Peer
from ncclcomm.errors import NcclCommError
from ncclcomm.transport.nccl import new_unique_id, version
from ncclcomm.transport.nccl_errors import translated

if TYPE_CHECKING:
    from ncclcomm.bench.group import Group

__all__ = ["RawNcclDevices", "RawNcclRanks", "need_gpus_of_ranks", "reduction_of", "stream_of"]

Call = Callable[[], Any]

_TYPES = {
    "bool": nccl.NCCL_UINT8,
    "int8": nccl.NCCL_INT8,
    "uint8": nccl.NCCL_UINT8,
    "int32": nccl.NCCL_INT32,
    "uint32": nccl.NCCL_UINT32,
    "int64": nccl.NCCL_INT64,
    "uint64": nccl.NCCL_UINT64,
    "float16": nccl.NCCL_FLOAT16,
    "bfloat16": nccl.NCCL_BFLOAT16,
    "float32": nccl.NCCL_FLOAT32,
    "float64": nccl.NCCL_FLOAT64,
    "complex64": nccl.NCCL_FLOAT32,
    "complex128": nccl.NCCL_FLOAT64,
}
_OPS = {"sum": nccl.NCCL_SUM, "prod": nccl.NCCL_PROD, "min": nccl.NCCL_MIN, "max": nccl.NCCL_MAX}


def need_gpus_of_ranks(group: Group) -> None:
    """Check that every rank has a GPU of its own, which NCCL asks for; local.

    Raises:
        Absent: no GPUs, or one process.
    """
    if not group.on_gpus or group.comm is None:
        raise Absent("it needs ranks with a GPU each")


def stream_of(device: int) -> int:
    """The handle of a device's current stream, which the calls are enqueued on."""
    return int(cupy.cuda.get_current_stream(device).ptr)


def reduction_of(case: Case) -> tuple[int, int, int] | None:
    """NCCL's datatype, operation and words per element for a row's reduction; None if NCCL has none."""
    dtype, reduction = case.row.dtype, case.reduction
    if dtype.name not in _TYPES or reduction not in _OPS or (dtype.kind == "c" and reduction != "sum"):
        return None
    op = nccl.NCCL_MAX if dtype.kind == "b" else _OPS[reduction]
    return _TYPES[dtype.name], op, 2 if dtype.kind == "c" else 1


def _parts(array: Any, size: int) -> list[tuple[int, int]]:
    """Where each member's equal part of an array begins, and the member; none of no array."""
    if array is None:
        return []
    return [(array.data.ptr + member * (array.nbytes // size), member) for member in range(size)]


class _RawNccl(Peer):
    """What both share."""

    name = "raw"

    def versions(self) -> dict[str, str]:
        """See Peer.versions."""
        return {"nccl": str(version())}

    def takes(self, case: Case) -> bool:
        """See Peer.takes."""
        return super().takes(case) and (not case.row.op.reduces or reduction_of(case) is not None)


class RawNcclRanks(_RawNccl):
    """One GPU a rank, one flat communicator, also where the ranks are on several nodes."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        need_gpus_of_ranks(group)
        assert group.comm is not None
        self._device = group.comm.device
        try:
            unique_id = group.agreed(lambda: new_unique_id() if group.rank == 0 else None)
            self._comm = self._connect(group.all_gather(unique_id)[0])
        except NcclCommError as error:
            raise Absent(str(error)) from error
        # Its destructor would destroy it, which is collective, at the latest when the interpreter ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._comm))
        self._stream = stream_of(self._device)

    @translated
    def _connect(self, unique_id: Any) -> Any:
        """Make the communicator; collective."""
        return nccl.NcclCommunicator(self.group.ranks, unique_id, self.group.rank)

    def close(self) -> None:
        """See Peer.close."""
        self.group.wait()
        self._comm.destroy()

    def _broadcast(self, case: Case) -> Call:
        array = case.recv if case.send is None else case.send
        pointer = array.data.ptr
        arguments = pointer, pointer, array.nbytes, nccl.NCCL_UINT8, case.root, self._stream
        return partial(self._comm.broadcast, *arguments)

    def _scatter(self, case: Case) -> Call:
        sends = _parts(case.send, case.row.size)
        return self._moves(sends, [(case.recv.data.ptr, case.root)], case.recv.nbytes)

    def _gather(self, case: Case) -> Call:
        recvs = _parts(case.recv, case.row.size)
        return self._moves([(case.send.data.ptr, case.root)], recvs, case.send.nbytes)

    def _moves(self, sends: list[tuple[int, int]], recvs: list[tuple[int, int]], nbytes: int) -> Call:
        """Sends and receives of one size in one group."""
        comm, stream, word = self._comm, self._stream, nccl.NCCL_UINT8

        def move() -> None:
            nccl.groupStart()
            for pointer, member in sends:
                comm.send(pointer, nbytes, word, member, stream)
            for pointer, member in recvs:
                comm.recv(pointer, nbytes, word, member, stream)
            nccl.groupEnd()

        return move

    def _reduce(self, case: Case) -> Call | None:
        found = reduction_of(case)
        if found is None:
            return None
        dtype, op, words = found
        target = 0 if case.recv is None else case.recv.data.ptr
        arguments = case.send.data.ptr, target, case.send.size * words, dtype, op, case.root, self._stream
        return partial(self._comm.reduce, *arguments)

    _reduce_add = _reduce

    def _all_reduce(self, case: Case) -> Call | None:
        found = reduction_of(case)
        if found is None:
            return None
        dtype, op, words = found
        arguments = case.send.data.ptr, case.recv.data.ptr, case.send.size * words, dtype, op, self._stream
        return partial(self._comm.allReduce, *arguments)


class RawNcclDevices(_RawNccl):
    """The GPUs of one process, one communicator each, in one group."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        if not group.on_gpus or group.comm is not None:
            raise Absent("it needs the GPUs of one process")
        try:
            self._comms = self._connect(list(group.members))
        except NcclCommError as error:
            raise Absent(str(error)) from error
        self._streams = [stream_of(device) for device in group.members]

    @staticmethod
    @translated
    def _connect(devices: list[int]) -> list[Any]:
        """Make the communicators."""
        comms: list[Any] = nccl.NcclCommunicator.initAll(devices)
        return comms

    def close(self) -> None:
        """See Peer.close."""
        self.group.wait()
        for comm in self._comms:
            comm.destroy()

    @staticmethod
    def _grouped(calls: Sequence[Call]) -> Call:
        """Calls of all the communicators, started together."""

        def run() -> None:
            nccl.groupStart()
            for call in calls:
                call()
            nccl.groupEnd()

        return run

    def _broadcast(self, case: Case) -> Call:
        source, calls = case.sends[case.root], []
        for comm, stream, target in zip(self._comms, self._streams, case.recvs, strict=True):
            pointer = (source if target is None else target).data.ptr
            arguments = source.data.ptr, pointer, source.nbytes, nccl.NCCL_UINT8, case.root, stream
            calls.append(partial(comm.broadcast, *arguments))
        return self._grouped(calls)

    def _scatter(self, case: Case) -> Call:
        source, calls, word = case.sends[case.root], [], nccl.NCCL_UINT8
        root, root_stream = self._comms[case.root], self._streams[case.root]
        for member, (comm, stream, target) in enumerate(zip(self._comms, self._streams, case.recvs, strict=True)):
            if target is None:
                continue
            pointer = source.data.ptr + member * target.nbytes
            calls.append(partial(root.send, pointer, target.nbytes, word, member, root_stream))
            calls.append(partial(comm.recv, target.data.ptr, target.nbytes, word, case.root, stream))
        return self._grouped(calls)

    def _gather(self, case: Case) -> Call:
        target, calls, word = case.recvs[case.root], [], nccl.NCCL_UINT8
        root, root_stream = self._comms[case.root], self._streams[case.root]
        for member, (comm, stream, part) in enumerate(zip(self._comms, self._streams, case.sends, strict=True)):
            pointer = target.data.ptr + member * part.nbytes
            calls.append(partial(root.recv, pointer, part.nbytes, word, member, root_stream))
            calls.append(partial(comm.send, part.data.ptr, part.nbytes, word, case.root, stream))
        return self._grouped(calls)

    def _reduce_add(self, case: Case) -> Call | None:
        found = reduction_of(case)
        if found is None:
            return None
        dtype, op, words = found
        target, calls = case.recvs[case.root].data.ptr, []
        for member, (comm, stream, array) in enumerate(zip(self._comms, self._streams, case.sends, strict=True)):
            where = target if member == case.root else 0
            arguments = array.data.ptr, where, array.size * words, dtype, op, case.root, stream
            calls.append(partial(comm.reduce, *arguments))
        return self._grouped(calls)
