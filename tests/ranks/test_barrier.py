"""Barrier over ranks: nobody leaves before everybody came."""

from __future__ import annotations

import time

import pytest

from ranks.expected import WORLD, Findings, communicator

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("nodes", [{}, {"NCCLCOMM_NODE_SIZE": "1"}, {"NCCLCOMM_NODE_SIZE": "1,2"}])
def test_nobody_leaves_before_everybody_came(check: bool, nodes: dict[str, str]) -> None:
    with communicator(check, **nodes) as comm, Findings() as found:
        for late in range(comm.size):
            WORLD.barrier()
            if comm.rank == late:
                # The late rank is late on purpose; the clock is the same for all processes of a host.
                time.sleep(0.02)
            came = time.monotonic()
            result = comm.barrier()
            left = time.monotonic()
            times = WORLD.allgather((came, left))
            found.holds(result is None, f"barrier returned {result!r}")
            found.holds(max(c for c, _ in times) <= min(gone for _, gone in times), f"late rank {late}: {times}")


def test_many_in_a_row() -> None:
    with communicator(check=False) as comm:
        for _ in range(100):
            comm.barrier()
