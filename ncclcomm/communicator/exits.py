"""What happens when this process leaves while other ranks may wait for it."""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import fcntl
import io
import os
import signal
import stat
import sys
import termios
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TextIO

from ncclcomm.communicator.board import BOARD

__all__ = ["end_job", "guard_exit", "wait_until_read"]

_READ_WITHIN_S = 1.0

_OTHERS_ARE_TOLD_S = 3.0
"""Ranks come to the end of a limit at different times, and a report takes 2 s where a rank is silent."""

_guarded: set[int] = set()
_hooked: set[int] = set()
_supervised: set[int] = set()
"""Processes that `ncclcomm run` watches."""


def guard_exit(mpi: Any, *, hooks: bool, supervised: bool, say_goodbye: Callable[[], None]) -> None:
    """Make an uncaught exception end all ranks, and tell the watchdogs when this process ends; once a process.

    Args:
        mpi: the module mpi4py.MPI.
        hooks: whether exceptions end all ranks; the exit is taken over in any case.
        supervised: whether `ncclcomm run` ends the other ranks, after a grace that MPI would not give them, when this
            process fails.
        say_goodbye: tells the other ranks that this process makes no further call; called at its end.
    """
    if supervised:
        _supervised.add(os.getpid())
    if hooks and os.getpid() not in _hooked:
        _hooked.add(os.getpid())
        _end_the_job_on_exceptions(mpi, supervised)
    if os.getpid() in _guarded:
        return
    _guarded.add(os.getpid())
    # mpi4py finalises MPI when the interpreter is gone, and with it the watchdog that can tell of this rank.
    atexit.register(_leave, mpi, os.getpid(), say_goodbye)


def wait_until_read(stream: TextIO) -> None:
    """Wait, a second at most, until the launcher has read what was written to it: an abort can overtake it."""
    with contextlib.suppress(OSError, ValueError):
        descriptor = stream.fileno()
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return
        deadline = time.monotonic() + _READ_WITHIN_S
        unread = array.array("i", [1])
        while unread[0] and time.monotonic() < deadline:
            fcntl.ioctl(descriptor, termios.FIONREAD, unread)
            time.sleep(0.005)


def end_job(status: int) -> None:
    """End all ranks because this one waits in vain, which it has reported; it may return.

    Args:
        status: the job's exit status, where no `ncclcomm run` ends it.
    """
    if os.getpid() in _supervised:
        # MPI_Abort would kill the process that watches this one before it can tell who ended the job; see
        # launcher/watch.py. And the end of this one might break connections, upon which others fail.
        os.kill(os.getppid(), signal.SIGRTMIN)
        threading.Event().wait()
    from ncclcomm.transport import mpi

    mpi.end_job(status)


def _abort(mpi: Any, supervised: bool = False) -> None:
    """End all ranks, or this one where others are ended by who supervises it, once what was written is read."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
            wait_until_read(stream)
    if not supervised and not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(1)
    # MPICH's MPI_Abort can return to the caller.
    os._exit(1)


def _end_the_job_on_exceptions(mpi: Any, supervised: bool) -> None:
    """Install hooks for the main thread and the others; not alone, nor in a notebook, which goes on."""
    if "ipykernel" in sys.modules or mpi.COMM_WORLD.Get_size() == 1:
        return
    shown, shown_of_threads, rank = sys.excepthook, threading.excepthook, os.getpid()
    if shown is sys.__excepthook__:
        shown = _show_at_once

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if _goes_on():
            shown(kind, error, traceback)
            return
        BOARD.leaving = f"raised {kind.__name__}: {error}"
        shown(kind, error, traceback)
        if os.getpid() == rank and not supervised:  # a forked child is no rank
            _say_who_ends_the_job(mpi)
            _abort(mpi)

    def thread_hook(raised: threading.ExceptHookArgs) -> None:
        shown_of_threads(raised)
        if raised.exc_type is not SystemExit and os.getpid() == rank and not _goes_on():
            BOARD.leaving = f"raised {raised.exc_type.__name__} in a thread: {raised.exc_value}"
            if not supervised:
                _say_who_ends_the_job(mpi)
            _abort(mpi, supervised)

    sys.excepthook = hook
    threading.excepthook = thread_hook


def _goes_on() -> bool:
    """True in an interactive interpreter, which goes on after an exception; one can begin at any time."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def _show_at_once(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Write the traceback in one piece, where Python writes it bit by bit: other ranks share the terminal."""
    whole, stream = io.StringIO(), sys.stderr
    sys.stderr = whole
    try:
        sys.__excepthook__(kind, error, traceback)
    finally:
        sys.stderr = stream
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no stderr, or a closed one
        stream.write(whole.getvalue())
        stream.flush()


def _say_who_ends_the_job(mpi: Any) -> None:
    """Name the rank and its host, which no traceback does."""
    if mpi.Is_finalized() or mpi.COMM_WORLD.Get_size() == 1:
        return
    rank = f"rank {mpi.COMM_WORLD.Get_rank()} of {mpi.COMM_WORLD.Get_size()}, on {os.uname().nodename}"
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"ncclcomm: nobody caught that exception in {rank}, which ends the job\n")


def _leave(mpi: Any, rank: int, say_goodbye: Callable[[], None]) -> None:
    """At exit of the process that is the rank: tell who asks, and end MPI while there still is a watchdog to answer."""
    if os.getpid() != rank:
        return
    BOARD.leaving = "its program has ended"
    if mpi.Is_finalized():
        return
    say_goodbye()
    if BOARD.unfinished:
        # MPI_Finalize would wait for what will never come; and ranks whose limit ends later are to be told as well.
        time.sleep(_OTHERS_ARE_TOLD_S)
        _abort(mpi, os.getpid() in _supervised)
    _finalize(mpi)


def _finalize(mpi: Any) -> None:
    """End MPI, which may wait for the other ranks; mpi4py would hold the interpreter from the watchdog meanwhile."""
    try:
        finalize = ctypes.CDLL(mpi.__file__).MPI_Finalize
    except (OSError, AttributeError):
        finalize = mpi.Finalize
    finalize()
    # A program's own handler that it registered before init comes after this one, and a second time is an abort.
    atexit.unregister(mpi.Finalize)
    mpi.Finalize = lambda: None
