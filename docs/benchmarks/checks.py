"""What checks cost: calls on host arrays with checks off and on, beside a build without checks, in turns in one run.

    ncclcomm run -n 2 docs/benchmarks/checks.py

The build without checks is this one with `agree` taken out of all_reduce: it numbers the call and looks at its own
arguments, and nothing else. Prints the median of 15 turns for each and the median of the ratios within a turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import ncclcomm
from ncclcomm.communicator import reduce as reduce_module
from ncclcomm.communicator.agree import agree

TURNS = 15
SECONDS_A_TURN = 0.1


def without_checks(comm: Any, call: str, validate: Callable[[], Any]) -> tuple[Any, list[Any]]:
    """What is left of `agree` in a build without checks."""
    comm._next_call(call)
    return validate().local, []


def seconds(comm: ncclcomm.Communicator, array: Any, out: Any, build: Any, count: int) -> float:
    """Time of one call, from many."""
    reduce_module.agree = build
    comm.mpi_comm.Barrier()
    start = time.perf_counter()
    for _ in range(count):
        comm.all_reduce(array, out=out)
    return (time.perf_counter() - start) / count


def main() -> None:
    """Measure and print."""
    with ncclcomm.init(check=False) as off, ncclcomm.Communicator(off.mpi_comm, check=True) as on:
        if off.rank == 0:
            print("| bytes | no checks, us | off, us | on, us | off / none | on / none |")
            print("| ---: | ---: | ---: | ---: | ---: | ---: |")
        for count in (1, 1024, 131072, 1048576):
            array, out = np.ones(count), np.empty(count)
            once = off.broadcast(np.array(seconds(off, array, out, agree, 20)))
            calls = max(3, int(SECONDS_A_TURN / once[()]))
            turns = []
            for _ in range(TURNS):
                none = seconds(off, array, out, without_checks, calls)
                turns.append((none, seconds(off, array, out, agree, calls), seconds(on, array, out, agree, calls)))
            none, unchecked, checked = (statistics.median(column) * 1e6 for column in zip(*turns, strict=True))
            off_ratio = statistics.median(turn[1] / turn[0] for turn in turns)
            on_ratio = statistics.median(turn[2] / turn[0] for turn in turns)
            if off.rank == 0:
                print(
                    f"| {array.nbytes:,} | {none:.1f} | {unchecked:.1f} | {checked:.1f} | {off_ratio:.3f} "
                    f"| {on_ratio:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
