"""Reductions over ranks: to one rank, and to all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ncclcomm.arrays import check_out, view
from ncclcomm.communicator.agree import Facts, agree, check_root, facts_of, memory_of
from ncclcomm.communicator.buffers import Target, settled_flat, target_for
from ncclcomm.communicator.call import begin, end, in_call
from ncclcomm.communicator.quick import MISSED
from ncclcomm.errors import ArgumentError
from ncclcomm.reductions import check_reduction, divide_by

if TYPE_CHECKING:
    from ncclcomm.communicator.communicator import Communicator
    from ncclcomm.communicator.quick import Plan, Quick

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


def reduce(comm: Communicator, call: str, array: Any, op: Any, root: Any, out: Any, timeout_s: float | None) -> Any:
    """See Communicator.reduce."""
    quick = comm._quick
    if quick is not None and timeout_s is None and comm._entry is None and not quick.is_over():
        plan = quick.plan(op, array)
        if plan is not None and type(root) is int and 0 <= root < comm.size:
            target = quick.target(array, out) if root == comm.rank else None
            if target is not None or root != comm.rank:
                return _reduce_quickly(comm, quick, plan, call, array, target, root)
    gpu = comm._quick_gpu
    if gpu is not None and timeout_s is None and comm._entry is None and not gpu.is_over():
        result = gpu.reduce(comm, call, array, op, root, out)
        if result is not MISSED:
            return result
    return in_call(comm, call, (array,), timeout_s, lambda: _reduce(comm, call, array, op, root, out))


def _reduce(comm: Communicator, call: str, array: Any, op: Any, root: Any, out: Any) -> Any:
    """The long way."""
    local, _ = agree(comm, call, lambda: _validate(comm, call, array, op, root, out))
    comm._committed = True
    out_flat = None if local.target is None else local.target.flat
    comm._engine(local.device).reduce(local.flat, out_flat, "sum" if op == "avg" else op, local.root)
    return None if local.target is None else _finish(comm, local.target, op)


def all_reduce(comm: Communicator, array: Any, op: Any, out: Any, timeout_s: float | None) -> Any:
    """See Communicator.all_reduce."""
    quick = comm._quick
    if quick is not None and timeout_s is None and comm._entry is None and not quick.is_over():
        plan = quick.plan(op, array)
        if plan is not None:
            target = quick.target(array, out)
            if target is not None:
                return _reduce_quickly(comm, quick, plan, "all_reduce", array, target, None)
    gpu = comm._quick_gpu
    if gpu is not None and timeout_s is None and comm._entry is None and not gpu.is_over():
        result = gpu.all_reduce(comm, array, op, out)
        if result is not MISSED:
            return result
    return in_call(comm, "all_reduce", (array,), timeout_s, lambda: _all_reduce(comm, array, op, out))


def _all_reduce(comm: Communicator, array: Any, op: Any, out: Any) -> Any:
    """The long way."""
    local, _ = agree(comm, "all_reduce", lambda: _validate(comm, "all_reduce", array, op, _EVERY_RANK, out))
    comm._committed = True
    assert local.target is not None
    comm._engine(local.device).all_reduce(local.flat, local.target.flat, "sum" if op == "avg" else op)
    return _finish(comm, local.target, op)


def _reduce_quickly(
    comm: Communicator, quick: Quick, plan: Plan, call: str, array: Any, target: Any, root: int | None
) -> Any:
    """Reduce an array to a target that fits it, where there is one; to every rank if root is None."""
    op, kind, to_all, is_average = plan
    try:
        begin(comm, call, (array,), None)
        comm._calls += 1
        comm._committed = True
        source = quick.in_place if target is array else (array, kind)
        if root is None:
            to_all(source, (target, kind), op)
        else:
            quick.reduce(source, None if target is None else (target, kind), op, root)
        if is_average and target is not None:
            divide_by(target.view(np.ndarray), comm.size)
        end(comm, None, None)
    except BaseException as error:  # whatever it is, the others may wait for this rank now
        quick.fail(comm, error)
    return target


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
    same: dict[str, Any] = {}
    if comm._stated:
        same = {"op": str.__str__(op), **facts_of(found)}
        if root is not _EVERY_RANK:
            same["root"] = rank
    flat = settled_flat(comm, found)
    if flat.dtype != dtype:
        flat = flat.astype(dtype)
    goal = target_for(comm, found.data.shape, dtype, found.device, target, found.kind) if rank == comm.rank else None
    return Facts(_Local(found.device, flat, goal, rank), same, {})


def _finish(comm: Communicator, target: Target, op: str) -> Any:
    """Divide an average's sum and complete the caller's array."""
    if op == "avg":
        divide_by(target.flat, comm.size)
        if comm._uses_device and comm.backend == "cuda":
            comm._backend.keep(comm.device, target.flat)  # the transport has kept it for less
    return target.finish()
