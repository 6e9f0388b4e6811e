"""What the ranks agree on about their GPUs, and the engine that runs collectives on GPU memory."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ncclcomm.communicator.checks import Control, raise_mismatch, together
from ncclcomm.communicator.engine import Engine
from ncclcomm.devices.base import DeviceBackend
from ncclcomm.errors import BackendUnavailableError, DeviceError
from ncclcomm.topology import Topology, format_ranks
from ncclcomm.transport.base import Transport

if TYPE_CHECKING:
    from ncclcomm.communicator.setup import Member

__all__ = ["GpuGroup", "agree_on_gpus"]

_STAGING_BYTES = 16 << 20
"""Pinned buffer of a staged transport."""


@dataclass(frozen=True)
class GpuGroup:
    """What was agreed, the same on every rank."""

    use_nccl: bool
    """NCCL serves each node; else all goes through pinned staging and MPI."""
    warning: str = ""
    """Why NCCL serves nobody."""

    def warn(self, rank: int) -> None:
        """Say so, once, on rank 0."""
        if rank == 0 and self.warning:
            warnings.warn(self.warning, RuntimeWarning, stacklevel=2)

    def make_engine(self, member: Member) -> Engine:
        """The engine for GPU memory; collective."""
        backend: Any = member.backend
        device = member.device

        def empty(count: int, dtype: Any) -> Any:
            return backend.empty((count,), dtype, device)

        def copy(dst: Any, src: Any) -> None:
            backend.copy(dst, src, backend.current_stream(device))

        def wait() -> None:
            backend.current_stream(device).synchronize()

        def refuse_capture() -> None:
            backend.refuse_capture(device, "data of this call goes through host memory")

        from ncclcomm.transport import mpi
        from ncclcomm.transport.staged import StagedTransport

        def staged(comm: Any) -> Transport:
            inner = mpi.MpiTransport(comm, member.chunk_bytes)
            nbytes = min(_STAGING_BYTES, member.chunk_bytes)
            return StagedTransport(inner, copy, wait, backend.empty_pinned, nbytes, refuse_capture)

        def leaders() -> Transport | None:
            return None if across is None else staged(across)

        # Each step may fail on one rank alone, for want of memory say: then all ranks get the error. In the midst of
        # NCCL's start the others would wait for that rank in NCCL; so the device shows before that it works.
        together(member.control, member.rank, "first use", lambda: backend.touch(device))
        node, local_rank = member.topology.locate(member.rank)
        own = mpi.split(member.mpi_comm, node, local_rank)
        across = mpi.split(member.mpi_comm, 0 if local_rank == 0 else None, node)
        try:
            if self.use_nccl:
                intra = _connect(member, own, local_rank)
            else:
                intra = together(member.control, member.rank, "first use", lambda: staged(own))
        except Exception:
            if across is not None:
                mpi.free(across)
            raise
        inter = None
        if member.topology.num_nodes > 1:
            inter = together(member.control, member.rank, "first use", leaders)
        elif across is not None:
            mpi.free(across)
        return Engine(member.topology, member.rank, intra, inter, empty)


def _connect(member: Member, comm: Any, local_rank: int) -> Transport:
    """NCCL among the ranks of a node's MPI communicator, which it frees."""
    from ncclcomm.transport import mpi, nccl

    def unique_id() -> Any:
        return nccl.new_unique_id() if local_rank == 0 else None

    try:
        made = together(member.control, member.rank, "first use", unique_id)
        shared = mpi.MpiControl(comm).broadcast_object(made, 0)
        size = comm.Get_size()
        transport: Transport = together(
            member.control,
            member.rank,
            "first use",
            lambda: nccl.NcclTransport(shared, size, local_rank, member.device),
        )
    finally:
        mpi.free(comm)
    return transport


def _nccl_version() -> tuple[int, str]:
    """NCCL's version, or 0 and the reason why there is none."""
    try:
        from ncclcomm.transport import nccl

        return nccl.version(), ""
    except (ImportError, BackendUnavailableError) as error:
        return 0, str(error)


def agree_on_gpus(
    control: Control, topology: Topology, rank: int, device: int, backend: DeviceBackend, *, share: bool
) -> GpuGroup | None:
    """Exchange what each rank has, and decide on one path for all.

    Collective.

    Raises:
        DeviceError: two ranks of a node have one GPU; on every rank.
        MismatchError: NCCL's versions differ; on every rank.
    """
    if backend.name != "cuda":
        return None
    mine = together(control, rank, "init", lambda: (backend.uuid(device), *_nccl_version()))
    told = control.all_gather_object(mine)
    shared = _shared_gpus(topology, [uuid for uuid, _, _ in told])
    if shared and not share:
        raise DeviceError(
            f"{topology.describe(rank)}: {'; '.join(shared)}. NCCL needs one GPU a rank: start fewer ranks a node or "
            "give each rank its own GPU (--gpus-per-task=1), or set NCCLCOMM_SHARE_DEVICES=1 to go through host memory"
        )
    versions = [v for _, v, _ in told]
    lacking = [r for r, v in enumerate(versions) if v == 0]
    if not lacking and len(set(versions)) > 1:
        raise_mismatch(topology, rank, "init: NCCL's versions differ", versions, "Install the same one for all ranks.")
    warning = ""
    if shared:
        warning = f"{'; '.join(shared)}: their arrays go through host memory and MPI"
    elif lacking:
        reason = told[lacking[0]][2]
        warning = (
            f"{format_ranks(lacking)} can't use NCCL ({reason}): arrays go through host memory and MPI on all ranks"
        )
    return GpuGroup(use_nccl=not warning, warning=warning)


def _shared_gpus(topology: Topology, uuids: list[str]) -> list[str]:
    """In words, the ranks of a node that have one GPU."""
    found = []
    for node, ranks in enumerate(topology.ranks_of):
        for uuid in dict.fromkeys(uuids[r] for r in ranks):
            users = [r for r in ranks if uuids[r] == uuid]
            if len(users) > 1:
                found.append(f"{format_ranks(users)} of node {node} share the GPU {uuid}")
    return found
