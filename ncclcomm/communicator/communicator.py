"""The communicator: a group of ranks and the collectives over it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from ncclcomm.arrays import HOST_MEMORY
from ncclcomm.communicator import barrier as _barrier
from ncclcomm.communicator import broadcast as _broadcast
from ncclcomm.communicator import gather as _gather
from ncclcomm.communicator import reduce as _reduce
from ncclcomm.communicator import scatter as _scatter
from ncclcomm.communicator.agree import Facts, agree
from ncclcomm.communicator.board import BOARD, Running
from ncclcomm.communicator.call import in_call, in_one_line
from ncclcomm.communicator.engine import Engine
from ncclcomm.communicator.explain import explain
from ncclcomm.communicator.forks import end_in_children, refuse_pickling
from ncclcomm.communicator.quick import Quick, quick_for
from ncclcomm.communicator.quick_gpu import QuickGpu, quick_gpu_for
from ncclcomm.communicator.setup import Member, drop, join
from ncclcomm.errors import AbortedError, ClosedError

__all__ = ["Communicator"]


class Communicator:
    """A group of ranks. Its calls are collective: every rank makes the same calls in the same order, from one thread.

    Collective: every rank of `mpi_comm` makes one.

    While calls are checked, every rank states its call before data moves; where ranks disagree or one has bad
    arguments, every rank raises, nothing has moved and the communicator stays usable. Unchecked, only the rank that has
    bad arguments raises. For NumPy arrays a call returns when its result is there; for arrays of a device the result is
    ordered on the device's current stream, after the work queued there before the call.

    Args:
        mpi_comm: an mpi4py intracommunicator, of which a duplicate is made; None makes a world of this process alone,
            which needs no MPI.
        device: this rank's device; None gives the local rank modulo the number of virtual devices, or the GPU of that
            number. It does not become the current device (`ncclcomm.init` does that).
        check: True, False, or how many calls of this communicator are checked; None takes NCCLCOMM_CHECK (default 64).
        timeout_s: time limit of its calls, in seconds, the same on all ranks; None takes NCCLCOMM_TIMEOUT_S (default:
            none).

    Raises:
        ArgumentError: mpi_comm is no intracommunicator, or no such device.
        MismatchError: ranks differ in backend or settings; on every rank.

    See: MPI_Comm_dup.
    """

    def __init__(
        self,
        mpi_comm: Any = None,
        *,
        device: Any = None,
        check: bool | int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._take(join(mpi_comm, device, check, timeout_s))

    def _take(self, member: Member) -> None:
        """Set the attributes from what joining the group found out."""
        self._member = member
        self.topology = member.topology
        self.rank: int = member.rank
        self.size: int = member.topology.size
        self.node, self.local_rank = member.topology.locate(member.rank)
        self.local_size: int = len(member.topology.ranks_of[self.node])
        self.num_nodes: int = member.topology.num_nodes
        self.device: int = member.device
        self.backend: str = member.backend.name
        self.mpi_comm: Any = member.mpi_comm
        """The mpi4py communicator that the calls use (a duplicate); None in a world without MPI. Don't free it."""
        self._backend, self._control = member.backend, member.control
        self._checked_calls = float("inf") if member.check is True else int(member.check)
        self._calls, self._closed, self._broken = 0, False, ""  # the last: why no further call can be made
        self._timeout_s = member.timeout_s
        self._entry: Running | None = None
        self._last_entry: Running | None = None
        # Of the call in progress: data moves, others hear of it, it queues device work, ranks stay in step if it fails
        self._committed = self._stated = self._uses_device = self._in_step = False
        self._received: Any = None  # what the short way heard of it, and leaves to the long one
        self._quick: Quick | None = None
        self._quick_gpu: QuickGpu | None = None
        self._finalizer = weakref.finalize(self, drop, member)
        self._finalizer.atexit = False
        end_in_children(self)

    @classmethod
    def _of(cls, member: Member) -> Communicator:
        """A communicator of a group that was joined already."""
        comm = cls.__new__(cls)
        comm._take(member)
        return comm

    def _next_call(self, call: str) -> int:
        """Number a call; raise if the communicator is closed."""
        if self._closed or self._member.is_over:
            why = "this communicator was closed" if self._closed else "MPI was finalized, and with it this communicator"
            raise ClosedError(f"{self.topology.describe(self.rank)}: {call}: {why}")
        if self._broken:
            raise AbortedError(
                f"{self.topology.describe(self.rank)}: {call}: the ranks may be in any state, so that only close() is "
                f"left: {self._broken}"
            )
        self._calls += 1
        return self._calls - 1

    def _break(self, why: str) -> None:
        """Make no further call with this rank's handle, and let the watchdogs of those who wait for it know."""
        self._broken = why
        self._quick = self._quick_gpu = None
        self._finalizer.detach()  # freed, it could hand its messages on to the next communicator
        if self.size > 1:
            BOARD.broken[self._member.name] = (self._entry.number if self._entry else self._calls, why)

    def _engine(self, device: int) -> Engine:
        """What runs collectives on arrays of a device or of host memory."""
        self._uses_device = device != HOST_MEMORY
        return self._member.engine(device)

    def _find_short_way(self) -> None:
        """From here on take the short way of calls, if there is one."""
        self._quick, self._quick_gpu = self._quick or quick_for(self), quick_gpu_for(self)

    def broadcast(self, array: Any = None, *, root: int = 0, out: Any = None, timeout_s: float | None = None) -> Any:
        """Give every rank the root's array.

        Collective: every rank of the communicator calls it, with the same root, in one of two forms.

        Args:
            array: on the root, an array of any shape and dtype. On the others None (a header tells them shape and
                dtype), or an array like the root's, which is filled.
            root: rank that has the array, 0 <= root < size.
            out: in place of array, on every rank, the root included: arrays of one shape and dtype; the others' are
                filled with the root's. This form sends no header.
            timeout_s: time limit in seconds, on all ranks or on none; None takes the communicator's.

        Returns:
            On the root its own array; on the others the array filled, or a new C-contiguous one on this rank's device
            (in host memory where the root's is).

        Raises:
            ArgumentError, UnsupportedError: this rank's arguments are wrong; while calls are checked, on every rank.
            MismatchError: a receiver's array doesn't fit, or ranks disagree on root or form; while calls are checked,
                on every rank, before data moves.
            CommTimeoutError: a rank did not come in time; says where every rank is.

        See: MPI_Bcast; torch.distributed.broadcast.
        """
        return _broadcast.broadcast(self, array, root, out, timeout_s)

    def scatter(
        self,
        array: Any = None,
        *,
        root: int = 0,
        chunk_sizes: Iterable[int] | None = None,
        dim: int = 0,
        out: Any = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Give each rank its own chunk of the root's array.

        Collective: every rank of the communicator calls it, with the same root and dim.

        Args:
            array: on the root, shape (..., n, ...) with n = sum(chunk_sizes) along dim; ignored on the others.
            root: rank that holds the array, 0 <= root < size.
            chunk_sizes: elements along dim for each rank, in rank order; needed on the root alone (others pass None or
                the same). None splits n as numpy.array_split: the first n % size ranks get one more.
            dim: the dimension to cut; a negative one counts from the last.
            out: an array of this rank's chunk's shape and dtype to fill; each rank may pass one or not.
            timeout_s: time limit in seconds, on all ranks or on none; None takes the communicator's.

        Returns:
            This rank's chunk: out, or a new C-contiguous array on this rank's device (in host memory where the root's
            is).

        Raises:
            ArgumentError, UnsupportedError: this rank's arguments are wrong; while calls are checked, on every rank.
            MismatchError: ranks disagree, or an out doesn't fit; while calls are checked, on every rank, before data
                moves.
            CommTimeoutError: a rank did not come in time; says where every rank is.

        See: MPI_Scatterv; torch.distributed.scatter.
        """
        return _scatter.scatter(self, array, root, chunk_sizes, dim, out, timeout_s)

    def gather(
        self, array: Any, *, root: int = 0, dim: int = 0, out: Any = None, timeout_s: float | None = None
    ) -> Any:
        """Concatenate all ranks' arrays on the root, in rank order.

        Collective: every rank of the communicator calls it, with the same root and dim.

        Args:
            array: this rank's part, of one dtype on all ranks; shapes may differ along dim. 0-d arrays count as one
                element.
            root: rank that gets the result, 0 <= root < size.
            dim: the dimension along which the parts are concatenated; a negative one counts from the last.
            out: on the root, an array of the result's shape and dtype to fill; ignored on the others.
            timeout_s: time limit in seconds, on all ranks or on none; None takes the communicator's.

        Returns:
            On the root out, or a new C-contiguous array where its own part is; None on the others.

        Raises:
            ArgumentError, UnsupportedError: this rank's arguments are wrong; while calls are checked, on every rank.
            MismatchError: ranks disagree on root, dim, dtype or the other dimensions; while calls are checked, on every
                rank, before data moves; else on the root, which can make no further call.
            CommTimeoutError: a rank did not come in time; says where every rank is.

        See: MPI_Gatherv; torch.distributed.gather.
        """
        return _gather.gather(self, array, root, dim, out, timeout_s)

    def reduce(
        self, array: Any, *, op: str = "sum", root: int = 0, out: Any = None, timeout_s: float | None = None
    ) -> Any:
        """Reduce all ranks' arrays, element by element, to the root.

        Collective: every rank of the communicator calls it, with the same op, root, shape and dtype.

        Args:
            array: this rank's array. It is not changed.
            op: 'sum' (integers wrap; bool is logical or), 'prod', 'min', 'max' (both carry NaN) or 'avg'.
            root: rank that gets the result, 0 <= root < size.
            out: on the root, an array of array's shape and dtype to fill, which may be array itself; ignored elsewhere.
            timeout_s: time limit in seconds, on all ranks or on none; None takes the communicator's.

        Returns:
            On the root out, or a new C-contiguous array where its own input is, in native byte order; None on the
            others.

        Raises:
            ArgumentError, UnsupportedError: this rank's arguments are wrong; while calls are checked, on every rank.
            MismatchError: ranks disagree; while calls are checked, on every rank, before data moves.
            CommTimeoutError: a rank did not come in time; says where every rank is.

        See: MPI_Reduce; torch.distributed.reduce.
        """
        return _reduce.reduce(self, "reduce", array, op, root, out, timeout_s)

    def reduce_add(self, array: Any, *, root: int = 0, out: Any = None, timeout_s: float | None = None) -> Any:
        """Sum all ranks' arrays to the root: `reduce` with op='sum', by the name of the in-process call.

        Collective: every rank of the communicator calls it, with the same root, shape and dtype.

        Args:
            array: this rank's array. It is not changed.
            root: rank that gets the sum, 0 <= root < size.
            out: on the root, an array to fill, which may be array itself; ignored on the others.
            timeout_s: time limit in seconds, on all ranks or on none; None takes the communicator's.

        Returns:
            On the root out, or a new C-contiguous array where its own input is; None on the others.

        Raises:
            ArgumentError, UnsupportedError, MismatchError: as `reduce`.
            CommTimeoutError: a rank did not come in time; says where every rank is.

        See: MPI_Reduce; torch.cuda.comm.reduce_add.
        """
        return _reduce.reduce(self, "reduce_add", array, "sum", root, out, timeout_s)

    def all_reduce(self, array: Any, *, op: str = "sum", out: Any = None, timeout_s: float | None = None) -> Any:
        """Reduce all ranks' arrays, element by element, to every rank.

        Collective: every rank of the communicator calls it, with the same op, shape and dtype.

        Args:
            array: this rank's array. It is not changed unless it is out too.
            op: 'sum' (integers wrap; bool is logical or), 'prod', 'min', 'max' (both carry NaN) or 'avg'.
            out: an array of array's shape and dtype to fill, which may be array itself.
            timeout_s: time limit in seconds, on all ranks or on none; None takes the communicator's.

        Returns:
            out, or a new C-contiguous array where the input is, in native byte order, with identical bits on every
            rank.

        Raises:
            ArgumentError, UnsupportedError: this rank's arguments are wrong; while calls are checked, on every rank.
            MismatchError: ranks disagree; while calls are checked, on every rank, before data moves.
            CommTimeoutError: a rank did not come in time; says where every rank is.

        See: MPI_Allreduce; torch.distributed.all_reduce.
        """
        return _reduce.all_reduce(self, array, op, out, timeout_s)

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return when every rank of the communicator has called it; it waits for no device's work.

        Collective: every rank of the communicator calls it.

        Args:
            timeout_s: time limit in seconds, as of the other calls.

        Raises:
            CommTimeoutError: a rank did not come in time.

        See: MPI_Barrier; torch.distributed.barrier.
        """
        _barrier.barrier(self, timeout_s)

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Make a communicator of the ranks that pass the same color.

        Collective: every rank of the communicator calls it.

        Args:
            color: a number of 0 or more; None joins no new communicator.
            key: orders the ranks of the new communicator; ties keep this communicator's order.

        Returns:
            The new communicator, or None where color is None.

        Raises:
            ArgumentError: color or key is no whole number, or color is negative; on every rank.

        See: MPI_Comm_split.
        """
        member = in_call(self, "split", (), None, lambda: self._member.split(self, color, key))
        return None if member is None else Communicator._of(member)

    def explain(self, op: str, nbytes: int) -> str:
        """Say in one line which steps and transports a collective takes. Local: any rank may ask.

        Args:
            op: broadcast, scatter, gather, reduce, reduce_add, all_reduce or barrier.
            nbytes: bytes of the array.

        Raises:
            ArgumentError: no such collective, or nbytes is no number of bytes.
        """
        return explain(self, op, nbytes)

    def close(self) -> None:
        """Give back what the communicator holds; later calls raise ClosedError. MPI itself stays up.

        Collective: it returns when every rank of the communicator has called it. It counts as a call: while calls are
        checked, ranks that are still in another one make all of them raise. Calling it again does nothing. After a
        CommTimeoutError or MPI_Finalize it only ends the use of this rank's handle.

        Raises:
            MismatchError: another rank is in another call; on every rank. The communicator stays open.
        """
        self._quick = self._quick_gpu = None
        if self._broken or self._member.is_over:
            self._closed = True
        if not self._closed:
            in_call(self, "close", (), None, self._give_back)
            BOARD.close(self._member.name)

    def _give_back(self) -> None:
        """Close, with the other ranks."""
        agree(self, "close", lambda: Facts(None, {}, {}))
        if self._calls > self._checked_calls:
            self._control.all_gather_bytes(b"")  # a rank that ends early could be taken for one that failed
        self._closed = True
        self._finalizer.detach()
        self._member.close()

    def abort(self, reason: str = "") -> None:
        """Make no further call: a rank that waits for this one is told the reason, and the job ends.

        Local: any rank may call it, from any thread, also after close and more than once.

        See: MPI_Abort.
        """
        if not (self._closed or self._broken):
            self._break(f"aborted{': ' * bool(reason)}{reason}")

    def __enter__(self) -> Communicator:
        """Use it in a `with` block, whose end closes it."""
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close; after an exception only this rank's handle: ranks that wait for this one are told, and end the job."""
        if exc_type is None:
            self.close()
        elif not self._closed:
            self._break(f"left its `with` block by {in_one_line(exc_type, exc)}")
            self._closed = True

    __reduce__ = refuse_pickling

    def __repr__(self) -> str:
        """Name the rank and what the group is made of."""
        return (
            f"<ncclcomm {'closed ' * self._closed}Communicator rank {self.rank} of {self.size}, node {self.node} of "
            f"{self.num_nodes}, {self.backend} device {self.device}>"
        )
