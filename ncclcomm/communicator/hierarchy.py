"""How a collective over nodes is made of collectives within nodes and across them; pure.

The leader form: each node's first rank, its leader, speaks for the node. Steps are the same on all ranks; each runs
those that it takes part in.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ncclcomm.topology import Topology

__all__ = ["Step", "steps"]


@dataclass(frozen=True)
class Step:
    """One collective of one level."""

    level: str
    """'intra': the ranks of each node in `nodes`; 'inter': the leaders of all nodes."""
    op: str
    """A method of Transport."""
    root: int = 0
    """In the level's own numbering: a local rank, or a node. For a move: the source; its destination is the leader,
    unless `dest` says otherwise."""
    nodes: tuple[int, ...] = ()
    """The nodes that take part in an intra step."""
    dest: int = 0
    """The local rank that a move goes to."""


@functools.lru_cache(maxsize=1024)
def steps(op: str, topology: Topology, root: int = 0) -> tuple[Step, ...]:
    """The steps of a collective over more than one node, in order.

    Args:
        op: broadcast, scatter, gather, reduce, all_reduce or barrier.
        topology: the ranks and their nodes.
        root: a rank of the communicator; of no meaning for all_reduce and barrier.
    """
    every = tuple(range(topology.num_nodes))
    root_node, local_root = topology.locate(root)
    here = (root_node,)
    others = tuple(node for node in every if node != root_node)
    to_leader = (Step("intra", "move", local_root, here, dest=0),) if local_root else ()
    to_root = (Step("intra", "move", 0, here, dest=local_root),) if local_root else ()
    if op == "broadcast":
        return (
            Step("intra", "broadcast", local_root, here),
            Step("inter", "broadcast", root_node),
            Step("intra", "broadcast", 0, others),
        )
    if op == "scatter":
        return (*to_leader, Step("inter", "scatter", root_node), Step("intra", "scatter", 0, every))
    if op == "gather":
        return (Step("intra", "gather", 0, every), Step("inter", "gather", root_node), *to_root)
    if op == "reduce":
        return (Step("intra", "reduce", 0, every), Step("inter", "reduce", root_node), *to_root)
    if op == "all_reduce":
        return (Step("intra", "reduce", 0, every), Step("inter", "all_reduce"), Step("intra", "broadcast", 0, every))
    assert op == "barrier"
    return (Step("intra", "barrier", 0, every), Step("inter", "barrier"), Step("intra", "barrier", 0, every))
