"""What the work of CUDA streams uses, kept until that work is done; imported only where there is a GPU.

One thread looks after all of it, every millisecond while there is something. With a thread that waited inside CUDA for
each call's end, and woke at every call, `hold` took 9 us.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import cupy
from cupy.cuda import runtime

from ncclcomm.devices import cuda_driver
from ncclcomm.devices.cuda_streams import CudaStream, is_capturing, on_device

__all__ = ["drop_ended", "hold", "hold_until", "keep_for_good", "settle", "unused_event"]

_MOST_SPARE = 64

_LOOK_S = 0.001
"""Between two looks at what is held: so much longer than its work memory may stay in use."""

_IDLE_S = 0.1
"""How long the thread goes on looking when nothing is held: waking it takes time of the call that does."""

_SETTLE_S = 5.0
"""How long an allocation that found no memory waits for what is held."""

_Held = deque[tuple[Any, Sequence[Any]]]

_held: dict[tuple[int, int], _Held] = {}
"""A stream's (device, handle) events and what they keep. One queue for all would wait for the slowest stream."""
_spare: dict[int, list[Any]] = {}
"""Events by device, to be used again."""
_for_good: list[Any] = []
"""What a graph uses, which may run at any time, and what work of a broken device used."""
_lock = threading.Lock()


class _Keeper:
    """The thread that drops what is held, once there was something to hold."""

    def __init__(self) -> None:
        self.looks = False
        """It will look before it sleeps: nobody needs to wake it."""
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Have it look; a forked child has no thread and no GPU.

        An exception may come in at any step, Ctrl-C's too: then the next call does what is left.
        """
        if self._thread is None:
            with _lock:
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name="ncclcomm-keeper", daemon=True)
                    thread.start()
                    self._thread = thread
        self._wake.set()

    def _run(self) -> None:
        """The thread's whole life."""
        while True:
            self._wake.wait()
            self._wake.clear()
            self.looks = True
            last = time.monotonic()
            while self.looks:
                time.sleep(_LOOK_S)
                if drop_ended():
                    last = time.monotonic()
                elif time.monotonic() - last > _IDLE_S:
                    self.looks = False
                    if any(_held.values()):  # it came in before that
                        self.looks = True


_keeper = _Keeper()


def unused_event(device: int) -> Any:
    """A CuPy event of a device, for ordering and for hold_until, which nobody else has.

    Args:
        device: the current device.
    """
    try:
        return _spare[device].pop()
    except (KeyError, IndexError):
        return cupy.cuda.Event(disable_timing=True)


def hold(stream: CudaStream, *objects: Any) -> None:
    """Keep objects alive until the work now enqueued on a stream is done; for good if that is captured into a graph.

    CuPy's memory pool gives freed memory to later work of the stream that was current when it was allocated, which may
    not be ordered after this one.
    """
    if is_capturing(stream.handle):
        _for_good.append(objects)
        return
    with on_device(stream.device):
        done = unused_event(stream.device)
        runtime.eventRecord(done.ptr, stream.handle)
    hold_until(done, stream.device, stream.handle, objects)


def hold_until(done: Any, device: int, handle: int, objects: Sequence[Any]) -> None:
    """Keep objects alive until an event, which goes to the spare ones then.

    Args:
        done: an event of `unused_event`, recorded on a stream that is not being captured.
        device: the stream's device.
        handle: the stream's handle.
        objects: what to keep; it is not changed later.
    """
    held = _held.get((device, handle))
    if held is None:
        held = _held.setdefault((device, handle), deque())
    held.append((done, objects))
    if not _keeper.looks:
        _keeper.wake()


def keep_for_good(done: Any, device: int, handle: int, objects: Sequence[Any]) -> None:
    """As hold_until, for work that is captured into a graph, which may run at any time."""
    _for_good.append((done, objects))


def drop_ended() -> bool:
    """Drop what is held by work that has ended; True if something is still held.

    Each event is asked: a stream's are mostly in order, but not where two threads record them, or where a handle has
    gone to another stream.
    """
    is_left = False
    with _lock:
        for (device, _), held in list(_held.items()):
            spare = _spare.setdefault(device, [])
            while held:
                done = held[0][0]
                try:
                    if not cuda_driver.is_complete(done.ptr, device):
                        is_left = True
                        break
                except runtime.CUDARuntimeError:
                    # The program's next call on the device reports it. Whether the work has ended can't be known.
                    _for_good.append(held.popleft())
                    continue
                objects = held.popleft()
                if len(spare) < _MOST_SPARE:
                    spare.append(done)
                del objects
    return is_left


def settle() -> bool:
    """Wait until nothing is held, some seconds at the most; False if nothing was."""
    if not any(_held.values()):
        return False
    deadline = time.monotonic() + _SETTLE_S
    while any(_held.values()) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    return True
