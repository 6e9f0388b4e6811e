"""Python callables on a CUDA stream; imported only where there is a GPU.

A host function would need the interpreter's lock inside the driver, where another thread may hold it and wait for the
driver: a deadlock. Instead the stream waits on a word of pinned memory. A worker thread of the stream writes it, once
the work before is done and the callable has run. The words are allocated before the first wait, since allocating
pinned memory may wait for the device.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import cupy
import numpy as np

from ncclcomm.devices import cuda_driver
from ncclcomm.devices.cuda_held import hold
from ncclcomm.devices.cuda_streams import CudaStream, errors, is_capturing, on_device, working
from ncclcomm.errors import BackendUnavailableError, DeviceError, UnsupportedError

__all__ = ["launch"]

_WORDS = 16384
"""How many launched callables can wait for their turn at a time."""

_WAIT_GEQ = 0


class _Job(NamedTuple):
    """A callable whose stream waits for it."""

    reached: Any
    word: _Word
    fn: Callable[..., object]
    args: tuple[Any, ...]


class _Words:
    """Words of pinned memory, given out and taken back."""

    def __init__(self) -> None:
        self._memory = cupy.cuda.alloc_pinned_memory(4 * _WORDS)
        self.values: np.ndarray[Any, Any] = np.frombuffer(self._memory, np.uint32, _WORDS)
        self.address = int(self._memory.ptr)
        self.free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index in range(_WORDS):
            self.free.put(index)


class _Word:
    """One word, free again when nothing holds it."""

    def __init__(self, words: _Words) -> None:
        self._words = words
        self._index = words.free.get()
        words.values[self._index] = 0
        self.address = words.address + 4 * self._index

    def set(self) -> None:
        """Let the stream go on."""
        self._words.values[self._index] = 1

    def __del__(self) -> None:
        """Give the word back."""
        self._words.free.put(self._index)


class _Worker:
    """The thread that runs a stream's callables."""

    def __init__(self, key: tuple[int, int]) -> None:
        self.jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self.lock = threading.Lock()
        """Held while a callable is enqueued, so that the jobs are in the stream's order."""
        threading.Thread(target=_work, args=(key, self.jobs), name="ncclcomm-launch", daemon=True).start()


_lock = threading.Lock()
_words: _Words | None = None
_workers: dict[tuple[int, int], _Worker] = {}


def _start(key: tuple[int, int]) -> _Worker:
    """A stream's worker, which starts at the first use."""
    global _words
    with _lock:
        if _words is None:
            _words = _Words()
        if key not in _workers:
            _workers[key] = _Worker(key)
        return _workers[key]


def launch(stream: CudaStream, fn: Callable[..., object], *args: Any) -> None:
    """Enqueue a callable on a stream; see StreamImpl.launch.

    Raises:
        BackendUnavailableError: cuda-bindings is not installed.
        DeviceError: the driver refuses.
        UnsupportedError: the stream's work is captured into a graph.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise BackendUnavailableError(
            "Stream.launch needs cuda-bindings: pip install 'ncclcomm[cuda13]' or 'ncclcomm[cuda12]'"
        ) from error
    if is_capturing(stream.handle):
        raise UnsupportedError(
            "Stream.launch: the stream's work is captured into a CUDA graph, and a graph can't run Python; launch the "
            "callable before or after the graph"
        )
    worker = _start((stream.device, stream.handle))
    assert _words is not None
    word = _Word(_words)
    with worker.lock, on_device(stream.device):
        reached = cupy.cuda.Event(block=True, disable_timing=True)
        reached.record(stream.cupy)
        (code,) = driver.cuStreamWaitValue32(stream.handle, word.address, 1, _WAIT_GEQ)
        if code != driver.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"cuStreamWaitValue32 failed: {code.name}", code=int(code), name=code.name)
        worker.jobs.put(_Job(reached, word, fn, args))
        hold(stream, word)


def _work(key: tuple[int, int], jobs: queue.SimpleQueue[_Job]) -> None:
    """Run the callables of a stream, each when the stream has come to it, and let it go on whatever happens."""
    working.key = key
    while True:
        job = jobs.get()
        try:
            cuda_driver.watch(key[0])
            job.reached.synchronize()
            job.fn(*job.args)
        except BaseException as error:
            errors.setdefault(key, error)
        finally:
            job.word.set()
        del job
