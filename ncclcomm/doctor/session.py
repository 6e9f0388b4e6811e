"""From one process, or from all ranks of a job, to the findings: every step has a time limit."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ncclcomm.doctor.check_node import lacks_shared_memory, shared_memory_mend
from ncclcomm.doctor.check_trials import TRIALS
from ncclcomm.doctor.check_world import MPI_INIT, launcher_misfits, mixes_threads
from ncclcomm.doctor.facts import RankFacts, gather_facts
from ncclcomm.doctor.findings import Findings
from ncclcomm.doctor.guard import Guard
from ncclcomm.doctor.shared_memory import Readable, read_neighbour, yama_scope
from ncclcomm.doctor.trials import run_trials
from ncclcomm.doctor.world import World, end_job, end_job_without_mpi, load_library, speak_before_the_end
from ncclcomm.errors import BackendUnavailableError
from ncclcomm.launcher.command import OPENMPI
from ncclcomm.launcher.flavour import find_launcher

__all__ = ["Session", "examine"]

LONG = 3
"""How many limits a step of many exchanges may take: MPI_Init, all trials."""

_LIBRARY_MEND = "python -m mpi4py --mpi-library shows what is loaded"
_TRIALS_MEND = "NCCL_DEBUG=INFO shows where it waits"

_LATER_S = 5.0
"""How much longer than rank 1 the others wait for rank 0, so that one of them speaks."""


@dataclass(frozen=True)
class Session:
    """What one rank has to do in the end."""

    found: Findings | None
    """What to report; None on a rank that reports nothing."""
    close: Callable[[], None]
    """Ends MPI once the report is written, or the whole job where ranks may be stuck."""


@dataclass(frozen=True)
class _Settings:
    """What the steps are made with."""

    guard: Guard
    limit_s: float
    with_trials: bool
    render: Callable[[Findings], str]


@contextmanager
def examine(limit_s: float, *, trials: bool, render: Callable[[Findings], str]) -> Iterator[Session]:
    """Find out everything, together with the other ranks if a launcher started some.

    Collective: every process that the launcher started calls it, for a `with` block that ends with the session's close.

    Args:
        limit_s: seconds that a rank has for an answer; a rank that is late is named in the findings, and one that
            hangs in MPI_Init, a trial or MPI_Finalize for some times as long is ended, with a line on standard error.
        trials: whether data is moved, too.
        render: turns findings into the report, here for what is printed where MPI_Init or a trial ends the job.

    Yields:
        What this rank has to do in the end.
    """
    facts = gather_facts()
    with Guard(f"rank {facts.rank} on {facts.host}") as guard:
        session = _session(facts, _Settings(guard, limit_s, trials, render))
        guard.stage("MPI_Finalize", 2 * LONG * limit_s, "see what the other ranks wait for", may_end=True)
        yield session


def _session(facts: RankFacts, settings: _Settings) -> Session:
    """Load MPI, start it where that can work, and ask or answer."""
    settings.guard.stage("loading the MPI library", settings.limit_s, _LIBRARY_MEND, may_end=True)
    mpi = load_library(facts)
    if mpi is None and facts.rank:
        return _refuse(Findings([facts]), f"mpi4py loads no MPI library ({facts.mpi_error}): {_LIBRARY_MEND}")
    if mpi is None or launcher_misfits(facts):
        return _without_world(facts, settings)
    found = Findings([facts], ended_in=MPI_INIT, no_trials="MPI_Init ends this rank")
    if facts.mpi_flavour != OPENMPI and (reason := lacks_shared_memory(facts)):
        # Open MPI goes on without; the others die by SIGBUS, and launchers drop what dying ranks say.
        return _refuse(found, f"{reason}: {shared_memory_mend(facts)}")
    last_words = settings.render(found) if facts.rank == 0 else ""
    settings.guard.stage(MPI_INIT, LONG * settings.limit_s, _init_mend(facts), last_words=last_words)
    world = World(mpi, facts)
    if facts.promised is not None and world.size != facts.promised["size"]:
        return _wrong_world(facts, world)
    try:
        return _answer(world, facts, settings) if world.rank else _ask(world, facts, settings)
    except Exception:
        # MPI_Finalize at this process's exit would wait for the others, and they for this rank.
        traceback.print_exc()
        end_job()


def _refuse(found: Findings, reason: str) -> Session:
    """Report what keeps a rank out of MPI_Init; one that rank 0 can't speak for says so itself, and ends the job."""
    if found.here.rank == 0:
        return Session(found, _nothing_to_close)
    time.sleep(_LATER_S)  # a rank 0 that lacks the same is faster
    print(f"fail  ncclcomm doctor: rank {found.here.rank} on {found.here.host}\n      -> {reason}", file=sys.stderr)
    if found.here.promised and not found.here.promised["by_srun"]:
        end_job_without_mpi()
    sys.exit(1)


def _init_mend(facts: RankFacts) -> str:
    """What to type where MPI_Init hangs or dies."""
    mine = f"this rank loads {facts.mpi_library}, as all must"
    if facts.promised is not None and facts.promised["by_srun"]:
        return f"{mine}; srun --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH, Intel MPI), whichever `srun --mpi=list` shows"
    return (
        f"{mine}; start with the mpiexec of that MPI (ncclcomm doctor, without a launcher, names it); between hosts, "
        "look for a firewall"
    )


def _nothing_to_close() -> None:
    """The close of a process whose MPI is down."""


def _add_mpiexec(found: Findings) -> Findings:
    """Add the launcher that belongs to this MPI."""
    try:
        found.mpiexec = find_launcher().mpiexec
    except BackendUnavailableError as error:
        found.mpiexec_error = str(error)
    return found


def _without_world(facts: RankFacts, settings: _Settings) -> Session:
    """This process alone: no MPI, or one whose MPI_Init would abort or find nobody. One process of the job reports."""
    if facts.rank:
        return Session(None, _nothing_to_close)
    found = Findings([facts], limit_s=settings.limit_s)
    if launcher_misfits(facts):
        found.no_trials = "the launcher doesn't fit the MPI library"
    elif facts.promised is not None and facts.promised["size"] > 1:
        found.no_trials = "the ranks have no MPI"
    else:
        found.no_trials = _why_no_trials(found)
    if settings.with_trials and not found.no_trials:
        settings.guard.stage(TRIALS, LONG * settings.limit_s, _TRIALS_MEND)
        found.trials = [run_trials(settings.limit_s)]
    return Session(_add_mpiexec(found), _nothing_to_close)


def _wrong_world(facts: RankFacts, world: World) -> Session:
    """Another number of ranks than promised: the process that the launcher calls rank 0 reports."""
    assert facts.promised is not None
    found = None
    if facts.promised["rank"] == 0:
        found = _add_mpiexec(Findings([facts], size=world.size, no_trials="the ranks don't find each other"))
    return Session(found, world.finish)


def _ask(world: World, facts: RankFacts, settings: _Settings) -> Session:
    """Rank 0: hear all ranks, have them look at each other, have them try, and hear what came of it."""
    limit_s = settings.limit_s
    found = Findings([facts], size=world.size, limit_s=limit_s)
    broken = Session(found, end_job)
    if facts.promised is None and world.size == 1:
        _add_mpiexec(found)
    memory = Readable()
    greetings = _all_ranks(world, _greeting(facts, memory), found, limit_s)
    found.ranks = [RankFacts.from_json(text["facts"]) for text in greetings]
    if found.missing:
        return broken
    tickets = [text["ticket"] for text in greetings]
    looks = _order(world, facts, {"do": "look", "tickets": tickets}, settings, found)
    if found.missing:
        return broken
    _add_looks(found, looks)
    found.no_trials = _why_no_trials(found)
    if settings.with_trials and not found.no_trials:
        found.ended_in, found.no_trials = TRIALS, "the job ended in a trial"
        order = {"do": "try", "last_words": settings.render(found)}
        found.trials = _order(world, facts, order, settings, found)
        if found.missing:
            errors = [error for error in map(_error_in, found.trials) if error]
            found.ended_because, found.trials = (errors or [""])[0], None
            return broken
        found.ended_in = found.no_trials = ""

    def close() -> None:
        if _are_stuck(found):
            end_job()
        world.tell_all(json.dumps({"do": "end"}))
        world.finish()

    return Session(found, close)


def _order(
    world: World, facts: RankFacts, order: dict[str, Any], settings: _Settings, found: Findings
) -> list[dict[str, Any]]:
    """Have all ranks do something, this one too; gives what each tells."""
    world.tell_all(json.dumps({**order, "last_words": ""}))
    mine = _do(world, facts, order, settings)
    # A rank that failed, or waited in vain, has given the others their time already.
    waits_s = (1 if _error_in(mine) else LONG) * settings.limit_s
    last_words = order.get("last_words", "")
    settings.guard.stage("an exchange of all ranks", waits_s + _LATER_S, _TRIALS_MEND, last_words=last_words)
    return _all_ranks(world, mine, found, waits_s)


def _are_stuck(found: Findings) -> bool:
    """True if a trial failed, so that a rank may be in MPI for good; where init fails, it does so on all ranks."""
    trials = found.trials or []
    return any(_error_in(told) for told in trials) and not all("node" not in told for told in trials)


def _error_in(told: dict[str, Any]) -> str:
    """The error that a rank's trials ended with; '' for none."""
    trials = (told.get(key) for key in ("devices", "node_ranks", "leaders"))
    return told.get("init_error") or next((trial["error"] for trial in trials if trial and trial["error"]), "")


def _all_ranks(world: World, mine: dict[str, Any], found: Findings, limit_s: float) -> list[dict[str, Any]]:
    """What every rank that answers in time tells; the others are noted as missing."""
    texts = world.collect(json.dumps(mine), limit_s)
    found.limit_s = limit_s
    found.missing = [rank for rank, text in enumerate(texts) if text is None]
    if found.missing:
        found.no_trials = "not all ranks answered"
    return [json.loads(text) for text in texts if text is not None]


def _greeting(facts: RankFacts, memory: Readable) -> dict[str, Any]:
    """The first thing that a rank tells."""
    return {"facts": facts.to_json(), "ticket": memory.ticket()}


def _why_no_trials(found: Findings) -> str:
    """Why ranks can't try anything together; '' where they can."""
    if any(fact.settings_error for fact in found.ranks):
        return "a NCCLCOMM_ variable makes no sense (see settings.values)"
    if any(fact.backend_error for fact in found.ranks):
        return "a rank has no devices (see devices.backend)"
    if len({fact.ncclcomm for fact in found.ranks}) > 1:
        return "ranks have different versions of ncclcomm"
    if len({fact.mpi_library for fact in found.ranks}) > 1:
        return "ranks load different MPI libraries"
    if mixes_threads(found):
        return "ranks have different thread levels (see mpi.threads)"
    return ""


def _do(world: World, facts: RankFacts, order: dict[str, Any], settings: _Settings) -> dict[str, Any]:
    """What rank 0 orders, on every rank. Collective."""
    limit_s = LONG * settings.limit_s
    if order["do"] == "look":
        mend = "do all hosts reach each other? look for a firewall"
        settings.guard.stage("an exchange of all ranks", limit_s, mend, may_end=world.rank > 0)
        return _look(world, facts, order["tickets"])
    reason = lacks_shared_memory(facts, facts.ranks_on_host)
    mend = f"{reason}: {shared_memory_mend(facts)}" if reason else _TRIALS_MEND
    settings.guard.stage(TRIALS, limit_s, mend, may_end=world.rank > 0, last_words=order["last_words"])
    speak_before_the_end(world.rank, order["last_words"], limit_s)
    return run_trials(settings.limit_s)


def _look(world: World, facts: RankFacts, tickets: list[dict[str, Any]]) -> dict[str, Any]:
    """See which ranks share this one's host, and whether it can read the next one's memory. Collective."""
    firsts = world.first_ranks_on_hosts()
    facts.first_on_host = firsts[world.rank]
    neighbours = [rank for rank, first in enumerate(firsts) if first == facts.first_on_host]
    facts.ranks_on_host = len(neighbours)
    unreadable = None
    if len(neighbours) > 1:
        following = neighbours[(neighbours.index(world.rank) + 1) % len(neighbours)]
        unreadable = read_neighbour(tickets[following])
    world.barrier()
    return {"first_on_host": facts.first_on_host, "ranks_on_host": facts.ranks_on_host, "unreadable": unreadable}


def _add_looks(found: Findings, looks: list[dict[str, Any]]) -> None:
    """Add what the ranks saw of each other."""
    for fact, own in zip(found.ranks, looks, strict=True):
        fact.first_on_host, fact.ranks_on_host = own["first_on_host"], own["ranks_on_host"]
    tried = {rank: own["unreadable"] for rank, own in enumerate(looks) if own["unreadable"] is not None}
    found.readers = len(tried)
    found.unreadable = {rank: reason for rank, reason in tried.items() if reason}
    found.yama_scope = yama_scope()


def _answer(world: World, facts: RankFacts, settings: _Settings) -> Session:
    """Another rank: tell rank 0 of itself, do what it orders, and wait until the report is written."""
    limit_s = settings.limit_s
    memory = Readable()
    world.collect(json.dumps(_greeting(facts, memory)), limit_s)
    order = _hear(world, settings, 2 * limit_s)
    while order["do"] != "end":
        world.collect(json.dumps(_do(world, facts, order, settings)), limit_s)
        order = _hear(world, settings, (LONG + 2) * limit_s)
    return Session(None, world.finish)


def _hear(world: World, settings: _Settings, limit_s: float) -> dict[str, Any]:
    """Rank 0's order; without one this rank says so and ends the job."""
    waits_s = limit_s + (0 if world.rank == 1 else _LATER_S)
    settings.guard.stage("a wait for rank 0", waits_s + _LATER_S, "see what rank 0 does", may_end=True)
    word = world.hear(waits_s)
    if word is None:
        print(f"fail  ncclcomm doctor: rank 0 didn't answer rank {world.rank} within {waits_s:g} s", file=sys.stderr)
        end_job()
    order: dict[str, Any] = json.loads(word)
    return order
