"""Ranks that end before they have joined: one speaks for all, and none leaves before it has."""

from __future__ import annotations

from ncclcomm import config

__all__ = ["is_first", "wait_for_ranks"]

_LIMIT_S = 10.0


def is_first() -> bool:
    """True for the lowest rank, and for a process that was started alone; starts no MPI."""
    launch = config.launched()
    return launch is None or launch.rank == 0


def wait_for_ranks() -> None:
    """Wait until every rank has come here, for some seconds at most.

    Launchers end a job when a rank exits with a status that is not 0: the first rank's message would be lost.
    """
    launch = config.launched()
    if launch is None or launch.size == 1:
        return
    try:
        from ncclcomm.transport.mpi import MPI, MpiControl
    except (ImportError, RuntimeError):
        return  # no MPI: then there is nothing to wait with
    if not MPI.Is_finalized():
        MpiControl(MPI.COMM_WORLD).barrier_within(_LIMIT_S)
