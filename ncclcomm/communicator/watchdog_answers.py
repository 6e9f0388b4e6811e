"""What the ranks' answers mean for a call that waits: who is in it, who will not come, and where the others are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ncclcomm.communicator.board import Running, describe_call
from ncclcomm.communicator.watchdog_address import Address
from ncclcomm.communicator.watchdog_queued import QueuedCall
from ncclcomm.topology import Topology, format_ranks

__all__ = ["DIED", "SILENT", "Group", "Lost", "lost_ranks", "ranks_in_call", "report", "report_head"]

DIED = "died"
SILENT = "silent"


@dataclass(frozen=True)
class Group:
    """A communicator as a watchdog knows it."""

    name: str
    topology: Topology
    rank: int
    addresses: tuple[Address, ...]
    is_closing: bool = False
    """All ranks have come to close it, so that those that are through may leave."""

    def describe(self, rank: int) -> str:
        """A rank in words, with its host where there are several."""
        words = self.topology.describe(rank)
        several = any(address.host != self.addresses[0].host for address in self.addresses)
        return f"{words} on {self.addresses[rank].host_name}" if several else words


@dataclass(frozen=True)
class Lost:
    """The ranks that make no further call."""

    gone: frozenset[int]
    """They died, or leave without having made the call."""
    left: frozenset[int]
    """They made the call, and left: their data may still be on the way."""
    is_complete: bool
    """No rank is still to come: each is in the call, has made it, or is lost."""


def _matching(entry: Running, answer: Any) -> list[dict[str, Any]]:
    """What a rank runs that is the same call."""
    if not isinstance(answer, dict):
        return []
    call = (entry.group, entry.call, entry.number)
    return [running for running in answer["running"] if (running["group"], running["call"], running["number"]) == call]


def _queued(entry: Running, answer: Any) -> dict[str, Any] | None:
    """The oldest call of the communicator whose work on a rank's device has not ended."""
    told = answer["queued"] if isinstance(answer, dict) else []
    return next((queued for queued in told if queued["group"] == entry.group), None)


def ranks_in_call(entry: Running, answers: Sequence[Any]) -> set[int]:
    """Ranks that are in the same call; of one whose work is queued, those where work of the communicator hasn't ended.

    Args:
        entry: the call.
        answers: each rank's state, DIED or SILENT.
    """
    if isinstance(entry, QueuedCall):
        return {rank for rank, answer in enumerate(answers) if _queued(entry, answer)}
    return {rank for rank, answer in enumerate(answers) if _matching(entry, answer)}


def lost_ranks(entry: Running, answers: Sequence[Any]) -> Lost:
    """Ranks that the call may need and that make no further one.

    Args:
        entry: the call.
        answers: each rank's state, DIED or SILENT.
    """
    gone: set[int] = set()
    left: set[int] = set()
    here = ranks_in_call(entry, answers)
    for rank, answer in enumerate(answers):
        if answer == DIED:
            gone.add(rank)
        elif isinstance(answer, dict):
            _, number = answer["last"].get(entry.group, ("", -1))
            broken_at, _ = answer["broken"].get(entry.group, (entry.number + 1, ""))
            if broken_at <= entry.number or (answer["leaving"] and number < entry.number):
                gone.add(rank)
            elif number >= entry.number:
                (left if answer["leaving"] else here).add(rank)
    return Lost(frozenset(gone), frozenset(left), len(gone | left | here) == len(answers))


def report_head(entry: Running, who: str, why: str) -> str:
    """A report's first line: who waited in which call, and why that is told.

    Args:
        entry: the call.
        who: the rank that waited, in words.
        why: what ends the waiting, or that it goes on.
    """
    call = _call_in_words(entry.call, entry.number, describe_call(entry.arguments))
    if isinstance(entry, QueuedCall):
        return f"ncclcomm: {who}: {call} was queued {entry.queued_s:.0f} s ago, its device work has not ended: {why}"
    return f"ncclcomm: {who}: waited {time.monotonic() - entry.since_s:.0f} s in {call}: {why}"


def _call_in_words(call: str, number: int, detail: str) -> str:
    """Such as `all_reduce (call 3, shape (2,), float64)`."""
    return f"{call} (call {number}{', ' + detail if detail else ''})"


def report(entry: Running, group: Group, answers: Sequence[Any], why: str) -> str:
    """Where every rank of the group is, in words.

    Args:
        entry: the call that this rank waits in.
        group: the communicator.
        answers: each rank's state, DIED or SILENT.
        why: what ends the waiting, or that it goes on.
    """
    same = sorted(ranks_in_call(entry, answers) | {group.rank})
    is_queued = isinstance(entry, QueuedCall)
    where = "queued, and not ended, on the device of" if is_queued else "in this call"
    lines = [report_head(entry, group.describe(group.rank), why), f"  {where}: {format_ranks(same)}"]
    for rank, answer in enumerate(answers):
        if rank not in same:
            lines.append(f"  {group.describe(rank)}: {_elsewhere(entry, answer)}")
        elif any(running["on_device"] for running in _matching(entry, answer)):
            lines.append(f"  {group.describe(rank)}: in this call, waiting for work queued on its device")
        elif (queued := _queued(entry, answer)) and not (is_queued and queued["number"] == entry.number):
            lines.append(f"  {group.describe(rank)}: {_queued_in_words(queued)}")
    if len(lines) == 2 or (is_queued and len(same) == len(answers)):
        lines.append(
            "  nobody is missing: the ranks' root, op, shape or dtype may differ (NCCLCOMM_CHECK=true finds out), "
            f"or {'a stream waits for other work' if is_queued else 'timeout_s was passed on some of them alone'}"
        )
    return "\n".join(lines)


def _queued_in_words(queued: dict[str, Any]) -> str:
    """What is queued on a rank's device and has not ended."""
    call = _call_in_words(queued["call"], queued["number"], queued["detail"])
    return f"its device has not ended {call}, queued {queued['for_s']:.0f} s ago"


def _elsewhere(entry: Running, answer: Any) -> str:
    """What a rank that is not in the call is doing."""
    if answer == DIED:
        return "its process has ended"
    if answer == SILENT:
        return "does not answer (stopped, or cut off)"
    words = []
    for running in answer["running"]:
        call = _call_in_words(running["call"], running["number"], running["detail"])
        words.append(f"in {call} for {running['for_s']:.0f} s")
    if not words:
        call, number = answer["last"].get(entry.group, ("", -1))
        words.append(f"last finished {call} (call {number})" if number >= 0 else "has finished no call")
    if queued := _queued(entry, answer):
        words.append(_queued_in_words(queued))
    if entry.group in answer["broken"]:
        # A time limit's reason is a whole report.
        words.append(f"can't go on: {answer['broken'][entry.group][1].splitlines()[0]}")
    if answer["leaving"]:
        words.append(answer["leaving"])
    if answer["line"]:
        words.append(f"at {answer['line']}")
    return ", ".join(words)
