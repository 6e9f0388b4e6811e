"""Timing of a round: some calls back to back between two barriers."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import NamedTuple

import ncclcomm
from ncclcomm.bench.group import Group

__all__ = ["Clock", "Round", "quiet"]


class Round(NamedTuple):
    """Seconds of one call, as this process saw one round."""

    time_s: float
    """To the result."""
    host_s: float
    """Until the call returned to the caller."""
    device_s: float | None
    """Between events around the calls, the longest of the devices; None where streams run no work of their own."""


class Clock:
    """Times rounds on the devices of this process.

    Args:
        group: who takes part.
    """

    def __init__(self, group: Group) -> None:
        self._wait = group.wait
        self._barrier = group.barrier
        self._devices = tuple(device for device in group.places if device != "cpu") if group.on_gpus else ()
        self._starts = [ncclcomm.Event(enable_timing=True) for _ in self._devices]
        self._ends = [ncclcomm.Event(enable_timing=True) for _ in self._devices]

    def round(self, call: Callable[[], object], iters: int) -> Round:
        """Time some calls back to back; on all ranks together.

        Args:
            call: what is timed; nothing else runs between the two looks at the clock.
            iters: how many calls.
        """
        now = time.perf_counter
        turns = repeat(None, iters)
        self._wait()
        self._barrier()
        for event, device in zip(self._starts, self._devices, strict=True):
            event.record(ncclcomm.current_stream(device))
        start = now()
        for _ in turns:
            call()
        queued = now()
        for event, device in zip(self._ends, self._devices, strict=True):
            event.record(ncclcomm.current_stream(device))
        self._wait()
        end = now()
        spans = [first.elapsed_time(last) for first, last in zip(self._starts, self._ends, strict=True)]
        return Round((end - start) / iters, (queued - start) / iters, max(spans) / 1e3 / iters if spans else None)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the garbage collector out of what is timed inside the block."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
