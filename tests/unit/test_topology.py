"""Ranks, nodes and rails."""

from __future__ import annotations

import itertools

import pytest

from ncclcomm.errors import ArgumentError
from ncclcomm.topology import Topology, format_ranks, nodes_of_hosts

MAPS = [nodes for n in range(1, 6) for nodes in itertools.product(range(n), repeat=n)]


def test_every_map_of_up_to_five_ranks() -> None:
    for nodes in MAPS:
        topology = Topology(nodes)
        assert topology.size == len(nodes)
        assert topology.num_nodes == len(set(nodes))
        assert sorted(topology.node_order) == list(range(len(nodes)))
        assert topology.node_order == tuple(rank for ranks in topology.ranks_of for rank in ranks)
        assert topology.is_uniform == (len({nodes.count(node) for node in nodes}) == 1)
        for rank, other in itertools.product(range(len(nodes)), repeat=2):
            same = topology.node_of[rank] == topology.node_of[other]
            assert same == (nodes[rank] == nodes[other])
        for rank in range(len(nodes)):
            node, local = topology.locate(rank)
            assert node == topology.node_of[rank]
            assert topology.ranks_of[node][local] == rank
            assert list(topology.ranks_of[node]) == sorted(topology.ranks_of[node])
            assert topology.describe(rank) == f"rank {rank} (node {node}, local {local})"


def test_rails() -> None:
    for nodes in MAPS:
        topology = Topology(nodes)
        for rank in range(len(nodes)):
            rail = topology.rail(rank)
            assert rank in rail
            local = topology.locate(rank).local_rank
            assert set(rail) == {r for r in range(len(nodes)) if topology.locate(r).local_rank == local}
            assert [topology.node_of[r] for r in rail] == sorted({topology.node_of[r] for r in rail})


def test_nodes_are_numbered_as_ranks_name_them() -> None:
    assert Topology((7, 3, 7, 0)).node_of == (0, 1, 0, 2)
    assert Topology((7, 3, 7, 0)).ranks_of == ((0, 2), (1,), (3,))
    assert Topology((7, 3, 7, 0)) == Topology((1, 5, 1, 9))
    assert hash(Topology((0, 1))) == hash(Topology((4, 2)))


def test_uniformity() -> None:
    assert Topology((0, 1, 0, 1)).is_uniform
    assert not Topology((0, 0, 1)).is_uniform


@pytest.mark.parametrize(
    ("hosts", "sizes", "nodes"),
    [
        ((0, 0, 0, 0), (), [[0, 1, 2, 3]]),
        ((0, 0, 0, 0), (2,), [[0, 1], [2, 3]]),
        ((0, 0, 0, 0), (3, 1), [[0, 1, 2], [3]]),
        ((0, 0, 0, 0, 0), (2,), [[0, 1], [2, 3], [4]]),
        ((0, 0, 0, 0, 0, 0), (3, 1), [[0, 1, 2], [3], [4], [5]]),
        ((0, 0, 0), (8,), [[0, 1, 2]]),
        ((0, 1, 0, 1), (), [[0, 2], [1, 3]]),
        ((0, 1, 0, 1, 0, 1), (2,), [[0, 2], [4], [1, 3], [5]]),
        ((4, 4, 9, 9, 9), (1, 2), [[0], [1], [2], [3, 4]]),
    ],
)
def test_node_sizes_split_each_host(hosts: tuple[int, ...], sizes: tuple[int, ...], nodes: list[list[int]]) -> None:
    ranks = Topology(nodes_of_hosts(hosts, sizes)).ranks_of
    assert sorted(map(list, ranks)) == sorted(nodes)


def test_node_map_wins() -> None:
    assert Topology(nodes_of_hosts((0, 0, 0, 0), (2,), (0, 1, 0, 1))).ranks_of == ((0, 2), (1, 3))
    assert Topology(nodes_of_hosts((0, 0, 1), (), (5, 6, 7))).num_nodes == 3


def test_node_map_of_another_length() -> None:
    with pytest.raises(ArgumentError, match="NCCLCOMM_NODE_MAP has 3 entries for 4 ranks"):
        nodes_of_hosts((0, 0, 0, 0), (), (0, 1, 0))


def test_node_map_across_hosts() -> None:
    with pytest.raises(ArgumentError, match="NCCLCOMM_NODE_MAP puts ranks 0, 2 on node 3.*one host"):
        nodes_of_hosts((0, 0, 1, 1), (), (3, 4, 3, 4))


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0-1"),
        ([7, 0, 2, 1, 3], "ranks 0-3, 7"),
        ([0, 2, 4], "ranks 0, 2, 4"),
        ([5, 6, 9, 10, 11], "ranks 5-6, 9-11"),
    ],
)
def test_format_ranks(ranks: list[int], text: str) -> None:
    assert format_ranks(ranks) == text
