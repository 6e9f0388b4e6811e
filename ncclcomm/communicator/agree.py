"""The start of every rank collective: look at the arguments, state the call, hear the others, raise together."""

from __future__ import annotations

import contextlib
import copy
import operator
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ncclcomm.arrays import HOST_MEMORY, View
from ncclcomm.communicator.board import BOARD
from ncclcomm.communicator.checks import compare, seconds_above_0
from ncclcomm.communicator.wire import Statement, decode, dtype_code, dtype_of, encode
from ncclcomm.errors import ArgumentError, CommTimeoutError, NcclCommError

if TYPE_CHECKING:
    from ncclcomm.communicator.communicator import Communicator

__all__ = [
    "Facts",
    "agree",
    "check_after_header",
    "check_limit",
    "check_root",
    "facts_of",
    "fit_in_words",
    "fit_of",
    "memory_of",
    "wait_for_all",
]

T = TypeVar("T")

_LEAST_S = 0.05
"""A rank whose own preparations took the whole time limit still finds out by this time whether all have come."""


@dataclass(frozen=True)
class Facts(Generic[T]):
    """What a rank found out about its own arguments."""

    local: T
    """What the call goes on with; stays on this rank."""
    same: Mapping[str, Any]
    """What must be equal on all ranks."""
    own: Mapping[str, Any]
    """What other ranks need to know of this one."""


def check_root(root: Any, size: int, call: str) -> int:
    """The root as a rank.

    Raises:
        ArgumentError: not a whole number from 0 to size - 1.
    """
    if not isinstance(root, bool):
        try:
            number = operator.index(root)
        except TypeError:
            number = -1
        if 0 <= number < size:
            return number
    raise ArgumentError(f"{call}: root is {root!r}; expected a rank from 0 to {size - 1}")


def memory_of(array: View) -> str:
    """The memory kind, which all ranks must share: 'host memory' or 'device memory'."""
    return "host memory" if array.device == HOST_MEMORY else "device memory"


def fit_of(array: View) -> tuple[tuple[int, ...], str | bytes, str]:
    """What must fit where one array is filled from another: shape, the dtype's code, memory kind."""
    return tuple(array.data.shape), dtype_code(array.data.dtype), memory_of(array)


def fit_in_words(fit: tuple[tuple[int, ...], str | bytes, str]) -> str:
    """As messages say it."""
    return f"shape {fit[0]}, dtype {dtype_of(fit[1])}, {fit[2]}"


def facts_of(array: View) -> dict[str, Any]:
    """What a statement says of an array."""
    return {"shape": tuple(array.data.shape), "dtype": dtype_code(array.data.dtype), "memory kind": memory_of(array)}


def agree(
    comm: Communicator, call: str, validate: Callable[[], Facts[T]], header: str = "none", root: Any = None
) -> tuple[T, list[Mapping[str, Any]]]:
    """Validate this rank's arguments and agree with the other ranks; a rank that fails takes part and tells them.

    Args:
        comm: the communicator.
        call: the call's name.
        validate: looks at this rank's arguments; moves no data; raises what is wrong with them.
        header: what others must know even when calls are not checked: 'none', 'root' (the root's facts) or 'all'.
        root: the root as the caller passed it, for a header of the root's.

    Returns:
        What validate found, and each rank's own facts in rank order: empty ones for ranks that nobody asked, and none
        where no rank was asked.

    Raises:
        ArgumentError, UnsupportedError: arguments of this rank, or of a rank that the message names, are wrong.
        MismatchError: ranks disagree.
    """
    number = comm._next_call(call)
    if comm.size == 1 or (header == "none" and number >= comm._checked_calls):
        return _alone(comm, validate)
    failure: Exception | None = None
    try:
        check_limit(comm)
        facts = validate()
        statement = Statement(call, number, facts.same, facts.own)
    except Exception as error:  # whatever it is, the other ranks must be told before it is raised
        failure = error
        same = {}
        if root is not None:
            with contextlib.suppress(ArgumentError):
                same["root"] = check_root(root, comm.size, call)
        statement = Statement(call, number, same, error=(type(error).__name__, str(error)))
    wait_for_all(comm)
    statements = _exchange(comm, statement, header, root)
    compare(statements, comm.topology, comm.rank)
    if failure is not None:
        raise _named(comm, failure) from failure.__cause__
    return facts.local, [s.own for s in statements]


def check_after_header(comm: Communicator, check: Callable[[], None]) -> None:
    """Run a check of what the header told; unchecked, only this rank may know, and the others go on without it."""
    if comm._calls > comm._checked_calls:
        comm._commit()
    check()


def check_limit(comm: Communicator) -> None:
    """Check the call's own time limit.

    Raises:
        ArgumentError: no number of seconds above 0.
    """
    entry = comm._entry
    if entry is not None and entry.limit_s is not None:
        # With a bad one this rank goes on, as far as the others hear of it, by the limit that they take by default.
        entry.limit_s, wanted = comm._timeout_s, entry.limit_s
        entry.limit_s = seconds_above_0(wanted)


def wait_for_all(comm: Communicator) -> None:
    """Where the call has a time limit, wait until all ranks have come to it, before anything is sent.

    Raises:
        CommTimeoutError: a rank did not come in time.
    """
    entry = comm._entry
    if entry is None or entry.limit_s is None or comm.size == 1:
        return
    # What is over here is told here, not by the watchdog, which counts from the start of the call as well.
    limit_s, entry.limit_s = entry.limit_s, None
    left_s = entry.since_s + limit_s - time.monotonic()
    if comm._control.barrier_within(max(left_s, _LEAST_S)):
        entry.limit_s = limit_s
        return
    report = comm._member.report(entry, f"the time limit of {limit_s:g} s is over")
    comm._break(report)
    BOARD.unfinished = True
    raise CommTimeoutError(report, timeout_s=limit_s)


def _alone(comm: Communicator, validate: Callable[[], Facts[T]]) -> tuple[T, list[Mapping[str, Any]]]:
    """Validate where no other rank is told, and none is heard."""
    entry = comm._entry
    is_limited = entry is not None and entry.limit_s is not None
    try:
        if is_limited:
            check_limit(comm)
        facts = validate()
    except NcclCommError as failure:
        raise _named(comm, failure) from failure.__cause__
    if is_limited:
        wait_for_all(comm)
    return facts.local, [facts.own] if comm.size == 1 else []


def _exchange(comm: Communicator, statement: Statement, header: str, root: Any) -> list[Statement]:
    """The statements that this rank gets to hear; those it doesn't hear repeat its own, without facts.

    A statement that says the same as this rank's is this rank's object.
    """
    said = encode(statement)
    if header == "all" or statement.number < comm._checked_calls:
        return [statement if data == said else decode(data) for data in comm._control.all_gather_bytes(said)]
    unheard = Statement(statement.call, statement.number, statement.same)
    heard = [unheard] * comm.size
    heard[comm.rank] = statement
    if header == "root":
        with contextlib.suppress(ArgumentError):
            rank = check_root(root, comm.size, statement.call)
            heard[rank] = decode(comm._control.broadcast_bytes(said, rank))
    return heard


def _named(comm: Communicator, failure: Exception) -> Exception:
    """The failure with this rank's name in front, in its own class where that class is ours."""
    if not isinstance(failure, NcclCommError) or comm.size == 1:
        return failure
    named = copy.copy(failure)
    named.args = (f"{comm.topology.describe(comm.rank)}: {failure}",)
    return named
