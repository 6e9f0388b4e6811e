"""Gather over ranks: equal and uneven parts, every root, dimension, dtype and layout."""

from __future__ import annotations

import numpy as np
import pytest

import ncclcomm
from ranks.expected import KINDS, LAYOUTS, Findings, communicator, data, laid_out, moved, on

pytestmark = pytest.mark.mpi


def joined(parts: list[np.ndarray], dim: int = 0) -> np.ndarray:
    """The parts one after the other; numpy.concatenate loses the byte order."""
    return np.concatenate(parts, axis=dim, dtype=parts[0].dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_every_dtype_to_every_root(kind: str) -> None:
    with communicator() as comm, Findings() as found:
        for root in range(comm.size):
            for dtype in moved(kind):
                parts = [data(rank, (3, 2), dtype) for rank in range(comm.size)]
                got = comm.gather(on(comm, kind, parts[comm.rank]), root=root)
                if comm.rank == root:
                    # Compared as bytes, since concatenating records in NumPy is slow and may convert them.
                    want = np.frombuffer(b"".join(part.tobytes() for part in parts), dtype).reshape(-1, 2)
                    found.same(got, want, f"root {root}, {dtype}", kind, comm.device)
                    found.holds(got.flags.c_contiguous, f"root {root}, {dtype}: not C-contiguous")
                else:
                    found.holds(got is None, f"root {root}, {dtype}: {got!r} off the root")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_parts_of_any_length_along_dim(kind: str, dim: int) -> None:
    with communicator() as comm, Findings() as found:
        for turn, sizes in enumerate([(0, 5, 2, 9), (4, 0, 0, 3), (0, 0, 0, 0), (1, 2, 3, 4), (3, 3, 3, 3)]):
            root = turn % comm.size
            shapes = [{0: (n, 2, 3), 1: (2, n, 3), -1: (2, 3, n)}[dim] for n in sizes[: comm.size]]
            parts = [data(rank, shape, np.uint32) for rank, shape in enumerate(shapes)]
            got = comm.gather(on(comm, kind, parts[comm.rank]), root=root, dim=dim)
            if comm.rank == root:
                found.same(got, joined(parts, dim), f"{sizes}, root {root}", kind, comm.device)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_without_a_dimension_count_as_one_element(kind: str) -> None:
    with communicator() as comm, Findings() as found:
        for root in range(comm.size):
            parts = [data(rank, (), np.float64) for rank in range(comm.size)]
            got = comm.gather(on(comm, kind, parts[comm.rank]), root=root)
            if comm.rank == root:
                found.same(got, np.array(parts), f"root {root}", kind, comm.device)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [0, 1])
def test_layouts_of_the_parts_and_of_out(kind: str, dim: int) -> None:
    layouts = list(LAYOUTS)
    with communicator() as comm, Findings() as found:
        for turn, out_layout in enumerate(layouts):
            root = turn % comm.size
            parts = [data(rank, (4, 3), np.int32) for rank in range(comm.size)]
            layout = layouts[(turn + comm.rank) % len(layouts)]
            mine, around = laid_out(comm, kind, layout, parts[comm.rank])
            want = joined(parts, dim)
            out, out_around = laid_out(comm, kind, out_layout, np.zeros_like(want))
            got = comm.gather(mine, root=root, dim=dim, out=out if comm.rank == root else None)
            if comm.rank == root:
                _, wanted = laid_out(comm, "numpy", out_layout, want)
                found.same(out_around, wanted, f"{layout} into {out_layout}", kind, comm.device)
                found.holds(got is out, f"{out_layout}: out was not returned")
            found.same(around, laid_out(comm, "numpy", layout, parts[comm.rank])[1], f"the input, {layout}")


def test_out_is_ignored_off_the_root() -> None:
    with communicator() as comm, Findings() as found:
        for root in range(comm.size):
            parts = [data(rank, (2,), np.int64) for rank in range(comm.size)]
            stray = np.full((5, 5), 3.5)
            out = np.zeros(2 * comm.size, np.int64) if comm.rank == root else stray
            got = comm.gather(parts[comm.rank], root=root, out=out)
            if comm.rank == root:
                found.same(got, joined(parts), f"root {root}")
            found.holds((stray == 3.5).all(), f"root {root}: an out off the root was written")


def test_inputs_that_cannot_be_written() -> None:
    with communicator() as comm, Findings() as found:
        parts = [data(rank, (4,), np.float32) for rank in range(comm.size)]
        mine = parts[comm.rank].copy()
        mine.flags.writeable = False
        got = comm.gather(mine, root=comm.size - 1)
        if comm.rank == comm.size - 1:
            found.same(got, joined(parts), "read-only")


def test_the_result_is_where_the_roots_own_part_is() -> None:
    with communicator() as comm, Findings() as found:
        other = (comm.device + 1) % ncclcomm.device_count()
        for root in range(comm.size):
            parts = [data(rank, (3,), np.float64) for rank in range(comm.size)]
            got = comm.gather(ncclcomm.asarray(parts[comm.rank], device=other), root=root)
            if comm.rank == root:
                found.same(got, joined(parts), f"root {root}", "device", other)


@pytest.mark.parametrize("kind", KINDS)
def test_gather_undoes_scatter(kind: str) -> None:
    with communicator() as comm, Findings() as found:
        for root in range(comm.size):
            whole = data(root, (10, 3), np.complex128)
            chunk = comm.scatter(on(comm, kind, whole) if comm.rank == root else None, root=root)
            got = comm.gather(chunk, root=root)
            if comm.rank == root:
                found.same(got, whole, f"root {root}", kind, comm.device)


def test_large() -> None:
    with communicator() as comm, Findings() as found:
        root = comm.size - 1
        parts = [data(rank, (3_000_000 // comm.size,), np.int16) for rank in range(comm.size)]
        got = comm.gather(parts[comm.rank], root=root)
        if comm.rank == root:
            found.same(got, joined(parts), "3e6 elements")
