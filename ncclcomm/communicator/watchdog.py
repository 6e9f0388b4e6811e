"""A thread in every rank that answers what its rank is doing, and asks the others when a call of its own takes long.

Ranks talk over TCP sockets whose addresses are exchanged when a communicator is made, never over MPI, so that they can
talk while MPI waits. A watchdog ends the job where waiting makes no sense: a rank that the call needs has left or
died, or the call's time limit is over. It tells where everybody is where a call only takes long.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ncclcomm.communicator.board import BOARD, Running, describe_call
from ncclcomm.communicator.exits import wait_until_read
from ncclcomm.topology import Topology, format_ranks

__all__ = ["Address", "Group", "Watchdog", "report_head", "watchdog"]

MOST_BETWEEN_LOOKS_S = 5.0
CONFIRM_S = 0.5
"""A rank that seems gone is asked again after this time: it may just have finished the call."""

ANSWER_S = 2.0
"""How long a rank has to answer."""

YIELD_S = 5.0
"""How long a waiting rank leaves it to a lower one to report and end the job."""

GREETED_HOSTS = 4
"""How many other hosts a rank greets, so that a large job makes a few connections a rank."""

LEFT_S = 10.0
"""How long a rank that finished a call and left may be what the others still wait for."""

DIED = "died"
SILENT = "silent"


@dataclass(frozen=True)
class Address:
    """Where a rank's watchdog listens."""

    host: str
    """Which host it is on: boot and network, so that only processes that share both use the loopback address."""
    host_name: str
    """The host's name, for reports alone: names need not be distinct."""
    addresses: tuple[str, ...]
    port: int
    token: str


@dataclass(frozen=True)
class Group:
    """A communicator as a watchdog knows it."""

    name: str
    topology: Topology
    rank: int
    addresses: tuple[Address, ...]

    def describe(self, rank: int) -> str:
        """A rank in words, with its host where there are several."""
        words = self.topology.describe(rank)
        several = any(address.host != self.addresses[0].host for address in self.addresses)
        return f"{words} on {self.addresses[rank].host_name}" if several else words


def _host_identity() -> str:
    """What processes share that reach each other over the loopback address."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/net')}"


def _addresses() -> tuple[str, ...]:
    """This host's IPv4 addresses, the loopback ones last."""
    import fcntl

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
                found.append(socket.inet_ntoa(answer[20:24]))
    return tuple(sorted(found, key=lambda address: address.startswith("127.")))


class Watchdog:
    """This process's watchdog.

    Args:
        end_job: ends all ranks with a status; it may return, and this process then ends itself.
    """

    def __init__(self, end_job: Callable[[int], None]) -> None:
        self._end_job = end_job
        self._socket = socket.create_server(("", 0), backlog=128)
        port = self._socket.getsockname()[1]
        self.address = Address(_host_identity(), socket.gethostname(), _addresses(), port, secrets.token_hex(8))
        self.groups: dict[str, Group] = {}
        self.stall_s: float = 60.0
        self._routes: dict[str, str] = {}
        """By host, the address at which a watchdog of it answered: where that refuses, the process asked for is gone.

        Other addresses prove nothing: a firewall may refuse too, and several hosts can have the same inner address.
        """
        self._greeted: set[str] = set()
        self._pid = os.getpid()
        self._launcher = os.getppid()
        self._is_launched = False
        threading.Thread(target=self._serve, name="ncclcomm-watchdog-serve", daemon=True).start()
        threading.Thread(target=self._watch, name="ncclcomm-watchdog", daemon=True).start()

    def add(self, group: Group, *, is_launched: bool) -> None:
        """Watch the calls of a communicator, until it is taken out of `groups`.

        Args:
            group: the communicator.
            is_launched: whether a launcher started this process as one of several ranks, so that it must not outlive
                the launcher; a process started by hand may well outlive its shell.
        """
        self.groups[group.name] = group
        self._is_launched = is_launched

    def _serve(self) -> None:
        """Answer the others."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with contextlib.suppress(OSError, ValueError), connection:
                connection.settimeout(ANSWER_S)
                if connection.recv(64).decode().strip() == self.address.token:
                    connection.sendall(json.dumps(BOARD.state()).encode() + b"\n")

    def _watch(self) -> None:
        """Look at this process's calls for ever."""
        while os.getpid() == self._pid:
            time.sleep(0.25)
            if self._is_launched and os.getppid() != self._launcher:
                _end_orphan()
            for entry in list(BOARD.running.values()):
                group = self.groups.get(entry.group)
                if group is not None:
                    self._look(entry, group)

    def _look(self, entry: Running, group: Group) -> None:
        """Ask the other ranks, when it is time, and act on what they say."""
        age_s = time.monotonic() - entry.since_s
        late = entry.limit_s is not None and age_s > entry.limit_s + CONFIRM_S
        if age_s < entry.look_at_s and not late:
            return
        answers = self.ask(group)
        if not _is_running(entry):
            return
        gone = _gone(entry, answers)
        if late:
            self._end(entry, group, answers, f"the time limit of {entry.limit_s or 0:g} s is over")
            return
        if gone:
            if gone & entry.suspects:
                self._end(entry, group, answers, f"{format_ranks(sorted(gone))} will not come")
                return
            entry.suspects = frozenset(gone)
            entry.look_at_s = age_s + CONFIRM_S
            return
        if age_s > self.stall_s and not entry.is_told:
            entry.is_told = True
            if min(_same(entry, answers) | {group.rank}) == group.rank:
                print(self.report(entry, group, answers, "still waiting"), file=sys.stderr, flush=True)
        entry.suspects = frozenset()
        entry.look_at_s = min(2 * age_s, age_s + MOST_BETWEEN_LOOKS_S)

    def _end(self, entry: Running, group: Group, answers: Sequence[Any], why: str) -> None:
        """Report, once in the job, and end it."""
        first = min(_same(entry, answers) | {group.rank})
        if first != group.rank:
            time.sleep(YIELD_S)
            if not _is_running(entry):
                return
        text = self.report(entry, group, answers, why)
        os.write(2, (text + "\n").encode())
        wait_until_read(sys.stderr)
        self._end_job(1)
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
        self._ask_all([nearest[host] for host in new])

    def ask(self, group: Group) -> list[Any]:
        """Every rank's state; DIED where nothing listens any more, SILENT where nobody answers in time."""
        return self._ask_all(group.addresses)

    def _ask_all(self, addresses: Sequence[Address]) -> list[Any]:
        """The states of the ranks at some addresses."""
        answers: list[Any] = [SILENT] * len(addresses)
        ranks = iter(range(len(answers)))

        def work() -> None:
            # One iterator for all threads: each rank is asked by one of them.
            for rank in ranks:
                answers[rank] = self._ask_one(addresses[rank])

        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(16, len(answers)))]
        with contextlib.suppress(RuntimeError):  # no thread starts while the interpreter ends
            for thread in threads:
                thread.start()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        return answers

    def _ask_one(self, address: Address) -> Any:
        """One rank's state."""
        if address == self.address:
            return BOARD.state()
        local = address.host == self.address.host
        route = "127.0.0.1" if local else self._routes.get(address.host)
        others = () if local else tuple(a for a in address.addresses if a != route and not a.startswith("127."))
        for host in (route, *others) if route else others:
            try:
                with socket.create_connection((host, address.port), timeout=ANSWER_S) as connection:
                    connection.sendall(address.token.encode() + b"\n")
                    with connection.makefile("rb") as lines:
                        line = lines.readline()
                if line:
                    self._routes[address.host] = host
                    return json.loads(line)
            except ConnectionRefusedError:
                if host == route:
                    return DIED
            except (OSError, ValueError):
                continue
        return SILENT

    def report(self, entry: Running, group: Group, answers: Sequence[Any], why: str) -> str:
        """Where every rank of the group is, in words."""
        same = sorted(_same(entry, answers) | {group.rank})
        lines = [report_head(entry, group.describe(group.rank), why), f"  in this call: {format_ranks(same)}"]
        for rank, answer in enumerate(answers):
            if rank not in same:
                lines.append(f"  {group.describe(rank)}: {_elsewhere(entry, answer)}")
            elif any(running["on_device"] for running in _matching(entry, answer)):
                lines.append(f"  {group.describe(rank)}: in this call, waiting for work queued on its device")
        if len(lines) == 2:
            lines.append(
                "  nobody is missing: the ranks' root, op, shape or dtype may differ (NCCLCOMM_CHECK=true finds out), "
                "or timeout_s was passed on some of them alone"
            )
        return "\n".join(lines)


def _end_orphan() -> None:
    """End this process: nobody is left who would end it, or could tell the ranks elsewhere."""
    with contextlib.suppress(OSError):  # what reads stderr may have gone as well
        os.write(2, b"ncclcomm: the launcher that started this rank has ended, and so does the rank\n")
    os._exit(1)


def _is_running(entry: Running) -> bool:
    """True if a thread of this process is still in the call."""
    return any(running is entry for running in list(BOARD.running.values()))


def report_head(entry: Running, who: str, why: str) -> str:
    """A report's first line: who waited in which call, and why that is told.

    Args:
        entry: the call.
        who: the rank that waited, in words.
        why: what ends the waiting, or that it goes on.
    """
    detail = describe_call(entry.arguments)
    waited_s = time.monotonic() - entry.since_s
    call = f"{entry.call} (call {entry.number}{', ' + detail if detail else ''})"
    return f"ncclcomm: {who}: waited {waited_s:.0f} s in {call}: {why}"


def _matching(entry: Running, answer: Any) -> list[dict[str, Any]]:
    """What a rank runs that is the same call."""
    if not isinstance(answer, dict):
        return []
    call = (entry.group, entry.call, entry.number)
    return [running for running in answer["running"] if (running["group"], running["call"], running["number"]) == call]


def _same(entry: Running, answers: Sequence[Any]) -> set[int]:
    """Ranks that are in the same call."""
    return {rank for rank, answer in enumerate(answers) if _matching(entry, answer)}


def _gone(entry: Running, answers: Sequence[Any]) -> set[int]:
    """Ranks that the call needs and that will not make it: they died, or are leaving without it."""
    found = set()
    for rank, answer in enumerate(answers):
        if answer == DIED:
            found.add(rank)
        elif isinstance(answer, dict):
            _, number = answer["last"].get(entry.group, ("", -1))
            broken_at, _ = answer["broken"].get(entry.group, (entry.number + 1, ""))
            # One that finished the call may leave while its last data still arrive, but not for long.
            left = answer["leaving"] and (number < entry.number or answer["left_for_s"] > LEFT_S)
            if broken_at <= entry.number or left:
                found.add(rank)
    return found


def _elsewhere(entry: Running, answer: Any) -> str:
    """What a rank that is not in the call is doing."""
    if answer == DIED:
        return "its process has ended"
    if answer == SILENT:
        return "does not answer (stopped, or cut off)"
    words = []
    for running in answer["running"]:
        detail = f", {running['detail']}" if running["detail"] else ""
        words.append(f"in {running['call']} (call {running['number']}{detail}) for {running['for_s']:.0f} s")
    if not words:
        call, number = answer["last"].get(entry.group, ("", -1))
        words.append(f"last finished {call} (call {number})" if number >= 0 else "has finished no call")
    if entry.group in answer["broken"]:
        # A time limit's reason is a whole report.
        words.append(f"can't go on: {answer['broken'][entry.group][1].splitlines()[0]}")
    if answer["leaving"]:
        words.append(answer["leaving"])
    if answer["line"]:
        words.append(f"at {answer['line']}")
    return ", ".join(words)


_watchdog: Watchdog | None = None
_lock = threading.Lock()


def watchdog(end_job: Callable[[int], None]) -> Watchdog:
    """This process's watchdog, started at the first use; a forked child starts its own."""
    global _watchdog
    with _lock:
        if _watchdog is None or _watchdog._pid != os.getpid():
            _watchdog = Watchdog(end_job)
        return _watchdog
