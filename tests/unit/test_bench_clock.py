"""How rounds are timed: what a round's figures are, whose turn it is, which rank counts."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest

from bench_options import options
from ncclcomm.bench.clock import Clock, Round
from ncclcomm.bench.group import Group
from ncclcomm.bench.peers.ours import Ours
from ncclcomm.bench.runner import LEAST_ROUNDS, MOST_ITERS, ROUNDS, Runner, _Contender


@pytest.fixture
def group() -> Group:
    """One process with its virtual devices."""
    return Group(None)


def contender(group: Group, calls: list[Any]) -> _Contender:
    """One who makes the given calls, one for each root."""
    return _Contender(Ours(group), [], calls)


def test_figures_of_a_round_are_of_one_call(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    looks = iter([10.0, 16.0, 19.0])
    clock = Clock(group)

    def look() -> float:
        log.append("look")
        return next(looks)

    monkeypatch.setattr(time, "perf_counter", look)
    monkeypatch.setattr(clock, "_wait", lambda: log.append("wait"))
    monkeypatch.setattr(clock, "_barrier", lambda: log.append("barrier"))
    assert clock.round(lambda: log.append("call"), 3) == Round(3.0, 2.0, None)
    assert log == ["wait", "barrier", "look", "call", "call", "call", "look", "wait", "look"]


def test_contenders_take_turns_in_both_orders_with_each_root(group: Group) -> None:
    log: list[tuple[str, int]] = []
    contenders = [contender(group, [partial(log.append, (name, root)) for root in range(2)]) for name in "ab"]
    times = Runner(options(in_process=True), group, [])._rounds(contenders, iters=1, rounds=4)
    assert [len(found) for found in times] == [4, 4]
    assert log == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("b", 0), ("a", 0), ("a", 1), ("b", 1)]


def test_the_slowest_rank_counts() -> None:
    of_two_ranks: list[list[tuple[Any, ...]]] = [[(1e-6,), (5e-6,)], [(2e-6,), (3e-6,)]]
    assert Runner._slowest(of_two_ranks, 0) == [2, 5]


@pytest.mark.parametrize(
    ("seconds", "asked", "iters", "rounds"),
    [
        (1e-7, {}, MOST_ITERS, ROUNDS),
        (1e-4, {}, 20, ROUNDS),
        (0.25, {}, 1, 20),
        (10.0, {}, 1, LEAST_ROUNDS),
        (10.0, {"iters": "3", "rounds": "40"}, 3, 40),
    ],
)
def test_long_calls_are_made_less_often(
    seconds: float, asked: dict[str, Any], iters: int, rounds: int, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    runner = Runner(options(in_process=True, warmup="4", **asked), group, [])
    monkeypatch.setattr(runner._clock, "round", lambda call, _: (call(), Round(seconds, seconds, None))[1])
    assert runner._plan([contender(group, [partial(calls.append, 1)])]) == (iters, rounds)
    assert len(calls) == 5
