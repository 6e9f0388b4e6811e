"""What the queues behind the host backend's streams share, and the marks that events set in them.

Both kinds of queue (`host_workers.py`) keep the same rules: work runs one piece at a time, in the order in which it was
enqueued; work that raises doesn't stop the queue, and its error waits in the queue's `Group` (the device) for the next
synchronisation.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

from ncclcomm.errors import DeviceError

__all__ = ["Group", "Mark", "Queue", "queues_of", "roster"]

EXIT_GRACE_S = 1.0
"""How long the end of the process waits, in all, for work that is running."""


class Group:
    """The queues of one device: whose they are, and the errors of their work that nobody has seen yet."""

    def __init__(self, device: int) -> None:
        self.device = device
        self._errors: list[tuple[Queue, DeviceError]] = []
        self._lock = threading.RLock()

    def note(self, queue: Queue, what: str, error: BaseException) -> None:
        """Keep an error until somebody synchronises."""
        report = DeviceError(
            f"work enqueued on stream {queue.label} of host device {self.device} raised {type(error).__name__}: {error}"
            f" (in {what}); what it should have written is missing, the work after it ran",
            name=type(error).__name__,
            call=what,
        )
        report.__cause__ = error
        with self._lock:
            self._errors.append((queue, report))

    def has_errors(self) -> bool:
        """True if errors are kept."""
        return bool(self._errors)

    def raise_first(self, queue: Queue | None = None) -> None:
        """Raise the first kept error of the queue, or of any (None), and forget the others with it."""
        if not self._errors:
            return
        with self._lock:
            mine = [report for owner, report in self._errors if queue in (None, owner)]
            self._errors = [entry for entry in self._errors if queue not in (None, entry[0])]
        if mine:
            raise mine[0]

    def reset_after_fork(self) -> None:
        """Replace a lock that a thread of the parent may have held."""
        self._lock = threading.RLock()


class Mark:
    """A point in a queue's work, reached when all work before it is done."""

    __slots__ = ("_gate", "_generation", "done", "queue", "time_s")

    def __init__(self, queue: Queue, *, done: bool) -> None:
        self.queue = queue
        self.done = done
        self.time_s = time.perf_counter() if done else 0.0
        self._generation = queue.generation
        self._gate = threading.Lock()
        if not done:
            self._gate.acquire()

    def reach(self) -> None:
        """Called by the queue, once, when it comes to the mark."""
        self.time_s = time.perf_counter()
        self.done = True
        self._gate.release()

    def check_generation(self) -> None:
        """Raise for a mark that was unreached when this process was forked: it can't be reached here."""
        if not self.done and self._generation != self.queue.generation:
            raise DeviceError(
                f"the event was recorded on stream {self.queue.label} before this process was forked, and the work "
                "before it was not complete: that work runs in the parent alone. Synchronise before forking"
            )

    def wait(self) -> None:
        """Return when the mark is reached."""
        if not self.done:
            self.check_generation()
            self.queue.refuse_inside("wait for an event of")
            with self._gate:
                return


class Queue(ABC):
    """Work of one stream, in order. A subclass enters itself in the roster once complete, as a fork may be next."""

    def __init__(self, group: Group, label: str) -> None:
        self.group = group
        self.label = label
        self.generation = 0
        self.runner: int | None = None
        """The thread that runs the queue's work, while it does."""

    @abstractmethod
    def submit(self, fn: Callable[..., object], *args: Any) -> None:
        """Enqueue a call."""

    @abstractmethod
    def mark(self) -> Mark:
        """Enqueue a mark."""

    @abstractmethod
    def wait_mark(self, mark: Mark) -> None:
        """Make later work of this queue wait for a mark of any queue."""

    @abstractmethod
    def idle(self) -> bool:
        """True if all work enqueued so far is done."""

    @abstractmethod
    def retire(self) -> None:
        """The stream is gone: end after the work that is enqueued. Called by the garbage collector: takes no lock."""

    @abstractmethod
    def reset_after_fork(self) -> None:
        """In a forked child: be an empty queue that works."""

    def stop(self) -> None:  # noqa: B027
        """At the end of the process: begin to leave."""

    def join(self, timeout_s: float) -> None:  # noqa: B027
        """At the end of the process, after `stop`: wait a while for work that runs."""

    def wait_idle(self) -> None:
        """Return when all work enqueued so far is done."""
        if not self.idle():
            self.refuse_inside("synchronise")
            self.mark().wait()

    def refuse_inside(self, what: str) -> None:
        """Raise where work of this queue would wait for the queue, that is for itself."""
        if self.runner == threading.get_ident():
            raise DeviceError(
                f"a callable that runs on stream {self.label} of host device {self.group.device} can't {what} that "
                "stream: it would wait for itself"
            )

    def _note_lost(self, lost: int) -> None:
        """Have the next synchronisation of a forked child say that work of the parent isn't done here."""
        if lost:
            cause = RuntimeError(f"{lost} pieces of work were enqueued before the fork; they run in the parent alone")
            self.group.note(self, "os.fork", cause)

    def _run(self, fn: Callable[..., object], args: tuple[Any, ...]) -> None:
        """Run one piece of work and keep its error."""
        try:
            fn(*args)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise
            self.group.note(self, getattr(fn, "__qualname__", type(fn).__name__), error)


class _Roster:
    """Every queue that may have work, for device synchronisation, fork and the end of the process."""

    def __init__(self) -> None:
        self.exiting = False
        self._lock = threading.RLock()
        self._queues: dict[int, Queue] = {}
        self._dropped: deque[Queue] = deque()

    def add(self, queue: Queue) -> None:
        """Enter a new queue."""
        with self._lock:
            self._sweep()
            self._queues[id(queue)] = queue

    def drop(self, queue: Queue) -> None:
        """Take a queue out; the garbage collector may call this at any point, so the dictionary changes later."""
        self._dropped.append(queue)

    def queues(self) -> list[Queue]:
        """All queues that may have work."""
        with self._lock:
            self._sweep()
            return list(self._queues.values())

    def _sweep(self) -> None:
        """Take out what was dropped."""
        while self._dropped:
            self._queues.pop(id(self._dropped.popleft()), None)

    def reset_after_fork(self) -> None:
        """In a forked child: no worker lives, and locks may be held by threads that are gone."""
        self._lock = threading.RLock()
        queues = self.queues()
        for group in {id(queue.group): queue.group for queue in queues}.values():
            group.reset_after_fork()
        for queue in queues:
            queue.reset_after_fork()

    def stop_at_exit(self) -> None:
        """Stop the workers, so that none is inside Python when the interpreter goes; queued work is left undone."""
        self.exiting = True
        queues = self.queues()
        for queue in queues:
            queue.stop()
        deadline_s = time.monotonic() + EXIT_GRACE_S
        for queue in queues:
            queue.join(max(0.0, deadline_s - time.monotonic()))


roster = _Roster()
os.register_at_fork(after_in_child=roster.reset_after_fork)
atexit.register(roster.stop_at_exit)


def queues_of(group: Group) -> list[Queue]:
    """The queues of a device that may have work."""
    return [queue for queue in roster.queues() if queue.group is group]
