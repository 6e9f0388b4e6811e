"""The process beside each rank's program: tells `ncclcomm run` how it goes, and ends it when told or left alone.

child.py loads this file by its path once the program has a process of its own, so that the program sees nothing of it.

A watcher connects to one of the addresses in NCCLCOMM_JOB_LINK (`TOKEN@ADDRESS,ADDRESS:PORT`). Lines go both ways:

| from the watcher | | from `ncclcomm run` | |
| --- | --- | --- | --- |
| | | `challenge NONCE` | first |
| `hello PROOF NONCE RANK HOST` | the answer | `welcome PROOF` | the answer to that |
| `report HEX` | a piece of what the failing program says | `signal N` | for the program |
| `end STATUS KILLED_BY ASKED` | how the program ended | `bye` | kill the program if it runs, and what it left |
| `clean` | nothing of it is left | `leave` | exit |

After `end` a watcher waits for `bye`, and after `clean` for `leave`: where an MPI launcher sees a rank leave, it may
tear the others down before they have had their SIGTERM and their grace, and kill watchers before they have killed what
their programs left. A broken connection means that `ncclcomm run` is gone, or this host cut off.

A program that ends the job because it waits in vain, and has printed a report of that, sends its watcher SIGRTMIN and
lives on until it is killed. Had it called MPI_Abort, MPI might kill the watcher before that has told which rank it was.

Each end proves by the other's NONCE that it knows the token, which itself is never sent: anyone may listen at a port.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import select
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

__all__ = ["keep_alive", "prove", "watch"]

_DAEMONS = ("prted", "orted", "hydra_pmi_proxy")
"""Programs that start the ranks of one job on one host; SLURM's, which serves no single job, is not among them."""
_IN_VAIN = signal.SIGRTMIN
_IN_VAIN_STATUS = 1
_IN_VAIN_REPORT = b"ncclcomm: it waited in vain, as its report says\n"
_ASKING_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_CONNECT_LIMIT_S = 5.0
_ANSWER_LIMIT_S = 30.0
_LONGEST_ANSWER = 256
_LEFTOVERS_LIMIT_S = 10.0
_LEAVE_LIMIT_S = 2.0
"""How long a watcher waits for those of other ranks, one of which may have been killed."""

_SILENCE_BEFORE_PROBE_S = 3
_BETWEEN_PROBES_S = 2
_LOST_AFTER_PROBES = 3


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel break a connection whose other host doesn't answer for 9 s; both ends of a link do.

    The kernel answers for a process that is stopped, which a heartbeat of our own would not.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _SILENCE_BEFORE_PROBE_S),
        (socket.TCP_KEEPINTVL, _BETWEEN_PROBES_S),
        (socket.TCP_KEEPCNT, _LOST_AFTER_PROBES),
        # The same where data is on its way, which holds the probes back.
        (socket.TCP_USER_TIMEOUT, 1000 * (_SILENCE_BEFORE_PROBE_S + _LOST_AFTER_PROBES * _BETWEEN_PROBES_S)),
        (socket.TCP_NODELAY, 1),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def prove(token: str, *words: str) -> str:
    """What only one who knows a job's token can say about some words; both ends of a link call it.

    Args:
        token: the job's.
        words: none with a space; the first one tells which end speaks.
    """
    return hmac.new(token.encode(), " ".join(words).encode(), "sha256").hexdigest()


def watch(program: int, *, rank: str, report: tuple[int, int], link: str, directory: str, wakeup: int) -> NoReturn:
    """See a rank's program to its end, tell how it went, and exit with its status.

    Args:
        program: the program's process, a child of this one and the leader of a process group.
        rank: the rank's number.
        report: a pipe that has what the program says when it fails, and one that takes a byte for each piece passed on.
        link: the value of NCCLCOMM_JOB_LINK.
        directory: the job's, which is removed where `ncclcomm run` can no longer do it.
        wakeup: a pipe that gets the numbers of signals, which have handlers that do nothing.
    """
    watcher = _Watcher(program, report, wakeup)
    try:
        watcher.link = _connect(link, rank)
    except OSError as error:
        with contextlib.suppress(OSError):
            print(
                f"ncclcomm: rank {rank} on host {os.uname().nodename} can't reach `ncclcomm run`, and is ended "
                f"({error}); the hosts of a job must be able to connect to each other, on any TCP port",
                file=sys.stderr,
                flush=True,
            )
        watcher.kill()
    watcher.follow()
    status = watcher.finish()
    if watcher.link is None:
        shutil.rmtree(directory, ignore_errors=True)  # other watchers do the same at the same time
        _end_daemon()
    os._exit(status)


def _connect(link: str, rank: str) -> socket.socket:
    """A connection to `ncclcomm run`, by the first of its addresses where it answers."""
    token, _, place = link.partition("@")
    addresses, _, port = place.rpartition(":")
    reasons = []
    for address in addresses.split(","):
        try:
            return _greet(address, int(port), token, rank)
        except OSError as error:
            reasons.append(f"{address}:{port}: {error}")
    raise ConnectionError("; ".join(reasons))


def _greet(address: str, port: int, token: str, rank: str) -> socket.socket:
    """Connect to an address, and see that who listens there is meant."""
    nonce, host = os.urandom(16).hex(), os.uname().nodename
    connection = socket.create_connection((address, port), _CONNECT_LIMIT_S)
    try:
        keep_alive(connection)
        connection.settimeout(_ANSWER_LIMIT_S)
        theirs = _answer(connection, "challenge")
        proof = prove(token, "watcher", theirs, nonce, rank, host)
        connection.sendall(f"hello {proof} {nonce} {rank} {host}\n".encode())
        welcome = _answer(connection, "welcome")
        if not hmac.compare_digest(welcome.encode(), prove(token, "launcher", theirs, nonce).encode()):
            raise ConnectionError("another job answers there")
        connection.settimeout(None)
    except OSError:
        connection.close()
        raise
    return connection


def _answer(connection: socket.socket, word: str) -> str:
    """Read a line that begins with a word; what follows it there."""
    line = b""
    while not line.endswith(b"\n") and len(line) < _LONGEST_ANSWER and (byte := connection.recv(1)):
        line += byte  # what comes behind the line is read later
    words = line.decode(errors="replace").split()
    if len(words) != 2 or words[0] != word or not line.endswith(b"\n"):
        raise ConnectionError("another program answers there")
    return words[1]


class _Watcher:
    """What a watcher knows of its program and of `ncclcomm run`."""

    def __init__(self, program: int, report: tuple[int, int], wakeup: int) -> None:
        self.program = program
        self.report, self.answer = report
        self.wakeup = wakeup
        self.link: socket.socket | None = None  # None: `ncclcomm run` is gone
        self.unread = b""
        self.status: int | None = None  # of the program, as waitpid gives it, once it has ended
        self.failed: int | None = None  # the status that a program has told, which now waits to be killed
        self.has_spoken = False
        self.asked = False
        self.let_go = False
        self.may_leave = False

    def follow(self) -> None:
        """Pass on what comes, until the program has ended."""
        poll = select.poll()
        for descriptor in (self.wakeup, self.report):
            poll.register(descriptor, select.POLLIN)
        link = self.link.fileno() if self.link else -1
        if self.link:
            poll.register(link, select.POLLIN)
        while not self._reap():
            for descriptor, _ in poll.poll():
                if descriptor == self.wakeup:
                    self._pass_on_signals()
                elif descriptor == link:
                    if self.link:
                        self._listen()
                    if self.link is None:
                        poll.unregister(link)
                elif not self._pass_on_report():
                    poll.unregister(self.report)

    def finish(self) -> int:
        """Tell how the program ended, wait to be let go, end what it left, and leave with the other ranks' watchers.

        Returns:
            The status to exit with.
        """
        assert self.status is not None
        os.set_blocking(self.report, False)
        with contextlib.suppress(BlockingIOError):
            while self._pass_on_report():
                pass  # until there is no more
        if self.failed is None:
            killed_by = os.WTERMSIG(self.status) if os.WIFSIGNALED(self.status) else 0
            code = 128 + killed_by if killed_by else os.WEXITSTATUS(self.status)
            self._tell(f"end {code} {killed_by} {int(self.asked)}")
        else:
            code = self.failed
        while self.link and not self.let_go:
            self._listen()
        _kill_children()
        self._tell("clean")
        end_at = time.monotonic() + _LEAVE_LIMIT_S
        while self.link and not self.may_leave and (left_s := end_at - time.monotonic()) > 0:
            if select.select([self.link], [], [], left_s)[0]:
                self._listen()
        return code

    def kill(self) -> None:
        """Kill the program, and what is still in its process group."""
        for kill in (os.killpg, os.kill):  # it may have left the group for one of its own
            with contextlib.suppress(ProcessLookupError):
                kill(self.program, signal.SIGKILL)

    def _reap(self) -> bool:
        """Take note of children that have ended, orphans of the program among them; True once the program has."""
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitpid(-1, os.WNOHANG):
                if ended[0] == self.program:
                    self.status = ended[1]
                if not ended[0]:
                    break
        return self.status is not None

    def _pass_on_signals(self) -> None:
        """Give the program what this process got."""
        for number in os.read(self.wakeup, 512):
            if number == _IN_VAIN:
                self._give_up()
            elif number != signal.SIGCHLD:
                self._signal(number)

    def _give_up(self) -> None:
        """Tell that the program waits in vain, unless it has ended or told of another failure."""
        if not self._reap() and self.failed is None:
            self.failed = _IN_VAIN_STATUS
            if not self.has_spoken:  # another thread's exception explains more
                self._tell(f"report {_IN_VAIN_REPORT.hex()}")
            self._tell(f"end {self.failed} 0 {int(self.asked)}")

    def _signal(self, number: int) -> None:
        """Give the program a signal, unless it has ended; one that waits to be killed gets no other."""
        if not self._reap() and (self.failed is None or number == signal.SIGKILL):
            self.asked = self.asked or number in _ASKING_TO_END
            os.kill(self.program, number)

    def _listen(self) -> None:
        """Read from `ncclcomm run` and do what it says."""
        assert self.link
        try:
            data = self.link.recv(4096)
        except OSError:
            data = b""
        if not data:
            self._lose()
            return
        *lines, self.unread = (self.unread + data).split(b"\n")
        for line in lines:
            word, *numbers = line.split()
            if word == b"bye":
                self.let_go = True
                if self.status is None:
                    self.kill()
            elif word == b"leave":
                self.may_leave = True
            # SLURM and `ncclcomm run` may both ask; a program that is saving its work is asked once.
            elif not (int(numbers[0]) == signal.SIGTERM and self.asked):
                self._signal(int(numbers[0]))

    def _pass_on_report(self) -> bool:
        """Tell a piece of what the program says; False at its end. `+` begins text, `=` the program's status."""
        piece = os.read(self.report, select.PIPE_BUF)
        self.has_spoken = self.has_spoken or bool(piece)
        if piece[:1] == b"+":
            self._tell(f"report {piece[1:].hex()}")
        elif piece and self.failed is None:
            self.failed = int(piece[1:])
            self._tell(f"end {self.failed} 0 {int(self.asked)}")
        if piece:
            with contextlib.suppress(BrokenPipeError):  # the program has ended
                os.write(self.answer, b".")
        return bool(piece)

    def _tell(self, line: str) -> None:
        """Send a line to `ncclcomm run`."""
        if self.link:
            try:
                self.link.sendall(f"{line}\n".encode())
            except OSError:
                self._lose()

    def _lose(self) -> None:
        """End the program, as nobody is left who would."""
        assert self.link
        self.link.close()
        self.link = None
        if self.status is None:
            self.kill()


def _kill_children() -> None:
    """Kill what the program left behind: orphans are this process's children, see child.py."""
    end_at = time.monotonic() + _LEFTOVERS_LIMIT_S
    # There are no more, or they run as another user.
    with contextlib.suppress(ChildProcessError, PermissionError):
        while time.monotonic() < end_at:
            children = _children()
            for child in children:
                os.kill(child, signal.SIGKILL)
            for child in children or [-1]:
                os.waitpid(child, 0)


def _end_daemon() -> None:
    """End the MPI launcher's process on this host, which may wait for minutes for a host that it has lost."""
    parent = os.getppid()
    with contextlib.suppress(OSError):
        if Path(f"/proc/{parent}/comm").read_text().strip() in _DAEMONS:
            os.kill(parent, signal.SIGTERM)


def _children() -> list[int]:
    """This process's children."""
    mine = str(os.getpid())
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # it ended meanwhile
                # The name before the last parenthesis may hold anything; the state and the parent follow it.
                if (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1] == mine:
                    found.append(int(entry.name))
    return found
