"""A real Slurm of two hosts, started by slurm.sh, and jobs in it."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.fake_hosts import Hosts
from flavours import Flavour, clean_env, missing

__all__ = [
    "PMI",
    "ROOT",
    "SCRIPTS",
    "SECONDS",
    "TELL",
    "Ended",
    "Slurm",
    "batch",
    "slurm_cluster",
    "told",
    "turned_on",
]

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "slurm"
SECONDS = 20.0
"""What "in seconds" means for the end of a job, on a busy machine."""
PMI = {"mpich": "pmi2", "openmpi": "pmix", "intelmpi": "pmi2"}
"""What each flavour needs as srun's --mpi."""

_UNENDED = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
_PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
}


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    state: str
    """COMPLETED, FAILED, CANCELLED, ..."""
    status: int
    """Exit status of the batch script; 128 + N if signal N ended it."""
    output: str
    """What the job printed, stderr among it."""


def _why_not() -> str | None:
    """What is missing for a Slurm of one's own; None if nothing is."""
    for program, package in _PACKAGES.items():
        if shutil.which(program) is None and not Path("/usr/sbin", program).exists():
            return f"no {program}: apt-get install slurmctld slurmd slurm-client munge ({package} has it)"
    return None


class Slurm:
    """A Slurm whose nodes are fake hosts with four fake GPUs each; see slurm.sh.

    Args:
        hosts: hosts that are up.
    """

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.folder = hosts.folder / "slurm"
        try:
            self._script("up", str(len(hosts.names)))
        except subprocess.CalledProcessError as error:
            pytest.fail(f"slurm.sh up: {error.stderr}", pytrace=False)
        self.mpi_types = self.client("srun", "--mpi=list").split()
        self._idle = self._processes()

    def _script(self, *args: str) -> None:
        """Call slurm.sh."""
        subprocess.run(
            [Path(__file__).with_name("slurm.sh"), *args],
            env={**clean_env(), **self.hosts.env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )

    def _processes(self) -> dict[str, list[int]]:
        """What runs in each host."""
        return {host: self.hosts.pids(host) for host in self.hosts.names}

    def daemons(self) -> dict[str, int]:
        """Process of each daemon, by the file that it wrote it to."""
        files = [*self.folder.glob("*.pid"), self.folder / "munge" / "pid"]
        return {file.name: int(file.read_text()) for file in files}

    def client(
        self, *argv: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout_s: float = 60.0
    ) -> str:
        """Run a client of Slurm in h1; what it prints.

        Args:
            argv: the client and its arguments.
            env: the whole environment, which sbatch gives on to the job; None takes this process's.
            cwd: where it runs, and a job too.
            timeout_s: seconds until it is killed.
        """
        whole = {**(clean_env() if env is None else env), **self.hosts.env}
        done = subprocess.run(
            self.hosts.command("h1", argv),
            env={**whole, "SLURM_CONF": str(self.folder / "slurm.conf")},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode:
            pytest.fail(f"{' '.join(map(str, argv))} exited {done.returncode}: {done.stdout}{done.stderr}", False)
        return done.stdout

    def env(self, flavour: Flavour, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment in which a user of that flavour submits: VENV, and what the flavour needs on this machine."""
        if PMI[flavour.name] not in self.mpi_types:
            missing(f"slurm with {PMI[flavour.name]}", f"srun --mpi=list has {self.mpi_types}: install libpmix-dev")
        python = Path(flavour.python)
        # As docs/slurm.md has it for srun by hand; the scripts set it themselves.
        provider = {"FI_PROVIDER": "^sockets,udp"} if flavour.name == "mpich" else {}
        return flavour.env({"VENV": str(python.parents[1]), "PYTHONPATH": str(ROOT), **provider, **(extra or {})})

    @contextmanager
    def running(
        self,
        flavour: Flavour,
        job: Sequence[str | Path],
        *,
        cwd: Path,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> Iterator[str]:
        """Submit a batch script from h1, with VENV and the settings of an MPI flavour, and kill what is left of it.

        Args:
            flavour: whose Python the job runs.
            job: the batch script and its arguments.
            cwd: where it runs; its output goes to a file there.
            options: of sbatch, on top of what the script says.
            env: variables on top of the flavour's.

        Yields:
            The job's number.
        """
        # Cores that are not there must not decide how many jobs fit.
        argv = ["sbatch", "--parsable", "--output=job-%j", "--cpus-per-task=1", *options, *job]
        number = self.client(*argv, env=self.env(flavour, env), cwd=cwd).strip()
        try:
            yield number
        finally:
            if self.facts(number)["JobState"] in _UNENDED:
                self.client("scancel", "--full", "--signal=KILL", number)
                self.client("scancel", number)

    def facts(self, job: str) -> dict[str, str]:
        """What Slurm says of a job, by Slurm's names."""
        pairs = (word.partition("=") for word in self.client("scontrol", "-o", "show", "job", job).split())
        return {name: value for name, _, value in pairs}

    def output(self, job: str) -> str:
        """What the job has printed so far."""
        path = Path(self.facts(job)["StdOut"])
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, job: str, timeout_s: float = 60.0) -> Ended:
        """Wait for a job's end, and for its processes to be gone from all hosts; at the deadline the test fails."""
        end = time.monotonic() + timeout_s
        while (facts := self.facts(job))["JobState"] in _UNENDED:
            if time.monotonic() > end:
                pytest.fail(f"job {job} is {facts['JobState']} after {timeout_s:g} s:\n{self.output(job)}", False)
            time.sleep(0.1)
        code, number = map(int, facts["ExitCode"].split(":"))
        ended = Ended(facts["JobState"], 128 + number if number else code, self.output(job))
        end = time.monotonic() + SECONDS
        while (running := self._processes()) != self._idle:
            if time.monotonic() > end:
                pytest.fail(f"job {job} left processes: {running} instead of {self._idle}\n{ended.output}", False)
            time.sleep(0.05)
        return ended

    def run(
        self,
        flavour: Flavour,
        job: Sequence[str | Path],
        *,
        cwd: Path,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> Ended:
        """Run a job to its end; see running and wait."""
        with self.running(flavour, job, cwd=cwd, options=options, env=env) as number:
            return self.wait(number, timeout_s)

    def close(self) -> None:
        """End all jobs and daemons."""
        self._script("down")


@pytest.fixture(scope="module", name="slurm")
def slurm_cluster(hosts: Callable[..., Hosts]) -> Iterator[Slurm]:
    """A Slurm of two hosts, the module's own."""
    reason = _why_not()
    if reason:
        missing("slurm", reason)
    cluster = Slurm(hosts(2))
    yield cluster
    cluster.close()


def batch(path: Path, *lines: str) -> Path:
    """Write a batch script of these lines."""
    path.write_text("\n".join(("#!/usr/bin/env bash", *lines, "")))
    return path


def turned_on(script: str, folder: Path, *options: str) -> Path:
    """A copy of a script of slurm/ in which the `##SBATCH` lines of these options are on."""
    text = (SCRIPTS / f"{script}.sbatch").read_text()
    for option in options:
        assert text.count(f"\n##SBATCH --{option}") == 1, option
        text = text.replace(f"\n##SBATCH --{option}", f"\n#SBATCH --{option}")
    path = folder / f"{script}.sbatch"
    path.write_text(text)
    return path


TELL = """
import json, os, sys
from pathlib import Path

def tell(rank, **facts):
    # A file a rank: launchers mix up the lines of several.
    env = {name: value for name, value in os.environ.items() if name.startswith(("SLURM_", "CUDA_"))}
    facts = {"host": os.uname().nodename, "env": env, **facts}
    Path(f"told-{rank}.json").write_text(json.dumps(facts))
"""
"""Head of a program whose ranks leave what they find."""


def told(folder: Path) -> list[dict[str, Any]]:
    """What each rank told, in rank order."""
    count = len(list(folder.glob("told-*.json")))
    return [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(count)]
