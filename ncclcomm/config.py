"""The only reader of the environment.

`load()` turns the variables into one frozen `Config`; everything else is handed what it needs. A value that makes no
sense is an ArgumentError that names the variable, the value and what is allowed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ncclcomm.errors import ArgumentError

__all__ = ["OTHER_NAMES", "SETTINGS", "Config", "Launch", "launched", "load", "slurm_gpus", "supervised", "variables"]

DEFAULT_HOST_DEVICES = 4
DEFAULT_CHECKED_CALLS = 64
DEFAULT_CHUNK_BYTES = 1 << 30
DEFAULT_STALL_S = 60.0

SETTINGS = (
    "NCCLCOMM_CHECK",
    "NCCLCOMM_CHUNK_BYTES",
    "NCCLCOMM_DEVICES",
    "NCCLCOMM_DEVICES_PER_RANK",
    "NCCLCOMM_HOST_STREAMS",
    "NCCLCOMM_LOG",
    "NCCLCOMM_NODE_MAP",
    "NCCLCOMM_NODE_SIZE",
    "NCCLCOMM_SHARE_DEVICES",
    "NCCLCOMM_STALL_S",
    "NCCLCOMM_TIMEOUT_S",
    "NCCLCOMM_WATCHDOG",
)
"""The variables that `load` reads."""

OTHER_NAMES = (
    "NCCLCOMM_JOB_",
    "NCCLCOMM_LABELLED",
    "NCCLCOMM_LAST",
    "NCCLCOMM_LAUNCH_ID",
    "NCCLCOMM_SRUN_MPI",
    "NCCLCOMM_SSH",
    "NCCLCOMM_TEST_",
    "NCCLCOMM_WATCHED",
)
"""Variables that launchers, scripts and tests set or read; a name that ends in `_` stands for all that begin so."""


@dataclass(frozen=True)
class Config:
    """What the environment asks for."""

    backend: str = "auto"
    """'auto', 'host' or 'cuda' (NCCLCOMM_DEVICES)."""
    host_devices: int = DEFAULT_HOST_DEVICES
    """Number of virtual devices of the host backend (NCCLCOMM_DEVICES=host:N)."""
    host_streams: str = "sync"
    """'sync' or 'async' (NCCLCOMM_HOST_STREAMS)."""
    node_sizes: tuple[int, ...] = ()
    """Sizes into which each host's ranks are split, the last one repeating (NCCLCOMM_NODE_SIZE)."""
    node_map: tuple[int, ...] = ()
    """Each rank's node (NCCLCOMM_NODE_MAP); empty: found out."""
    check: bool | int = DEFAULT_CHECKED_CALLS
    """True, False, or how many calls of each communicator are checked (NCCLCOMM_CHECK)."""
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    """Most bytes passed to MPI in one call (NCCLCOMM_CHUNK_BYTES)."""
    timeout_s: float | None = None
    """Time limit of a call, in seconds (NCCLCOMM_TIMEOUT_S); None: no limit."""
    stall_s: float = DEFAULT_STALL_S
    """Seconds after which a waiting call says once where all ranks are (NCCLCOMM_STALL_S)."""
    watchdog: bool = True
    """Ranks watch each other, and an exception that nobody catches ends the job (NCCLCOMM_WATCHDOG)."""
    log: str = "warn"
    """'warn', or 'info': say once per communicator what was chosen and why (NCCLCOMM_LOG)."""
    share_devices: bool = False
    """Ranks of a node may share a GPU (NCCLCOMM_SHARE_DEVICES)."""
    devices_per_rank: int | None = None
    """How many devices the launcher shows each rank, all its own (NCCLCOMM_DEVICES_PER_RANK); None: all to all."""


@dataclass(frozen=True)
class Launch:
    """What a launcher says of this process."""

    launcher: str
    """The name of the variable that says so."""
    size: int
    rank: int
    by_srun: bool = False
    """True if it is SLURM's srun, with whichever --mpi."""


def _is_number(text: str) -> bool:
    """True for digits that are no more than any number here needs: Python refuses to read thousands of them."""
    return text.isdecimal() and len(text) <= 18


def _parse_devices(text: str) -> tuple[str, int]:
    """Read NCCLCOMM_DEVICES."""
    kind, colon, number = text.strip().partition(":")
    if kind in ("auto", "cuda", "host") and not colon:
        return kind, DEFAULT_HOST_DEVICES
    if kind == "host" and _is_number(number) and 1 <= int(number) <= 1024:
        return kind, int(number)
    raise ArgumentError(
        f"NCCLCOMM_DEVICES={text!r} names no backend: use 'auto', 'cuda', 'host' or 'host:N' with N from 1 to 1024"
    )


def _parse_ints(name: str, text: str, least: int, example: str) -> tuple[int, ...]:
    """Read a comma-separated list of whole numbers."""
    items = [item.strip() for item in text.split(",")]
    if not all(_is_number(item) and int(item) >= least for item in items):
        raise ArgumentError(f"{name}={text!r} is not a list of whole numbers of {least} or more, such as {example}")
    return tuple(int(item) for item in items)


def _parse_bytes(name: str, text: str, least: int) -> int:
    """Read a number of bytes."""
    if not _is_number(text) or not least <= int(text) < 2**31:
        raise ArgumentError(f"{name}={text!r} is no number of bytes from {least} to 2147483647, such as 1048576")
    return int(text)


def _parse_count(name: str, text: str) -> int:
    """Read a number of one or more."""
    if not _is_number(text) or not 1 <= int(text) < 2**31:
        raise ArgumentError(f"{name}={text!r} is no whole number of 1 or more")
    return int(text)


def _parse_seconds(name: str, text: str) -> float:
    """Read a number of seconds above 0."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ArgumentError(f"{name}={text!r} is no number of seconds above 0, such as 30 or 0.5")
    return seconds


def _parse_choice(name: str, text: str, allowed: tuple[str, ...]) -> str:
    """Read one word out of a few."""
    if text.strip() not in allowed:
        raise ArgumentError(f"{name}={text!r}: use one of {', '.join(allowed)}")
    return text.strip()


def _parse_bool(name: str, text: str) -> bool:
    """Read a yes or no."""
    return _parse_choice(name, text.lower(), ("0", "1", "false", "true")) in ("1", "true")


def _parse_check(text: str) -> bool | int:
    """Read NCCLCOMM_CHECK: true, false, or a number of calls."""
    word = text.strip().lower()
    if word in ("true", "false"):
        return word == "true"
    if _is_number(word):
        return int(word)
    raise ArgumentError(f"NCCLCOMM_CHECK={text!r}: use true, false, or how many calls to check")


def load(environ: Mapping[str, str] | None = None) -> Config:
    """The configuration that the environment asks for; an empty value counts as unset.

    Args:
        environ: the variables to read; None reads the process's own.

    Raises:
        ArgumentError: a variable's value makes no sense.
    """
    env = os.environ if environ is None else environ

    def get(name: str) -> str:
        return env.get(name, "").strip()

    backend, host_devices = _parse_devices(get("NCCLCOMM_DEVICES") or "auto")
    timeout, stall = get("NCCLCOMM_TIMEOUT_S"), get("NCCLCOMM_STALL_S")
    per_rank = get("NCCLCOMM_DEVICES_PER_RANK")
    sizes, node_map, chunk = get("NCCLCOMM_NODE_SIZE"), get("NCCLCOMM_NODE_MAP"), get("NCCLCOMM_CHUNK_BYTES")
    return Config(
        backend=backend,
        host_devices=host_devices,
        host_streams=_parse_choice("NCCLCOMM_HOST_STREAMS", get("NCCLCOMM_HOST_STREAMS") or "sync", ("sync", "async")),
        node_sizes=_parse_ints("NCCLCOMM_NODE_SIZE", sizes, 1, "2 or 3,1") if sizes else (),
        node_map=_parse_ints("NCCLCOMM_NODE_MAP", node_map, 0, "0,1,0,1") if node_map else (),
        check=_parse_check(get("NCCLCOMM_CHECK")) if get("NCCLCOMM_CHECK") else DEFAULT_CHECKED_CALLS,
        chunk_bytes=_parse_bytes("NCCLCOMM_CHUNK_BYTES", chunk, 64) if chunk else DEFAULT_CHUNK_BYTES,
        timeout_s=_parse_seconds("NCCLCOMM_TIMEOUT_S", timeout) if timeout else None,
        stall_s=_parse_seconds("NCCLCOMM_STALL_S", stall) if stall else DEFAULT_STALL_S,
        watchdog=_parse_bool("NCCLCOMM_WATCHDOG", get("NCCLCOMM_WATCHDOG") or "1"),
        log=_parse_choice("NCCLCOMM_LOG", get("NCCLCOMM_LOG") or "warn", ("warn", "info")),
        share_devices=_parse_bool("NCCLCOMM_SHARE_DEVICES", get("NCCLCOMM_SHARE_DEVICES") or "0"),
        devices_per_rank=_parse_count("NCCLCOMM_DEVICES_PER_RANK", per_rank) if per_rank else None,
    )


def variables(*prefixes: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of the environment whose names begin with one of the prefixes, by name.

    Args:
        prefixes: such as 'NCCL_'.
        environ: the variables to read; None reads the process's own.
    """
    env = os.environ if environ is None else environ
    return {name: env[name] for name in sorted(env) if name.startswith(prefixes)}


_LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("SLURM_NTASKS", "SLURM_PROCID"),
)
"""Inner launchers first: an mpirun inside a SLURM batch script speaks for the process, not the batch step.

Of SLURM's, the step's own number of tasks first: in the shell that salloc opens on a node, SLURM_NTASKS is the job's.
"""


def launched(environ: Mapping[str, str] | None = None) -> Launch | None:
    """What a launcher promised this process, or None where it was started by hand.

    A SLURM batch script's own variables, with no step's (SLURM_STEP_ID of a task), mean one process.

    Args:
        environ: the variables to read; None reads the process's own.
    """
    env = os.environ if environ is None else environ
    for size_name, rank_name in _LAUNCHERS:
        size, rank = env.get(size_name, ""), env.get(rank_name, "")
        if not (_is_number(size) and _is_number(rank)):
            continue
        if size_name.startswith("SLURM_") and not _in_slurm_step(env):
            continue
        return Launch(size_name, int(size), int(rank), _is_task(env, size, rank))
    return None


def _is_task(env: Mapping[str, str], size: str, rank: str) -> bool:
    """True if srun started this very rank, not the helper of an mpiexec that started it: then the numbers agree."""
    if not _in_slurm_step(env) or "MPI_LOCALNRANKS" in env or "OMPI_COMM_WORLD_SIZE" in env:
        return False
    tasks = env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS")
    return (tasks, env.get("SLURM_PROCID")) == (size, rank)


def supervised(environ: Mapping[str, str] | None = None) -> bool:
    """True in a program that `ncclcomm run` runs, not in processes that inherit its environment.

    Args:
        environ: the variables to read; None reads the process's own.
    """
    env = os.environ if environ is None else environ
    return env.get("NCCLCOMM_JOB_PROGRAM") == str(os.getpid())


def _in_slurm_step(env: Mapping[str, str]) -> bool:
    """True for a task that srun started; a batch script sees SLURM_STEP_ID unset or the batch step's name."""
    return _is_number(env.get("SLURM_STEP_ID", "")) and "SLURM_LOCALID" in env


def slurm_gpus(environ: Mapping[str, str] | None = None) -> str:
    """The variable by which SLURM says that it gave this process's node GPUs, as `NAME=value`; '' where it gave none.

    Args:
        environ: the variables to read; None reads the process's own.
    """
    env = os.environ if environ is None else environ
    for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE"):
        value = env.get(name, "").strip()
        # The last one is a count, so that its 0 means none; in the others 0 is the first GPU.
        if value and not (name == "SLURM_GPUS_ON_NODE" and value == "0"):
            return f"{name}={value}"
    return ""
