"""Scatter over ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ncclcomm.arrays import HOST_MEMORY, View, check_out, view
from ncclcomm.chunks import check_chunk_sizes, check_dim, even_counts, whole_number
from ncclcomm.communicator.agree import Facts, agree, check_root, facts_of, memory_of
from ncclcomm.communicator.buffers import pack, target_for
from ncclcomm.communicator.checks import raise_mismatch
from ncclcomm.errors import ArgumentError

if TYPE_CHECKING:
    from ncclcomm.communicator.communicator import Communicator

__all__ = ["scatter"]

_CALL = "scatter"


class _Local(NamedTuple):
    """This rank's arguments."""

    array: View | None
    out: View | None
    root: int


def scatter(comm: Communicator, array: Any, root: Any, chunk_sizes: Any, dim: Any, out: Any) -> Any:
    """See Communicator.scatter."""
    local, facts = agree(
        comm, _CALL, lambda: _validate(comm, array, root, chunk_sizes, dim, out), header="root", root=root
    )
    sent = facts[local.root]
    shape, dtype, counts, axis = sent["shape"], sent["dtype"], sent["chunk sizes"], sent["axis"]
    shapes = [(*shape[:axis], count, *shape[axis + 1 :]) for count in counts]
    _check_outs(comm, facts, local.root, shapes)
    sizes = [math.prod(part) for part in shapes]
    device = HOST_MEMORY if sent["memory kind"] == "host memory" else comm.device
    packed = None
    if local.array is not None:
        device = local.array.device
        packed = pack(comm, local.array, counts, axis)
    target = target_for(comm, shapes[comm.rank], dtype, device, local.out)
    comm._engine(device).scatter(packed, sizes, target.flat, local.root)
    return target.finish()


def _validate(comm: Communicator, array: Any, root: Any, chunk_sizes: Any, dim: Any, out: Any) -> Facts[_Local]:
    """Look at this rank's arguments."""
    rank = check_root(root, comm.size, _CALL)
    sizes = None
    if chunk_sizes is not None:
        sizes = check_chunk_sizes(chunk_sizes, comm.size, None, _CALL, "ranks")
    own: dict[str, Any] = {"chunk sizes": sizes}
    found = None
    if rank == comm.rank:
        if array is None:
            raise ArgumentError("scatter: the root's array is None; the root must pass the array to scatter")
        found = view(array, "scatter: array")
        axis = check_dim(dim, found.data.ndim, _CALL)
        n = found.data.shape[axis]
        own["chunk sizes"] = (
            even_counts(n, comm.size) if sizes is None else check_chunk_sizes(sizes, comm.size, n, _CALL, "ranks")
        )
        own["axis"] = axis
        own.update(facts_of(found))
    target = None
    if out is not None:
        target = view(out, "scatter: out")
        check_out(target, target.data.shape, target.data.dtype, "scatter: out", [found] if found is not None else [])
        own["out"] = (tuple(target.data.shape), target.data.dtype, memory_of(target))
    return Facts(_Local(found, target, rank), {"root": rank, "dim": whole_number(dim, "scatter: dim")}, own)


def _check_outs(comm: Communicator, facts: list[Mapping[str, Any]], root: int, shapes: list[tuple[int, ...]]) -> None:
    """Raise where a rank's out or chunk_sizes don't fit what the root sends; on every rank that knows."""
    sent = facts[root]
    for rank, own in enumerate(facts):
        expected = (shapes[rank], sent["dtype"], sent["memory kind"])
        if own.get("out", expected) != expected:
            shown = [str(o.get("out", "no out")) for o in facts]
            raise_mismatch(
                comm.topology,
                comm.rank,
                f"scatter: rank {rank}'s out doesn't fit its chunk (shape, dtype and memory {expected})",
                shown,
                "Pass an out of the chunk's shape and dtype, or none.",
            )
    sizes = [own.get("chunk sizes") or sent["chunk sizes"] for own in facts]
    if any(size != sizes[0] for size in sizes):
        raise_mismatch(
            comm.topology,
            comm.rank,
            "scatter: ranks disagree on chunk_sizes",
            sizes,
            "The root's count; other ranks pass the same, or None.",
        )
