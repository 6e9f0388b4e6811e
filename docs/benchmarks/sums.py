"""Times the kernel by which sums are made on a GPU beside the same sum by CuPy, in turns; prints a Markdown table.

python docs/benchmarks/sums.py
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

import cupy
import numpy as np

from ncclcomm.devices.cuda_sum import sum_kernel

SIZES = [1 << 20, 1 << 24, 1 << 26, 1 << 30]
TERMS = [2, 4, 8]
ROUNDS = 15


def medians(calls: dict[str, Callable[[], None]]) -> dict[str, float]:
    """For each call the median microseconds on the GPU, taken in turns."""
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS + 3):
        for name, call in calls.items():
            start.record()
            call()
            end.record()
            end.synchronize()
            if turn >= 3:
                times[name].append(1e3 * cupy.cuda.get_elapsed_time(start, end))
    return {name: statistics.median(taken) for name, taken in times.items()}


def main() -> None:
    """Print a row for each size and number of terms."""
    print(
        "| bytes | terms | ours, us | GB/s | cupy.add, us | ours / CuPy |\n| ---: | ---: | ---: | ---: | ---: | ---: |"
    )
    dtype = np.dtype(np.float32)
    for nbytes in SIZES:
        for count in TERMS:
            terms = [cupy.ones(nbytes // 4, dtype) for _ in range(count)]
            out = cupy.empty_like(terms[0])
            launch = sum_kernel(dtype, count, 0)
            addresses = [term.data.ptr for term in terms]

            def chain(terms: list[cupy.ndarray] = terms, out: cupy.ndarray = out) -> None:
                cupy.add(terms[0], terms[1], out=out)
                for term in terms[2:]:
                    cupy.add(out, term, out=out)

            ours = functools.partial(launch, out.data.ptr, addresses, out.size)
            found = medians({"ours": ours, "cupy": chain})
            rate = (count + 1) * nbytes / found["ours"] / 1e3
            cells = [f"{nbytes:,}", count, f"{found['ours']:.1f}", f"{rate:,.0f}", f"{found['cupy']:.1f}"]
            print("| " + " | ".join(map(str, [*cells, f"{found['ours'] / found['cupy']:.2f}"])) + " |", flush=True)


if __name__ == "__main__":
    main()
