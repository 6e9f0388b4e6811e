"""The run itself: every row checked, timed in turns with its peers, and checked again."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ncclcomm.bench.case import Buffers, Case, Row
from ncclcomm.bench.clock import Clock, Round, quiet
from ncclcomm.bench.early import left_early
from ncclcomm.bench.group import Group
from ncclcomm.bench.options import Options
from ncclcomm.bench.peers.base import Peer
from ncclcomm.bench.peers.ours import Ours
from ncclcomm.bench.results import Measured, RowResult

__all__ = ["Runner", "WrongAnswerError"]

ROUND_S = 0.002
"""A contender's round is made about so long, by repeating its call."""
MOST_ITERS = 2000
ROUNDS = 25
LEAST_ROUNDS = 5
ROW_S = 5.0
"""A row takes about so long at most; the largest sizes get fewer rounds."""

_SAMPLES = 5
"""Rounds that tell how long a call takes."""
_SAMPLING_S = 0.5
"""No more of them once they took so long."""

_MOST_WORDS = 160
"""Characters of a peer's own message."""

Call = Callable[[], Any]


class WrongAnswerError(Exception):
    """A collective of ncclcomm gave a wrong result; says which, where, and what it gave."""


@dataclass
class _Contender:
    """One who is timed in a row: a call for each root of the rounds."""

    peer: Peer
    cases: list[Case]
    calls: list[Call]
    iters: int = 1
    """Calls in a round."""
    wrong: str = ""


class Runner:
    """Runs rows; every method is collective.

    Args:
        options: the command line.
        group: who takes part.
        peers: who is timed beside ncclcomm.
    """

    def __init__(self, options: Options, group: Group, peers: list[Peer]) -> None:
        self._options = options
        self._group = group
        self._ours = Ours(group)
        self._peers = peers
        self._clock = Clock(group)

    def run(self, row: Row) -> RowResult:
        """Check and time one row.

        Args:
            row: the row.

        Raises:
            WrongAnswerError: ncclcomm's result, or its input after the call, is wrong; on every rank.
        """
        buffers = Buffers(row, self._group.members, self._group.places, fresh=not self._options.out)
        cases = [buffers.case(root) for root in row.roots]
        absent: dict[str, str] = {}
        contenders = list(self._contenders(cases, absent))
        if self._options.check:
            contenders = [one for one in contenders if self._check(one, "before timing", absent)]
        times = self._rounds(contenders, self._plan(contenders))
        if self._options.check:
            for one in contenders:
                self._check(one, "after timing", absent)
        measured = {one.peer.name: self._measured(one, found) for one, found in zip(contenders, times, strict=True)}
        return RowResult.of(row, measured, absent)

    def _contenders(self, cases: list[Case], absent: dict[str, str]) -> Iterator[_Contender]:
        """Ours first, then the peers that have the row."""
        for peer in (self._ours, *self._peers):
            if peer is not self._ours:
                cases = [case.for_peers() for case in cases]
            calls = [peer.call(case) for case in cases]
            ready = [call for call in calls if call is not None]
            if len(ready) == len(calls):
                yield _Contender(peer, cases, ready)
            else:
                absent[peer.name] = "it has no such call for this dtype, size or reduction"

    def _check(self, one: _Contender, when: str, absent: dict[str, str]) -> bool:
        """Look at every element of a contender's results; False for a peer that can't go on."""
        for case, call in zip(one.cases, one.calls, strict=True):
            problem = next((told for told in self._group.all_gather(self._problem(one, case, call)) if told), "")
            if not problem:
                continue
            if one.peer is self._ours:
                raise WrongAnswerError(f"{problem}, {when}")
            one.wrong = absent[one.peer.name] = f"{problem}, {when}"
            return False
        return True

    def _problem(self, one: _Contender, case: Case, call: Call) -> str:
        """What is wrong with one call of a contender on this rank; '' if nothing is."""
        case.poison()
        one.peer.prime(case)
        self._group.wait()
        self._group.barrier()
        row = case.row
        try:
            if not row.op.moves:
                told = left_early(self._group, call)
                return f"{row.op.name}: {told}" if told else ""
            returned = call()
            self._group.wait()
            found = case.first_wrong(one.peer.results(case, returned))
        except Exception as error:
            if one.peer is self._ours:
                raise
            return f"raised {type(error).__name__}: {' '.join(str(error).split())[:_MOST_WORDS]}"
        if found is None:
            return ""
        member, wrong = found
        who = "device" if self._group.comm is None else "rank"
        what = " ".join(filter(None, [row.op.name, row.reduction]))
        root = f", root {case.root}" if row.op.rooted else ""
        return (
            f"{what} of {row.nbytes} bytes of {row.dtype.name}{root}: {who} {member}, element {wrong.where}: "
            f"expected {wrong.expected}, got {wrong.got}"
        )

    def _plan(self, contenders: list[_Contender]) -> int:
        """Warm up, choose how many calls of each contender make a round, and give the number of rounds."""
        asked = self._options
        for one in contenders:
            one.iters = asked.iters or 1
            for call in one.calls:
                for _ in range(asked.warmup):
                    call()
        if asked.iters and asked.rounds:
            return asked.rounds
        turn_s = sum(self._fit(one) for one in contenders)
        return asked.rounds or min(ROUNDS, max(LEAST_ROUNDS, int(ROW_S / turn_s)))

    def _fit(self, one: _Contender) -> float:
        """Choose a contender's calls in a round, unless they were asked for; about how many seconds they take."""
        samples = self._samples(one)
        if not self._options.iters and min(samples) < ROUND_S:
            # A call alone between barriers takes longer than one of many, on a busy machine by far: the least of
            # them says how many to look at next.
            one.iters = _fitting(min(samples))
            samples = self._samples(one)
            one.iters = _fitting(statistics.median(samples))
        return statistics.median(samples) * one.iters

    def _samples(self, one: _Contender) -> list[float]:
        """Seconds of one call, of some rounds; of each the slowest rank's."""
        found: list[float] = []
        while len(found) < max(_SAMPLES, len(one.calls)) and sum(found) * one.iters < _SAMPLING_S:
            call = one.calls[len(found) % len(one.calls)]
            found.append(max(self._group.all_gather(self._clock.round(call, one.iters).time_s)))
        return found

    def _rounds(self, contenders: list[_Contender], rounds: int) -> list[list[Round]]:
        """Time the contenders in turns, roots going round, and the order turned round once all roots had it."""
        times: list[list[Round]] = [[] for _ in contenders]
        order = list(range(len(contenders)))
        roots = len(contenders[0].calls)
        with quiet():
            for turn in range(rounds):
                backwards = turn // roots % 2 == 1
                for index in reversed(order) if backwards else order:
                    one = contenders[index]
                    times[index].append(self._clock.round(one.calls[turn % roots], one.iters))
        return times

    def _measured(self, one: _Contender, found: list[Round]) -> Measured:
        """A contender's rounds, of each the slowest rank's."""
        told = self._group.all_gather([tuple(each) for each in found])
        time_us = self._slowest(told, Round._fields.index("time_s"))
        if found[0].device_s is None:
            return Measured(time_us, None, None, one.iters, one.wrong)
        host_us, device_us = (self._slowest(told, Round._fields.index(name)) for name in ("host_s", "device_s"))
        return Measured(time_us, host_us, device_us, one.iters, one.wrong)

    @staticmethod
    def _slowest(told: list[list[tuple[Any, ...]]], field: int) -> list[float]:
        """For each round the largest of the ranks' figures, in microseconds."""
        figures = np.array([[each[field] for each in rounds] for rounds in told], np.float64)
        return [round(float(value), 3) for value in figures.max(axis=0) * 1e6]


def _fitting(call_s: float) -> int:
    """How many calls make a round long enough."""
    return int(min(MOST_ITERS, max(1, ROUND_S / call_s)))
