"""The transport contract on ranks, for device arrays: staged through host memory (also without a GPU), and NCCL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from contract.mirrored import Mirrored
from contract.transport_suite import CHECKS
from ncclcomm.devices.cuda import CudaBackend, probe
from ncclcomm.errors import UnsupportedError
from ncclcomm.transport.mpi import MpiControl, MpiTransport
from ncclcomm.transport.staged import StagedTransport

pytestmark = pytest.mark.mpi

GPUS = probe()[0]
WORLD = MPI.COMM_WORLD


def _staged(
    copy: Callable[[Any, Any], None],
    wait: Callable[[], None],
    empty_pinned: Callable[[int], Any],
    refuse_capture: Callable[[], None] = lambda: None,
) -> Any:
    """A staged transport over MPI, with a buffer so small that most arrays go in pieces."""
    return StagedTransport(MpiTransport(WORLD.Dup(), 1 << 30), copy, wait, empty_pinned, 256, refuse_capture)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_staged(check: Callable[..., None]) -> None:
    waits = []
    transport = _staged(np.copyto, lambda: waits.append(1), lambda nbytes: np.empty(nbytes, np.uint8))
    check(transport, lambda: None)
    assert waits or transport.size == 1 or check.__name__ == "check_identity"
    transport.close()
    transport.close()


def test_staged_in_a_graph_capture_moves_nothing() -> None:
    def refuse() -> None:
        raise UnsupportedError("captured")

    transport = _staged(np.copyto, lambda: None, lambda nbytes: np.empty(nbytes, np.uint8), refuse)
    array, out, size, last = np.full(3, WORLD.rank + 1.0), np.full(3, -1.0), WORLD.size, WORLD.size - 1
    parts, outs = [array] * size, [np.full(3, -1.0) for _ in range(size)]
    calls: list[Callable[[], None]] = [
        lambda: transport.broadcast([array], last),
        lambda: transport.reduce([array], [out], "sum", last),
        lambda: transport.all_reduce([array], [out], "sum"),
    ]
    if size > 1:  # alone there is nothing to stage
        calls.append(lambda: transport.scatter(parts if WORLD.rank == last else None, [out], last))
        calls.append(lambda: transport.gather([array], outs if WORLD.rank == last else None, last))
        if WORLD.rank in (0, last):
            calls.append(lambda: transport.move(array, out, 0, last))
    for call in calls:
        with pytest.raises(UnsupportedError, match="captured"):
            call()
    assert (array == WORLD.rank + 1).all()
    assert all((one == -1).all() for one in (out, *outs))
    transport.close()


def _gpu() -> tuple[CudaBackend, int]:
    """The backend, and this rank's GPU."""
    if GPUS == 0:
        pytest.skip("no GPU")
    return CudaBackend(), WORLD.rank % GPUS


def _mirrored(transport: Any, backend: CudaBackend, device: int) -> Mirrored:
    """The transport with arrays of one GPU."""
    import cupy

    backend.set_device(device)
    return Mirrored(transport, lambda array, _: cupy.asarray(array), cupy.asnumpy)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_staged_on_a_gpu(check: Callable[..., None]) -> None:
    backend, device = _gpu()
    stream = backend.current_stream(device)
    transport = _staged(lambda dst, src: backend.copy(dst, src, stream), stream.synchronize, backend.empty_pinned)
    check(_mirrored(transport, backend, device), lambda: None)
    transport.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_nccl(check: Callable[..., None]) -> None:
    backend, device = _gpu()
    if WORLD.size > GPUS:
        pytest.skip("NCCL needs a GPU a rank")
    from ncclcomm.transport.nccl import NcclTransport, new_unique_id

    unique_id = MpiControl(WORLD).broadcast_object(new_unique_id() if WORLD.rank == 0 else None, 0)
    transport = NcclTransport(unique_id, WORLD.size, WORLD.rank, device)
    check(_mirrored(transport, backend, device), lambda: backend.synchronize(device))
    transport.close()
    transport.close()
