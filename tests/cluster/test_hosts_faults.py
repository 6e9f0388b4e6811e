"""A rank on another host dies, leaves, stops or is cut off: the job ends under plain mpirun, and a report says who."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.fake_hosts import Hosts
from cluster.placed import Placed
from flavours import Flavour

ENDS_WITHIN_S = 15.0
"""From the fault to the end of the job."""

LIMIT_S = 3.0
"""The time limit of a call; a rank that is stopped or cut off is found by it alone."""

PROGRAM = """
import ctypes, os, signal, sys, threading, time
import numpy as np
import ncclcomm
limit_s, fault, folder = float(sys.argv[1]) or None, sys.argv[2], sys.argv[3]

def note(name, text=""):
    with open(f"{folder}/new-{name}", "w") as file:
        file.write(text)
    os.rename(f"{folder}/new-{name}", f"{folder}/{name}")

def fail_in_a_thread():
    failing = threading.Thread(target=lambda: [][1])
    failing.start(); failing.join(); time.sleep(60)

def stay():
    while not os.path.exists(f"{folder}/cut"):
        time.sleep(0.01)

comm = ncclcomm.init(timeout_s=limit_s)
comm.all_reduce(np.ones(3))
note(f"pid{comm.rank}", str(os.getpid()))
if fault == "cut":
    stay()
elif comm.rank == comm.size - 1:
    note("fault", repr(time.time()))
    exec(fault)
try:
    while True:
        comm.all_reduce(np.ones(3))
except ncclcomm.CommTimeoutError as error:
    note(f"told{comm.rank}", str(error))
"""

FAULTS = {
    "raise": ("raise LookupError('far away')", "LookupError: far away"),
    "thread": ("fail_in_a_thread()", "IndexError: list index out of range"),
    "exit 0": ("sys.exit(0)", "rank 2 will not come"),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", ""),
    "segfault": ("ctypes.string_at(0)", ""),
}
"""What the far rank does, and what must be shown of it once."""


@pytest.fixture(scope="module")
def pair(hosts: Callable[[int], Hosts]) -> Hosts:
    return hosts(2)


def run(placed: Placed, folder: Path, fault: str, limit_s: float = 0.0) -> subprocess.CompletedProcess[str]:
    """Run the program on two ranks of the first host and one of the second, under plain mpirun."""
    script = folder / "program.py"
    script.write_text(PROGRAM)
    env = {"PYTHONPATH": str(Path(__file__).parents[2])}
    return placed.run(3, [script, str(limit_s), fault, folder], env=env, timeout_s=60)


def nobody_is_left(hosts: Hosts) -> None:
    """Assert that no process of the job runs on any host."""
    for host in hosts.names:
        assert not hosts.pids(host), f"left on {host}: {hosts.pids(host)}"


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_far_rank_that_fails_ends_the_job(flavour: Flavour, pair: Hosts, tmp_path: Path, fault: str) -> None:
    does, shown = FAULTS[fault]
    ended = run(Placed.of(flavour, pair, "two and one"), tmp_path, does)
    seconds = time.time() - float((tmp_path / "fault").read_text())
    assert ended.returncode != 0
    assert seconds < ENDS_WITHIN_S
    assert not shown or ended.stderr.count(shown) == 1, ended.stderr
    assert ended.stderr.count("Traceback (most recent call last)") == (fault in ("raise", "thread")), ended.stderr
    if fault in ("raise", "thread"):
        assert "in rank 2 of 3, on h2, which ends the job" in ended.stderr, ended.stderr
    elif fault == "exit 0":
        assert "ncclcomm: rank 0 (node 0, local 0) on h1: waited" in ended.stderr, ended.stderr
        assert "  rank 2 (node 1, local 0) on h2: " in ended.stderr, ended.stderr
    elif flavour.name != "openmpi":  # there a neighbour whose connection broke may abort before prterun names the rank
        assert "h2" in ended.stdout + ended.stderr, ended.stdout + ended.stderr
    nobody_is_left(pair)


def test_a_far_rank_that_stops_ends_the_job(flavour: Flavour, pair: Hosts, tmp_path: Path) -> None:
    ended = run(Placed.of(flavour, pair, "two and one"), tmp_path, "os.kill(os.getpid(), signal.SIGSTOP)", LIMIT_S)
    seconds = time.time() - float((tmp_path / "fault").read_text())
    assert ended.returncode != 0
    assert seconds < LIMIT_S + ENDS_WITHIN_S
    for rank in (0, 1):
        told = (tmp_path / f"told{rank}").read_text()
        assert "rank 2 (node 1, local 0) on h2: does not answer" in told
    nobody_is_left(pair)


def test_a_host_that_is_cut_off_ends_the_ranks_on_both_sides(
    flavour: Flavour, hosts: Callable[[int], Hosts], tmp_path: Path
) -> None:
    own = hosts(2)
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(run, Placed.of(flavour, own, "two and one"), tmp_path, "cut", LIMIT_S)
        try:
            until(lambda: job.done() or all((tmp_path / f"pid{rank}").exists() for rank in range(3)), 40)
            ranks = [int((tmp_path / f"pid{rank}").read_text()) for rank in range(3)]
            own.cut("h2")
            (tmp_path / "cut").touch()
            until(lambda: not any(is_running(rank) for rank in ranks), LIMIT_S + ENDS_WITHIN_S)
            # What is left are the MPI launcher's own, which may wait for the lost host for ever.
        finally:
            for host in own.names:
                for pid in own.pids(host):
                    kill(pid)
        assert job.result(30).returncode != 0
    for rank, silent in ((0, [2]), (1, [2]), (2, [0, 1])):
        told = (tmp_path / f"told{rank}").read_text()
        for other in silent:
            host = "h2" if other == 2 else "h1"
            assert f"rank {other} (node {other // 2}, local {other % 2}) on {host}: does not answer" in told, told


def until(is_so: Callable[[], bool], within_s: float) -> None:
    """Wait for something, and fail if it takes longer."""
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline, f"not within {within_s:g} s"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """True for a process that has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def kill(pid: int) -> None:
    """End a process, which may have ended."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
