"""Which of the visible devices each rank of a node gets under `--devices-per-rank`.

Standard library alone: child.py loads this file by its path, before the program starts.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["LOCAL_RANK_VARIABLES", "devices_of", "local_rank_of"]

LOCAL_RANK_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID")
"""Where launchers put a rank's number within its host; inner ones first, as mpiexec may run inside a SLURM job."""


def local_rank_of(environ: Mapping[str, str]) -> int | None:
    """A rank's number within its host, as its launcher says.

    Args:
        environ: the rank's variables.

    Returns:
        None where no launcher says it.
    """
    values = (environ.get(name, "") for name in LOCAL_RANK_VARIABLES)
    return next((int(value) for value in values if value.isascii() and value.isdecimal() and len(value) < 10), None)


def devices_of(visible: str | None, local_rank: int, per_rank: int) -> str:
    """The CUDA_VISIBLE_DEVICES of one rank: its own group of the entries that its host's ranks see.

    Entries are passed on as they are written, so that UUIDs and MIG names stay what they are. As CUDA does, those from
    the first empty or negative one on are left out.

    Args:
        visible: CUDA_VISIBLE_DEVICES as the launcher left it; None where it is not set, which means all devices.
        local_rank: the rank's number within its host.
        per_rank: devices for each rank, 1 or more.

    Raises:
        ValueError: `visible` has too few devices for this rank.
    """
    wanted = range(local_rank * per_rank, (local_rank + 1) * per_rank)
    if visible is None:
        return ",".join(map(str, wanted))
    entries: list[str] = []
    for entry in visible.split(","):
        if not entry.strip() or entry.strip().startswith("-"):
            break
        entries.append(entry.strip())
    if len(entries) < wanted.stop:
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES={visible!r} shows {len(entries)} devices, but with {per_rank} per rank local rank "
            f"{local_rank} needs number {wanted.start} to {wanted.stop - 1}: start fewer ranks on this host, or lower "
            "--devices-per-rank"
        )
    return ",".join(entries[wanted.start : wanted.stop])
