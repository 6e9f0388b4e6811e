"""Broadcast over ranks: both forms, every root, every dtype and layout."""

from __future__ import annotations

import numpy as np
import pytest

import ncclcomm
from ranks.expected import KINDS, LAYOUTS, SHAPES, Findings, communicator, data, laid_out, moved, on

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("kind", KINDS)
def test_every_dtype_moves_bit_for_bit_from_every_root(kind: str) -> None:
    with communicator() as comm, Findings() as found:
        for root in range(comm.size):
            for dtype in moved(kind):
                sent = data(root, (5, 2), dtype)
                mine = on(comm, kind, sent.copy()) if comm.rank == root else None
                got = comm.broadcast(mine, root=root)
                found.same(got, sent, f"root {root}, {dtype}", kind, comm.device)
                found.holds(comm.rank != root or got is mine, f"root {root}: the root did not get its own array back")


@pytest.mark.parametrize("kind", KINDS)
def test_every_shape_with_and_without_a_receiving_array(kind: str) -> None:
    with communicator() as comm, Findings() as found:
        for shape in SHAPES:
            for root in range(comm.size):
                what = f"shape {shape}, root {root}"
                sent = data(root, shape, np.complex64)
                got = comm.broadcast(on(comm, kind, sent) if comm.rank == root else None, root=root)
                found.same(got, sent, f"{what}, None", kind, comm.device)
                found.holds(comm.rank == root or got.flags.c_contiguous, f"{what}: not C-contiguous")
                mine = on(comm, kind, sent.copy() if comm.rank == root else np.zeros(shape, np.complex64))
                got = comm.broadcast(mine, root=root)
                found.same(mine, sent, f"{what}, array", kind, comm.device)
                found.holds(got is mine, f"{what}: another array than the one passed was returned")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["array", "out"])
def test_layouts_may_differ_and_what_lies_around_an_array_stays(kind: str, form: str) -> None:
    layouts = list(LAYOUTS)
    with communicator() as comm, Findings() as found:
        for turn in range(len(layouts)):
            root = turn % comm.size
            layout = layouts[(turn + comm.rank) % len(layouts)]
            sent = data(root, (4, 3), np.int32)
            mine, around = laid_out(comm, kind, layout, sent if comm.rank == root else np.zeros((4, 3), np.int32))
            _, wanted = laid_out(comm, "numpy", layout, sent)
            got = comm.broadcast(mine, root=root) if form == "array" else comm.broadcast(out=mine, root=root)
            found.same(around, wanted, f"{layout}, root {root}", kind, comm.device)
            found.holds(got is mine, f"{layout}: another array than the one passed was returned")


@pytest.mark.parametrize("check", [True, False])
def test_a_header_of_any_length(check: bool) -> None:
    # The first is told in one exchange, the second takes two.
    with communicator(check) as comm, Findings() as found:
        for fields in (2, 200):
            dtype = np.dtype([(f"field number {number}", np.int32) for number in range(fields)])
            for root in range(comm.size):
                sent = data(root, (3 * fields,), np.int32).view(dtype)
                got = comm.broadcast(sent if comm.rank == root else None, root=root)
                found.same(got, sent, f"{fields} fields, root {root}", "numpy", comm.device)


def test_inputs_that_cannot_be_written() -> None:
    with communicator() as comm, Findings() as found:
        for root in range(comm.size):
            sent = data(root, (1, 6), np.int64)
            frozen = sent.copy()
            frozen.flags.writeable = False
            got = comm.broadcast(frozen if comm.rank == root else None, root=root)
            found.same(got, sent, f"read-only, root {root}")
            spread = np.broadcast_to(frozen, (3, 6))
            got = comm.broadcast(spread if comm.rank == root else None, root=root)
            found.same(got, np.ascontiguousarray(spread), f"elements that share memory, root {root}")


def test_a_slice_of_a_larger_array() -> None:
    with communicator() as comm, Findings() as found:
        for root in range(comm.size):
            mine = data(comm.rank, (8,), np.float32)
            wanted = mine.copy()
            wanted[3:5] = data(root, (8,), np.float32)[3:5]
            comm.broadcast(mine[3:5], root=root)
            found.same(mine, wanted, f"root {root}")


def test_receivers_may_differ_in_whether_they_pass_an_array() -> None:
    with communicator() as comm, Findings() as found:
        for root in range(comm.size):
            sent = data(root, (9,), np.uint16)
            mine = sent.copy() if comm.rank == root else np.zeros(9, np.uint16) if comm.rank % 2 else None
            got = comm.broadcast(mine, root=root)
            found.same(got, sent, f"root {root}")


def test_large() -> None:
    with communicator() as comm, Findings() as found:
        root = comm.size - 1
        sent = data(root, (3_000_000,), np.int32)
        found.same(comm.broadcast(sent if comm.rank == root else None, root=root), sent, "header form")
        mine = sent.copy() if comm.rank == root else np.zeros_like(sent)
        found.same(comm.broadcast(out=mine, root=root), sent, "out form")


def test_root_may_be_a_numpy_integer() -> None:
    with communicator() as comm, Findings() as found:
        root = comm.size - 1
        sent = data(root, (3,))
        found.same(comm.broadcast(sent if comm.rank == root else None, root=np.int64(root)), sent, "numpy.int64")


def test_an_array_on_another_device_than_the_ranks_own() -> None:
    with communicator() as comm, Findings() as found:
        other = (comm.device + 1) % ncclcomm.device_count()
        for root in range(comm.size):
            sent = data(root, (6,), np.float64)
            mine = ncclcomm.asarray(sent if comm.rank == root else np.zeros(6), device=other)
            got = comm.broadcast(mine, root=root)
            found.same(got, sent, f"root {root}, array passed", "device", other)
            got = comm.broadcast(mine if comm.rank == root else None, root=root)
            found.same(got, sent, f"root {root}, None", "device", other if comm.rank == root else comm.device)


def test_arrays_of_the_namespace_are_taken() -> None:
    with communicator() as comm, Findings() as found:
        for root in range(comm.size):
            mine = ncclcomm.xp.arange(5) * (comm.rank + 1) if comm.rank == root else None
            found.same(comm.broadcast(mine, root=root), np.arange(5) * (root + 1), f"root {root}", "device")
