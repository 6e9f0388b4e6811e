"""Ranks, nodes, rails and the conversions between them; pure arithmetic.

`root` is a rank of the communicator at hand. Its other forms, `root_node` and `local_root`, are made here and nowhere
else, by `Topology.locate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ncclcomm.errors import ArgumentError

__all__ = ["Place", "Topology", "format_ranks", "nodes_of_hosts"]


class Place(NamedTuple):
    """Where a rank is: its node, and its number within the node."""

    node: int
    local_rank: int


@dataclass(frozen=True)
class Topology:
    """Which ranks share which node.

    Args:
        node_of: each rank's node; any numbers. They are renumbered from 0 in the order in which ranks name them.
    """

    node_of: tuple[int, ...]
    ranks_of: tuple[tuple[int, ...], ...] = field(init=False)
    """The ranks of each node, ascending; ranks_of[node][local_rank] is the rank. The first is the node's leader."""

    def __post_init__(self) -> None:
        """Renumber the nodes and list their ranks."""
        numbers: dict[int, int] = {}
        nodes = tuple(numbers.setdefault(node, len(numbers)) for node in self.node_of)
        ranks = tuple(tuple(r for r, n in enumerate(nodes) if n == node) for node in range(len(numbers)))
        object.__setattr__(self, "node_of", nodes)
        object.__setattr__(self, "ranks_of", ranks)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.node_of)

    @property
    def num_nodes(self) -> int:
        """How many nodes there are."""
        return len(self.ranks_of)

    @property
    def node_order(self) -> tuple[int, ...]:
        """All ranks, node after node."""
        return tuple(rank for ranks in self.ranks_of for rank in ranks)

    @property
    def is_uniform(self) -> bool:
        """True if every node has the same number of ranks."""
        return len({len(ranks) for ranks in self.ranks_of}) <= 1

    def locate(self, rank: int) -> Place:
        """The node and local rank of a rank."""
        node = self.node_of[rank]
        return Place(node, self.ranks_of[node].index(rank))

    def rail(self, rank: int) -> tuple[int, ...]:
        """The ranks with the same local rank on every node that has one."""
        local = self.locate(rank).local_rank
        return tuple(ranks[local] for ranks in self.ranks_of if len(ranks) > local)

    def describe(self, rank: int) -> str:
        """A rank as messages name it: `rank 5 (node 1, local 1)`."""
        node, local = self.locate(rank)
        return f"rank {rank} (node {node}, local {local})"


def nodes_of_hosts(
    host_of: Sequence[int], node_sizes: Sequence[int] = (), node_map: Sequence[int] = ()
) -> tuple[int, ...]:
    """Each rank's node, from the host that it is on and what NCCLCOMM_NODE_SIZE and NCCLCOMM_NODE_MAP ask for.

    Args:
        host_of: for each rank a number that is the same for ranks which share memory.
        node_sizes: splits each host's ranks into nodes of consecutive ones; the last size repeats.
        node_map: each rank's node by name; wins over node_sizes.

    Raises:
        ArgumentError: node_map has not one entry a rank, or puts ranks of two hosts on one node.
    """
    if node_map:
        if len(node_map) != len(host_of):
            raise ArgumentError(
                f"NCCLCOMM_NODE_MAP has {len(node_map)} entries for {len(host_of)} ranks; give one node a rank"
            )
        for node in sorted(set(node_map)):
            ranks = [r for r, n in enumerate(node_map) if n == node]
            if len({host_of[r] for r in ranks}) > 1:
                raise ArgumentError(
                    f"NCCLCOMM_NODE_MAP puts {format_ranks(ranks)} on node {node}, but they share no memory; "
                    "a node's ranks must be on one host"
                )
        return tuple(node_map)
    if not node_sizes:
        return tuple(host_of)
    nodes = [0] * len(host_of)
    number = 0
    for host in dict.fromkeys(host_of):
        ranks = [r for r, h in enumerate(host_of) if h == host]
        index = 0
        while ranks:
            size = node_sizes[min(index, len(node_sizes) - 1)]
            for rank in ranks[:size]:
                nodes[rank] = number
            ranks = ranks[size:]
            number += 1
            index += 1
    return tuple(nodes)


def format_ranks(ranks: Sequence[int]) -> str:
    """Ranks for a message, runs joined: `ranks 0-3, 7`."""
    ordered = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank {text}" if len(ordered) == 1 else f"ranks {text}"
