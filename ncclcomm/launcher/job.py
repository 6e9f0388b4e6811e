"""Starting a job, waiting for it, and leaving nothing of it behind.

A job is one mpiexec or srun and, below it, on this host and others, a watcher and a program for each rank (see child.py
and watch.py). A job ends in up to three steps:

1. the ranks get SIGTERM, and grace to act on it;
2. when all have ended, or the grace is over, the watchers are let go: they kill what still runs and, once all of them
   have, exit; the launcher of the ranks, which has seen no rank leave until now, cleans up after itself;
3. whatever still bears the job's mark in its environment is killed; on other hosts, if a watcher was lost.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType

from ncclcomm.launcher.child import RANK_VARIABLES
from ncclcomm.launcher.command import Command
from ncclcomm.launcher.devices import LOCAL_RANK_VARIABLES
from ncclcomm.launcher.leftovers import kill_marked
from ncclcomm.launcher.link import Event, Links, Watcher
from ncclcomm.launcher.remote import sweep_hosts
from ncclcomm.launcher.verdict import Verdict, say

__all__ = ["TIMEOUT_STATUS", "run_job"]

TIMEOUT_STATUS = 124
"""Exit status after a time limit, as that of timeout(1)."""

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
_MPIEXEC_GRACE_S = 3.0
_REMOTE_MPIEXEC_GRACE_S = 10.0
"""Time for mpiexec or srun to end once all ranks have; connections to other hosts, and SLURM, take longer."""
_IDLE_MPIEXEC_S = 60.0
"""The same once all have ended well, after which it may hang as well as after a failure."""
_LAST_WORDS_S = 3.0
_LONGEST_WAIT_S = 86400.0
"""A selector takes no more than some weeks."""
_SETTLE_S = 0.5
"""Time from the first failure to its report, in which one that explains it may be heard of."""


def run_job(
    command: Command,
    *,
    size: int,
    environ: Mapping[str, str],
    timeout_s: float | None,
    grace_s: float,
    hosts: Sequence[str] = (),
    ssh: Sequence[str] = ("ssh",),
    places: Sequence[str] = (),
) -> int:
    """Run a command that starts ranks, to its end.

    Blocks. Uses this process's signal handlers meanwhile, so it is called from the main thread. SIGUSR1 and SIGUSR2 are
    passed on to the ranks.

    Args:
        command: what starts the ranks.
        size: number of ranks that it starts.
        environ: the environment that the ranks inherit, beside the command's own variables.
        timeout_s: seconds until the job is stopped; None for no limit.
        grace_s: seconds between a rank's SIGTERM and its SIGKILL.
        hosts: the hosts that ssh reaches and ranks run on; empty where this is the only one, or SLURM starts the ranks.
        ssh: words of the ssh command.
        places: the hosts that ranks run on, where others than this one may be among them and `hosts` is empty.

    Returns:
        0 if every rank ended well; the first failing rank's exit status, or 128 + n if signal n killed it;
        TIMEOUT_STATUS after the time limit; 128 + n if signal n stopped this process. No process of the job is left on
        this host, nor on another that can be reached.

    Raises:
        OSError: the command cannot be started; no rank was.
    """
    with tempfile.TemporaryDirectory(prefix="ncclcomm-", ignore_cleanup_errors=True) as directory, _wakeup() as wakeup:
        job = _Job(size, grace_s, wakeup, hosts, places)
        try:
            job.start(command, environ, directory)
            return job.follow(timeout_s)
        finally:
            job.close(ssh, environ)


@contextlib.contextmanager
def _wakeup() -> Iterator[int]:
    """A descriptor from which the numbers of the signals that arrive are read."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    # What is ignored stays so: SIGHUP under nohup, SIGINT in a script's background.
    asked = [number for number in _STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    numbers = (*asked, *_PASSED_ON, signal.SIGCHLD)

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

    def __init__(self, size: int, grace_s: float, wakeup: int, hosts: Sequence[str], places: Sequence[str]) -> None:
        self.id = uuid.uuid4().hex
        self.grace_s = grace_s
        self.wakeup = wakeup
        self.hosts = hosts
        self.is_remote = bool(hosts or places)
        self.selector = selectors.DefaultSelector()
        self.selector.register(wakeup, selectors.EVENT_READ)
        self.links = Links(self.selector, size, remote=self.is_remote, hosts=hosts or places)
        self.verdict = Verdict(size, names_hosts=self.is_remote)
        self.stop_status: int | None = None
        self.let_go = False
        self.starter = ""
        self.mpiexec: subprocess.Popen[bytes] | None = None
        self.show_at = self.release_at = self.kill_at = math.inf
        self.has_hung = False

    def close(self, ssh: Sequence[str], environ: Mapping[str, str]) -> None:
        """Kill what is left of the job and give back what it held."""
        self.links.close()
        self.selector.close()
        try:
            if left := kill_marked(self.id):
                say(f"processes {left} do not end on SIGKILL")
            answering = [host for host in self.hosts if host not in self.verdict.silent_hosts]
            # A watcher that is lost, or was never heard of, may have left something.
            if answering and self.let_go and (self.verdict.has_lost or not self.verdict.is_complete):
                for line in sweep_hosts(answering, ssh=ssh, job_id=self.id, environ=environ):
                    say(line)
        except OSError as error:  # such as no more files or processes; the job has its status already
            say(f"processes of the job may be left, as they could not be looked for: {error}")

    def start(self, command: Command, environ: Mapping[str, str], directory: str) -> None:
        """Start the command; see run_job."""
        marks = {
            "NCCLCOMM_JOB_ID": self.id,
            "NCCLCOMM_JOB_DIR": directory,
            "NCCLCOMM_JOB_LINK": self.links.variable,
            "NCCLCOMM_WATCHED": "1" if sys.stderr and sys.stderr.isatty() else "0",
        }
        command = command.marked(marks)
        self.starter = os.path.basename(command.argv[command.before - 1])
        # Jobs that share Open MPI's directory of sessions disturb each other's start now and then (status 213).
        own = {"PRTE_MCA_prte_local_tmpdir_base": directory, **environ, **command.variables}
        self.mpiexec = subprocess.Popen(
            command.argv,
            # The numbers of a rank that this process itself may be must not pass for those of its ranks.
            env={name: value for name, value in own.items() if name not in RANK_VARIABLES + LOCAL_RANK_VARIABLES},
            stdin=None if sys.stdin and _may_read_stdin() else subprocess.DEVNULL,
            # What is closed here shows as None, and would make room for a file of the launcher's own.
            stdout=None if sys.stdout else subprocess.DEVNULL,
            stderr=None if sys.stderr else subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C comes to this process alone; and reading a terminal does not stop mpiexec
        )

    def follow(self, timeout_s: float | None) -> int:
        """See the command to its end; see run_job."""
        mpiexec = self.mpiexec
        assert mpiexec
        end_at = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while mpiexec.poll() is None:
            nexts = (self.release_at, self.kill_at, self.show_at, math.inf if self._stopping else end_at)
            self._wait_until(min(nexts))
            now = time.monotonic()
            if now >= end_at and not self._stopping:
                say(f"the time limit of {timeout_s:g} s is over; stopping the ranks")
                self._stop(TIMEOUT_STATUS)
            self._go_on(now)
            if now >= self.kill_at:
                if not (self._stopping or self.has_hung):
                    self.has_hung = True
                    say(f"every rank has ended well, but {self.starter} has not, {_IDLE_MPIEXEC_S:g} s later: killed")
                os.killpg(mpiexec.pid, signal.SIGKILL)
                kill_marked(self.id)
        self._hear_last_words()
        if self.stop_status is not None:
            return self.stop_status
        return self.verdict.status(self.starter, 0 if self.has_hung else mpiexec.returncode)

    def _go_on(self, now: float) -> None:
        """Take the next step of ending the job, if it is time for it."""
        if self.verdict.is_complete or now >= self.show_at:
            self.show_at = math.inf
            self.verdict.show_failure()
            # Its connections have outlived it for long enough; others may now wait in MPI_Finalize for it to be gone.
            for watcher in self.links.watchers:
                if watcher.ended:
                    watcher.send(f"signal {int(signal.SIGKILL)}")
        if self._stopping and (self.verdict.is_complete or now >= self.release_at):
            self._release()
        elif self.verdict.is_complete:
            self.kill_at = min(self.kill_at, now + _IDLE_MPIEXEC_S)

    @property
    def _stopping(self) -> bool:
        """True once the ranks have been told to end."""
        return self.release_at < math.inf or self.let_go

    def _wait_until(self, deadline: float) -> None:
        """Wait for a signal, a rank's word or the deadline, and act on the first two."""
        limit = max(0.0, min(deadline, self.links.due_at) - time.monotonic())
        for key, _ in self.selector.select(min(limit, _LONGEST_WAIT_S)):
            if key.fileobj == self.wakeup:
                for number in os.read(self.wakeup, 512):
                    if number != signal.SIGCHLD:
                        self._on_signal(number)
            else:
                for event in self.links.read(key):
                    self._on_event(event)
        self.links.tend()

    def _hear_last_words(self) -> None:
        """Let the watchers go and read what they still say, now that there is no mpiexec that could end them."""
        self._release()
        self._wait_until(0.0)  # one that has connected may not be known yet
        end_at = time.monotonic() + _LAST_WORDS_S
        while self.links.watchers and time.monotonic() < end_at:
            self._wait_until(end_at)
        for watcher in self.links.watchers:
            if not watcher.ended:
                self.verdict.note_lost(Event("lost", watcher, is_silent=True))

    def _on_signal(self, number: int) -> None:
        """Stop the job; at the second signal without grace."""
        if number in _PASSED_ON:
            for watcher in self.links.watchers:
                watcher.send(f"signal {number}")
        elif self.stop_status is None:
            say(f"{signal.Signals(number).name}: stopping the ranks")
            self._stop(128 + number)
        else:
            self._release()

    def _stop(self, status: int | None) -> None:
        """Tell all ranks to end; `status` is what this process then returns, None the failed rank's or mpiexec's."""
        self.stop_status = status if self.stop_status is None else self.stop_status
        if self._stopping:
            return
        self.release_at = time.monotonic() + self.grace_s
        for watcher in self.links.watchers:
            watcher.send(f"signal {int(signal.SIGTERM)}")

    def _release(self) -> None:
        """Have the watchers kill what still runs and exit."""
        if not self.let_go:
            self.let_go = True
            self.release_at = math.inf
            is_slow = self.is_remote and not self.verdict.has_lost
            self.kill_at = time.monotonic() + (_REMOTE_MPIEXEC_GRACE_S if is_slow else _MPIEXEC_GRACE_S)
            for watcher in self.links.watchers:
                watcher.send("bye")

    def _on_event(self, event: Event) -> None:
        """Act on what a rank's watcher says, or on its loss."""
        if event.kind == "start":
            if self.let_go:
                event.watcher.send("bye")
            elif self._stopping:
                event.watcher.send(f"signal {int(signal.SIGTERM)}")
        elif event.kind == "report":
            self.verdict.note_report(event.watcher)
        elif event.kind == "clean":
            self._on_clean(event.watcher)
        elif event.kind == "lost":
            self.verdict.note_lost(event)
            self._stop(None)
        else:
            self._on_end(event)

    def _on_clean(self, watcher: Watcher) -> None:
        """Let a watcher leave: alone after a program that ended well, else together with all."""
        if not self.let_go:
            watcher.send("leave")
        elif all(each.is_clean for each in self.links.watchers):
            for each in self.links.watchers:
                each.send("leave")

    def _on_end(self, event: Event) -> None:
        """Note how a rank ended, and end the job if it failed of itself."""
        self.verdict.note_end(event)
        if not (event.status or event.asked):
            event.watcher.send("bye")
            return
        if event.asked:  # by the launcher of the ranks, because of another rank, or by SLURM
            self.verdict.was_asked = self.verdict.was_asked or not self._stopping
        elif self.stop_status is None and not self.let_go:
            self.verdict.note_failure(event)
            # What ranks of other hosts say may come in another order than it happened.
            self.show_at = min(self.show_at, time.monotonic() + (_SETTLE_S if self.is_remote else 0.0))
        self._stop(None)


def _may_read_stdin() -> bool:
    """False for a background job at a terminal: in its session of its own, mpiexec would take the shell's input."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # stdin is no terminal of ours
        return True
