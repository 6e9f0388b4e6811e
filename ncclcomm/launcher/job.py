"""Starting a job, waiting for it, and leaving nothing of it behind.

A job is one mpiexec and, below it, a watcher and a program for each rank (see child.py). They speak through a directory
of the job's own: watchers write to the pipe `events`, and hold the pipe `lifeline`, whose other end closes when this
process lets them go or dies. A job ends in up to three steps:

1. the ranks get SIGTERM, and grace to act on it;
2. when all have ended, or the grace is over, the lifeline closes: watchers kill what still runs and exit, and mpiexec,
   which has seen no rank leave until now, cleans up after itself;
3. whatever still bears the job's mark in its environment is killed.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ncclcomm.launcher.command import Command

__all__ = ["TIMEOUT_STATUS", "run_job"]

TIMEOUT_STATUS = 124
"""Exit status after a time limit, as that of timeout(1)."""

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MPIEXEC_GRACE_S = 3.0
_KILL_LIMIT_S = 10.0


@dataclass(frozen=True)
class _Failure:
    """How the first rank to fail ended."""

    rank: str
    status: int
    killed_by: int

    def __str__(self) -> str:
        if self.killed_by:
            return f"rank {self.rank} was killed by {signal.Signals(self.killed_by).name}"
        return f"rank {self.rank} exited with status {self.status}"


def run_job(command: Command, *, size: int, environ: Mapping[str, str], timeout_s: float | None, grace_s: float) -> int:
    """Run a command that starts ranks, to its end.

    Blocks. Uses this process's signal handlers meanwhile, so it is called from the main thread.

    Args:
        command: what starts the ranks.
        size: number of ranks that it starts.
        environ: the environment that the ranks inherit, beside the command's own variables.
        timeout_s: seconds until the job is stopped; None for no limit.
        grace_s: seconds between a rank's SIGTERM and its SIGKILL.

    Returns:
        0 if every rank ended well; the first failing rank's exit status, or 128 + n if signal n killed it;
        TIMEOUT_STATUS after the time limit; 128 + n if signal n stopped this process. No process of the job is left.

    Raises:
        OSError: the command cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="ncclcomm-", ignore_cleanup_errors=True) as directory, _wakeup() as wakeup:
        job = _Job(Path(directory), size, grace_s, wakeup)
        try:
            return job.run(command, environ, timeout_s)
        finally:
            job.close()


@contextlib.contextmanager
def _wakeup() -> Iterator[int]:
    """A descriptor from which the numbers of the signals that arrive are read."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    hangup_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # under nohup it stays so
    numbers = [n for n in (*_STOP_SIGNALS, signal.SIGCHLD) if not (n == signal.SIGHUP and hangup_ignored)]

    def ignore(_number: int, _frame: FrameType | None) -> None:
        """Leave it to the descriptor."""

    previous_fd = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    previous = {number: signal.signal(number, ignore) for number in numbers}
    try:
        yield read
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous_fd)
        os.close(read)
        os.close(write)


class _Job:
    """One job, from its start to its last process."""

    def __init__(self, directory: Path, size: int, grace_s: float, wakeup: int) -> None:
        self.id = uuid.uuid4().hex
        self.directory = directory
        self.size = size
        self.grace_s = grace_s
        self.wakeup = wakeup
        os.mkfifo(directory / "events", 0o600)
        os.mkfifo(directory / "lifeline", 0o600)
        # Open for both directions: an open for one alone would wait for the first rank, and see an end after the last.
        self.events = os.open(directory / "events", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self.lifeline: int | None = os.open(directory / "lifeline", os.O_RDWR | os.O_CLOEXEC)
        self.unread = b""
        self.watchers: dict[str, int] = {}  # rank -> process, while its program runs
        self.ended: set[str] = set()
        self.failure: _Failure | None = None
        self.stop_status: int | None = None
        self.release_at = self.kill_at = math.inf

    def close(self) -> None:
        """Kill what is left of the job and give back what it held."""
        self._release()
        os.close(self.events)
        _kill_marked(self.id)

    def run(self, command: Command, environ: Mapping[str, str], timeout_s: float | None) -> int:
        """Start the command and see it to its end; see run_job."""
        marks = {
            "NCCLCOMM_JOB_ID": self.id,
            "NCCLCOMM_JOB_DIR": str(self.directory),
            "NCCLCOMM_JOB_PID": str(os.getpid()),
            "NCCLCOMM_WATCHED": "1" if sys.stderr.isatty() else "0",
        }
        mpiexec = subprocess.Popen(
            command.argv,
            env={**environ, **command.variables, **marks},
            stdin=None if _may_read_stdin() else subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C comes to this process alone; and reading a terminal does not stop mpiexec
        )
        end_at = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while mpiexec.poll() is None:
            self._wait_until(min(self.release_at, self.kill_at, math.inf if self._stopping else end_at))
            now = time.monotonic()
            if now >= end_at and not self._stopping:
                _say(f"the time limit of {timeout_s:g} s is over; stopping the ranks")
                self._stop(TIMEOUT_STATUS)
            if self._stopping and (len(self.ended) >= self.size or now >= self.release_at):
                self._release()
            if now >= self.kill_at:
                os.killpg(mpiexec.pid, signal.SIGKILL)
                _kill_marked(self.id)
        self._read_events()
        return self._status(mpiexec.returncode)

    @property
    def _stopping(self) -> bool:
        """True once the ranks have been told to end."""
        return self.release_at < math.inf or self.lifeline is None

    def _wait_until(self, deadline: float) -> None:
        """Wait for a signal, a rank's word or the deadline, and act on the first two."""
        limit = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([self.wakeup, self.events], [], [], limit)
        if self.wakeup in ready:
            for number in os.read(self.wakeup, 512):
                if number != signal.SIGCHLD:
                    self._on_signal(number)
        if self.events in ready:
            self._read_events()

    def _on_signal(self, number: int) -> None:
        """Stop the job; at the second signal without grace."""
        if self.stop_status is None:
            _say(f"{signal.Signals(number).name}: stopping the ranks")
            self._stop(128 + number)
        else:
            self._release()

    def _stop(self, status: int | None) -> None:
        """Tell all ranks to end; `status` is what this process then returns, None the failed rank's or mpiexec's."""
        self.stop_status = status if self.stop_status is None else self.stop_status
        if self._stopping:
            return
        self.release_at = time.monotonic() + self.grace_s
        for watcher in self.watchers.values():
            _send(watcher, signal.SIGTERM)

    def _release(self) -> None:
        """Have the watchers kill what still runs and exit."""
        if self.lifeline is not None:
            os.close(self.lifeline)
            self.lifeline = None
            self.release_at = math.inf
            self.kill_at = time.monotonic() + _MPIEXEC_GRACE_S

    def _read_events(self) -> None:
        """Act on what the watchers have written."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.events, 1 << 16):
                self.unread += data
        *lines, self.unread = self.unread.split(b"\n")
        for line in lines:
            kind, rank, *numbers = line.decode().split()
            if kind == "start":
                self._on_start(rank, *map(int, numbers))
            else:
                self._on_end(rank, *map(int, numbers))

    def _on_start(self, rank: str, watcher: int) -> None:
        """Note where a rank runs."""
        self.watchers[rank] = watcher
        if self._stopping:
            _send(watcher, signal.SIGTERM)

    def _on_end(self, rank: str, status: int, killed_by: int, asked: int) -> None:
        """Note how a rank ended, and end the job if it failed of itself."""
        self.watchers.pop(rank, None)
        self.ended.add(rank)
        if self._stopping or not (status or asked):
            return
        if not asked:  # else mpiexec told it to end, because of another rank, and knows why
            self.failure = _Failure(rank, status, killed_by)
            self._show(str(self.failure), rank)
        self._stop(None)

    def _show(self, headline: str, rank: str) -> None:
        """Print how a rank failed, with its traceback if it left one."""
        _say(headline)
        with contextlib.suppress(FileNotFoundError):
            report = (self.directory / f"report-{rank}").read_bytes().decode(errors="replace")
            sys.stderr.write(report if report.endswith("\n") or not report else f"{report}\n")
            sys.stderr.flush()

    def _status(self, returncode: int) -> int:
        """This process's exit status, from what is known of the ranks and mpiexec's."""
        if self.stop_status is not None:
            return self.stop_status
        if self.failure is not None:
            return self.failure.status
        status = 128 - returncode if returncode < 0 else returncode
        for report in sorted(self.directory.glob("report-*"), key=lambda path: path.stat().st_mtime_ns)[:1]:
            rank = report.name.removeprefix("report-")
            self._show(f"rank {rank} failed, and MPI ended the job", rank)
            return status or 1
        if status:
            _say(f"mpiexec ended with status {status}")
        elif len(self.ended) < self.size:
            missing = sorted(set(map(str, range(self.size))) - self.ended, key=int)
            _say(f"mpiexec ended with status 0, but rank {', '.join(missing)} was not seen to end")
            return 1
        return status


def _say(text: str) -> None:
    """Write a line of this program's own."""
    with contextlib.suppress(OSError):  # a closed stderr must not keep the ranks alive
        print(f"ncclcomm run: {text}", file=sys.stderr, flush=True)


def _may_read_stdin() -> bool:
    """False for a background job at a terminal: in its session of its own, mpiexec would take the shell's input."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # stdin is no terminal of ours
        return True


def _send(process: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _marked(job_id: str) -> list[int]:
    """Processes that inherited the job's mark."""
    mark = f"NCCLCOMM_JOB_ID={job_id}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def _kill_marked(job_id: str) -> None:
    """Kill every process of the job, until a look finds none."""
    end_at = time.monotonic() + _KILL_LIMIT_S
    while (left := _marked(job_id)) and time.monotonic() < end_at:
        for process in left:
            _send(process, signal.SIGKILL)
        for process in left:
            _wait_gone(process, end_at)
    if left:
        _say(f"processes {left} do not end on SIGKILL")


def _wait_gone(process: int, end_at: float) -> None:
    """Wait until a process that is no child of ours has ended."""
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return
    except OSError:  # a kernel before 5.3
        time.sleep(0.01)
        return
    try:
        select.select([descriptor], [], [], max(0.0, end_at - time.monotonic()))
    finally:
        os.close(descriptor)
