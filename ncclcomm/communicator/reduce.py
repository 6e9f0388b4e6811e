"""Reductions over ranks: to one rank, and to all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ncclcomm.arrays import check_out, view
from ncclcomm.communicator.agree import Facts, agree, check_root, facts_of, memory_of
from ncclcomm.communicator.buffers import Target, settled_flat, target_for
from ncclcomm.errors import ArgumentError
from ncclcomm.reductions import check_reduction

if TYPE_CHECKING:
    from ncclcomm.communicator.communicator import Communicator

__all__ = ["all_reduce", "reduce"]


class _Local(NamedTuple):
    """This rank's arguments."""

    device: int
    flat: Any
    """The input, flat, in native byte order."""
    target: Target | None
    """Where this rank's result goes."""
    root: int


_EVERY_RANK = object()
"""In place of a root: every rank gets the result."""


def _validate(comm: Communicator, call: str, array: Any, op: Any, root: Any, out: Any) -> Facts[_Local]:
    """Look at this rank's arguments."""
    rank = comm.rank if root is _EVERY_RANK else check_root(root, comm.size, call)
    found = view(array, f"{call}: array")
    check_reduction(op, found.data.dtype, call)
    dtype = found.data.dtype
    if not dtype.isnative:
        dtype = dtype.newbyteorder("=")
    target = None
    if out is not None and rank == comm.rank:
        target = view(out, f"{call}: out")
        check_out(target, found.data.shape, dtype, f"{call}: out", [found], alias_ok=True)
        if memory_of(target) != memory_of(found):
            raise ArgumentError(f"{call}: out is in {memory_of(target)}, array in {memory_of(found)}; pass both alike")
    same = {"op": str.__str__(op), **facts_of(found)}
    if root is not _EVERY_RANK:
        same["root"] = rank
    flat = settled_flat(comm, found)
    if flat.dtype != dtype:
        flat = flat.astype(dtype)
    goal = target_for(comm, found.data.shape, dtype, found.device, target) if rank == comm.rank else None
    return Facts(_Local(found.device, flat, goal, rank), same, {})


def _finish(comm: Communicator, target: Target, op: str) -> Any:
    """Divide an average's sum and complete the caller's array."""
    if op == "avg":
        flat = target.flat
        np.divide(flat, flat.dtype.type(comm.size), out=flat)
    return target.finish()


def reduce(comm: Communicator, call: str, array: Any, op: Any, root: Any, out: Any) -> Any:
    """See Communicator.reduce."""
    local, _ = agree(comm, call, lambda: _validate(comm, call, array, op, root, out))
    comm._commit()
    out_flat = None if local.target is None else local.target.flat
    comm._engine(local.device).reduce(local.flat, out_flat, "sum" if op == "avg" else op, local.root)
    return None if local.target is None else _finish(comm, local.target, op)


def all_reduce(comm: Communicator, array: Any, op: Any, out: Any) -> Any:
    """See Communicator.all_reduce."""
    local, _ = agree(comm, "all_reduce", lambda: _validate(comm, "all_reduce", array, op, _EVERY_RANK, out))
    comm._commit()
    assert local.target is not None
    comm._engine(local.device).all_reduce(local.flat, local.target.flat, "sum" if op == "avg" else op)
    return _finish(comm, local.target, op)
