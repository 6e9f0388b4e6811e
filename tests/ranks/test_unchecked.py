"""Calls that are not checked: right all the same, and only the rank with bad arguments raises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ncclcomm
from ncclcomm import AbortedError, ArgumentError, MismatchError, UnsupportedError
from ranks.expected import KINDS, WORLD, Findings, communicator, data, environment, every_op, outcomes

pytestmark = pytest.mark.mpi

NODES = [{}, {"NCCLCOMM_NODE_SIZE": "1"}, {"NCCLCOMM_NODE_SIZE": "1,2"}]


@pytest.mark.parametrize("check", [False, 0, 1, 3])
@pytest.mark.parametrize("nodes", NODES)
def test_every_op(check: bool | int, nodes: dict[str, str]) -> None:
    with communicator(check, **nodes) as comm, Findings() as found:
        for kind in KINDS:
            every_op(comm, found, kind=kind, what=f"check={check}")


@pytest.mark.parametrize("value", ["false", "3", "true", "0"])
def test_the_variable_says_the_same(value: str) -> None:
    with environment(NCCLCOMM_CHECK=value), communicator(None, NCCLCOMM_CHECK=value) as comm, Findings() as found:
        every_op(comm, found, what=value)


def test_the_header_carries_shape_and_dtype() -> None:
    with communicator(check=False) as comm, Findings() as found:
        for root in range(comm.size):
            for shape, dtype in (((), "f8"), ((0, 3), ">i4"), ((2, 3), "M8[s]"), ((1009,), "?")):
                sent = data(root, shape, dtype)
                got = comm.broadcast(sent if comm.rank == root else None, root=root)
                found.same(got, sent, f"broadcast of {shape} {dtype}, root {root}")
            whole = data(root, (2, 9), "c8")
            got = comm.scatter(
                whole if comm.rank == root else None, root=root, dim=-1, chunk_sizes=[9] + [0] * (comm.size - 1)
            )
            found.same(got, whole if comm.rank == 0 else whole[:, :0], f"scatter, root {root}")


def test_headers_that_fit_no_record() -> None:
    many = np.dtype([(f"a field of a long name, number {number}", "i4") for number in range(60)])
    with communicator(check=False) as comm, Findings() as found:
        comm.barrier()
        for root in range(comm.size):
            for count in (0, 1, 5):
                sent = data(root, (count, 2), many)
                found.same(comm.broadcast(sent if comm.rank == root else None, root=root), sent, f"broadcast, {root}")
                whole = data(root, (count * comm.size,), many)
                part = comm.scatter(whole if comm.rank == root else None, root=root)
                found.same(part, whole[count * comm.rank : count * (comm.rank + 1)], f"scatter, {root}")
                joined = comm.gather(data(comm.rank, (count,), many), root=root)
                if comm.rank == root:
                    want = b"".join(data(rank, (count,), many).tobytes() for rank in range(comm.size))
                    found.same(joined, np.frombuffer(want, many), f"gather, {root}")


def test_out_forms() -> None:
    with communicator(check=False) as comm, Findings() as found:
        for root in range(comm.size):
            sent = data(root, (3, 4), np.int32)
            mine = sent.copy() if comm.rank == root else np.zeros((3, 4), np.int32)
            found.holds(comm.broadcast(out=mine, root=root) is mine, "out was not returned")
            found.same(mine, sent, f"broadcast, root {root}")
            total = np.zeros((3, 4), np.int32)
            got = comm.reduce(mine, root=root, out=total if comm.rank == root else None)
            if comm.rank == root:
                found.holds(got is total, "out was not returned")
                found.same(total, sent * comm.size, f"reduce, root {root}")
            comm.all_reduce(mine, out=mine)
            found.same(mine, sent * comm.size, f"all_reduce in place, root {root}")


@pytest.mark.parametrize("check", [False, 2])
def test_only_the_rank_with_bad_arguments_raises(check: bool | int) -> None:
    with communicator(check) as comm, Findings() as found:
        for _ in range(int(check)):
            comm.barrier()
        odd = comm.size - 1
        if comm.rank == odd:
            # The others' call is one; this rank makes it at the third try.
            with pytest.raises(UnsupportedError, match="list"):
                comm.all_reduce([1.0])
            with pytest.raises(ArgumentError, match="mean"):
                comm.all_reduce(np.ones(2), op="mean")
        total = comm.all_reduce(np.full(2, comm.rank + 1))
        found.same(total, np.full(2, comm.size * (comm.size + 1) // 2), "all_reduce")


@pytest.mark.mpi(min_size=2)
def test_the_first_calls_alone_are_checked() -> None:
    with communicator(2) as comm, Findings() as found:
        comm.barrier()
        told = outcomes(lambda: comm.all_reduce(np.zeros(2 + comm.rank)))
        found.holds(all(o.error is MismatchError for o in told), f"the second call: {told}")
        # From the third call on nobody compares: sums of different names are one sum.
        call = comm.reduce if comm.rank else comm.reduce_add
        got = call(np.full(3, comm.rank))
        if comm.rank == 0:
            found.same(got, np.full(3, comm.size * (comm.size - 1) // 2), "the third call")


@pytest.mark.mpi(min_size=2)
def test_gather_over_several_nodes_tells_all_ranks_even_so() -> None:
    with communicator(check=False, NCCLCOMM_NODE_SIZE="1") as comm, Findings() as found:
        told = outcomes(lambda: comm.gather(np.zeros((2, 3 + comm.rank))))
        found.holds(all(o.error is MismatchError for o in told), f"other dimensions: {told}")
        told = outcomes(lambda: comm.gather("abc" if comm.rank == 1 else np.zeros(2)))
        found.holds(all(o.error is UnsupportedError for o in told), f"no array: {told}")
        every_op(comm, found)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("calls_before", [0, 3])
@pytest.mark.parametrize("fault", ["shape", "dtype", "dim", "no array", "out"])
def test_gather_on_one_node_tells_the_root(fault: str, calls_before: int) -> None:
    with environment(), Findings() as found:
        comm = ncclcomm.Communicator(WORLD, check=False)
        if comm.num_nodes > 1:
            comm.close()
            pytest.skip("on several hosts all ranks are told")
        root, odd = comm.size - 1, 0
        comm.barrier()
        for _ in range(calls_before):  # the first of which goes the long way
            comm.gather(np.zeros((2, 2)), root=root)
        part: Any = np.zeros((2, 2))
        dim, out = 0, None
        if comm.rank == odd:
            part = {"shape": np.zeros((2, 3)), "dtype": np.zeros((2, 2), np.float32), "no array": "abc"}.get(
                fault, part
            )
            dim = int(fault == "dim")
        elif fault == "out":
            out = np.zeros((2, 2))
        told = outcomes(lambda: comm.gather(part, root=root, dim=dim, out=out))
        wanted = UnsupportedError if fault == "no array" else MismatchError
        found.holds(told[root].error is wanted, f"the root: {told}")
        named = f"rank {root}" if fault == "out" else f"rank {odd}"
        found.holds(named in told[root].message.partition(": ")[2], f"the root does not name {named}: {told}")
        for rank in range(comm.size - 1):
            mine = wanted if (rank, fault) == (odd, "no array") else None
            found.holds(told[rank].error is mine, f"rank {rank}: {told}")
        if comm.rank == root:
            with pytest.raises(AbortedError, match="gather failed"):
                comm.barrier()
        comm.abort()
        comm.close()


def test_a_bad_root_array_reaches_those_who_wait_for_its_header() -> None:
    with communicator(check=False) as comm, Findings() as found:
        for root in range(comm.size):
            mine = [1, 2] if comm.rank == root else None
            for call in (comm.broadcast, comm.scatter):
                told = outcomes(lambda call=call, mine=mine, root=root: call(mine, root=root))
                found.holds(all(o.error is UnsupportedError for o in told), f"{call.__name__}, root {root}: {told}")
        every_op(comm, found)


def test_parts_inherit_the_setting() -> None:
    with communicator(check=False) as comm, Findings() as found, comm.split(0, key=-comm.rank) as part:
        if part.rank == 0:
            with pytest.raises(ArgumentError, match="op"):
                part.all_reduce(np.ones(1), op="median")
        found.same(part.all_reduce(np.array([WORLD.rank])), np.array([sum(range(comm.size))]), "all_reduce")
