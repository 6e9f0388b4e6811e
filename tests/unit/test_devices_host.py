"""The host backend's own life: its threads, forks, and the end of the process."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ncclcomm.devices import Event, Stream, current_device, synchronize, use_backend
from ncclcomm.devices.host import HostBackend
from ncclcomm.devices.host_array import HostArray
from ncclcomm.errors import ArgumentError

DEADLINE_S = 30.0

PRELUDE = """
import atexit, gc, os, signal, sys, threading
import numpy as np
from ncclcomm.devices import *
from ncclcomm.devices.host import HostBackend
from ncclcomm.devices import registry
from ncclcomm.errors import *
registry._backend = HostBackend(2, immediate={immediate})

def in_child(body):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        status = 1
        try:
            body()
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""


def _run(body: str, *, immediate: bool = False, before_import: str = "", prints: bool = False) -> None:
    """Run a program; it must end well, with nothing on stderr, and on stdout only if it prints."""
    program = before_import + PRELUDE.format(immediate=immediate) + body
    done = subprocess.run(
        # From Python 3.12 on a fork beside threads warns by itself.
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", program],
        timeout=DEADLINE_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert prints or not done.stdout


both_modes = pytest.mark.parametrize("immediate", [True, False], ids=["sync", "async"])


@both_modes
def test_fork_of_an_idle_process(immediate: bool) -> None:
    _run(
        """
work, ran = Stream(device=1), []
work.launch(ran.append, 1)
event = work.record_event()
synchronize(1)
def child():
    event.synchronize()
    assert event.query()
    work.launch(ran.append, 2)
    Stream().wait_stream(work)
    default_stream(0).wait_event(work.record_event())
    default_stream(0).launch(ran.append, 3)
    synchronize(1)
    synchronize(0)
    assert ran == [1, 2, 3], ran
in_child(child)
assert ran == [1]
""",
        immediate=immediate,
    )


def test_fork_with_work_queued() -> None:
    _run(
        """
opened, ran = threading.Event(), []
work, other = Stream(), Stream()
work.launch(opened.wait)
work.launch(ran.append, 1)
event = work.record_event()
other.wait_event(event)
def fails(call, words):
    try:
        call()
    except DeviceError as error:
        assert words in str(error), error
    else:
        raise AssertionError('no error')
def child():
    for call in (event.query, event.synchronize, lambda: Stream().wait_event(event)):
        fails(call, 'forked')
    fails(work.synchronize, 'before the fork')
    work.launch(ran.append, 2)
    event.record(work)
    event.synchronize()
    work.synchronize()
    assert ran == [2], ran
in_child(child)
opened.set()
synchronize()
assert ran == [1], ran
"""
    )


@both_modes
def test_fork_while_threads_use_streams(immediate: bool) -> None:
    _run(
        """
shared, ending = Stream(), threading.Event()
def busy():
    while not ending.is_set():
        shared.launch(int)
        Stream(device=1).launch(int)
        shared.record_event().synchronize()
threads = [threading.Thread(target=busy) for _ in range(3)]
for thread in threads:
    thread.start()
def child():
    ran = []
    try:
        shared.synchronize()
        synchronize(0)
        synchronize(1)
    except DeviceError as error:
        assert 'before the fork' in str(error), error
    shared.launch(ran.append, 1)
    Stream(device=1).launch(ran.append, 2)
    shared.record_event().synchronize()
    assert ran[0] == 1
for _ in range(10):
    in_child(child)
ending.set()
for thread in threads:
    thread.join()
""",
        immediate=immediate,
    )


@both_modes
def test_fork_inside_work(immediate: bool) -> None:
    _run(
        """
work, ran = Stream(), []
def child():
    other = Stream()
    other.launch(ran.append, 1)
    other.synchronize()
    assert ran == [1]
work.launch(in_child, child)
work.launch(ran.append, 2)
work.synchronize()
assert ran == [2]
""",
        immediate=immediate,
    )


def test_child_of_a_fork_inside_work_is_no_worker() -> None:
    _run(
        """
reads, writes = os.pipe()
children = []
work = Stream()
opened = threading.Event()
work.launch(opened.wait)
work.launch(lambda: children.append(os.fork()))
work.launch(os.write, writes, b'x')
opened.set()
work.synchronize()
os.waitpid(children[0], 0)
os.close(writes)
assert os.read(reads, 10) == b'x'
"""
    )


@both_modes
def test_exit_with_objects_in_globals(immediate: bool) -> None:
    _run(
        """
work = Stream()
event, context, chosen = Event(True), stream(work), device(1)
context.__enter__()
chosen.__enter__()
for _ in range(20):
    work.launch(sum, range(1000))
event.record(work)
""",
        immediate=immediate,
    )


def test_exit_with_work_queued_that_prints_and_copies() -> None:
    _run(
        """
big = np.zeros(1 << 18)
streams = [Stream() for _ in range(8)]
for first, second in zip(streams, streams[1:]):
    for _ in range(200):
        first.launch(np.copyto, big, 1)
        first.launch(print, 'x' * 1000)
    second.wait_stream(first)
""",
        prints=True,
    )


def test_exit_while_work_waits_for_good() -> None:
    _run("Stream().launch(threading.Event().wait)\ndefault_stream().wait_stream(Stream())\n")


@both_modes
def test_streams_work_in_exit_handlers(immediate: bool) -> None:
    _run(
        """
work = Stream()
work.launch(int)
""",
        immediate=immediate,
        # Registered before ncclcomm's own, the handler runs after it.
        before_import="""
import atexit
def at_the_end():
    ran, late = [], Stream()
    late.launch(ran.append, 1)
    work.launch(ran.append, 2)
    late.wait_stream(work)
    late.record_event().synchronize()
    synchronize()
    assert ran == [1, 2], ran
atexit.register(at_the_end)
""",
    )


def _workers() -> list[threading.Thread]:
    """The live workers of host streams."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("ncclcomm-host-stream")]


def test_worker_lives_from_first_work_to_the_streams_end() -> None:
    before = set(_workers())
    with use_backend(HostBackend(1, immediate=False)):
        work, ran = Stream(), []
        work.record_event().synchronize()
        assert set(_workers()) == before
        work.launch(ran.append, 1)
        (worker,) = set(_workers()) - before
        work.launch(ran.append, 2)
        del work
        gc.collect()
        worker.join(DEADLINE_S)
        assert not worker.is_alive()
        assert ran == [1, 2]


def test_synchronous_streams_have_no_threads() -> None:
    before = set(_workers())
    with use_backend(HostBackend(1)):
        work = Stream()
        work.launch(int)
        work.synchronize()
        assert set(_workers()) == before


def test_synchronous_work_has_run_when_the_call_returns() -> None:
    with use_backend(HostBackend(1)):
        ran: list[int] = []
        Stream().launch(ran.append, 1)
        assert ran == [1]


def test_synchronous_stream_is_busy_while_another_thread_runs_its_work() -> None:
    inside, opened, ran = threading.Event(), threading.Event(), []

    def body() -> None:
        inside.set()
        assert opened.wait(DEADLINE_S)
        ran.append("work")

    with use_backend(HostBackend(1)), ThreadPoolExecutor(2) as pool:
        work = Stream()
        launched = pool.submit(work.launch, body)
        assert inside.wait(DEADLINE_S)
        assert not work.query()
        waited = pool.submit(synchronize)
        opened.set()
        launched.result(DEADLINE_S)
        waited.result(DEADLINE_S)
        assert ran == ["work"]
        assert work.query()


def test_synchronous_work_that_waits_for_its_own_event() -> None:
    with use_backend(HostBackend(1)):
        work, seen = Stream(), []

        def body() -> None:
            event = work.record_event()
            seen.append(event.query())
            work.wait_event(event)
            event.synchronize()

        work.launch(body)
        with pytest.raises(RuntimeError, match="wait for itself"):
            work.synchronize()
        assert seen == [False]


def test_keyboard_interrupt_leaves_the_call_at_once() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with use_backend(HostBackend(1)):
        work, ran = Stream(), []
        with pytest.raises(KeyboardInterrupt):
            work.launch(interrupt)
        work.launch(ran.append, 1)
        work.synchronize()
        assert ran == [1]


def test_many_streams_leave_nothing_behind() -> None:
    with use_backend(HostBackend(1, immediate=False)):
        before = len(_workers())
        for _ in range(50):
            work = Stream()
            work.launch(int)
            work.synchronize()
        del work
        gc.collect()
        for worker in _workers()[before:]:
            worker.join(DEADLINE_S)
        assert len(_workers()) <= before


def test_arrays_of_the_backend() -> None:
    backend = HostBackend(2)
    array = backend.empty((2, 3), ">f4", 1)
    assert isinstance(array, HostArray)
    assert (array.shape, array.dtype, array.flags.c_contiguous) == ((2, 3), np.dtype(">f4"), True)
    assert (backend.device_of(array), backend.device_of(np.zeros(1)), backend.device_of("no")) == (1, None, None)


def test_stream_and_event_of_two_backends() -> None:
    with use_backend(HostBackend(1)):
        event = Event()
        event.record()
    with use_backend(HostBackend(1)), pytest.raises(ArgumentError, match="two backends"):
        event.record()


@both_modes
def test_handles_are_unique(immediate: bool) -> None:
    with use_backend(HostBackend(2, immediate=immediate)):
        streams = [Stream(device=number % 2) for number in range(20)]
        assert len({each.handle for each in streams}) == 20
        assert 0 not in {each.handle for each in streams}
        assert current_device() == 0
