"""Programs of one text that ranks run, under plain mpiexec."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from flavours import Flavour

__all__ = ["ENDS_WITHIN_S", "run_program"]

ENDS_WITHIN_S = 20.0
"""Far above the 5 s that a job on an idle machine takes to end, far below what a hang would take."""

_HEAD = """
import os, signal, sys, threading, time
import numpy as np
import ncclcomm
comm = ncclcomm.init({init})
comm.all_reduce(np.ones(3))
"""


def run_program(
    flavour: Flavour, folder: Path, body: str, init: str = "", n: int = 3, **env: str
) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run a program on n ranks.

    Args:
        flavour: the MPI to run with.
        folder: where the program is written.
        body: what follows a first all_reduce (call 0) of the world communicator `comm`.
        init: the arguments of ncclcomm.init, as text.
        n: number of ranks.
        **env: variables for the ranks.

    Returns:
        How it ended, and after how many seconds.
    """
    script = folder / "program.py"
    script.write_text(_HEAD.format(init=init) + body)
    start = time.monotonic()
    ended = flavour.run(n, [script], env=env, timeout_s=60)
    return ended, time.monotonic() - start
