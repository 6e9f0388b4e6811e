"""Every rank states its call before data moves; where ranks disagree, or one has bad arguments, all of them raise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, NoReturn, Protocol

from ncclcomm import errors
from ncclcomm.communicator.wire import Statement, dtype_of
from ncclcomm.errors import ArgumentError, MismatchError, NcclCommError
from ncclcomm.topology import Topology, format_ranks

__all__ = [
    "Control",
    "SoloControl",
    "compare",
    "group_ranks",
    "raise_for",
    "raise_mismatch",
    "seconds_above_0",
    "together",
]


class Control(Protocol):
    """How the ranks of a communicator exchange small objects; each call is collective."""

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every rank's object, in rank order, on every rank."""

    def broadcast_object(self, obj: Any, root: int) -> Any:
        """The root's object on every rank."""

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order, on every rank; in one small exchange where they are few."""

    def broadcast_bytes(self, data: bytes, root: int) -> bytes:
        """The root's bytes on every rank; what the others pass is ignored."""

    def gather_bytes(self, data: bytes, root: int) -> list[bytes]:
        """Every rank's bytes, in rank order, on the root; nothing on the others, which wait for nobody."""

    def barrier_within(self, limit_s: float) -> bool:
        """True when all ranks have called it; False if that takes longer, and no call can follow then."""


class SoloControl:
    """The control of a world of one."""

    def all_gather_object(self, obj: Any) -> list[Any]:
        """See Control."""
        return [obj]

    def broadcast_object(self, obj: Any, root: int) -> Any:
        """See Control."""
        return obj

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """See Control."""
        return [data]

    def broadcast_bytes(self, data: bytes, root: int) -> bytes:
        """See Control."""
        return data

    def gather_bytes(self, data: bytes, root: int) -> list[bytes]:
        """See Control."""
        return [data]

    def barrier_within(self, limit_s: float) -> bool:
        """See Control."""
        return True


def group_ranks(values: Sequence[Any]) -> list[tuple[Any, list[int]]]:
    """The distinct values among the ranks', each with the ranks that have it, in order of first rank."""
    groups: list[tuple[Any, list[int]]] = []
    for rank, value in enumerate(values):
        for known, ranks in groups:
            if known == value:
                ranks.append(rank)
                break
        else:
            groups.append((value, [rank]))
    return groups


def raise_mismatch(topology: Topology, rank: int, what: str, values: Sequence[Any], mend: str) -> NoReturn:
    """Raise the MismatchError that names every group of ranks and what each passed."""
    groups = "; ".join(f"{format_ranks(ranks)}: {_in_words(value)}" for value, ranks in group_ranks(values))
    raise MismatchError(f"{topology.describe(rank)}: {what}: {groups}. {mend}")


def _in_words(value: Any) -> Any:
    """A value as a message shows it."""
    return dtype_of(value) if isinstance(value, bytes) else value


def compare(statements: Sequence[Statement], topology: Topology, rank: int) -> None:
    """Raise, the same on every rank, where the statements don't fit each other.

    Raises:
        MismatchError: ranks are in different calls, or passed what must be equal and is not.
        NcclCommError: a rank's arguments are wrong: the class of its own error, naming the rank.
    """
    mine = statements[rank]
    if mine.error is None and all(statement is mine or _says_the_same(statement, mine) for statement in statements):
        return
    calls = [f"{s.call} (call {s.number})" for s in statements]
    if len(set(calls)) > 1:
        raise_mismatch(
            topology, rank, "ranks are in different calls", calls, "Every rank must make the same calls in one order."
        )
    roots = [s.same.get("root") for s in statements]
    if None not in roots and len(set(roots)) > 1:
        raise_mismatch(
            topology, rank, f"{mine.call}: ranks disagree on root", roots, "Every rank must pass the same root."
        )
    for other, statement in enumerate(statements):
        if statement.error is not None and mine.error is None:
            name, message = statement.error
            raise_for(name, f"{topology.describe(rank)}: {topology.describe(other)} made a bad call: {message}")
    if mine.error is not None:
        return
    for name in dict.fromkeys(name for s in statements for name in s.same):
        values = [s.same.get(name) for s in statements]
        if any(value != values[0] for value in values):
            raise_mismatch(
                topology,
                rank,
                f"{mine.call}: ranks disagree on {name}",
                values,
                f"Every rank must pass the same {name}.",
            )


def _says_the_same(statement: Statement, mine: Statement) -> bool:
    """True if a statement has no error, and agrees with this rank's wherever they must."""
    return (
        statement.error is None
        and (statement.call, statement.number) == (mine.call, mine.number)
        and statement.same == mine.same
    )


def raise_for(name: str, message: str) -> NoReturn:
    """Raise the error class of that name."""
    found: Callable[[str], NcclCommError] = getattr(errors, name, NcclCommError)
    raise found(message)


def seconds_above_0(value: Any) -> float:
    """A time limit.

    Raises:
        ArgumentError: no number of seconds above 0.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < float("inf"):
        raise ArgumentError(f"timeout_s is {value!r}; expected a number of seconds above 0, or None")
    return float(value)


def together(control: Control, rank: int, call: str, local: Callable[[], Any]) -> Any:
    """Do a local step on every rank; if it fails on one, every rank raises."""
    failure: Exception | None = None
    value = None
    try:
        value = local()
    except Exception as error:  # the other ranks must be told before it is raised
        failure = error
    told = control.all_gather_object(None if failure is None else (type(failure).__name__, str(failure)))
    if failure is not None:
        raise failure
    for other, problem in enumerate(told):
        if problem is not None:
            raise_for(problem[0], f"rank {rank}: {call}: rank {other} failed: {problem[1]}")
    return value
