"""A thread in every rank that answers what its rank is doing, and asks the others when a call of its own takes long.

Ranks talk over TCP sockets whose addresses are exchanged when a communicator is made, never over MPI, so that they can
talk while MPI waits. A watchdog ends the job where waiting makes no sense: a rank that the call needs has left or
died, or the call's time limit is over. It tells where everybody is where a call only takes long. All this holds for a
call that has returned too, until the work that it queued on a device has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ncclcomm.communicator.board import BOARD, Running
from ncclcomm.communicator.exits import wait_until_read
from ncclcomm.communicator.watchdog_address import Address, listen
from ncclcomm.communicator.watchdog_answers import DIED, SILENT, Group, lost_ranks, ranks_in_call, report
from ncclcomm.communicator.watchdog_queued import Poller, QueuedCall, QueuedWork
from ncclcomm.topology import format_ranks

__all__ = ["Watchdog", "say_goodbye", "watchdog"]

MOST_BETWEEN_LOOKS_S = 5.0
CONFIRM_S = 0.5
"""A rank that seems gone is asked again after this time: it may just have finished the call."""

ANSWER_S = 2.0
"""How long a rank has to answer."""

ANSWERS_S = 3.0
"""How long all ranks together have to answer, whatever the number of silent ones."""

POLL_S = 2.0
"""How long a device has to say whether work has ended, where much depends on it."""

GOODBYE_S = 2.0
"""How long a rank that leaves takes, at the most, to tell the others."""

YIELD_S = 5.0
"""How long a waiting rank leaves it to a lower one to report and end the job."""

GREETED_HOSTS = 4
"""How many other hosts a rank greets, so that a large job makes a few connections a rank."""

LEFT_S = 10.0
"""How long, once no rank is still to come, data may arrive from ranks that finished the call and left."""

MOST_ASKED_BYTES = 1 << 20


class Watchdog:
    """This process's watchdog.

    Args:
        end_job: ends all ranks with a status; it may return, and this process then ends itself.

    Raises:
        OSError, RuntimeError: no socket, or no thread, is to be had.
    """

    def __init__(self, end_job: Callable[[int], None]) -> None:
        self._end_job = end_job
        self._socket, self.address = listen()
        self.groups: dict[str, Group] = {}
        self.stall_s: float = 60.0
        self._routes: dict[str, str] = {}
        """By host, the address at which a watchdog of it answered: where that refuses, the process asked for is gone.

        Other addresses prove nothing: a firewall may refuse too, and several hosts can have the same inner address.
        """
        self._useless: set[tuple[str, str]] = set()
        """Hosts with an address that gave no answer, and is not asked again."""
        self._silent: set[str] = set()
        """Ranks, by token, that did not answer when they were last asked: the others are asked first."""
        self._left: dict[str, dict[str, Any]] = {}
        """By token, the last state of a rank that leaves: its process may end before it is asked."""
        self._greeted: set[str] = set()
        self._pid = os.getpid()
        self._launcher = os.getppid()
        self._is_launched = False
        self._has_complained = False
        self._poller = Poller(self._queued, self._complain)
        threading.Thread(target=self._serve, name="ncclcomm-watchdog-serve", daemon=True).start()
        threading.Thread(target=self._watch, name="ncclcomm-watchdog", daemon=True).start()

    def add(self, group: Group, *, is_launched: bool) -> None:
        """Watch the calls of a communicator.

        Args:
            group: the communicator.
            is_launched: whether a launcher started this process as one of several ranks, so that it must not outlive
                the launcher; a process started by hand may well outlive its shell.
        """
        self.groups[group.name] = group
        self._is_launched = is_launched

    def close(self, name: str) -> None:
        """Let the other ranks of a communicator leave, since all have come to close it.

        Args:
            name: the communicator's name.
        """
        if name in self.groups:
            self.groups[name] = replace(self.groups[name], is_closing=True)

    def remove(self, name: str) -> None:
        """Watch a communicator no longer, whose device work has ended.

        Args:
            name: the communicator's name.
        """
        self.groups.pop(name, None)
        if name in BOARD.queued:
            BOARD.queued.pop(name).forget()

    def _complain(self, what: str, error: Exception) -> None:
        """Say once that something of the watchdog itself failed, which must not end the job."""
        if not self._has_complained:
            self._has_complained = True
            _write(f"ncclcomm: {what} failed, and goes on: {type(error).__name__}: {error}")

    def _serve(self) -> None:
        """Answer the others."""
        while os.getpid() == self._pid:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                self._complain("the watchdog's socket", error)
                time.sleep(0.25)  # no descriptor is free: the same error would come at once
                continue
            with connection:
                try:
                    self._answer(connection)
                except (OSError, ValueError):
                    continue  # who asked has gone, or is no watchdog
                except Exception as error:  # a thread that died of it would end the job
                    self._complain("the watchdog's answer", error)

    def _answer(self, connection: socket.socket) -> None:
        """Answer one question, or take note of a goodbye."""
        connection.settimeout(ANSWER_S)
        with connection.makefile("rb") as lines:
            asked = json.loads(lines.readline(MOST_ASKED_BYTES))
        if not isinstance(asked, dict) or asked.get("token") != self.address.token:
            return
        if "left" in asked:
            self._left[asked["from"]] = asked["left"]
        else:
            connection.sendall(json.dumps(BOARD.state(asked["group"])).encode() + b"\n")

    def _watch(self) -> None:
        """Look at this process's calls for ever."""
        while os.getpid() == self._pid:
            time.sleep(0.25)
            if self._is_launched and os.getppid() != self._launcher:
                _end_orphan()
            for entry in [*list(BOARD.running.values()), *self._queued_calls()]:
                group = self.groups.get(entry.group)
                try:
                    if group is not None:
                        self._look(entry, group)
                except Exception as error:  # a thread that died of it would end the job
                    self._complain("the watchdog's look at a call", error)

    def _queued(self) -> list[QueuedWork]:
        """Each communicator's queued work."""
        return [work for work in list(BOARD.queued.values()) if work.group in self.groups]

    def _queued_calls(self) -> list[QueuedCall]:
        """For each communicator the oldest call whose work on a device has not ended, as far as is known."""
        queued = self._queued()
        if queued:
            self._poller.begin()
        return [call for work in queued if (call := work.oldest()) is not None]

    def _goes_on(self, entry: Running) -> bool:
        """True if a thread is still in the call, or its work has still not ended."""
        if not isinstance(entry, QueuedCall):
            return any(running is entry for running in list(BOARD.running.values()))
        # A process that was stopped for long must not take its first look for its last.
        self._poller.poll(POLL_S)
        work = BOARD.queued.get(entry.group)
        return work is not None and work.is_oldest(entry)

    def _look(self, entry: Running, group: Group) -> None:
        """Ask the other ranks, when it is time, and act on what they say."""
        age_s, limit_s = time.monotonic() - entry.since_s, entry.limit_s
        late = limit_s is not None and age_s > limit_s + CONFIRM_S
        if age_s < entry.look_at_s and not late:
            return
        answers = self.ask(group)
        if not self._goes_on(entry):
            return
        if limit_s is not None and late and entry.limit_s is not None:
            self._end(entry, group, answers, f"the time limit of {limit_s:g} s is over")
            return
        gone = frozenset() if group.is_closing else _will_not_come(entry, answers)
        if gone:
            if gone & entry.suspects:
                self._end(entry, group, answers, f"{format_ranks(sorted(gone))} will not come")
                return
            entry.suspects = gone
            entry.look_at_s = age_s + CONFIRM_S
            return
        if age_s > self.stall_s and not entry.is_told and not _is_told_elsewhere(entry):
            entry.is_told = True
            if min(ranks_in_call(entry, answers) | {group.rank}) == group.rank:
                print(report(entry, group, answers, "still waiting"), file=sys.stderr, flush=True)
        entry.suspects = frozenset()
        entry.look_at_s = min(2 * age_s, age_s + MOST_BETWEEN_LOOKS_S)

    def _end(self, entry: Running, group: Group, answers: Sequence[Any], why: str) -> None:
        """Report, once in the job, and end it."""
        first = min(ranks_in_call(entry, answers) | {group.rank})
        if first != group.rank:
            time.sleep(YIELD_S)
            if not self._goes_on(entry):
                return
        try:
            _write(report(entry, group, answers, why))
            wait_until_read(sys.stderr)
            self._end_job(1)
        finally:
            os._exit(1)

    def greet(self, addresses: Sequence[Address]) -> None:
        """Find out which other hosts answer at all, while their ranks are known to be there.

        Without it a rank that ends before it was ever asked could not be told from one behind a firewall.
        """
        own = addresses.index(self.address)
        nearest: dict[str, Address] = {self.address.host: self.address}
        for address in [*addresses[own + 1 :], *addresses[:own]]:
            nearest.setdefault(address.host, address)
        new = [host for host in nearest if host != self.address.host and host not in self._greeted][:GREETED_HOSTS]
        self._greeted.update(new)
        self._ask_all([nearest[host] for host in new], "")

    def say_goodbye(self) -> None:
        """Tell the ranks of the open communicators what this rank did last: its process may be gone when they ask.

        In this thread alone: the interpreter starts none at its end.
        """
        others = {address for group in list(self.groups.values()) for address in group.addresses} - {self.address}
        deadline = time.monotonic() + GOODBYE_S
        left = BOARD.state()
        for address in sorted(others, key=lambda address: address.token in self._silent):
            if time.monotonic() > deadline:
                return
            host = "127.0.0.1" if address.host == self.address.host else self._routes.get(address.host)
            if host is not None:
                said = {"token": address.token, "from": self.address.token, "left": left}
                with contextlib.suppress(OSError):  # it left before
                    _send(host, address.port, said, deadline).close()

    def ask(self, group: Group) -> list[Any]:
        """Every rank's state; DIED where nothing listens any more, SILENT where nobody answers in time.

        A rank that said that it leaves, and whose process has ended, keeps the state that it left in.
        """
        answers = self._ask_all(group.addresses, group.name)
        for rank, address in enumerate(group.addresses):
            if answers[rank] == DIED:
                left = self._left.get(address.token)
                answers[rank] = DIED if left is None else {**left, "running": [], "queued": []}
            elif isinstance(answers[rank], dict) and answers[rank]["leaving"]:
                self._left[address.token] = answers[rank]
        return answers

    def _ask_all(self, addresses: Sequence[Address], group: str) -> list[Any]:
        """The states of the ranks at some addresses; SILENT where there is none in time."""
        answers: list[Any] = [SILENT] * len(addresses)
        ranks = iter(sorted(range(len(answers)), key=lambda rank: addresses[rank].token in self._silent))
        deadline = time.monotonic() + ANSWERS_S

        def work() -> None:
            # One iterator for all threads: each rank is asked by one of them.
            for rank in ranks:
                if time.monotonic() > deadline:
                    return
                try:
                    answers[rank] = self._ask_one(addresses[rank], group, deadline)
                except Exception as error:  # a thread that died of it would end the job
                    self._complain("the watchdog's question", error)
                (self._silent.add if answers[rank] == SILENT else self._silent.discard)(addresses[rank].token)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(16, len(answers)))]
        with contextlib.suppress(RuntimeError):  # no thread starts while the interpreter ends
            for thread in threads:
                thread.start()
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        return list(answers)

    def _ask_one(self, address: Address, group: str, deadline: float) -> Any:
        """One rank's state."""
        if address == self.address:
            return BOARD.state(group)
        local = address.host == self.address.host
        route = "127.0.0.1" if local else self._routes.get(address.host)
        others = () if local else tuple(a for a in address.addresses if a != route and not a.startswith("127."))
        useful = [a for a in others if (address.host, a) not in self._useless] or list(others)
        for host in [route, *useful] if route else useful:
            try:
                said = {"token": address.token, "group": group}
                with _send(host, address.port, said, deadline) as asked, asked.makefile("rb") as lines:
                    line = lines.readline()
                if line:
                    self._routes[address.host] = host
                    return json.loads(line)
            except ConnectionRefusedError:
                if host == route:
                    return DIED
            except (OSError, ValueError):
                if host == route or time.monotonic() > deadline:
                    continue
                self._useless.add((address.host, host))
        return SILENT


def _send(host: str, port: int, said: dict[str, Any], deadline: float) -> socket.socket:
    """A connection over which one line was sent."""
    connection = socket.create_connection((host, port), max(0.01, min(ANSWER_S, deadline - time.monotonic())))
    try:
        connection.sendall(json.dumps(said).encode() + b"\n")
    except OSError:
        connection.close()
        raise
    return connection


def _write(text: str) -> None:
    """Write a line to stderr, past Python's buffers; what reads it may have gone."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


def _end_orphan() -> None:
    """End this process: nobody is left who would end it, or could tell the ranks elsewhere."""
    _write("ncclcomm: the launcher that started this rank has ended, and so does the rank")
    os._exit(1)


def _is_told_elsewhere(entry: Running) -> bool:
    """True for queued work of a communicator that is in a call: that call's own report names the work."""
    return isinstance(entry, QueuedCall) and any(r.group == entry.group for r in list(BOARD.running.values()))


def _will_not_come(entry: Running, answers: Sequence[Any]) -> frozenset[int]:
    """Ranks that the call needs and that will not make it.

    Those that finished it and left are among them only when data of theirs had time to arrive: an unchecked reduce
    needs nothing more of a rank that sent its part, however late the others are. Queued work may still end then: what
    is before it on the device may take any time.
    """
    lost = lost_ranks(entry, answers)
    if isinstance(entry, QueuedCall):
        return lost.gone
    now = time.monotonic()
    if not (lost.left and lost.is_complete):
        entry.complete_at_s = None
        return lost.gone
    if entry.complete_at_s is None:
        entry.complete_at_s = now
    return lost.gone | lost.left if now - entry.complete_at_s > LEFT_S else lost.gone


_watchdog: Watchdog | None = None
_lock = threading.Lock()


def watchdog(end_job: Callable[[int], None]) -> Watchdog:
    """This process's watchdog, started at the first use; a forked child starts its own.

    Args:
        end_job: see Watchdog.

    Raises:
        OSError, RuntimeError: no socket, or no thread, is to be had.
    """
    global _watchdog
    with _lock:
        if _watchdog is None or _watchdog._pid != os.getpid():
            _watchdog = Watchdog(end_job)
        return _watchdog


def say_goodbye() -> None:
    """Tell the others that this process makes no further call, if it has a watchdog."""
    if _watchdog is not None and _watchdog._pid == os.getpid():
        _watchdog.say_goodbye()
