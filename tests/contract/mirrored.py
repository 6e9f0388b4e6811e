"""Runs the transport contract on GPU memory: the suite's NumPy arrays are brought to the devices for each call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ncclcomm.transport.base import Transport

__all__ = ["Mirrored"]


class Mirrored(Transport):
    """A transport of NumPy arrays over one of device arrays.

    An array that stands in a call twice stands in the inner call twice. What only moves goes as bytes, as transports
    move
    it: the device's arrays lack some dtypes.

    Args:
        inner: the transport of device arrays.
        up: makes a device array of a NumPy array, for a member.
        down: makes a NumPy array of a device array, once its work is done.
    """

    def __init__(self, inner: Transport, up: Callable[[Any, int], Any], down: Callable[[Any], Any]) -> None:
        self._inner = inner
        self._up = up
        self._down = down
        self.name = inner.name
        self.size = inner.size
        self.members = inner.members
        self._pairs: dict[int, tuple[Any, Any]] = {}

    def _mirror(self, array: Any, member: int, as_bytes: bool) -> Any:
        """The device's array for one of the call's."""
        if array is None:
            return None
        key = array.__array_interface__["data"][0] if array.size else id(array)
        if key not in self._pairs:
            self._pairs[key] = (array, self._up(array.view(np.uint8) if as_bytes else array, member))
        return self._pairs[key][1]

    def _finish(self) -> None:
        """Bring back what the call wrote: all but arrays that nobody may write."""
        for array, device in self._pairs.values():
            found = self._down(device).view(array.dtype)
            if array.flags.writeable:
                array[...] = found
            else:
                assert found.tobytes() == array.tobytes(), "an input was changed"
        self._pairs.clear()

    def _each(self, arrays: Sequence[Any], as_bytes: bool = True) -> list[Any]:
        """The device's arrays of the driven members."""
        return [self._mirror(array, member, as_bytes) for array, member in zip(arrays, self.members, strict=True)]

    def _parts(self, parts: Sequence[Any] | None, root: int) -> list[Any] | None:
        """The device's arrays of the root's parts."""
        return None if parts is None else [self._mirror(part, root, True) for part in parts]

    def broadcast(self, buffers: Sequence[Any], root: int) -> None:
        self._inner.broadcast(self._each(buffers), root)
        self._finish()

    def scatter(self, parts: Sequence[Any] | None, outs: Sequence[Any], root: int) -> None:
        self._inner.scatter(self._parts(parts, root), self._each(outs), root)
        self._finish()

    def gather(self, arrays: Sequence[Any], parts: Sequence[Any] | None, root: int) -> None:
        self._inner.gather(self._each(arrays), self._parts(parts, root), root)
        self._finish()

    def reduce(self, arrays: Sequence[Any], outs: Sequence[Any | None], op: str, root: int) -> None:
        self._inner.reduce(self._each(arrays, False), self._each(outs, False), op, root)
        self._finish()

    def all_reduce(self, arrays: Sequence[Any], outs: Sequence[Any], op: str) -> None:
        self._inner.all_reduce(self._each(arrays, False), self._each(outs, False), op)
        self._finish()

    def move(self, array: Any | None, out: Any | None, source: int, dest: int) -> None:
        self._inner.move(self._mirror(array, source, True), self._mirror(out, dest, True), source, dest)
        self._finish()

    def barrier(self) -> None:
        self._inner.barrier()

    def close(self) -> None:
        self._inner.close()
