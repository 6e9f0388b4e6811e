"""Copies and reductions of host memory, for the host backend: on two cores where that pays.

Large work is cut into pieces. The calling thread takes one after the other, and so does a helper thread as soon as it
gets a core. Two cores need 0.55 to 0.8 of one core's time from 8 MiB on, the first touch of new memory included; below,
waking a thread costs more than it brings. Where other processes keep all cores busy a helper may lose its core in the
middle of a piece, and the caller has to wait for it: after a call to which it brought nothing, the helper rests for a
while, and nothing is cut. Reductions of more than two arrays go block by block, so that partial results stay in the
cache.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from time import perf_counter
from typing import Any

import numpy as np

from ncclcomm.reductions import reduce_into

__all__ = ["SPLIT_BYTES", "copy_each", "reduce_each"]

Plain = np.ndarray[Any, Any]
_Piece = tuple[Callable[..., None], tuple[Any, ...]]

SPLIT_BYTES = 8 << 20
"""Bytes that a call writes from which a second core pays."""

PIECE_BYTES = 2 << 20
"""Bytes of a piece: a huge page, so that two threads seldom wait for the same one when they touch new memory."""

HUGE_BYTES = 128 << 20
"""Bytes of a piece of a copy, where there is enough for two such: the C library copies that much past the caches, in
0.7 of the time that smaller pieces of it take."""

SHORTEST_REST_S, LONGEST_REST_S = 0.01, 1.0
"""How long the helper rests after it brought nothing: twice as long each time, half as long after it did."""

BLOCK_BYTES = 512 << 10
"""Bytes of a block of a reduction: its result and one more array fit a core's cache, and Python costs little of it."""


def copy_each(pairs: Sequence[tuple[Plain, Plain]]) -> None:
    """Copy the second array of each pair into the first.

    Args:
        pairs: plain arrays of one shape and dtype, of any strides. None that is written shares memory with another
            pair's.
    """
    nbytes = 0
    for dst, _ in pairs:
        nbytes += dst.nbytes
    if nbytes < SPLIT_BYTES or not _two_may_work():
        for dst, src in pairs:
            dst[...] = src  # numpy.copyto, less the time in which that asks who overrides it
        return
    piece_bytes = HUGE_BYTES if nbytes >= 2 * HUGE_BYTES else PIECE_BYTES
    pieces: deque[_Piece] = deque()
    for pair in pairs:
        if np.may_share_memory(*pair):
            pieces.append((_copy, pair))
        else:
            pieces.extend((_copy, cut) for cut in _cuts(pair, piece_bytes))
    _run(pieces)


def reduce_each(out: Plain, arrays: Sequence[Plain], op: str) -> None:
    """As `reductions.reduce_into`, with the same bits.

    Args:
        out: the result; it may be one of the arrays.
        arrays: one or more, of out's shape.
        op: 'sum', 'prod', 'min' or 'max'.
    """
    if out.nbytes <= BLOCK_BYTES:
        reduce_into(out, arrays, op)
    elif len(arrays) == 1:
        if out is not arrays[0]:
            copy_each([(out, arrays[0])])
    elif any(_overlap_unevenly(out, array) for array in arrays):
        reduce_into(out, arrays, op)
    elif out.nbytes * (len(arrays) - 1) < SPLIT_BYTES or not _two_may_work():
        _reduce(op, out, *arrays)
    else:
        _run(deque((_reduce, (op, *cut)) for cut in _cuts((out, *arrays), PIECE_BYTES)))


def _copy(dst: Plain, src: Plain) -> None:
    """A piece of a copy."""
    dst[...] = src


def _reduce(op: str, out: Plain, *arrays: Plain) -> None:
    """A piece of a reduction, or all of it."""
    if len(arrays) == 2:
        reduce_into(out, arrays, op)
        return
    for block, *parts in _cuts((out, *arrays), BLOCK_BYTES):
        reduce_into(block, parts, op)


def _overlap_unevenly(out: Plain, array: Plain) -> bool:
    """True if the arrays share memory other than element by element, so that the order of pieces may matter."""
    if out is array or not np.may_share_memory(out, array):
        return False
    same = out.strides == array.strides and out.__array_interface__["data"] == array.__array_interface__["data"]
    return not same


def _cuts(arrays: Sequence[Plain], nbytes: int) -> Iterator[tuple[Plain, ...]]:
    """Views that cut arrays of one shape alike, along the dimension in which the first one's elements lie farthest.

    Args:
        arrays: the arrays.
        nbytes: about how much of the first one a cut has.
    """
    if arrays[0].nbytes <= nbytes:
        yield tuple(arrays)
        return
    if all(array.flags.c_contiguous for array in arrays):
        arrays = [array.reshape(-1) for array in arrays]
    first = arrays[0]
    strides = [abs(stride) if n > 1 else 0 for stride, n in zip(first.strides, first.shape, strict=True)]
    dim = strides.index(max(strides))
    n = first.shape[dim]
    step = max(1, n * nbytes // first.nbytes)
    for start in range(0, n, step):
        place = (*(slice(None),) * dim, slice(start, start + step))
        yield tuple(array[place] for array in arrays)


class _Job:
    """Pieces of one call, for the caller and the helper to take from until none is left."""

    def __init__(self, pieces: deque[_Piece]) -> None:
        self._pieces = pieces
        self._error: BaseException | None = None
        self._turn = threading.Lock()
        """Whoever takes it first says whether the helper takes part."""
        self._left = threading.Lock()
        """Free once the helper is done."""
        self._left.acquire()
        self.helped = False
        """True if the helper took part."""
        self.worked_s = 0.0
        """How long the caller was at its own share."""
        self.waited_s = 0.0
        """How long it then waited for the helper."""

    def run(self) -> None:
        """Do the caller's share, which may be all; return when every piece is done."""
        begin_s = perf_counter()
        try:
            self._take()
        finally:
            self._pieces.clear()
            end_s = perf_counter()
            self.worked_s = end_s - begin_s
            if not self._turn.acquire(blocking=False):
                self.helped = True
                self._left.acquire()
                self.waited_s = perf_counter() - end_s
        if self._error is not None:
            raise self._error

    def help(self) -> None:
        """Do the helper's share, unless the caller is through."""
        if not self._turn.acquire(blocking=False):
            return
        try:
            self._take()
        except BaseException as error:  # raised in the caller
            self._error = error
            self._pieces.clear()
        finally:
            self._left.release()

    def _take(self) -> None:
        """Do pieces until none is left."""
        while True:
            try:
                do, args = self._pieces.popleft()
            except IndexError:
                return
            do(*args)


class _Helper:
    """The process's second thread for such work, started when there is first some."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._rest_s = SHORTEST_REST_S
        self._rests_until_s = 0.0

    def rests(self) -> bool:
        """True for a while after it brought nothing."""
        return perf_counter() < self._rests_until_s

    def offer(self, job: _Job) -> None:
        """Have the helper join a job when it gets to it."""
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._serve, name="ncclcomm-host-work", daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    return  # no more threads here, or the process is at its end: the caller does all
                self._thread = thread
        self._jobs.put(job)

    def learn(self, job: _Job) -> None:
        """See from a job that is done whether it pays to go on so."""
        if not job.helped or job.waited_s > job.worked_s:
            self._rests_until_s = perf_counter() + self._rest_s
            self._rest_s = min(2 * self._rest_s, LONGEST_REST_S)
        else:
            self._rest_s = max(self._rest_s / 2, SHORTEST_REST_S)

    def _serve(self) -> None:
        """The helper's whole life."""
        while True:
            self._jobs.get().help()


_helper = _Helper()


def _replace_helper() -> None:
    """In a forked child: there is no such thread, and one of the parent's may hold the lock."""
    global _helper
    _helper = _Helper()


os.register_at_fork(after_in_child=_replace_helper)


@functools.cache
def _cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _two_may_work() -> bool:
    """True if it's worth while to cut large work into pieces."""
    return _cores() > 1 and not _helper.rests()


def _run(pieces: deque[_Piece]) -> None:
    """Do all pieces, in any order."""
    job, helper = _Job(pieces), _helper
    if len(pieces) == 1:
        job.run()
        return
    helper.offer(job)
    job.run()
    helper.learn(job)
