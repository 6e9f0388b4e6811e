"""Lines on variables: ncclcomm's own, and SLURM's against what there is."""

from __future__ import annotations

import difflib

from ncclcomm import config
from ncclcomm.doctor.facts import RankFacts
from ncclcomm.doctor.findings import Findings, by_value, on_ranks
from ncclcomm.doctor.lines import Line, failed, not_checked, passed, warned
from ncclcomm.errors import ArgumentError
from ncclcomm.launcher.slurm import Allocation, allocation

__all__ = ["check_settings"]


def check_settings(found: Findings) -> list[Line]:
    """All lines on variables."""
    return [_values(found), _names(found), _slurm(found), _slurm_cores(found)]


def _values(found: Findings) -> Line:
    """Do the NCCLCOMM_ variables make sense?"""
    name = "settings.values"
    wrong = [(error, members) for error, members in by_value(found.ranks, lambda fact: fact.settings_error) if error]
    if wrong:
        error, members = wrong[0]
        variable = error.partition("=")[0]
        return failed(name, f"{on_ranks(members)}: {error}", f"unset {variable}, or set it as the message says")
    settings = sorted({f"{key}={value}" for fact in found.ranks for key, value in _own(fact).items()})
    return passed(name, ", ".join(settings) if settings else "no NCCLCOMM_ variable is set")


def _own(fact: RankFacts) -> dict[str, str]:
    """The variables that `config.load` reads, as this rank has them."""
    return {key: value for key, value in fact.variables.items() if key in config.SETTINGS and value.strip()}


def _names(found: Findings) -> Line:
    """Is there a NCCLCOMM_ variable that nobody reads?"""
    name = "settings.names"
    unknown = sorted({key for fact in found.ranks for key in fact.variables if _is_unknown(key)})
    if not unknown:
        return passed(name, "every NCCLCOMM_ variable has a known name")
    meant = {key: difflib.get_close_matches(key, config.SETTINGS, 1, 0.0)[0] for key in unknown}
    return warned(
        name,
        f"nothing reads {', '.join(unknown)}",
        "; ".join(f"was {meant[key]} meant? else: unset {key}" for key in unknown),
    )


def _is_unknown(key: str) -> bool:
    """True for a NCCLCOMM_ variable with a name of its own."""
    if not key.startswith("NCCLCOMM_") or key in config.SETTINGS:
        return False
    return not any(key.startswith(known) if known.endswith("_") else key == known for known in config.OTHER_NAMES)


def _allocation_of(fact: RankFacts) -> Allocation | None:
    """The allocation that a rank's variables speak of."""
    return allocation(fact.variables)


def _slurm(found: Findings) -> Line:
    """Do SLURM's variables fit the ranks?"""
    name = "slurm.variables"
    try:
        job = _allocation_of(found.here)
    except ArgumentError as error:
        return failed(name, str(error), "unset that variable where you set it: SLURM sets it rightly by itself")
    if job is None:
        return not_checked(name, "not in a SLURM allocation")
    for lie in (_wrong_rank(found), _too_many_tasks(found, job), _strange_host(found, job)):
        if lie:
            return failed(
                name,
                lie,
                "start inside the allocation (salloc, sbatch, srun); variables of another job or shell: "
                "unset ${!SLURM_@} (bash)",
            )
    nodes = f"{len(job.nodes)} node{'s' * (len(job.nodes) != 1)}"
    return passed(name, f"job {job.job_id} of {nodes}; the ranks are where its variables say")


def _in_task(fact: RankFacts) -> bool:
    """True where srun itself started this rank."""
    return bool(fact.promised and (fact.promised["by_srun"] or fact.promised["variable"].startswith("SLURM_")))


def _wrong_rank(found: Findings) -> str:
    """A rank whose number isn't SLURM's."""
    for fact in found.ranks:
        number = fact.variables.get("SLURM_PROCID", "")
        if _in_task(fact) and found.size > 1 and number != str(fact.rank):
            return f"{on_ranks([fact])} has SLURM_PROCID={number}"
    return ""


def _too_many_tasks(found: Findings, job: Allocation) -> str:
    """A step over more nodes than the job has."""
    nodes = found.here.variables.get("SLURM_STEP_NUM_NODES", "")
    if nodes.isdecimal() and int(nodes) > len(job.nodes):
        return f"SLURM_STEP_NUM_NODES={nodes}, but the job has {len(job.nodes)} ({', '.join(job.nodes[:4])})"
    if found.size > 1 and len(found.hosts) > len(job.nodes):
        return f"ranks are on {len(found.hosts)} hosts ({', '.join(found.hosts[:4])}), the job has {len(job.nodes)}"
    return ""


def _strange_host(found: Findings, job: Allocation) -> str:
    """A rank on a host that isn't of the job; SLURM's name for it, where it is told, else the host's own."""
    nodes = {node.partition(".")[0] for node in job.nodes}
    for fact in found.ranks:
        own = fact.variables.get("SLURMD_NODENAME") or fact.host
        if not {own.partition(".")[0], fact.host.partition(".")[0]} & nodes:
            return f"{on_ranks([fact])} is on none of the job's nodes ({', '.join(job.nodes[:4])})"
    return ""


def _slurm_cores(found: Findings) -> Line:
    """Does each rank have the cores that SLURM counts for it?"""
    name = "slurm.cores"
    short = []
    for fact in found.ranks:
        wanted = fact.variables.get("SLURM_CPUS_PER_TASK", "")
        if wanted.isdecimal() and fact.cores < int(wanted):
            short.append(fact)
    if short:
        wanted = short[0].variables["SLURM_CPUS_PER_TASK"]
        return warned(
            name,
            f"{on_ranks(short)} may use {short[0].cores} cores; SLURM_CPUS_PER_TASK={wanted}",
            f"srun --cpus-per-task={wanted} ...: srun doesn't take it over from the batch script",
        )
    if not any("SLURM_CPUS_PER_TASK" in fact.variables for fact in found.ranks):
        return not_checked(name, "SLURM_CPUS_PER_TASK is not set")
    return passed(name, f"{found.here.cores} cores a rank or more")
