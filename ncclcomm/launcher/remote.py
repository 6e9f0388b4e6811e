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
from pathlib import Path

from ncclcomm.launcher.command import CHILD

__all__ = ["SSH_OPTIONS", "check_hosts", "sweep_hosts"]

SSH_OPTIONS = (
    *("-o", "BatchMode=yes", "-o", "ConnectTimeout=5"),
    *("-o", "ServerAliveInterval=3", "-o", "ServerAliveCountMax=3"),
)
"""Never ask for a password, and give up a host that doesn't answer for 9 to 12 s; other values in --ssh win."""

_NOT_STARTED = 255
"""The status of an ssh that could not be started, as that of one that fails."""
_CHECK_LIMIT_S = 20.0
_SWEEP_LIMIT_S = 20.0
"""More than the 10 s that the script below gives processes to end."""

# Both read by a POSIX shell of another host, from its standard input. A host's start-up files may print lines of their
# own, so that those which count begin with a word that only this job knows.
_LOOK = """
id=$1 folder=$2 python=$3 child=$4 script=$5
fail() { echo "$id $*"; exit 0; }
cd "$folder" 2>/dev/null || fail "has no folder $folder; the project must be at the same path on every host"
[ -x "$python" ] || fail "has no $python; the Python environment must be at the same path on every host"
[ -r "$child" ] || fail "has no $child; ncclcomm must be installed at the same path on every host"
[ -z "$script" ] || [ -r "$script" ] || fail "has no file $script in $folder"
count="import mpi4py, os; print(len(os.sched_getaffinity(0)))"
cores=$("$python" -c "$count" 2>/dev/null </dev/null) || fail "has no mpi4py that works in the environment of $python"
echo "$id ready $(uname -n) ${cores##*[!0-9]}"
"""
_SWEEP = r"""
id=$1 token=$2 end=$(($(date +%s) + 10))
while found=$(grep -sl "NCCLCOMM_JOB_ID=$id" /proc/[0-9]*/environ | tr -dc '0-9\n' | xargs); [ -n "$found" ]; do
    kill -9 $found 2>/dev/null
    [ "$(date +%s)" -lt "$end" ] || { echo "$token $found"; exit 0; }
    sleep 0.05
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
) -> tuple[list[str], dict[str, int]]:
    """Look at all hosts at once, whether ranks can run there, and on how many cores; returns within 20 s.

    This host is looked at too, by its name in the list, as the MPI launcher may reach it in the same way.

    Args:
        hosts: names for ssh.
        ssh: words of the ssh command, to which SSH_OPTIONS are added.
        folder: where the ranks run.
        python: path of their interpreter.
        script: path of the program, from `folder`; None for a module.
        environ: the environment of ssh; None: this process's.

    Returns:
        A line for each host that is not as it must be, in the order of `hosts`; and of the others, as far as they tell
        it, the number of cores that a process may use there.
    """
    token = secrets.token_hex(8)
    words = [token, folder, python, CHILD, script or ""]
    problems, cores = [], {}
    for host, status, output, errors in _everywhere(hosts, ssh, _LOOK, words, _CHECK_LIMIT_S, environ):
        answers = [line.partition(" ")[2] for line in output.splitlines() if line.startswith(f"{token} ")]
        ready = next((answer.split() for answer in answers if answer.startswith("ready")), [])
        if ready[2:]:  # a Python that prints lines of its own may hide the number
            cores[host] = int(ready[2])
            if ready[1] == os.uname().nodename:  # whose ranks MPI launchers start without ssh
                cores[host] = min(cores[host], len(os.sched_getaffinity(0)))
        if ready:
            continue
        if answers:
            problems.append(f"host {host} {answers[0]}")
        elif status is None:
            problems.append(f"host {host} did not answer within {_CHECK_LIMIT_S:g} s")
        else:
            reason = (errors.strip().splitlines() or [f"{ssh[0]} ended with status {status}"])[-1]
            problems.append(f"host {host} can't be reached: {reason}")
    return problems, cores


def sweep_hosts(hosts: Sequence[str], *, ssh: Sequence[str], job_id: str, environ: Mapping[str, str]) -> list[str]:
    """Kill what a job left on its hosts, as far as they can be reached; returns within 20 s.

    Args:
        hosts: names for ssh.
        ssh: words of the ssh command, to which SSH_OPTIONS are added.
        job_id: the value of NCCLCOMM_JOB_ID in the job's processes.
        environ: the environment of ssh, which must not have that mark.

    Returns:
        A line for each host that has processes that do not end on SIGKILL within 10 s, in the order of `hosts`.
    """
    token = secrets.token_hex(8)
    return [
        f"processes {', '.join(line.split()[1:])} on host {host} do not end on SIGKILL"
        for host, _, output, _ in _everywhere(hosts, ssh, _SWEEP, [job_id, token], _SWEEP_LIMIT_S, environ)
        for line in output.splitlines()
        if line.startswith(f"{token} ")
    ]


@dataclass(frozen=True)
class _Call:
    """An ssh to one host."""

    host: str
    process: subprocess.Popen[bytes] | None
    """None if it could not be started."""
    output: Path
    errors: Path

    def wait(self, end_at: float) -> tuple[str, int | None, str, str]:
        """The host, the exit status (None: it has not ended by then), the output and the errors."""
        status: int | None = _NOT_STARTED
        if self.process:
            status = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self.process.wait(max(0.0, end_at - time.monotonic()))
        output, errors = (file.read_text(errors="replace") for file in (self.output, self.errors))
        return self.host, status, output, errors

    def close(self) -> None:
        """End what still runs."""
        if self.process and self.process.poll() is None:
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
    with contextlib.ExitStack() as stack:
        # Files: an ssh that leaves a process behind would keep a pipe open. Closed here, as there may be many hosts.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ncclcomm-", ignore_cleanup_errors=True)))
        (folder / "script").write_text(script)
        calls = []
        for number, host in enumerate(hosts):
            call = _start([*ssh, *SSH_OPTIONS, host, command], host, folder, f"{number}", environ)
            stack.callback(call.close)
            calls.append(call)
        return [call.wait(end_at) for call in calls]


def _start(argv: Sequence[str], host: str, folder: Path, name: str, environ: Mapping[str, str] | None) -> _Call:
    """Start an ssh that reads the folder's script."""
    output, errors = folder / f"{name}.out", folder / f"{name}.err"
    process = None
    with (folder / "script").open("rb") as source, output.open("wb") as out, errors.open("wb") as err:
        try:
            process = subprocess.Popen(argv, stdin=source, stdout=out, stderr=err, env=environ, start_new_session=True)
        except OSError as error:  # such as too many processes
            err.write(str(error).encode())
    return _Call(host, process, output, errors)
