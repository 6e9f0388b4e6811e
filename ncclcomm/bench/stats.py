"""Figures of timed rounds: medians with their spread, nccl-tests' bandwidths, means of ratios."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Spread", "algbw_gbps", "bus_of_all_reduce", "bus_of_parts", "bus_of_whole", "geometric_mean"]

LOW_PERCENT = 10
HIGH_PERCENT = 90


@dataclass(frozen=True)
class Spread:
    """What is left of one figure of many rounds, in the figure's own unit."""

    median: float
    low: float
    """The 10th percentile."""
    high: float
    """The 90th percentile."""
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Sum up one value a round.

        Args:
            values: at least one.
        """
        low, median, high = np.percentile(np.asarray(values, np.float64), (LOW_PERCENT, 50, HIGH_PERCENT))
        return cls(*(round(float(value), 6) for value in (median, low, high, min(values), max(values))))


def algbw_gbps(nbytes: int, seconds: float) -> float:
    """nccl-tests' algorithm bandwidth: bytes over time, in decimal GB/s; 0 where nothing moves.

    Args:
        nbytes: the size of the row: the whole array, of which scatter and gather give each rank a part.
        seconds: time of one call.
    """
    return nbytes / seconds / 1e9 if nbytes else 0.0


def bus_of_whole(_size: int) -> float:
    """The factor from algbw to busbw where the whole array crosses one link once: broadcast, reduce."""
    return 1.0


def bus_of_parts(size: int) -> float:
    """The factor from algbw to busbw where all parts but one cross a link: scatter, gather and their like.

    Args:
        size: number of ranks or devices.
    """
    return (size - 1) / size


def bus_of_all_reduce(size: int) -> float:
    """The factor from algbw to busbw of all_reduce: every part but one crosses a link twice.

    Args:
        size: number of ranks or devices.
    """
    return 2 * (size - 1) / size


def geometric_mean(ratios: Iterable[float]) -> float | None:
    """The geometric mean of positive ratios; None of none."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else None
