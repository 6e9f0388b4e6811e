"""Lines on the ranks themselves: launcher, world, MPI, and versions that must agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ncclcomm.doctor.facts import RankFacts
from ncclcomm.doctor.findings import Findings, by_value, on_ranks
from ncclcomm.doctor.lines import Line, failed, not_checked, passed, warned
from ncclcomm.launcher.command import MPICH, OPENMPI
from ncclcomm.topology import format_ranks

__all__ = ["MPI_INIT", "check_world", "launcher_misfits", "mixes_threads"]

MPI_INIT = "MPI_Init"
"""The step in which ranks find each other."""

_INSTALL = "pip install 'ncclcomm[mpich]'"


def check_world(found: Findings) -> list[Line]:
    """All lines on launcher, world, MPI and versions."""
    return [
        _launcher(found),
        _size(found),
        _answers(found),
        _hosts(found),
        _mpi_library(found),
        _same(found, "mpi.mpi4py", "mpi4py", lambda fact: fact.mpi4py, "mpi4py"),
        _threads(found),
        _cuda_awareness(found),
        *_versions(found),
    ]


def launcher_misfits(fact: RankFacts) -> bool:
    """True if this process was started by the launcher of an MPI whose ranks its own MPI can't join."""
    started, loaded = fact.launcher_flavour, fact.mpi_flavour
    # MPICH and what descends from it understand each other's launchers.
    return bool(started and loaded) and (started == OPENMPI) != (loaded == OPENMPI)


def mixes_threads(found: Findings) -> bool:
    """True if ranks of MPICH have different thread levels, some of whose messages then never arrive (5.0.2 does so)."""
    return found.here.mpi_flavour == MPICH and len({fact.threads for fact in found.ranks}) > 1


def _start_again(found: Findings) -> str:
    """What starts the ranks rightly."""
    size = (found.here.promised or {}).get("size", 4)
    own = found.mpiexec or "the mpiexec of that MPI"
    return f"ncclcomm run -n {size} PROGRAM, or {own} -n {size} python PROGRAM"


def _launcher(found: Findings) -> Line:
    """Do MPI and launcher belong together?"""
    name, here, promised = "mpi.launcher", found.here, found.here.promised
    if here.mpi_error:
        return _without_mpi(name, found)
    if launcher_misfits(here):
        return failed(
            name,
            f"started by {here.launcher_flavour}'s launcher ({_promise(here)}), but mpi4py loads {here.mpi_library} "
            f"({here.mpi_path or 'path unknown'}): every rank is a world of its own, or aborts",
            _start_again(found),
        )
    if promised and found.size < promised["size"]:
        if found.ended_in and here.launcher_flavour:
            return passed(name, f"started by {here.launcher_flavour}'s launcher, MPI is {here.mpi_library}")
        return not_checked(name, f"{_promise(here)}; the launcher's MPI isn't told by its variables")
    if promised:
        starter = f"{here.launcher_flavour}'s launcher" if here.launcher_flavour else "srun"
        return passed(name, f"started by {starter}, MPI is {here.mpi_library}")
    if found.mpiexec_error:
        return failed(name, found.mpiexec_error, "the message says what to type")
    return passed(name, f"{found.mpiexec} starts ranks of {here.mpi_library}")


def _without_mpi(name: str, found: Findings) -> Line:
    """The launcher's line where there is no MPI."""
    here = found.here
    if here.promised and here.promised["size"] > 1:
        return failed(name, f"{_promise(here)}, but mpi4py loads no MPI library ({here.mpi_error})", _INSTALL)
    return warned(name, f"no MPI, so that programs run as one rank: {here.mpi_error}", _INSTALL)


def _promise(fact: RankFacts) -> str:
    """The launcher's variable, as it stands."""
    return "no launcher" if fact.promised is None else f"{fact.promised['variable']}={fact.promised['size']}"


def _size(found: Findings) -> Line:
    """Are there as many ranks as promised?"""
    name, here, promised = "world.size", found.here, found.here.promised
    if found.ended_in == MPI_INIT:
        text = f"{on_ranks([here])} ends in MPI_Init, by itself or with another rank"
        return failed(name, text, f"mend the other fails first, if any; then {_start_again(found)}")
    if promised is None:
        if here.size == 1:
            return passed(name, "1 process, started without a launcher")
        return passed(name, f"{here.size} ranks; the launcher promises no number")
    if here.size == promised["size"]:
        return passed(name, f"{here.size} ranks, as {promised['variable']} says")
    mend = _start_again(found)
    if promised["by_srun"] or promised["variable"].startswith("SLURM_"):
        wanted = "pmix" if here.mpi_flavour == OPENMPI else "pmi2"
        mend = f"srun --mpi={wanted} ... (what `srun --mpi=list` shows), or {mend}"
    return failed(name, f"{_promise(here)} promises {promised['size']} ranks, but MPI sees {here.size}", mend)


def _answers(found: Findings) -> Line:
    """Did every rank answer?"""
    name = "world.answers"
    if found.size == 1:
        return not_checked(name, "one rank")
    if not found.missing:
        return passed(name, f"all {found.size} ranks answered")
    return failed(
        name,
        f"{format_ranks(found.missing)} of {found.size} didn't answer within {found.limit_s:g} s",
        "see what holds these processes (py-spy dump, or gdb -p PID); does a firewall block the hosts' ports?",
    )


def _hosts(found: Findings) -> Line:
    """Where the ranks are."""
    topology = found.topology
    if found.size == 1:
        return passed("world.hosts", f"{found.here.host}, cores: {found.here.cores}")
    if found.missing:
        return not_checked("world.hosts", "not all ranks answered")
    nodes = "; ".join(
        f"node {node}: {format_ranks(ranks)} on {found.ranks[ranks[0]].host}, cores: {found.ranks[ranks[0]].cores}"
        for node, ranks in enumerate(topology.ranks_of[:8])
    )
    more = f"; and {topology.num_nodes - 8} more" if topology.num_nodes > 8 else ""
    return passed("world.hosts", nodes + more)


def _mpi_library(found: Findings) -> Line:
    """Is it the same MPI everywhere?"""
    name = "mpi.library"
    if found.here.mpi_error:
        return not_checked(name, "no MPI is loaded")
    groups = by_value(found.ranks, lambda fact: fact.mpi_library)
    if len(groups) > 1:
        told = "; ".join(f"{on_ranks(members)}: {library or 'none'}" for library, members in groups)
        return failed(name, f"ranks load different libraries: {told}", "use one Python environment on all hosts")
    return passed(name, f"{found.here.mpi_library}{_on_all(found)}")


def _threads(found: Findings) -> Line:
    """Can the watchdog call MPI?"""
    name = "mpi.threads"
    if not found.here.threads:
        return not_checked(name, "MPI was not started")
    few = [fact for fact in found.ranks if fact.threads != "multiple"]
    mend = "unset MPI4PY_RC_THREADS and MPI4PY_RC_THREAD_LEVEL, or use an MPI built with MPI_THREAD_MULTIPLE"
    if mixes_threads(found):
        groups = by_value(found.ranks, lambda fact: fact.threads)
        told = "; ".join(f"{on_ranks(members)}: {level}" for level, members in groups)
        return failed(name, f"ranks have different thread levels, with which MPICH hangs: {told}", mend)
    if few:
        text = f"{on_ranks(few)}: MPI gives threads={few[0].threads}, so that a watchdog can't end a job by MPI_Abort"
        return warned(name, text, mend)
    return passed(name, "MPI_THREAD_MULTIPLE")


def _cuda_awareness(found: Findings) -> Line:
    """Does MPI take GPU memory?"""
    name = "mpi.cuda"
    if not found.here.threads:
        return not_checked(name, "MPI was not started")
    groups = by_value(found.ranks, lambda fact: fact.cuda_aware)
    if len(groups) > 1:
        told = "; ".join(f"{on_ranks(members)}: {_in_words(aware)}" for aware, members in groups)
        return warned(name, f"ranks differ: {told}", "use one MPI on all hosts")
    return passed(name, _in_words(groups[0][0]))


def _in_words(aware: bool | None) -> str:
    """What MPIX_Query_cuda_support said."""
    if aware:
        return "MPI is CUDA-aware (MPIX_Query_cuda_support)"
    said = "no such function" if aware is None else "says no"
    return f"not CUDA-aware (MPIX_Query_cuda_support: {said}): GPU data crosses nodes through host memory"


def _versions(found: Findings) -> Iterator[Line]:
    """Python, numpy and ncclcomm."""
    yield _python(found)
    yield _same(found, "versions.numpy", "numpy", lambda fact: fact.numpy, "numpy")
    yield _same(found, "versions.ncclcomm", "ncclcomm", lambda fact: fact.ncclcomm, "ncclcomm")


def _python(found: Findings) -> Line:
    """Is it the same Python everywhere?"""
    name = "versions.python"
    groups = by_value(found.ranks, lambda fact: fact.python)
    if len(groups) == 1:
        return passed(name, f"Python {found.here.python}{_on_all(found)}")
    told = "; ".join(f"{on_ranks(members)}: {python} ({members[0].executable})" for python, members in groups)
    mend = f"start all ranks with one interpreter, by its path: {found.here.executable}"
    minors = {tuple(fact.python.split(".")[:2]) for fact in found.ranks}
    if len(minors) > 1:
        return failed(name, f"ranks run different Pythons: {told}", mend)
    return warned(name, f"ranks run different Pythons: {told}", mend)


def _same(found: Findings, name: str, what: str, of: Callable[[RankFacts], Any], package: str) -> Line:
    """Is a package of one version everywhere?"""
    groups = by_value(found.ranks, of)
    if len(groups) == 1:
        version = groups[0][0]
        if not version:
            return not_checked(name, f"{what} is not installed")
        return passed(name, f"{what} {version}{_on_all(found)}")
    told = "; ".join(f"{on_ranks(members)}: {version or 'none'}" for version, members in groups)
    others = ", ".join(dict.fromkeys(members[0].executable for _, members in groups[1:]))
    return failed(
        name,
        f"ranks have different versions of {what}: {told}",
        f"{others} -m pip install '{package}=={of(found.here)}', or one environment for all ranks (see PYTHONPATH)",
    )


def _on_all(found: Findings) -> str:
    """Words for what all ranks have."""
    return " on all ranks" if len(found.ranks) > 1 else ""
