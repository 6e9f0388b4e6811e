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
from ncclcomm.bench.runner import LEAST_ROUNDS, MOST_ITERS, ROUND_S, ROUNDS, Runner, _Contender


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


@pytest.mark.parametrize(
    ("roots", "turns"),
    [
        (1, "a0 b0 | b0 a0 | a0 b0 | b0 a0"),
        (2, "a0 b0 | a1 b1 | b0 a0 | b1 a1 | a0 b0 | a1 b1"),
        (3, "a0 b0 | a1 b1 | a2 b2 | b0 a0 | b1 a1 | b2 a2"),
    ],
)
def test_contenders_take_turns_in_both_orders_with_each_root(roots: int, turns: str, group: Group) -> None:
    log: list[str] = []
    contenders = [contender(group, [partial(log.append, f"{name}{root}") for root in range(roots)]) for name in "ab"]
    rounds = turns.count("|") + 1
    times = Runner(options(in_process=True), group, [])._rounds(contenders, rounds)
    assert [len(found) for found in times] == [rounds, rounds]
    assert log == turns.replace("|", "").split()


def test_the_slowest_rank_counts() -> None:
    of_two_ranks: list[list[tuple[Any, ...]]] = [[(1e-6,), (5e-6,)], [(2e-6,), (3e-6,)]]
    assert Runner._slowest(of_two_ranks, 0) == [2, 5]


class Slow:
    """A clock in whose rounds each call takes the time that it returns, and the barriers take some as well."""

    def __init__(self, barriers_s: float = 0.0) -> None:
        self._barriers_s = barriers_s
        self.rounds = 0

    def round(self, call: Any, iters: int) -> Round:
        """As Clock.round."""
        self.rounds += 1
        each = call() + self._barriers_s / iters
        return Round(each, each, None)


@pytest.mark.parametrize(
    ("seconds", "asked", "iters", "rounds"),
    [
        (1e-8, {}, MOST_ITERS, ROUNDS),
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
    runner, clock = Runner(options(in_process=True, warmup="4", **asked), group, []), Slow()
    monkeypatch.setattr(runner, "_clock", clock)
    one = contender(group, [lambda: calls.append(1) or seconds])
    assert (runner._plan([one]), one.iters) == (rounds, iters)
    assert len(calls) == 4 + clock.rounds
    assert clock.rounds <= 10
    if seconds > 1:
        assert clock.rounds == (0 if asked else 1), "calls that take seconds were made to see how long they take"


def test_each_contender_has_rounds_of_its_own_length(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(options(in_process=True, warmup="0"), group, [])
    monkeypatch.setattr(runner, "_clock", Slow())
    contenders = [contender(group, [lambda each=each: each]) for each in (1e-5, 1e-4, 1e-2)]
    runner._plan(contenders)
    assert [one.iters for one in contenders] == [200, 20, 1]


def test_one_slow_call_and_the_barriers_do_not_make_rounds_short(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(options(in_process=True, warmup="0"), group, [])
    monkeypatch.setattr(runner, "_clock", Slow(barriers_s=1e-4))
    spikes = iter([5e-3, 5e-3, 1e-5, 1e-5, 1e-5, 1e-3, 1e-3])
    one = contender(group, [lambda: next(spikes, 1e-5)])
    runner._plan([one])
    assert one.iters == pytest.approx(ROUND_S / 1e-5, rel=0.4)
