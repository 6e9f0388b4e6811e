"""The harness of the rank tests itself: whatever goes wrong in one rank is told, and nothing is left running."""

from __future__ import annotations

import sys
import textwrap
import time
from pathlib import Path

import pytest

from flavours import Flavour, run_tree
from rank_jobs import RankJob, run_rank_tests

HEAD = """
import os, signal, time, pytest
from mpi4py import MPI
world = MPI.COMM_WORLD
pytestmark = pytest.mark.mpi
"""
DEADLINE_S = 3
SLACK_S = 12.0
"""From a deadline to the end of the job: starting and ending four processes on a busy machine."""


def run(flavour: Flavour, folder: Path, body: str, n: int = 3) -> RankJob:
    """Run one generated test file inside the ranks."""
    file = folder / "test_generated.py"
    file.write_text(HEAD + textwrap.dedent(body))
    args = ["-p", "rank_plugin", "--rootdir", folder, "-c", folder / "pytest.ini", file]
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    env = {"PYTHONPATH": str(Path(__file__).parents[1]), "NCCLCOMM_TEST_DEADLINE_S": str(DEADLINE_S)}
    return run_rank_tests(flavour, n, args, env=env, timeout_s=60)


def printed(job: RankJob) -> str:
    """What mpiexec printed."""
    return job.report.partition("\n--- rank-")[0]


def written(job: RankJob, rank: int) -> str:
    """What one rank left in its file."""
    return job.report.partition(f"\n--- rank-{rank} wrote")[2].partition("\n--- rank-")[0]


def test_all_pass_gives_one_report(flavour: Flavour, tmp_path: Path) -> None:
    job = run(flavour, tmp_path, "def test_sum(): assert world.allreduce(1) == 3")
    assert job.status == 0, job.report
    assert job.report.count("1 passed") == 1
    assert job.report.count("test session starts") == 1


def test_failure_of_one_rank_is_told_with_its_traceback(flavour: Flavour, tmp_path: Path) -> None:
    body = """
        def test_value():
            secret = 40 + world.rank
            assert secret != 41, "only here"

        def test_after(): assert world.allreduce(1) == 3
    """
    job = run(flavour, tmp_path, body)
    assert job.status != 0
    summary = printed(job)
    assert "test_value (on rank 1)" in summary, job.report
    assert "only here" in summary
    assert "secret = 40 + world.rank" in summary
    assert "1 failed" in summary
    assert "on rank 0" not in summary
    assert "on rank 2" not in summary


def test_hang_ends_the_job_with_every_ranks_stacks(flavour: Flavour, tmp_path: Path) -> None:
    body = """
        def hold():
            while True: time.sleep(0.1)

        def test_first(): pass

        def test_hang():
            if world.rank == 2: hold()
            world.barrier()
    """
    start = time.monotonic()
    job = run(flavour, tmp_path, body)
    assert time.monotonic() - start < DEADLINE_S + SLACK_S
    assert job.status != 0
    for rank in range(3):
        wrote = written(job, rank)
        assert "Timeout" in wrote, job.report
        assert "in test_hang" in wrote
        assert ("in hold" in wrote) == (rank == 2)


def test_failure_while_the_others_wait_is_told(flavour: Flavour, tmp_path: Path) -> None:
    body = """
        def test_lonely():
            if world.rank == 1: raise ValueError("before the collective")
            world.barrier()
    """
    start = time.monotonic()
    job = run(flavour, tmp_path, body)
    assert time.monotonic() - start < DEADLINE_S + SLACK_S
    assert job.status != 0
    wrote = written(job, 1)
    assert "before the collective" in wrote, job.report
    assert "FAILED on rank 1" in wrote
    assert "in test_lonely" in written(job, 0)


def test_crash_of_one_rank_is_told(flavour: Flavour, tmp_path: Path) -> None:
    body = """
        def test_crash():
            if world.rank == 1: os.kill(os.getpid(), signal.SIGSEGV)
            world.barrier()
    """
    job = run(flavour, tmp_path, body)
    assert job.status != 0
    wrote = written(job, 1)
    assert "Segmentation fault" in wrote, job.report
    assert "in test_crash" in wrote


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("if world.rank == 2:\n    def test_extra(): pass\ndef test_all(): pass", "test_extra"),
        ("if world.rank == 1: raise ImportError('no such thing')\ndef test_all(): pass", "no such thing"),
        ("", "no tests ran"),
    ],
    ids=["different tests", "import error on one rank", "no tests"],
)
def test_ranks_must_collect_the_same_tests(flavour: Flavour, tmp_path: Path, body: str, message: str) -> None:
    job = run(flavour, tmp_path, body)
    assert job.status != 0
    assert message in printed(job), job.report


def test_ranks_stop_together(flavour: Flavour, tmp_path: Path) -> None:
    body = """
        def test_one(): assert world.rank != 1
        def test_two(): raise AssertionError("must not run")
    """
    (tmp_path / "conftest.py").write_text("def pytest_configure(config): config.option.maxfail = 1\n")
    job = run(flavour, tmp_path, body)
    assert job.status != 0
    assert "test_one (on rank 1)" in job.report
    assert "must not run" not in job.report


def test_fewer_ranks_than_asked_for_is_an_error(flavour: Flavour, tmp_path: Path) -> None:
    job = run(flavour, tmp_path, "def test_it(): pass", n=2)
    assert job.status == 0, job.report
    env = {"NCCLCOMM_TEST_RANKS": "3", "PYTHONPATH": str(Path(__file__).parents[1])}
    job = run_rank_tests(flavour, 2, ["-p", "rank_plugin", tmp_path], env=env, timeout_s=60)
    assert job.status != 0
    assert "3 ranks were asked for and MPI started 2" in job.report


def test_what_outlives_a_program_fails_the_test() -> None:
    program = "import subprocess as s; s.Popen(['sleep', '60'], start_new_session=True)"
    with pytest.raises(pytest.fail.Exception, match="left processes behind"):
        run_tree([sys.executable, "-c", program])


def test_deadline_ends_the_whole_tree(flavour: Flavour) -> None:
    program = "from mpi4py import MPI; print('up', flush=True); MPI.COMM_WORLD.rank or MPI.COMM_WORLD.recv()"
    start = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match=r"(?s)did not end within 3 s.*up"):
        flavour.run(2, ["-c", program], timeout_s=3)
    assert time.monotonic() - start < 3 + SLACK_S
