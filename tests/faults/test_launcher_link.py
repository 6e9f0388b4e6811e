"""The connections between `ncclcomm run` and the ranks' watchers, both ends, without MPI."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flavours import clean_env
from ncclcomm.launcher.command import CHILD
from ncclcomm.launcher.link import Event, Links

LIMIT_S = 20.0


class Launcher:
    """The end of `ncclcomm run`, with what it has heard."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.links = Links(self.selector, 4, remote=False, hosts=())
        self.token, _, place = self.links.variable.partition("@")
        self.port = int(place.rpartition(":")[2])
        self.events: list[Event] = []

    def hear(self, kind: str) -> Event:
        """Read until there is an event of that kind, which is taken away."""
        return self.wait(lambda: next((e for e in self.events if e.kind == kind), None))

    def wait(self, ready: Callable[[], Event | None]) -> Event:
        """Read until the condition gives an event."""
        end = time.monotonic() + LIMIT_S
        while (found := ready()) is None:
            assert time.monotonic() < end, self.events
            for key, _ in self.selector.select(0.1):
                self.events += self.links.read(key)
        self.events.remove(found)
        return found

    def call(self, text: str) -> socket.socket:
        """A caller that says something."""
        caller = socket.create_connection(("127.0.0.1", self.port), LIMIT_S)
        caller.sendall(text.encode())
        return caller


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end has closed a connection; it may not have read all."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    end = Launcher()
    yield end
    end.links.close()
    end.selector.close()


@contextmanager
def start_child(launcher: Launcher, tmp_path: Path, source: str, link: str = "") -> Iterator[subprocess.Popen[str]]:
    """Rank 5's watcher, and its program, which ends with it."""
    program = tmp_path / "program.py"
    program.write_text(source)
    environ = {**clean_env(), "SLURM_PROCID": "5", "NCCLCOMM_JOB_LINK": link or launcher.links.variable}
    argv = [sys.executable, CHILD, program]
    child = subprocess.Popen(argv, env=environ, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        assert child.stderr is not None
        child.stderr.close()


@pytest.mark.parametrize("words", ["hello wrong 0 h1", "hello", "", "GET / HTTP/1.1", "x" * 5000, "end 0 0 0"])
def test_strangers_are_turned_away(launcher: Launcher, words: str) -> None:
    with launcher.call(words if len(words) > 100 else f"{words}\n") as stranger, launcher.call("") as silent:
        with launcher.call(f"hello {launcher.token} 7 h1\n") as ours:
            assert launcher.hear("start").watcher.rank == "7"
            assert ours.recv(100) == b"welcome\n"
        assert launcher.hear("lost").watcher.rank == "7"
        assert is_closed(stranger)
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):
            silent.recv(1)
    assert launcher.events == []


def test_lines_may_come_in_pieces(launcher: Launcher) -> None:
    with launcher.call(f"hello {launcher.token[:5]}") as ours:
        ours.sendall(f"{launcher.token[5:]} 3 h2\nreport {b'Trace'.hex()}\nreport {b'back'.hex()}\nend 1 ".encode())
        launcher.hear("start")
        launcher.hear("report")
        assert launcher.hear("report").watcher.report == b"Traceback"
        ours.sendall(b"0 0\n")
        end = launcher.hear("end")
        assert (end.status, end.killed_by, end.asked, end.watcher.host) == (1, 0, False, "h2")


def test_a_program_runs_where_an_address_of_several_answers(launcher: Launcher, tmp_path: Path) -> None:
    link = f"{launcher.token}@127.0.0.3,127.0.0.1:{launcher.port}"
    with start_child(launcher, tmp_path, "import sys; sys.exit(3)", link) as child:
        assert launcher.hear("start").watcher.rank == "5"
        end = launcher.hear("end")
        assert (end.status, end.killed_by) == (3, 0)
        end.watcher.send("bye")
        assert child.wait(LIMIT_S) == 3


@pytest.mark.parametrize("answers", [False, True], ids=["nobody there", "another program there"])
def test_a_program_is_ended_where_no_launcher_answers(launcher: Launcher, tmp_path: Path, answers: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        if not answers:
            other.close()
        source = f"from pathlib import Path\nimport time\nPath({str(tmp_path / 'up')!r}).touch()\ntime.sleep(1000)"
        with start_child(launcher, tmp_path, source, f"token@127.0.0.1:{port}") as child:
            if answers:
                called, _ = other.accept()
                called.sendall(b"220 mail.example.com ESMTP\r\n")
            assert child.wait(LIMIT_S) == 128 + signal.SIGKILL
            if answers:
                called.close()
            assert child.stderr is not None
            text = child.stderr.read()
            assert "rank 5 on host" in text
            assert f"can't reach `ncclcomm run`, and is ended (127.0.0.1:{port}: " in text


def test_a_broken_connection_ends_the_program_and_its_daemons(launcher: Launcher, tmp_path: Path) -> None:
    source = (
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import os, time; os.setsid(); print(\"up\"); time.sleep(1000)'],"
        "                 stdout=sys.stderr)\n"
        "time.sleep(1000)"
    )
    with start_child(launcher, tmp_path, source) as child:
        watcher = launcher.hear("start").watcher
        watcher.connection.shutdown(socket.SHUT_RDWR)
        assert child.wait(LIMIT_S) == 128 + signal.SIGKILL
        assert child.stderr is not None
        child.stderr.read()  # ends when no process has it any more


def test_a_long_report_comes_whole_and_before_the_end(launcher: Launcher, tmp_path: Path) -> None:
    source = f"raise ValueError('x' * {300_000} + 'end')"
    with start_child(launcher, tmp_path, source) as child:
        end = launcher.hear("end")
        assert end.watcher.report.endswith(b"xend\n")
        assert end.watcher.report.count(b"x") >= 300_000
        assert child.poll() is None, "a failed rank must stay until it is let go"
        end.watcher.send("bye")
        assert child.wait(LIMIT_S) == 1


def test_a_failed_program_keeps_its_connections_until_it_is_let_go(launcher: Launcher, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as peer:
        source = f"import socket\npeer = socket.create_connection(('127.0.0.1', {peer.getsockname()[1]}))\n1 / 0"
        with start_child(launcher, tmp_path, source) as child:
            connection, _ = peer.accept()
            with connection:
                end = launcher.hear("end")
                connection.setblocking(False)
                with pytest.raises(BlockingIOError):
                    connection.recv(1)
                end.watcher.send("bye")
                connection.settimeout(LIMIT_S)
                assert connection.recv(1) == b""
                assert child.wait(LIMIT_S) == 1


def test_a_fork_of_the_program_says_its_own_words(launcher: Launcher, tmp_path: Path) -> None:
    source = "import os\nif os.fork() == 0: raise KeyError('of the fork')\nos.wait()"
    with start_child(launcher, tmp_path, source) as child:
        end = launcher.hear("end")
        assert (end.status, end.watcher.report) == (0, b"")
        end.watcher.send("bye")
        assert child.wait(LIMIT_S) == 0
        assert child.stderr is not None
        assert child.stderr.read().count("KeyError: 'of the fork'") == 1


def test_a_program_that_is_asked_twice_saves_its_work_once(launcher: Launcher, tmp_path: Path) -> None:
    source = (
        "import os, signal, sys, time\n"
        "asked = []\n"
        "def save(*_):\n"
        "    asked.append(1)\n"
        "    os.write(2, b'asked\\n')\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(10 + len(asked)))\n"
        "os.write(2, b'up\\n')\n"
        "while True: time.sleep(1000)"
    )
    with start_child(launcher, tmp_path, source) as child:
        watcher = launcher.hear("start").watcher
        assert child.stderr is not None
        assert child.stderr.readline() == "up\n"
        os.kill(child.pid, signal.SIGTERM)  # as SLURM does
        assert child.stderr.readline() == "asked\n"
        watcher.send(f"signal {int(signal.SIGTERM)}")
        watcher.send(f"signal {int(signal.SIGUSR1)}")
        end = launcher.hear("end")
        assert (end.status, end.asked) == (11, True)
        end.watcher.send("bye")
        assert child.wait(LIMIT_S) == 11


def test_a_signal_that_asks_for_nothing_does_not_pass_for_a_wish_to_end(launcher: Launcher, tmp_path: Path) -> None:
    source = "import os, signal\nsignal.signal(signal.SIGUSR1, lambda *_: None)\nos.write(2, b'up\\n')\nsignal.pause()"
    with start_child(launcher, tmp_path, source) as child:
        watcher = launcher.hear("start").watcher
        assert child.stderr is not None
        assert child.stderr.readline() == "up\n"
        watcher.send(f"signal {int(signal.SIGUSR1)}")
        end = launcher.hear("end")
        assert (end.status, end.asked) == (0, False)
        end.watcher.send("bye")
        assert child.wait(LIMIT_S) == 0
