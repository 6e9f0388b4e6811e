"""Messages between one rank and several others, which no exception leaves to MPI alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

__all__ = ["post_and_wait"]

_unfinished: dict[int, Any] = {}
"""By id of the requests: those that were not waited for, and their memory, which MPI may still read or write."""


def post_and_wait(
    post: Callable[..., MPI.Request],
    messages: Sequence[tuple[Any, ...]],
    members: Sequence[int],
    copies: Sequence[tuple[Any, Any]],
) -> None:
    """Send messages to members, or receive them, and copy this rank's own data meanwhile.

    After an exception, too, this waits for what is posted. MPI works on the caller's memory until then; and the
    exception of a signal that comes a moment later, in MPI's own wait, comes after the wait as well.

    Args:
        post: a communicator's Isend or Irecv.
        messages: for each member, what MPI takes as a buffer.
        members: whom each goes to, or comes from.
        copies: arrays, each with the one that fills it.
    """
    requests: list[MPI.Request] = []
    try:
        # One call, in which no signal is handled: no request is lost on its way into the list.
        requests.extend(map(post, messages, members))
        for target, source in copies:
            np.copyto(target, source)
        _wait(requests)
    except BaseException as error:
        _unfinished[id(requests)] = (requests, messages)
        if not isinstance(error, MPI.Exception):  # after which nothing may ever end
            _wait(requests)
            del _unfinished[id(requests)]
        raise


def _wait(requests: list[MPI.Request]) -> None:
    """Wait for all of them; those that have ended count as nothing."""
    if len(requests) == 1:
        requests[0].Wait()
    elif requests:
        MPI.Request.Waitall(requests)
