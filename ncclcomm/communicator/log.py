"""What was chosen for a communicator, and why: for NCCLCOMM_LOG=info."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ncclcomm.devices.registry import why_backend

if TYPE_CHECKING:
    from ncclcomm.communicator.setup import Member

__all__ = ["say_what_was_chosen", "what_was_chosen"]


def say_what_was_chosen(member: Member) -> Member:
    """Write it to stderr, once, on the group's rank 0, if the group's settings ask for it."""
    if member.log and member.rank == 0:
        sys.stderr.write(f"{what_was_chosen(member)}\n")  # in one piece: other groups' may come at the same time
        sys.stderr.flush()
    return member


def what_was_chosen(member: Member) -> str:
    """What was chosen for a group and why, one thing a line."""
    topology = member.topology
    sizes = sorted({len(ranks) for ranks in topology.ranks_of})
    a_node = " or ".join(map(str, sizes))
    within, across = member.transport_names
    count = member.backend.device_count()
    reason = why_backend()
    lines = [
        f"ncclcomm: communicator of {_counted(topology.size, 'rank')} on {_counted(topology.num_nodes, 'node')} "
        f"({a_node} a node; nodes by {member.nodes_by})",
        f"  backend: {member.backend.name}, {_counted(count, 'device')} visible{f' ({reason})' if reason else ''}",
        f"  devices of the ranks: {', '.join(map(str, member.devices or (member.device,)))}",
        f"  within a node: {within}{_why_not_nccl(member)}{_also_host(member, within)}",
    ]
    if topology.num_nodes > 1:
        lines.append(f"  across nodes: {across}{_also_host(member, across)}")
    if member.mpi_comm is not None:
        from ncclcomm.transport import mpi

        lines.append(f"  MPI: {mpi.library_version()}")
    limit = "none" if member.timeout_s is None else f"{member.timeout_s:g} s"
    lines.append(f"  checked calls: {_checked(member.check)}; time limit of a call: {limit}")
    return "\n".join(lines)


def _counted(number: int, what: str) -> str:
    """A number of things."""
    return f"{number} {what}{'s' * (number != 1)}"


def _checked(check: bool | int) -> str:
    """Which calls are checked."""
    if isinstance(check, bool):
        return "all" if check else "none"
    return f"the first {check}"


def _also_host(member: Member, way: str) -> str:
    """How NumPy arrays go, where that is another way."""
    host = "peer" if member.mpi_comm is None else "mpi"
    return "" if way == host else f"; NumPy arrays: {host}"


def _why_not_nccl(member: Member) -> str:
    """In brackets, why GPUs of one node don't use NCCL; '' where they do, or there are none."""
    return f" ({member.gpu.warning})" if member.gpu is not None and member.gpu.warning else ""
