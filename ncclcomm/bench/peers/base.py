"""The contract of a peer: another package, or the library below, that the same rows are timed with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ncclcomm.bench.case import Case

if TYPE_CHECKING:
    from ncclcomm.bench.group import Group

__all__ = ["Absent", "Peer"]


class Absent(Exception):
    """A peer can't take part in this run; the text says why and what would bring it."""


class Peer:
    """Someone who is timed. A subclass has a method `_NAME(case)` for each collective NAME that it has.

    Making one is collective over the group, and raises Absent on every rank that lacks what it takes.
    """

    name: str
    """As in the table."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def versions(self) -> dict[str, str]:
        """The versions of what it brings, by name."""
        return {}

    def call(self, case: Case) -> Callable[[], Any] | None:
        """A call of this peer on a case's own buffers, ready to be timed; None where it has none for the row.

        Local: the answer depends on what is equal on all ranks.

        Args:
            case: the buffers, dtype and reduction.
        """
        make = getattr(self, f"_{case.row.op.name}", None)
        return None if make is None or not self.takes(case) else make(case)

    def takes(self, case: Case) -> bool:
        """True if it has the row's dtype and reduction."""
        return case.row.dtype.isnative

    def results(self, case: Case, returned: Any) -> tuple[Any, ...]:
        """The results of a call, one for each member here; None where a member gets none.

        Args:
            case: the buffers.
            returned: what the call returned.
        """
        return case.recvs

    def prime(self, case: Case) -> None:
        """Prepare one call whose result is looked at, where the call works on its own result; untimed and local.

        Args:
            case: the buffers.
        """

    def close(self) -> None:
        """Give back what it holds; collective."""
