"""The short way through a call for plain arrays of the rank's GPU, through NCCL on one node.

As in `quick`, what is let pass here the long way would hand to NCCL in the same calls, and whatever isn't goes there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ncclcomm.communicator.agree import named
from ncclcomm.communicator.call import begin, end
from ncclcomm.communicator.quick import MISSED
from ncclcomm.communicator.watchdog_queued import note_queued
from ncclcomm.errors import NcclCommError
from ncclcomm.reductions import OPS, check_reduction, divide_by

if TYPE_CHECKING:
    from ncclcomm.communicator.communicator import Communicator

__all__ = ["QuickGpu", "quick_gpu_for"]


class QuickGpu:
    """What the short way needs to know of a communicator, which it doesn't hold.

    Args:
        transport: NCCL among all ranks.
        backend: the CUDA backend.
        device: the rank's device.
        is_over: gives True once MPI was finalised.
    """

    def __init__(self, transport: Any, backend: Any, device: int, is_over: Callable[[], bool]) -> None:
        self.array_class = backend.array_class
        self.is_over = is_over
        self._transport = transport
        self._backend = backend
        self._device = device
        self._plans: dict[str, dict[np.dtype[Any], Any]] = {op: {} for op in OPS}

    def _takes(self, array: Any) -> bool:
        """True for an array that NCCL can be given as it is."""
        return bool(
            type(array) is self.array_class
            and array._c_contiguous
            and array.size
            and array.data.device_id == self._device
        )

    def _plan(self, op: Any, dtype: np.dtype[Any]) -> Any:
        """How NCCL does a reduction by itself; None where it doesn't, or where the long way refuses."""
        if type(op) is not str:
            return None
        try:
            return self._plans[op][dtype]
        except KeyError:
            if op not in self._plans:
                return None
        plan = None
        try:
            check_reduction(op, dtype, op)
            if dtype.isnative:
                plan = self._transport.native("sum" if op == "avg" else op, dtype)
        except NcclCommError:
            pass  # the long way raises it
        self._plans[op][dtype] = plan
        return plan

    def all_reduce(self, comm: Communicator, array: Any, op: Any, out: Any) -> Any:
        """Reduce an array of every rank to all ranks; MISSED: by the long way."""
        plan = self._plan(op, array.dtype) if self._takes(array) else None
        if plan is None:
            return MISSED
        target = array if out is array else self._target(array, out)
        if target is None or not self._transport.is_ready():
            return MISSED
        return self._reduce(comm, "all_reduce", plan, array, target, op, None)

    def reduce(self, comm: Communicator, call: str, array: Any, op: Any, root: Any, out: Any) -> Any:
        """As all_reduce, to one rank."""
        plan = self._plan(op, array.dtype) if self._takes(array) else None
        if plan is None or type(root) is not int or not 0 <= root < comm.size:
            return MISSED
        target = None
        if root == comm.rank:
            target = array if out is array else self._target(array, out)
            if target is None:
                return MISSED
        return self._reduce(comm, call, plan, array, target, op, root) if self._transport.is_ready() else MISSED

    def _reduce(
        self, comm: Communicator, call: str, plan: Any, array: Any, target: Any, op: str, root: int | None
    ) -> Any:
        """Reduce to a target that fits, where there is one; to every rank if root is None."""
        try:
            begin(comm, call, (array,), None)
            comm._calls += 1
            comm._committed = True
            self._transport.reduce_plain(array, target, plan, root)
            if op == "avg" and target is not None:
                divide_by(target, comm.size)
            self._transport.hold_plain(array, target)
            self._end(comm)
        except BaseException as error:  # whatever it is, the others may wait for this rank now
            self._fail(comm, error)
        return target

    def fill(self, comm: Communicator, out: Any, root: Any) -> Any:
        """Fill an array on every rank with the root's; MISSED: by the long way."""
        if not (self._takes(out) and type(root) is int and 0 <= root < comm.size and self._transport.is_ready()):
            return MISSED
        try:
            begin(comm, "broadcast", (None, out), None)
            comm._calls += 1
            comm._committed = True
            self._transport.broadcast_plain(out, root)
            self._transport.hold_plain(out)
            self._end(comm)
        except BaseException as error:  # whatever it is, the others may wait for this rank now
            self._fail(comm, error)
        return out

    def _target(self, array: Any, out: Any) -> Any:
        """Where the result of an array goes: out, a new array like it, or None: the long way is to be taken."""
        if out is None:
            # MemoryError is the long way's to raise, which takes the call's number first.
            try:
                return self._backend.empty(array.shape, array.dtype, self._device)
            except MemoryError:
                return None
        if not self._takes(out) or out.dtype != array.dtype or out.shape != array.shape:
            return None
        begins, is_at = out.data.ptr, array.data.ptr
        is_apart = begins == is_at or begins + array.nbytes <= is_at or is_at + array.nbytes <= begins
        return out if is_apart else None

    def _end(self, comm: Communicator) -> None:
        """End a call whose work is queued."""
        entry = comm._entry
        assert entry is not None
        note_queued(comm, entry)
        end(comm, None, None)

    def _fail(self, comm: Communicator, error: BaseException) -> NoReturn:
        """End a call that failed, as the long way does."""
        if comm._entry is None:
            raise error  # it had not begun
        failure = self._transport.error_of(error, comm._entry.call)
        if not comm._committed and isinstance(failure, NcclCommError):
            failure = named(comm, failure)
        end(comm, type(failure), failure)
        if failure is error:
            raise error
        raise failure from error


def quick_gpu_for(comm: Communicator) -> QuickGpu | None:
    """The short way of a communicator for its GPU, once there is one; see quick_for."""
    if comm._calls < comm._checked_calls or comm._timeout_s is not None or comm._closed or comm._broken:
        return None
    member = comm._member
    engine = member._device_engine
    if engine is None or not engine.single or engine.intra.name != "nccl":
        return None
    from ncclcomm.transport import mpi

    return QuickGpu(engine.intra, member.backend, member.device, mpi.MPI.Is_finalized)
