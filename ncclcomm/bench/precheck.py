"""What is wrong with a run before it starts, told once and known to all ranks."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from ncclcomm.bench.case import Row, bytes_needed
from ncclcomm.bench.group import Group
from ncclcomm.bench.options import Options, shown_bytes
from ncclcomm.errors import ArgumentError

__all__ = [
    "available_bytes",
    "check_files",
    "check_memory",
    "check_packages",
    "check_place",
    "need_packages",
    "rows_of",
]

_USABLE = 0.9
"""Of the memory that is free, so much may be asked for."""


def check_packages(options: Options) -> None:
    """Check that what draws tables and pictures is installed; called on rank 0.

    Raises:
        ArgumentError: a package is missing; says how to get it.
    """
    need_packages("rich", "tqdm", *(["matplotlib"] if options.plot is not None else []))


def need_packages(*names: str) -> None:
    """Check that packages are installed.

    Raises:
        ArgumentError: one is missing; says how to get it.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ArgumentError(f"{' and '.join(missing)} not installed: pip install 'ncclcomm[bench]'")


def check_files(paths: Sequence[Path | None]) -> None:
    """Check that output files can be written; called on rank 0. A file that is there is not changed.

    Raises:
        ArgumentError: one can't be; says why.
    """
    for path in paths:
        if path is None:
            continue
        was_there = path.exists()
        try:
            with path.open("ab"):
                pass
        except OSError as error:
            raise ArgumentError(f"{str(path)!r} can't be written: {error.strerror}") from error
        if not was_there:
            path.unlink()


def check_place(options: Options, ranks: int, devices: int) -> None:
    """Check what depends on the number of ranks and devices.

    Args:
        options: the command line.
        ranks: how many ranks were started.
        devices: how many devices this process has.

    Raises:
        ArgumentError: one process is asked of several, or too many devices, or a root that nobody is.
    """
    if options.in_process and ranks > 1:
        raise ArgumentError(f"--in-process is for one process, and {ranks} ranks were started: start it alone")
    if options.devices is not None and options.devices > devices:
        raise ArgumentError(
            f"--devices {options.devices}: this process has {devices}; on virtual devices set NCCLCOMM_DEVICES=host:N"
        )
    size, who = (options.devices or devices, "device") if options.in_process else (ranks, "rank")
    if options.root is not None and options.root >= size:
        raise ArgumentError(f"--root {options.root}: use a {who} from 0 to {size - 1}, or 'rotate'")


def rows_of(options: Options, size: int) -> list[Row]:
    """The rows of a run, each once, in the order of the tables.

    Args:
        options: the command line.
        size: number of members.
    """
    rows: dict[Row, None] = {}
    for op in options.ops:
        dtypes = options.dtypes if op.moves else options.dtypes[:1]
        for dtype in dtypes:
            for reduction in options.reductions_of(op, dtype):
                for nbytes in options.sizes if op.moves else (0,):
                    rows[Row.of(op, dtype, reduction, nbytes, size, options.root)] = None
    return list(rows)


def check_memory(rows: list[Row], group: Group, fresh: bool) -> None:
    """Check that the largest row of every rank fits into what is free; collective.

    Args:
        rows: the rows of the run.
        group: who takes part.
        fresh: ncclcomm's calls make their results.

    Raises:
        ArgumentError: a host, or a GPU, has too little; on every rank.
    """
    # Devices of one process share its memory on the host; each GPU has its own.
    groups = [(member,) for member in group.members] if group.on_gpus else [group.members]
    mine = []
    for members, place in zip(groups, group.places, strict=False):
        need, row = max(((bytes_needed(row, members, fresh), row) for row in rows), key=lambda pair: pair[0])
        where = _gpu(group, place) if group.on_gpus else ("", available_bytes())
        mine.append((need, f"{row.op.name} of {shown_bytes(row.nbytes)}", where))
    totals: dict[tuple[int, str], list[tuple[int, int, str, int]]] = defaultdict(list)
    for rank, told in enumerate(group.all_gather(mine)):
        for need, what, (name, free) in told:
            totals[group.first_on_host[rank], name].append((need, free, what, rank))
    for (_, name), needs in totals.items():
        total, free = sum(need for need, _, _, _ in needs), min(free for _, free, _, _ in needs)
        if total > free * _USABLE:
            ranks = f"rank{'s' * (len(needs) > 1)} {', '.join(str(rank) for _, _, _, rank in needs)}"
            raise ArgumentError(
                f"{needs[0][2]} needs {shown_bytes(total)} on the {name or 'host'} of {ranks}, where "
                f"{shown_bytes(free)} are free: lower -e, or name fewer collectives"
            )


def _gpu(group: Group, device: int) -> tuple[str, int]:
    """A GPU's identity, and its free bytes."""
    from cupy.cuda import runtime

    with group.backend.on_device(device):
        free, _ = runtime.memGetInfo()
    return f"GPU {group.backend.uuid(device)}", int(free)


def available_bytes(meminfo: str = "/proc/meminfo", cgroup: str = "/sys/fs/cgroup") -> int:
    """Bytes that programs of this host, or container, can still allocate.

    Args:
        meminfo: the kernel's file about memory.
        cgroup: where the limits of the container are.
    """
    kib = {line.split(":")[0]: line.split() for line in Path(meminfo).read_text(encoding="ascii").splitlines()}
    free = int(kib["MemAvailable"][1]) << 10
    folder = Path(cgroup)
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = int((folder / "memory.current").read_text(encoding="ascii"))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):
        return free
    # Pages of files count as used, and are given up when memory is short.
    return min(free, int(limit) - used + int(stat.get("inactive_file", 0))) if limit.isdecimal() else free
