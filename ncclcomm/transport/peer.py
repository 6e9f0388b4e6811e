"""The devices of one process: copies and sums between them, each on the streams that are current.

Every stream that touches memory first waits for the current stream of each device involved, and those then wait for it,
so that a call is ordered after the work queued before it and before the work queued after it, on every device it
touches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ncclcomm.arrays import HOST_MEMORY, View, empty_on, same_memory
from ncclcomm.devices.base import DeviceBackend, StreamImpl
from ncclcomm.reductions import reduce_into
from ncclcomm.transport.base import Transport

__all__ = ["PeerTransport"]


class PeerTransport(Transport):
    """A group whose members are devices of this process, all driven by it."""

    name = "peer"

    def __init__(self, backend: DeviceBackend, devices: Sequence[int]) -> None:
        self.backend = backend
        self.devices = tuple(devices)
        self.size = len(self.devices)
        self.members = tuple(range(self.size))

    def copy(self, dst: View, src: View, stream: StreamImpl | None = None) -> None:
        """Copy between any two places, of any strides, ordered with both; the host waits if dst is host memory.

        Args:
            dst: where to; same shape and dtype as src.
            src: where from. Host memory may be reused when the call returns.
            stream: a stream of dst's device to use in place of its current one.
        """
        if self.backend.immediate:
            np.copyto(dst.data, src.data)
            return
        if dst.device == HOST_MEMORY:
            if src.device == HOST_MEMORY:
                np.copyto(dst.data, src.data)
                return
            stream = self.backend.current_stream(src.device)
            self.backend.copy(dst.data, src.data, stream)
            stream.synchronize()
            return
        source = src.data
        if src.device == HOST_MEMORY and self.backend.must_snapshot(source):
            source = source.copy()
        devices = (src.device, dst.device)
        stream = stream or self.backend.current_stream(dst.device)
        self._begin(stream, devices)
        self.backend.copy(dst.data, source, stream)
        self._end(stream, devices)

    def reduce_views(self, out: View, arrays: Sequence[View], op: str) -> None:
        """Reduce arrays of one shape and dtype, on any devices, into out, in their order, on out's device."""
        plain = [array.data for array in arrays]
        devices = [out.device, *(array.device for array in arrays)]
        if self.backend.immediate or all(device == HOST_MEMORY for device in devices):
            reduce_into(out.data, plain, op)
            return
        if out.device == HOST_MEMORY:
            near = empty_on(self.backend, out.data.shape, out.data.dtype, arrays[0].device)
            self.reduce_views(near, arrays, op)
            self.copy(out, near)
            return
        stream = self.backend.current_stream(out.device)
        self._begin(stream, devices)
        self.backend.reduce(out.data, plain, op, stream)
        self._end(stream, devices)

    def _begin(self, stream: StreamImpl, devices: Iterable[int]) -> None:
        """Make a stream wait for the current streams of the devices."""
        for device in dict.fromkeys(devices):
            if device != HOST_MEMORY:
                self._order(self.backend.current_stream(device), stream)

    def _end(self, stream: StreamImpl, devices: Iterable[int]) -> None:
        """Make the current streams of the devices wait for a stream."""
        for device in dict.fromkeys(devices):
            if device != HOST_MEMORY:
                self._order(stream, self.backend.current_stream(device))

    def _order(self, first: StreamImpl, later: StreamImpl) -> None:
        """Make later's future work wait for first's present work."""
        if first.handle == later.handle and first.device == later.device:
            return
        self.backend.order(first, later)

    def _view(self, array: Any, member: int) -> View:
        """A member's array as a view on its device; beside GPUs a NumPy array is host memory."""
        in_host_memory = self.backend.name == "cuda" and isinstance(array, np.ndarray)
        return View(array, array, HOST_MEMORY if in_host_memory else self.devices[member])

    def broadcast(self, buffers: Sequence[Any], root: int) -> None:
        """See Transport.broadcast."""
        source = self._view(buffers[root], root)
        for member in self.members:
            if member != root:
                self.copy(self._view(buffers[member], member), source)

    def scatter(self, parts: Sequence[Any] | None, outs: Sequence[Any], root: int) -> None:
        """See Transport.scatter."""
        assert parts is not None
        for member in self.members:
            if not same_memory(parts[member], outs[member]):
                self.copy(self._view(outs[member], member), self._view(parts[member], root))

    def gather(self, arrays: Sequence[Any], parts: Sequence[Any] | None, root: int) -> None:
        """See Transport.gather."""
        assert parts is not None
        for member in self.members:
            if not same_memory(parts[member], arrays[member]):
                self.copy(self._view(parts[member], root), self._view(arrays[member], member))

    def reduce(self, arrays: Sequence[Any], outs: Sequence[Any | None], op: str, root: int) -> None:
        """See Transport.reduce."""
        self.reduce_views(self._view(outs[root], root), [self._view(array, m) for m, array in enumerate(arrays)], op)

    def all_reduce(self, arrays: Sequence[Any], outs: Sequence[Any], op: str) -> None:
        """See Transport.all_reduce."""
        self.reduce(arrays, outs, op, 0)
        self.broadcast(outs, 0)

    def move(self, array: Any | None, out: Any | None, source: int, dest: int) -> None:
        """See Transport.move."""
        self.copy(self._view(out, dest), self._view(array, source))

    def barrier(self) -> None:
        """See Transport.barrier."""

    def close(self) -> None:
        """See Transport.close."""
