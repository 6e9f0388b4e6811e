"""The ranks are there and reach each other."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

pytestmark = pytest.mark.mpi


def test_ranks_sum_their_numbers() -> None:
    world = MPI.COMM_WORLD
    assert world.allreduce(world.rank + 1) == world.size * (world.size + 1) // 2


def test_arrays_reach_every_root() -> None:
    world = MPI.COMM_WORLD
    for root in range(world.size):
        total = np.empty(5)
        world.Reduce(np.arange(5.0) * (world.rank + 1), total, op=MPI.SUM, root=root)
        if world.rank == root:
            np.testing.assert_array_equal(total, np.arange(5.0) * sum(range(1, world.size + 1)))


@pytest.mark.mpi(min_size=2)
def test_neighbours_exchange() -> None:
    world = MPI.COMM_WORLD
    left, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    assert world.sendrecv(world.rank, dest=right, source=left) == left
