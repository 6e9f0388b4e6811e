"""What another library's arrays need of it, and calls on the streams that such a library works on.

Which libraries there are is in foreign_torch.py and foreign_dlpack.py. None of them is imported: who passes a library's
array has imported it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ncclcomm.devices.base import DeviceBackend, StreamImpl

__all__ = ["Following", "Foreign", "follow", "joined"]


class Foreign(ABC):
    """A library whose arrays are taken, and made for results."""

    name: str
    """What other ranks know it by, such as 'torch'."""
    own_streams: bool
    """True if its arrays on GPUs are worked on by current streams of its own, which may be others than CuPy's."""

    @property
    @abstractmethod
    def namespace(self) -> Any:
        """The module whose functions make and take its arrays; None where that is not known."""

    def empty(self, backend: DeviceBackend, shape: tuple[int, ...], dtype: Any, device: int) -> tuple[Any, Any] | None:
        """A new C-contiguous array of the library, and the same memory as a NumPy or CuPy array.

        None where the library has no arrays on that device, or they can't be written to once they are made.
        """
        return None

    def wraps(self, backend: DeviceBackend, device: int) -> bool:
        """True if `wrap` makes the library's arrays on that device, where `empty` makes none."""
        return False

    def wrap(self, data: Any) -> Any:
        """The library's array of a NumPy or CuPy array that nobody else has, once the work that fills it is enqueued.

        The library may copy, so that what is written to data later is lost.
        """
        raise NotImplementedError

    @abstractmethod
    def before_fill(self, obj: Any, what: str) -> None:
        """Tell the library that a call is about to write to one of its arrays.

        Args:
            obj: the array.
            what: how messages call it.

        Raises:
            ArgumentError: it can't be written to.
        """

    @abstractmethod
    def current_stream(self, backend: DeviceBackend, device: int) -> StreamImpl | None:
        """The stream on which the library works on a GPU now; None where it has none that others can use."""

    def lend(self, backend: DeviceBackend, obj: Any, device: int) -> None:
        """Make an array on a GPU ready for work on the backend's current stream from now on."""
        return


class _Blocks(threading.local):
    """The blocks of `Following` that a thread is in."""

    def __init__(self) -> None:
        self.open: list[Following] = []


_thread = _Blocks()


class Following:
    """A block in which the current streams become those that other libraries work on, as arrays of them come up.

    They come up where `arrays.view` finds one on a GPU, or `arrays.empty_on` makes one. So what a call does with such
    arrays on the current streams is in order with the library's own work. At the end the streams are again what they
    were.

    Args:
        backend: the GPUs.
        around: a block to be in as well.
    """

    __slots__ = ("_around", "_backend", "_before", "_held")

    def __init__(self, backend: DeviceBackend, around: AbstractContextManager[object] | None = None) -> None:
        self._backend = backend
        self._around = around
        self._before: dict[int, StreamImpl] = {}
        self._held: list[tuple[int, Any]] = []

    def __enter__(self) -> Following:
        """Begin."""
        if self._around is not None:
            self._around.__enter__()
        _thread.open.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        """Restore the streams."""
        try:
            for device, data in self._held:
                self._backend.keep(device, data)
        finally:
            self.end()
            if self._around is not None:
                self._around.__exit__(*error)

    def end(self) -> None:
        """Restore the streams, unless that is done: a signal's exception may come between the block and its end."""
        if self in _thread.open:
            _thread.open.remove(self)
        while self._before:
            self._backend.set_current_stream(self._before.popitem()[1])

    def add(self, kind: Foreign, device: int, data: Any = None) -> None:
        """Go over to the library's stream of a device; where it has none, keep data until the work is done."""
        stream = kind.current_stream(self._backend, device)
        if stream is None:
            if data is not None:
                self._held.append((device, data))
            return
        before = self._backend.current_stream(device)
        if stream.handle != before.handle:
            self._before.setdefault(device, before)
            self._backend.set_current_stream(stream)


def follow(kind: Foreign, device: int, data: Any = None) -> None:
    """Go over to a library's stream of a device until the end of the innermost `Following` of this thread, if any."""
    if device >= 0 and _thread.open:
        _thread.open[-1].add(kind, device, data)


@contextmanager
def joined(backend: DeviceBackend, kind: Foreign | None, device: int) -> Iterator[None]:
    """Order the backend's current stream of a device after a library's before the block, and before it afterwards.

    For calls that bring a library's arrays to ones of the backend's own: both streams have work then.
    """
    theirs = kind.current_stream(backend, device) if kind is not None and device >= 0 else None
    ours = None if theirs is None else backend.current_stream(device)
    if theirs is None or ours is None or ours.handle == theirs.handle:
        yield
        return
    backend.order(theirs, ours)
    try:
        yield
    finally:
        backend.order(ours, theirs)
