"""The backends that every contract test of devices runs on, and gates that hold a stream's work back."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from ncclcomm.devices import cuda
from ncclcomm.devices.base import DeviceBackend
from ncclcomm.devices.host import HostBackend
from ncclcomm.devices.registry import use_backend

DEADLINE_S = 30.0
"""How long a test waits for what must happen."""

HOST_DEVICES = 3


class Gate:
    """Work that holds its stream until the gate is opened.

    Where streams run work inside the call that enqueues it, a gate is open from the start: the call would not return.
    """

    def __init__(self, *, opened: bool) -> None:
        self._opened = threading.Event()
        if opened:
            self._opened.set()

    def hold(self) -> None:
        """To be launched on the stream."""
        assert self._opened.wait(DEADLINE_S), "nobody opened the gate"

    def open(self) -> None:
        """Let the stream go on."""
        self._opened.set()


BACKENDS = ["host-sync", "host-async", *(["cuda"] if cuda.probe()[0] >= 2 else [])]
"""The CUDA backend joins where there are two GPUs; with one, tests/gpu tests what one can show."""


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[DeviceBackend]:
    """Each backend in turn, in use: at least two devices, all of them idle at the test's start."""
    chosen: DeviceBackend
    if request.param == "cuda":
        chosen = cuda.CudaBackend()
    else:
        chosen = HostBackend(HOST_DEVICES, immediate=request.param == "host-sync")
    with use_backend(chosen):
        yield chosen


@pytest.fixture
def later(backend: DeviceBackend) -> DeviceBackend:
    """The backends whose work runs later than the call, so that a missing wait shows."""
    if backend.immediate:
        pytest.skip("this backend runs work inside the call: no wait can be missing")
    return backend


@pytest.fixture
def gate(backend: DeviceBackend) -> Iterator[Gate]:
    """A closed gate, where the backend has such; opened at the test's end whatever happens."""
    made = Gate(opened=backend.immediate)
    yield made
    made.open()
