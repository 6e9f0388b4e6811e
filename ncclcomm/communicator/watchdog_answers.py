"""What the ranks' answers mean for a call that waits: who is in it, who will not come, and where the others are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ncclcomm.communicator.board import Running, describe_call
from ncclcomm.communicator.watchdog_address import Address
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


def ranks_in_call(entry: Running, answers: Sequence[Any]) -> set[int]:
    """Ranks that are in the same call.

    Args:
        entry: the call.
        answers: each rank's state, DIED or SILENT.
    """
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
    detail = describe_call(entry.arguments)
    waited_s = time.monotonic() - entry.since_s
    call = f"{entry.call} (call {entry.number}{', ' + detail if detail else ''})"
    return f"ncclcomm: {who}: waited {waited_s:.0f} s in {call}: {why}"


def report(entry: Running, group: Group, answers: Sequence[Any], why: str) -> str:
    """Where every rank of the group is, in words.

    Args:
        entry: the call that this rank waits in.
        group: the communicator.
        answers: each rank's state, DIED or SILENT.
        why: what ends the waiting, or that it goes on.
    """
    same = sorted(ranks_in_call(entry, answers) | {group.rank})
    lines = [report_head(entry, group.describe(group.rank), why), f"  in this call: {format_ranks(same)}"]
    for rank, answer in enumerate(answers):
        if rank not in same:
            lines.append(f"  {group.describe(rank)}: {_elsewhere(entry, answer)}")
        elif any(running["on_device"] for running in _matching(entry, answer)):
            lines.append(f"  {group.describe(rank)}: in this call, waiting for work queued on its device")
    if len(lines) == 2:
        lines.append(
            "  nobody is missing: the ranks' root, op, shape or dtype may differ (NCCLCOMM_CHECK=true finds out), "
            "or timeout_s was passed on some of them alone"
        )
    return "\n".join(lines)


def _elsewhere(entry: Running, answer: Any) -> str:
    """What a rank that is not in the call is doing."""
    if answer == DIED:
        return "its process has ended"
    if answer == SILENT:
        return "does not answer (stopped, or cut off)"
    words = []
    for running in answer["running"]:
        detail = f", {running['detail']}" if running["detail"] else ""
        words.append(f"in {running['call']} (call {running['number']}{detail}) for {running['for_s']:.0f} s")
    if not words:
        call, number = answer["last"].get(entry.group, ("", -1))
        words.append(f"last finished {call} (call {number})" if number >= 0 else "has finished no call")
    if entry.group in answer["broken"]:
        # A time limit's reason is a whole report.
        words.append(f"can't go on: {answer['broken'][entry.group][1].splitlines()[0]}")
    if answer["leaving"]:
        words.append(answer["leaving"])
    if answer["line"]:
        words.append(f"at {answer['line']}")
    return ", ".join(words)
