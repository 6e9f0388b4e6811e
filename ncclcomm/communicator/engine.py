"""Runs a collective's steps over a node's transport and the one across nodes, on flat arrays of one memory kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ncclcomm.communicator.hierarchy import Step, steps
from ncclcomm.topology import Topology
from ncclcomm.transport.base import Transport

__all__ = ["Engine", "split_flat"]


def split_flat(flat: Any, counts: Sequence[int]) -> list[Any]:
    """Consecutive views of a flat array, of the given lengths."""
    parts = []
    start = 0
    for count in counts:
        parts.append(flat[start : start + count])
        start += count
    return parts


class Engine:
    """The collectives of one rank.

    Args:
        topology: the ranks and their nodes.
        rank: this rank.
        intra: the transport among this node's ranks, numbered by local rank.
        inter: the transport among the nodes' leaders, numbered by node; None where this rank is no leader, and where
            there is one node only.
        empty: makes a flat array from a length and a dtype, in the memory that the transports use.
    """

    def __init__(
        self,
        topology: Topology,
        rank: int,
        intra: Transport,
        inter: Transport | None,
        empty: Callable[[int, Any], Any],
    ) -> None:
        self.topology = topology
        self.rank = rank
        self.node, self.local_rank = topology.locate(rank)
        self.intra = intra
        self.inter = inter
        self.empty = empty
        self.is_leader = self.local_rank == 0
        self.single = topology.num_nodes == 1

    def _mine(self, op: str, root: int = 0) -> Iterator[tuple[Step, Transport]]:
        """The steps that this rank takes part in, each with its transport."""
        for step in steps(op, self.topology, root):
            if step.level == "inter":
                if self.inter is not None:
                    yield step, self.inter
            elif self.node in step.nodes and (step.op != "move" or self.local_rank in (step.root, step.dest)):
                yield step, self.intra

    def broadcast(self, flat: Any, root: int) -> None:
        """Fill flat on every rank with the root's."""
        if self.single:
            self.intra.broadcast([flat], root)
            return
        for step, transport in self._mine("broadcast", root):
            transport.broadcast([flat], step.root)

    def reduce(self, flat: Any, out: Any | None, op: str, root: int) -> None:
        """Reduce flat of all ranks into out, which only the root has."""
        if self.single:
            self.intra.reduce([flat], [out], op, root)
            return
        total = out
        if total is None and self.is_leader:
            total = self.empty(flat.size, flat.dtype)
        root_node = self.topology.locate(root).node
        for step, transport in self._mine("reduce", root):
            if step.op == "move":
                source = self.local_rank == step.root
                transport.move(total if source else None, None if source else out, step.root, step.dest)
            elif step.level == "intra":
                transport.reduce([flat], [total if self.is_leader else None], op, step.root)
            else:
                transport.reduce([total], [total if self.node == root_node else None], op, step.root)

    def all_reduce(self, flat: Any, out: Any, op: str) -> None:
        """Reduce flat of all ranks into out of every rank; out may be flat itself."""
        if self.single:
            self.intra.all_reduce([flat], [out], op)
            return
        for step, transport in self._mine("all_reduce"):
            if step.op == "reduce":
                transport.reduce([flat], [out if self.is_leader else None], op, step.root)
            elif step.op == "all_reduce":
                transport.all_reduce([out], [out], op)
            else:
                transport.broadcast([out], step.root)

    def _node_counts(self, counts: Sequence[int]) -> list[int]:
        """Elements of each node's ranks together."""
        return [sum(counts[rank] for rank in ranks) for ranks in self.topology.ranks_of]

    def _own_counts(self, counts: Sequence[int]) -> list[int]:
        """Elements of each rank of this node."""
        return [counts[rank] for rank in self.topology.ranks_of[self.node]]

    def scatter(self, packed: Any | None, counts: Sequence[int], out: Any, root: int) -> None:
        """Give each rank its part of the root's packed array.

        Args:
            packed: on the root, all ranks' parts in node order (topology.node_order); None elsewhere.
            counts: each rank's number of elements, in rank order; the same on all ranks.
            out: this rank's part.
            root: rank that holds packed.
        """
        if self.single:
            parts = split_flat(packed, counts) if self.rank == root else None
            self.intra.scatter(parts, [out], root)
            return
        block = None
        for step, transport in self._mine("scatter", root):
            if step.op == "move":
                if self.is_leader:
                    packed = self.empty(sum(counts), out.dtype)
                source = self.local_rank == step.root
                transport.move(packed if source else None, None if source else packed, step.root, step.dest)
            elif step.level == "inter":
                blocks = split_flat(packed, self._node_counts(counts)) if self.node == step.root else None
                block = blocks[self.node] if blocks else self.empty(sum(self._own_counts(counts)), out.dtype)
                transport.scatter(blocks, [block], step.root)
            else:
                parts = split_flat(block, self._own_counts(counts)) if self.is_leader else None
                transport.scatter(parts, [out], step.root)

    def gather(self, flat: Any, counts: Sequence[int], packed: Any | None, root: int) -> None:
        """Collect each rank's part in the root's packed array: the reverse of scatter, with the same arguments."""
        if self.single:
            parts = split_flat(packed, counts) if self.rank == root else None
            self.intra.gather([flat], parts, root)
            return
        root_node = self.topology.locate(root).node
        block = None
        if self.is_leader:
            if self.node == root_node and packed is None:
                packed = self.empty(sum(counts), flat.dtype)
            if self.node == root_node:
                block = split_flat(packed, self._node_counts(counts))[self.node]
            else:
                block = self.empty(sum(self._own_counts(counts)), flat.dtype)
        for step, transport in self._mine("gather", root):
            if step.op == "move":
                source = self.local_rank == step.root
                transport.move(packed if source else None, None if source else packed, step.root, step.dest)
            elif step.level == "inter":
                blocks = split_flat(packed, self._node_counts(counts)) if self.node == step.root else None
                transport.gather([block], blocks, step.root)
            else:
                parts = split_flat(block, self._own_counts(counts)) if self.is_leader else None
                transport.gather([flat], parts, step.root)

    def barrier(self) -> None:
        """Return when every rank has called it."""
        if self.single:
            self.intra.barrier()
            return
        for _, transport in self._mine("barrier"):
            transport.barrier()

    def close(self) -> None:
        """Close both transports; collective."""
        self.intra.close()
        if self.inter is not None:
            self.inter.close()
