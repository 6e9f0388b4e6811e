"""Scatter over ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ncclcomm.arrays import HOST_MEMORY, check_out, view
from ncclcomm.chunks import check_chunk_sizes, check_dim, even_counts, whole_number
from ncclcomm.communicator.agree import Facts, agree, check_after_header, check_root, facts_of, fit_in_words, fit_of
from ncclcomm.communicator.buffers import Target, pack, target_for
from ncclcomm.communicator.checks import raise_mismatch
from ncclcomm.communicator.wire import dtype_of
from ncclcomm.errors import ArgumentError

if TYPE_CHECKING:
    from ncclcomm.communicator.communicator import Communicator

__all__ = ["scatter"]

_CALL = "scatter"


class _Local(NamedTuple):
    """This rank's arguments."""

    packed: Any
    """On the root, all ranks' parts."""
    device: int
    """On the root, where its array is."""
    target: Target | None
    """What this rank's out gives; None where the header must come first."""
    root: int


def scatter(comm: Communicator, array: Any, root: Any, chunk_sizes: Any, dim: Any, out: Any) -> Any:
    """See Communicator.scatter."""
    local, facts = agree(
        comm, _CALL, lambda: _validate(comm, array, root, chunk_sizes, dim, out), header="root", root=root
    )
    sent = facts[local.root]
    shape, dtype, counts, axis = sent["shape"], dtype_of(sent["dtype"]), sent["chunk sizes"], sent["axis"]
    shapes = [(*shape[:axis], count, *shape[axis + 1 :]) for count in counts]
    check_after_header(comm, lambda: _check_outs(comm, facts, local.root, shapes))
    comm._commit()
    sizes = [math.prod(part) for part in shapes]
    device = local.device
    if comm.rank != local.root:
        device = HOST_MEMORY if sent["memory kind"] == "host memory" else comm.device
    target = local.target or target_for(comm, shapes[comm.rank], dtype, device)
    comm._engine(device).scatter(local.packed, sizes, target.flat, local.root)
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
        own["out"] = fit_of(target)
    same = {"root": rank, "dim": whole_number(dim, "scatter: dim")}
    packed = None if found is None else pack(comm, found, own["chunk sizes"], own["axis"])
    device = HOST_MEMORY if found is None else found.device
    goal = None if target is None else target_for(comm, (), None, target.device, target)
    return Facts(_Local(packed, device, goal, rank), same, own)


def _check_outs(comm: Communicator, facts: list[Mapping[str, Any]], root: int, shapes: list[tuple[int, ...]]) -> None:
    """Raise where a rank's out or chunk_sizes don't fit what the root sends; on every rank that knows."""
    sent = facts[root]
    for rank, own in enumerate(facts):
        expected = (shapes[rank], sent["dtype"], sent["memory kind"])
        if own.get("out", expected) != expected:
            shown = [fit_in_words(o["out"]) if "out" in o else "no out" for o in facts]
            raise_mismatch(
                comm.topology,
                comm.rank,
                f"scatter: rank {rank}'s out doesn't fit its chunk ({fit_in_words(expected)})",
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
