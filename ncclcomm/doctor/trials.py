"""Small transfers whose results are known, on every level: devices of a process, ranks of a node, nodes."""

from __future__ import annotations

import platform
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import ncclcomm
from ncclcomm.arrays import view
from ncclcomm.devices.base import DeviceBackend
from ncclcomm.devices.registry import current_backend
from ncclcomm.transport.peer import PeerTransport

__all__ = ["NBYTES", "run_trials", "try_devices", "try_kernel", "try_ranks", "try_ways"]

NBYTES = 4 << 20
"""Bytes that each timed transfer carries: enough to be more than latency, little enough for a slow network."""

REPEATS = 3
MOST_DEVICES = 16

_PATTERN_BYTES = 1 << 16
_KERNEL_COUNT = 1024
"""Elements of which each, doubled, is a number that half precision holds."""

Trial = dict[str, Any]
"""members, error, and for all_reduce and broadcast each: seconds (the best run's), wrong."""


def _terms(member: int) -> np.ndarray[Any, Any]:
    """A member's array, unlike every other member's."""
    return (np.arange(NBYTES // 8, dtype=np.int64) % 1009) * (member + 1) + member


def _total(members: int) -> np.ndarray[Any, Any]:
    """The sum of the members' arrays."""
    weight = members * (members + 1) // 2
    return (np.arange(NBYTES // 8, dtype=np.int64) % 1009) * weight + weight - members


def _timed(prepare: Callable[[], object], call: Callable[[], object], wait: Callable[[], object]) -> float:
    """Seconds of the fastest of several calls, each after the others' end; one more runs first, to set up."""
    best = float("inf")
    for attempt in range(REPEATS + 1):
        prepare()
        wait()
        start = time.perf_counter()
        call()
        wait()
        if attempt:
            best = min(best, time.perf_counter() - start)
    return best


def _differs(got: Any, expected: np.ndarray[Any, Any]) -> bool:
    """True if an array holds other numbers than it should."""
    return not np.array_equal(ncclcomm.to_numpy(got), expected)


def try_kernel(backend: DeviceBackend) -> dict[str, Any] | None:
    """Have CuPy compile a kernel, and run it on the current device.

    Args:
        backend: the one in use.

    Returns:
        nvrtc: the compiler's version, '' where it can't be loaded; error: in one line, '' for none; is_file_error:
        whether a file or folder is what is wrong. None where CuPy is not in use.
    """
    if backend.name != "cuda":
        return None
    cupy = backend.array_namespace()
    told = {"nvrtc": "", "error": "", "is_file_error": False}
    # CuPy keeps on disk what it compiled, by the kernel's text, and would take it from there. The name is part of the
    # text, and new in each minute; ranks of a host have one, so that a run leaves one small file for each host.
    name = f"ncclcomm_doctor_{zlib.crc32(platform.node().encode()):08x}_{int(time.time()) // 60}"
    try:
        told["nvrtc"] = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
        # Half precision, whose operators are in CUDA's headers.
        twice = cupy.ElementwiseKernel("float16 x", "float16 y", "y = x + x", name)
        some = np.arange(_KERNEL_COUNT, dtype=np.float16)
        if _differs(twice(ncclcomm.asarray(some, device=backend.current_device())), some * 2):
            told["error"] = "it gave wrong numbers"
    except Exception as error:  # CuPy's errors have no class in common, and each of them is what this looks for
        told["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"
        told["is_file_error"] = isinstance(error, OSError)
    return told


def try_ways(backend: DeviceBackend, devices: Sequence[int]) -> list[str]:
    """Copy a pattern from each device to each other one.

    Returns:
        The ways that gave something else, as `0 to 1`, with the error if there was one.
    """
    bad = []
    for source in devices:
        for dest in devices:
            if source == dest:
                continue
            pattern = ((np.arange(_PATTERN_BYTES) * (source + 2) + 31 * dest) % 251).astype(np.uint8)
            try:
                got = ncclcomm.comm.broadcast(ncclcomm.asarray(pattern, device=source), [dest])[0]
                if ncclcomm.device_index(got) != dest or _differs(got, pattern):
                    bad.append(f"{source} to {dest}")
            except ncclcomm.NcclCommError as error:
                bad.append(f"{source} to {dest} ({error})")
    return bad


def try_devices(backend: DeviceBackend, devices: Sequence[int]) -> Trial:
    """All-reduce and broadcast over devices of this process."""
    trial: Trial = {"members": len(devices), "error": ""}
    peer = PeerTransport(backend, devices)
    try:
        arrays = [ncclcomm.asarray(_terms(member), device=device) for member, device in enumerate(devices)]
        outs = [ncclcomm.zeros(arrays[0].shape, arrays[0].dtype, device=device) for device in devices]
        plain, plain_outs = ([view(array, "doctor").data for array in some] for some in (arrays, outs))

        def wait() -> None:
            for device in devices:
                backend.synchronize(device)

        def nothing() -> None:
            return None

        seconds = _timed(nothing, lambda: peer.all_reduce(plain, plain_outs, "sum"), wait)
        wrong = [f"device {d}" for d, out in zip(devices, outs, strict=True) if _differs(out, _total(len(devices)))]
        trial["all_reduce"] = {"seconds": seconds, "wrong": wrong}
        last = len(devices) - 1
        seconds = _timed(nothing, lambda: peer.broadcast(plain, last), wait)
        wrong = [f"device {d}" for d, array in zip(devices, arrays, strict=True) if _differs(array, _terms(last))]
        trial["broadcast"] = {"seconds": seconds, "wrong": wrong}
    except ncclcomm.NcclCommError as error:
        trial["error"] = str(error)
    return trial


def try_ranks(part: ncclcomm.Communicator) -> Trial:
    """All-reduce and broadcast over the ranks of a communicator, on its ranks' devices. Collective."""
    trial: Trial = {"members": part.size, "error": ""}
    try:
        mine = ncclcomm.asarray(_terms(part.rank), device=part.device)
        out = ncclcomm.zeros(mine.shape, mine.dtype, device=part.device)

        def wait() -> None:
            ncclcomm.synchronize(part.device)

        seconds = _timed(part.barrier, lambda: part.all_reduce(mine, out=out), wait)
        wrong = ["its array"] if _differs(out, _total(part.size)) else []
        trial["all_reduce"] = {"seconds": seconds, "wrong": wrong}
        root = part.size - 1
        seconds = _timed(part.barrier, lambda: part.broadcast(out=mine, root=root), wait)
        wrong = ["its array"] if _differs(mine, _terms(root)) else []
        trial["broadcast"] = {"seconds": seconds, "wrong": wrong}
    except ncclcomm.NcclCommError as error:
        trial["error"] = str(error)
    return trial


def run_trials(limit_s: float) -> dict[str, Any]:
    """Everything that this rank can try. Collective over all ranks.

    Args:
        limit_s: time limit of each call over ranks, in seconds.

    Returns:
        init_error; and, unless ncclcomm.init failed: node, local_rank, device; kernel, ways, devices, node_ranks,
        leaders: what these trials gave, None where this rank had none to make.
    """
    told: dict[str, Any] = {"init_error": "", **dict.fromkeys(("kernel", "ways", "devices", "node_ranks", "leaders"))}
    try:
        world = ncclcomm.init(timeout_s=limit_s)
    except ncclcomm.NcclCommError as error:
        return {**told, "init_error": str(error)}
    told.update(node=world.node, local_rank=world.local_rank, device=world.device)
    told["kernel"] = try_kernel(current_backend())
    if world.local_rank == 0:
        # One process a node: the others would start a context on every GPU as well.
        _try_own_devices(told)
    try:
        own = world.split(world.node)
        leaders = world.split(0 if world.local_rank == 0 else None)
    except ncclcomm.NcclCommError as error:
        return {**told, "init_error": str(error)}
    if own is not None and own.size > 1:
        told["node_ranks"] = try_ranks(own)
    if leaders is not None and leaders.size > 1:
        told["leaders"] = try_ranks(leaders)
    return told


def _try_own_devices(told: dict[str, Any]) -> None:
    """Try the devices of this process, if it has several."""
    backend = current_backend()
    devices = range(min(backend.device_count(), MOST_DEVICES))
    if len(devices) > 1:
        told["ways"] = {"bad": try_ways(backend, devices), "indirect": _without_peer_access(backend, devices)}
        if not (told["kernel"] and told["kernel"]["error"]):  # which its sums need
            told["devices"] = try_devices(backend, devices)


def _without_peer_access(backend: DeviceBackend, devices: Sequence[int]) -> list[str]:
    """The ways between GPUs that go through host memory."""
    if backend.name != "cuda":
        return []
    from ncclcomm.devices.cuda_facts import peer_access

    return [f"{a} to {b}" for a in devices for b in devices if a != b and not peer_access(a, b)]
