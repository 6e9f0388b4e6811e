"""Collectives over ranks: NCCL or shared memory within a node, MPI across nodes."""

from __future__ import annotations

from ncclcomm.communicator.communicator import Communicator
from ncclcomm.communicator.world import init

__all__ = ["Communicator", "init"]
