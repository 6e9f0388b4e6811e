"""How a job went: from what is heard of its ranks to one report and one exit status."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Collection
from dataclasses import dataclass

from ncclcomm.launcher.link import Event, Watcher

__all__ = ["LOST_STATUS", "Verdict", "say"]

LOST_STATUS = 1
"""Exit status after the loss of a rank, where the launcher of the ranks has none to tell."""


def say(text: str) -> None:
    """Write a line of this program's own to stderr.

    Args:
        text: the line, without the program's name.
    """
    _write(f"ncclcomm run: {text}\n")


def _write(text: str) -> None:
    """Write to stderr; one that is closed, which may show as None, must not keep the ranks alive."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()


def _name_of(number: int) -> str:
    """A signal's name; a real-time one has none."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _ranks(numbers: Collection[str]) -> str:
    """As `rank 1`, or `ranks 0, 2`."""
    return f"rank{'s' * (len(numbers) != 1)} {', '.join(sorted(numbers, key=int))}"


def _is_of_abort(returncode: int) -> bool:
    """Whether mpiexec's status may be MPI_Abort's: after a kill it has the signal in it, or is 255."""
    return 0 < returncode < 128 and returncode != signal.SIGKILL


@dataclass(frozen=True)
class _Failure:
    """How a rank failed."""

    name: str
    end: Event

    def __str__(self) -> str:
        if self.end.killed_by:
            return f"{self.name} was killed by {_name_of(self.end.killed_by)}"
        return f"{self.name} exited with status {self.end.status}"

    @property
    def is_kill(self) -> bool:
        """True for a signal from outside or of the machine; libraries that give up abort."""
        return self.end.killed_by not in (0, signal.SIGABRT)


class Verdict:
    """What is known of a job's ranks.

    Args:
        size: number of ranks.
        names_hosts: whether messages name a rank's host.
    """

    def __init__(self, size: int, *, names_hosts: bool) -> None:
        self._size = size
        self._names_hosts = names_hosts
        self._ended: set[str] = set()
        self._lost: dict[str, Event] = {}
        self._reports: dict[str, Watcher] = {}  # of failing ranks, the first one first
        self._failures: list[_Failure] = []
        self._shown: _Failure | None = None
        self.was_asked = False
        """True if ranks were asked to end by someone else: the launcher of the ranks, or SLURM."""

    @property
    def is_complete(self) -> bool:
        """True once nothing more can be heard of any rank."""
        return len(self._ended | self._lost.keys()) >= self._size

    @property
    def has_lost(self) -> bool:
        """True if the watcher of a rank went without a word."""
        return bool(self._lost)

    @property
    def silent_hosts(self) -> set[str]:
        """Names, as they give them themselves, of hosts that do not answer."""
        return {event.watcher.host for event in self._lost.values() if event.is_silent}

    def note_report(self, watcher: Watcher) -> None:
        """A rank says why it fails.

        Args:
            watcher: whose report has grown.
        """
        self._reports.setdefault(watcher.rank, watcher)

    def note_end(self, event: Event) -> None:
        """A rank's program has ended.

        Args:
            event: its end.
        """
        self._ended.add(event.watcher.rank)

    def note_lost(self, event: Event) -> None:
        """The watcher of a rank is gone.

        Args:
            event: its loss.
        """
        self._lost.setdefault(event.watcher.rank, event)

    def note_failure(self, event: Event) -> None:
        """A rank's program has failed of itself.

        Args:
            event: its end.
        """
        self._failures.append(_Failure(self._named([event.watcher]), event))

    def show_failure(self) -> None:
        """Print, once, how the first rank failed.

        Connections to it break when it ends, upon which others give up, and may be heard of before it: a rank that was
        killed goes first, then those with a report, in the order of these, which are passed on before a rank ends.
        """
        if not self._failures or self._shown:
            return
        order = list(self._reports)

        def place(failure: _Failure) -> tuple[bool, int]:
            rank = failure.end.watcher.rank
            return not failure.is_kill, order.index(rank) if rank in order else len(order)

        self._shown = min(self._failures, key=place)
        watcher = self._shown.end.watcher
        # It called os._exit or MPI_Abort, as its watchdog does where another rank is at fault.
        is_unexplained = not watcher.report and not self._shown.end.killed_by
        self._show(f"{self._shown}{': what is printed above may say why' if is_unexplained else ''}", watcher)

    def status(self, name: str, returncode: int) -> int:
        """Print what is not said yet, and give the job's exit status.

        Args:
            name: of the launcher of the ranks.
            returncode: its exit status, as subprocess gives it.
        """
        self.show_failure()
        if self._shown:
            self._say_lost("")
            return self._shown.end.status
        # One that did not end by itself is killed, and has no status to tell.
        status = (LOST_STATUS if self._lost else 128 - returncode) if returncode < 0 else returncode
        for watcher in self._reports.values():
            self._show(f"{self._named([watcher])} failed, and MPI ended the job", watcher)
            return status or LOST_STATUS
        if self._lost:
            self._say_lost(f"{name} ended with status {status}, and ", by_abort=_is_of_abort(returncode))
            return LOST_STATUS if self.silent_hosts else status or LOST_STATUS
        if status:
            say(f"{name} ended with status {status}")
        elif self.was_asked:
            return 128 + signal.SIGTERM
        elif not self.is_complete:
            missing = set(map(str, range(self._size))) - self._ended
            were = "was" if len(missing) == 1 else "were"
            say(f"{name} ended with status 0, but {_ranks(missing)} {were} not seen to end")
            return LOST_STATUS
        return status

    def _named(self, watchers: list[Watcher]) -> str:
        """How ranks of one host are called in messages."""
        ranks = _ranks([watcher.rank for watcher in watchers])
        return f"{ranks} on host {watchers[0].host}" if self._names_hosts else ranks

    def _show(self, headline: str, watcher: Watcher) -> None:
        """Print how a rank failed, with its traceback if it left one."""
        say(headline)
        report = watcher.report.decode(errors="replace")
        _write(report if report.endswith("\n") or not report else f"{report}\n")

    def _say_lost(self, head: str, *, by_abort: bool = False) -> None:
        """Print which ranks were lost first; without a head only those of a silent host, as others are killed."""
        silent = [event.watcher for event in self._lost.values() if event.is_silent]
        lost = silent or [event.watcher for event in self._lost.values() if head]
        first = [watcher for watcher in lost if watcher.host == lost[0].host]
        if first:
            ranks, were = self._named(first), "was" if len(first) == 1 else "were"
            if silent:
                say(f"{ranks} {were} lost: the host does not answer")
            elif by_abort:
                # One that calls MPI_Abort, as the watchdog of a rank that waits in vain does, has said why.
                lost_host = ", or the host was lost" if self._names_hosts else ""
                say(f"{head}{ranks} with it, as after MPI_Abort: what is printed above says why{lost_host}")
            else:
                say(f"{head}{ranks} {were} killed, or the host was")
