"""Several nodes, and messages cut into chunks: what a call means does not depend on them."""

from __future__ import annotations

import numpy as np
import pytest

import ncclcomm
from ncclcomm import ArgumentError
from ranks.expected import (
    FLOATS,
    KINDS,
    MOVED,
    WORLD,
    Findings,
    communicator,
    data,
    every_op,
    numbers,
    on,
    outcomes,
    reduced,
)

pytestmark = pytest.mark.mpi

PLACES = {
    "nodes of one": ("NCCLCOMM_NODE_SIZE", "1", [0, 1, 2, 3]),
    "nodes of two": ("NCCLCOMM_NODE_SIZE", "2", [0, 0, 1, 1]),
    "three and one": ("NCCLCOMM_NODE_SIZE", "3,1", [0, 0, 0, 1]),
    "one and two": ("NCCLCOMM_NODE_SIZE", "1,2", [0, 1, 1, 2]),
    "round-robin": ("NCCLCOMM_NODE_MAP", "0,1,0,1", [0, 1, 0, 1]),
    "numbers of any order": ("NCCLCOMM_NODE_MAP", "7,3,3,7", [0, 1, 1, 0]),
    "leader last": ("NCCLCOMM_NODE_MAP", "0,1,1,1", [0, 1, 1, 1]),
}
"""The variable, its value for four ranks, and each rank's node."""


def variables(name: str) -> dict[str, str]:
    """The variable of a layout; a map is cut to the number of ranks."""
    variable, value, _ = PLACES[name]
    if variable == "NCCLCOMM_NODE_MAP":
        value = ",".join(value.split(",")[: WORLD.size])
    return {variable: value}


@pytest.mark.parametrize("name", list(PLACES))
def test_attributes(name: str) -> None:
    nodes = PLACES[name][2][: WORLD.size]
    with communicator(**variables(name)) as comm, Findings() as found:
        mates = [rank for rank in range(comm.size) if nodes[rank] == nodes[comm.rank]]
        found.holds((comm.rank, comm.size) == (WORLD.rank, WORLD.size), f"{comm}")
        found.holds(comm.node == nodes[comm.rank], f"node {comm.node} in {nodes}")
        found.holds(comm.num_nodes == len(set(nodes)), f"{comm.num_nodes} nodes in {nodes}")
        found.holds(comm.local_rank == mates.index(comm.rank), f"local rank {comm.local_rank} in {nodes}")
        found.holds(comm.local_size == len(mates), f"local size {comm.local_size} in {nodes}")
        found.holds(0 <= comm.device < ncclcomm.device_count(), f"device {comm.device}")
        found.holds(comm.backend in ("host", "cuda"), f"backend {comm.backend!r}")
        if comm.backend == "host":
            found.holds(comm.device == comm.local_rank % ncclcomm.device_count(), f"{comm} in {nodes}")
        found.holds(comm.mpi_comm.Get_size() == comm.size, "mpi_comm is of another size")
        shown = repr(comm)
        found.holds(f"rank {comm.rank} of {comm.size}" in shown, shown)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", list(PLACES))
def test_every_op_and_root(name: str, kind: str) -> None:
    with communicator(**variables(name)) as comm, Findings() as found:
        every_op(comm, found, kind=kind, what=name)
        every_op(comm, found, count=1, kind=kind, what=name)


@pytest.mark.parametrize("name", ["nodes of two", "round-robin", "leader last"])
def test_every_dtype_moves_and_sums(name: str) -> None:
    with communicator(check=False, **variables(name)) as comm, Findings() as found:
        root = comm.size - 1
        for dtype in MOVED:
            sent = data(root, (comm.size, 3), dtype)
            mine = sent if comm.rank == root else None
            found.same(comm.broadcast(mine, root=root), sent, f"broadcast of {dtype}")
            row = comm.scatter(mine, root=root)
            found.same(row, sent[comm.rank : comm.rank + 1], f"scatter of {dtype}")
            whole = comm.gather(row, root=0)
            if comm.rank == 0:
                found.same(whole, sent, f"gather of {dtype}")
        for dtype in [np.dtype(bool), np.dtype("i1"), *FLOATS]:
            inputs = [numbers(rank, (5,), dtype) for rank in range(comm.size)]
            found.same(comm.all_reduce(inputs[comm.rank]), reduced("sum", inputs), f"sum of {dtype}")
            got = comm.reduce(inputs[comm.rank], root=root)
            if comm.rank == root:
                found.same(got, reduced("sum", inputs), f"reduce of {dtype}")


@pytest.mark.parametrize("name", ["nodes of one", "round-robin"])
def test_explain(name: str) -> None:
    with communicator(**variables(name)) as comm, Findings() as found:
        for op in ("broadcast", "scatter", "gather", "reduce", "reduce_add", "all_reduce", "barrier"):
            text = comm.explain(op, 1 << 20)
            found.holds(text and "\n" not in text, f"{op}: {text!r} is not one line")
            found.holds(
                op in text and any(name in text for name in ("mpi", "nccl")),
                f"{op}: {text!r} names neither op nor transport",
            )
        if comm.rank == 0:
            # Local: one rank alone may ask.
            comm.explain("gather", 0)
        for op, nbytes in (("all_gather_all", 8), ("reduce", -1), ("reduce", 1.5), ("reduce", True)):
            told = outcomes(lambda op=op, nbytes=nbytes: comm.explain(op, nbytes))
            found.holds(all(o.error is ArgumentError for o in told), f"explain({op!r}, {nbytes!r}): {told}")


CHUNKED = [{}, {"NCCLCOMM_NODE_SIZE": "1"}, {"NCCLCOMM_NODE_SIZE": "1,2"}]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", CHUNKED)
def test_small_chunks(nodes: dict[str, str], kind: str) -> None:
    with communicator(NCCLCOMM_CHUNK_BYTES="1024", **nodes) as comm, Findings() as found:
        for root in range(comm.size):
            sent = data(root, (10_007,), np.uint8)
            mine = on(comm, kind, sent) if comm.rank == root else None
            found.same(comm.broadcast(mine, root=root), sent, f"broadcast, root {root}", kind)
            found.same(
                comm.scatter(mine, root=root),
                np.array_split(sent, comm.size)[comm.rank],
                f"scatter, root {root}",
                kind,
            )
            parts = [data(rank, (10_007 - 1025 * rank,), np.uint8) for rank in range(comm.size)]
            got = comm.gather(on(comm, kind, parts[comm.rank]), root=root)
            if comm.rank == root:
                found.same(got, np.concatenate(parts), f"gather, root {root}", kind)
            inputs = [numbers(rank, (10_007,), np.int8) for rank in range(comm.size)]
            got = comm.reduce(on(comm, kind, inputs[comm.rank]), root=root)
            if comm.rank == root:
                found.same(got, reduced("sum", inputs), f"reduce, root {root}", kind)
        found.same(comm.all_reduce(on(comm, kind, inputs[comm.rank])), reduced("sum", inputs), "all_reduce", kind)
        every_op(comm, found, count=1009, kind=kind)


@pytest.mark.parametrize("nodes", CHUNKED)
def test_elements_that_do_not_divide_a_chunk_or_are_longer(nodes: dict[str, str]) -> None:
    with communicator(NCCLCOMM_CHUNK_BYTES="64", **nodes) as comm, Findings() as found:
        for dtype in (np.dtype("c16"), np.dtype("S7"), np.dtype("V100"), np.dtype([("a", "i8", 9), ("b", "i1")])):
            sent = data(0, (13, comm.size), dtype)
            mine = sent if comm.rank == 0 else None
            found.same(comm.broadcast(mine), sent, f"broadcast of {dtype}")
            part = comm.scatter(mine, dim=1)
            found.same(part, np.ascontiguousarray(sent[:, comm.rank : comm.rank + 1]), f"scatter of {dtype}")
            whole = comm.gather(part, root=comm.size - 1, dim=1)
            if comm.rank == comm.size - 1:
                found.same(whole, sent, f"gather of {dtype}")
        inputs = [numbers(rank, (1009,), np.complex128) for rank in range(comm.size)]
        found.same(comm.all_reduce(inputs[comm.rank]), reduced("sum", inputs), "sum of complex128")


def test_ranks_agree_on_the_bits_of_a_chunked_sum() -> None:
    mine = np.random.default_rng(WORLD.rank).standard_normal(10_007).astype(np.float32)
    with communicator() as whole, communicator(NCCLCOMM_CHUNK_BYTES="1024") as small, Findings() as found:
        every = WORLD.allgather(small.all_reduce(mine).tobytes())
        found.holds(len(set(every)) == 1, "ranks differ")
        np.testing.assert_allclose(small.all_reduce(mine), whole.all_reduce(mine), rtol=1e-4, atol=1e-5)
