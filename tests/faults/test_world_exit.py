"""How a job of ranks ends: in seconds and with a failure after an exception, and silently otherwise."""

from __future__ import annotations

import subprocess
import textwrap
import time

import pytest

from faults.test_world_alone import ROOT
from flavours import Flavour

LIMIT_S = 20.0
"""From an exception to the end of the job, on a busy machine that starts ranks meanwhile."""


def launch(flavour: Flavour, source: str, n: int = 3, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run a program on n ranks, under plain `mpiexec python`."""
    program = "import sys, time, os\nimport numpy as np\nimport ncclcomm\n" + textwrap.dedent(source)
    return flavour.run(n, ["-c", program], {"PYTHONPATH": str(ROOT)}, timeout_s=timeout_s)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("others", ["comm.barrier()", "comm.all_reduce(np.ones(3))", "comm.broadcast(np.ones(3))"])
def test_an_uncaught_exception_ends_all_ranks(flavour: Flavour, rank: int, others: str) -> None:
    source = f"""
        comm = ncclcomm.init()
        comm.barrier()
        if comm.rank == {rank}:
            raise LookupError("lost on rank %d" % comm.rank)
        while True:
            {others}
    """
    start = time.monotonic()
    ended = launch(flavour, source)
    assert time.monotonic() - start < LIMIT_S
    assert ended.returncode != 0
    shown = ended.stderr + ended.stdout
    assert shown.count(f"LookupError: lost on rank {rank}") == 1, shown
    assert "Traceback (most recent call last)" in shown


def test_an_exception_inside_the_worlds_block_ends_all_ranks(flavour: Flavour) -> None:
    source = """
        with ncclcomm.init() as comm:
            if comm.rank == 1:
                raise LookupError("lost")
            comm.barrier()
    """
    start = time.monotonic()
    ended = launch(flavour, source)
    assert time.monotonic() - start < LIMIT_S
    assert ended.returncode != 0
    assert "LookupError: lost" in ended.stderr + ended.stdout


def test_an_exception_after_the_world_was_closed_ends_all_ranks(flavour: Flavour) -> None:
    source = """
        from mpi4py import MPI
        with ncclcomm.init() as comm:
            comm.barrier()
        if MPI.COMM_WORLD.rank == 1:
            raise LookupError("lost")
        MPI.COMM_WORLD.barrier()
    """
    ended = launch(flavour, source)
    assert ended.returncode != 0
    assert "LookupError: lost" in ended.stderr + ended.stdout


def test_a_mismatch_that_nobody_catches_ends_the_job(flavour: Flavour) -> None:
    source = """
        comm = ncclcomm.init()
        comm.all_reduce(np.ones(2 + comm.rank // 2))
    """
    ended = launch(flavour, source)
    assert ended.returncode != 0
    assert "MismatchError" in ended.stderr + ended.stdout


def test_the_programs_own_excepthook_runs_too(flavour: Flavour) -> None:
    source = """
        def mine(kind, error, traceback):
            print("seen", error, file=sys.stderr, flush=True)
        sys.excepthook = mine
        comm = ncclcomm.init()
        if comm.rank == 2:
            raise LookupError("lost")
        comm.barrier()
    """
    ended = launch(flavour, source)
    assert ended.returncode != 0
    assert "seen lost" in ended.stderr + ended.stdout


@pytest.mark.parametrize("end", ["comm.close()", "pass", "del comm", "ncclcomm.kept = [comm, comm.split(0)]"])
def test_the_exit_is_silent(flavour: Flavour, end: str) -> None:
    source = f"""
        comm = ncclcomm.init()
        x = ncclcomm.asarray(np.arange(4.0) + comm.rank)
        assert ncclcomm.to_numpy(comm.all_reduce(x))[0] == 3
        {end}
    """
    ended = launch(flavour, source)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_the_program_may_finalize_mpi_itself(flavour: Flavour) -> None:
    source = """
        from mpi4py import MPI
        comm = ncclcomm.init()
        comm.all_reduce(np.ones(3))
        kept = comm.split(0)
        MPI.Finalize()
    """
    ended = launch(flavour, source)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_closing_the_world_leaves_mpi_up(flavour: Flavour) -> None:
    source = """
        from mpi4py import MPI
        with ncclcomm.init() as comm:
            comm.barrier()
        assert MPI.COMM_WORLD.allreduce(1) == 3
        with ncclcomm.init() as comm:
            assert comm.all_reduce(np.array([1])).item() == 3
    """
    ended = launch(flavour, source)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.flavours("mpich")
def test_dropped_communicators_are_freed_at_the_next_agreed_point(flavour: Flavour) -> None:
    # MPICH has about 2,000 communicators to give; over nodes of one, each of these takes three.
    source = """
        import gc
        from mpi4py import MPI
        os.environ["NCCLCOMM_NODE_SIZE"] = "1"
        for turn in range(1000):
            comm = ncclcomm.Communicator(MPI.COMM_WORLD, check=False)
            comm.barrier()
            del comm
            if turn % 100 == 0:
                gc.collect()
    """
    ended = launch(flavour, source, n=2)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
