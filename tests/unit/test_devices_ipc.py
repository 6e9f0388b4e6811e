"""Events of virtual devices between processes: waits, records on either side, and processes that end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ncclcomm.devices import Event, Stream, device, use_backend
from ncclcomm.devices.host import HostBackend
from ncclcomm.errors import ArgumentError, DeviceError

DEADLINE_S = 30.0
MODES = ["sync", "async"]

PROGRAM = """
import json, os, signal, socket, sys, threading
signal.alarm({deadline})
signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as some programs do
socket.setdefaulttimeout(0.001)
from ncclcomm.devices import *
from ncclcomm.devices import registry
from ncclcomm.devices.host import HostBackend
from ncclcomm.errors import *
registry._backend = HostBackend(2, immediate={immediate})
stream, gate, threads = Stream(), threading.Event(), []

def hold(event, stream, gate):
    '''Record the event behind work that lasts until the gate is opened.'''
    recorded = threading.Event()
    def body():
        event.record(stream)
        recorded.set()
        gate.wait()
    begin(stream.launch, body)
    recorded.wait()

def begin(call, *args):
    '''Call in a thread.'''
    threads.append(threading.Thread(target=call, args=args, daemon=True))
    threads[-1].start()

def end():
    '''Wait for the threads.'''
    while threads:
        threads.pop().join()

def fork(body):
    '''Have a child do something, which then lives until it is killed.'''
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm({deadline})
        os.close(told)
        os.write(tell, repr(attempt(body)).encode())
        os.close(tell)
        null = os.open('/dev/null', os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        signal.pause()
    os.close(tell)
    children.append(pid)
    with open(told) as told:
        return told.read()

def attempt(call):
    '''What a call gives, or its error in words.'''
    try:
        return call()
    except Exception as error:
        return f'{{type(error).__name__}}: {{error}}'

children = []
for line in sys.stdin:
    print(json.dumps(attempt(lambda: eval(json.loads(line), globals()))), flush=True)
for child in children:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


class Process:
    """Another process, which evaluates what it is sent. It ends by itself at the deadline, and so does who asks it."""

    def __init__(self, mode: str) -> None:
        program = PROGRAM.format(immediate=mode == "sync", deadline=int(DEADLINE_S))
        self.popen = subprocess.Popen(
            # From Python 3.12 on a fork beside threads warns by itself.
            [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, expression: str) -> Any:
        """The value of an expression, or its error in words."""
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        print(json.dumps(expression), file=self.popen.stdin, flush=True)
        line = self.popen.stdout.readline()
        assert line, f"it ended: {self.popen.poll()}"
        return json.loads(line)

    def kill(self) -> None:
        """End it at once."""
        self.popen.kill()
        self.popen.wait()

    def close(self) -> None:
        """Let it end; it must do so well unless it was killed, and say nothing."""
        assert self.popen.stdin is not None
        if self.popen.stdin.closed:
            return
        _, errors = self.popen.communicate(timeout=DEADLINE_S)
        assert (self.popen.returncode, errors) in ((0, ""), (-signal.SIGKILL, ""))


@contextmanager
def _processes(*modes: str) -> Iterator[list[Process]]:
    """Processes, of which none is left."""
    with ExitStack() as stack:
        made = [Process(mode) for mode in modes]
        for process in made:
            stack.enter_context(process.popen)
            stack.callback(process.kill)
        yield made
        for process in made:
            process.close()


def _share(maker: Process, opener: Process) -> None:
    """Have an event made by one process and opened by another, as `event`."""
    handle = maker("globals().update(event=Event(interprocess=True)) or event.ipc_handle().hex()")
    assert opener(f"globals().update(event=Event.from_ipc_handle(0, bytes.fromhex('{handle}')))") is None


@pytest.mark.parametrize("maker_mode", MODES)
@pytest.mark.parametrize("opener_mode", MODES)
def test_one_records_and_the_other_waits(maker_mode: str, opener_mode: str) -> None:
    with _processes(maker_mode, opener_mode) as (maker, opener):
        _share(maker, opener)
        for process in (maker, opener):
            assert process("event.query()") is True
            assert process("event.synchronize() or event.wait(stream) or stream.query()") is True
        for one, other in ((maker, opener), (opener, maker)):
            for process in (one, other):
                process("gate.clear() or globals().update(side=Stream(), ran=[])")
            one("hold(event, stream, gate)")
            assert [process("event.query()") for process in (one, other)] == [False, False]
            # Its event tells when the thread is past the wait; streams may wait inside the call.
            other("begin(lambda: event.synchronize() or ran.append('host'))")
            other("begin(lambda: side.wait_event(event) or side.launch(ran.append, 'stream') or side.synchronize())")
            assert other("ran") == []
            one("gate.set()")
            assert other("end() or sorted(ran)") == ["host", "stream"]
            assert [process("event.query()") for process in (one, other)] == [True, True]
            assert one("end() or stream.synchronize()") is None


def test_a_wait_keeps_its_mark_and_later_records_are_seen() -> None:
    with _processes("async", "async") as (maker, opener):
        _share(maker, opener)
        maker("globals().update(second=Stream(), later=threading.Event())")
        maker("hold(event, stream, gate)")
        opener("globals().update(side=Stream(), ran=[])")
        assert opener("side.wait_event(event) or side.launch(ran.append, 1) or ran") == []
        maker("hold(event, second, later)")
        maker("gate.set()")
        assert opener("side.synchronize() or ran") == [1]
        assert opener("event.query()") is False
        maker("later.set()")
        assert opener("event.synchronize() or event.query()") is True
        assert opener("event.record(side) or side.synchronize() or event.query()") is True
        assert maker("event.query()") is True


def test_whoever_finds_a_mark_reached_can_tell_the_others() -> None:
    # The mark of this process must not be reached before others find that it is.
    with use_backend(HostBackend(1, immediate=False)):
        work, event = Stream(), Event(interprocess=True)
        opened = Event.from_ipc_handle(0, event.ipc_handle())
        for _ in range(500):
            event.record(work)
            event.synchronize()
            assert opened.query()


def _is_served(handle: str) -> bool:
    """True while the server of a handle has a socket, or a connection to it."""
    return f"@ncclcomm-events-{handle[48:80]}" in Path("/proc/net/unix").read_text(encoding="utf-8")


@pytest.mark.parametrize("mode", MODES)
def test_the_maker_is_killed(mode: str) -> None:
    with _processes("async", mode) as (maker, opener):
        _share(maker, opener)
        handle = maker("event.ipc_handle().hex()")
        assert _is_served(handle)
        maker("hold(event, stream, gate)")
        opener("globals().update(ran=[], side=Stream())")
        opener("begin(lambda: side.wait_event(event) or side.launch(ran.append, 1))")
        opener("begin(lambda: ran.append(attempt(event.synchronize)))")
        pid = maker.popen.pid
        files = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
        assert not [name for name in files if name.startswith("/") and name != "/dev/null"]
        maker.kill()
        ended = f"process {pid}, which made the event, has ended"
        assert ended in opener("end() or side.synchronize()")
        after, told = sorted(opener("ran"), key=str)
        assert told.startswith(f"DeviceError: {ended}")
        assert after == 1  # as after any work that raises
        for call in ("event.query()", "event.synchronize()", "event.wait(side)", "event.record(side)"):
            assert opener(call).startswith(f"DeviceError: {ended}")
        assert opener("Event.from_ipc_handle(0, event.ipc_handle())").startswith(f"DeviceError: {ended}")
        assert opener("side.synchronize()") is None
    assert not _is_served(handle)


@pytest.mark.parametrize("mode", MODES)
def test_who_recorded_is_killed(mode: str) -> None:
    with _processes(mode, "async", "async") as (maker, opener, third):
        _share(maker, opener)
        handle = maker("event.ipc_handle().hex()")
        third(f"globals().update(event=Event.from_ipc_handle(0, bytes.fromhex('{handle}')))")
        opener("hold(event, stream, gate)")
        third("globals().update(side=Stream()) or side.wait_event(event)")
        pid = opener.popen.pid
        opener.kill()
        lost = f"the event was recorded in process {pid}, which ended before"
        assert lost in third("side.synchronize()")
        for process in (maker, third):
            for call in ("event.query()", "event.synchronize()", "event.wait(stream)"):
                assert process(call).startswith(f"DeviceError: {lost}")
        maker("event.record(stream)")
        for process in (maker, third):
            assert process("event.wait(stream) or event.synchronize() or event.query()") is True


def test_the_maker_ends_with_work_undone() -> None:
    with _processes("async", "async") as (maker, opener):
        _share(maker, opener)
        maker("hold(event, stream, gate)")
        opener("stream.wait_event(event)")
        maker.close()
        assert "has ended" in opener("stream.synchronize()")


def test_the_maker_drops_the_event() -> None:
    with _processes("sync", "sync") as (maker, opener):
        _share(maker, opener)
        opener("hold(event, stream, gate)")
        maker("globals().pop('event') and None")
        # Until the work before the mark is done somebody may wait for it.
        assert opener("gate.set() or end() or stream.synchronize()") is None
        assert "has dropped it" in opener("event.query()")


def test_children_that_were_forked_keep_nothing_open() -> None:
    with ExitStack() as stack, _processes("async", "async", "async") as (maker, opener, third):
        _share(maker, opener)
        handle = maker("event.ipc_handle().hex()")
        third(f"globals().update(event=Event.from_ipc_handle(0, bytes.fromhex('{handle}')))")
        opener("hold(event, stream, gate)")
        third("begin(stream.wait_event, event)")
        # A child is a process as any other: it asks the one that made the event.
        for process in (maker, opener):
            assert process("fork(event.query)") == "False"
        for process in (maker, opener):
            said = process("fork(lambda: event.record(Stream()) or event.synchronize() or event.query())")
            assert said == "True"
            for child in process("children"):
                stack.callback(os.kill, child, signal.SIGKILL)
        opener("hold(event, Stream(), gate)")
        third("stream.wait_event(event)")
        pid = opener.popen.pid
        opener.kill()
        assert f"recorded in process {pid}" in third("end() or stream.synchronize()")
        maker("hold(event, stream, gate)")
        third("stream.wait_event(event)")
        maker.kill()
        assert "has ended" in third("stream.synchronize()")


def test_a_forked_child_makes_events_of_its_own() -> None:
    with _processes("async", "async") as (maker, opener):
        _share(maker, opener)
        said = maker("fork(lambda: globals().update(mine=Event(interprocess=True)) or mine.ipc_handle().hex())")
        handle = said.strip("'")
        assert handle != maker("event.ipc_handle().hex()")
        assert opener(f"Event.from_ipc_handle(0, bytes.fromhex('{handle}')).query()") is True


WORK_THAT_FORKS = """
def body():
    event.record(stream)
    pid = os.fork()
    if pid:
        assert os.waitpid(pid, 0)[1] == 0

def after():
    if os.getpid() != parent:  # the child goes on in the work, and finds what comes behind it
        said = attempt(stream.synchronize)
        os._exit('before this process was forked' not in said)

parent = os.getpid()
"""


def test_a_fork_within_the_work_before_a_mark() -> None:
    with _processes("sync", "sync") as (maker, opener):
        _share(maker, opener)
        assert maker(f"exec({WORK_THAT_FORKS!r}, globals())") is None
        assert maker("stream.launch(body) or after() or stream.synchronize()") is None
        assert opener("event.query()") is True


def test_marks_take_no_descriptors() -> None:
    few = "__import__('resource').setrlimit(__import__('resource').RLIMIT_NOFILE, (64, 64))"
    with _processes("async", "async") as (maker, opener):
        _share(maker, opener)
        maker(few), opener(few)
        maker("stream.launch(gate.wait)")
        maker("hold(event, Stream(), gate)")
        for _ in range(200):
            maker("event.record(stream)")
            assert opener("event.wait(stream)") is None
        maker("gate.set()")
        assert opener("stream.synchronize() or event.query()") is True


def test_devices_of_shared_events() -> None:
    with use_backend(HostBackend(3)):
        event = Event(interprocess=True)
        with device(1):
            handle = event.ipc_handle()
        assert (event.device, len(handle)) == (1, 64)
        with pytest.raises(ArgumentError, match="device 1.*device 0"):
            event.record(Stream(device=0))
        with device(2):
            assert Event(_handle=handle).device == 2
        opened = Event.from_ipc_handle("cuda:1", handle)
        assert (opened.device, opened.ipc_handle()) == (1, handle)
        with pytest.raises(ArgumentError, match="device 1.*device 2"):
            opened.record(Stream(device=2))
        opened.wait(Stream(device=2))
        opened.record(Stream(device=1))
        assert event.query()


@pytest.mark.parametrize("immediate", [True, False], ids=MODES)
def test_work_that_waits_for_its_own_shared_event(immediate: bool) -> None:
    with use_backend(HostBackend(1, immediate=immediate)):
        work, event = Stream(), Event(interprocess=True)
        work.launch(lambda: event.record(work) or event.synchronize())  # type: ignore[func-returns-value]
        with pytest.raises(DeviceError, match="wait for itself"):
            work.synchronize()


def test_answers_that_nobody_took_are_passed_over() -> None:
    with use_backend(HostBackend(1)):
        event = Event(interprocess=True)
        event.record()
        impl: Any = event._impl
        from ncclcomm.devices import host_ipc

        impl._link.send(host_ipc._REQUEST.pack(host_ipc._LATEST, bytes(16), 0, os.getpid(), 0))
        assert event.query()


def test_strangers_do_not_disturb() -> None:
    from ncclcomm.devices import host_ipc

    with use_backend(HostBackend(1)):
        event = Event(interprocess=True)
        _, _, server, _ = host_ipc._HANDLE.unpack(event.ipc_handle())
        request = host_ipc._REQUEST.pack(b"r", bytes(16), 5, 1, 1)
        for message in (b"", b"x", bytes(1000), request):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.settimeout(DEADLINE_S)
                stranger.connect(host_ipc._address(server))
                if message:
                    stranger.send(message)
                    state = stranger.recv(100)[:1]
                    assert state == (host_ipc._NO_EVENT if message is request else b"")
            event.record()
            assert event.query()
