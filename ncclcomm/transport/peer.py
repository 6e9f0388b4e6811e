"""The devices of one process: copies and sums between them, each on the streams that are current.

Every stream that touches memory first waits for the current stream of each device involved, and those then wait for it,
so that a call is ordered after the work queued before it and before the work queued after it, on every device it
touches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ncclcomm.arrays import HOST_MEMORY, View, empty_on, same_memory
from ncclcomm.chunks import chunk_slices, even_counts
from ncclcomm.devices.base import DeviceBackend, StreamImpl
from ncclcomm.devices.host_work import SPLIT_BYTES, copy_each, reduce_each
from ncclcomm.reductions import divide_by
from ncclcomm.transport.base import Transport

__all__ = ["PeerTransport"]


SLICED_BYTES = 1 << 20
"""Bytes of an array from which an all_reduce is shared out among the devices."""


class _Uses:
    """The streams of a call, each with the devices whose memory it touches."""

    def __init__(self) -> None:
        self._devices: dict[tuple[int, int], tuple[StreamImpl, dict[int, None]]] = {}

    def add(self, stream: StreamImpl, devices: Iterable[int]) -> None:
        """Say that a stream touches memory of these devices; host memory has no stream to order it with."""
        touched = self._devices.setdefault((stream.device, stream.handle), (stream, {}))[1]
        touched.update((device, None) for device in devices if device != HOST_MEMORY)

    def __iter__(self) -> Iterator[tuple[StreamImpl, Iterable[int]]]:
        """Each stream and its devices."""
        return iter(self._devices.values())


def _slices(array: View, places: Iterable[Any]) -> list[View]:
    """Slices of a C-contiguous array, flat."""
    flat = array.data.reshape(-1)
    return [View(None, flat[place], array.device) for place in places]


def _starts(whole: Any, places: Sequence[Any]) -> list[int] | None:
    """The bytes at which parts of a C-contiguous array begin that was cut along its first dimension; else None."""
    if not whole.size or not places or type(places[0]) is not slice:
        return None
    row_bytes = whole.nbytes // whole.shape[0]
    return [place.start * row_bytes for place in places]


class PeerTransport(Transport):
    """A group whose members are devices of this process, all driven by it."""

    name = "peer"

    def __init__(self, backend: DeviceBackend, devices: Sequence[int]) -> None:
        self.backend = backend
        self.devices = tuple(devices)
        self.size = len(self.devices)
        self.members = tuple(range(self.size))

    def copy(self, dst: View, src: View) -> None:
        """As copy_all, of one pair."""
        self.copy_all([(dst, src)])

    def copy_all(self, pairs: Sequence[tuple[View, View]], streams: Sequence[StreamImpl | None] = ()) -> None:
        """Copy between any places, several times, ordered with all of them; the host waits where it gets data itself.

        The copies are not ordered with each other: all wait for what was queued before the call, once a stream.

        Args:
            pairs: where to and where from, of one shape and dtype, of any strides. What is written shares no memory
                with another pair's arrays. Host memory that is read may be reused when the call returns.
            streams: for each pair a stream of the first one's device to use in place of its current one, or None; none
                at all means the current ones.
        """
        if self.backend.immediate:
            copy_each([(dst.data, src.data) for dst, src in pairs])
            return
        if not streams and self.backend.copy_plain([(dst.data, 0, src.data, 0, dst.data.nbytes) for dst, src in pairs]):
            return
        uses, todo, waits = _Uses(), [], []
        snapshots: dict[int, Any] = {}
        """Copies of host memory, by the id of its array, which pairs keeps."""
        for index, (dst, src) in enumerate(pairs):
            source = src.data
            if dst.device != HOST_MEMORY:
                stream = (streams[index] if streams else None) or self.backend.current_stream(dst.device)
                if src.device == HOST_MEMORY and self.backend.must_snapshot(source):
                    if id(source) not in snapshots:
                        snapshots[id(source)] = source.copy()
                    source = snapshots[id(source)]
            elif src.device != HOST_MEMORY:
                stream = self.backend.current_stream(src.device)
                waits.append(stream)
            else:
                copy_each([(dst.data, source)])
                continue
            uses.add(stream, (dst.device, src.device))
            todo.append((dst.data, source, stream))
        with self._ordered(uses):
            for dst_data, source, stream in todo:
                self.backend.copy(dst_data, source, stream)
        for stream in waits:
            stream.synchronize()

    def scatter_views(
        self, outs: Sequence[View], source: View, places: Sequence[Any], streams: Sequence[StreamImpl | None] = ()
    ) -> None:
        """As copy_all, of the places of one array into outs."""
        data, device = source.data, source.device
        if self.backend.immediate and data.nbytes < SPLIT_BYTES:
            for out, place in zip(outs, places, strict=True):
                out.data[...] = data[place]
            return
        starts = _starts(data, places)
        if not streams and starts is not None:
            parts = zip(outs, starts, strict=True)
            if self.backend.copy_plain([(out.data, 0, data, start, out.data.nbytes) for out, start in parts]):
                return
        pairs = zip(outs, places, strict=True)
        self.copy_all([(out, View(None, data[place], device)) for out, place in pairs], streams)

    def gather_views(self, out: View, places: Sequence[Any], arrays: Sequence[View]) -> None:
        """As copy_all, of arrays into the places of one array."""
        data, device = out.data, out.device
        if self.backend.immediate and data.nbytes < SPLIT_BYTES:
            for place, array in zip(places, arrays, strict=True):
                data[place] = array.data
            return
        starts = _starts(data, places)
        if starts is not None:
            parts = zip(arrays, starts, strict=True)
            if self.backend.copy_plain([(data, start, array.data, 0, array.data.nbytes) for array, start in parts]):
                return
        pairs = zip(places, arrays, strict=True)
        self.copy_all([(View(None, data[place], device), array) for place, array in pairs])

    def all_gather_views(self, outs: Sequence[View], places: Sequence[Any], arrays: Sequence[View]) -> None:
        """As copy_all, of arrays into the places of each of outs; an array may be its own place in one already."""
        self.copy_all(
            [
                (View(None, part, out.device), array)
                for out in outs
                for part, array in zip([out.data[place] for place in places], arrays, strict=True)
                if out.device != array.device or not same_memory(part, array.data)
            ]
        )

    def reduce_views(self, out: View, arrays: Sequence[View], op: str) -> None:
        """As reduce_all, of one result, by one of REDUCTIONS."""
        if self.backend.immediate:
            reduce_each(out.data, [array.data for array in arrays], op)
        else:
            self._reduce_later([(out, arrays)], op)

    def reduce_all(self, jobs: Sequence[tuple[View, Sequence[View]]], op: str) -> None:
        """Reduce arrays on any devices, in their order, on the device of the result; several times, as copy_all copies.

        Args:
            jobs: results, each with its terms, which are of its shape and dtype. A result may be one of its own terms,
                and shares no memory with another job's arrays.
            op: one of REDUCTIONS, or 'avg'.
        """
        func = "sum" if op == "avg" else op
        if op == "avg" and len({view.device for out, arrays in jobs for view in (out, *arrays)}) > 1:
            for out, _ in jobs:
                if out.device != HOST_MEMORY:
                    self.backend.refuse_capture(out.device, "avg over devices")
        if self.backend.immediate:
            for out, arrays in jobs:
                reduce_each(out.data, [array.data for array in arrays], func)
        else:
            self._reduce_later(jobs, func)
        if op == "avg":
            for out, arrays in jobs:
                self._divide(out, len(arrays))

    def _reduce_later(self, jobs: Sequence[tuple[View, Sequence[View]]], op: str) -> None:
        """Reduce where streams run their work later."""
        if op == "sum" and self.backend.sum_plain([(out.data, [term.data for term in terms]) for out, terms in jobs]):
            return
        uses, todo, home = _Uses(), [], []
        for out, arrays in jobs:
            devices = [view.device for view in (out, *arrays) if view.device != HOST_MEMORY]
            plain = [array.data for array in arrays]
            if not devices:
                reduce_each(out.data, plain, op)
                continue
            near = out
            if out.device == HOST_MEMORY:
                near = empty_on(self.backend, out.data.shape, out.data.dtype, devices[0])
                home.append((out, near))
            stream = self.backend.current_stream(near.device)
            uses.add(stream, devices)
            todo.append((near.data, plain, stream))
        with self._ordered(uses):
            for data, plain, stream in todo:
                self.backend.reduce(data, plain, op, stream)
        self.copy_all(home)

    def _divide(self, out: View, by: int) -> None:
        """Make a sum an average, on the current stream of its device."""
        if isinstance(out.data, np.ndarray) and out.device != HOST_MEMORY:
            self.backend.current_stream(out.device).launch(divide_by, out.data, by)
        elif out.device == HOST_MEMORY:
            divide_by(out.data, by)
        else:
            with self.backend.on_device(out.device):
                divide_by(out.data, by)

    def all_reduce_views(self, outs: Sequence[View], arrays: Sequence[View], op: str) -> None:
        """Reduce arrays of one shape and dtype into every out, with identical bits; an out may be its own array.

        Where streams run their work later, each device reduces a slice of a large array and gives it to the others, so
        that all of them work at the same time.

        Args:
            outs: the results, as many as arrays, each on the device of its array.
            arrays: the terms.
            op: one of REDUCTIONS, or 'avg'.
        """
        size = len(arrays)
        flat = all(view.data.flags.c_contiguous for view in (*outs, *arrays))
        if self.backend.immediate or not flat or outs[0].data.nbytes < SLICED_BYTES:
            self.reduce_all([(outs[0], arrays)], op)
            self.copy_all([(out, outs[0]) for out in outs[1:]])
            return
        places = chunk_slices(even_counts(outs[0].data.size, size), 0)
        out_parts, parts = ([_slices(view, places) for view in views] for views in (outs, arrays))
        self.reduce_all([(out_parts[i][i], [part[i] for part in parts]) for i in range(size)], op)
        self.copy_all([(out_parts[j][i], out_parts[i][i]) for j in range(size) for i in range(size) if i != j])

    @contextmanager
    def _ordered(self, uses: _Uses) -> Iterator[None]:
        """Order what streams are given inside after the devices' current streams, and before their later work.

        Also where something inside fails: what was enqueued before it runs.
        """
        for stream, devices in uses:
            for device in devices:
                if device != stream.device:
                    for either in (device, stream.device):
                        self.backend.refuse_capture(either, "this call between devices is no plain copy or sum")
        for stream, devices in uses:
            for device in devices:
                self._order(self.backend.current_stream(device), stream)
        try:
            yield
        finally:
            for stream, devices in uses:
                for device in devices:
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
        self.copy_all([(self._view(buffers[member], member), source) for member in self.members if member != root])

    def scatter(self, parts: Sequence[Any] | None, outs: Sequence[Any], root: int) -> None:
        """See Transport.scatter."""
        assert parts is not None
        pairs = zip(outs, parts, self.members, strict=True)
        self.copy_all([(self._view(o, m), self._view(p, root)) for o, p, m in pairs if not same_memory(o, p)])

    def gather(self, arrays: Sequence[Any], parts: Sequence[Any] | None, root: int) -> None:
        """See Transport.gather."""
        assert parts is not None
        pairs = zip(parts, arrays, self.members, strict=True)
        self.copy_all([(self._view(p, root), self._view(a, m)) for p, a, m in pairs if not same_memory(p, a)])

    def reduce(self, arrays: Sequence[Any], outs: Sequence[Any | None], op: str, root: int) -> None:
        """See Transport.reduce."""
        self.reduce_views(self._view(outs[root], root), [self._view(array, m) for m, array in enumerate(arrays)], op)

    def all_reduce(self, arrays: Sequence[Any], outs: Sequence[Any], op: str) -> None:
        """See Transport.all_reduce."""
        views, terms = ([self._view(array, m) for m, array in enumerate(some)] for some in (outs, arrays))
        self.all_reduce_views(views, terms, op)

    def move(self, array: Any | None, out: Any | None, source: int, dest: int) -> None:
        """See Transport.move."""
        self.copy(self._view(out, dest), self._view(array, source))

    def barrier(self) -> None:
        """See Transport.barrier."""

    def close(self) -> None:
        """See Transport.close."""
