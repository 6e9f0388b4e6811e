"""Who leaves a barrier too early: the ranks come late in turn, and nobody may leave before the last has come."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ncclcomm.bench.group import Group

__all__ = ["left_early"]

_LATE_S = 0.01
"""How long a rank stays away while all others are about to enter, or have left where the barrier is wrong."""
_PAUSE_S = 0.0002
"""Between two looks, so that ranks that share the late one's core get to run."""
_MOST_LATE = 16
"""So many ranks are late, one after the other, at most."""
_COMING, _LEFT = 1, 2
"""Tags of messages to the late rank. No clocks are compared, as those of two hosts differ."""


def left_early(group: Group, call: Callable[[], object]) -> str:
    """Look whether any rank leaves a barrier before every rank has entered it; collective.

    Args:
        group: who takes part.
        call: the barrier.

    Returns:
        On a late rank who left before it came; '' if nobody did, and on the other ranks.
    """
    comm = group.mpi_comm
    if comm is None:
        call()
        return ""
    told = ""
    for late in range(0, group.ranks, -(-group.ranks // _MOST_LATE)):
        found = _come_late(group, comm, call) if group.rank == late else _come_at_once(group, comm, call, late)
        told = told or found
    return told


def _come_at_once(group: Group, comm: Any, call: Callable[[], object], late: int) -> str:
    """Tell the late rank of coming and of having left."""
    comm.send(None, dest=late, tag=_COMING)
    try:
        call()
        group.wait()
    finally:
        comm.send(None, dest=late, tag=_LEFT)
    return ""


def _come_late(group: Group, comm: Any, call: Callable[[], object]) -> str:
    """Enter some time after all others; who has left by then."""
    others = [rank for rank in range(group.ranks) if rank != group.rank]
    for rank in others:
        comm.recv(source=rank, tag=_COMING)
    early: list[int] = []
    end = time.perf_counter() + _LATE_S
    while others and not early and time.perf_counter() < end:
        time.sleep(_PAUSE_S)
        early = [rank for rank in others if comm.iprobe(source=rank, tag=_LEFT)]
    try:
        call()
        group.wait()
    finally:
        for rank in others:
            comm.recv(source=rank, tag=_LEFT)
    return f"rank {early[0]} left before rank {group.rank} came" if early else ""
