"""Events of virtual devices that processes of one host share.

The process that makes such an event keeps its marks, and a thread of it serves everybody who has the event's handle,
itself too, over sockets. When a process ends, in whatever way, the kernel closes its sockets: marks that it set and
didn't reach are lost then, and whoever waits for one gets an error. The address is an abstract one and no file, so that
nothing is left of it.
"""

from __future__ import annotations

import functools
import itertools
import os
import secrets
import selectors
import socket
import struct
import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

from ncclcomm.devices.base import StreamImpl
from ncclcomm.devices.host import HostEvent, queue_of
from ncclcomm.devices.host_queue import Mark
from ncclcomm.errors import ArgumentError, DeviceError

__all__ = ["SharedEvent"]

_HANDLE = struct.Struct("<16sQ16s16s8x")
"""What it is, the process, its server's name, the event's; as long as CUDA's handles."""
_KIND = b"ncclcomm event 1"

_REQUEST = struct.Struct("<c16sQQQ")
"""What is asked for, the event's name, a mark's number, the process that asks, the request's own number."""
_LATEST, _SET, _REACH, _AWAIT = b"l", b"s", b"r", b"a"

_ANSWER = struct.Struct("<cQQ")
"""A mark's state, its number (for a lost one the process that set it), the request's number."""
_UNREACHED, _REACHED, _LOST, _NO_EVENT = b"u", b"r", b"l", b"n"

# Held while a socket is made and during a fork, so that no child has a socket that it doesn't know of.
_making = threading.RLock()


class _Link:
    """A socket that no forked child keeps open: its end is how others learn that this process has ended."""

    __slots__ = ("__weakref__", "lock", "pid", "socket")

    def __init__(self, make: Callable[[], socket.socket]) -> None:
        with _making:
            self.socket = make()
            _links.add(self)
        self.socket.setblocking(True)  # whatever socket.setdefaulttimeout says
        self.pid = os.getpid()
        self.lock = threading.Lock()
        """Held from a request to its answer."""

    def __del__(self) -> None:
        """Close it; it may not have been made."""
        made = getattr(self, "socket", None)
        if made is not None:
            made.close()

    def send(self, message: bytes) -> None:
        """Send a message; they are too short to wait for room. Where nobody is there, `receive` tells."""
        try:
            self.socket.send(message, socket.MSG_NOSIGNAL)
        except ConnectionError:
            return

    def receive(self) -> bytes:
        """Wait for a message; b'' where the other side has ended."""
        try:
            return self.socket.recv(_HANDLE.size)
        except ConnectionError:  # it ended without reading all
            return b""


_requests = itertools.count(1)

_links: weakref.WeakSet[_Link] = weakref.WeakSet()


def _new_socket() -> socket.socket:
    """One that keeps messages apart, and tells of its other side's end."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _address(server: bytes) -> bytes:
    """The abstract address of the server of that name."""
    return b"\0ncclcomm-events-" + server.hex().encode()


def _close_in_child() -> None:
    """In a forked child: leave all connections to the parent."""
    for link in list(_links):
        link.socket.close()
    _making.release()


os.register_at_fork(before=_making.acquire, after_in_parent=_making.release, after_in_child=_close_in_child)


class _Kept:
    """The marks of an event that this process made, numbered from 1, for as long as it or a mark's work lives."""

    __slots__ = ("__weakref__", "latest", "lost", "unreached")

    def __init__(self) -> None:
        self.latest = 0
        self.unreached: dict[int, list[_Peer]] = {}
        """The marks before which there is work to do, and who waits for each."""
        self.lost: dict[int, int] = {}
        """The marks that never will be reached, and the processes that set them."""

    def state(self, number: int) -> tuple[bytes, int]:
        """What `_ANSWER` says of a mark; 0 stands for none, which nobody waits for."""
        if number in self.unreached:
            return _UNREACHED, number
        if number in self.lost:
            return _LOST, self.lost[number]
        return _REACHED, number

    def end(self, number: int) -> None:
        """A mark is reached, or was entered as lost: tell all who wait for it."""
        for peer in self.unreached.pop(number):
            peer.answer(*self.state(number))


class _Peer:
    """The server's side of a connection, which is one event's."""

    __slots__ = ("link", "marks", "pid", "request", "waits_in")

    def __init__(self, link: _Link) -> None:
        self.link = link
        self.pid = 0
        self.request = 0
        self.marks: dict[int, _Kept] = {}
        """The marks that it set and didn't reach."""
        self.waits_in: list[_Peer] = []
        """The list of waiting peers that it is in."""

    def answer(self, state: bytes, about: int) -> None:
        """Answer its request with what `_ANSWER` says."""
        self.link.send(_ANSWER.pack(state, about, self.request))


class _Server:
    """Serves all events that this process made; their marks change in its thread alone."""

    def __init__(self) -> None:
        self.name = secrets.token_bytes(16)
        self.events: weakref.WeakValueDictionary[bytes, _Kept] = weakref.WeakValueDictionary()
        # Not epoll, whose list a forked child would share.
        self._selector = selectors.PollSelector()
        self._listener = _Link(_new_socket)
        self._listener.socket.bind(_address(self.name))
        self._listener.socket.listen(128)
        self._selector.register(self._listener.socket, selectors.EVENT_READ, self._accept)
        self.thread = threading.Thread(target=self._serve, name="ncclcomm-host-events", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        """The thread's whole life."""
        try:
            while True:
                for key, _ in self._selector.select():
                    key.data()
        finally:  # it ends by an error alone, and nobody may wait for an answer then
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]

    def _accept(self) -> None:
        """Take a connection."""
        peer = _Peer(_Link(lambda: self._listener.socket.accept()[0]))
        self._selector.register(peer.link.socket, selectors.EVENT_READ, functools.partial(self._hear, peer))

    def _hear(self, peer: _Peer) -> None:
        """Do what a peer asks for."""
        message = peer.link.receive()
        if len(message) != _REQUEST.size:
            self._leave(peer)
            return
        what, name, number, peer.pid, peer.request = _REQUEST.unpack(message)
        kept = peer.marks.pop(number, None) if what == _REACH else self.events.get(name)
        if kept is None:
            peer.answer(_NO_EVENT, 0)
            return
        if what == _REACH:
            kept.end(number)
        elif what == _SET:
            number = kept.latest = kept.latest + 1
            kept.unreached[number] = []
            peer.marks[number] = kept
        elif what == _LATEST:
            number = kept.latest
        elif number in kept.unreached:
            peer.waits_in = kept.unreached[number]
            peer.waits_in.append(peer)
            return
        peer.answer(*kept.state(number))

    def _leave(self, peer: _Peer) -> None:
        """A peer is gone: the marks that it didn't reach are lost."""
        for number, kept in peer.marks.items():
            kept.lost[number] = peer.pid
            kept.end(number)
        if peer in peer.waits_in:
            peer.waits_in.remove(peer)
        self._selector.unregister(peer.link.socket)
        peer.link.socket.close()


_running: _Server | None = None


def _server() -> _Server:
    """This process's server, started at first use; a forked child has its own."""
    global _running
    with _making:
        if _running is None or not _running.thread.is_alive():
            _running = _Server()
        return _running


class _OwnMark(NamedTuple):
    """A mark that this process set."""

    number: int
    pid: int
    mark: Mark


class SharedEvent(HostEvent):
    """An event of a virtual device that other processes can open, or that another process made.

    Args:
        current_device: gives the device of an event that is opened elsewhere before it is recorded.
    """

    def __init__(self, current_device: Callable[[], int]) -> None:
        super().__init__(timing=False)
        self._current_device = current_device
        self._kept = _Kept()
        server, name = _server(), secrets.token_bytes(16)
        server.events[name] = self._kept
        self._begin(_HANDLE.pack(_KIND, os.getpid(), server.name, name))

    @classmethod
    def opened(cls, handle: bytes, device: int) -> SharedEvent:
        """The event of a handle.

        Raises:
            ArgumentError: it is no handle of such an event.
            DeviceError: the process that made the event has ended, or has dropped the event.
        """
        if len(handle) != _HANDLE.size or not handle.startswith(_KIND):
            raise ArgumentError(
                "from_ipc_handle: this is no handle of an event of virtual devices; both processes have to use the "
                "same kind of devices"
            )
        event = cls.__new__(cls)
        HostEvent.__init__(event, timing=False)
        event.device = device
        event._begin(handle)
        event._unreached()
        return event

    def _begin(self, handle: bytes) -> None:
        """Set what made and opened events have."""
        _, self._maker, self._server, self._name = _HANDLE.unpack(handle)
        self._handle = handle
        self._own: _OwnMark | None = None
        self._link: _Link | None = None

    def record(self, stream: StreamImpl) -> None:
        """Mark the end of the work now enqueued on the stream."""
        self.check_device(stream)
        queue = queue_of(stream)
        link = self._connection()
        _, number = self._ask(link, _SET)
        queue.submit(self._reach, number, link)
        # Behind that, so that who finds this mark reached can tell other processes to go on.
        self._own = _OwnMark(number, link.pid, queue.mark())
        self.device = stream.device

    def _reach(self, number: int, link: _Link) -> None:
        """Say that the work before a mark is done, on the connection on which it was set."""
        if link.pid != os.getpid():
            raise DeviceError("the event was recorded before this process was forked: that holds in the parent alone")
        self._ask(link, _REACH, number)

    def wait(self, stream: StreamImpl) -> None:
        """Make later work of the stream wait for the mark that is the latest now."""
        queue = queue_of(stream)
        number = self._unreached()
        own = self._own_mark(number)
        if own is not None:
            queue.wait_mark(own)
        elif number:
            queue.submit(self._await, number)

    def query(self) -> bool:
        """True if the latest mark is reached or there is none."""
        return not self._unreached()

    def synchronize(self) -> None:
        """Wait for the latest mark."""
        number = self._unreached()
        own = self._own_mark(number)
        if own is not None:
            own.wait()
        elif number:
            self._await(number)

    def ipc_handle(self) -> bytes:
        """What `opened` takes in another process."""
        if self.device is None:
            self.device = self._current_device()
        return self._handle

    def _unreached(self) -> int:
        """The number of the latest mark; 0 if it is reached or there is none.

        Raises:
            DeviceError: it is lost.
        """
        state, number = self._ask(self._connection(), _LATEST)
        return number if state == _UNREACHED else 0

    def _own_mark(self, number: int) -> Mark | None:
        """The mark of that number as this process has it; None if another process set it, or a later one was set."""
        own = self._own
        return own.mark if own is not None and own[:2] == (number, os.getpid()) else None

    def _await(self, number: int) -> None:
        """Return when a mark is reached.

        Raises:
            DeviceError: it is lost.
        """
        self._ask(self._connect(), _AWAIT, number)  # not the connection of all, which would be busy for so long

    def _connection(self) -> _Link:
        """This process's connection to the one that made the event."""
        link = self._link
        if link is None or link.pid != os.getpid():
            link = self._link = self._connect()
        return link

    def _connect(self) -> _Link:
        """A new one."""
        link = _Link(_new_socket)
        try:
            link.socket.connect(_address(self._server))
        except ConnectionError as error:
            raise self._ended() from error
        return link

    def _ask(self, link: _Link, what: bytes, number: int = 0) -> tuple[bytes, int]:
        """Make a request: what the answer says.

        Raises:
            DeviceError: the mark is lost, or the event, or the process that made it.
        """
        request = next(_requests)
        answered = 0
        with link.lock:
            link.send(_REQUEST.pack(what, self._name, number, os.getpid(), request))
            while answered != request:  # Ctrl-C may have left an earlier answer
                message = link.receive()
                if not message:
                    raise self._ended()
                state, about, answered = _ANSWER.unpack(message)
        if state == _NO_EVENT:
            raise DeviceError(
                f"process {self._maker}, which made the event, has dropped it; it has to keep the event for as long as "
                "other processes use it"
            )
        if state == _LOST:
            raise DeviceError(
                f"the event was recorded in process {about}, which ended before the work before the mark was complete"
            )
        return state, about

    def _ended(self) -> DeviceError:
        """The error where nobody serves the event."""
        return DeviceError(
            f"process {self._maker}, which made the event, has ended (or is on another host, or in another container)"
        )
