"""The transport contract between the GPUs of one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from contract.mirrored import Mirrored
from contract.transport_suite import CHECKS
from ncclcomm.devices.cuda import CudaBackend
from ncclcomm.transport.peer import PeerTransport


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize(
    "devices",
    [(0,), pytest.param((0, 1), marks=pytest.mark.gpu(2)), pytest.param((1, 0), marks=pytest.mark.gpu(2))],
    ids=str,
)
def test_contract(backend: CudaBackend, devices: tuple[int, ...], check: Callable[..., None]) -> None:
    import cupy

    transport = PeerTransport(backend, devices)

    def up(array: object, member: int) -> object:
        with cupy.cuda.Device(devices[member]):
            return cupy.asarray(array)

    def settle() -> None:
        for device in devices:
            backend.synchronize(device)

    check(Mirrored(transport, up, cupy.asnumpy), settle)
