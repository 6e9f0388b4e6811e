"""Times the collectives on GPUs beside their peers, side by side in one run; prints Markdown tables.

In one process (beside torch.cuda.comm where PyTorch is installed):

    python docs/benchmarks/first_gpus.py

Over ranks (beside the raw NCCL call; NCCLCOMM_NODE_SIZE=2 emulates nodes of two):

    ncclcomm run -n 2 docs/benchmarks/first_gpus.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
from cupy.cuda import nccl

import ncclcomm
from ncclcomm import comm

SIZES = [1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26, 1 << 28]
ROUNDS = 15


def wait() -> None:
    """Wait for all devices."""
    for device in range(ncclcomm.device_count()):
        ncclcomm.synchronize(device)


def medians(calls: dict[str, Callable[[], Any]], between: Callable[[], None]) -> dict[str, tuple[float, float]]:
    """For each call the median seconds to its result, and of the host's part, taken in turns."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for turn in range(ROUNDS + 3):
        for name, call in calls.items():
            wait()
            between()
            start = time.perf_counter()
            kept = call()
            queued = time.perf_counter()
            wait()
            if turn >= 3:
                times[name].append((time.perf_counter() - start, queued - start))
            del kept
    return {n: (statistics.median(t for t, _ in v), statistics.median(q for _, q in v)) for n, v in times.items()}


def show(op: str, nbytes: int, found: dict[str, tuple[float, float]]) -> None:
    """One row: microseconds to the result and of the host, ours and the peer's, and their ratio."""
    ours = found["ours"]
    cells = [op, f"{nbytes:,}", f"{ours[0] * 1e6:.0f}", f"{ours[1] * 1e6:.0f}"]
    for name, (seconds, host) in found.items():
        if name != "ours":
            cells += [name, f"{seconds * 1e6:.0f}", f"{host * 1e6:.0f}", f"{ours[0] / seconds:.2f}"]
    print("| " + " | ".join(cells) + " |", flush=True)


def header() -> None:
    """The table's head."""
    print("| call | bytes | ours, us | host, us | peer | us | host, us | ours / peer |")
    print("| --- | ---: | ---: | ---: | --- | ---: | ---: | ---: |")


def in_process() -> None:
    """The four calls over all devices of this process."""
    try:
        import torch
        import torch.cuda.comm as theirs
    except ImportError:
        torch = theirs = None
    devices = list(range(ncclcomm.device_count()))
    header()
    for nbytes in SIZES:
        count = nbytes // 4
        source = ncclcomm.asarray(np.ones(count, np.float32), device=0)
        copies = comm.broadcast(source, devices)
        parts = comm.scatter(source, devices)
        calls: dict[str, dict[str, Callable[[], Any]]] = {
            "broadcast": {"ours": lambda a=source: comm.broadcast(a, devices)},
            "scatter": {"ours": lambda a=source: comm.scatter(a, devices)},
            "gather": {"ours": lambda p=parts: comm.gather(p, destination=0)},
            "reduce_add": {"ours": lambda c=copies: comm.reduce_add(c, destination=0)},
        }
        if torch is not None:
            tensor = torch.ones(count, device="cuda:0")
            t_copies, t_parts = theirs.broadcast(tensor, devices), theirs.scatter(tensor, devices)
            calls["broadcast"]["torch"] = lambda a=tensor: theirs.broadcast(a, devices)
            calls["scatter"]["torch"] = lambda a=tensor: theirs.scatter(a, devices)
            calls["gather"]["torch"] = lambda p=t_parts: theirs.gather(p, destination=0)
            calls["reduce_add"]["torch"] = lambda c=t_copies: theirs.reduce_add(c, destination=0)
        for op, pair in calls.items():
            show(op, nbytes, medians(pair, lambda: None))


def over_ranks(world: ncclcomm.Communicator) -> None:
    """all_reduce and broadcast over ranks; beside NCCL's own call where all ranks are on one node."""
    if world.rank == 0:
        print(world.explain("all_reduce", SIZES[-1]))
        header()
    raw = world._engine(world.device).intra if world.num_nodes == 1 and world.backend == "cuda" else None
    for nbytes in SIZES:
        array = ncclcomm.asarray(np.ones(nbytes // 4, np.float32))
        out = ncclcomm.zeros(nbytes // 4, np.float32)
        calls: dict[str, dict[str, Callable[[], Any]]] = {
            "all_reduce": {"ours": lambda a=array, o=out: world.all_reduce(a, out=o)},
            "broadcast": {"ours": lambda o=out: world.broadcast(out=o)},
        }
        if raw is not None and raw.name == "nccl":

            def all_reduce(a: Any = array, o: Any = out) -> None:
                stream = cupy.cuda.get_current_stream().ptr
                raw._comm.allReduce(a.data.ptr, o.data.ptr, a.size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream)

            def broadcast(o: Any = out) -> None:
                stream = cupy.cuda.get_current_stream().ptr
                raw._comm.broadcast(o.data.ptr, o.data.ptr, o.size, nccl.NCCL_FLOAT32, 0, stream)

            calls["all_reduce"]["raw NCCL"] = all_reduce
            calls["broadcast"]["raw NCCL"] = broadcast
        for op, pair in calls.items():
            found = medians(pair, world.mpi_comm.Barrier if world.mpi_comm else (lambda: None))
            if world.rank == 0:
                show(op, nbytes, found)


def main() -> None:
    """Choose by the number of ranks."""
    with ncclcomm.init(check=False) as world:
        if world.rank == 0:
            gpu = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
            print(
                f"{ncclcomm.device_count()} x {gpu}, CuPy {cupy.__version__}, NCCL {nccl.get_version()}, "
                f"NumPy {np.__version__}, ncclcomm {ncclcomm.__version__}"
            )
        if world.size > 1:
            over_ranks(world)
        else:
            in_process()


if __name__ == "__main__":
    main()
