"""A transport over host memory, used for device arrays: through pinned host buffers, in chunks.

The host waits in each call: MPI reads and writes the pinned buffer only when the stream has reached the call, and the
stream goes on when MPI is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ncclcomm.transport.base import Transport

__all__ = ["StagedTransport"]


class StagedTransport(Transport):
    """Device arrays over a transport of ranks for host memory.

    Args:
        inner: the transport over host memory; owned, and closed with this one.
        copy: enqueues a copy between a device array and pinned host memory on the device's current stream.
        wait: waits on the host for the device's current stream.
        empty_pinned: makes pinned host memory of a number of bytes, as uint8.
        chunk_bytes: size of the pinned buffer.
        refuse_capture: raises where the device's current stream is being captured, since the host waits for it here.
    """

    def __init__(
        self,
        inner: Transport,
        copy: Callable[[Any, Any], None],
        wait: Callable[[], None],
        empty_pinned: Callable[[int], Any],
        chunk_bytes: int,
        refuse_capture: Callable[[], None],
    ) -> None:
        self.inner = inner
        self.name = f"{inner.name}, staged"
        self.size = inner.size
        self.members = inner.members
        self._me = inner.members[0]
        self._copy = copy
        self._wait = wait
        self._pinned = empty_pinned(chunk_bytes)
        self._empty_pinned = empty_pinned
        self._refuse_capture = refuse_capture

    def _host(self, count: int, dtype: np.dtype[Any]) -> Any:
        """Pinned memory for some elements: the kept buffer where they fit."""
        nbytes = count * dtype.itemsize
        buffer = self._pinned if nbytes <= self._pinned.size else self._empty_pinned(nbytes)
        return buffer[:nbytes].view(dtype)

    def _steps(self, array: Any) -> list[slice]:
        """Slices that fit the kept buffer, the same on every rank; what moves data begins with this."""
        self._refuse_capture()
        step = max(1, self._pinned.size // array.itemsize)
        return [slice(start, start + step) for start in range(0, array.size, step)]

    def _down(self, array: Any) -> Any:
        """An array's elements in pinned memory, once the stream has come to them."""
        host = self._host(array.size, array.dtype)
        self._copy(host, array)
        self._wait()
        return host

    def _up(self, array: Any, host: Any) -> None:
        """Bring pinned memory to a device array, and wait, so that the buffer may be used again."""
        self._copy(array, host)
        self._wait()

    def broadcast(self, buffers: Sequence[Any], root: int) -> None:
        """See Transport.broadcast."""
        for part in self._steps(buffers[0]):
            chunk = buffers[0][part]
            if self._me == root:
                self.inner.broadcast([self._down(chunk)], root)
                continue
            host = self._host(chunk.size, chunk.dtype)
            self.inner.broadcast([host], root)
            self._up(chunk, host)

    def scatter(self, parts: Sequence[Any] | None, outs: Sequence[Any], root: int) -> None:
        """See Transport.scatter."""
        if parts is None:
            self._receive(outs[0], root)
            return
        for member, part in enumerate(parts):
            if member != root:
                self._send(part, member)
        if parts[root] is not outs[0]:
            self._copy(outs[0], parts[root])

    def gather(self, arrays: Sequence[Any], parts: Sequence[Any] | None, root: int) -> None:
        """See Transport.gather."""
        if parts is None:
            self._send(arrays[0], root)
            return
        for member, part in enumerate(parts):
            if member != root:
                self._receive(part, member)
        if parts[root] is not arrays[0]:
            self._copy(parts[root], arrays[0])

    def _send(self, array: Any, dest: int) -> None:
        """Send an array, piece by piece."""
        for part in self._steps(array):
            self.inner.move(self._down(array[part]), None, self._me, dest)

    def _receive(self, out: Any, source: int) -> None:
        """Receive an array in the pieces in which it is sent: it has the same length and dtype there."""
        for part in self._steps(out):
            piece = out[part]
            host = self._host(piece.size, piece.dtype)
            self.inner.move(None, host, source, self._me)
            self._up(piece, host)

    def reduce(self, arrays: Sequence[Any], outs: Sequence[Any | None], op: str, root: int) -> None:
        """See Transport.reduce."""
        for part in self._steps(arrays[0]):
            host = self._down(arrays[0][part])
            self.inner.reduce([host], [host if self._me == root else None], op, root)
            if outs[0] is not None:
                self._up(outs[0][part], host)

    def all_reduce(self, arrays: Sequence[Any], outs: Sequence[Any], op: str) -> None:
        """See Transport.all_reduce."""
        for part in self._steps(arrays[0]):
            host = self._down(arrays[0][part])
            self.inner.all_reduce([host], [host], op)
            self._up(outs[0][part], host)

    def move(self, array: Any | None, out: Any | None, source: int, dest: int) -> None:
        """See Transport.move."""
        if self._me == source:
            self._send(array, dest)
        else:
            self._receive(out, source)

    def barrier(self) -> None:
        """See Transport.barrier."""
        self.inner.barrier()

    def close(self) -> None:
        """See Transport.close."""
        self.inner.close()
