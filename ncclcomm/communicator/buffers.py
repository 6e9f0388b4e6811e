"""From the caller's arrays to flat contiguous ones and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ncclcomm.arrays import HOST_MEMORY, View, contiguous_flat, empty_on, is_contiguous
from ncclcomm.chunks import chunk_slices
from ncclcomm.communicator.wire import MOST_PAYLOAD_BYTES
from ncclcomm.transport.peer import PeerTransport

if TYPE_CHECKING:
    from ncclcomm.communicator.communicator import Communicator
    from ncclcomm.devices.foreign import Foreign

__all__ = [
    "Target",
    "fill",
    "near_view",
    "pack",
    "packed_target",
    "parts_in",
    "payload_of",
    "settle",
    "settled_flat",
    "target_for",
    "unpack",
]


class Target:
    """Where a result goes: `near`, an array of any strides where the transports can reach it, and its flat form.

    `finish` puts flat's elements into near if they are not its own memory, and near's into the caller's array if that
    is on another device of this process.
    """

    def __init__(self, comm: Communicator, array: View) -> None:
        self._comm = comm
        self._array = array
        self.kind = array.kind
        self.near = array
        if _is_far(comm, array):
            self.near = empty_on(comm._backend, array.data.shape, array.data.dtype, comm.device)
        data = self.near.data
        self._is_flat = is_contiguous(data)
        self.flat = data.reshape(-1) if self._is_flat else comm._member.flat(data.size, data.dtype, self.near.device)

    def finish(self) -> Any:
        """Complete the caller's array and return it."""
        if not self._is_flat:
            self.near.data[...] = self.flat.reshape(self.near.data.shape)
        return self.finish_near()

    def finish_near(self) -> Any:
        """As finish, where near was filled directly."""
        if self.near is not self._array:
            PeerTransport(self._comm._backend, ()).copy(self._array, self.near)
        return self._array.obj


def _is_far(comm: Communicator, array: View) -> bool:
    """True for memory that the transports don't reach: of another GPU than the rank's."""
    return array.device not in (HOST_MEMORY, comm.device) and comm.backend == "cuda"


def settle(comm: Communicator, *arrays: View | None) -> None:
    """Wait for the work queued on the current stream of each array's device, where the host is to touch the arrays.

    GPU arrays need no wait: what touches them is queued on the same stream.
    """
    if comm.backend != "host":
        return
    for device in {array.device for array in arrays if array is not None and array.device != HOST_MEMORY}:
        comm._backend.current_stream(device).synchronize()


def near_view(comm: Communicator, array: View) -> View:
    """An input where the transports reach it, once the work queued before the call is done."""
    if array.device == HOST_MEMORY:
        return array
    settle(comm, array)
    if not _is_far(comm, array):
        return array
    near = empty_on(comm._backend, array.data.shape, array.data.dtype, comm.device)
    PeerTransport(comm._backend, ()).copy(near, array)
    return near


def settled_flat(comm: Communicator, array: View) -> Any:
    """An input's elements in C order, flat, where the transports reach them."""
    return contiguous_flat(near_view(comm, array).data)


def payload_of(comm: Communicator, flat: Any) -> bytes:
    """The elements, where they are so few that they go with the facts: in unchecked calls, from host memory."""
    if comm.size == 1 or comm._calls <= comm._checked_calls or not isinstance(flat, np.ndarray):
        return b""
    return flat.tobytes() if flat.nbytes <= MOST_PAYLOAD_BYTES else b""


def fill(flat: Any, payload: bytes) -> None:
    """Put elements that came with the facts where they belong."""
    flat.view(np.uint8)[...] = np.frombuffer(payload, np.uint8)


def parts_in(counts: Sequence[int], itemsize: int, order: Sequence[int]) -> list[slice]:
    """For each rank, where in the bytes of all ranks' elements, which lie in an order of ranks, its own are."""
    parts = [slice(0)] * len(counts)
    start = 0
    for rank in order:
        stop = start + counts[rank] * itemsize
        parts[rank] = slice(start, stop)
        start = stop
    return parts


def target_for(
    comm: Communicator,
    shape: Sequence[int],
    dtype: Any,
    device: int,
    out: View | None = None,
    kind: Foreign | None = None,
) -> Target:
    """A target in the caller's `out`, once the work queued on it is done, or in a new array on a device, of a kind."""
    if out is None:
        return Target(comm, empty_on(comm._backend, tuple(shape), dtype, device, kind))
    if out.device != HOST_MEMORY:
        settle(comm, out)
    return Target(comm, out)


def _is_packed(comm: Communicator, data: Any, dim: int) -> bool:
    """True where an array's own memory already is all ranks' parts in node order."""
    if dim != 0 or not is_contiguous(data):
        return False
    return comm.num_nodes == 1 or comm.topology.node_order == tuple(range(comm.size))


def pack(comm: Communicator, array: View, counts: Sequence[int], dim: int) -> Any:
    """All ranks' chunks of an array along a dimension, each in C order, in node order, as one flat array."""
    array = near_view(comm, array)
    if _is_packed(comm, array.data, dim):
        return array.data.reshape(-1)
    packed = comm._member.flat(array.data.size, array.data.dtype, array.device)
    slices = chunk_slices(counts, dim)
    start = 0
    for rank in comm.topology.node_order:
        chunk = array.data[slices[rank]]
        packed[start : start + chunk.size].reshape(chunk.shape)[...] = chunk
        start += chunk.size
    return packed


def unpack(comm: Communicator, packed: Any, array: View, counts: Sequence[int], dim: int) -> None:
    """Put all ranks' chunks, as `pack` lays them, into their places in an array."""
    slices = chunk_slices(counts, dim)
    start = 0
    for rank in comm.topology.node_order:
        place = array.data[slices[rank]]
        place[...] = packed[start : start + place.size].reshape(place.shape)
        start += place.size


def packed_target(comm: Communicator, array: View, dim: int) -> tuple[Any, bool]:
    """A flat array to gather into, and whether it is the array's own memory (so that nothing is to be unpacked)."""
    if _is_packed(comm, array.data, dim):
        return array.data.reshape(-1), True
    return comm._member.flat(array.data.size, array.data.dtype, array.device), False
