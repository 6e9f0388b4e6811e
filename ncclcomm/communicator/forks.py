"""Communicators in other processes: a forked child is no rank, and a call of its would be taken for its parent's."""

from __future__ import annotations

import os
import sys
import weakref
from typing import TYPE_CHECKING, NoReturn

from ncclcomm.errors import NcclCommError

if TYPE_CHECKING:
    from ncclcomm.communicator.communicator import Communicator

__all__ = ["end_in_children", "refuse_pickling", "refuse_to_join"]

_has_parents_mpi = False
_open: weakref.WeakSet[Communicator] = weakref.WeakSet()


def end_in_children(comm: Communicator) -> None:
    """Have a communicator of several ranks refuse its calls in every process forked from this one.

    Args:
        comm: the communicator.
    """
    if comm.size > 1:
        _open.add(comm)


def refuse_to_join() -> None:
    """Raise in a process that was forked from one that runs MPI, whose connections it would use.

    Raises:
        NcclCommError: in such a process.
    """
    if _has_parents_mpi:
        raise NcclCommError("init: this process was forked from a rank, and is none itself: call it in the rank")


def refuse_pickling(comm: Communicator) -> NoReturn:
    """Raise, in place of what a pickle or a copy would do first.

    Args:
        comm: the communicator.
    """
    raise TypeError("a Communicator belongs to its process: call ncclcomm.init() in the other one")


def _in_child() -> None:
    """This process was forked."""
    global _has_parents_mpi
    _has_parents_mpi = "mpi4py.MPI" in sys.modules
    for comm in list(_open):
        comm._quick = comm._quick_gpu = None
        comm._broken = (
            f"this process was forked from rank {comm.rank}, and is no rank itself; make the call in the rank"
        )
        comm._finalizer.detach()


os.register_at_fork(after_in_child=_in_child)
