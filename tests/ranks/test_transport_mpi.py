"""The transport contract on ranks that talk through MPI."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from mpi4py import MPI

from contract.transport_suite import CHECKS
from ncclcomm.errors import MpiError
from ncclcomm.transport.mpi import MpiTransport

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("chunk_bytes", [1 << 30, 64], ids=["one chunk", "64 bytes"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_contract(check: Callable[..., None], chunk_bytes: int) -> None:
    transport = MpiTransport(MPI.COMM_WORLD.Dup(), chunk_bytes=chunk_bytes)
    check(transport, lambda: None)
    transport.close()
    transport.close()


def test_drives_itself() -> None:
    transport = MpiTransport(MPI.COMM_WORLD.Dup(), chunk_bytes=1 << 30)
    assert (transport.size, transport.members) == (MPI.COMM_WORLD.size, (MPI.COMM_WORLD.rank,))
    transport.close()


def test_numbers_are_those_of_its_own_communicator() -> None:
    world = MPI.COMM_WORLD
    turned = world.Split(0, -world.rank)
    transport = MpiTransport(turned, chunk_bytes=64)
    for root in range(transport.size):
        buffer = np.full(100, world.rank)
        transport.broadcast([buffer], root)
        np.testing.assert_array_equal(buffer, np.full(100, world.size - 1 - root))
    transport.close()


def test_barrier_waits_for_all() -> None:
    world = MPI.COMM_WORLD
    transport = MpiTransport(world.Dup(), chunk_bytes=1 << 30)
    window = MPI.Win.Allocate_shared(8 if world.rank == 0 else 0, 8, comm=world)
    window.Lock_all()
    try:
        one, before = np.ones(1, "i8"), np.zeros(1, "i8")
        for turn in range(1, 101):
            window.Fetch_and_op(one, before, 0)
            window.Flush(0)
            transport.barrier()
            window.Fetch_and_op(one, before, 0, op=MPI.NO_OP)
            window.Flush(0)
            assert before[0] >= turn * world.size
            world.Barrier()
    finally:
        window.Unlock_all()
        window.Free()
        transport.close()


def test_mpi_errors_are_translated() -> None:
    transport = MpiTransport(MPI.COMM_WORLD.Dup(), chunk_bytes=1 << 30)
    with pytest.raises(MpiError, match="broadcast") as caught:
        transport.broadcast([np.zeros(1)], transport.size)
    assert caught.value.code != 0
    assert caught.value.name
    assert caught.value.call == "broadcast"
    assert isinstance(caught.value.__cause__, MPI.Exception)
    transport.close()
