"""The short way through a call, for plain arrays once calls are not checked any more.

The checks here are sufficient ones: what they let pass, the long way would take too, and would hand to MPI in the same
messages, since other ranks may go the long way in the same call. Whatever they don't let pass goes the long way, which
alone says what is wrong. So no rule is written here that could differ from the long way's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ncclcomm.arrays import HOST_MEMORY
from ncclcomm.communicator.agree import named
from ncclcomm.communicator.call import end, explained
from ncclcomm.devices.host_array import HostArray
from ncclcomm.errors import MpiError, NcclCommError
from ncclcomm.reductions import OPS, check_reduction

if TYPE_CHECKING:
    from ncclcomm.communicator.communicator import Communicator

__all__ = ["MISSED", "Plan", "Quick", "data_of", "fill_whole", "is_plain_dtype", "quick_for"]

Plan = tuple[Any, Any, Callable[..., object], bool]
"""Of a reduction: MPI's operation, MPI's datatype, what does it to all ranks, and whether an average is wanted."""

MISSED: Any = object()
"""In place of a result: the long way is to be taken."""

_MOST_KNOWN = 1024
"""Kinds of calls that a communicator keeps in mind."""

_CONTIGUOUS, _OWNS_DATA, _WRITEABLE = 0x1, 0x4, 0x400
"""Bits of ndarray.flags.num."""

_FILLABLE = _CONTIGUOUS | _WRITEABLE


class _Solo:
    """A world of one in an MPI communicator's place, as far as the short way uses one."""

    IN_PLACE = object()
    BYTE = None
    Is_finalized = bool  # gives False, at a fraction of what a Python function takes

    @staticmethod
    def Bcast(buffer: Any, root: int) -> None:
        """Nothing is to be moved."""

    @staticmethod
    def Reduce(source: Any, target: Any, op: Any, root: int) -> None:
        """The sum of one array is a copy."""
        if source is not _Solo.IN_PLACE:
            np.copyto(target[0].view(np.ndarray), source[0].view(np.ndarray))

    @staticmethod
    def Allreduce(source: Any, target: Any, op: Any) -> None:
        """As Reduce."""
        _Solo.Reduce(source, target, op, 0)

    @staticmethod
    def Barrier() -> None:
        """Nobody is to be waited for."""


@functools.lru_cache(maxsize=1024)
def is_plain_dtype(dtype: np.dtype[Any]) -> bool:
    """True where NumPy's own buffers give the elements to MPI as they are: numbers in native byte order."""
    return dtype.isbuiltin == 1 and dtype.isnative and dtype.kind in "biufc"


def fill_whole(array: Any, payload: bytes) -> None:
    """Put the elements of a plain array, which came with a header, into it."""
    array.view(np.ndarray)[...] = np.ndarray(array.shape, array.dtype, payload)


def data_of(array: Any) -> Any:
    """The elements of a contiguous array as a flat one of NumPy's."""
    return array.view(np.ndarray).reshape(-1)


class Quick:
    """What the short way needs to know of a communicator, which it doesn't hold.

    Args:
        mpi: MPI's functions and constants.
        raw: the communicator among all ranks that the transport uses.
        reduction: gives MPI's operation and datatype of a reduction of a dtype, and what does it to all ranks.
        translate: turns an exception of MPI into ours, and leaves others.
        post_and_wait: transport.mpi_messages' function; None in a world of one.
        chunk_bytes: most bytes that one call of MPI takes.
        backend: for arrays of virtual devices; None where only host memory is to be served.
    """

    def __init__(
        self,
        mpi: Any,
        raw: Any,
        reduction: Callable[[str, np.dtype[Any]], tuple[Any, Any, Callable[..., object]]],
        translate: Callable[[BaseException, str], BaseException],
        post_and_wait: Any,
        chunk_bytes: int,
        backend: Any,
    ) -> None:
        self.in_place = mpi.IN_PLACE
        self.byte = mpi.BYTE
        self.is_over = mpi.Is_finalized
        self.bcast = raw.Bcast
        self.reduce = raw.Reduce
        self.barrier = raw.Barrier
        self.raw = raw
        self.post_and_wait = post_and_wait
        self.known: dict[Any, Any] = {}
        """What the long way found out, and the short way repeats."""
        self._reduction = reduction
        self._translate = translate
        self._chunk_bytes = chunk_bytes
        self._backend = backend
        self._plans: dict[str, dict[np.dtype[Any], Plan]] = {op: {} for op in OPS}

    def takes(self, array: Any) -> bool:
        """True for an array whose memory MPI can be given as it is and now, in one call."""
        kind = type(array)
        return (
            (kind is np.ndarray or (kind is HostArray and self._backend is not None and self._is_settled(array)))
            and array.flags.num & _CONTIGUOUS != 0
            and 0 < array.nbytes <= self._chunk_bytes
        )

    def takes_out(self, out: Any) -> bool:
        """True if MPI may write there too."""
        return self.takes(out) and out.flags.num & _WRITEABLE != 0

    def plan(self, op: Any, array: Any) -> Plan | None:
        """How a reduction of an array is done; None: by the long way."""
        if type(op) is not str or not self.takes(array):
            return None
        try:
            return self._plans[op][array.dtype]
        except KeyError:
            return self._make_plan(op, array.dtype)

    def _make_plan(self, op: str, dtype: np.dtype[Any]) -> Plan | None:
        """Keep a plan, where the long way would take the reduction."""
        if op not in self._plans or not is_plain_dtype(dtype):
            return None
        try:
            check_reduction(op, dtype, op)
        except NcclCommError:
            return None  # the long way raises it
        plan = self._plans[op][dtype] = (*self._reduction("sum" if op == "avg" else op, dtype), op == "avg")
        return plan

    def target(self, array: Any, out: Any) -> Any:
        """Where the result of an array goes: out, a new array like it, or None: the long way is to be taken."""
        if out is None:
            # MemoryError is the long way's to raise, which takes the call's number first.
            try:
                if type(array) is np.ndarray:
                    return np.empty(array.shape, array.dtype)
                return self._backend.empty(array.shape, array.dtype, array._device_id)
            except MemoryError:
                return None
        if type(out) is not type(array) or out.dtype != array.dtype or out.shape != array.shape:
            return None
        flags = out.flags.num
        if flags & _FILLABLE != _FILLABLE:
            return None
        return out if out is array or self.apart(out, flags, array) else None

    def apart(self, out: Any, flags: int, array: Any) -> bool:
        """True if out, with these flags, and an array are of one kind and device, and share no memory."""
        kind = type(out)
        if kind is not type(array) or out is array or (kind is HostArray and out._device_id != array._device_id):
            return False
        if flags & array.flags.num & _OWNS_DATA:
            return True
        return not np.may_share_memory(out.view(np.ndarray), array.view(np.ndarray))

    def serves(self, comm: Communicator, root: Any, timeout_s: float | None) -> bool:
        """True if a call with these arguments may take the short way, as far as its arrays allow."""
        return (
            type(root) is int
            and 0 <= root < comm.size
            and timeout_s is None
            and comm._entry is None
            and not self.is_over()
        )

    def learn(self, key: Any, value: Any) -> None:
        """Keep what the long way found out of arguments like the key."""
        if len(self.known) >= _MOST_KNOWN:
            self.known.clear()
        self.known[key] = value

    def fits(self, count: int, dtype: np.dtype[Any]) -> bool:
        """True if one call of MPI takes elements of an array of that dtype as they are, or there are none."""
        return count * dtype.itemsize <= self._chunk_bytes and is_plain_dtype(dtype)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: int) -> Any:
        """A new array."""
        return np.empty(shape, dtype) if device == HOST_MEMORY else self._backend.empty(shape, dtype, device)

    def _is_settled(self, array: Any) -> bool:
        """True if nothing is queued on an array's device, and nothing that was has failed.

        Else the long way waits, and tells the other ranks what failed.
        """
        settled: bool = self._backend.current_stream(array._device_id).is_settled()
        return settled

    def fail(self, comm: Communicator, error: BaseException) -> NoReturn:
        """End a call that failed, as the long way does."""
        entry = comm._entry
        if entry is None:
            raise error  # it had not begun, or the long way took it over, and has ended it
        failure = self._translate(error, entry.call)
        if not comm._committed and isinstance(failure, NcclCommError):
            failure = named(comm, failure)
        end(comm, type(failure), failure)
        if isinstance(failure, MpiError):
            raise explained(comm, failure) from (error.__cause__ if failure is error else error)
        if failure is error:
            raise error
        raise failure from error.__cause__


def quick_for(comm: Communicator) -> Quick | None:
    """The short way of a communicator, once there is one: on one node, when calls are neither checked nor limited."""
    if comm._calls < comm._checked_calls or comm._timeout_s is not None or comm._closed or comm._broken:
        return None
    member = comm._member
    engine = member._host_engine
    if engine is None or not engine.single:
        return None
    backend = member.backend if member.gpu is None and member.backend.name == "host" else None
    if member.mpi_comm is None:
        return Quick(_Solo, _Solo, lambda op, dtype: (None, None, _Solo.Allreduce), _as_it_is, None, 1 << 62, backend)
    from ncclcomm.transport import mpi, mpi_messages

    transport: Any = engine.intra
    rest = (mpi_messages.post_and_wait, member.chunk_bytes, backend)
    return Quick(mpi.MPI, transport.comm, transport.reduction, mpi.translate, *rest)


def _as_it_is(error: BaseException, call: str) -> BaseException:
    """There is no MPI whose exceptions are to be translated."""
    return error
