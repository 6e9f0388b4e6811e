"""What a rank knows of its queued device work, in one process, on events that the test completes."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ncclcomm.communicator import watchdog, watchdog_queued
from ncclcomm.communicator.board import BOARD, Running
from ncclcomm.communicator.watchdog_answers import DIED, SILENT, Group, lost_ranks, ranks_in_call, report
from ncclcomm.communicator.watchdog_queued import MOST_MARKS, QueuedCall, QueuedWork, note_queued
from ncclcomm.devices.host import HostBackend
from ncclcomm.errors import DeviceError
from ncclcomm.topology import Topology

WITHIN_S = 20.0


class _Device:
    """A device whose work, recorded behind by events, ends when the test says so."""

    immediate = False

    def __init__(self) -> None:
        self.made = 0
        self.recorded = 0
        self.ended = 0
        """How many of the recorded marks are reached, in order."""
        self.is_capturing = False
        self.poll: Callable[[], None] = lambda: None
        """Runs in every poll."""
        self.record: Callable[[], None] = lambda: None
        """Runs in every record."""

    def create_event(self, **options: bool) -> Any:
        """A new event."""
        assert not any(options.values())
        self.made += 1
        return _Event(self)

    def record_current(self, event: Any, device: int) -> bool:
        """Record an event behind the work so far."""
        assert device == 3
        self.record()
        if self.is_capturing:
            return False
        self.recorded += 1
        event.mark = self.recorded
        return True


class _Event:
    """An event of that device."""

    def __init__(self, device: _Device) -> None:
        self._device = device
        self.mark = 0

    def poll(self) -> bool:
        """True once the device has come to its mark."""
        self._device.poll()
        return self.mark <= self._device.ended


@pytest.fixture
def device() -> _Device:
    """A device."""
    return _Device()


@pytest.fixture
def work(device: _Device) -> Iterator[QueuedWork]:
    """The queued work of a communicator, on the board."""
    made: Any = QueuedWork("queued", device, 3)  # type: ignore[arg-type]
    BOARD.queued["queued"] = made
    yield made
    BOARD.queued.pop("queued", None)


def _call(number: int, array: Any = None, limit_s: float | None = None) -> Running:
    """A call that returns now."""
    return Running("queued", "all_reduce", number, (array,), limit_s)


def _oldest(work: QueuedWork) -> int:
    """The number of the oldest call whose work has not ended."""
    call = work.oldest()
    return -1 if call is None else call.number


def test_work_ends_in_order_and_events_are_used_again(device: _Device, work: QueuedWork) -> None:
    for number in range(1000):
        work.note(_call(number))
        device.ended = max(0, device.recorded - 3)
        work.drop_ended()
        assert _oldest(work) == max(0, number - 2)
    assert device.made <= 4
    device.ended = device.recorded
    work.drop_ended()
    assert work.oldest() is None


def test_a_long_queue_takes_few_events(device: _Device, work: QueuedWork) -> None:
    for number in range(1000):
        work.note(_call(number))
    assert device.made == MOST_MARKS
    assert _oldest(work) == 0
    device.ended = MOST_MARKS - 1
    work.drop_ended()
    assert _oldest(work) == 999, "the last event must stand for all the calls that got none of their own"
    device.ended = 999
    work.drop_ended()
    assert _oldest(work) == 999
    work.note(_call(1000))
    device.ended = 1000
    work.drop_ended()
    assert _oldest(work) == 1000
    assert device.made == MOST_MARKS


def test_the_oldest_call_stays_the_same_object(device: _Device, work: QueuedWork) -> None:
    work.note(_call(0))
    work.note(_call(1))
    first = work.oldest()
    assert first is not None
    assert work.oldest() is first
    assert work.is_oldest(first)
    device.ended = 1
    work.drop_ended()
    assert not work.is_oldest(first)
    assert _oldest(work) == 1


def test_time_counts_from_the_end_of_the_work_before(device: _Device, work: QueuedWork) -> None:
    work.note(_call(0))
    work.note(_call(1))
    before = time.monotonic()
    device.ended = 1
    work.drop_ended()
    call = work.oldest()
    assert call is not None
    assert call.since_s >= before
    since_before = time.monotonic() - before
    assert call.queued_s >= since_before


def test_a_captured_call_is_no_work(device: _Device, work: QueuedWork) -> None:
    device.is_capturing = True
    for number in range(2 * MOST_MARKS):
        work.note(_call(number))
    assert work.oldest() is None
    assert device.made == 1
    device.is_capturing = False
    for number in range(2 * MOST_MARKS):
        work.note(_call(number))
    device.is_capturing = True
    work.note(_call(777))
    device.ended = MOST_MARKS - 1
    work.drop_ended()
    assert _oldest(work) == 2 * MOST_MARKS - 1


def test_arrays_are_not_kept(device: _Device, work: QueuedWork) -> None:
    array = np.ones((2, 3))
    gone = weakref.ref(array)
    work.note(_call(0, array))
    del array
    assert gone() is None
    call = work.oldest()
    assert call is not None
    assert "shape (2, 3), float64" in report(call, _group(1), [SILENT], "why")


@pytest.mark.parametrize("odd", [object(), SimpleNamespace(shape=1), None])
def test_what_is_no_array_is_not_described(work: QueuedWork, odd: Any) -> None:
    work.note(_call(5, odd))
    call = work.oldest()
    assert call is not None
    assert "all_reduce (call 5) was queued 0 s ago" in report(call, _group(1), [SILENT], "why")


def test_a_broken_device_ends_nothing(device: _Device, work: QueuedWork) -> None:
    def fail() -> None:
        raise DeviceError("broken")

    work.note(_call(0))
    device.poll = fail
    with pytest.raises(DeviceError):
        work.drop_ended()
    assert work.oldest() is None


def test_a_communicator_closed_while_its_device_is_asked(device: _Device, work: QueuedWork) -> None:
    work.note(_call(0))
    device.poll = work.forget
    device.ended = 1
    work.drop_ended()
    assert work.oldest() is None


@pytest.mark.parametrize(("immediate", "addresses"), [(True, ("somewhere",)), (False, ())])
def test_nothing_is_noted_where_nothing_is_queued_or_nobody_watches(immediate: bool, addresses: Any) -> None:
    member = SimpleNamespace(name="idle", backend=HostBackend(1, immediate=immediate), device=0, addresses=addresses)
    note_queued(SimpleNamespace(_member=member), _call(0))  # type: ignore[arg-type]
    assert "idle" not in BOARD.queued


def test_work_on_a_stream_of_the_host_backend() -> None:
    backend = HostBackend(2, immediate=False)
    member = SimpleNamespace(name="host", backend=backend, device=1, addresses=("somewhere",))
    comm: Any = SimpleNamespace(_member=member)
    gate = threading.Event()
    backend.current_stream(0).launch(gate.wait)
    try:
        note_queued(comm, _call(0))
        BOARD.queued["host"].drop_ended()
        assert _oldest(BOARD.queued["host"]) == -1, "another device's stream is in the way"
        backend.current_stream(1).launch(gate.wait)
        note_queued(comm, _call(1))
        BOARD.queued["host"].drop_ended()
        assert _oldest(BOARD.queued["host"]) == 1
        gate.set()
        backend.synchronize(1)
        BOARD.queued["host"].drop_ended()
        assert _oldest(BOARD.queued["host"]) == -1
    finally:
        gate.set()
        BOARD.queued.pop("host", None)


def _group(size: int, *addresses: Any) -> Group:
    """A group on one node."""
    hosts = addresses or tuple(SimpleNamespace(host="h", host_name="h") for _ in range(size))
    return Group("queued", Topology((0,) * size), 0, hosts)


def _answer(queued: int | None = None, last: int = 4, running: int | None = None, leaving: str = "") -> dict[str, Any]:
    """A rank's answer: the oldest call of its queued work, its last call, the call it is in."""
    told = {"group": "queued", "call": "all_reduce", "detail": "", "for_s": 7.0}
    inside = {"group": "queued", "call": "gather", "detail": "", "for_s": 3.0, "on_device": False}
    return {
        "running": [] if running is None else [{**inside, "number": running}],
        "queued": [] if queued is None else [{**told, "number": queued}],
        "last": {"queued": ("all_reduce", last)},
        "broken": {},
        "leaving": leaving,
        "line": "train.py:45 in step",
    }


def test_a_report_of_queued_work() -> None:
    call = QueuedCall("queued", "all_reduce", 4, (np.ones(2),), None)
    answers = [_answer(4), _answer(last=3), _answer(2), DIED, _answer(4, running=5), _answer(last=4, running=5)]
    assert ranks_in_call(call, answers) == {0, 2, 4}
    assert report(call, _group(6), answers, "still waiting").splitlines() == [
        "ncclcomm: rank 0 (node 0, local 0): all_reduce (call 4, shape (2,), float64) was queued 0 s ago, its device "
        "work has not ended: still waiting",
        "  queued, and not ended, on the device of: ranks 0, 2, 4",
        "  rank 1 (node 0, local 1): last finished all_reduce (call 3), at train.py:45 in step",
        "  rank 2 (node 0, local 2): its device has not ended all_reduce (call 2), queued 7 s ago",
        "  rank 3 (node 0, local 3): its process has ended",
        "  rank 5 (node 0, local 5): in gather (call 5) for 3 s, at train.py:45 in step",
    ]
    nobody_missing = report(call, _group(2), [_answer(4), _answer(4)], "still waiting")
    assert "nobody is missing" in nobody_missing
    assert "a stream waits for other work" in nobody_missing


def test_the_report_of_a_call_names_queued_work() -> None:
    call = Running("queued", "gather", 5, (), None)
    answers = [_answer(4, running=5), _answer(3, running=5), _answer(4)]
    text = report(call, _group(3), answers, "still waiting")
    assert "in this call: ranks 0-1" in text
    for rank, number in enumerate((4, 3)):
        assert f"  rank {rank} (node 0, local {rank}): its device has not ended all_reduce (call {number})" in text
    assert "rank 2 (node 0, local 2): last finished all_reduce (call 4), its device has not ended" in text
    assert "nobody is missing" not in text


@pytest.mark.parametrize(
    ("other", "gone"),
    [
        (_answer(last=3, leaving="left"), {1}),
        (_answer(last=4, leaving="left"), set()),
        (DIED, {1}),
        (SILENT, set()),
        (_answer(last=3), set()),
    ],
)
def test_ranks_that_queued_work_waits_for_in_vain(other: Any, gone: set[int]) -> None:
    call = QueuedCall("queued", "all_reduce", 4, (), None)
    answers = [_answer(4), other]
    assert lost_ranks(call, answers).gone == gone
    call.complete_at_s = time.monotonic() - 2 * watchdog.LEFT_S
    assert watchdog._will_not_come(call, answers) == gone


@pytest.fixture
def dog(monkeypatch: pytest.MonkeyPatch) -> Iterator[watchdog.Watchdog]:
    """A watchdog of the communicator, which tells of what takes over a second and ends nothing."""
    ends: list[str] = []
    monkeypatch.setattr(watchdog.Watchdog, "_end", lambda self, entry, group, answers, why: ends.append(why))
    made = watchdog.Watchdog(lambda status: None)
    made.stall_s = 1.0
    made.add(_group(1, made.address), is_launched=False)
    made.ends = ends  # type: ignore[attr-defined]
    yield made
    made.groups.clear()


def _wait_for(condition: Callable[[], Any], dog: watchdog.Watchdog) -> None:
    """Wait until the watchdog has done something."""
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_work_that_does_not_end_is_told_once(
    device: _Device, work: QueuedWork, dog: watchdog.Watchdog, capsys: pytest.CaptureFixture[str]
) -> None:
    work.note(_call(0))
    call = work.oldest()
    assert call is not None
    _wait_for(lambda: call.is_told, dog)
    looked_at = call.look_at_s
    _wait_for(lambda: call.look_at_s > looked_at, dog)
    assert capsys.readouterr().err.count("its device work has not ended: still waiting") == 1
    device.ended = 1
    _wait_for(lambda: work.oldest() is None, dog)
    assert dog.ends == []  # type: ignore[attr-defined]


def test_a_limit_ends_the_job(device: _Device, work: QueuedWork, dog: watchdog.Watchdog) -> None:
    work.note(_call(0, limit_s=0.5))
    _wait_for(lambda: dog.ends, dog)  # type: ignore[attr-defined]
    assert dog.ends[0] == "the time limit of 0.5 s is over"  # type: ignore[attr-defined]


def test_a_process_that_was_stopped_looks_again(device: _Device, work: QueuedWork, dog: watchdog.Watchdog) -> None:
    polled = threading.Semaphore(0)
    device.poll = polled.release
    work.note(_call(0, limit_s=60))
    assert polled.acquire(timeout=WITHIN_S)
    device.ended = 1
    call = work.oldest()
    if call is not None:  # as if the process had been stopped in between
        call.since_s -= 100
    _wait_for(lambda: work.oldest() is None, dog)
    assert dog.ends == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("blocks", ["poll", "record"])
def test_a_driver_that_does_not_answer_is_no_hindrance(
    device: _Device, work: QueuedWork, dog: watchdog.Watchdog, monkeypatch: pytest.MonkeyPatch, blocks: str
) -> None:
    monkeypatch.setattr(watchdog, "POLL_S", 0.1)
    gate = threading.Event()
    work.note(_call(0, limit_s=0.5))
    setattr(device, blocks, gate.wait)
    calling = threading.Thread(target=lambda: work.note(_call(1)))
    calling.start()
    try:
        _wait_for(lambda: dog.ends, dog)  # type: ignore[attr-defined]
    finally:
        gate.set()
        calling.join(WITHIN_S)
    device.ended = 2
    _wait_for(lambda: work.oldest() is None, dog)


def test_while_a_call_waits_its_own_report_tells(
    device: _Device, work: QueuedWork, dog: watchdog.Watchdog, capsys: pytest.CaptureFixture[str]
) -> None:
    work.note(_call(0))
    call, entry = work.oldest(), Running("queued", "gather", 1, (), None)
    assert call is not None
    BOARD.enter(entry)
    try:
        _wait_for(lambda: entry.is_told, dog)
        _wait_for(lambda: call.look_at_s > 2 * dog.stall_s, dog)
        told = capsys.readouterr().err
        assert told.count("still waiting") == 1
        assert "its device has not ended all_reduce (call 0)" in told
    finally:
        BOARD.leave(entry, took_place=True)
    _wait_for(lambda: call.is_told, dog)


def test_a_communicator_that_is_not_watched_any_more(device: _Device, work: QueuedWork, dog: watchdog.Watchdog) -> None:
    work.note(_call(0))
    call = work.oldest()
    assert call is not None
    dog.remove("queued")
    dog.remove("queued")
    assert "queued" not in BOARD.queued
    assert not work.is_oldest(call), "a watchdog that is looking at it must not take it for work that does not end"


def test_a_device_that_breaks_is_said_once(
    device: _Device, work: QueuedWork, dog: watchdog.Watchdog, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise DeviceError("broken")

    device.poll = fail
    for number in range(2):
        work.note(_call(number))
        _wait_for(lambda: work.oldest() is None, dog)
    assert capfd.readouterr().err.count("asking a device about its work failed, and goes on: DeviceError: broken") == 1


def test_work_is_told_to_others_once_it_is_known_not_to_have_ended(
    device: _Device, work: QueuedWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    work.note(_call(0, np.ones(3)))
    assert BOARD.state("queued")["queued"] == []
    monkeypatch.setattr(watchdog_queued, "TOLD_FROM_S", 0.0)
    (told,) = BOARD.state("queued")["queued"]
    assert (told["group"], told["call"], told["number"], told["detail"]) == (
        "queued",
        "all_reduce",
        0,
        "shape (3,), float64",
    )
    assert BOARD.state("another")["queued"] == []
