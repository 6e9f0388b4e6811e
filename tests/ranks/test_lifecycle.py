"""Making, closing and dropping communicators, and settings that make no sense or differ between ranks."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import warnings
from typing import Any

import numpy as np
import pytest

import ncclcomm
from ncclcomm import AbortedError, ArgumentError, ClosedError, MismatchError
from ranks.expected import WORLD, Findings, communicator, environment, every_op, outcomes

pytestmark = pytest.mark.mpi

CALLS = {
    "broadcast": lambda comm: comm.broadcast(np.zeros(2)),
    "scatter": lambda comm: comm.scatter(np.zeros(comm.size)),
    "gather": lambda comm: comm.gather(np.zeros(2)),
    "reduce": lambda comm: comm.reduce(np.zeros(2)),
    "reduce_add": lambda comm: comm.reduce_add(np.zeros(2)),
    "all_reduce": lambda comm: comm.all_reduce(np.zeros(2)),
    "barrier": lambda comm: comm.barrier(),
    "split": lambda comm: comm.split(0),
}


@pytest.mark.parametrize("used", [False, True])
def test_closing_twice_and_use_after_it(used: bool) -> None:
    comm = ncclcomm.Communicator(WORLD)
    if used:
        comm.all_reduce(np.zeros(3))
    comm.close()
    comm.close()
    with Findings() as found:
        for name, call in CALLS.items():
            told = outcomes(lambda call=call: call(comm))
            found.holds(all(o.error is ClosedError for o in told), f"{name}: {told}")
            found.holds(all(name in o.message and "closed" in o.message for o in told), f"{name}: {told}")
        found.holds("closed" in repr(comm), repr(comm))


def test_closed_only_where_the_block_ends() -> None:
    with ncclcomm.Communicator(WORLD) as comm:
        assert comm.all_reduce(np.array([1])).item() == comm.size
    with pytest.raises(ClosedError):
        comm.barrier()


def test_blocks_of_the_world_nest() -> None:
    with Findings() as found:
        with ncclcomm.init() as world:
            found.holds((world.rank, world.size) == (WORLD.rank, WORLD.size), f"{world} under {WORLD.rank}")
            with ncclcomm.init() as again:
                found.holds(again is world, "init gave another communicator")
                every_op(again, found, what="inner block")
            found.holds(ncclcomm.init() is world, "init gave another communicator after the inner block")
            every_op(world, found, what="after the inner block")
        told = outcomes(world.barrier)
        found.holds(all(o.error is ClosedError for o in told), f"after the outer block: {told}")


def test_the_world_can_be_made_again() -> None:
    with Findings() as found:
        for turn in range(3):
            with ncclcomm.init() as world:
                every_op(world, found, what=f"turn {turn}")
        first = ncclcomm.init()
        first.close()
        second = ncclcomm.init()
        found.holds(second is not first, "init gave a closed communicator")
        every_op(second, found, what="after close")
        second.close()


def test_init_makes_the_ranks_device_current_and_a_communicator_does_not() -> None:
    count = ncclcomm.device_count()
    before = ncclcomm.current_device()
    with Findings() as found:
        chosen = (WORLD.rank + 2) % count
        with ncclcomm.Communicator(WORLD, device=chosen) as comm:
            found.holds(comm.device == chosen, f"{comm}")
            found.holds(ncclcomm.current_device() == before, "a Communicator changed the current device")
        with ncclcomm.init(device=(WORLD.rank + 1) % count) as world:
            found.holds(world.device == (WORLD.rank + 1) % count, f"{world}")
            found.holds(ncclcomm.current_device() == world.device, "init left another device current")
            every_op(world, found, kind="device")
    ncclcomm.set_device(before)


def test_an_exception_closes_this_ranks_handle() -> None:
    def leave() -> None:
        with ncclcomm.Communicator(WORLD) as comm:
            held.append(comm)
            raise KeyError("mine")

    held: list[Any] = []
    with pytest.raises(KeyError, match="mine"):
        leave()
    with pytest.raises(ClosedError):
        held[0].barrier()


BAD_VALUES = {
    "NCCLCOMM_NODE_SIZE": ["0", "two", "2,", "-1", "1.5"],
    "NCCLCOMM_NODE_MAP": ["a,b", "-1", "0;1"],
    "NCCLCOMM_CHUNK_BYTES": ["much", "0", "-5", "1e6"],
    "NCCLCOMM_CHECK": ["maybe", "-1", "1.5"],
    "NCCLCOMM_WATCHDOG": ["perhaps", "2"],
}


@pytest.mark.parametrize("name", list(BAD_VALUES))
def test_values_that_make_no_sense(name: str) -> None:
    with Findings() as found:
        for value in BAD_VALUES[name]:
            for odd in (None, 0, WORLD.size - 1):
                mine = {name: value} if odd in (None, WORLD.rank) else {}
                with environment(**mine):
                    told = outcomes(lambda: ncclcomm.Communicator(WORLD))
                for rank, outcome in enumerate(told):
                    what = f"{name}={value} on {'all ranks' if odd is None else odd}, rank {rank}: {outcome}"
                    found.holds(outcome.error is ArgumentError, what)
                    found.holds(name in outcome.message and value in outcome.message, what)
                    found.holds(odd in (None, rank) or f"rank {odd}" in outcome.message, what)
        with communicator() as comm:
            every_op(comm, found, what="afterwards")


@pytest.mark.parametrize("extra", [-1, 1, 5])
def test_a_node_map_of_another_length(extra: int) -> None:
    entries = WORLD.size + extra
    if entries < 1:
        pytest.skip("no entry left: an empty map is none")
    with Findings() as found, environment(NCCLCOMM_NODE_MAP=",".join("0" * entries)):
        told = outcomes(lambda: ncclcomm.Communicator(WORLD))
        for outcome in told:
            found.holds(outcome.error is ArgumentError, f"{outcome}")
            for word in ("NCCLCOMM_NODE_MAP", str(entries), str(WORLD.size)):
                found.holds(word in outcome.message, f"{outcome} doesn't say {word}")


DIFFERING = {
    "NCCLCOMM_NODE_SIZE": ("1", "2"),
    "NCCLCOMM_NODE_MAP": (",".join("0" * WORLD.size), ",".join(str(rank % 2) for rank in range(WORLD.size))),
    "NCCLCOMM_CHUNK_BYTES": ("1024", "2048"),
    "NCCLCOMM_CHECK": ("true", "5"),
    "NCCLCOMM_WATCHDOG": ("true", "false"),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", list(DIFFERING))
def test_settings_that_differ(name: str) -> None:
    usual, other = DIFFERING[name]
    with Findings() as found:
        for odd in (0, WORLD.size - 1):
            with environment(**{name: other if WORLD.rank == odd else usual}):
                told = outcomes(lambda: ncclcomm.Communicator(WORLD))
            for rank, outcome in enumerate(told):
                found.holds(outcome.error is MismatchError, f"{name} differs on {odd}: {outcome}")
                found.holds(outcome.message.startswith(f"rank {rank}"), f"who speaks? {outcome}")
                found.holds(f"rank {odd}" in outcome.message, f"{outcome} doesn't name {odd}")
                word = "check" if name == "NCCLCOMM_CHECK" else name
                found.holds(word in outcome.message, f"{outcome} doesn't name {word}")
        with communicator() as comm:
            every_op(comm, found, what="afterwards")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("one", "two"), [(True, False), (True, 1), (False, 0), (64, 65)])
def test_check_arguments_that_differ(one: bool | int, two: bool | int) -> None:
    with Findings() as found, environment():
        told = outcomes(lambda: ncclcomm.Communicator(WORLD, check=two if WORLD.rank else one))
        same_meaning = (one, two) == (False, 0)
        for outcome in told:
            found.holds(outcome.error is MismatchError or same_meaning, f"check {one} and {two}: {outcome}")
        found.holds(len({o.error for o in told}) == 1, f"ranks end differently: {told}")


@pytest.mark.parametrize("bad", [-1, 1.5, "yes", [1]])
def test_checks_that_make_no_sense(bad: Any) -> None:
    with Findings() as found, environment():
        for odd in (None, WORLD.size - 1):
            mine = bad if odd in (None, WORLD.rank) else True
            told = outcomes(lambda mine=mine: ncclcomm.Communicator(WORLD, check=mine))
            found.holds(all(o.error is ArgumentError for o in told), f"check={bad!r} on {odd}: {told}")
            found.holds(all("check" in o.message for o in told), f"check={bad!r} on {odd}: {told}")


@pytest.mark.parametrize("bad", [99, "gpu", 1.5])
def test_devices_that_do_not_exist(bad: Any) -> None:
    with Findings() as found, environment():
        for odd in (None, WORLD.size - 1):
            mine = bad if odd in (None, WORLD.rank) else 0
            told = outcomes(lambda mine=mine: ncclcomm.Communicator(WORLD, device=mine))
            found.holds(all(issubclass(o.error or object, ArgumentError) for o in told), f"{bad!r} on {odd}: {told}")
        with communicator() as comm:
            every_op(comm, found, what="afterwards")


def test_many_made_and_closed() -> None:
    with Findings() as found, environment():
        for turn in range(300):
            with ncclcomm.Communicator(WORLD, check=False) as comm:
                total = comm.all_reduce(np.array([turn]))
            found.same(total, np.array([turn * WORLD.size]), f"turn {turn}")


def test_what_was_dropped_on_one_rank_only() -> None:
    with communicator() as comm, Findings() as found:
        kept = []
        for _ in range(5):
            other = ncclcomm.Communicator(WORLD)
            other.barrier()
            kept.append(other)
        if comm.rank == 0:
            kept.clear()
        del other
        gc.collect()
        every_op(comm, found, what="after dropping")
        for other in kept:
            del other
        kept.clear()
        gc.collect()
        every_op(comm, found, what="after dropping the rest")


@pytest.mark.parametrize("check", [True, False])
def test_a_forked_child_is_no_rank(check: bool) -> None:
    with ncclcomm.Communicator(WORLD, check=check) as comm, Findings() as found:
        comm.all_reduce(np.zeros(3))  # the short way is there from the second call on
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks of processes with threads
            child = os.fork()
        if child == 0:
            status = 1
            try:
                comm.all_reduce(np.ones(3))
            except AbortedError as error:
                status = 0 if f"forked from rank {comm.rank}" in str(error) else 2
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        if comm.size > 1:
            found.holds(status == 0, f"the child's call: {status}")
        found.same(comm.all_reduce(np.ones(3)), np.full(3, comm.size, float), "after the fork")


def test_it_is_not_pickled_or_copied() -> None:
    with ncclcomm.Communicator(WORLD) as comm, Findings() as found:
        for act in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="belongs to its process"):
                act(comm)
        found.holds(comm.size == WORLD.size, f"{comm}")
