"""Gather over ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from ncclcomm.arrays import View, check_out, view
from ncclcomm.chunks import check_dim, whole_number
from ncclcomm.communicator.agree import Facts, agree, check_root, fit_in_words, fit_of, memory_of
from ncclcomm.communicator.buffers import packed_target, settled_flat, target_for, unpack
from ncclcomm.communicator.checks import raise_mismatch
from ncclcomm.communicator.wire import dtype_code

if TYPE_CHECKING:
    from ncclcomm.communicator.communicator import Communicator

__all__ = ["gather"]

_CALL = "gather"


class _Local(NamedTuple):
    """This rank's arguments."""

    array: View
    flat: Any
    out: View | None
    root: int
    axis: int


def gather(comm: Communicator, array: Any, root: Any, dim: Any, out: Any) -> Any:
    """See Communicator.gather."""
    local, facts = agree(comm, _CALL, lambda: _validate(comm, array, root, dim, out), header="all")
    shapes = [own["shape"] for own in facts]
    counts = [shape[local.axis] for shape in shapes]
    data = local.array.data
    shape = (*data.shape[: local.axis], sum(counts), *data.shape[local.axis + 1 :])
    wanted = (shape, dtype_code(data.dtype), memory_of(local.array))
    if facts[local.root].get("out", wanted) != wanted:
        raise_mismatch(
            comm.topology,
            comm.rank,
            f"gather: the root's out doesn't fit the result ({fit_in_words(wanted)})",
            [fit_in_words(own["out"]) if "out" in own else f"part of shape {own['shape']}" for own in facts],
            "Pass an out of the result's shape and dtype, or none.",
        )
    sizes = [math.prod(part) for part in shapes]
    comm._commit()
    flat = local.flat
    engine = comm._engine(local.array.device)
    if comm.rank != local.root:
        engine.gather(flat, sizes, None, local.root)
        return None
    target = target_for(comm, shape, data.dtype, local.array.device, local.out)
    packed, in_place = packed_target(comm, target.near, local.axis)
    engine.gather(flat, sizes, packed, local.root)
    if not in_place:
        unpack(comm, packed, target.near, counts, local.axis)
    return target.finish_near()


def _validate(comm: Communicator, array: Any, root: Any, dim: Any, out: Any) -> Facts[_Local]:
    """Look at this rank's arguments."""
    rank = check_root(root, comm.size, _CALL)
    found = view(array, "gather: array")
    if found.data.ndim == 0:
        found = View(found.obj, found.data.reshape(1), found.device)
    axis = check_dim(dim, found.data.ndim, _CALL)
    shape = tuple(found.data.shape)
    same = {
        "root": rank,
        "dim": whole_number(dim, "gather: dim"),
        "dtype": dtype_code(found.data.dtype),
        "memory kind": memory_of(found),
        "shape apart from dim": (*shape[:axis], "*", *shape[axis + 1 :]),
    }
    own: dict[str, Any] = {"shape": shape}
    target = None
    if out is not None and rank == comm.rank:
        target = view(out, "gather: out")
        check_out(target, target.data.shape, target.data.dtype, "gather: out", [found])
        own["out"] = fit_of(target)
    return Facts(_Local(found, settled_flat(comm, found), target, rank, axis), same, own)
