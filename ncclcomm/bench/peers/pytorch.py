"""PyTorch: torch.cuda.comm in one process, torch.distributed over ranks with NCCL (torch) or on the CPU (gloo)."""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ncclcomm.bench.case import Case
from ncclcomm.bench.peers.base import Absent, Peer

if TYPE_CHECKING:
    from ncclcomm.bench.group import Group

__all__ = ["TorchComm", "TorchGloo", "TorchNccl"]

Call = Callable[[], Any]


def _tensor(array: Any) -> Any:
    """A tensor on an array's own memory; None of None."""
    if array is None:
        return None
    if isinstance(array, np.ndarray):
        return torch.from_numpy(array)
    return torch.as_tensor(array, device=f"cuda:{array.device.id}")


def _has(dtype: np.dtype[Any]) -> bool:
    """True if tensors have the dtype."""
    try:
        torch.from_numpy(np.empty(0, dtype))
    except TypeError:
        return False
    return True


class TorchComm(Peer):
    """torch.cuda.comm: one process and its GPUs."""

    name = "torch"

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        if not group.on_gpus or group.comm is not None or not torch.cuda.is_available():
            raise Absent("torch.cuda.comm needs the GPUs of one process, and a PyTorch built for them")
        from torch.cuda import comm

        self._comm = comm

    def versions(self) -> dict[str, str]:
        """See Peer.versions."""
        return {"torch": str(torch.__version__)}

    def takes(self, case: Case) -> bool:
        """See Peer.takes."""
        return _has(case.row.dtype)

    def results(self, case: Case, returned: Any) -> tuple[Any, ...]:
        """See Peer.results; reduce_add can't fill a buffer, and fresh broadcasts and scatters keep the root's own."""
        import cupy

        if case.row.op.name == "reduce_add":
            return tuple(cupy.asarray(returned) if member == case.root else None for member in case.members)
        if case.fresh and case.row.op.keeps:
            return tuple(cupy.asarray(tensor) for tensor in returned)
        return case.recvs

    def _broadcast(self, case: Case) -> Call:
        if case.fresh:
            return partial(self._comm.broadcast, _tensor(case.sends[case.root]), list(case.members))
        outs = [_tensor(recv) for recv in case.recvs]
        return partial(self._comm.broadcast, _tensor(case.sends[case.root]), out=outs)

    def _scatter(self, case: Case) -> Call:
        if case.fresh:
            return partial(self._comm.scatter, _tensor(case.sends[case.root]), list(case.members))
        outs = [_tensor(recv) for recv in case.recvs]
        return partial(self._comm.scatter, _tensor(case.sends[case.root]), out=outs)

    def _gather(self, case: Case) -> Call:
        return partial(self._comm.gather, [_tensor(send) for send in case.sends], out=_tensor(case.recvs[case.root]))

    def _reduce_add(self, case: Case) -> Call:
        return partial(self._comm.reduce_add, [_tensor(send) for send in case.sends], destination=case.root)


class _Distributed(Peer):
    """torch.distributed, with a process group of its own; its reductions are in place, on the result's buffer."""

    backend = ""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        if group.comm is None:
            raise Absent("torch.distributed needs ranks")
        import torch.distributed as dist

        self._dist: Any = dist
        self._works: list[tuple[Case, Any]] = []
        try:
            if not dist.is_initialized():
                dist.init_process_group(self.backend, store=self._store(group), rank=group.rank, world_size=group.ranks)
                self._group = dist.group.WORLD
            else:
                self._group = dist.new_group(backend=self.backend)
        except Exception as error:  # whatever torch or NCCL raise, it is told as the reason
            raise Absent(f"torch.distributed with {self.backend} can't start: {error}") from error

    def _store(self, group: Group) -> Any:
        """A store that all ranks reach, on a port that the system chooses; collective."""
        host = "127.0.0.1" if len(group.per_host) == 1 else platform.node()
        store = None
        if group.rank == 0:
            store = self._dist.TCPStore(host, 0, group.ranks, is_master=True, wait_for_workers=False)
        host, port = group.all_gather((host, 0 if store is None else store.port))[0]
        if store is None:
            store = self._dist.TCPStore(host, port, group.ranks, is_master=False, wait_for_workers=False)
        return store

    def versions(self) -> dict[str, str]:
        """See Peer.versions."""
        return {"torch": str(torch.__version__)}

    def close(self) -> None:
        """See Peer.close."""
        self.group.wait()
        if self._dist.is_initialized():
            self._dist.destroy_process_group(self._group)

    def takes(self, case: Case) -> bool:
        """See Peer.takes."""
        ops = ("sum",) if case.row.dtype.kind in "cb" else ("sum", "prod", "min", "max")
        return _has(case.row.dtype) and (not case.row.op.reduces or case.reduction in ops)

    def prime(self, case: Case) -> None:
        """See Peer.prime."""
        for primed, work in self._works:
            if primed is case:
                work.copy_(_tensor(case.send))

    def _work(self, case: Case) -> Any:
        """What a reduction in place works on: the result's buffer, or a copy where this rank gets no result."""
        work = _tensor(case.send).clone() if case.recv is None else _tensor(case.recv)
        self._works = [(known, kept) for known, kept in self._works if known.row is case.row] + [(case, work)]
        return work

    def _reduce_op(self, case: Case) -> Any:
        """Its name for a reduction."""
        names = {"sum": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX"}
        return getattr(self._dist.ReduceOp, names[case.reduction])

    def _broadcast(self, case: Case) -> Call:
        tensor = _tensor(case.recv if case.send is None else case.send)
        return partial(self._dist.broadcast, tensor, src=case.root, group=self._group)

    def _scatter(self, case: Case) -> Call:
        parts = None if case.send is None else list(_tensor(case.send).chunk(case.row.size))
        return partial(self._dist.scatter, _tensor(case.recv), parts, src=case.root, group=self._group)

    def _gather(self, case: Case) -> Call:
        parts = None if case.recv is None else list(_tensor(case.recv).chunk(case.row.size))
        return partial(self._dist.gather, _tensor(case.send), parts, dst=case.root, group=self._group)

    def _reduce(self, case: Case) -> Call:
        return partial(self._dist.reduce, self._work(case), dst=case.root, op=self._reduce_op(case), group=self._group)

    _reduce_add = _reduce

    def _all_reduce(self, case: Case) -> Call:
        return partial(self._dist.all_reduce, self._work(case), op=self._reduce_op(case), group=self._group)

    def _barrier(self, case: Case) -> Call:
        return partial(self._dist.barrier, group=self._group)


class TorchNccl(_Distributed):
    """torch.distributed over NCCL, on the GPUs of ranks."""

    name = "torch"
    backend = "nccl"

    def __init__(self, group: Group) -> None:
        if not group.on_gpus or group.comm is None or not torch.cuda.is_available():
            raise Absent("torch.distributed over NCCL needs ranks with GPUs; on host arrays the peer is gloo")
        torch.cuda.set_device(group.comm.device)
        super().__init__(group)


class TorchGloo(_Distributed):
    """torch.distributed over gloo, on host arrays of ranks."""

    name = "gloo"
    backend = "gloo"

    def __init__(self, group: Group) -> None:
        if group.on_gpus:
            raise Absent("it is timed on host arrays: set NCCLCOMM_DEVICES=host")
        super().__init__(group)
