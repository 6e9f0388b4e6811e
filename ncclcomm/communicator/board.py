"""What this process is doing in which communicator, for its watchdog to tell the others."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ncclcomm.communicator.watchdog_queued import QueuedWork

__all__ = ["BOARD", "Board", "Running", "describe_call", "where_is_main_thread"]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_DEVICES = os.path.join(_PACKAGE, "devices", "")

_CLOSED_KEPT = 64
"""Closed communicators that are still told of."""


@dataclass(slots=True)
class Running:
    """A call that a thread is in."""

    group: str
    """Name of the communicator, the same on its ranks."""
    call: str
    number: int
    arguments: tuple[Any, ...]
    """What describe_call looks at, if anybody asks."""
    limit_s: float | None
    since_s: float = field(default_factory=time.monotonic)
    look_at_s: float = 1.0
    """Age at which the watchdog asks the other ranks next."""
    suspects: frozenset[int] = frozenset()
    """Ranks that seemed gone when they were last asked."""
    is_told: bool = False
    """That the call takes long has been said."""
    complete_at_s: float | None = None
    """When no rank was still to come, where some had made the call and left."""


@dataclass
class Board:
    """One process's state; its own threads write it, the watchdog reads it."""

    running: dict[int, Running] = field(default_factory=dict)
    """By thread."""
    queued: dict[str, QueuedWork] = field(default_factory=dict)
    """By communicator: the work of calls that returned, on this rank's device."""
    last: dict[str, tuple[str, int]] = field(default_factory=dict)
    """By communicator: the call that ended last, and its number."""
    broken: dict[str, tuple[int, str]] = field(default_factory=dict)
    """By communicator that this rank can't go on with: the first call that it doesn't make, and why."""
    unfinished: bool = False
    """MPI has an operation of ours that was given up, so that it can't be finalised."""
    leaving: str = ""
    """Why this process makes no further call."""
    closed: deque[str] = field(default_factory=deque)
    """Communicators that were closed, and are still told of: other ranks may not have come to the end of close."""

    def enter(self, entry: Running) -> None:
        """Say that this thread is in a call."""
        self.running[get_ident()] = entry

    def leave(self, entry: Running, took_place: bool) -> None:
        """Say that it has left it; a call that was refused at once took no place among the communicator's calls."""
        self.running.pop(get_ident(), None)
        if took_place:
            self.last[entry.group] = (entry.call, entry.number)

    def is_in(self, entry: Running) -> bool:
        """True if this thread is in the call."""
        return self.running.get(get_ident()) is entry

    def close(self, group: str) -> None:
        """Say that this process has closed a communicator, and forget one that it closed long ago."""
        self.closed.append(group)
        if len(self.closed) > _CLOSED_KEPT:
            forgotten = self.closed.popleft()
            self.last.pop(forgotten, None)
            self.broken.pop(forgotten, None)

    def state(self, group: str | None = None) -> dict[str, Any]:
        """What this process does, in plain values.

        Args:
            group: the communicator that is asked about; None, and whichever it is once this process leaves: all.
        """
        now = time.monotonic()
        last, broken, queued = dict(self.last), dict(self.broken), dict(self.queued)
        if group is not None and not self.leaving:
            queued = {name: work for name, work in queued.items() if name == group}
            last = {name: value for name, value in last.items() if name == group}
            broken = {name: value for name, value in broken.items() if name == group}
        return {
            "running": [
                {
                    "group": entry.group,
                    "call": entry.call,
                    "number": entry.number,
                    "detail": describe_call(entry.arguments),
                    "for_s": now - entry.since_s,
                    "on_device": _waits_for_device(thread),
                }
                for thread, entry in list(self.running.items())
            ],
            "queued": [told for work in queued.values() for told in work.told()],
            "last": last,
            "broken": broken,
            "leaving": self.leaving,
            "line": where_is_main_thread(),
        }


BOARD = Board()
"""This process's."""


def describe_call(arguments: tuple[Any, ...]) -> str:
    """The first array among a call's arguments, in words; '' where there is none."""
    for value in arguments:
        # A thread of ours asks, so that an object of the caller's which fails to answer must not be heard of.
        with contextlib.suppress(Exception):
            return f"shape {tuple(value.shape)}, {value.dtype}"
    return ""


def _waits_for_device(thread: int) -> bool:
    """True if a thread is in code of ours that enqueues work on a device or waits for it."""
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_DEVICES)


def where_is_main_thread() -> str:
    """The line of the user's program that the main thread is on, as `train.py:45 in step`; '' where it is on none."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
