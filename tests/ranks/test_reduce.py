"""Reduce and reduce_add over ranks: every root, every reduction, every dtype that it takes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import ncclcomm
from ranks.expected import (
    COMPLEX,
    FLOATS,
    INTS,
    KINDS,
    LAYOUTS,
    SHAPES,
    Findings,
    average,
    communicator,
    data,
    laid_out,
    numbers,
    on,
    reduced,
)

pytestmark = pytest.mark.mpi

TAKEN = {
    "sum": [np.dtype(bool), *INTS, *FLOATS, *COMPLEX],
    "prod": [*INTS, *FLOATS, *COMPLEX],
    "min": [*INTS, *FLOATS],
    "max": [*INTS, *FLOATS],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", list(TAKEN))
def test_every_dtype_to_every_root(kind: str, op: str) -> None:
    with communicator() as comm, Findings() as found:
        for root in range(comm.size):
            for dtype in TAKEN[op]:
                inputs = [numbers(rank, (13,), dtype) for rank in range(comm.size)]
                mine = on(comm, kind, inputs[comm.rank].copy())
                got = comm.reduce(mine, op=op, root=root)
                if comm.rank == root:
                    found.same(got, reduced(op, inputs), f"root {root}, {dtype}", kind, comm.device)
                else:
                    found.holds(got is None, f"root {root}, {dtype}: {got!r} off the root")
                found.same(mine, inputs[comm.rank], f"root {root}, {dtype}, the input")


@pytest.mark.parametrize("kind", KINDS)
def test_average(kind: str) -> None:
    with communicator() as comm, Findings() as found:
        for root in range(comm.size):
            for dtype in [*FLOATS, *COMPLEX]:
                inputs = [numbers(rank, (7, 2), dtype) for rank in range(comm.size)]
                got = comm.reduce(on(comm, kind, inputs[comm.rank]), op="avg", root=root)
                if comm.rank == root:
                    found.holds(got.dtype == dtype, f"{dtype} came back as {got.dtype}")
                    found.close_to(got, average(inputs), f"root {root}, {dtype}")


def test_small_integers_wrap_and_bools_stay_bools() -> None:
    with communicator() as comm, Findings() as found:
        values = np.array([120, 100, 20, -128], np.int8)
        mine = np.full(3, values[comm.rank], np.int8)
        got = comm.reduce_add(mine)
        if comm.rank == 0:
            total = (int(values[: comm.size].astype(int).sum()) + 128) % 256 - 128
            found.same(got, np.full(3, total, np.int8), "int8")
        flags = np.array([False, comm.rank == comm.size - 1, True])
        got = comm.reduce_add(flags)
        if comm.rank == 0:
            found.same(got, np.array([False, True, True]), "bool")


@pytest.mark.parametrize(
    ("dtype", "ops"), [(">f8", "sum prod min max avg"), (">i4", "sum prod min max"), (">c16", "sum prod avg")]
)
def test_the_other_byte_order_comes_back_native(dtype: str, ops: str) -> None:
    with communicator() as comm, Findings() as found:
        for op, root in itertools.product(ops.split(), range(comm.size)):
            inputs = [numbers(rank, (5,), np.dtype(dtype).newbyteorder("=")) for rank in range(comm.size)]
            mine = inputs[comm.rank].astype(dtype)
            got = comm.reduce(mine, op=op, root=root)
            if comm.rank == root and op == "avg":
                found.holds(got.dtype == inputs[0].dtype, f"{got.dtype} came back")
                found.close_to(got, average(inputs), f"{op}, root {root}")
            elif comm.rank == root:
                found.same(got, reduced(op, inputs), f"{op}, root {root}")
            found.same(mine, inputs[comm.rank].astype(dtype), "the input")


@pytest.mark.parametrize("kind", KINDS)
def test_every_shape(kind: str) -> None:
    with communicator() as comm, Findings() as found:
        for shape in SHAPES:
            for root in range(comm.size):
                inputs = [numbers(rank, shape, np.float32) for rank in range(comm.size)]
                got = comm.reduce_add(on(comm, kind, inputs[comm.rank]), root=root)
                if comm.rank == root:
                    found.same(got, reduced("sum", inputs), f"shape {shape}, root {root}", kind, comm.device)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_layouts_of_the_input_and_of_out(kind: str, op: str) -> None:
    layouts = list(LAYOUTS)
    with communicator() as comm, Findings() as found:
        for turn, out_layout in enumerate(layouts):
            root = turn % comm.size
            # Multiples of 12 have exact averages over one to four ranks.
            inputs = [numbers(rank, (4, 3), np.float64) * 12 for rank in range(comm.size)]
            layout = layouts[(turn + comm.rank) % len(layouts)]
            mine, around = laid_out(comm, kind, layout, inputs[comm.rank])
            out, out_around = laid_out(comm, kind, out_layout, np.zeros((4, 3)))
            got = comm.reduce(mine, op=op, root=root, out=out if comm.rank == root else None)
            if comm.rank == root:
                want = reduced("sum", inputs) / (comm.size if op == "avg" else 1)
                _, wanted = laid_out(comm, "numpy", out_layout, want)
                found.same(out_around, wanted, f"{layout} into {out_layout}", kind, comm.device)
                found.holds(got is out, f"{out_layout}: out was not returned")
            found.same(around, laid_out(comm, "numpy", layout, inputs[comm.rank])[1], f"the input, {layout}")


@pytest.mark.parametrize("kind", KINDS)
def test_in_place_on_the_root(kind: str) -> None:
    with communicator() as comm, Findings() as found:
        for layout, root in itertools.product(LAYOUTS, range(comm.size)):
            inputs = [numbers(rank, (4, 3), np.int32) for rank in range(comm.size)]
            mine, around = laid_out(comm, kind, layout, inputs[comm.rank])
            comm.reduce(mine, root=root, out=mine if comm.rank == root else None)
            want = reduced("sum", inputs) if comm.rank == root else inputs[comm.rank]
            found.same(around, laid_out(comm, "numpy", layout, want)[1], f"{layout}, root {root}", kind, comm.device)


def test_out_is_ignored_off_the_root() -> None:
    with communicator() as comm, Findings() as found:
        for root in range(comm.size):
            inputs = [numbers(rank, (3,), np.int64) for rank in range(comm.size)]
            stray = np.full(7, 2.5)
            got = comm.reduce(inputs[comm.rank], root=root, out=np.zeros(3, np.int64) if comm.rank == root else stray)
            if comm.rank == root:
                found.same(got, reduced("sum", inputs), f"root {root}")
            found.holds((stray == 2.5).all(), f"root {root}: an out off the root was written")


def test_the_result_is_where_the_roots_own_input_is() -> None:
    with communicator() as comm, Findings() as found:
        other = (comm.device + 1) % ncclcomm.device_count()
        inputs = [numbers(rank, (3,), np.float64) for rank in range(comm.size)]
        for root in range(comm.size):
            got = comm.reduce_add(ncclcomm.asarray(inputs[comm.rank], device=other), root=root)
            if comm.rank == root:
                found.same(got, reduced("sum", inputs), f"root {root}", "device", other)


def test_large() -> None:
    with communicator() as comm, Findings() as found:
        root = comm.size - 1
        inputs = [data(rank, (3_000_000,), np.int32) for rank in range(comm.size)]
        got = comm.reduce_add(inputs[comm.rank], root=root)
        if comm.rank == root:
            found.same(got, reduced("sum", inputs), "3e6 elements")
