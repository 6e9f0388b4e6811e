"""MPI flavours that tests start programs with, and the deadline under which they run.

A flavour is a Python whose mpi4py loads that MPI. `make test` names one Python per flavour, the first one in
NCCLCOMM_TEST_PYTHON_MPICH; by hand, the Python that runs pytest stands for the flavour it has.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest

__all__ = [
    "COMMON_FLAVOURS",
    "FAULTS_OF_OPENMPI",
    "FLAVOURS",
    "Flavour",
    "find",
    "missing",
    "private_sessions",
    "run_tree",
    "skipped_components",
]

COMMON_FLAVOURS = ("mpich", "openmpi")
"""What a test with the `flavour` fixture runs on unless it is marked: `pytest.mark.flavours(*FLAVOURS)`."""
FLAVOURS = (*COMMON_FLAVOURS, "intelmpi")
PRTERUN_HUNG = "Open MPI's mpiexec alone is left"
"""It waits for a lock in PMIx_server_finalize, after 1 of 100 calls of MPI_Abort over two hosts on a busy machine."""
FAULTS_OF_OPENMPI = ("mca_pml_ob1_recv_frag_callback_match", PRTERUN_HUNG)
"""What a test says that Open MPI 5.0 spoiled, which is run again then.

The first is where 1 of 70 starts under srun --mpi=pmix over two nodes crashes: a rank that left MPI_Init's fence sends
before another has set up MPI_COMM_WORLD (open-mpi/ompi issue 12495).
"""
DEADLINE_S = 120.0
_JOB = "NCCLCOMM_TEST_JOB"
_LAUNCHER_PREFIXES = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "HYDRA_", "MPIR_", "I_MPI_", "MPI_LOCAL", "SLURM_")

_VENDOR_ENV = {
    "mpich": {"MPIR_CVAR_CH4_NETMOD": "ofi"},
    "openmpi": {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_btl": "^ofi",
    },
    "intelmpi": {"I_MPI_PIN": "off"},
}
"""What makes more ranks than cores run, as root too, without each waiting rank holding a core."""

skipped_components: dict[str, str] = {}
"""Components that tests asked for and did not find, with the reason; shown at the end of the run."""


def missing(component: str, reason: str, *, ci_has_it: bool = True) -> NoReturn:
    """Skip the test that needs an absent component; with CI=true fail, where a CI machine must have it.

    Args:
        component: a short name, such as "openmpi".
        reason: what was looked for and what brings it.
        ci_has_it: False for what a CI machine may lack, such as a GPU.
    """
    if ci_has_it and os.environ.get("CI") == "true":
        pytest.fail(f"{component} is missing, and CI=true asks for it: {reason}", pytrace=False)
    skipped_components[component] = reason
    pytest.skip(f"{component}: {reason}")


def _pids_of(job: str) -> list[int]:
    """Processes that inherited the job's mark, wherever their parents are."""
    mark = f"{_JOB}={job}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue  # it ended meanwhile, or is another user's
    return found


def _names_of(pids: Sequence[int]) -> set[str]:
    """The names of those processes that live."""
    names = set()
    for pid in pids:
        try:
            name, state = Path(f"/proc/{pid}/stat").read_text().split("(", 1)[1].rsplit(") ", 1)
        except OSError:
            continue  # it ended meanwhile
        if not state.startswith("Z"):
            names.add(name)
    return names


def _command_lines(pids: Sequence[int]) -> list[str]:
    """What those processes run."""
    lines = []
    for pid in pids:
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue  # it ended meanwhile
        lines.append(line.replace(b"\0", b" ").decode(errors="replace").strip())
    return lines


def _kill_job(job: str, limit_s: float = 10.0) -> None:
    """Kill every process of the job, including those that a dying launcher starts or leaves behind."""
    end = time.monotonic() + limit_s
    while pids := _pids_of(job):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > end:
            raise AssertionError(f"processes {pids} of test job {job} survive SIGKILL")
        time.sleep(0.02)


def _survivors(job: str, grace_s: float) -> list[int]:
    """Processes of the job that outlive its launcher by more than the grace time."""
    end = time.monotonic() + grace_s
    while (pids := _pids_of(job)) and time.monotonic() < end:
        time.sleep(0.02)
    return pids


def run_tree(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    timeout_s: float = DEADLINE_S,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, or kill it and all its descendants at the deadline.

    Output goes through files, so a descendant that keeps a pipe open cannot hold the test.

    Args:
        argv: program and arguments.
        env: the whole environment; None takes this process's, less what a launcher put there.
        cwd: where it runs.
        timeout_s: seconds until everything is killed.

    Returns:
        Exit status and output.

    Raises:
        pytest.fail.Exception: at the deadline, or if a process of the job outlives its launcher by 5 s.
    """
    job = uuid.uuid4().hex
    full_env = {**(clean_env() if env is None else env), _JOB: job}
    with tempfile.TemporaryFile("w+b") as out, tempfile.TemporaryFile("w+b") as err:

        def output() -> tuple[str, str]:
            """What has been written so far."""
            texts = []
            for stream in (out, err):
                stream.seek(0)
                texts.append(stream.read().decode(errors="replace"))
            return texts[0], texts[1]

        process = subprocess.Popen(
            [str(a) for a in argv],
            env=full_env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout_s)
            left = _survivors(job, 5.0)
            trouble = left and f"left processes behind: {', '.join(_command_lines(left))}"
        except subprocess.TimeoutExpired:
            names = _names_of(_pids_of(job))
            status, trouble = None, f"did not end within {timeout_s:g} s; left: {', '.join(sorted(names))}"
            if names == {"prterun"}:
                trouble = PRTERUN_HUNG
        finally:
            _kill_job(job)
            process.wait()
        stdout, stderr = output()
    if status is None or trouble:
        command = " ".join(map(str, argv))
        pytest.fail(f"{command}\n{trouble}\n--- stdout\n{stdout}\n--- stderr\n{stderr}", pytrace=False)
    return subprocess.CompletedProcess(list(map(str, argv)), status, stdout, stderr)


def clean_env() -> dict[str, str]:
    """This process's environment without what an MPI launcher or SLURM put there, and with one thread a rank.

    And without PYTHONUNBUFFERED, by which a print of several words writes each alone, between those of other ranks.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHER_PREFIXES) and k != "PYTHONUNBUFFERED"}
    return {**env, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@contextmanager
def private_sessions() -> Iterator[dict[str, str]]:
    """A variable that gives an Open MPI job a session directory of its own.

    Jobs that start and end while they share one fail now and then (measured: 8 of 12,600 starts, status 213).
    """
    with tempfile.TemporaryDirectory(prefix="ncclcomm-test-", ignore_cleanup_errors=True) as folder:
        yield {"PRTE_MCA_prte_local_tmpdir_base": folder}


@dataclass(frozen=True)
class Flavour:
    """An MPI flavour: its Python and its launcher."""

    name: str
    python: str
    mpiexec: str

    def env(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment in which its ranks start."""
        path = f"{Path(self.python).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        return {**clean_env(), **_VENDOR_ENV[self.name], "PATH": path, **(extra or {})}

    def run(
        self,
        n: int,
        argv: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        timeout_s: float = DEADLINE_S,
        cwd: str | Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run `mpiexec -n N python ARGV...` under a deadline; see run_tree.

        Args:
            n: number of ranks.
            argv: arguments of Python: a script and its own, or -c and a program.
            env: variables on top of the flavour's own environment.
            timeout_s: seconds until the whole job is killed.
            cwd: where it runs.
        """
        with private_sessions() as sessions:
            return run_tree(
                [self.mpiexec, "-n", str(n), self.python, *argv],
                env=self.env({**sessions, **(env or {})}),
                timeout_s=timeout_s,
                cwd=cwd,
            )


_ASK_LIBRARY = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"

_LIBRARIES = {"Open MPI": "openmpi", "Intel": "intelmpi"}
"""Words of a library's version that tell its flavour; without them it is MPICH."""


@cache
def _library_of(python: str) -> str:
    """Name of the flavour that this Python's mpi4py loads, or why there is none."""
    try:
        asked = subprocess.run([python, "-c", _ASK_LIBRARY], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{python} does not run: {error}"
    if asked.returncode:
        return f"{python} cannot import mpi4py.MPI: {asked.stderr.strip().splitlines()[-1]}"
    return next((name for word, name in _LIBRARIES.items() if word in asked.stdout), "mpich")


@cache
def _locate(name: str) -> Flavour | str:
    """The flavour, or the reason why there is none."""
    variable = f"NCCLCOMM_TEST_PYTHON_{name.upper()}"
    python = os.environ.get(variable) or sys.executable
    library = _library_of(python)
    if library != name:
        return f"{python} has {library}; set {variable} to a Python with `pip install 'ncclcomm[{name},test]'`"
    beside = Path(python).parent / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    return Flavour(name, python, mpiexec) if mpiexec else f"no mpiexec beside {python} or on PATH"


def find(name: str) -> Flavour:
    """The flavour of that name, or a skip (with CI=true a failure) of the test that asks.

    Args:
        name: one of FLAVOURS.
    """
    found = _locate(name)
    if isinstance(found, str):
        missing(name, found)
    return found
