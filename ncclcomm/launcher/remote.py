"""What is done on other hosts over ssh beside starting ranks: a look before the start, a sweep after a loss."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from ncclcomm.launcher.command import CHILD

__all__ = ["SSH_OPTIONS", "check_hosts", "sweep_hosts"]

SSH_OPTIONS = (
    *("-o", "BatchMode=yes", "-o", "ConnectTimeout=5"),
    *("-o", "ServerAliveInterval=3", "-o", "ServerAliveCountMax=3"),
)
"""Never ask for a password, and give up a host that doesn't answer for 9 to 12 s; other values in --ssh win."""

_CHECK_LIMIT_S = 20.0
_SWEEP_LIMIT_S = 10.0

# Both read by a POSIX shell of another host, from its standard input. A host's start-up files may print lines of their
# own, so that those which count begin with a word that only this job knows.
_LOOK = """
id=$1 folder=$2 python=$3 child=$4 script=$5
fail() { echo "$id $*"; exit 0; }
cd "$folder" 2>/dev/null || fail "has no folder $folder; the project must be at the same path on every host"
[ -x "$python" ] || fail "has no $python; the Python environment must be at the same path on every host"
[ -r "$child" ] || fail "has no $child; ncclcomm must be installed at the same path on every host"
[ -z "$script" ] || [ -r "$script" ] || fail "has no file $script in $folder"
"$python" -c "import mpi4py" >/dev/null 2>&1 </dev/null || fail "has no mpi4py that works in the environment of $python"
echo "$id ready"
"""
_SWEEP = """
while found=$(grep -sl "NCCLCOMM_JOB_ID=$1" /proc/[0-9]*/environ); [ -n "$found" ]; do
    for file in $found; do file=${file#/proc/}; kill -9 "${file%/environ}" 2>/dev/null; done
done
"""


def check_hosts(
    hosts: Sequence[str],
    *,
    ssh: Sequence[str],
    folder: str,
    python: str,
    script: str | None,
    environ: Mapping[str, str] | None = None,
) -> list[str]:
    """Look at all hosts at once, whether ranks can run there; returns within 20 s.

    This host is looked at too, by its name in the list, as the MPI launcher may reach it in the same way.

    Args:
        hosts: names for ssh.
        ssh: words of the ssh command, to which SSH_OPTIONS are added.
        folder: where the ranks run.
        python: path of their interpreter.
        script: path of the program, from `folder`; None for a module.
        environ: the environment of ssh; None: this process's.

    Returns:
        A line for each host that is not as it must be, in the order of `hosts`.
    """
    token = secrets.token_hex(8)
    words = [token, folder, python, CHILD, script or ""]
    problems = []
    for host, status, output, errors in _everywhere(hosts, ssh, _LOOK, words, _CHECK_LIMIT_S, environ):
        answers = [line.partition(" ")[2] for line in output.splitlines() if line.startswith(f"{token} ")]
        if "ready" in answers:
            continue
        if answers:
            problems.append(f"host {host} {answers[0]}")
        elif status is None:
            problems.append(f"host {host} did not answer within {_CHECK_LIMIT_S:g} s")
        else:
            reason = (errors.strip().splitlines() or [f"{ssh[0]} ended with status {status}"])[-1]
            problems.append(f"host {host} can't be reached: {reason}")
    return problems


def sweep_hosts(hosts: Sequence[str], *, ssh: Sequence[str], job_id: str, environ: Mapping[str, str]) -> None:
    """Kill what a job left on its hosts, as far as they can be reached within 10 s.

    Args:
        hosts: names for ssh.
        ssh: words of the ssh command, to which SSH_OPTIONS are added.
        job_id: the value of NCCLCOMM_JOB_ID in the job's processes.
        environ: the environment of ssh, which must not have that mark.
    """
    _everywhere(hosts, ssh, _SWEEP, [job_id], _SWEEP_LIMIT_S, environ)


@dataclass(frozen=True)
class _Call:
    """An ssh to one host."""

    host: str
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    errors: IO[bytes]

    def wait(self, end_at: float) -> tuple[str, int | None, str, str]:
        """The host, the exit status (None: it has not ended by then), the output and the errors."""
        status = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self.process.wait(max(0.0, end_at - time.monotonic()))
        texts = []
        for file in (self.output, self.errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return self.host, status, texts[0], texts[1]

    def close(self) -> None:
        """End what still runs."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def _everywhere(
    hosts: Sequence[str],
    ssh: Sequence[str],
    script: str,
    words: Sequence[str],
    limit_s: float,
    environ: Mapping[str, str] | None,
) -> list[tuple[str, int | None, str, str]]:
    """Run a script on all hosts at once; see _Call.wait for what comes back."""
    command = " ".join(["sh", "-s", "--", *map(shlex.quote, words)])
    end_at = time.monotonic() + limit_s
    calls: list[_Call] = []
    with contextlib.ExitStack() as stack:
        for host in hosts:
            # Files: an ssh that leaves a process behind would keep a pipe open.
            source, output, errors = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
            source.write(script.encode())
            source.seek(0)
            process = subprocess.Popen(
                [*ssh, *SSH_OPTIONS, host, command],
                stdin=source,
                stdout=output,
                stderr=errors,
                env=environ,
                start_new_session=True,
            )
            calls.append(_Call(host, process, output, errors))
            stack.callback(calls[-1].close)
        return [call.wait(end_at) for call in calls]
