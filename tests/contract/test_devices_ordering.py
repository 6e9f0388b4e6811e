"""What orders the work of streams; each scenario is shown to go wrong when its wait is taken out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ncclcomm.devices import Event, Stream, current_stream, default_stream, device, stream, synchronize
from ncclcomm.devices.base import DeviceBackend

PATIENCE_S = 0.05
"""How long a right run gives work that must not run yet; a wrong run is found out as soon as it does."""

DEADLINE_S = 30.0


class Log:
    """What ran, in order, and a signal for the last of it."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.later_ran = threading.Event()

    def later(self) -> None:
        """The work that has to wait."""
        self.ran.append("later")
        self.later_ran.set()


def _finish(log: Log, gate: Any, patience_s: float, *streams: Stream) -> list[str]:
    """Give the waiting work its chance to run too early, then let everything run."""
    log.later_ran.wait(patience_s)
    gate.open()
    for each in streams:
        each.synchronize()
    return log.ran


def event_wait(gate: Any, patience_s: float) -> list[str]:
    """A stream waits for an event of another."""
    log, first, second = Log(), Stream(), Stream()
    first.launch(gate.hold)
    first.launch(log.ran.append, "first")
    second.wait_event(first.record_event())
    second.launch(log.later)
    return _finish(log, gate, patience_s, first, second)


def event_wait_of_current_stream(gate: Any, patience_s: float) -> list[str]:
    """The default form of record and wait: the current stream."""
    log, first, second, event = Log(), Stream(), Stream(), Event()
    first.launch(gate.hold)
    first.launch(log.ran.append, "first")
    with stream(first):
        event.record()
    with stream(second):
        event.wait()
    second.launch(log.later)
    return _finish(log, gate, patience_s, first, second)


def cross_device_wait(gate: Any, patience_s: float) -> list[str]:
    """A stream waits for an event of another device."""
    log, first, second = Log(), Stream(device=0), Stream(device=1)
    first.launch(gate.hold)
    first.launch(log.ran.append, "first")
    event = first.record_event()
    event.wait(second)
    second.launch(log.later)
    return _finish(log, gate, patience_s, first, second)


def stream_wait(gate: Any, patience_s: float) -> list[str]:
    """A stream waits for all work of another."""
    log, first, second = Log(), Stream(), Stream(device=1)
    first.launch(gate.hold)
    first.launch(log.ran.append, "first")
    second.wait_stream(first)
    second.launch(log.later)
    return _finish(log, gate, patience_s, first, second)


def default_stream_waits(gate: Any, patience_s: float) -> list[str]:
    """The default stream waits for a side stream, only because it is told to."""
    log, side, main = Log(), Stream(), default_stream()
    side.launch(gate.hold)
    side.launch(log.ran.append, "first")
    main.wait_stream(side)
    main.launch(log.later)
    return _finish(log, gate, patience_s, side, main)


def rerecorded_after_wait(gate: Any, patience_s: float) -> list[str]:
    """Recording an event again leaves an earlier wait at the earlier mark."""
    log, first, elsewhere, second = Log(), Stream(), Stream(), Stream()
    first.launch(gate.hold)
    first.launch(log.ran.append, "first")
    event = first.record_event()
    second.wait_event(event)
    event.record(elsewhere)
    second.launch(log.later)
    return _finish(log, gate, patience_s, first, second)


SCENARIOS = [
    event_wait,
    event_wait_of_current_stream,
    cross_device_wait,
    stream_wait,
    default_stream_waits,
    rerecorded_after_wait,
]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_waits_order_work(backend: DeviceBackend, gate: Any, scenario: Callable[..., list[str]]) -> None:
    assert scenario(gate, PATIENCE_S) == ["first", "later"]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario_goes_wrong_without_its_wait(
    later: DeviceBackend, gate: Any, scenario: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = type(later.create_event(timing=False, blocking=False, interprocess=False))
    monkeypatch.setattr(made, "wait", lambda self, stream: None)
    assert scenario(gate, DEADLINE_S) == ["later", "first"]


def _rerecorded_before_wait(gate: Any, patience_s: float) -> list[str]:
    """A wait is for the latest record at the time of the wait."""
    log, idle, first, second = Log(), Stream(), Stream(), Stream()
    event = idle.record_event()
    first.launch(gate.hold)
    first.launch(log.ran.append, "first")
    event.record(first)
    second.wait_event(event)
    second.launch(log.later)
    return _finish(log, gate, patience_s, first, second)


def test_wait_is_for_the_latest_record(backend: DeviceBackend, gate: Any) -> None:
    assert _rerecorded_before_wait(gate, PATIENCE_S) == ["first", "later"]


def _host_waits(gate: Any, wait: Callable[[Stream, Event], None]) -> list[str]:
    """The host waits for a stream's work, which is let go on meanwhile."""
    ran: list[str] = []
    work = Stream()
    work.launch(gate.hold)
    work.launch(ran.append, "work")
    event = work.record_event()
    opener = threading.Timer(PATIENCE_S, gate.open)
    opener.start()
    wait(work, event)
    seen = [*ran, "host"]
    opener.join()
    work.synchronize()
    return seen


@pytest.mark.parametrize(
    "wait",
    [
        lambda work, event: work.synchronize(),
        lambda work, event: event.synchronize(),
        lambda work, event: synchronize(),
        lambda work, event: synchronize(work.device),
    ],
    ids=["stream", "event", "device", "named device"],
)
def test_host_waits(backend: DeviceBackend, gate: Any, wait: Callable[[Stream, Event], None]) -> None:
    assert _host_waits(gate, wait) == ["work", "host"]


def test_host_sees_nothing_without_a_wait(later: DeviceBackend, gate: Any) -> None:
    assert _host_waits(gate, lambda work, event: None) == ["host"]


def test_other_device_is_not_waited_for(later: DeviceBackend, gate: Any) -> None:
    held = Stream(device=1)
    held.launch(gate.hold)
    synchronize(0)
    assert not held.query()
    gate.open()
    synchronize(1)
    assert held.query()


def test_device_waits_for_streams_that_were_dropped(backend: DeviceBackend, gate: Any) -> None:
    ran: list[str] = []
    work = Stream()
    work.launch(gate.hold)
    work.launch(ran.append, "work")
    del work
    gate.open()
    synchronize()
    assert ran == ["work"]


def test_streams_are_independent(later: DeviceBackend, gate: Any) -> None:
    held, free, ran = Stream(), Stream(), []
    held.launch(gate.hold)
    free.launch(ran.append, "free")
    free.synchronize()
    default_stream().launch(ran.append, "default")
    default_stream().synchronize()
    assert ran == ["free", "default"]
    assert not held.query()


def test_side_stream_runs_beside_a_busy_default_stream(later: DeviceBackend, gate: Any) -> None:
    ran: list[str] = []
    default_stream().launch(gate.hold)
    side = Stream()
    side.launch(ran.append, "side")
    side.synchronize()
    assert ran == ["side"]
    assert not current_stream().query()


def test_work_of_a_stream_runs_in_order(backend: DeviceBackend, gate: Any) -> None:
    work, ran = Stream(), []
    count = 20 if backend.name == "cuda" else 100  # the driver holds about two dozen back, then the host
    work.launch(gate.hold)
    for number in range(count):
        work.launch(ran.append, number)
    gate.open()
    work.synchronize()
    assert ran == list(range(count))


def test_threads_never_run_in_one_stream_at_a_time(backend: DeviceBackend) -> None:
    work, inside, overlaps, count = Stream(), [], [], []

    def body() -> None:
        inside.append(1)
        if len(inside) > 1:
            overlaps.append(1)
        count.append(1)
        inside.pop()

    def enqueue() -> None:
        for _ in range(200):
            work.launch(body)

    threads = [threading.Thread(target=enqueue) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    work.synchronize()
    assert (len(count), overlaps) == (800, [])


def _host_array(backend: DeviceBackend, count: int) -> np.ndarray[Any, Any]:
    """Host memory that a copy writes later than the call: on CUDA it is pinned."""
    pinned = getattr(backend, "empty_pinned", None)
    array = np.empty(count) if pinned is None else pinned(8 * count).view(np.float64)
    array[...] = -1.0
    return array


def _copies(backend: DeviceBackend, gate: Any, patience_s: float) -> tuple[float, ...]:
    """Copy device 0 to device 1 on one stream, then on to the host on another that waits."""
    source, middle = backend.empty((4,), np.float64, 0), backend.empty((4,), np.float64, 1)
    target, copied = _host_array(backend, 4), threading.Event()
    first, second = Stream(device=0), Stream(device=1)
    setup = Stream(device=0)
    backend.copy(source, np.arange(4.0), setup._impl)
    backend.copy(middle, np.full(4, -2.0), setup._impl)
    setup.synchronize()
    first.launch(gate.hold)
    backend.copy(middle, source, first._impl)
    second.wait_stream(first)
    backend.copy(target, middle, second._impl)
    second.launch(copied.set)
    copied.wait(patience_s)
    gate.open()
    first.synchronize()
    second.synchronize()
    return tuple(target.tolist())


def test_copies_follow_waits(backend: DeviceBackend, gate: Any) -> None:
    assert _copies(backend, gate, PATIENCE_S) == (0.0, 1.0, 2.0, 3.0)


def test_copies_go_wrong_without_the_wait(later: DeviceBackend, gate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "wait_stream", lambda self, other: None)
    assert _copies(later, gate, DEADLINE_S) == (-2.0, -2.0, -2.0, -2.0)


def test_copy_takes_strides_and_holds_arrays(backend: DeviceBackend, gate: Any) -> None:
    work, target = Stream(), np.zeros((3, 4))
    source = backend.empty((4, 3), np.float64, 0)
    backend.copy(source, np.arange(12.0).reshape(4, 3), work._impl)
    if backend.name == "cuda":
        gate.open()  # a copy to pageable memory waits for its turn inside the call
    work.launch(gate.hold)
    backend.copy(target[::-1], source.T, work._impl)
    del source
    gate.open()
    work.synchronize()
    np.testing.assert_array_equal(target[::-1], np.arange(12.0).reshape(4, 3).T)


def test_streams_made_current_elsewhere_order_nothing(later: DeviceBackend, gate: Any) -> None:
    held, ran = Stream(device=1), []
    held.launch(gate.hold)
    with device(1):
        current_stream().launch(ran.append, "default of 1")
        current_stream().synchronize()
    assert ran == ["default of 1"]
