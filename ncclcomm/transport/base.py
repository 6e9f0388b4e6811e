"""The contract of a transport: collectives of one flat group, on contiguous buffers.

A group has `size` members, numbered from 0. One process drives some of them, `members`: a transport over ranks drives
one, a transport over the devices of one process drives all. Every call takes one entry per driven member, in the order
of `members`. A transport knows no nodes, makes no checks beyond its assertions and owns no array: callers have
validated.

For all calls: arrays are plain ones (numpy.ndarray, for host memory and virtual devices, or cupy.ndarray),
C-contiguous, one-dimensional, of one dtype, and of the lengths stated here; `root` is a member's number and the same
on all members; the members call in the same order; inputs are not changed unless they are stated as in place; inputs
and outputs do not overlap otherwise. Device arrays are used on their device's current stream; for host arrays the call
returns when the array may be used again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

__all__ = ["REDUCTIONS", "Transport"]

REDUCTIONS = ("sum", "prod", "min", "max")
"""The reductions a transport does; `avg` is a sum that its caller divides."""


class Transport(ABC):
    """Collectives of one flat group of members."""

    name: str
    size: int
    members: tuple[int, ...]

    @abstractmethod
    def broadcast(self, buffers: Sequence[Any], root: int) -> None:
        """Fill every member's buffer with the root's, in place; all of one length."""

    @abstractmethod
    def scatter(self, parts: Sequence[Any] | None, outs: Sequence[Any], root: int) -> None:
        """Copy part i of the root into member i's out.

        Args:
            parts: where this process drives the root, `size` arrays, parts[i] as long as member i's out; else None.
            outs: one array per driven member; the root's may be its own part itself (nothing is copied then).
            root: member that holds the parts.
        """

    @abstractmethod
    def gather(self, arrays: Sequence[Any], parts: Sequence[Any] | None, root: int) -> None:
        """Copy member i's array into part i of the root: the reverse of scatter, with the same rules."""

    @abstractmethod
    def reduce(self, arrays: Sequence[Any], outs: Sequence[Any | None], op: str, root: int) -> None:
        """Reduce all members' arrays into the root's out.

        Args:
            arrays: one per driven member, all of one length.
            outs: the root's result, of that length, None for other members; it may be the root's array itself.
            op: one of REDUCTIONS.
            root: member that gets the result.
        """

    @abstractmethod
    def all_reduce(self, arrays: Sequence[Any], outs: Sequence[Any], op: str) -> None:
        """Reduce all members' arrays into every member's out, with identical bits; an out may be its own array."""

    @abstractmethod
    def move(self, array: Any | None, out: Any | None, source: int, dest: int) -> None:
        """Copy from one member to another one; only these two call it.

        Args:
            array: where this process drives `source`, what to send; else None.
            out: where this process drives `dest`, as long; else None.
            source: member that sends.
            dest: another member, which receives.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Return when every member has called it."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the transport holds; collective over the members, idempotent."""
