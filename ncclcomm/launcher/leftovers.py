"""Finding and ending what a job left on this host: everything that inherited its mark."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from pathlib import Path

__all__ = ["kill_marked"]

_KILL_LIMIT_S = 10.0
_BETWEEN_LOOKS_S = 0.01


def kill_marked(job_id: str) -> list[int]:
    """Kill every process of a job on this host, until a look finds none.

    Args:
        job_id: the value of NCCLCOMM_JOB_ID in their environment.

    Returns:
        Processes that do not end on SIGKILL within 10 s.
    """
    end_at = time.monotonic() + _KILL_LIMIT_S
    while (left := _marked(job_id)) and time.monotonic() < end_at:
        for process in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        for process in left:
            _wait_gone(process, end_at)
    return left


def _marked(job_id: str) -> list[int]:
    """Processes that inherited the job's mark."""
    mark = f"NCCLCOMM_JOB_ID={job_id}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def _wait_gone(process: int, end_at: float) -> None:
    """Wait until a process that is no child of ours has ended."""
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return
    except (OSError, AttributeError):  # a kernel before 5.3, or a Python that was built for one
        time.sleep(_BETWEEN_LOOKS_S)
        return
    try:
        select.select([descriptor], [], [], max(0.0, end_at - time.monotonic()))
    finally:
        os.close(descriptor)
