"""The processes that run the benchmark together: the ranks of a world, or one process with its devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import ncclcomm
from ncclcomm.devices.registry import current_backend
from ncclcomm.errors import NcclCommError

__all__ = ["Group"]

T = TypeVar("T")


class Group:
    """Who takes part, and what they must agree on outside the calls that are timed.

    Args:
        comm: the world over ranks; None for one process with its devices.
        devices: in one process, how many devices; None: all.
    """

    def __init__(self, comm: ncclcomm.Communicator | None, devices: int | None = None) -> None:
        self.comm = comm
        self.mpi_comm = None if comm is None else comm.mpi_comm
        self.rank = 0 if comm is None else comm.rank
        self.ranks = 1 if comm is None else comm.size
        self.backend = current_backend()
        self.members: tuple[int, ...]
        """The members that this process is."""
        self.places: tuple[Any, ...]
        """Where each of them has its arrays: a device number, or 'cpu'."""
        if comm is None:
            self.members = tuple(range(self.backend.device_count() if devices is None else devices))
            self.places = self.members
        else:
            self.members = (comm.rank,)
            self.places = (comm.device if comm.backend == "cuda" else "cpu",)
        self.size = len(self.members) if comm is None else comm.size
        """The number of members."""
        self.first_on_host = self._first_on_host()
        """For each rank the lowest rank of its host."""

    @property
    def on_gpus(self) -> bool:
        """True if the arrays are in GPUs' memory."""
        return self.backend.name == "cuda"

    @property
    def per_host(self) -> list[int]:
        """How many ranks each host has, in the order of their lowest ranks."""
        return [count for _, count in sorted(Counter(self.first_on_host).items())]

    @property
    def barrier(self) -> Callable[[], object]:
        """Waits for all ranks, by MPI's own call."""
        return _nothing if self.mpi_comm is None else self.mpi_comm.Barrier

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order; collective."""
        return [value] if self.mpi_comm is None else list(self.mpi_comm.allgather(value))

    def agreed(self, call: Callable[[], T]) -> T:
        """Run something that may fail on some ranks alone; where it does, every rank raises the lowest one's error.

        Collective.

        Args:
            call: moves no data of other ranks.

        Raises:
            NcclCommError: what the call raised, of its class.
        """
        mine: NcclCommError | None = None
        result: Any = None
        try:
            result = call()
        except NcclCommError as error:
            mine = error
        first = next((told for told in self.all_gather(mine) if told is not None), None)
        if first is not None:
            raise first
        found: T = result
        return found

    def wait(self) -> None:
        """Wait for all work of this process's devices."""
        if self.on_gpus or self.comm is None:
            for device in self.members if self.comm is None else self.places:
                self.backend.synchronize(device)

    def _first_on_host(self) -> list[int]:
        """Ask MPI who shares memory with whom."""
        if self.mpi_comm is None:
            return [0]
        from ncclcomm.transport.mpi import first_rank_of_host

        return self.all_gather(first_rank_of_host(self.mpi_comm))


def _nothing() -> None:
    """The barrier of one process."""
