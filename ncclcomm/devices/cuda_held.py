"""What the work of CUDA streams uses, kept until that work is done; imported only where there is a GPU."""

from __future__ import annotations

import queue
import threading
from typing import Any

import cupy
from cupy.cuda import runtime

from ncclcomm.devices import cuda_driver
from ncclcomm.devices.cuda_streams import CudaStream, is_capturing, on_device

__all__ = ["hold"]

_MOST_SPARE = 64

_Held = queue.SimpleQueue[tuple[Any, tuple[Any, ...]]]

_held: dict[tuple[int, int], _Held] = {}
"""A stream's (device, handle) events and what they keep. One queue for all would wait for the slowest stream."""
_spare: dict[int, list[Any]] = {}
"""Events by device, to be used again."""
_for_good: list[Any] = []
"""What a graph uses, which may run at any time, and what work of a broken device used."""
_lock = threading.Lock()


def hold(stream: CudaStream, *objects: Any) -> None:
    """Keep objects alive until the work now enqueued on a stream is done; for good if that is captured into a graph.

    CuPy's memory pool gives freed memory to later work of the stream that was current when it was allocated, which may
    not be ordered after this one.
    """
    if is_capturing(stream.handle):
        _for_good.append(objects)
        return
    with on_device(stream.device):
        try:
            done = _spare[stream.device].pop()
        except (KeyError, IndexError):
            done = cupy.cuda.Event(block=True, disable_timing=True)
        runtime.eventRecord(done.ptr, stream.handle)
    held = _held.get((stream.device, stream.handle))
    if held is None:
        held = _start(stream.device, stream.handle)
    held.put((done, objects))


def _start(device: int, handle: int) -> _Held:
    """A stream's queue, with a thread that empties it."""
    with _lock:
        held = _held.get((device, handle))
        if held is None:
            held = _held[device, handle] = queue.SimpleQueue()
            threading.Thread(target=_reap, args=(device, held), name="ncclcomm-reaper", daemon=True).start()
        return held


def _reap(device: int, held: _Held) -> None:
    """Drop what is held, each when its work is done."""
    spare = _spare.setdefault(device, [])
    while True:
        done, objects = held.get()
        try:
            cuda_driver.watch(device)
            done.synchronize()
        except runtime.CUDARuntimeError:
            # The program's next call on the device reports it. Whether the work has ended can't be known.
            _for_good.append((done, objects))
        else:
            if len(spare) < _MOST_SPARE:
                spare.append(done)
        del done, objects
