"""The figures of the benchmark, held against the definitions of nccl-tests (its doc/PERFORMANCE.md)."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from ncclcomm.bench.ops import DEVICE_OPS, RANK_OPS
from ncclcomm.bench.stats import Spread, algbw_gbps, geometric_mean


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_bus_factors(n: int) -> None:
    parts = (n - 1) / n
    assert {name: op.bus(n) for name, op in RANK_OPS.items() if op.moves} == {
        "broadcast": 1,
        "scatter": parts,
        "gather": parts,
        "reduce": 1,
        "reduce_add": 1,
        "all_reduce": 2 * (n - 1) / n,
    }
    assert {name: op.bus(n) for name, op in DEVICE_OPS.items()} == {
        "broadcast": 1,
        "scatter": parts,
        "gather": parts,
        "reduce_add": 1,
        "all_reduce": 2 * (n - 1) / n,
        "all_gather": parts,
        "reduce_scatter": parts,
    }


def test_algbw_is_decimal() -> None:
    assert algbw_gbps(2_000_000_000, 0.5) == 4.0
    assert algbw_gbps(1 << 20, 1e-3) == pytest.approx(1.048576)
    assert algbw_gbps(0, 1e-6) == 0


def test_spread() -> None:
    values = [float(v) for v in np.random.default_rng(1).permutation(101)]
    found = Spread.of(values)
    assert (found.median, found.low, found.high, found.least, found.most) == (50, 10, 90, 0, 100)
    assert Spread.of([7.0]) == Spread(7, 7, 7, 7, 7)


def test_geometric_mean() -> None:
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert geometric_mean([2.0, 3.0, 7.0]) == pytest.approx(statistics.geometric_mean([2, 3, 7]))
    assert geometric_mean([]) is None
