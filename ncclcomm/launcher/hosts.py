"""Lists of hosts, and how many ranks each of them gets. Pure: no host is asked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ncclcomm.errors import ArgumentError
from ncclcomm.launcher.slurm import expand_hosts, split_hosts

__all__ = ["Host", "Place", "parse_hostfile", "parse_hosts", "place"]

MOST_SLOTS = 999_999
_SLOTS_WORD = re.compile(r"(\S+)\s+slots=(\S*)")


@dataclass(frozen=True)
class Host:
    """A host of a list."""

    name: str
    slots: int | None = None
    """How many ranks it takes; None where the list doesn't say."""


@dataclass(frozen=True)
class Place:
    """A host and how many neighbouring ranks it gets."""

    host: str
    ranks: int
    cores: int | None = None
    """Cores that ranks may use there; None where nobody has asked."""


def parse_hosts(text: str, where: str = "--hosts") -> tuple[Host, ...]:
    """Read `h1,h2:4,node[01-03]`.

    Args:
        text: the list.
        where: where it is from, for messages.

    Raises:
        ArgumentError: it is no such list, or names a host twice.
    """
    return _distinct(_entries(text, where), where)


def parse_hostfile(text: str, where: str) -> tuple[Host, ...]:
    """Read a hostfile: on each line `h1`, `h1:4`, `h1 slots=4` or a list as --hosts takes; `#` begins a comment.

    Args:
        text: what the file holds.
        where: its name, for messages.

    Raises:
        ArgumentError: a line is no such thing, a host is named twice, or there is none.
    """
    found: list[Host] = []
    for number, line in enumerate(text.splitlines(), 1):
        entry, here = line.partition("#")[0].strip(), f"{where}, line {number}"
        if match := _SLOTS_WORD.fullmatch(entry):
            entry = f"{match[1]}:{match[2]}"
        if re.search(r"\s", entry):
            raise ArgumentError(f"{here}: {entry!r} is no host, with or without slots: write h1, h1:4 or h1 slots=4")
        if entry:
            found += _entries(entry, here)
    if not found:
        raise ArgumentError(f"{where} names no host: write one on each line, such as h1 slots=4")
    return _distinct(found, where)


def place(
    hosts: Sequence[Host], size: int | None, ranks_per_node: int | None = None, mend: str = ""
) -> tuple[Place, ...]:
    """Give ranks to hosts, which are filled in the order of the list.

    A host without slots takes `ranks_per_node`, or its even share where no host of the list has slots, or one rank.

    Args:
        hosts: the list, one or more.
        size: number of ranks; None fills all slots.
        ranks_per_node: number of ranks of each host; None goes by the slots.
        mend: what the user is to do where there are more ranks than slots.

    Returns:
        The hosts that get ranks, in the order of the list.

    Raises:
        ArgumentError: more ranks than slots, in all or on one host.
    """
    mend = mend or f"name more hosts, or more slots as in {hosts[0].name}:{size or ranks_per_node}"
    for host in hosts:
        if ranks_per_node and host.slots and host.slots < ranks_per_node:
            raise ArgumentError(
                f"--ranks-per-node {ranks_per_node} is more than the {host.slots} slots of {host.name}: {mend}"
            )
    share = 1
    if size and not any(host.slots for host in hosts):
        share = -(-size // len(hosts))
    slots = [ranks_per_node or host.slots or share for host in hosts]
    left = sum(slots) if size is None else size
    if left > sum(slots):
        raise ArgumentError(f"-n {left} is more than the {sum(slots)} slots of {_listed(hosts, slots)}: {mend}")
    places = []
    for host, most in zip(hosts, slots, strict=True):
        if left:
            places.append(Place(host.name, min(most, left)))
            left -= places[-1].ranks
    return tuple(places)


def _listed(hosts: Sequence[Host], slots: Sequence[int]) -> str:
    """Hosts with their slots, the first few."""
    shown = [f"{host.name}:{count}" for host, count in zip(hosts, slots, strict=True)]
    return ",".join(shown[:4]) + (",..." if len(shown) > 4 else "")


def _entries(text: str, where: str) -> list[Host]:
    """Read one list, without looking for hosts that are named twice."""
    found: list[Host] = []
    for entry in split_hosts(text, where):
        name, colon, count = entry.partition(":")
        if colon and not (re.fullmatch(r"[0-9]{1,6}", count) and int(count)):
            raise ArgumentError(
                f"{where}: {entry!r} must end in a number of slots from 1 to {MOST_SLOTS} after ':', as in h1:4"
            )
        found += (Host(each, int(count) if colon else None) for each in expand_hosts(name, where))
    return found


def _distinct(hosts: Iterable[Host], where: str) -> tuple[Host, ...]:
    """The hosts, if none is named twice."""
    seen: dict[str, Host] = {}
    for host in hosts:
        if host.name in seen:
            raise ArgumentError(f"{where}: host {host.name} is named twice; write {host.name}:2 for two slots")
        seen[host.name] = host
    return tuple(seen.values())
