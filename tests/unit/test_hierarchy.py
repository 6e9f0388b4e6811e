"""The steps of a collective over nodes, and the engine that runs them: every node map of up to five ranks, no MPI.

The ranks are threads; a fake transport of each group passes arrays between them and notes what crosses nodes.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from ncclcomm.communicator.engine import Engine, split_flat
from ncclcomm.communicator.hierarchy import steps
from ncclcomm.topology import Topology
from ncclcomm.transport.base import Transport

DEADLINE_S = 30.0
N = 6

Array = np.ndarray[Any, Any]
UFUNCS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


class Group:
    """What the members of one fake transport share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.slots: list[Any] = [None] * size
        self.meet = threading.Barrier(size, timeout=DEADLINE_S)
        self.pairs = {
            (a, b): (threading.Barrier(2, timeout=DEADLINE_S), [None]) for a in range(size) for b in range(size)
        }
        self.log: list[tuple[Any, ...]] = []
        """Of every call: its name, its root, and the lengths that it moved."""
        self.closed = 0

    def abort(self) -> None:
        """Wake all who wait for other members."""
        self.meet.abort()
        for barrier, _ in self.pairs.values():
            barrier.abort()


class FakeTransport(Transport):
    """One member, a thread, of a group in memory."""

    name = "fake"

    def __init__(self, group: Group, member: int) -> None:
        self.group, self.member = group, member
        self.size, self.members = group.size, (member,)

    def _exchange(self, mine: Any, *facts: Any) -> list[Any]:
        """Everybody's contribution; the call's facts, which must agree, are logged once."""
        group = self.group
        group.slots[self.member] = (facts[:2], mine)
        group.meet.wait()
        seen = list(group.slots)
        assert len({entry[0] for entry in seen}) == 1, f"members are in different calls: {seen}"
        if self.member == 0:
            group.log.append(facts)
        return [entry[1] for entry in seen]

    def _done(self) -> None:
        """Nobody goes on before all have read."""
        self.group.meet.wait()

    def broadcast(self, buffers: Sequence[Any], root: int) -> None:
        held = self._exchange(buffers[0], "broadcast", root, buffers[0].size)
        assert len({each.size for each in held}) == 1
        if self.member != root:
            buffers[0][...] = held[root]
        self._done()

    def scatter(self, parts: Sequence[Any] | None, outs: Sequence[Any], root: int) -> None:
        assert (parts is not None) == (self.member == root)
        held = self._exchange((parts, outs[0]), "scatter", root)
        given, out = held[root][0], outs[0]
        assert len(given) == self.size
        assert given[self.member].size == out.size
        if self.member == 0:
            self.group.log[-1] += tuple(part.size for part in given)
        if self.member != root or not _in_place(out, given[root]):
            out[...] = given[self.member]
        self._done()

    def gather(self, arrays: Sequence[Any], parts: Sequence[Any] | None, root: int) -> None:
        assert (parts is not None) == (self.member == root)
        held = self._exchange(arrays[0], "gather", root)
        if self.member == 0:
            self.group.log[-1] += tuple(each.size for each in held)
        if parts is not None:
            assert [part.size for part in parts] == [each.size for each in held]
            for member, part in enumerate(parts):
                if member != root or not _in_place(part, arrays[0]):
                    part[...] = held[member]
        self._done()

    def reduce(self, arrays: Sequence[Any], outs: Sequence[Any | None], op: str, root: int) -> None:
        assert (outs[0] is not None) == (self.member == root)
        held = self._exchange(arrays[0], "reduce", (root, op), arrays[0].size)
        total = functools.reduce(UFUNCS[op], held)
        self._done()
        if outs[0] is not None:
            outs[0][...] = total
        self._done()

    def all_reduce(self, arrays: Sequence[Any], outs: Sequence[Any], op: str) -> None:
        held = self._exchange(arrays[0], "all_reduce", op, arrays[0].size)
        total = functools.reduce(UFUNCS[op], held)
        self._done()
        outs[0][...] = total
        self._done()

    def move(self, array: Any | None, out: Any | None, source: int, dest: int) -> None:
        assert self.member in (source, dest)
        assert source != dest
        assert (array is not None, out is not None) == (self.member == source, self.member == dest)
        barrier, box = self.group.pairs[source, dest]
        if self.member == source:
            box[0] = array
        barrier.wait()
        if out is not None:
            out[...] = box[0]
        barrier.wait()

    def barrier(self) -> None:
        self._exchange(None, "barrier", None)
        self._done()

    def close(self) -> None:
        self.group.closed += 1


def _in_place(out: Array, part: Array) -> bool:
    """True if a part is where it goes; without elements there is no memory to compare."""
    return out.size == 0 or np.shares_memory(out, part)


class World:
    """Ranks of a topology, each with its engine."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.intra = [Group(len(ranks)) for ranks in topology.ranks_of]
        self.inter = Group(topology.num_nodes)
        self.engines = [self._engine(rank) for rank in range(topology.size)]

    def _engine(self, rank: int) -> Engine:
        """A rank's engine; leaders of several nodes have a transport across them."""
        node, local = self.topology.locate(rank)
        across = FakeTransport(self.inter, node) if local == 0 and self.topology.num_nodes > 1 else None
        return Engine(self.topology, rank, FakeTransport(self.intra[node], local), across, np.empty)

    def run(self, pool: ThreadPoolExecutor, body: Callable[[Engine], Any]) -> list[Any]:
        """What the body returns on every rank, each in a thread."""

        def guarded(engine: Engine) -> Any:
            """Lets the other ranks fail at once where this one does."""
            try:
                return body(engine)
            except BaseException:
                for group in (self.inter, *self.intra):
                    group.abort()
                raise

        self.inter.log.clear()
        futures = [pool.submit(guarded, engine) for engine in self.engines]
        return [future.result(DEADLINE_S) for future in futures]


def _maps(n: int) -> Iterator[tuple[int, ...]]:
    """Every way to put n ranks on nodes, nodes numbered as ranks name them."""
    if n == 0:
        yield ()
        return
    for nodes in _maps(n - 1):
        for node in range(max(nodes, default=-1) + 2):
            yield (*nodes, node)


TOPOLOGIES = [Topology(nodes) for n in range(1, 6) for nodes in _maps(n)]


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    """A thread for every rank."""
    with ThreadPoolExecutor(5) as made:
        yield made


@pytest.fixture(params=[1, 2, 3, 4, 5], ids=lambda n: f"{n} ranks")
def worlds(request: pytest.FixtureRequest) -> list[World]:
    """Every world of so many ranks."""
    return [World(topology) for topology in TOPOLOGIES if topology.size == request.param]


def _value(rank: int) -> Array:
    """A rank's own data."""
    return np.random.default_rng([rank, 5]).integers(-9, 9, N)


def _crossed(world: World, *expected: tuple[Any, ...]) -> None:
    """Check what went across nodes; nothing where there is one."""
    assert world.inter.log == (list(expected) if world.topology.num_nodes > 1 else []), world.topology


def test_all_maps_are_there() -> None:
    assert [sum(t.size == n for t in TOPOLOGIES) for n in range(1, 6)] == [1, 2, 5, 15, 52]


def test_broadcast(worlds: list[World], pool: ThreadPoolExecutor) -> None:
    for world in worlds:
        for root in range(world.topology.size):

            def body(engine: Engine, root: int = root) -> Array:
                flat = _value(engine.rank)
                flat.flags.writeable = engine.rank != root
                engine.broadcast(flat, root)
                return flat

            for found in world.run(pool, body):
                np.testing.assert_array_equal(found, _value(root))
            _crossed(world, ("broadcast", world.topology.node_of[root], N))


@pytest.mark.parametrize("in_place", [False, True])
def test_reduce(worlds: list[World], pool: ThreadPoolExecutor, in_place: bool) -> None:
    for number, world in enumerate(worlds):
        size, op = world.topology.size, list(UFUNCS)[number % len(UFUNCS)]
        expected = functools.reduce(UFUNCS[op], map(_value, range(size)))
        for root in range(size):

            def body(engine: Engine, root: int = root, op: str = op) -> tuple[Array, Array | None]:
                flat = _value(engine.rank)
                flat.flags.writeable = in_place and engine.rank == root
                out = None if engine.rank != root else flat if in_place else np.zeros(N, int)
                engine.reduce(flat, out, op, root)
                return flat, out

            for rank, (flat, out) in enumerate(world.run(pool, body)):
                np.testing.assert_array_equal(flat if rank != root else out, expected if rank == root else _value(rank))
            _crossed(world, ("reduce", (world.topology.node_of[root], op), N))


@pytest.mark.parametrize("op", UFUNCS)
@pytest.mark.parametrize("in_place", [False, True])
def test_all_reduce(worlds: list[World], pool: ThreadPoolExecutor, op: str, in_place: bool) -> None:
    for world in worlds:
        expected = functools.reduce(UFUNCS[op], map(_value, range(world.topology.size)))

        def body(engine: Engine) -> Array:
            flat = _value(engine.rank)
            flat.flags.writeable = in_place
            out = flat if in_place else np.zeros(N, int)
            engine.all_reduce(flat, out, op)
            return out

        for found in world.run(pool, body):
            np.testing.assert_array_equal(found, expected)
        _crossed(world, ("all_reduce", op, N))


COUNTS = {
    "even": lambda size: [2] * size,
    "uneven": lambda size: [(3 * r + 2) % 5 for r in range(size)],
    "none": lambda size: [0] * size,
}


def _packed(world: World, counts: list[int]) -> tuple[Array, dict[int, Array]]:
    """All parts in node order, and each rank's."""
    parts = {rank: np.arange(count) + 100 * (rank + 1) for rank, count in enumerate(counts)}
    return np.concatenate([parts[rank] for rank in world.topology.node_order]), parts


def _node_sizes(world: World, counts: list[int]) -> list[int]:
    """Elements of each node's ranks."""
    return [sum(counts[rank] for rank in ranks) for ranks in world.topology.ranks_of]


@pytest.mark.parametrize("kind", COUNTS)
def test_scatter(worlds: list[World], pool: ThreadPoolExecutor, kind: str) -> None:
    for world in worlds:
        counts = COUNTS[kind](world.topology.size)
        packed, parts = _packed(world, counts)
        packed.flags.writeable = False
        for root in range(world.topology.size):

            def body(engine: Engine, root: int = root, packed: Array = packed, counts: list[int] = counts) -> Array:
                out = np.zeros(counts[engine.rank], int)
                engine.scatter(packed if engine.rank == root else None, counts, out, root)
                return out

            for rank, found in enumerate(world.run(pool, body)):
                np.testing.assert_array_equal(found, parts[rank])
            _crossed(world, ("scatter", world.topology.node_of[root], *_node_sizes(world, counts)))


@pytest.mark.parametrize("kind", COUNTS)
def test_gather(worlds: list[World], pool: ThreadPoolExecutor, kind: str) -> None:
    for world in worlds:
        counts = COUNTS[kind](world.topology.size)
        expected, parts = _packed(world, counts)
        for part in parts.values():
            part.flags.writeable = False
        for root in range(world.topology.size):

            def body(
                engine: Engine, root: int = root, parts: dict[int, Array] = parts, counts: list[int] = counts
            ) -> Array | None:
                out = np.zeros(sum(counts), int) if engine.rank == root else None
                engine.gather(parts[engine.rank], counts, out, root)
                return out

            for rank, found in enumerate(world.run(pool, body)):
                assert (found is not None) == (rank == root)
                if found is not None:
                    np.testing.assert_array_equal(found, expected)
            _crossed(world, ("gather", world.topology.node_of[root], *_node_sizes(world, counts)))


def test_barrier(worlds: list[World], pool: ThreadPoolExecutor) -> None:
    for world in worlds:
        entered: list[int] = []

        def body(engine: Engine, entered: list[int] = entered) -> int:
            entered.append(engine.rank)
            engine.barrier()
            return len(entered)

        assert world.run(pool, body) == [world.topology.size] * world.topology.size
        _crossed(world, ("barrier", None))


def test_close_closes_every_transport(worlds: list[World], pool: ThreadPoolExecutor) -> None:
    for world in worlds:
        world.run(pool, lambda engine: engine.close())
        assert [group.closed for group in world.intra] == [group.size for group in world.intra]
        assert world.inter.closed == (world.topology.num_nodes if world.topology.num_nodes > 1 else 0)


@pytest.mark.parametrize("op", ["broadcast", "scatter", "gather", "reduce", "all_reduce", "barrier"])
def test_one_step_crosses_nodes_and_all_name_real_members(op: str) -> None:
    for topology in TOPOLOGIES:
        for root in range(topology.size if topology.num_nodes > 1 else 0):
            found = steps(op, topology, root)
            assert found == steps(op, topology, root)
            across = [step for step in found if step.level == "inter"]
            assert [step.op for step in across] == [op]
            assert op in ("all_reduce", "barrier") or across[0].root == topology.locate(root).node
            for step in found:
                assert hasattr(Transport, step.op)
                assert step.level == "inter" or set(step.nodes) <= set(range(topology.num_nodes))
                for node in step.nodes:
                    assert 0 <= step.root < len(topology.ranks_of[node])
                    assert 0 <= step.dest < len(topology.ranks_of[node])
                assert step.op != "move" or step.root != step.dest


def test_split_flat() -> None:
    flat = np.arange(6)
    parts = split_flat(flat, [1, 0, 3, 2])
    for part, expected in zip(parts, np.split(flat, [1, 1, 4]), strict=True):
        np.testing.assert_array_equal(part, expected)
        assert part.size == 0 or np.shares_memory(part, flat)
