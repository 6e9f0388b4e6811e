"""What one rank knows of itself, in plain values that travel as JSON between ranks of different versions."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

import ncclcomm
from ncclcomm import config
from ncclcomm.doctor.network import interfaces
from ncclcomm.errors import NcclCommError

__all__ = ["RankFacts", "gather_facts", "rdma_devices"]

SHOWN = (
    "NCCLCOMM_",
    "NCCL_",
    "CUDA_",
    "FI_",
    "UCX_",
    "OMPI_MCA_",
    "PRTE_MCA_",
    "PMIX_MCA_",
    "I_MPI_",
    "MPIR_CVAR_",
    "SLURM",
)
"""Prefixes of the variables that the checks look at."""

_SECRET = ("JWT", "TOKEN", "SECRET", "PASSW", "KEY", "CREDENTIAL")
"""Words in the names of variables that a report, which people send to each other, must not show."""


@dataclass
class RankFacts:
    """What one rank knows of itself. Every field has a default, for ranks of other versions know other fields."""

    rank: int = 0
    size: int = 1
    """Ranks that MPI sees."""
    promised: dict[str, Any] | None = None
    """What the launcher says: variable, size, rank, by_srun; None without a launcher."""
    host: str = ""
    first_on_host: int = 0
    """Lowest rank that shares memory with this one."""
    ranks_on_host: int = 1
    """How many ranks share memory with this one, itself included."""
    pid: int = 0
    cores: int = 0
    """Cores that this process may use."""
    executable: str = ""
    python: str = ""
    numpy: str = ""
    ncclcomm: str = ""
    mpi4py: str = ""
    mpi_library: str = ""
    """First line of the library's own version text."""
    mpi_flavour: str = ""
    """MPICH, Open MPI or Intel MPI, as `ncclcomm.launcher.flavour.family` names them."""
    mpi_path: str = ""
    mpi_error: str = ""
    """Why there is no MPI; '' where there is one."""
    launcher_flavour: str = ""
    """The MPI whose launcher started this process, as far as its variables tell."""
    threads: str = ""
    """The thread level that MPI gives: single, funneled, serialized or multiple."""
    cuda_aware: bool | None = None
    """What MPIX_Query_cuda_support says; None where the library has no such function."""
    variables: dict[str, str] = field(default_factory=dict)
    settings_error: str = ""
    share_devices: bool = False
    node_sizes: list[int] = field(default_factory=list)
    node_map: list[int] = field(default_factory=list)
    backend: str = ""
    backend_error: str = ""
    devices: list[dict[str, Any]] = field(default_factory=list)
    """The devices that the process sees: name, uuid."""
    gpu_reason: str = ""
    """Why no GPU is usable; '' where one is."""
    driver: str = ""
    """Version of the NVIDIA driver that is loaded on the host; '' without one."""
    cupy: str = ""
    cuda: dict[str, str] = field(default_factory=dict)
    """CUDA versions: what the driver serves, what CuPy was built for."""
    nccl: int = 0
    nccl_error: str = ""
    shm: dict[str, Any] = field(default_factory=dict)
    """/dev/shm: size_bytes, free_bytes, error."""
    memlock_bytes: int | None = None
    """Limit of locked memory; None: none."""
    interfaces: dict[str, list[str]] = field(default_factory=dict)
    """Network interfaces and their IPv4 addresses."""
    rdma: list[str] = field(default_factory=list)
    """Network devices that bypass the kernel."""

    def to_json(self) -> str:
        """As JSON text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankFacts:
        """From another rank's text; fields that this version doesn't know are dropped."""
        known = {item.name for item in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in json.loads(text).items() if name in known})


def gather_facts() -> RankFacts:
    """What this process knows before MPI is loaded; starts neither MPI nor a CUDA context. It doesn't raise."""
    launch = config.launched()
    facts = RankFacts(
        rank=launch.rank if launch else 0,
        promised=_promise(launch),
        host=platform.node(),
        pid=os.getpid(),
        cores=len(os.sched_getaffinity(0)),
        executable=sys.executable,
        python=platform.python_version(),
        numpy=np.__version__,
        ncclcomm=ncclcomm.__version__,
        mpi4py=_installed("mpi4py"),
        cupy=_installed("cupy", "cupy-cuda12x", "cupy-cuda13x", "cupy-cuda11x"),
        launcher_flavour=_launcher_flavour(),
        variables=_variables(),
        driver=_driver(),
        shm=_shared_memory(),
        memlock_bytes=_locked_memory(),
        interfaces=interfaces(),
        rdma=rdma_devices(),
    )
    _read_settings(facts)
    _look_at_devices(facts)
    return facts


def _promise(launch: config.Launch | None) -> dict[str, Any] | None:
    """What the launcher says, in plain values."""
    if launch is None:
        return None
    return {"variable": launch.launcher, "size": launch.size, "rank": launch.rank, "by_srun": launch.by_srun}


def _variables() -> dict[str, str]:
    """The variables that the checks look at, less what is secret: NCCLCOMM_JOB_LINK holds the job's token."""
    found = config.variables(*SHOWN)
    hidden = [name for name in found if any(word in name.upper() for word in _SECRET)]
    return {k: v for k, v in found.items() if k not in hidden and not k.startswith("NCCLCOMM_JOB_")}


def _installed(*names: str) -> str:
    """The version of the first of these packages that is installed; '' for none. Imports nothing."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def _launcher_flavour() -> str:
    """The MPI whose launcher set this process's variables; '' for none, for srun, and where they don't tell."""
    found = config.variables("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "HYDI_CONTROL_FD", "I_MPI_HYDRA_", "SLURM_STEP_ID")
    if "OMPI_COMM_WORLD_SIZE" in found:
        return "Open MPI"
    if "PMI_SIZE" not in found:
        return ""
    if any(name.startswith("I_MPI_HYDRA_") for name in found):
        return "Intel MPI"
    # Under srun --mpi=pmi2 the variables are SLURM's own.
    return "" if "SLURM_STEP_ID" in found and "HYDI_CONTROL_FD" not in found else "MPICH"


def _read_settings(facts: RankFacts) -> None:
    """Add what the NCCLCOMM_ variables say."""
    try:
        settings = config.load()
    except NcclCommError as error:
        facts.settings_error = str(error)
        return
    facts.share_devices = settings.share_devices
    facts.node_sizes, facts.node_map = list(settings.node_sizes), list(settings.node_map)


def _look_at_devices(facts: RankFacts) -> None:
    """Add the backend in use and its devices."""
    from ncclcomm.devices.cuda import probe
    from ncclcomm.devices.registry import current_backend

    _, facts.gpu_reason = probe()
    try:
        backend = current_backend()
        facts.backend = backend.name
        facts.devices = [{"name": "", "uuid": backend.uuid(device)} for device in range(backend.device_count())]
    except NcclCommError as error:
        facts.backend_error = str(error)
        return
    if facts.backend == "cuda":
        _look_at_gpus(facts)


def _look_at_gpus(facts: RankFacts) -> None:
    """Add the names of the GPUs, and the versions of CUDA and NCCL."""
    from ncclcomm.devices import cuda_facts

    def nccl_version() -> int:
        from ncclcomm.transport import nccl

        return nccl.version()

    def names() -> list[str]:
        return cuda_facts.device_names()

    facts.cuda = _or(cuda_facts.versions, {})
    for device, name in zip(facts.devices, _or(names, []), strict=False):
        device["name"] = name
    try:
        facts.nccl = nccl_version()
    except (ImportError, NcclCommError) as error:
        facts.nccl_error = str(error)


def _or(call: Callable[[], Any], default: Any) -> Any:
    """What a call gives, or the default where CUDA refuses it."""
    try:
        return call()
    except NcclCommError:
        return default


def _driver(where: str = "/proc/driver/nvidia/version") -> str:
    """The version of the loaded NVIDIA driver, such as 570.86.15."""
    try:
        words = Path(where).read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return ""
    return next((word for word in words if word[:1].isdigit() and word.count(".") >= 1), "unknown")


def _shared_memory(where: str = "/dev/shm") -> dict[str, Any]:
    """Size and free bytes of the file system that shared memory of processes lies on."""
    try:
        found = os.statvfs(where)
    except OSError as error:
        return {"size_bytes": 0, "free_bytes": 0, "error": str(error)}
    if not os.access(where, os.W_OK | os.X_OK):
        return {"size_bytes": 0, "free_bytes": 0, "error": f"{where} can't be written by user {os.getuid()}"}
    return {"size_bytes": found.f_blocks * found.f_frsize, "free_bytes": found.f_bavail * found.f_frsize, "error": ""}


def _locked_memory() -> int | None:
    """The limit of locked memory, in bytes; None for none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def rdma_devices(sys_class: str = "/sys/class") -> list[str]:
    """Network devices of this host that MPI can use past the kernel: InfiniBand, RoCE, Omni-Path, Slingshot, EFA.

    Args:
        sys_class: where the kernel lists its devices.
    """
    found = []
    for kind in ("infiniband", "cxi"):
        folder = Path(sys_class) / kind
        if folder.is_dir():
            found += sorted(entry.name for entry in folder.iterdir())
    return found
