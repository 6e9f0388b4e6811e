"""Work that calls have queued on a rank's device and that has not ended.

A call on arrays of a device returns once its work is queued, so that it isn't there any more when the work waits for a
rank that never comes. The call therefore leaves an event behind its work, and the watchdog asks the event.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ncclcomm.communicator.board import BOARD, Running, describe_call
from ncclcomm.devices.base import DeviceBackend, EventImpl

if TYPE_CHECKING:
    from ncclcomm.communicator.communicator import Communicator

__all__ = ["Poller", "QueuedCall", "QueuedWork", "note_queued"]

MOST_MARKS = 32
"""Events that a communicator keeps: beyond it the last one moves on, and stands for several calls."""

TOLD_FROM_S = 1.0
"""Age from which other ranks hear of work: until then the watchdog may not have seen that it has ended."""


class _Like(NamedTuple):
    """What a report says of an array; the array itself must not be kept."""

    shape: Any
    dtype: Any


class _Mark(NamedTuple):
    """An event behind a call's work."""

    event: EventImpl
    call: str
    number: int
    limit_s: float | None
    queued_at_s: float
    shape: Any
    dtype: Any

    def arguments(self) -> tuple[Any, ...]:
        """What describe_call looks at."""
        return () if self.dtype is None else (_Like(self.shape, self.dtype),)


_new_mark = functools.partial(tuple.__new__, _Mark)
"""Makes a mark of a tuple, in a third of the time that the class takes."""


@dataclass(slots=True)
class QueuedCall(Running):
    """A call that has returned, and whose work has not ended."""

    mark: _Mark | None = None

    @property
    def queued_s(self) -> float:
        """Seconds since it was queued."""
        return time.monotonic() - (self.since_s if self.mark is None else self.mark.queued_at_s)


class QueuedWork:
    """A communicator's calls whose work has not ended, as far as this rank knows.

    One thread at a time notes calls, and one other thread drops what has ended. Whoever reads takes no lock: noting a
    call may wait for the device, where that takes no more work.

    Args:
        group: the communicator's name.
        backend: the backend of its device.
        device: the rank's device.
    """

    def __init__(self, group: str, backend: DeviceBackend, device: int) -> None:
        self.group = group
        self._backend = backend
        self._device = device
        self._marks: deque[_Mark] = deque()
        self._spare: list[EventImpl] = []
        self._lock = threading.Lock()
        self._ended_at_s = 0.0
        self._oldest: QueuedCall | None = None

    def note(self, entry: Running) -> None:
        """Put an event behind the work of a call, which has just been queued; the device is the current one."""
        marks = self._marks
        with self._lock:
            is_full = len(marks) >= MOST_MARKS
            event = marks[-1].event if is_full else self._unused_event()
            # Work that is captured into a graph doesn't run now.
            if not self._backend.record_current(event, self._device):
                if not is_full:
                    self._spare.append(event)
                return
            shape = dtype = None
            for value in entry.arguments:
                if value is not None:
                    # Only for a report: an object of the caller's which fails to answer has made a good call.
                    try:
                        shape, dtype = value.shape, value.dtype
                    except Exception:
                        shape = dtype = None
                    break
            mark = _new_mark((event, entry.call, entry.number, entry.limit_s, time.monotonic(), shape, dtype))
            if is_full:
                marks[-1] = mark
            else:
                marks.append(mark)

    def _unused_event(self) -> EventImpl:
        """An event that is behind no call."""
        if self._spare:
            return self._spare.pop()
        return self._backend.create_event(timing=False, blocking=False, interprocess=False)

    def drop_ended(self) -> None:
        """Forget the work that has ended, in the order in which it was queued.

        Raises:
            DeviceError: the device is broken, so that nothing of it ends; all is forgotten.
        """
        while (mark := self._first()) is not None:
            try:
                if not mark.event.poll():
                    return
            except Exception:
                self.forget()
                raise
            with self._lock:
                # The communicator may have been closed meanwhile.
                if self._first() is mark:
                    self._marks.popleft()
                    self._spare.append(mark.event)
                    self._ended_at_s = time.monotonic()

    def forget(self) -> None:
        """Forget all."""
        self._marks.clear()

    def oldest(self) -> QueuedCall | None:
        """The oldest call whose work has not ended, the same object as long as it is that; for the watchdog's thread.

        Its time counts from when it was queued, or from when the work before it ended where that is later: a long queue
        that gets on is no fault.
        """
        mark = self._first()
        if mark is None:
            self._oldest = None
        elif self._oldest is None or self._oldest.mark is not mark:
            since_s = max(mark.queued_at_s, self._ended_at_s)
            call = QueuedCall(self.group, mark.call, mark.number, mark.arguments(), mark.limit_s, since_s, mark=mark)
            self._oldest = call
        return self._oldest

    def told(self) -> list[dict[str, Any]]:
        """What other ranks hear of the oldest call, in plain values."""
        mark, now = self._first(), time.monotonic()
        if mark is None or now - max(mark.queued_at_s, self._ended_at_s) < TOLD_FROM_S:
            return []
        detail, for_s = describe_call(mark.arguments()), now - mark.queued_at_s
        return [{"group": self.group, "call": mark.call, "number": mark.number, "detail": detail, "for_s": for_s}]

    def is_oldest(self, entry: QueuedCall) -> bool:
        """True if a call is still the oldest one."""
        return self._first() is entry.mark

    def _first(self) -> _Mark | None:
        """The oldest mark; another thread may be dropping it."""
        try:
            return self._marks[0]
        except IndexError:
            return None


class Poller:
    """A thread that asks, when told to, which queued work has ended: the driver may make it wait.

    Args:
        queued: gives the work to ask about.
        complain: is told what was tried, and what error came of it.
    """

    def __init__(self, queued: Callable[[], list[QueuedWork]], complain: Callable[[str, Exception], None]) -> None:
        self._queued = queued
        self._complain = complain
        self._must_poll, self._has_polled = threading.Event(), threading.Event()
        threading.Thread(target=self._run, name="ncclcomm-watchdog-poll", daemon=True).start()

    def begin(self) -> None:
        """Have it ask; nobody waits."""
        self._must_poll.set()

    def poll(self, within_s: float) -> None:
        """Have it ask, and wait for the answer, at most so many seconds."""
        self._has_polled.clear()
        self._must_poll.set()
        self._has_polled.wait(within_s)

    def _run(self) -> None:
        """The thread's whole life."""
        while True:
            self._must_poll.wait()
            self._must_poll.clear()
            for work in self._queued():
                try:
                    work.drop_ended()
                except Exception as error:  # a thread that died of it would end the job
                    self._complain("asking a device about its work", error)
            self._has_polled.set()


def note_queued(comm: Communicator, entry: Running) -> None:
    """Have the watchdog see to it that the work of a call ends, for which nobody else waits.

    For a call that has queued work on the rank's device, at its end, while that device is the current one. Where
    streams run their work at once, or no watchdog is there, it does nothing.

    Args:
        comm: the communicator.
        entry: the call; nothing of it is kept.

    Raises:
        DeviceError: the device refuses.
    """
    member = comm._member
    if member.backend.immediate or not member.addresses:
        return
    work = BOARD.queued.get(member.name)
    if work is None:
        work = BOARD.queued[member.name] = QueuedWork(member.name, member.backend, member.device)
    work.note(entry)
