"""The transport contract on the devices of one process; and that it orders its work with the streams of all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from contract.transport_suite import CHECKS
from ncclcomm.devices import Stream, current_stream, stream, synchronize, use_backend
from ncclcomm.devices.host import HostBackend, HostEvent
from ncclcomm.transport import peer
from ncclcomm.transport.peer import PeerTransport

PATIENCE_S = 0.05
DEADLINE_S = 30.0


@pytest.fixture(params=[1 << 20, 0], ids=["whole", "sliced"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The form that an all_reduce of small arrays has, and that of large ones."""
    monkeypatch.setattr(peer, "SLICED_BYTES", request.param)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("devices", [(0,), (1, 0), (2, 0, 1), (3, 1, 0, 2), (0, 4, 1, 3, 2)], ids=len)
@pytest.mark.parametrize("immediate", [True, False], ids=["host-sync", "host-async"])
def test_contract(immediate: bool, devices: tuple[int, ...], check: Callable[..., None]) -> None:
    backend = HostBackend(len(devices), immediate=immediate)
    transport = PeerTransport(backend, devices)

    def settle() -> None:
        for device in devices:
            backend.synchronize(device)

    check(transport, settle)
    transport.close()
    transport.close()


def test_drives_every_device() -> None:
    transport = PeerTransport(HostBackend(3), (2, 0))
    assert (transport.size, transport.members) == (2, (0, 1))


def _all_reduce_of_late_arrays(late: int, patience_s: float) -> tuple[list[list[float]], list[bool]]:
    """Fill one member's array late, all_reduce, overwrite all inputs, read all results; what was read, gate open."""
    backend = HostBackend(3, immediate=False)
    arrays, outs = [np.full(3, -1.0) for _ in range(3)], [np.zeros(3) for _ in range(3)]
    opened, read, done = threading.Event(), [[0.0]] * 3, [threading.Event() for _ in range(3)]
    was_open = [False] * 3

    def reader(member: int) -> None:
        was_open[member] = opened.is_set()
        read[member] = outs[member].tolist()
        done[member].set()

    with use_backend(backend):
        current_stream(late).launch(opened.wait, DEADLINE_S)
        for member in range(3):
            current_stream(member).launch(arrays[member].fill, member + 1.0)
        PeerTransport(backend, (0, 1, 2)).all_reduce(arrays, outs, "sum")
        for member in range(3):
            current_stream(member).launch(arrays[member].fill, -100.0)
            current_stream(member).launch(reader, member)
        for member in {0, 1, 2} - {late}:
            done[member].wait(patience_s)
        opened.set()
        for member in range(3):
            synchronize(member)
    return read, was_open


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("late", range(3))
def test_all_reduce_waits_for_every_member(late: int) -> None:
    assert _all_reduce_of_late_arrays(late, PATIENCE_S) == ([[6.0] * 3] * 3, [True] * 3)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("late", range(3))
def test_all_reduce_goes_wrong_without_waits(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostEvent, "wait", lambda self, stream: None)
    read, was_open = _all_reduce_of_late_arrays(late, DEADLINE_S)
    assert was_open == [member == late for member in range(3)]
    assert read != [[6.0] * 3] * 3


def test_uses_the_streams_that_are_current() -> None:
    backend, opened = HostBackend(2, immediate=False), threading.Event()
    source, target = np.arange(4.0), np.zeros(4)
    with use_backend(backend):
        for device in range(2):
            current_stream(device).launch(opened.wait, DEADLINE_S)
        side: list[Any] = [Stream(device=0), Stream(device=1)]
        with stream(side[0]), stream(side[1]):
            PeerTransport(backend, (0, 1)).move(source, target, 0, 1)
        side[1].synchronize()
        np.testing.assert_array_equal(target, np.arange(4.0))
        opened.set()
        for device in range(2):
            synchronize(device)
