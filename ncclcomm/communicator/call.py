"""A call of a communicator while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ncclcomm.communicator.board import BOARD, Running
from ncclcomm.errors import ArgumentError

if TYPE_CHECKING:
    from ncclcomm.communicator.communicator import Communicator

__all__ = ["Call", "in_one_line"]


def in_one_line(kind: type[BaseException], error: BaseException | None) -> str:
    """An exception's class and the first line of its message."""
    return ": ".join([kind.__name__, *str(error).splitlines()[:1]])


class Call:
    """A call in progress: what the watchdogs tell of it, and the rank's GPU as the current device."""

    __slots__ = ("_comm", "_device", "_entry")

    def __init__(self, comm: Communicator, call: str, arguments: tuple[Any, ...], timeout_s: float | None) -> None:
        self._comm = comm
        limit_s = comm._timeout_s if timeout_s is None else timeout_s
        self._entry = Running(comm._member.name, call, comm._calls, arguments, limit_s)

    def __enter__(self) -> None:
        """Begin."""
        running = self._comm._entry
        if running is not None:
            raise ArgumentError(
                f"{self._entry.call}: this communicator is in {running.call} in another thread; one thread at a time "
                "may call it. Split off a communicator for each thread, or take turns"
            )
        self._device = self._comm._member.on_device()
        self._device.__enter__()
        self._comm._entry = self._entry
        self._comm._committed = False
        BOARD.enter(self._entry)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        """End; a call that failed here alone leaves the communicator unusable."""
        took_place = self._comm._calls > self._entry.number
        BOARD.leave(self._entry, took_place=took_place)
        try:
            self._device.__exit__(kind, error, traceback)
        finally:
            if kind is not None and self._comm.size > 1:
                if self._comm._committed:
                    why = "failed on this rank while data moved"
                    self._comm._break(f"{self._entry.call} {why}: {in_one_line(kind, error)}")
                elif took_place and not issubclass(kind, Exception):
                    why = "was interrupted on this rank while the ranks agreed"
                    self._comm._break(f"{self._entry.call} {why}: {in_one_line(kind, error)}")
            self._comm._entry = None
