"""The watchdog's parts in one process: sockets, threads, and what answers mean."""

from __future__ import annotations

import errno
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ncclcomm
from flavours import missing
from ncclcomm.communicator import watchdog, watchdog_address
from ncclcomm.communicator.board import BOARD, Board, Running, describe_call
from ncclcomm.communicator.watchdog_address import Address
from ncclcomm.communicator.watchdog_answers import DIED, SILENT, Group, lost_ranks
from ncclcomm.errors import ArgumentError
from ncclcomm.topology import Topology

WITHIN_S = 20.0


def state(last: int = -1, leaving: str = "", runs: int | None = None) -> dict[str, Any]:
    """A rank's answer: its last call, why it leaves, and the call it is in."""
    running = [] if runs is None else [{"group": "g", "call": "reduce", "number": runs, "on_device": False}]
    return {"running": running, "last": {"g": ("reduce", last)}, "broken": {}, "leaving": leaving, "line": ""}


@pytest.mark.parametrize(
    ("others", "gone", "left", "is_complete"),
    [
        ([state(last=4), state(last=4)], set(), set(), False),
        ([state(last=5, leaving="left"), state(last=4)], set(), {1}, False),
        ([state(last=5, leaving="left"), SILENT], set(), {1}, False),
        ([state(last=5, leaving="left"), state(last=4, runs=5)], set(), {1}, True),
        ([state(last=5, leaving="left"), state(last=6)], set(), {1}, True),
        ([state(last=4, leaving="left"), state(last=4)], {1}, set(), False),
        ([DIED, state(last=5, leaving="left")], {1}, {2}, True),
    ],
)
def test_which_ranks_are_lost(others: list[Any], gone: set[int], left: set[int], is_complete: bool) -> None:
    entry = Running("g", "reduce", 5, (), None)
    lost = lost_ranks(entry, [state(last=4, runs=5), *others])
    assert (lost.gone, lost.left, lost.is_complete) == (gone, left, is_complete)


def test_a_killed_process_with_a_live_child_has_died() -> None:
    program = """
import json, os, signal, sys
from dataclasses import asdict
from ncclcomm.communicator.watchdog import Watchdog
dog = Watchdog(lambda status: None)
if os.fork() == 0:
    print(json.dumps(asdict(dog.address)), flush=True)
    sys.stdin.read()
    os._exit(0)
signal.pause()
"""
    root = str(Path(__file__).parents[2])
    dog = watchdog.Watchdog(lambda status: None)
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        group = Group("g", Topology((0, 0)), 0, (dog.address, Address(**told)))
        assert isinstance(dog.ask(group)[1], dict)
        process.send_signal(signal.SIGKILL)
        process.wait(WITHIN_S)
        try:
            assert dog.ask(group)[1] == DIED
        finally:
            process.stdin.close()


class _FailsOnce:
    """A listening socket for which no descriptor is free at first."""

    def __init__(self, inner: socket.socket) -> None:
        self._inner = inner
        self.failures = 0

    def accept(self) -> tuple[socket.socket, Any]:
        """Fail once, then accept."""
        if not self.failures:
            self.failures = 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._inner.accept()


def test_what_fails_in_the_watchdog_ends_neither_thread_nor_job(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    inner, address = watchdog_address.listen()
    fails_once = _FailsOnce(inner)
    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    looks = threading.Semaphore(0)

    def look(*args: Any) -> None:
        looks.release()
        raise RuntimeError("looked")

    monkeypatch.setattr(watchdog.Watchdog, "_look", look)
    with monkeypatch.context() as patch:
        patch.setattr(watchdog, "listen", lambda: (fails_once, address))
        dog = watchdog.Watchdog(lambda status: None)
    group = Group("g", Topology((0,)), 0, (dog.address,))
    dog.add(group, is_launched=False)
    entry = Running("g", "barrier", 0, (), None)
    BOARD.enter(entry)
    try:
        assert looks.acquire(timeout=WITHIN_S)
        assert looks.acquire(timeout=WITHIN_S)
    finally:
        BOARD.leave(entry, took_place=False)
    for said in (b"GET / HTTP/1.0\n", b"[1]\n", b'{"token": 1}\n', b""):
        with socket.create_connection(("127.0.0.1", address.port), WITHIN_S) as connection:
            connection.sendall(said)
    with monkeypatch.context() as patch:
        patch.setattr(BOARD, "state", lambda group: 1 / 0)
        assert _ask_alone(address) == SILENT
        assert dog.ask(group) == [SILENT]
    assert isinstance(_ask_alone(address), dict)
    assert fails_once.failures == 1
    assert not raised
    assert capfd.readouterr().err.count("ncclcomm: the watchdog's") == 1


def _ask_alone(address: Address) -> Any:
    """What another process's watchdog would be told."""
    asking = watchdog.Watchdog(lambda status: None)
    return asking.ask(Group("g", Topology((0,)), 0, (address,)))[0]


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
        yield listening.getsockname()[1]


def test_many_silent_ranks_take_no_longer_than_one(silent_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "ANSWER_S", 0.4)
    monkeypatch.setattr(watchdog, "ANSWERS_S", 0.6)
    dog, alive = watchdog.Watchdog(lambda status: None), watchdog.Watchdog(lambda status: None)
    silent = [replace(dog.address, port=silent_port, token=str(number)) for number in range(60)]
    group = Group("g", Topology((0,) * 61), 0, (*silent, alive.address))
    start = time.monotonic()
    for _ in range(3):
        answers = dog.ask(group)
    assert time.monotonic() - start < 3 * 1.2
    assert answers[:60] == [SILENT] * 60
    assert isinstance(answers[60], dict), "those that did not answer last time must be asked after the others"


def test_it_listens_at_ipv6_addresses_too() -> None:
    dog = watchdog.Watchdog(lambda status: None)
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        missing("IPv6", f"this host has no ::1: {error}", ci_has_it=False)
    said = {"token": dog.address.token, "group": ""}
    connection = watchdog._send("::1", dog.address.port, said, time.monotonic() + WITHIN_S)
    with connection, connection.makefile("rb") as lines:
        assert b"running" in lines.readline()


def test_an_array_that_cannot_say_what_it_is() -> None:
    class Odd:
        dtype = "float64"

        @property
        def shape(self) -> tuple[int, ...]:
            raise RuntimeError("freed")

    assert describe_call((Odd(), np.ones((2, 3)))) == "shape (2, 3), float64"


def test_closed_communicators_are_forgotten_in_time() -> None:
    board = Board()
    for number in range(500):
        entry = Running(str(number), "close", 0, (), None)
        board.leave(entry, took_place=True)
        board.close(entry.group)
    assert len(board.last) < 100
    assert board.state("499")["last"] == {"499": ("close", 0)}


def test_init_again_with_other_settings_is_refused() -> None:
    with ncclcomm.init(check=5, timeout_s=3):
        assert ncclcomm.init(check=5, timeout_s=3.0) is ncclcomm.init()
        for other in ({"check": 6}, {"check": True}, {"timeout_s": 4}, {"timeout_s": "3"}):
            with pytest.raises(ArgumentError, match=f"{next(iter(other))} is .*but the world was joined with"):
                ncclcomm.init(**other)


def test_a_device_that_cannot_be_made_current_leaves_the_communicator_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = ncclcomm.Communicator()
    with monkeypatch.context() as patch:
        patch.setattr(comm._member, "on_device", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            comm.barrier()

    class Refuses:
        def __enter__(self) -> None:
            raise LookupError

        def __exit__(self, *_: object) -> None:
            raise AssertionError("never entered")

    with monkeypatch.context() as patch:
        patch.setattr(comm._member, "on_device", Refuses)
        with pytest.raises(LookupError):
            comm.barrier()
    comm.barrier()
    comm.close()
