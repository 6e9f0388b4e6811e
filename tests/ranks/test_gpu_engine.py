"""How ranks begin to use their GPUs together: what fails on one of them is told to all, and nothing is left behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from ncclcomm.communicator.gpu import GpuGroup
from ncclcomm.errors import DeviceError
from ncclcomm.topology import Topology
from ncclcomm.transport import mpi

pytestmark = pytest.mark.mpi

WORLD = MPI.COMM_WORLD
LAST = WORLD.size - 1


class _Backend:
    """A backend whose named call fails on the last rank."""

    def __init__(self, broken: str) -> None:
        self._broken = broken

    def _do(self, call: str) -> None:
        if call == self._broken and WORLD.rank == LAST:
            raise DeviceError(f"{call}: out of order")

    def touch(self, device: int) -> None:
        self._do("touch")

    def refuse_capture(self, device: int) -> None:
        raise AssertionError("no data moves here")

    def empty_pinned(self, nbytes: int) -> Any:
        self._do("empty_pinned")
        return np.empty(nbytes, np.uint8)


def _member(own: MPI.Intracomm, broken: str, nodes: int) -> Any:
    """As much of a Member as its engine for GPUs is made of."""
    return SimpleNamespace(
        backend=_Backend(broken),
        device=0,
        chunk_bytes=1 << 16,
        mpi_comm=own,
        control=mpi.MpiControl(own),
        rank=WORLD.rank,
        topology=Topology(tuple(sorted(rank % nodes for rank in range(WORLD.size)))),
    )


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_gpu_that_fails_is_told_to_all_before_nccl_starts(nodes: int) -> None:
    if nodes > WORLD.size:
        pytest.skip("fewer ranks than nodes")
    own = mpi.duplicate(WORLD)
    words = "touch: out of order" if WORLD.rank == LAST else f"rank {LAST} failed: touch: out of order"
    with pytest.raises(DeviceError, match=words):
        GpuGroup(use_nccl=True).make_engine(_member(own, "touch", nodes))
    mpi.free(own)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_start_that_fails_frees_the_leaders_communicator(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if nodes > WORLD.size:
        pytest.skip("fewer ranks than nodes")
    own = mpi.duplicate(WORLD)
    member = _member(own, "empty_pinned", nodes)
    freed: list[int] = []

    def free(comm: MPI.Intracomm) -> None:
        freed.append(comm.Get_size())
        comm.Free()

    with monkeypatch.context() as patched:
        patched.setattr(mpi, "free", free)
        with pytest.raises(DeviceError, match="empty_pinned: out of order"):
            GpuGroup(use_nccl=False).make_engine(member)
    is_leader = member.topology.locate(WORLD.rank).local_rank == 0
    assert freed == [nodes] * is_leader
    mpi.free(own)
