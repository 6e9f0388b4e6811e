"""What this machine has to offer to ranks."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from ncclcomm.errors import BackendUnavailableError

__all__ = ["count_gpus", "physical_cores"]

_COUNT_TIMEOUT_S = 60.0
_PACKAGES = str(Path(__file__).resolve().parents[2])
_COUNT = (
    "import sys; sys.path[:1] = sys.argv[1:]\n"
    "import ncclcomm; count = ncclcomm.device_count(); print(count if ncclcomm.is_available() else 0)"
)


def physical_cores(system: Path = Path("/sys")) -> int:
    """Number of physical cores that this process may use, 1 or more.

    Hardware threads of a core count once. In a container whose share of processor time is limited, no more than that.

    Args:
        system: where the kernel shows its devices.
    """
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = system / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        cores.add(siblings.read_text() if siblings.exists() else str(cpu))
    share = system / "fs/cgroup/cpu.max"
    quota, _, period = (share.read_text() if share.exists() else "max").partition(" ")
    return len(cores) if quota.strip() == "max" else max(1, min(len(cores), math.ceil(int(quota) / int(period))))


def count_gpus(environ: Mapping[str, str]) -> int:
    """Number of GPUs that ranks on this host would see, found by a child process; 0 where they'd use virtual devices.

    Args:
        environ: the ranks' whole environment.

    Raises:
        BackendUnavailableError: GPUs are asked for or allotted, and do not work.
    """
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _COUNT, _PACKAGES],
            env=dict(environ),
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_COUNT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BackendUnavailableError(f"counting GPUs took over {_COUNT_TIMEOUT_S:g} s: give -n a number") from error
    if asked.returncode:
        reason = (asked.stderr.strip() or f"exit status {asked.returncode}").splitlines()[-1]
        raise BackendUnavailableError(f"the GPUs of this host can't be counted: {reason}")
    last = (asked.stdout.strip() or "nothing").splitlines()[-1]  # what starts with Python may print lines before it
    if not re.fullmatch(r"[0-9]{1,6}", last):
        raise BackendUnavailableError(f"counting GPUs printed {last!r}, not a number: give -n a number")
    return int(last)
