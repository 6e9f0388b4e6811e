"""Scatter over ranks: even and uneven chunks, every root, dimension, dtype and layout."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ranks.expected import KINDS, LAYOUTS, Findings, communicator, data, laid_out, moved, on

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("kind", KINDS)
def test_every_dtype_from_every_root(kind: str) -> None:
    with communicator() as comm, Findings() as found:
        for root in range(comm.size):
            for dtype in moved(kind):
                whole = data(root, (11, 2), dtype)
                got = comm.scatter(on(comm, kind, whole) if comm.rank == root else None, root=root)
                chunk = np.array_split(whole, comm.size)[comm.rank]
                found.same(got, chunk, f"root {root}, {dtype}", kind, comm.device)
                found.holds(got.flags.c_contiguous, f"root {root}, {dtype}: not C-contiguous")


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_lengths_that_do_and_do_not_divide(dim: int) -> None:
    with communicator() as comm, Findings() as found:
        for n, root in itertools.product((0, 1, 2, 3, 5, 8, 1009), range(comm.size)):
            shape = (n, 4) if dim == 0 else (4, n)
            whole = data(root, shape, np.int16)
            got = comm.scatter(whole if comm.rank == root else None, root=root, dim=dim)
            found.same(got, np.array_split(whole, comm.size, axis=dim)[comm.rank], f"{n}, root {root}", "numpy")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_chunk_sizes(kind: str, dim: int) -> None:
    with communicator() as comm, Findings() as found:
        for turn, sizes in enumerate([(0, 5, 2, 9), (4, 0, 0, 3), (0, 0, 0, 7), (0, 0, 0, 0), (1, 2, 3, 4)]):
            root = turn % comm.size
            counts = list(sizes[-comm.size :])
            shape = {0: (sum(counts), 2, 3), 1: (2, sum(counts), 3), -1: (2, 3, sum(counts))}[dim]
            whole = data(root, shape, np.float32)
            chunk = np.split(whole, np.cumsum(counts)[:-1], axis=dim)[comm.rank]
            mine = on(comm, kind, whole) if comm.rank == root else None
            got = comm.scatter(mine, root=root, dim=dim, chunk_sizes=counts)
            found.same(got, chunk, f"{counts}, root {root}, sizes everywhere", kind, comm.device)
            on_root_alone = iter(np.array(counts)) if comm.rank == root else None
            got = comm.scatter(mine, root=root, dim=dim, chunk_sizes=on_root_alone)
            found.same(got, chunk, f"{counts}, root {root}, an iterator on the root alone", kind, comm.device)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [0, 1])
def test_layouts_of_the_input_and_of_out(kind: str, dim: int) -> None:
    layouts = list(LAYOUTS)
    with communicator() as comm, Findings() as found:
        for turn, layout in enumerate(layouts):
            root = turn % comm.size
            whole = data(root, (7, 6), np.int32)
            mine, around = laid_out(comm, kind, layout, whole)
            chunk = np.array_split(whole, comm.size, axis=dim)[comm.rank]
            found.same(
                comm.scatter(mine if comm.rank == root else None, root=root, dim=dim), chunk, f"from {layout}", kind
            )
            out_layout = layouts[(turn + comm.rank) % len(layouts)]
            out, out_around = laid_out(comm, kind, out_layout, np.zeros_like(chunk))
            _, wanted = laid_out(comm, "numpy", out_layout, chunk)
            got = comm.scatter(mine if comm.rank == root else None, root=root, dim=dim, out=out)
            found.same(out_around, wanted, f"from {layout} into {out_layout}", kind, comm.device)
            found.holds(got is out, f"{layout}: out was not returned")
            found.same(around, laid_out(comm, "numpy", layout, whole)[1], f"the input, {layout}")


def test_each_rank_may_pass_an_out_or_not() -> None:
    with communicator() as comm, Findings() as found:
        for root in range(comm.size):
            whole = data(root, (3 * comm.size,), np.int64)
            out = np.zeros(3, np.int64) if comm.rank % 2 else None
            got = comm.scatter(whole if comm.rank == root else None, root=root, out=out)
            found.same(got, whole[3 * comm.rank :][:3], f"root {root}")
            found.holds(out is None or got is out, f"root {root}: out was not returned")


def test_what_others_than_the_root_pass_is_ignored() -> None:
    with communicator() as comm, Findings() as found:
        for root in range(comm.size):
            whole = data(root, (2 * comm.size,), np.float64)
            mine = whole if comm.rank == root else np.zeros((1, 2, 3), np.int8)
            found.same(comm.scatter(mine, root=root), whole[2 * comm.rank :][:2], f"root {root}")


def test_results_share_no_memory_with_the_input() -> None:
    with communicator() as comm, Findings() as found:
        whole = data(0, (4 * comm.size,), np.int32)
        mine = whole.copy()
        got = comm.scatter(mine if comm.rank == 0 else None)
        got[...] = 0
        found.same(mine, whole, "the root's input")


def test_large() -> None:
    with communicator() as comm, Findings() as found:
        root = comm.size - 1
        whole = data(root, (3_000_000,), np.int16)
        got = comm.scatter(whole if comm.rank == root else None, root=root)
        found.same(got, np.array_split(whole, comm.size)[comm.rank], "3e6 elements")
