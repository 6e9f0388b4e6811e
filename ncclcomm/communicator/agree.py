"""The start of every rank collective: look at the arguments, state the call, hear the others, raise together."""

from __future__ import annotations

import contextlib
import copy
import operator
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, TypeVar

from ncclcomm.arrays import HOST_MEMORY, View
from ncclcomm.communicator.board import BOARD
from ncclcomm.communicator.checks import compare, seconds_above_0
from ncclcomm.communicator.wire import (
    Statement,
    decode,
    dtype_code,
    dtype_of,
    encode,
    header_of,
    said_by,
    split_header,
    statement_of,
)
from ncclcomm.errors import ArgumentError, CommTimeoutError, MpiError, NcclCommError

if TYPE_CHECKING:
    from ncclcomm.communicator.communicator import Communicator

__all__ = [
    "NOTHING_TOLD",
    "Facts",
    "Told",
    "agree",
    "agree_at_root",
    "agree_with_root",
    "check_after_header",
    "check_limit",
    "check_root",
    "facts_of",
    "fit_in_words",
    "fit_of",
    "memory_of",
    "named",
    "raise_alike",
    "wait_for_all",
]

T = TypeVar("T")

_LEAST_S = 0.05
"""A rank whose own preparations took the whole time limit still finds out by this time whether all have come."""


@dataclass(slots=True)
class Facts(Generic[T]):
    """What a rank found out about its own arguments."""

    local: T
    """What the call goes on with; stays on this rank."""
    same: Mapping[str, Any]
    """What must be equal on all ranks."""
    own: Mapping[str, Any]
    """What other ranks need to know of this one."""
    payload: bytes = b""
    """Few data, to go with what is told of them."""


class Told(NamedTuple):
    """What a rank told others in an unchecked call."""

    said: bytes
    """Its facts, as wire.said_by writes them."""
    payload: bytes
    """Its data, where they are few."""


NOTHING_TOLD = Told(b"", b"")


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
    comm: Communicator, call: str, validate: Callable[[], Facts[T]], header: str = "none"
) -> tuple[T, list[Mapping[str, Any]]]:
    """Validate this rank's arguments and agree with the other ranks; a rank that fails takes part and tells them.

    Args:
        comm: the communicator.
        call: the call's name.
        validate: looks at this rank's arguments; moves no data; raises what is wrong with them. Where comm._stated is
            false nobody hears what it finds, and it leaves the facts out.
        header: what others must know even when calls are not checked: 'none' or 'all' (each rank's facts).

    Returns:
        What validate found, and each rank's own facts in rank order: none where no rank was asked.

    Raises:
        ArgumentError, UnsupportedError: arguments of this rank, or of a rank that the message names, are wrong.
        MismatchError: ranks disagree.
    """
    number = comm._next_call(call)
    comm._stated = header == "all" or (comm.size > 1 and number < comm._checked_calls)
    if comm.size == 1 or not comm._stated:
        return _alone(comm, validate)
    facts, statement, failure = _state(comm, call, number, validate)
    said = encode(statement)
    # A statement that says the same as this rank's becomes this rank's object.
    statements = [statement if data == said else decode(data) for data in comm._control.all_gather_bytes(said)]
    raise_alike(comm, lambda: compare(statements, comm.topology, comm.rank))
    if facts is None:
        _fail(comm, failure, are_told=True)
    return facts.local, [s.own for s in statements]


def agree_with_root(
    comm: Communicator, call: str, validate: Callable[[], Facts[T]], root: Any
) -> tuple[T, list[Mapping[str, Any]], Told]:
    """As agree, for calls in which all ranks need the root's facts; unchecked, these alone go to all ranks.

    Returns:
        What validate found; each rank's own facts in rank order, empty ones for ranks that nobody asked; and what went
        from the root to all: nothing where calls are checked.
    """
    if comm.size == 1 or comm._calls < comm._checked_calls:
        return *agree(comm, call, validate, "all"), NOTHING_TOLD
    number = comm._next_call(call)
    comm._stated = True
    facts, statement, failure = _state(comm, call, number, validate, root)
    rank = statement.same.get("root")
    heard = [Statement(call, number, statement.same)] * comm.size
    heard[comm.rank] = statement
    told = NOTHING_TOLD
    if rank == comm.rank:
        told = Told(said_by(statement), b"" if facts is None else facts.payload)
        comm._control.broadcast_bytes(header_of(number, *told), rank)
    elif rank is not None:
        header, comm._received = comm._received, None
        other, *rest = split_header(comm._control.broadcast_bytes(b"", rank) if header is None else header)
        told = Told(*rest)
        heard[rank] = statement_of(other, told.said)
    raise_alike(comm, lambda: compare(heard, comm.topology, comm.rank))
    if facts is None:
        _fail(comm, failure, are_told=rank is not None and heard[rank].error is not None)
    return facts.local, [s.own for s in heard], told


def agree_at_root(
    comm: Communicator, call: str, validate: Callable[[], Facts[T]], root: Any
) -> tuple[T, list[Mapping[str, Any]], list[Told]]:
    """For unchecked calls in which only the root needs the others' facts: these go to the root alone.

    What the root raises then the others don't hear, and go on; so the communicator is of no more use to it.

    Returns:
        What validate found; on the root each rank's own facts, in rank order; and what each told the root: on another
        rank what this one did.
    """
    number = comm._next_call(call)
    comm._stated = True
    facts, statement, failure = _state(comm, call, number, validate, root)
    rank = statement.same.get("root")
    if rank is None:
        _fail(comm, failure, are_told=False)
    mine = Told(said_by(statement), b"" if facts is None else facts.payload)
    told, heard = [mine], []
    headers, comm._received = comm._received, None
    if headers is None:
        headers = comm._control.gather_bytes(header_of(number, *mine), rank)
    if rank == comm.rank:
        comm._committed = True
        parts = [split_header(header) for header in headers]
        told = [Told(*rest) for _, *rest in parts]
        heard = [statement_of(other, said) for other, said, _ in parts]
        heard[rank] = statement
        raise_alike(comm, lambda: compare(heard, comm.topology, comm.rank))
    if facts is None:
        _fail(comm, failure, are_told=True)
    return facts.local, [s.own for s in heard], told


def _state(
    comm: Communicator, call: str, number: int, validate: Callable[[], Facts[T]], root: Any = None
) -> tuple[Facts[T] | None, Statement, Any]:
    """What this rank says of its call: its facts or, where they are None, its failure; once all ranks have come."""
    facts: Facts[T] | None = None
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
    return facts, statement, failure


def check_after_header(comm: Communicator, check: Callable[[], None]) -> None:
    """Run a check of what the header told; unchecked, only this rank may know, and the others go on without it."""
    if comm._calls > comm._checked_calls:
        comm._committed = True
    raise_alike(comm, check)


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
    try:
        if comm._control.barrier_within(max(left_s, _LEAST_S)):
            entry.limit_s = limit_s
            return
    except BaseException:
        BOARD.unfinished = True  # the barrier that was begun, which only all ranks can end
        raise
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
        _fail(comm, failure, are_told=False)
    if is_limited:
        wait_for_all(comm)
    return facts.local, [facts.own] if comm.size == 1 else []


def raise_alike(comm: Communicator, check: Callable[[], None]) -> None:
    """Run a check whose errors of ours every rank raises that heard what this one did."""
    try:
        check()
    except NcclCommError:
        comm._in_step = True
        raise


def _fail(comm: Communicator, failure: Exception, *, are_told: bool) -> NoReturn:
    """Raise what is wrong with this rank's arguments.

    Where the others are not told, the program may make the call once more with better ones. What is no error of ours
    can be a signal's exception, which came at any point of the call, and the communicator is given up.
    """
    comm._in_step = are_told or isinstance(failure, NcclCommError)
    raise named(comm, failure) from failure.__cause__


def named(comm: Communicator, failure: Exception) -> Exception:
    """The failure with this rank's name in front, in its own class where that is ours; `explained` names MPI's."""
    if not isinstance(failure, NcclCommError) or isinstance(failure, MpiError) or comm.size == 1:
        return failure
    named = copy.copy(failure)
    named.args = (f"{comm.topology.describe(comm.rank)}: {failure}",)
    return named
