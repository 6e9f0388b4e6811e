"""Says that a job does not start: MPI_Init holds the interpreter, so that a process of its own watches over it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from ncclcomm import config
from ncclcomm.communicator.checks import seconds_above_0
from ncclcomm.errors import ArgumentError

__all__ = ["watched_start"]

_WATCH = """
import contextlib, os, select, signal, sys

steps = sys.argv[1:]
while steps and not select.select([0], [], [], float(steps[0]))[0]:
    with contextlib.suppress(OSError):
        os.write(2, (steps[1] + chr(10)).encode())
    if steps[2]:
        os.kill(int(steps[2]), signal.SIGTERM)
        if not select.select([0], [], [], 2)[0]:
            os.kill(int(steps[2]), signal.SIGKILL)
    del steps[:3]
"""
"""Of each three arguments: how many seconds later what is said, and which process is ended then.

It is killed when the ranks have joined, and ends by itself, at the end of its input, when this process is gone.
"""


@contextlib.contextmanager
def watched_start(launch: config.Launch | None, timeout_s: float | None) -> Iterator[None]:
    """Report where the ranks that a launcher promised are not together after NCCLCOMM_STALL_S, and go on waiting.

    After a time limit this process is ended as well. Does nothing where the watchdogs are off.

    Args:
        launch: what the launcher promised.
        timeout_s: the limit that is passed; None takes NCCLCOMM_TIMEOUT_S.
    """
    steps = [] if launch is None or launch.size == 1 else _steps(launch, timeout_s)
    if not steps:
        yield
        return
    read, write = os.pipe()
    watch = None
    try:
        try:
            # In a session of its own: Ctrl-C is for the ranks.
            argv = [sys.executable, "-I", "-S", "-c", _WATCH, *steps]
            watch = subprocess.Popen(argv, stdin=read, stdout=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            print(f"ncclcomm: nothing watches over the start of the ranks: {error}", file=sys.stderr, flush=True)
        yield
    finally:
        if watch is not None:
            watch.kill()  # a fork of this process may keep the pipe open
            watch.wait()
        os.close(write)
        os.close(read)


def _steps(launch: config.Launch, timeout_s: float | None) -> list[str]:
    """The arguments of what watches; none where it has nothing to do."""
    try:
        settings = config.load()
        limit_s = settings.timeout_s if timeout_s is None else seconds_above_0(timeout_s)
    except ArgumentError:
        return []  # raised, on all ranks, once they have joined
    if not settings.watchdog:
        return []
    waits = (
        f"ncclcomm: rank {launch.rank} of {launch.size} has waited %g s in ncclcomm.init for the others: a rank ended "
        "before it came there, has not come yet, or can't be reached"
    )
    steps = []
    # A rank of a thousand need not say what the others do.
    is_speaker = launch.rank & (launch.rank - 1) == 0
    if is_speaker and (limit_s is None or settings.stall_s < limit_s):
        steps = [f"{settings.stall_s:g}", waits % settings.stall_s, ""]
    if limit_s is not None:
        after_s = limit_s - settings.stall_s if steps else limit_s
        steps += [f"{after_s:g}", f"{waits % limit_s}. The time limit is over, and the rank ends", str(os.getpid())]
    return steps
