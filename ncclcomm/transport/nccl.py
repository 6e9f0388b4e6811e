"""Ranks of a node that talk through NCCL, on GPU memory, one GPU a rank.

Every call is enqueued on CuPy's current stream of the transport's device and returns without waiting. Data moves as
bytes, so that every dtype moves bit for bit. Reductions that NCCL lacks, or does otherwise than NumPy (products of
complex, max and min that must carry NaN), gather the ranks' arrays chunk by chunk and reduce them in rank order with
CuPy.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import cupy
import numpy as np
from cupy.cuda import nccl, runtime

from ncclcomm.devices.cuda_held import hold, hold_until, unused_event
from ncclcomm.devices.cuda_streams import CudaStream, is_capturing, on_device
from ncclcomm.errors import UnsupportedError
from ncclcomm.reductions import ufunc_for
from ncclcomm.transport.base import Transport
from ncclcomm.transport.nccl_errors import ours, translated

__all__ = ["NcclTransport", "new_unique_id", "version"]

# Here, since CuPy's module has none of the names that follow then.
if not nccl.available:
    raise ImportError("CuPy can't load NCCL: pip install nvidia-nccl-cu13 (or nvidia-nccl-cu12, by your CuPy's CUDA)")

_WORD = nccl.NCCL_UINT8

_GATHER_CHUNK_BYTES = 1 << 25
"""Bytes of each rank that a reduction by gathering holds at a time."""


def version() -> int:
    """NCCL's version, such as 22807."""
    return int(nccl.get_version())


@translated
def new_unique_id() -> Any:
    """What the ranks of a new communicator must share."""
    return nccl.get_unique_id()


_TYPES = {
    "int8": nccl.NCCL_INT8,
    "uint8": nccl.NCCL_UINT8,
    "int32": nccl.NCCL_INT32,
    "uint32": nccl.NCCL_UINT32,
    "int64": nccl.NCCL_INT64,
    "uint64": nccl.NCCL_UINT64,
    "float16": nccl.NCCL_FLOAT16,
    "bfloat16": nccl.NCCL_BFLOAT16,
    "float32": nccl.NCCL_FLOAT32,
    "float64": nccl.NCCL_FLOAT64,
}

_OPS = {"sum": nccl.NCCL_SUM, "prod": nccl.NCCL_PROD, "min": nccl.NCCL_MIN, "max": nccl.NCCL_MAX}


@functools.lru_cache(maxsize=512)
def _native(op: str, dtype: np.dtype[Any]) -> tuple[int, int, int] | None:
    """NCCL's datatype, operation and words per element for a reduction that it does as NumPy does; None for others."""
    if dtype.kind == "b":
        return _TYPES["uint8"], nccl.NCCL_MAX, 1
    if dtype.kind == "c" and op == "sum":
        return _TYPES["float32" if dtype.itemsize == 8 else "float64"], nccl.NCCL_SUM, 2
    carries_nan = dtype.kind == "f" or dtype.name == "bfloat16"
    if dtype.name not in _TYPES or (carries_nan and op in ("min", "max")):
        return None
    return _TYPES[dtype.name], _OPS[op], 1


class NcclTransport(Transport):
    """The ranks of an NCCL communicator; each drives itself, on one GPU.

    Collective: every member makes one, with the same unique id; it waits for all.

    Args:
        unique_id: what `new_unique_id` gave on one of the members.
        size: how many members there are.
        rank: this member.
        device: its GPU, which no other member uses.
    """

    name = "nccl"

    def __init__(self, unique_id: Any, size: int, rank: int, device: int) -> None:
        self.size = size
        self.rank = rank
        self.members = (rank,)
        self.device = device
        self._comm = self._connect(unique_id)
        self._closed = False
        # Its destructor would destroy it, which is collective, at the latest when the interpreter ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._comm))

    @translated
    def _connect(self, unique_id: Any) -> Any:
        """Make the communicator on the device."""
        with cupy.cuda.Device(self.device):
            return nccl.NcclCommunicator(self.size, unique_id, self.rank)

    def _stream(self) -> int:
        """The stream to enqueue on."""
        return int(cupy.cuda.get_current_stream(self.device).ptr)

    def _hold(self, *arrays: Any) -> None:
        """Keep arrays until the call's end: their memory may be of another stream than the current one."""
        hold(CudaStream(self.device, cupy.cuda.get_current_stream(self.device)), *arrays)

    native = staticmethod(_native)

    def is_ready(self) -> bool:
        """True if the device is the current one, and its current stream is not captured, for the plain calls below."""
        try:
            return bool(runtime.getDevice() == self.device and not is_capturing(self._stream()))
        except RuntimeError:
            return False  # the long way raises it

    def reduce_plain(self, array: Any, out: Any | None, plan: tuple[int, int, int], root: int | None) -> None:
        """Reduce contiguous arrays of the device that have elements, to every rank if root is None.

        Args:
            array: this rank's.
            out: where its result goes, array itself for one; None where it gets none.
            plan: what `native` gave, which is not None.
            root: the rank that gets the result.
        """
        dtype, op, words = plan
        source, stream, count = array.data.ptr, self._stream(), array.size * words
        if root is None:
            assert out is not None
            self._comm.allReduce(source, out.data.ptr, count, dtype, op, stream)
        else:
            self._comm.reduce(source, 0 if out is None else out.data.ptr, count, dtype, op, root, stream)

    def broadcast_plain(self, buffer: Any, root: int) -> None:
        """As broadcast, of a contiguous array of the device that has elements."""
        pointer, stream = buffer.data.ptr, self._stream()
        self._comm.broadcast(pointer, pointer, buffer.nbytes, _WORD, root, stream)

    def hold_plain(self, *arrays: Any) -> None:
        """Keep what plain calls use, and what came behind them, until it is done."""
        stream = self._stream()
        done = unused_event(self.device)
        runtime.eventRecord(done.ptr, stream)
        hold_until(done, self.device, stream, arrays)

    @staticmethod
    def error_of(error: BaseException, call: str) -> BaseException:
        """Our error for what a plain call raised."""
        return ours(error, call, call)

    @translated
    def broadcast(self, buffers: Sequence[Any], root: int) -> None:
        """See Transport.broadcast."""
        buffer = buffers[0]
        if buffer.size:
            pointer = buffer.data.ptr
            self._comm.broadcast(pointer, pointer, buffer.nbytes, _WORD, root, self._stream())
            self._hold(buffer)

    @translated
    def scatter(self, parts: Sequence[Any] | None, outs: Sequence[Any], root: int) -> None:
        """See Transport.scatter."""
        out, stream = outs[0], self._stream()
        if self.rank != root:
            if out.size:
                self._comm.recv(out.data.ptr, out.nbytes, _WORD, root, stream)
                self._hold(out)
            return
        assert parts is not None
        others = [(part, member) for member, part in enumerate(parts) if member != root and part.size]
        self._grouped([(self._comm.send, part, member) for part, member in others], stream)
        self._copy_own(out, parts[root], stream)
        self._hold(out, *parts)

    @translated
    def gather(self, arrays: Sequence[Any], parts: Sequence[Any] | None, root: int) -> None:
        """See Transport.gather."""
        array, stream = arrays[0], self._stream()
        if self.rank != root:
            if array.size:
                self._comm.send(array.data.ptr, array.nbytes, _WORD, root, stream)
                self._hold(array)
            return
        assert parts is not None
        others = [(part, member) for member, part in enumerate(parts) if member != root and part.size]
        self._grouped([(self._comm.recv, part, member) for part, member in others], stream)
        self._copy_own(parts[root], array, stream)
        self._hold(array, *parts)

    @staticmethod
    def _grouped(calls: list[tuple[Callable[..., None], Any, int]], stream: int) -> None:
        """Start point-to-point calls together.

        NCCL keeps a group per thread, and one thread at a time uses a communicator, so that no lock is needed. Under
        one, ranks that first connect two communicators in opposite orders would wait for each other.
        """
        nccl.groupStart()
        try:
            for call, array, member in calls:
                call(array.data.ptr, array.nbytes, _WORD, member, stream)
        except BaseException:
            # The group must be ended for the next call; its own error would hide the first.
            with contextlib.suppress(nccl.NcclError, KeyError):
                nccl.groupEnd()
            raise
        nccl.groupEnd()

    @staticmethod
    def _copy_own(dst: Any, src: Any, stream: int) -> None:
        """Copy this rank's own part, unless it is in its place."""
        if dst.size and dst.data.ptr != src.data.ptr:
            runtime.memcpyAsync(dst.data.ptr, src.data.ptr, dst.nbytes, runtime.memcpyDeviceToDevice, stream)

    def _refuse_capture(self, op: str, dtype: np.dtype[Any]) -> None:
        """Raise in a graph capture for reductions with memory of their own: the graph would write to it ever after."""
        if _native(op, dtype) is None and is_capturing(self._stream()):
            raise UnsupportedError(
                f"{op} of {dtype} can't be captured into a CUDA graph, since NCCL doesn't do it by itself; call it "
                "outside the capture"
            )

    @translated
    def reduce(self, arrays: Sequence[Any], outs: Sequence[Any | None], op: str, root: int) -> None:
        """See Transport.reduce."""
        array, out = arrays[0], outs[0]
        if not array.size:
            return
        self._refuse_capture(op, array.dtype)
        with _Widened(array, out) as (source, result):
            native = _native(op, source.dtype)
            if native is None:
                self._reduce_gathered(source, result, op)
            else:
                dtype, nccl_op, words = native
                target = 0 if result is None else result.data.ptr
                self._comm.reduce(source.data.ptr, target, source.size * words, dtype, nccl_op, root, self._stream())
        self._hold(array, out)

    @translated
    def all_reduce(self, arrays: Sequence[Any], outs: Sequence[Any], op: str) -> None:
        """See Transport.all_reduce."""
        array, out = arrays[0], outs[0]
        if not array.size:
            return
        self._refuse_capture(op, array.dtype)
        with _Widened(array, out) as (source, result):
            native = _native(op, source.dtype)
            if native is None:
                self._reduce_gathered(source, result, op)
            else:
                dtype, nccl_op, words = native
                self._comm.allReduce(
                    source.data.ptr, result.data.ptr, source.size * words, dtype, nccl_op, self._stream()
                )
        self._hold(array, out)

    def _reduce_gathered(self, array: Any, out: Any | None, op: str) -> None:
        """Gather every rank's array on every rank, chunk by chunk, and reduce in rank order where there is an out."""
        func = getattr(cupy, ufunc_for(op, array.dtype).__name__)
        step = max(1, _GATHER_CHUNK_BYTES // array.itemsize)
        for start in range(0, array.size, step):
            part = array[start : start + step]
            everyone = cupy.empty((self.size, part.size), array.dtype)
            self._comm.allGather(part.data.ptr, everyone.data.ptr, part.nbytes, _WORD, self._stream())
            if out is not None:
                total = everyone[0]
                for member in range(1, self.size):
                    func(total, everyone[member], out=total)
                out[start : start + step] = total

    @translated
    def move(self, array: Any | None, out: Any | None, source: int, dest: int) -> None:
        """See Transport.move."""
        if self.rank == source:
            assert array is not None
            if array.size:
                self._comm.send(array.data.ptr, array.nbytes, _WORD, dest, self._stream())
                self._hold(array)
        else:
            assert out is not None
            if out.size:
                self._comm.recv(out.data.ptr, out.nbytes, _WORD, source, self._stream())
                self._hold(out)

    @translated
    def barrier(self) -> None:
        """See Transport.barrier."""
        stream = cupy.cuda.get_current_stream(self.device)
        word = cupy.zeros(1, np.uint8)
        self._comm.allReduce(word.data.ptr, word.data.ptr, 1, _WORD, nccl.NCCL_SUM, stream.ptr)
        stream.synchronize()

    @translated
    def close(self) -> None:
        """See Transport.close."""
        if self._closed:
            return
        self._closed = True
        with on_device(self.device):
            try:
                runtime.deviceSynchronize()
            except runtime.CUDARuntimeError:
                # The context is broken: nothing more comes, and destroying would wait for it.
                self._comm.abort()
                raise
            self._comm.destroy()
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._comm))


class _Widened:
    """16-bit integers as 32-bit ones, which NCCL has: sums and products wrap to the same low bits."""

    def __init__(self, array: Any, out: Any | None) -> None:
        self._out = out
        self._wide = array.dtype.kind in "iu" and array.dtype.itemsize == 2
        self._source = array.astype(np.dtype(array.dtype.kind + "4")) if self._wide else array
        self._result = self._source if self._wide and out is not None else out

    def __enter__(self) -> tuple[Any, Any]:
        """The arrays to pass to NCCL."""
        return self._source, self._result

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        """Bring the result back to its own width."""
        if self._wide and self._out is not None and self._result is not None and kind is None:
            self._out[...] = self._result.astype(self._out.dtype)
