"""The two kinds of queue behind the host backend's streams.

`InlineQueue` runs work inside the call that enqueues it; `WorkerQueue` gives it to a thread of its own.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from ncclcomm.devices.host_queue import Group, Mark, Queue, roster

__all__ = ["InlineQueue", "WorkerQueue"]


class InlineQueue(Queue):
    """Runs work inside the call that enqueues it; what that work enqueues here itself runs right after it."""

    def __init__(self, group: Group, label: str) -> None:
        super().__init__(group, label)
        self._lock = threading.RLock()
        self._items: deque[Mark | tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        roster.add(self)

    def submit(self, fn: Callable[..., object], *args: Any) -> None:
        """Enqueue a call, which has run when this returns."""
        with self._lock:
            self._items.append((fn, args))
            # The lock is re-entrant: a runner here is this thread, in the work that made this call.
            if self.runner is None:
                self._drain()

    def _drain(self) -> None:
        """Run what is enqueued."""
        self.runner = threading.get_ident()
        try:
            while self._items:
                item = self._items.popleft()
                if isinstance(item, Mark):
                    item.reach()
                else:
                    self._run(*item)
        finally:
            self.runner = None

    def mark(self) -> Mark:
        """Enqueue a mark, which is reached at once except inside the queue's own work."""
        with self._lock:
            if self.runner is None:
                return Mark(self, done=True)
            mark = Mark(self, done=False)
            self._items.append(mark)
            return mark

    def wait_mark(self, mark: Mark) -> None:
        """Wait for the mark now: later work of this queue is later work of the calling thread."""
        if mark.queue is not self:
            mark.wait()

    def idle(self) -> bool:
        """True unless a thread is inside a call that runs work here."""
        return self.runner is None

    def retire(self) -> None:
        """Nothing is left to do: whoever runs work here holds the stream."""
        roster.drop(self)

    def reset_after_fork(self) -> None:
        """Forget the work that another thread of the parent was in, unless the fork came from within the work."""
        self._lock = threading.RLock()
        if self.runner == threading.get_ident():
            return
        lost = len(self._items) + (self.runner is not None)
        self._items.clear()
        self.runner = None
        self.generation += 1
        self._note_lost(lost)


class WorkerQueue(Queue):
    """Runs work in a daemon thread of its own, started when there is first something to do."""

    def __init__(self, group: Group, label: str) -> None:
        super().__init__(group, label)
        self._lock = threading.RLock()
        # SimpleQueue.put may be called from a destructor, whatever the interrupted thread holds.
        self._items: SimpleQueue[Any] = SimpleQueue()
        self._submitted = 0
        self._completed = 0
        self.thread: threading.Thread | None = None
        roster.add(self)

    def submit(self, fn: Callable[..., object], *args: Any) -> None:
        """Enqueue a call, which the worker runs later than this."""
        if roster.exiting:
            self._run(fn, args)
        else:
            self._put((fn, args))

    def mark(self) -> Mark:
        """Enqueue a mark, or take the reached one that an idle queue is at."""
        with self._lock:
            mark = Mark(self, done=roster.exiting or self.idle())
            if not mark.done:
                self._put(mark)
            return mark

    def wait_mark(self, mark: Mark) -> None:
        """Make the worker wait for the mark before it goes on."""
        if not mark.done:
            mark.check_generation()
            self.submit(mark.wait)

    def idle(self) -> bool:
        """True if the worker has done all it was given."""
        return self._completed == self._submitted

    def _put(self, item: Any) -> None:
        """Hand the worker an item."""
        with self._lock:
            self._submitted += 1
            self._items.put(item)
            if self.thread is None:
                self.thread = threading.Thread(
                    target=self._serve, args=(self._items,), name=f"ncclcomm-host-stream-{self.label}", daemon=True
                )
                self.thread.start()

    def _serve(self, items: SimpleQueue[Any]) -> None:
        """Run items until told to leave; the worker's whole life."""
        self.runner = threading.get_ident()
        item = items.get()
        while not (roster.exiting or (item is None and self._may_leave())):
            # A mark counts as complete before its waiters wake, so that they find the queue idle.
            if isinstance(item, Mark):
                self._completed += 1
                item.reach()
            elif item is not None:
                self._run(*item)
                if items is not self._items:
                    return  # In a child that this work forked, where this thread is no worker.
                self._completed += 1
            # Holding the last item while waiting would keep its arrays alive.
            item = None
            item = items.get()
        self._leave(item, items)

    def _may_leave(self) -> bool:
        """True if the sign to leave came last; else it goes behind what came after it, as a device's mark may."""
        with self._lock:
            if self.idle():
                return True
            self._items.put(None)
            return False

    def _leave(self, item: Any, items: SimpleQueue[Any]) -> None:
        """Wake whoever waits for marks that the end of the process leaves unreached, and be gone."""
        while item is not None:
            if isinstance(item, Mark):
                item.reach()
            item = None if items.empty() else items.get()
        self.runner = None
        roster.drop(self)

    def stop(self) -> None:
        """Have the worker leave at the end of the process."""
        self._items.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the worker to leave."""
        if self.thread is not None:
            self.thread.join(timeout_s)

    def retire(self) -> None:
        """Have the worker end after the work that is enqueued."""
        if self.thread is None:
            roster.drop(self)
        else:
            self._items.put(None)

    def reset_after_fork(self) -> None:
        """Start afresh; if the parent had work enqueued, the next synchronisation says that it isn't done here."""
        lost = self._submitted - self._completed
        self._lock, self._items, self.thread = threading.RLock(), SimpleQueue(), None
        self._submitted = self._completed = 0
        self.runner = None
        self.generation += 1
        self._note_lost(lost)
