"""Stream and Event objects: identity, priority, queries, time, errors of their work, arguments."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from ncclcomm.devices import Event, ExternalStream, Stream, current_stream, default_stream, device, stream, synchronize
from ncclcomm.devices.base import DeviceBackend
from ncclcomm.errors import ArgumentError, DeviceError, UnsupportedError

DEADLINE_S = 30.0

pytestmark = pytest.mark.usefixtures("backend")


@pytest.mark.parametrize("asked", [0, -1, -2, -100, 5, np.int64(-1)])
def test_priority_is_clamped_and_reported(backend: DeviceBackend, asked: int) -> None:
    least, most = backend.priority_range()
    assert Stream(priority=asked).priority == min(max(asked, most), least)
    assert Stream(None, asked).priority == min(max(asked, most), least)


@pytest.mark.parametrize("priority", [True, 1.0, "high", None])
def test_priority_that_is_no_int(priority: Any) -> None:
    with pytest.raises(ArgumentError, match="priority="):
        Stream(priority=priority)


def test_unknown_keyword_is_named() -> None:
    with pytest.raises(ArgumentError, match="stream_id"):
        Stream(stream_id=3)


def test_default_device_is_the_current_one() -> None:
    with device(1):
        assert [Stream().device, Stream(None).device, Stream(-1).device, Stream("cuda").device] == [1] * 4
        assert default_stream() == default_stream(1)
    assert Stream().device == 0


def test_equality_and_hash() -> None:
    first, second = Stream(), Stream()
    with first:
        again = current_stream()
    assert again == first
    assert again is not first
    assert {first: "found"}[again] == "found"
    assert first != second
    assert first != first.handle
    assert default_stream(0) != default_stream(1)
    assert len({first, second, again, default_stream(0), default_stream(1), default_stream(0)}) == 4


def test_attributes_and_repr() -> None:
    made = Stream(device=1, priority=-1)
    assert (made.device, made.cuda_stream) == (1, made.handle)
    assert f"{made.handle:#x}" in repr(made)
    assert "device 1" in repr(made)
    assert "not recorded" in repr(Event())
    assert "device 1" in repr(made.record_event())


def test_query(later: DeviceBackend, gate: Any) -> None:
    work = Stream()
    assert work.query()
    work.launch(gate.hold)
    event = work.record_event()
    assert not work.query()
    assert not event.query()
    gate.open()
    event.synchronize()
    assert event.query()
    work.synchronize()
    assert work.query()


def test_query_after_waiting(backend: DeviceBackend) -> None:
    work = Stream()
    for _ in range(200):
        work.launch(int)
        event = work.record_event()
        event.synchronize()
        assert work.query()
        assert event.query()


def test_unrecorded_event_waits_for_nothing(gate: Any) -> None:
    event, work = Event(), Stream()
    assert (event.query(), event.device) == (True, None)
    event.synchronize()
    event.wait()
    event.wait(work)
    work.wait_event(event)
    work.launch(int)
    work.synchronize()


def test_record_event_gives_the_event() -> None:
    event, work = Event(), Stream(device=1)
    assert work.record_event(event) is event
    assert event.device == 1
    assert isinstance(work.record_event(), Event)
    event.record(work)
    with device(1):
        event.record()


def test_event_stays_on_its_device() -> None:
    event = Stream(device=0).record_event()
    with pytest.raises(ArgumentError, match="device 0.*device 1"):
        event.record(Stream(device=1))
    event.wait(Stream(device=1))
    assert event.device == 0


def test_elapsed_time(backend: DeviceBackend) -> None:
    work, start, end = Stream(), Event(enable_timing=True), Event(True)
    start.record(work)
    work.launch(sum, range(200_000))
    end.record(work)
    end.synchronize()
    assert start.elapsed_time(end) > 0.0
    assert end.elapsed_time(start) == -start.elapsed_time(end)
    assert start.elapsed_time(start) == 0.0


def _timed(number: int | None) -> Event:
    """A timing event, recorded on a device or (None) never."""
    event = Event(enable_timing=True)
    if number is not None:
        event.record(default_stream(number))
        event.synchronize()
    return event


def test_elapsed_time_messages(later: DeviceBackend, gate: Any) -> None:
    held, pending = Stream(), Event(enable_timing=True)
    held.launch(gate.hold)
    pending.record(held)
    done = _timed(0)
    wrong = {
        "start event measures no time": (Event(), done),
        "end event measures no time": (done, held.record_event()),
        "start event was never recorded": (_timed(None), done),
        "end event was never recorded": (done, _timed(None)),
        "device 0 and the end event on device 1": (done, _timed(1)),
        "start event is not complete": (pending, done),
        "end event is not complete": (done, pending),
    }
    with device(1):
        for message, (start, end) in wrong.items():
            with pytest.raises(ArgumentError, match=message):
                start.elapsed_time(end)
            assert current_stream() == default_stream(1)


def test_errors_come_at_the_next_synchronisation_of_the_stream() -> None:
    work, ran = Stream(device=1), []
    work.launch(int, "no number")
    work.launch(ran.append, "after")
    work.launch(dict, 3)
    with pytest.raises(DeviceError, match=r"(?s)device 1.*ValueError.*no number") as caught:
        work.synchronize()
    assert isinstance(caught.value.__cause__, ValueError)
    assert (caught.value.name, ran) == ("ValueError", ["after"])
    work.synchronize()
    synchronize(1)


def test_errors_come_at_the_next_synchronisation_of_the_device() -> None:
    work, other = Stream(), Stream()
    work.launch(int, "no number")
    other.synchronize()
    synchronize(1)
    with pytest.raises(DeviceError, match="no number"):
        synchronize()
    work.synchronize()
    synchronize()


def test_errors_outlive_their_stream() -> None:
    Stream().launch(int, "no number")
    gc.collect()
    with pytest.raises(DeviceError, match="no number"):
        synchronize()


def test_system_exit_in_work_is_an_error_like_others() -> None:
    work = Stream()
    work.launch(exit, 3)
    with pytest.raises(DeviceError, match="SystemExit"):
        work.synchronize()


def test_work_that_waits_for_its_own_stream() -> None:
    work = Stream()
    work.launch(work.synchronize)
    with pytest.raises(DeviceError, match="wait for itself"):
        work.synchronize()


def test_work_that_enqueues_runs_after_itself() -> None:
    work, ran = Stream(), []

    def body() -> None:
        work.launch(ran.append, "enqueued inside")
        ran.append("inside")

    work.launch(body)
    work.synchronize()
    work.synchronize()
    assert ran == ["inside", "enqueued inside"]


def test_arguments_are_dropped_after_the_work() -> None:
    class Thing:
        def touch(self) -> None:
            """Do nothing."""

    thing = Thing()
    gone = threading.Event()
    weakref.finalize(thing, gone.set)
    work = Stream()
    work.launch(thing.touch)
    del thing
    # No synchronisation: it would be the last piece of work, whose arguments alone might be kept.
    assert gone.wait(DEADLINE_S)


@pytest.mark.parametrize("value", [None, 7, "stream", object()])
def test_not_a_stream(value: Any) -> None:
    name = type(value).__name__
    with pytest.raises(ArgumentError, match=name):
        Stream().wait_stream(value)
    if value is not None:
        for call in (stream, Event().record, Event().wait):
            with pytest.raises(ArgumentError, match=name):
                call(value)


@pytest.mark.parametrize("value", [7, "event", object()])
def test_not_an_event(value: Any) -> None:
    for call in (Stream().wait_event, Stream().record_event, Event(True).elapsed_time):
        with pytest.raises(ArgumentError, match=type(value).__name__):
            call(value)
    with pytest.raises(ArgumentError, match="NoneType"):
        Stream().wait_event(None)  # type: ignore[arg-type]


def test_launch_of_no_callable() -> None:
    with pytest.raises(ArgumentError, match="int"):
        Stream().launch(3)  # type: ignore[arg-type]


def test_event_between_processes(later: DeviceBackend, gate: Any) -> None:
    # What other processes see of it: tests/unit/test_devices_ipc.py and tests/gpu/test_streams.py.
    work, other, event = Stream(device=1), Stream(), Event(interprocess=True)
    work.launch(gate.hold)
    event.record(work)
    event.wait(other)
    assert [event.query(), other.record_event().query()] == [False, False]
    gate.open()
    event.synchronize()
    other.synchronize()
    assert event.query()
    assert [event.device, len(event.ipc_handle())] == [1, 64]
    with pytest.raises(ArgumentError, match="measures no time"):
        event.elapsed_time(event)
    made = Event(interprocess=True)
    with device(1):
        made.ipc_handle()
    assert made.device == 1


def test_arguments_of_events_between_processes(backend: DeviceBackend) -> None:
    with pytest.raises(ArgumentError, match="interprocess=True"):
        Event().ipc_handle()
    with pytest.raises(ArgumentError, match="exclude"):
        Event(enable_timing=True, interprocess=True)
    given: Any
    for given, found in ((b"1", "1 bytes"), (bytes(65), "65 bytes"), ("x" * 64, "str"), (None, "NoneType")):
        with pytest.raises(ArgumentError, match=f"64 bytes, this is {found}"):
            Event.from_ipc_handle(0, given)
    with pytest.raises(ArgumentError, match="64 bytes"):
        Event(_handle=b"1")
    with pytest.raises(ArgumentError, match="device 99 is not there"):
        Event.from_ipc_handle(99, Event(interprocess=True).ipc_handle())
    if backend.name == "host":
        with pytest.raises(ArgumentError, match="no handle of an event of virtual devices"):
            Event.from_ipc_handle(0, bytes(64))


def test_external_events() -> None:
    assert Event(external=False).query()
    with pytest.raises(UnsupportedError, match="external=True"):
        Event(external=True)


def test_external_stream_of_the_host(backend: DeviceBackend) -> None:
    if backend.name != "host":
        pytest.skip("only the host backend has no streams of others")
    with pytest.raises(UnsupportedError, match="host backend"):
        ExternalStream(1234)
