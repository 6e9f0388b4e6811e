"""All that was found out, on all ranks: what the checks judge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ncclcomm.doctor.facts import RankFacts
from ncclcomm.errors import ArgumentError
from ncclcomm.topology import Topology, format_ranks, nodes_of_hosts

__all__ = ["Findings", "by_value", "on_ranks"]


@dataclass
class Findings:
    """What rank 0 knows when every exchange is over."""

    ranks: list[RankFacts]
    """The ranks that answered, in rank order; at least one."""
    size: int = 1
    """How many ranks there should be."""
    missing: list[int] = field(default_factory=list)
    """Ranks that did not answer in time."""
    limit_s: float = 0.0
    """How long they had."""
    mpiexec: str = ""
    """The launcher of the MPI in use, where it was looked for."""
    mpiexec_error: str = ""
    """Why none was found."""
    unreadable: dict[int, str] = field(default_factory=dict)
    """Ranks that could not read their neighbour's memory, and why."""
    readers: int = 0
    """How many ranks tried that."""
    yama_scope: int | None = None
    trials: list[dict[str, Any]] | None = None
    """What `run_trials` gave on each rank; None where the trials were not made."""
    no_trials: str = ""
    """Why not."""
    ended_in: str = ""
    """The step in which the job ended, where it did."""
    ended_because: str = ""
    """The error that a rank told of that step; '' where none did."""

    @property
    def here(self) -> RankFacts:
        """The rank that writes the report."""
        return self.ranks[0]

    @property
    def hosts(self) -> list[str]:
        """The hosts' names, each once."""
        return list(dict.fromkeys(fact.host for fact in self.ranks))

    @property
    def topology(self) -> Topology:
        """Ranks and nodes, as ncclcomm.init makes them out of what the ranks told."""
        hosts = [fact.first_on_host for fact in self.ranks]
        try:
            return Topology(nodes_of_hosts(hosts, self.here.node_sizes, self.here.node_map))
        except ArgumentError:
            return Topology(tuple(hosts))

    def device_of(self, index: int) -> int:
        """The device that the rank at this place takes, as ncclcomm.init chooses it."""
        return self.topology.locate(index).local_rank % max(1, len(self.ranks[index].devices))


def by_value(facts: Sequence[RankFacts], of: Callable[[RankFacts], Any]) -> list[tuple[Any, list[RankFacts]]]:
    """The distinct values among the ranks', each with the ranks that have it, in order of first rank."""
    groups: list[tuple[Any, list[RankFacts]]] = []
    for fact in facts:
        value = of(fact)
        for known, members in groups:
            if known == value:
                members.append(fact)
                break
        else:
            groups.append((value, [fact]))
    return groups


def on_ranks(members: Sequence[RankFacts]) -> str:
    """Ranks with their hosts: `ranks 0-1 on node1`."""
    hosts = ", ".join(dict.fromkeys(fact.host for fact in members))
    return f"{format_ranks([fact.rank for fact in members])} on {hosts}"
