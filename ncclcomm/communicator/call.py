"""A call of a communicator while it runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from ncclcomm.communicator.board import BOARD, Running
from ncclcomm.communicator.watchdog_queued import note_queued
from ncclcomm.devices.foreign import Following
from ncclcomm.errors import ArgumentError, MpiError

if TYPE_CHECKING:
    from ncclcomm.communicator.communicator import Communicator

__all__ = ["begin", "end", "explained", "in_call", "in_one_line"]

T = TypeVar("T")

_YOUNG_S = 0.5
"""Watchdogs look at no call of this age: the entry of one that took less is nobody else's, and serves the next one."""


def in_one_line(kind: type[BaseException], error: BaseException | None) -> str:
    """An exception's class and the first line of its message."""
    return ": ".join([kind.__name__, *str(error).splitlines()[:1]])


def begin(comm: Communicator, call: str, arguments: tuple[Any, ...], limit_s: float | None) -> None:
    """Put a call on the board, as what this thread is in.

    Called in a `try` whose handler calls `end` if comm._entry is set: a signal's exception may come in here too.
    """
    now = monotonic()
    entry = comm._last_entry
    if entry is not None and now - entry.since_s < _YOUNG_S:
        entry.call, entry.number, entry.arguments = call, comm._calls, arguments
        entry.limit_s, entry.since_s = limit_s, now
    else:
        entry = comm._last_entry = Running(comm._member.name, call, comm._calls, arguments, limit_s, now)
    comm._committed = comm._in_step = comm._uses_device = False
    comm._received = None
    comm._entry = entry
    BOARD.enter(entry)


def end(comm: Communicator, kind: type[BaseException] | None, error: BaseException | None) -> None:
    """Take it off; a call that failed here alone leaves the communicator unusable.

    An exception that comes in here is the call's own: the handler ends the call once more.
    """
    entry = comm._entry
    assert entry is not None
    took_place = comm._calls > entry.number
    BOARD.leave(entry, took_place)
    if kind is not None and comm.size > 1 and not (comm._broken or comm._closed):
        if comm._committed:
            comm._break(f"{entry.call} failed on this rank while data moved: {in_one_line(kind, error)}")
        elif (took_place or comm._received is not None) and not comm._in_step:
            comm._break(f"{entry.call} was interrupted on this rank while the ranks agreed: {in_one_line(kind, error)}")
    entry.arguments = ()  # the entry outlives the call, and must not keep the caller's arrays
    comm._entry = None


def explained(comm: Communicator, error: MpiError) -> MpiError:
    """An error of MPI's, with the rank that it is on, and what may lie behind it."""
    hint = ""
    if comm.size > 1 and comm._calls > comm._checked_calls:
        hint = ". Ranks may have passed arguments that don't fit: NCCLCOMM_CHECK=true finds out"
    named = copy.copy(error)
    named.args = (f"{comm.topology.describe(comm.rank)}: {error}{hint}",)
    return named


def in_call(
    comm: Communicator, call: str, arguments: tuple[Any, ...], timeout_s: float | None, body: Callable[[], T]
) -> T:
    """Run the long way of a call: the watchdogs tell of it, and the rank's GPU is the current device.

    It begins the call, or goes on with the one that the short way has begun, and left to the long way. This is no
    context manager, since a signal's exception can come between a `with` block and its `__exit__`.
    """
    running = comm._entry
    if running is not None and (comm._received is None or not BOARD.is_in(running)):
        raise ArgumentError(
            f"{call}: this communicator is in {running.call} in another thread; one thread at a time "
            "may call it. Take turns, in one order on all ranks; or, for host arrays alone, split off one for each "
            "thread"
        )
    if comm._broken:
        comm._next_call(call)  # raises, before it looks for a device, which a forked child has none of
    device = comm._member.on_device()
    if comm.backend == "cuda":
        device = Following(comm._backend, device)
    try:
        if running is None:
            begin(comm, call, arguments, comm._timeout_s if timeout_s is None else timeout_s)
        with device:
            result = body()
            if comm._uses_device:
                assert comm._entry is not None
                note_queued(comm, comm._entry)
        end(comm, None, None)
    except BaseException as error:
        if isinstance(device, Following):
            device.end()
        if comm._entry is not None:
            end(comm, type(error), error)
        if isinstance(error, MpiError):
            raise explained(comm, error) from error.__cause__
        raise
    if comm._quick is None or (comm._uses_device and comm._quick_gpu is None):
        comm._find_short_way()
    return result
