"""What a run was measured on: machine, versions, settings, commit."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import ncclcomm
from ncclcomm import config
from ncclcomm.bench.group import Group
from ncclcomm.errors import BackendUnavailableError

__all__ = ["commit_of_source", "cpu_model", "facts_of", "load_average", "settings_of_libraries"]

_LIBRARIES = ("NCCL_", "MPIR_CVAR_", "OMPI_MCA_", "I_MPI_", "UCX_", "FI_", "GLOO_", "CUDA_DEVICE_MAX_CONNECTIONS")
"""Prefixes of the variables that tune the libraries below, ours and the peers'."""

_SET_BY_LAUNCHERS = (
    "I_MPI_BIND_WIN_ALLOCATE",
    "I_MPI_HYDRA_",
    "I_MPI_INFO_",
    "I_MPI_INTERNAL_MEM_POLICY",
    "I_MPI_PIN_INFO",
    "I_MPI_PIN_MAPPING",
    "I_MPI_RETURN_WIN_MEM_NUMA",
    "OMPI_MCA_PREFIXES",
    "OMPI_MCA_cpu_type",
    "OMPI_MCA_ess",
    "OMPI_MCA_initial_wdir",
    "OMPI_MCA_num_procs",
    "OMPI_MCA_orte",
    "OMPI_MCA_pmix",
)
"""Of these the launchers' own ones, that tune nothing."""

_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|COOKIE|AUTH|(?<!P)KEY", re.IGNORECASE)
"""Names whose values nobody should read in a result. A PKEY is a partition of InfiniBand, and no secret."""
_SECRET_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_HIDDEN = "(hidden)"


def facts_of(group: Group, command: list[str], commit: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What a result says of its run; collective.

    Args:
        group: who takes part.
        command: the arguments of `ncclcomm bench`.
        commit: as `commit_of_source` gave it.
        settings: how the rows were timed.
    """
    models = group.all_gather((cpu_model(), os.cpu_count() or 0, len(os.sched_getaffinity(0))))
    machine: dict[str, Any] = {
        "cpus": sorted({model for model, _, _ in models}),
        "cores_per_host": [models[first][1] for first in sorted(set(group.first_on_host))],
        "cores_per_rank": [usable for _, _, usable in models],
        "hosts": len(group.per_host),
        "ranks_per_host": group.per_host,
        "load_before": load_average(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    versions = {"python": platform.python_version(), "numpy": np.__version__, "ncclcomm": ncclcomm.__version__}
    if group.mpi_comm is not None:
        from ncclcomm.transport.mpi import MPI

        versions["mpi4py"] = version("mpi4py")
        lines = MPI.Get_library_version().replace("\0", "").splitlines()
        versions["mpi"] = " ".join(lines[0].split(", package")[0].split())
    if group.on_gpus:
        from ncclcomm.devices import cuda_facts

        machine["gpus"] = cuda_facts.device_names()
        versions.update({f"cuda {name}": number for name, number in cuda_facts.versions().items()})
        versions.update(_nccl_versions())
    where = {"ranks": group.ranks, "nodes": 1, "backend": group.backend.name, "devices": len(group.members)}
    if group.comm is not None:
        where["nodes"] = group.comm.num_nodes
    return {
        "command": ["ncclcomm", "bench", *command],
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "where": where,
        "machine": machine,
        "versions": versions,
        "settings": {**settings, "variables": settings_of_libraries()},
        "commit": commit,
    }


def _nccl_versions() -> dict[str, str]:
    """The versions of CuPy, and of NCCL where there is one."""
    import cupy

    found = {"cupy": str(cupy.__version__)}
    with contextlib.suppress(ImportError, BackendUnavailableError):
        from ncclcomm.transport import nccl

        found["nccl"] = str(nccl.version())
    return found


def cpu_model(where: str = "/proc/cpuinfo") -> str:
    """The name of the CPU; the architecture where the system doesn't tell it.

    Args:
        where: the kernel's file about CPUs.
    """
    try:
        lines = Path(where).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def load_average() -> list[float]:
    """How many processes wanted to run on this host over the last 1, 5 and 15 minutes."""
    return [round(load, 2) for load in os.getloadavg()]


def settings_of_libraries() -> dict[str, str]:
    """The variables of this process that tune ncclcomm and the libraries that it and its peers use, without secrets."""
    tuned = config.variables(*_LIBRARIES)
    ours = {name: value for name, value in config.variables("NCCLCOMM_").items() if name in config.SETTINGS}
    tuned = {name: value for name, value in tuned.items() if not name.startswith(_SET_BY_LAUNCHERS)}
    return {name: _shown(name, value) for name, value in {**ours, **tuned}.items()}


def _shown(name: str, value: str) -> str:
    """A variable's value as anybody may read it."""
    return _HIDDEN if _SECRET_NAME.search(name) else _SECRET_IN_URL.sub(_HIDDEN, value)


def commit_of_source() -> str:
    """The commit of the checkout that ncclcomm runs from, with -dirty where files differ from it; '' if unknown.

    Called before MPI starts, as it starts a process.
    """
    source = Path(sys.modules["ncclcomm"].__file__ or "").parent
    try:
        asked = subprocess.run(
            ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout.strip() if asked.returncode == 0 else ""
