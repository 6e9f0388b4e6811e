"""Ranks that don't come to `ncclcomm.init`: the others say so, in time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from flavours import FLAVOURS, Flavour

HEAD = """
import os, sys, time
import numpy as np
import ncclcomm
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
"""
WAITS = "of 2 has waited %s s in ncclcomm.init for the others"


def run(flavour: Flavour, folder: Path, body: str, **env: str) -> tuple[int, str, str, float]:
    """Run a program on two ranks: its status, output and seconds."""
    script = folder / "program.py"
    script.write_text(HEAD + body)
    start = time.monotonic()
    done = flavour.run(2, [script], env=env, timeout_s=60)
    return done.returncode, done.stdout, done.stderr, time.monotonic() - start


@pytest.mark.flavours(*FLAVOURS)
@pytest.mark.parametrize("before", ["sys.exit(0)", "time.sleep(25)", "raise ValueError('no data here')"])
def test_a_limit_ends_the_wait_for_a_rank_that_does_not_come(flavour: Flavour, tmp_path: Path, before: str) -> None:
    status, _, errors, seconds = run(flavour, tmp_path, f"if rank == 1: {before}\nncclcomm.init(timeout_s=1)")
    assert status != 0
    assert seconds < 20
    # The launcher may end the job first, and say so, where a rank leaves.
    assert f"rank 0 {WAITS % 1}" in errors or "no data here" in errors or "due to process rank 1" in errors, errors


def test_a_late_rank_is_told_of_once_and_waited_for(flavour: Flavour, tmp_path: Path) -> None:
    body = "if rank == 1: time.sleep(2.5)\nwith ncclcomm.init() as comm: print(comm.all_reduce(np.ones(1)))"
    status, out, errors, _ = run(flavour, tmp_path, body, NCCLCOMM_STALL_S="1")
    assert status == 0, errors
    assert out.count("[2.]") == 2
    assert errors.count(WAITS % 1) == 1, errors


def test_a_start_in_time_says_nothing_and_leaves_nothing(flavour: Flavour, tmp_path: Path) -> None:
    body = """
with ncclcomm.init(timeout_s=50) as comm:
    children = open(f"/proc/self/task/{os.getpid()}/children").read()
    print("children:", children)
"""
    status, out, errors, _ = run(flavour, tmp_path, body)
    assert (status, errors) == (0, "")
    assert out.splitlines() == ["children: "] * 2


def test_without_watchdogs_nothing_watches(flavour: Flavour, tmp_path: Path) -> None:
    body = "if rank == 1: time.sleep(2)\nncclcomm.init().close()"
    assert run(flavour, tmp_path, body, NCCLCOMM_STALL_S="1", NCCLCOMM_WATCHDOG="0")[2] == ""


def test_where_no_process_can_be_started_the_ranks_start_all_the_same(flavour: Flavour, tmp_path: Path) -> None:
    body = """
sys.executable = "/nowhere/python"
with ncclcomm.init() as comm: print(comm.all_reduce(np.ones(1)))
"""
    status, out, errors, _ = run(flavour, tmp_path, body)
    assert status == 0, errors
    assert out.count("[2.]") == 2
    assert errors.count("nothing watches over the start of the ranks: ") == 2


def test_a_forked_child_does_not_join(flavour: Flavour, tmp_path: Path) -> None:
    body = """
world = ncclcomm.init()
child = os.fork()
world.close()
if not child:
    try: ncclcomm.init()
    except ncclcomm.NcclCommError as error: print("told:", error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
    status, out, errors, _ = run(flavour, tmp_path, body)
    assert status == 0, errors
    assert out.count("told: init: this process was forked from a rank") == 2


def test_a_fork_that_keeps_all_descriptors_does_not_hold_the_start(flavour: Flavour, tmp_path: Path) -> None:
    body = """
import signal, subprocess

class Holding(subprocess.Popen):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.fork = os.fork()
        if not self.fork:
            time.sleep(40)
            os._exit(0)
        forks.append(self.fork)

forks = []
subprocess.Popen = Holding
with ncclcomm.init() as comm: comm.barrier()
for fork in forks: os.kill(fork, signal.SIGKILL)
print("forks", len(forks))
"""
    status, out, errors, seconds = run(flavour, tmp_path, body)
    assert status == 0, errors
    assert out.count("forks 1") == 2
    assert seconds < 20
