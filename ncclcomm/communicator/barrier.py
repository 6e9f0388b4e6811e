"""Barrier over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ncclcomm.communicator.agree import Facts, agree
from ncclcomm.communicator.call import begin, end, in_call

if TYPE_CHECKING:
    from ncclcomm.communicator.communicator import Communicator

__all__ = ["barrier"]


def barrier(comm: Communicator, timeout_s: float | None) -> None:
    """See Communicator.barrier."""
    quick = comm._quick
    if quick is None or timeout_s is not None or comm._entry is not None or quick.is_over():
        in_call(comm, "barrier", (), timeout_s, lambda: _wait(comm))
        return
    try:
        begin(comm, "barrier", (), None)
        comm._calls += 1
        quick.barrier()
        end(comm, None, None)
    except BaseException as error:  # whatever it is, the communicator must know
        quick.fail(comm, error)


def _wait(comm: Communicator) -> None:
    """The long way."""
    agree(comm, "barrier", lambda: Facts(None, {}, {}))
    comm._member.barrier()
