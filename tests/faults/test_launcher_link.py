"""The connections between `ncclcomm run` and the ranks' watchers, both ends, without MPI."""

from __future__ import annotations

import math
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from flavours import clean_env, missing
from ncclcomm.launcher import link as link_module
from ncclcomm.launcher.command import CHILD
from ncclcomm.launcher.link import Event, Links
from ncclcomm.launcher.watch import prove

LIMIT_S = 20.0


class Launcher:
    """The end of `ncclcomm run`, with what it has heard."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.events: list[Event] = []
        self.open(remote=False, hosts=())

    def open(self, *, remote: bool, hosts: Sequence[str]) -> None:
        """Listen."""
        self.links = Links(self.selector, 4, remote=remote, hosts=hosts)
        self.token, _, place = self.links.variable.partition("@")
        self.port = int(place.rpartition(":")[2])

    def hear(self, kind: str) -> Event:
        """Read until there is an event of that kind, which is taken away."""
        return self.wait(lambda: next((e for e in self.events if e.kind == kind), None))

    def wait(self, ready: Callable[[], Event | None]) -> Event:
        """Read until the condition gives an event."""
        end = time.monotonic() + LIMIT_S
        while (found := ready()) is None:
            assert time.monotonic() < end, self.events
            self.turn()
        self.events.remove(found)
        return found

    def turn(self) -> None:
        """Read what is there, or soon is."""
        for key, _ in self.selector.select(min(0.1, max(0.0, self.links.due_at - time.monotonic()))):
            self.events += self.links.read(key)
        self.links.tend()

    def call(self, text: str = "", address: str = "127.0.0.1") -> socket.socket:
        """A caller that says something."""
        caller = socket.create_connection((address, self.port), LIMIT_S)
        caller.sendall(text.encode())
        return caller

    def join(self, rank: str, host: str, address: str = "127.0.0.1") -> socket.socket:
        """A caller that is a rank's watcher, welcomed."""
        caller = self.call("", address)
        nonce = self.line_to(caller).removeprefix("challenge ")
        proof = prove(self.token, "watcher", nonce, "mine", rank, host)
        caller.sendall(f"hello {proof} mine {rank} {host}\n".encode())
        assert self.line_to(caller) == f"welcome {prove(self.token, 'launcher', nonce, 'mine')}"
        return caller

    def line_to(self, caller: socket.socket) -> str:
        """The next line that a caller is sent."""
        caller.setblocking(False)
        line, end = b"", time.monotonic() + LIMIT_S
        while not line.endswith(b"\n"):
            assert time.monotonic() < end, line
            try:
                line += caller.recv(1)
            except BlockingIOError:
                self.turn()
        caller.settimeout(LIMIT_S)
        return line.decode().rstrip("\n")


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end has closed a connection; it may not have read all."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        return True
    return True


def is_open(connection: socket.socket) -> bool:
    """Whether the other end has not closed a connection."""
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            continue
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False
    return False


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


STRANGERS = ["hello wrong mine 0 h1", "hello {token} 0 h1", "hello", "", "GET / HTTP/1.1", "x" * 5000, "end 0 0 0"]


@pytest.mark.parametrize("words", STRANGERS)
def test_strangers_are_turned_away(launcher: Launcher, words: str) -> None:
    said = words if len(words) > 100 else f"{words.format(token=launcher.token)}\n"
    with launcher.call(said) as stranger, launcher.call() as silent:
        with launcher.join("7", "h1"):
            assert launcher.hear("start").watcher.rank == "7"
        assert launcher.hear("lost").watcher.rank == "7"
        assert is_closed(stranger)
        assert is_open(silent)
    assert launcher.events == []


def test_silent_strangers_are_dropped_and_ranks_are_not(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    with launcher.join("7", "h1") as ours, launcher.call() as silent:
        launcher.line_to(silent)
        assert launcher.links.due_at < time.monotonic() + LIMIT_S
        monkeypatch.setattr(link_module, "_STRANGER_LIMIT_S", 0.0)
        launcher.turn()
        assert is_closed(silent)
        assert is_open(ours)
        assert launcher.links.due_at == math.inf


def test_many_strangers_keep_no_rank_away(launcher: Launcher) -> None:
    with ExitStack() as stack:
        strangers = []
        for _ in range(100):
            strangers.append(stack.enter_context(launcher.call()))
            launcher.turn()
        stack.enter_context(launcher.join("7", "h1"))
        assert launcher.hear("start").watcher.rank == "7"
        assert is_closed(strangers[0])
        assert 0 < sum(map(is_open, strangers)) < 40


def test_no_file_left_for_a_connection(launcher: Launcher) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with launcher.call() as first:
        launcher.line_to(first)
        with launcher.call() as second:
            # The lowest free number is above the limit, as if that many files were open.
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
            try:
                launcher.turn()
                assert is_closed(first), "a caller makes room"
                launcher.turn()
                assert launcher.links.due_at < time.monotonic() + LIMIT_S
                assert launcher.selector.select(0) == [], "a listener that can take no call must not keep the CPU busy"
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            assert launcher.line_to(second).startswith("challenge ")


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_other_hosts_are_heard_by_both_protocols(launcher: Launcher, address: str) -> None:
    if ":" in address and not (socket.has_dualstack_ipv6() and Path("/proc/net/if_inet6").exists()):
        missing("IPv6", "the kernel has none", ci_has_it=False)
    launcher.links.close()
    launcher.open(remote=True, hosts=["localhost"])
    with launcher.join("3", "h2", address):
        assert launcher.hear("start").watcher.rank == "3"


def test_loopback_is_an_address_for_ranks_of_this_host_alone(launcher: Launcher) -> None:
    def addresses(*hosts: str) -> list[str]:
        launcher.links.close()
        launcher.open(remote=True, hosts=hosts)
        return launcher.links.variable.partition("@")[2].rpartition(":")[0].split(",")

    elsewhere = addresses("192.0.2.77")
    assert "127.0.0.1" not in elsewhere or elsewhere == ["127.0.0.1"], "without a network it is the only one"
    for host in ("localhost", f"{socket.gethostname()}.example"):
        assert addresses("192.0.2.77", host, "192.0.2.78")[-1] == "127.0.0.1"


def test_lines_may_come_in_pieces(launcher: Launcher) -> None:
    with launcher.join("3", "h2") as ours:
        launcher.hear("start")
        ours.sendall(f"report {b'Trace'.hex()}\nreport {b'back'.hex()}\nend 1 ".encode())
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
        end.watcher.send("bye\nleave")
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
                called.settimeout(LIMIT_S)
                assert called.recv(1) == b"", "a stranger is told nothing"
            assert child.wait(LIMIT_S) == 128 + signal.SIGKILL
            if answers:
                called.close()
            assert child.stderr is not None
            text = child.stderr.read()
            assert "rank 5 on host" in text
            assert f"can't reach `ncclcomm run`, and is ended (127.0.0.1:{port}: " in text


def test_an_impostor_learns_no_token_and_is_not_followed(launcher: Launcher, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.2", launcher.port)) as impostor:
        link = f"{launcher.token}@127.0.0.2,127.0.0.1:{launcher.port}"
        with start_child(launcher, tmp_path, "import time\ntime.sleep(1000)", link):
            called, _ = impostor.accept()
            with called, called.makefile() as lines:
                called.sendall(b"challenge 00\n")
                words = lines.readline().split()
                assert (words[0], words[3]) == ("hello", "5")
                assert launcher.token not in words
                called.sendall(f"welcome {words[1]}\n".encode())
                assert launcher.hear("start").watcher.rank == "5", "it goes on to the next address"


@pytest.mark.parametrize("stream", ["None", "object()"])
def test_a_program_without_streams_is_heard_when_it_fails(launcher: Launcher, tmp_path: Path, stream: str) -> None:
    with start_child(launcher, tmp_path, f"import sys\nsys.stdout = sys.stderr = {stream}\n1 / 0") as child:
        end = launcher.hear("end")
        assert end.status == 1
        assert b"ZeroDivisionError" in end.watcher.report
        end.watcher.send("bye\nleave")
        assert child.wait(LIMIT_S) == 1


def test_a_watcher_ends_what_is_left_and_leaves_when_told(launcher: Launcher, tmp_path: Path) -> None:
    left = tmp_path / "left"
    source = (
        "import subprocess\nfrom pathlib import Path\n"
        "pids = [subprocess.Popen(['setsid', 'sleep', '1000']).pid for _ in range(3)]\n"
        f"Path({str(left)!r}).write_text(' '.join(map(str, pids)))\nraise SystemExit(3)"
    )
    with start_child(launcher, tmp_path, source) as child:
        watcher = launcher.hear("end").watcher
        assert not watcher.is_clean
        watcher.send("bye")
        launcher.hear("clean")
        assert watcher.is_clean
        assert not [pid for pid in left.read_text().split() if Path(f"/proc/{pid}").exists()]
        assert child.poll() is None, "it waits for the other ranks' watchers"
        watcher.send("leave")
        assert child.wait(LIMIT_S) == 3


def test_a_watcher_that_is_not_told_leaves_all_the_same(launcher: Launcher, tmp_path: Path) -> None:
    with start_child(launcher, tmp_path, "raise SystemExit(3)") as child:
        launcher.hear("end").watcher.send("bye")
        assert child.wait(LIMIT_S) == 3


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
        end.watcher.send("bye\nleave")
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
                end.watcher.send("bye\nleave")
                connection.settimeout(LIMIT_S)
                assert connection.recv(1) == b""
                assert child.wait(LIMIT_S) == 1


IN_VAIN = "import os, signal, time\nos.kill(os.getppid(), signal.SIGRTMIN)\n"


def test_a_program_that_waits_in_vain_is_heard_and_lives_until_it_is_let_go(launcher: Launcher, tmp_path: Path) -> None:
    with start_child(launcher, tmp_path, f"{IN_VAIN}time.sleep(1000)") as child:
        end = launcher.hear("end")
        assert (end.status, end.killed_by, end.asked) == (1, 0, False)
        assert end.watcher.report == b"ncclcomm: it waited in vain, as its report says\n"
        assert child.poll() is None
        end.watcher.send("bye\nleave")
        assert child.wait(LIMIT_S) == 1


def test_a_program_that_waits_in_vain_and_fails_ends_once(launcher: Launcher, tmp_path: Path) -> None:
    with start_child(launcher, tmp_path, f"{IN_VAIN}raise SystemExit(7)") as child:
        end = launcher.hear("end")
        assert end.status in (1, 7), "whichever came first"
        assert end.status == 1 or b"in vain" not in end.watcher.report
        end.watcher.send("bye")
        launcher.hear("clean")
        assert not [event for event in launcher.events if event.kind == "end"]
        end.watcher.send("leave")
        assert child.wait(LIMIT_S) == end.status


def test_a_fork_of_the_program_says_its_own_words(launcher: Launcher, tmp_path: Path) -> None:
    source = "import os\nif os.fork() == 0: raise KeyError('of the fork')\nos.wait()"
    with start_child(launcher, tmp_path, source) as child:
        end = launcher.hear("end")
        assert (end.status, end.watcher.report) == (0, b"")
        end.watcher.send("bye\nleave")
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
        end.watcher.send("bye\nleave")
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
        end.watcher.send("bye\nleave")
        assert child.wait(LIMIT_S) == 0
