"""Sub-communicators: their own rank order, their own roots, and nodes inherited from the parent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ncclcomm
from ncclcomm import ArgumentError, MismatchError
from ranks.expected import KINDS, WORLD, Findings, communicator, every_op, outcomes, rejected

pytestmark = pytest.mark.mpi

NODES = [{}, {"NCCLCOMM_NODE_SIZE": "1"}, {"NCCLCOMM_NODE_SIZE": "2"}, {"NCCLCOMM_NODE_SIZE": "1,2"}]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", NODES)
def test_reversed_order(kind: str, nodes: dict[str, str]) -> None:
    with communicator(**nodes) as comm, Findings() as found:
        with comm.split(0, key=-comm.rank) as part:
            found.holds((part.rank, part.size) == (comm.size - 1 - comm.rank, comm.size), f"{part}")
            found.holds(part.num_nodes == comm.num_nodes, f"{part} of {comm}")
            found.holds(part.local_size == comm.local_size, f"{part} of {comm}")
            places = WORLD.allgather((comm.node, part.node))
            found.holds(len(set(places)) == comm.num_nodes, f"nodes of the parent and of the part: {places}")
            every_op(part, found, kind=kind, what="reversed")
        every_op(comm, found, kind=kind, what="the parent afterwards")


@pytest.mark.parametrize("nodes", NODES)
def test_colors_make_groups_of_their_own(nodes: dict[str, str]) -> None:
    with communicator(**nodes) as comm, Findings() as found:
        color = comm.rank % 2
        mates = [rank for rank in range(comm.size) if rank % 2 == color]
        with comm.split(color, key=7) as part:
            found.holds((part.rank, part.size) == (mates.index(comm.rank), len(mates)), f"{part}")
            total = part.all_reduce(np.array([2**comm.rank]))
            found.same(total, np.array([sum(2**rank for rank in mates)]), "whose numbers")
            every_op(part, found, what=f"color {color}")
        every_op(comm, found, what="the parent afterwards")


def test_groups_work_while_others_do_something_else() -> None:
    with communicator() as comm, Findings() as found:
        part = comm.split(comm.rank % 2)
        for _ in range(1 + 3 * (comm.rank % 2)):
            part.barrier()
        total = comm.all_reduce(np.array([1]))
        part.close()
        found.same(total, np.array([comm.size]), "the parent's all_reduce")


def test_some_ranks_join_nothing() -> None:
    with communicator() as comm, Findings() as found:
        part = comm.split(None if comm.rank == 0 else 5)
        found.holds((part is None) == (comm.rank == 0), f"{part}")
        if part is not None:
            every_op(part, found, what="all but rank 0")
            part.close()
        every_op(comm, found, what="the parent afterwards")


def test_nobody_joins_anything() -> None:
    with communicator() as comm, Findings() as found:
        found.holds(comm.split(None) is None, "a communicator of nobody")
        every_op(comm, found, what="the parent afterwards")


def test_parts_of_parts() -> None:
    with communicator(NCCLCOMM_NODE_SIZE="2") as comm, Findings() as found:
        with comm.split(0, key=-comm.rank) as turned, turned.split(turned.rank // 2, key=-turned.rank) as pair:
            mates = WORLD.allgather((comm.rank, turned.rank // 2))
            group = sorted(rank for rank, color in mates if color == turned.rank // 2)
            found.holds(pair.rank == group.index(comm.rank), f"{pair}: turned twice is the first order, {group}")
            every_op(pair, found, what="a part of a part")
            every_op(turned, found, what="the part")
        every_op(comm, found, what="the whole")


def test_a_part_outlives_its_parent() -> None:
    with Findings() as found:
        with communicator(NCCLCOMM_NODE_SIZE="1,2") as comm:
            part = comm.split(0, key=-comm.rank)
        every_op(part, found, what="after the parent was closed")
        part.close()


def test_a_closed_part_leaves_its_parent_usable() -> None:
    with communicator() as comm, Findings() as found:
        comm.split(0).close()
        every_op(comm, found)


@pytest.mark.parametrize("nodes", [{}, {"NCCLCOMM_NODE_SIZE": "2"}])
def test_mpi4py_communicators_in_another_order(nodes: dict[str, str]) -> None:
    theirs = WORLD.Split(0, -WORLD.rank)
    with communicator(mpi_comm=theirs, **nodes) as comm, Findings() as found:
        found.holds((comm.rank, comm.size) == (theirs.rank, theirs.size), f"{comm}")
        every_op(comm, found, what="reversed by mpi4py")
    theirs.Free()


def test_mpi4py_communicators_of_some_ranks() -> None:
    theirs = WORLD.Split(WORLD.rank // 2, -WORLD.rank)
    with communicator(mpi_comm=theirs) as comm, Findings() as found:
        # Theirs may be freed: ours is a duplicate.
        found.holds(comm.mpi_comm is not theirs, "not a duplicate")
        theirs.Free()
        every_op(comm, found, what="pairs")


def test_messages_of_both_do_not_mix() -> None:
    theirs = WORLD.Dup()
    with communicator(mpi_comm=theirs) as comm, Findings() as found:
        token = theirs.isend(comm.rank, dest=(comm.rank + 1) % comm.size, tag=0)
        every_op(comm, found)
        left = (comm.rank - 1) % comm.size
        found.holds(theirs.recv(source=left, tag=0) == left, "a message of the program's own got lost")
        token.wait()
    theirs.Free()


@pytest.mark.mpi(min_size=3)
def test_errors_name_the_parts_own_ranks() -> None:
    with communicator() as comm, Findings() as found, comm.split(0, key=-comm.rank) as part:
        mine = np.zeros(3 if part.rank == 0 else 2)
        told = outcomes(lambda: part.all_reduce(mine))
        for rank, outcome in enumerate(told):
            found.holds(outcome.error is MismatchError, f"{outcome}")
            found.holds(outcome.message.startswith(f"rank {comm.size - 1 - rank} (node 0"), f"{outcome}")
            found.holds("rank 0: (3,)" in outcome.message, f"{outcome}")
        every_op(part, found)


@pytest.mark.parametrize(("color", "key"), [(-1, 0), (1.0, 0), (True, 0), ("0", 0), (0, None), (0, 0.5), (0, "1")])
def test_colors_and_keys_that_are_no_numbers(color: Any, key: Any) -> None:
    with communicator() as comm, Findings() as found:
        for odd in (0, comm.size - 1):
            mine = (color, key) if comm.rank == odd else (0, 0)
            what = f"color {color!r}, key {key!r} on rank {odd}"
            rejected(comm, found, lambda keep, mine=mine: comm.split(*mine), ArgumentError, what, [f"rank {odd}"])


def test_colors_and_keys_beyond_what_mpi_takes() -> None:
    with communicator() as comm, Findings() as found:
        part = comm.split(2**40 + comm.rank % 2, key=-(2**35) * comm.rank)
        wanted = [rank for rank in reversed(range(comm.size)) if rank % 2 == comm.rank % 2]
        found.holds(part.size == len(wanted) and part.rank == wanted.index(comm.rank), f"{part}, want {wanted}")
        every_op(part, found)
        part.close()


@pytest.mark.parametrize("bad", [3, "world", [1, 2], object()], ids=["number", "text", "list", "object"])
def test_what_is_no_mpi_communicator(bad: Any) -> None:
    with pytest.raises(ArgumentError, match="communicator"):
        ncclcomm.Communicator(bad)


def test_a_world_of_one_needs_no_mpi() -> None:
    with ncclcomm.Communicator() as comm, Findings() as found:
        found.holds((comm.rank, comm.size, comm.mpi_comm) == (0, 1, None), f"{comm}")
        every_op(comm, found)
        part = comm.split(3, key=-1)
        every_op(part, found, what="its part")
        found.holds(comm.split(None) is None, "a part of nobody")
        part.close()
