"""The end of `ncclcomm run` of its connections to the ranks' watchers; watch.py has the other end and the lines."""

from __future__ import annotations

import contextlib
import hmac
import re
import resource
import secrets
import selectors
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ncclcomm.launcher.watch import WELCOME, keep_alive

__all__ = ["Event", "Links", "Watcher"]

_LONGEST_HELLO = 1024
_LONGEST_REPORT = 1 << 20
"""Bytes kept of what a failing rank says: the last ones."""
_SPARE_FILES = 64
"""Open files beside one connection a rank."""
_DISCARD_PORT = 9
"""Nothing is sent there: connecting a datagram socket looks up the route alone."""


class Watcher:
    """A rank's watcher: a connection, and what came over it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.unread = b""
        self.rank = ""
        """The rank's number; '' until the watcher has said it, with the job's token."""
        self.host = ""
        """The name that the rank's host gives itself."""
        self.report = b""
        """What the rank's program said when it failed."""
        self.ended = False
        """True once the program has ended."""

    def send(self, line: str) -> None:
        """Send a line; a watcher that is gone shows when it is read from."""
        with contextlib.suppress(OSError):
            self.connection.sendall(f"{line}\n".encode())


@dataclass(frozen=True)
class Event:
    """What happened to a rank: it started, it says why it fails, its program ended, or its watcher was lost."""

    kind: Literal["start", "report", "end", "lost"]
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
        selector: where the sockets are registered; what it finds ready is passed to `read`.
        size: number of ranks.
        remote: whether ranks run on other hosts; else nothing outside this host can connect.
        hosts: names of hosts that ranks run on, as far as they are known; for the order of addresses.

    Raises:
        OSError: this host has no free port.
    """

    def __init__(self, selector: selectors.BaseSelector, size: int, *, remote: bool, hosts: Sequence[str]) -> None:
        self._selector = selector
        self._token = secrets.token_hex(16)
        _allow_files(size + _SPARE_FILES)
        self._listener = socket.socket()
        self._listener.bind(("" if remote else "127.0.0.1", 0))
        self._listener.listen(min(size + 1, 1024))
        self._listener.setblocking(False)
        addresses = _addresses(hosts) if remote else ["127.0.0.1"]
        self.variable = f"{self._token}@{','.join(addresses)}:{self._listener.getsockname()[1]}"
        """NCCLCOMM_JOB_LINK for the ranks."""
        self.watchers: set[Watcher] = set()
        """Those that are connected and have said who they are."""
        self._callers: set[Watcher] = set()
        selector.register(self._listener, selectors.EVENT_READ)

    def close(self) -> None:
        """Break all connections, upon which watchers kill their programs and exit."""
        for watcher in [*self.watchers, *self._callers]:
            self._forget(watcher)
        self._selector.unregister(self._listener)
        self._listener.close()

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
        with contextlib.suppress(OSError):  # the caller has given up, or there is no file left for it
            connection, _ = self._listener.accept()
            keep_alive(connection)
            caller = Watcher(connection)
            self._callers.add(caller)
            self._selector.register(connection, selectors.EVENT_READ, caller)

    def _is_ours(self, caller: Watcher, line: bytes) -> bool:
        """Read who calls; False for a stranger, who knows no token."""
        words = line.decode(errors="replace").split()
        if len(words) != 4 or words[0] != "hello" or not hmac.compare_digest(words[1].encode(), self._token.encode()):
            return False
        _, _, caller.rank, caller.host = words
        self._callers.discard(caller)
        self.watchers.add(caller)
        with contextlib.suppress(OSError):
            caller.connection.sendall(WELCOME)
        return True

    def _lose(self, watcher: Watcher, *, is_silent: bool) -> list[Event]:
        """A connection is over: as it should be after the program's end, else the watcher is lost."""
        self._forget(watcher)
        return [] if watcher.ended or not watcher.rank else [Event("lost", watcher, is_silent=is_silent)]

    def _forget(self, watcher: Watcher) -> None:
        """Close a connection."""
        self.watchers.discard(watcher)
        self._callers.discard(watcher)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(watcher.connection)
        watcher.connection.close()


def _parse(watcher: Watcher, line: str) -> Event:
    """Read what a watcher of this job says."""
    word, *words = line.split()
    if word == "report":
        watcher.report = (watcher.report + bytes.fromhex(words[0]))[-_LONGEST_REPORT:]
        return Event("report", watcher)
    status, killed_by, asked = map(int, words)
    watcher.ended = True
    return Event("end", watcher, status, killed_by, bool(asked))


def _allow_files(count: int) -> None:
    """Let this process hold that many open files, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _addresses(hosts: Sequence[str]) -> list[str]:
    """IPv4 addresses by which other hosts may reach this one, the likeliest first, and this host itself."""
    towards = [address for host in dict.fromkeys([*hosts[:1], *hosts[-1:]]) for address in _address_towards(host)]
    named = []
    with contextlib.suppress(OSError):
        named.append(socket.gethostbyname(socket.gethostname()))
    found = dict.fromkeys([*towards, *named, *_interface_addresses()])
    return [*(address for address in found if not address.startswith("127.")), "127.0.0.1"]


def _address_towards(host: str) -> Iterator[str]:
    """The address that this host has on the way to another; none if that is not known by its name."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _DISCARD_PORT))
        yield probe.getsockname()[0]


def _interface_addresses() -> list[str]:
    """This host's addresses, as the kernel lists them."""
    with contextlib.suppress(OSError):
        return re.findall(r"\|-- (\S+)\n\s+/32 host LOCAL", Path("/proc/net/fib_trie").read_text())
    return []
