"""The end of `ncclcomm run` of its connections to the ranks' watchers; watch.py has the other end and the lines."""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import math
import re
import resource
import secrets
import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ncclcomm.launcher.watch import keep_alive, prove

__all__ = ["Event", "Links", "Watcher"]

_LONGEST_HELLO = 1024
_LONGEST_REPORT = 1 << 20
"""Bytes kept of what a failing rank says: the last ones."""
_SPARE_FILES = 64
"""Open files beside one connection a rank."""
_MOST_STRANGERS = 32
"""Connections beside one a rank; for a further one the oldest that has not said who it is goes."""
_STRANGER_LIMIT_S = 10.0
"""More than the silence after which a host counts as lost, as what is dropped may be a rank on a slow network."""
_REST_S = 1.0
"""Time without new connections where this process can't have more open files."""
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_LEAST_BACKLOG = 128
_DISCARD_PORT = 9
"""Nothing is sent there: connecting a datagram socket looks up the route alone."""


class Watcher:
    """A rank's watcher: a connection, and what came over it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.called_at = time.monotonic()
        self.nonce = secrets.token_hex(16)
        """What it is to prove that it knows the job's token by."""
        self.unread = b""
        self.rank = ""
        """The rank's number; '' until the watcher has said it, and proved that it is of the job."""
        self.host = ""
        """The name that the rank's host gives itself."""
        self.report = b""
        """What the rank's program said when it failed."""
        self.ended = False
        """True once the program has ended."""
        self.is_clean = False
        """True once nothing that the program left is there any more."""

    def send(self, line: str) -> None:
        """Send a line; a watcher that is gone shows when it is read from."""
        with contextlib.suppress(OSError):
            self.connection.sendall(f"{line}\n".encode())


@dataclass(frozen=True)
class Event:
    """What happened to a rank: it started, says why it fails, its program ended and left nothing, or it was lost."""

    kind: Literal["start", "report", "end", "clean", "lost"]
    watcher: Watcher
    status: int = 0
    """Of the program, as a shell sees it."""
    killed_by: int = 0
    """The signal that killed the program, or 0."""
    asked: bool = False
    """True if the program was sent a signal that asks it to end."""
    is_silent: bool = False
    """True for a watcher lost because its host did not answer; else its process is gone."""


class Links:
    """All connections of a job.

    Args:
        selector: where the sockets are registered; what it finds ready is passed to `read`, and `tend` called after.
        size: number of ranks.
        remote: whether ranks run on other hosts; else nothing outside this host can connect.
        hosts: names of hosts that ranks run on, as far as they are known; for the order of addresses.

    Raises:
        OSError: this host has no free port.
    """

    def __init__(self, selector: selectors.BaseSelector, size: int, *, remote: bool, hosts: Sequence[str]) -> None:
        self._selector = selector
        self._token = secrets.token_hex(16)
        self._most = size + _MOST_STRANGERS
        _allow_files(self._most + _SPARE_FILES)
        self._listener = _listen(max(size + 1, _LEAST_BACKLOG), remote=remote)
        self._listener.setblocking(False)
        addresses = _addresses(hosts) if remote else ["127.0.0.1"]
        self.variable = f"{self._token}@{','.join(addresses)}:{self._listener.getsockname()[1]}"
        """NCCLCOMM_JOB_LINK for the ranks."""
        self.watchers: set[Watcher] = set()
        """Those that are connected and have said who they are."""
        self._callers: dict[Watcher, None] = {}  # the oldest first
        self._rests_until = math.inf
        selector.register(self._listener, selectors.EVENT_READ)

    def close(self) -> None:
        """Break all connections, upon which watchers kill their programs and exit."""
        for watcher in [*self.watchers, *self._callers]:
            self._forget(watcher)
        with contextlib.suppress(KeyError):  # it rests
            self._selector.unregister(self._listener)
        self._listener.close()

    @property
    def due_at(self) -> float:
        """When `tend` has something to do, as time.monotonic() tells it."""
        oldest = next(iter(self._callers), None)
        return min(self._rests_until, oldest.called_at + _STRANGER_LIMIT_S if oldest else math.inf)

    def tend(self) -> None:
        """Drop those who don't say who they are, once all that is there has been read; end the listener's rest."""
        now = time.monotonic()
        for caller in [each for each in self._callers if now >= each.called_at + _STRANGER_LIMIT_S]:
            self._forget(caller)
        if now >= self._rests_until:
            self._rests_until = math.inf
            self._selector.register(self._listener, selectors.EVENT_READ)

    def read(self, key: selectors.SelectorKey) -> list[Event]:
        """Take what is there to be read.

        Args:
            key: one that the selector found ready, of this object's sockets.
        """
        if key.fileobj is self._listener:
            self._accept()
            return []
        watcher: Watcher = key.data
        try:
            data = watcher.connection.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError as error:
            return self._lose(watcher, is_silent=not isinstance(error, (ConnectionResetError, BrokenPipeError)))
        if not data:
            return self._lose(watcher, is_silent=False)
        *lines, watcher.unread = (watcher.unread + data).split(b"\n")
        events = []
        for line in lines:
            if watcher.rank:
                events.append(_parse(watcher, line.decode()))
            elif self._is_ours(watcher, line):
                events.append(Event("start", watcher))
            else:
                self._forget(watcher)
                break
        if not watcher.rank and len(watcher.unread) > _LONGEST_HELLO:
            self._forget(watcher)
        return events

    def _accept(self) -> None:
        """Take a call."""
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # else the caller has given up
            if error.errno in _NO_FILES:
                self._make_room()
            return
        caller = Watcher(connection)
        try:
            keep_alive(connection)
            connection.sendall(f"challenge {caller.nonce}\n".encode())
        except OSError:  # it has given up
            connection.close()
            return
        self._callers[caller] = None
        self._selector.register(connection, selectors.EVENT_READ, caller)
        if len(self._callers) + len(self.watchers) > self._most:
            self._make_room()

    def _make_room(self) -> None:
        """Drop the oldest caller; without one, take no call for a moment: the selector would find the same at once."""
        if self._callers:
            self._forget(next(iter(self._callers)))
        elif self._rests_until == math.inf:
            self._selector.unregister(self._listener)
            self._rests_until = time.monotonic() + _REST_S

    def _is_ours(self, caller: Watcher, line: bytes) -> bool:
        """Read who calls; False for a stranger, who knows no token."""
        words = line.decode(errors="replace").split()
        if len(words) != 5 or words[0] != "hello":
            return False
        _, proof, nonce, rank, host = words
        expected = prove(self._token, "watcher", caller.nonce, nonce, rank, host)
        if not hmac.compare_digest(proof.encode(), expected.encode()):
            return False
        caller.rank, caller.host = rank, host
        del self._callers[caller]
        self.watchers.add(caller)
        caller.send(f"welcome {prove(self._token, 'launcher', caller.nonce, nonce)}")
        return True

    def _lose(self, watcher: Watcher, *, is_silent: bool) -> list[Event]:
        """A connection is over: as it should be after the program's end, else the watcher is lost."""
        self._forget(watcher)
        return [] if watcher.ended or not watcher.rank else [Event("lost", watcher, is_silent=is_silent)]

    def _forget(self, watcher: Watcher) -> None:
        """Close a connection."""
        self.watchers.discard(watcher)
        self._callers.pop(watcher, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(watcher.connection)
        watcher.connection.close()


def _parse(watcher: Watcher, line: str) -> Event:
    """Read what a watcher of this job says."""
    word, *words = line.split()
    if word == "report":
        watcher.report = (watcher.report + bytes.fromhex(words[0]))[-_LONGEST_REPORT:]
        return Event("report", watcher)
    if word == "clean":
        watcher.is_clean = True
        return Event("clean", watcher)
    status, killed_by, asked = map(int, words)
    watcher.ended = True
    return Event("end", watcher, status, killed_by, bool(asked))


def _allow_files(count: int) -> None:
    """Let this process hold that many open files, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _listen(backlog: int, *, remote: bool) -> socket.socket:
    """A listener at a free port: for this host alone, or for others too, by IPv6 as well where the kernel has it."""
    if not remote:
        return socket.create_server(("127.0.0.1", 0), backlog=backlog)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    return socket.create_server(("", 0), backlog=backlog)


def _addresses(hosts: Sequence[str]) -> list[str]:
    """Addresses by which other hosts may reach this one, the likeliest first; for ranks beside it perhaps 127.0.0.1."""
    towards = [address for host in dict.fromkeys([*hosts[:1], *hosts[-1:]]) for address in _addresses_towards(host)]
    name = socket.gethostname()
    named = []
    with contextlib.suppress(OSError):
        named.append(socket.gethostbyname(name))
    found = dict.fromkeys([*towards, *named, *_interface_addresses()])
    others = [address for address in found if not ipaddress.ip_address(address).is_loopback]
    # At 127.0.0.1 of another host anybody may listen.
    short_names = {host.partition(".")[0] for host in hosts}
    is_here = not short_names.isdisjoint({"localhost", name.partition(".")[0]}) or not others
    return [*others, "127.0.0.1"] if is_here or not set(towards) <= set(others) else others


def _addresses_towards(host: str) -> Iterator[str]:
    """The addresses that this host has on the way to another, IPv4 first; none if that is not known by its name."""
    ways = set()
    with contextlib.suppress(OSError, UnicodeError):
        ways = {(way[0], way[4]) for way in socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM)}
    for family, place in sorted(ways, key=lambda way: (way[0] != socket.AF_INET, str(way))):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            address: str = probe.getsockname()[0]
            if "%" not in address:  # of one link, where the other end has another name for it
                yield address


def _interface_addresses() -> list[str]:
    """This host's addresses, as the kernel lists them, IPv4 first."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        found += re.findall(r"\|-- (\S+)\n\s+/32 host LOCAL", Path("/proc/net/fib_trie").read_text())
    with contextlib.suppress(OSError):
        # Of global scope, 00: those of one link need the name that it has at the other end.
        digits = re.findall(r"^(\w{32}) \w+ \w+ 00 ", Path("/proc/net/if_inet6").read_text(), re.MULTILINE)
        found += [str(ipaddress.IPv6Address(int(each, 16))) for each in digits]
    return found
