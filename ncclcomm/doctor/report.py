"""The report, for people and for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

from ncclcomm.doctor.check_devices import check_devices
from ncclcomm.doctor.check_node import check_node
from ncclcomm.doctor.check_settings import check_settings
from ncclcomm.doctor.check_trials import check_trials
from ncclcomm.doctor.check_world import check_world
from ncclcomm.doctor.facts import RankFacts
from ncclcomm.doctor.findings import Findings, by_value
from ncclcomm.doctor.lines import FAIL, NOT_CHECKED, PASS, WARN, Line
from ncclcomm.topology import format_ranks

__all__ = ["as_json", "facts_as_text", "judge", "lines_as_text"]

_COLOURS = {PASS: "\033[32m", WARN: "\033[33m", FAIL: "\033[31m", NOT_CHECKED: "\033[2m"}
_LAUNCHERS_OWN = (
    "I_MPI_BIND_",
    "I_MPI_HYDRA_",
    "I_MPI_INFO_",
    "I_MPI_INTERNAL_",
    "I_MPI_PIN_",
    "I_MPI_RETURN_",
    "OMPI_MCA_PREFIXES",
    "OMPI_MCA_cpu_type",
    "OMPI_MCA_initial_wdir",
    "OMPI_MCA_num_procs",
    "SLURM",
)
_PLAIN = "\033[0m"


def judge(found: Findings) -> list[Line]:
    """Every line, in the order of the report."""
    return [
        *check_world(found),
        *check_settings(found),
        *check_devices(found),
        *check_node(found),
        *check_trials(found),
    ]


def _title(found: Findings) -> str:
    """What was looked at."""
    hosts = found.hosts
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
    count = f"{len(found.ranks)} of {found.size}" if found.missing else str(found.size)
    return f"{count} rank{'s' * (found.size != 1)} on {where}"


def lines_as_text(found: Findings, lines: Sequence[Line], *, colour: bool) -> str:
    """The report for people: a line each, the mend below it.

    Args:
        found: what was found out.
        lines: what `judge` made of it.
        colour: whether a terminal shows it.
    """
    status_width = len(NOT_CHECKED)
    name_width = max(len(line.id) for line in lines)
    text = [f"ncclcomm doctor: {_title(found)}", ""]
    for line in lines:
        status = line.status.ljust(status_width)
        if colour:
            status = f"{_COLOURS[line.status]}{status}{_PLAIN}"
        text.append(f"{status}  {line.id.ljust(name_width)}  {line.found}")
        if line.mend:
            text.append(f"{' ' * (status_width + name_width + 2)}  -> {line.mend}")
    counts = ", ".join(f"{sum(line.status == s for line in lines)} {s}" for s in (PASS, WARN, FAIL, NOT_CHECKED))
    return "\n".join([*text, "", counts])


def as_json(found: Findings, lines: Sequence[Line]) -> str:
    """One JSON object: lines (of a doctor), and facts: size, missing, ranks."""
    facts = {
        "size": found.size,
        "missing": found.missing,
        "mpiexec": found.mpiexec,
        "ranks": [dataclasses.asdict(fact) for fact in found.ranks],
    }
    return json.dumps({"lines": [dataclasses.asdict(line) for line in lines], "facts": facts}, indent=1)


def facts_as_text(found: Findings) -> str:
    """The facts alone, for people; where ranks differ, a line for each group of them."""
    width = max(len(name) for name, _ in _FACTS)
    text = [f"ncclcomm info: {_title(found)}", ""]
    for name, of in _FACTS:
        groups = by_value(found.ranks, of)
        for value, members in groups:
            ranks = "" if len(groups) == 1 else f"{format_ranks([fact.rank for fact in members])}: "
            text.append(f"{name.ljust(width)}  {ranks}{value}".rstrip())
    return "\n".join(text)


def _promised(fact: RankFacts) -> str:
    """Who started the rank."""
    if fact.promised is None:
        return "none"
    return f"{fact.launcher_flavour or 'srun'} ({fact.promised['variable']}={fact.promised['size']})"


def _devices(fact: RankFacts) -> str:
    """The devices that a rank sees."""
    if fact.backend_error:
        return f"none: {fact.backend_error}"
    kind = "virtual" if fact.backend == "host" else ", ".join(dict.fromkeys(d["name"] for d in fact.devices))
    return f"{len(fact.devices)} {kind}".strip()


def _nccl(fact: RankFacts) -> str:
    """NCCL's number, or why there is none."""
    return str(fact.nccl) if fact.nccl else fact.nccl_error or "not in use"


def _settings(fact: RankFacts) -> str:
    """The variables that matter to ncclcomm, MPI and NCCL, less what launchers set for themselves."""
    shown = {key: value for key, value in fact.variables.items() if not key.startswith(_LAUNCHERS_OWN)}
    return " ".join(f"{key}={value}" for key, value in shown.items()) or "none"


_FACTS: tuple[tuple[str, Callable[[RankFacts], Any]], ...] = (
    ("host", lambda fact: fact.host),
    ("cores", lambda fact: fact.cores),
    ("Python", lambda fact: f"{fact.python} ({fact.executable})"),
    ("ncclcomm", lambda fact: fact.ncclcomm),
    ("numpy", lambda fact: fact.numpy),
    ("mpi4py", lambda fact: fact.mpi4py or "none"),
    ("MPI", lambda fact: fact.mpi_library or f"none: {fact.mpi_error}"),
    ("MPI library", lambda fact: fact.mpi_path or "unknown"),
    ("launcher", _promised),
    ("threads", lambda fact: fact.threads or "MPI was not started"),
    ("backend", lambda fact: fact.backend or "none"),
    ("devices", _devices),
    ("NVIDIA driver", lambda fact: fact.driver or "none"),
    ("CuPy", lambda fact: fact.cupy or "none"),
    ("NCCL", _nccl),
    ("interfaces", lambda fact: ", ".join(f"{k} {' '.join(v)}".strip() for k, v in fact.interfaces.items())),
    ("RDMA devices", lambda fact: ", ".join(fact.rdma) or "none"),
    ("variables", _settings),
)
