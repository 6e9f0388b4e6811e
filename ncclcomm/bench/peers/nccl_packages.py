"""Other Python packages over NCCL: cupyx.distributed and nccl4py."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import cupy

from ncclcomm.bench.case import Case
from ncclcomm.bench.peers.base import Absent, Peer
from ncclcomm.bench.peers.nccl import need_gpus_of_ranks, stream_of

if TYPE_CHECKING:
    from ncclcomm.bench.group import Group

__all__ = ["Cupyx", "Nccl4py"]

Call = Callable[[], Any]

_REDUCTIONS = ("sum", "prod", "min", "max")


class Cupyx(Peer):
    """cupyx.distributed's NCCL backend, over the ranks of MPI's world."""

    name = "cupyx"

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        need_gpus_of_ranks(group)
        if group.mpi_comm is None:
            # CuPy would take its own TCP store instead, on a fixed port, and not say so.
            raise Absent("it starts through MPI, and this process has no launcher")
        try:
            distributed = importlib.import_module("cupyx.distributed")
        except ImportError as error:
            raise Absent(f"cupyx.distributed can't be imported: {error}") from error
        try:
            self._backend = distributed.init_process_group(group.ranks, group.rank, use_mpi=True)
        except Exception as error:  # whatever CuPy or NCCL raise, it is told as the reason
            raise Absent(f"cupyx.distributed can't start: {error}") from error
        # Its communicator's destructor would destroy it, which is collective, at the latest when the interpreter ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._backend._comm))

    def versions(self) -> dict[str, str]:
        """See Peer.versions."""
        return {"cupy": str(cupy.__version__)}

    def close(self) -> None:
        """See Peer.close."""
        self.group.wait()
        self._backend._comm.destroy()

    def takes(self, case: Case) -> bool:
        """See Peer.takes."""
        dtype = case.row.dtype
        if dtype.char not in "bBiIlLqQefdFD":
            return False
        return not case.row.op.reduces or (case.reduction in (("sum",) if dtype.kind == "c" else _REDUCTIONS))

    @staticmethod
    def _rows(array: Any, case: Case) -> Any:
        """An array cut into the members' parts; a stand-in where this rank has none."""
        size = case.row.size
        return cupy.empty((size, 1), case.row.dtype) if array is None else array.reshape(size, -1)

    def _broadcast(self, case: Case) -> Call:
        return partial(self._backend.broadcast, case.recv if case.send is None else case.send, case.root)

    def _scatter(self, case: Case) -> Call:
        return partial(self._backend.scatter, self._rows(case.send, case), case.recv, case.root)

    def _gather(self, case: Case) -> Call:
        return partial(self._backend.gather, case.send, self._rows(case.recv, case), case.root)

    def _reduce(self, case: Case) -> Call:
        target = case.send if case.recv is None else case.recv
        return partial(self._backend.reduce, case.send, target, case.root, case.reduction)

    _reduce_add = _reduce

    def _all_reduce(self, case: Case) -> Call:
        return partial(self._backend.all_reduce, case.send, case.recv, case.reduction)

    def _barrier(self, case: Case) -> Call:
        return partial(self._backend.barrier)


class Nccl4py(Peer):
    """nccl4py's Communicator."""

    name = "nccl4py"

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        need_gpus_of_ranks(group)
        assert group.comm is not None
        self._core: Any = importlib.import_module("nccl.core")
        try:
            unique_id = self._core.get_unique_id() if group.rank == 0 else None
            told = group.all_gather(None if unique_id is None else bytes(unique_id))[0]
            unique_id = self._core.UniqueId.from_bytes(told)
            self._comm = self._core.Communicator.init(group.ranks, group.rank, unique_id)
        except Exception as error:  # whatever nccl4py or NCCL raise, it is told as the reason
            raise Absent(f"nccl4py can't start: {error}") from error
        self._stream = stream_of(group.comm.device)

    def versions(self) -> dict[str, str]:
        """See Peer.versions."""
        return {"nccl4py": str(self._core.__version__)}

    def close(self) -> None:
        """See Peer.close."""
        self.group.wait()
        self._comm.destroy()

    def takes(self, case: Case) -> bool:
        """See Peer.takes."""
        known = case.row.dtype.char in "bBiIlLqQefd"
        return known and (not case.row.op.reduces or case.reduction in _REDUCTIONS)

    def _op(self, case: Case) -> Any:
        """Its name for a reduction."""
        return getattr(self._core, case.reduction.upper())

    def _broadcast(self, case: Case) -> Call:
        array = case.recv if case.send is None else case.send
        return partial(self._comm.broadcast, array, array, case.root, stream=self._stream)

    def _scatter(self, case: Case) -> Call:
        return partial(self._comm.scatter, case.send, case.recv, case.root, stream=self._stream)

    def _gather(self, case: Case) -> Call:
        return partial(self._comm.gather, case.send, case.recv, case.root, stream=self._stream)

    def _reduce(self, case: Case) -> Call:
        return partial(self._comm.reduce, case.send, case.recv, self._op(case), case.root, stream=self._stream)

    _reduce_add = _reduce

    def _all_reduce(self, case: Case) -> Call:
        return partial(self._comm.allreduce, case.send, case.recv, self._op(case), stream=self._stream)
