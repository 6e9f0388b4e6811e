"""All_reduce over ranks: right values, and the same bits on every rank."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
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
    WORLD,
    Findings,
    average,
    communicator,
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


def rough(rank: int, count: int, dtype: Any) -> np.ndarray[Any, Any]:
    """Floats of many magnitudes, whose sum depends on the order of additions."""
    rng = np.random.default_rng([rank, 9])
    values = rng.standard_normal(count) * 2.0 ** rng.integers(-6, 7, count)
    return values.astype(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", list(TAKEN))
def test_every_dtype(kind: str, op: str) -> None:
    with communicator() as comm, Findings() as found:
        for dtype in TAKEN[op]:
            inputs = [numbers(rank, (13,), dtype) for rank in range(comm.size)]
            mine = on(comm, kind, inputs[comm.rank].copy())
            got = comm.all_reduce(mine, op=op)
            found.same(got, reduced(op, inputs), str(dtype), kind, comm.device)
            found.same(mine, inputs[comm.rank], f"{dtype}, the input")
            found.holds(got is not mine, f"{dtype}: the input came back")


@pytest.mark.parametrize("kind", KINDS)
def test_average(kind: str) -> None:
    with communicator() as comm, Findings() as found:
        for dtype in [*FLOATS, *COMPLEX]:
            inputs = [numbers(rank, (7, 2), dtype) for rank in range(comm.size)]
            got = comm.all_reduce(on(comm, kind, inputs[comm.rank]), op="avg")
            found.holds(got.dtype == dtype, f"{dtype} came back as {got.dtype}")
            found.close_to(got, average(inputs), str(dtype))


@pytest.mark.parametrize("nodes", [{}, {"NCCLCOMM_NODE_SIZE": "2"}, {"NCCLCOMM_NODE_SIZE": "1,2"}])
def test_the_same_bits_on_every_rank(nodes: dict[str, str]) -> None:
    with communicator(**nodes) as comm, Findings() as found:
        for dtype in [*FLOATS, np.dtype("c8")]:
            for count in (1, 10_007):
                for op in ("sum", "prod", "avg"):
                    inputs = [rough(rank, count, dtype) for rank in range(comm.size)]
                    got = ncclcomm.to_numpy(comm.all_reduce(inputs[comm.rank], op=op))
                    every = WORLD.allgather(got.tobytes())
                    found.holds(len(set(every)) == 1, f"{op} of {count} {dtype}: ranks differ")
                    if op == "sum" and dtype in (np.float32, np.float64):
                        wide = sum(a.astype(np.float64) for a in inputs)
                        bound = 4 * np.finfo(dtype).eps * sum(np.abs(a.astype(np.float64)) for a in inputs)
                        found.holds(np.all(np.abs(got - wide) <= bound), f"sum of {count} {dtype} is off")


@pytest.mark.parametrize("nodes", [{}, {"NCCLCOMM_NODE_SIZE": "2"}])
@pytest.mark.parametrize("op", ["min", "max"])
def test_max_and_min_carry_nan(op: str, nodes: dict[str, str]) -> None:
    with communicator(**nodes) as comm, Findings() as found:
        for dtype in [*FLOATS, np.dtype(">f4")]:
            mine = numbers(comm.rank, (comm.size + 1,), np.float64).astype(dtype)
            mine[comm.rank] = np.nan
            got = comm.all_reduce(mine, op=op).astype(np.float64)
            found.holds(np.isnan(got[:-1]).all(), f"{dtype}: a rank's NaN is lost in {got}")
            found.holds(not np.isnan(got[-1]), f"{dtype}: NaN where no rank has one")


@pytest.mark.parametrize("nodes", [{}, {"NCCLCOMM_NODE_SIZE": "1"}])
def test_integers_wrap_and_bools_are_or_ed(nodes: dict[str, str]) -> None:
    with communicator(**nodes) as comm, Findings() as found:
        got = comm.all_reduce(np.full(3, 100, np.int8))
        found.same(got, np.full(3, (100 * comm.size + 128) % 256 - 128, np.int8), "int8")
        got = comm.all_reduce(np.full(3, 200, np.uint8), op="prod")
        found.same(got, np.full(3, 200**comm.size % 256, np.uint8), "uint8")
        mine = np.zeros(comm.size + 1, bool)
        mine[comm.rank] = True
        found.same(comm.all_reduce(mine), np.array([True] * comm.size + [False]), "bool")


@pytest.mark.parametrize("dtype", [">f8", ">i2", ">c8"])
def test_the_other_byte_order_comes_back_native(dtype: str) -> None:
    with communicator() as comm, Findings() as found:
        native = np.dtype(dtype).newbyteorder("=")
        inputs = [numbers(rank, (5,), native) for rank in range(comm.size)]
        found.same(comm.all_reduce(inputs[comm.rank].astype(dtype)), reduced("sum", inputs), dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_every_shape(kind: str) -> None:
    with communicator() as comm, Findings() as found:
        for shape in SHAPES:
            inputs = [numbers(rank, shape, np.float32) for rank in range(comm.size)]
            got = comm.all_reduce(on(comm, kind, inputs[comm.rank]))
            found.same(got, reduced("sum", inputs), f"shape {shape}", kind, comm.device)
            found.holds(got.flags.c_contiguous, f"shape {shape}: not C-contiguous")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_layouts_may_differ_between_ranks(kind: str, op: str) -> None:
    layouts = list(LAYOUTS)
    with communicator() as comm, Findings() as found:
        # Multiples of 12 have exact averages over one to four ranks.
        inputs = [numbers(rank, (4, 3), np.float64) * 12 for rank in range(comm.size)]
        want = reduced("sum", inputs) / (comm.size if op == "avg" else 1)
        for turn in range(len(layouts)):
            layout = layouts[(turn + comm.rank) % len(layouts)]
            out_layout = layouts[(turn + 2 * comm.rank + 1) % len(layouts)]
            mine, around = laid_out(comm, kind, layout, inputs[comm.rank])
            found.same(comm.all_reduce(mine, op=op), want, f"from {layout}", kind, comm.device)
            out, out_around = laid_out(comm, kind, out_layout, np.zeros((4, 3)))
            got = comm.all_reduce(mine, op=op, out=out)
            found.holds(got is out, f"{out_layout}: out was not returned")
            _, wanted = laid_out(comm, "numpy", out_layout, want)
            found.same(out_around, wanted, f"{layout} into {out_layout}", kind, comm.device)
            found.same(around, laid_out(comm, "numpy", layout, inputs[comm.rank])[1], f"the input, {layout}")


@pytest.mark.parametrize("kind", KINDS)
def test_in_place(kind: str) -> None:
    with communicator() as comm, Findings() as found:
        for layout, op in itertools.product(LAYOUTS, ("sum", "max")):
            inputs = [numbers(rank, (4, 3), np.int32) for rank in range(comm.size)]
            mine, around = laid_out(comm, kind, layout, inputs[comm.rank])
            got = comm.all_reduce(mine, op=op, out=mine)
            _, wanted = laid_out(comm, "numpy", layout, reduced(op, inputs))
            found.same(around, wanted, f"{op}, {layout}", kind, comm.device)
            found.holds(got is mine, f"{op}, {layout}: out was not returned")


def test_inputs_that_cannot_be_written() -> None:
    with communicator() as comm, Findings() as found:
        inputs = [numbers(rank, (1, 4), np.int64) for rank in range(comm.size)]
        mine = inputs[comm.rank].copy()
        mine.flags.writeable = False
        found.same(comm.all_reduce(mine), reduced("sum", inputs), "read-only")
        spread = np.broadcast_to(mine, (3, 4))
        want = np.ascontiguousarray(np.broadcast_to(reduced("sum", inputs), (3, 4)))
        found.same(comm.all_reduce(spread), want, "elements that share memory")


def test_a_bfloat16_sum_keeps_its_dtype() -> None:
    with communicator() as comm, Findings() as found:
        mine = np.full(4, comm.rank + 1, ml_dtypes.bfloat16)
        total = comm.size * (comm.size + 1) // 2
        found.same(comm.all_reduce(mine), np.full(4, total, ml_dtypes.bfloat16), "bfloat16")


def test_large() -> None:
    with communicator() as comm, Findings() as found:
        inputs = [numbers(rank, (3_000_000,), np.int16) for rank in range(comm.size)]
        found.same(comm.all_reduce(inputs[comm.rank]), reduced("sum", inputs), "3e6 elements")
