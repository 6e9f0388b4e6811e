"""MPI's own calls on host arrays: mpi4py's upper-case methods, and the C functions below them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from ncclcomm.bench.case import Case
from ncclcomm.bench.peers.base import Absent, Peer
from ncclcomm.transport.mpi import MPI, duplicate, free

if TYPE_CHECKING:
    from ncclcomm.bench.group import Group

__all__ = ["Mpi4py", "RawMpi"]

Call = Callable[[], Any]

_MOST_COUNT = 2**31 - 1
_OPS = {"sum": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}


def _type_of(dtype: np.dtype[Any]) -> MPI.Datatype | None:
    """MPI's datatype for a dtype; None if it has none."""
    names = {
        "bool": "C_BOOL",
        "float32": "FLOAT",
        "float64": "DOUBLE",
        "complex64": "C_FLOAT_COMPLEX",
        "complex128": "C_DOUBLE_COMPLEX",
    }
    name = names.get(dtype.name) or (f"{dtype.name.upper()}_T" if dtype.kind in "iu" else "")
    return getattr(MPI, name, None) if name else None


def _as_type(case: Case) -> tuple[MPI.Datatype, int]:
    """The datatype to pass, and its elements in one of the dtype's: bytes for what MPI doesn't know."""
    found = _type_of(case.row.dtype)
    return (MPI.BYTE, case.row.dtype.itemsize) if found is None else (found, 1)


def _op_of(case: Case) -> MPI.Op:
    """MPI's operation of a row's reduction."""
    return MPI.LOR if case.row.dtype.kind == "b" else _OPS[case.reduction]


class _HostMpi(Peer):
    """What both share: a communicator of their own."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        if group.on_gpus:
            raise Absent("it is timed on host arrays: set NCCLCOMM_DEVICES=host")
        if group.mpi_comm is None:
            raise Absent("there is no MPI: start ranks with mpiexec or `ncclcomm run`")
        self.comm = duplicate(group.mpi_comm)

    def versions(self) -> dict[str, str]:
        """See Peer.versions."""
        return {"mpi4py": version("mpi4py")}

    def takes(self, case: Case) -> bool:
        """See Peer.takes."""
        row = case.row
        if not row.dtype.isnative or row.count * row.dtype.itemsize > _MOST_COUNT:
            return False
        if not row.op.reduces:
            return True
        return row.reduction in _OPS and _type_of(row.dtype) is not None

    def close(self) -> None:
        """See Peer.close."""
        free(self.comm)


class Mpi4py(_HostMpi):
    """mpi4py's calls on buffers whose MPI datatype it is given."""

    name = "mpi4py"

    @staticmethod
    def _spec(case: Case, array: Any) -> Any:
        """A buffer as mpi4py takes it; its memory as bytes, so that mpi4py needn't know the dtype."""
        return None if array is None else [array.view(np.uint8), _as_type(case)[0]]

    def _broadcast(self, case: Case) -> Call:
        array = case.recv if case.send is None else case.send
        return partial(self.comm.Bcast, self._spec(case, array), root=case.root)

    def _scatter(self, case: Case) -> Call:
        send, recv = self._spec(case, case.send), self._spec(case, case.recv)
        return partial(self.comm.Scatter, send, recv, root=case.root)

    def _gather(self, case: Case) -> Call:
        send, recv = self._spec(case, case.send), self._spec(case, case.recv)
        return partial(self.comm.Gather, send, recv, root=case.root)

    def _reduce(self, case: Case) -> Call:
        send, recv = self._spec(case, case.send), self._spec(case, case.recv)
        return partial(self.comm.Reduce, send, recv, op=_op_of(case), root=case.root)

    _reduce_add = _reduce

    def _all_reduce(self, case: Case) -> Call:
        send, recv = self._spec(case, case.send), self._spec(case, case.recv)
        return partial(self.comm.Allreduce, send, recv, op=_op_of(case))

    def _barrier(self, case: Case) -> Call:
        return partial(self.comm.Barrier)


class RawMpi(_HostMpi):
    """The C functions of the MPI that mpi4py has loaded, through ctypes, with their arguments made before."""

    name = "raw"

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        try:
            self._library = ctypes.CDLL(MPI.__file__)
            self._library.MPI_Barrier  # noqa: B018 - asks whether the name is there
        except (OSError, AttributeError) as error:
            self.close()
            raise Absent(f"the MPI library below mpi4py can't be called by name: {error}") from error

    @staticmethod
    def _handle(thing: Any) -> Any:
        """An MPI handle as C has it: a number with MPICH, a pointer with Open MPI."""
        kind = ctypes.c_int if MPI._sizeof(MPI.Comm) == ctypes.sizeof(ctypes.c_int) else ctypes.c_void_p
        return kind(MPI._handleof(thing))

    @staticmethod
    def _pointer(array: Any) -> Any:
        """The address of an array's memory; a null pointer for none."""
        return ctypes.c_void_p(None if array is None else array.ctypes.data)

    def _count(self, case: Case, array: Any) -> tuple[Any, Any]:
        """The count and datatype of an array."""
        mpi_type, words = _as_type(case)
        return ctypes.c_int(array.size * words), self._handle(mpi_type)

    def _broadcast(self, case: Case) -> Call:
        array = case.recv if case.send is None else case.send
        where = ctypes.c_int(case.root), self._handle(self.comm)
        return partial(self._library.MPI_Bcast, self._pointer(array), *self._count(case, array), *where)

    def _scatter(self, case: Case) -> Call:
        part, where = self._count(case, case.recv), (ctypes.c_int(case.root), self._handle(self.comm))
        send, recv = self._pointer(case.send), self._pointer(case.recv)
        return partial(self._library.MPI_Scatter, send, *part, recv, *part, *where)

    def _gather(self, case: Case) -> Call:
        part, where = self._count(case, case.send), (ctypes.c_int(case.root), self._handle(self.comm))
        send, recv = self._pointer(case.send), self._pointer(case.recv)
        return partial(self._library.MPI_Gather, send, *part, recv, *part, *where)

    def _reduce(self, case: Case) -> Call:
        what = *self._count(case, case.send), self._handle(_op_of(case))
        send, recv = self._pointer(case.send), self._pointer(case.recv)
        where = ctypes.c_int(case.root), self._handle(self.comm)
        return partial(self._library.MPI_Reduce, send, recv, *what, *where)

    _reduce_add = _reduce

    def _all_reduce(self, case: Case) -> Call:
        what = *self._count(case, case.send), self._handle(_op_of(case))
        send, recv = self._pointer(case.send), self._pointer(case.recv)
        return partial(self._library.MPI_Allreduce, send, recv, *what, self._handle(self.comm))

    def _barrier(self, case: Case) -> Call:
        return partial(self._library.MPI_Barrier, self._handle(self.comm))
