"""A world of one: a program started by hand needs no launcher, no MPI and no mpi4py."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from flavours import Flavour, clean_env, run_tree

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys
import numpy as np
import ncclcomm
with ncclcomm.init() as comm:
    assert (comm.rank, comm.size, comm.local_rank, comm.local_size) == (0, 1, 0, 1)
    assert (comm.node, comm.num_nodes, comm.mpi_comm) == (0, 1, None)
    x = np.arange(6.0)
    assert comm.broadcast(x) is x
    np.testing.assert_array_equal(comm.scatter(x), x)
    np.testing.assert_array_equal(comm.gather(x), x)
    for got in (comm.reduce(x), comm.reduce_add(x), comm.all_reduce(x, op="avg"), comm.all_reduce(x, op="max")):
        np.testing.assert_array_equal(got, x)
    comm.barrier()
    part = comm.split(0)
    assert part.size == 1
    y = ncclcomm.asarray(x)
    assert ncclcomm.device_index(comm.all_reduce(y)) == ncclcomm.device_index(y)
loaded = [name for name in sys.modules if name.split(".")[0] == "mpi4py" and sys.modules[name] is not None]
assert not loaded, loaded
print("done")
"""

BLOCKED = "import sys; sys.modules['mpi4py'] = None\n"
"""What a Python without mpi4py does: the import fails and nothing is found."""


def run(
    source: str, env: dict[str, str] | None = None, python: str = sys.executable, timeout_s: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run a program by hand, under no launcher."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    full = {**clean_env(), "PYTHONPATH": path, **(env or {})}
    return run_tree([python, "-c", textwrap.dedent(source)], env=full, timeout_s=timeout_s)


@pytest.mark.parametrize("blocked", [False, True], ids=["mpi4py installed", "no mpi4py"])
def test_started_by_hand(blocked: bool) -> None:
    ended = run(BLOCKED * blocked + PROGRAM)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")


BATCH = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_NODELIST": "n[1-2]",
}
"""What a batch script sees of its allocation, with no step's variables."""


@pytest.mark.parametrize("blocked", [False, True], ids=["mpi4py installed", "no mpi4py"])
def test_a_batch_scripts_own_variables_mean_one_process(blocked: bool) -> None:
    ended = run(BLOCKED * blocked + PROGRAM, BATCH)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")


def test_a_program_that_started_mpi_itself(flavour: Flavour) -> None:
    source = """
        from mpi4py import MPI
        import ncclcomm
        import numpy as np
        with ncclcomm.init() as comm:
            assert comm.size == 1
            assert comm.all_reduce(np.array([3])).item() == 3
        assert not MPI.Is_finalized()
        print("done")
    """
    ended = run(source, flavour.env(), flavour.python)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


def test_import_starts_neither_mpi_nor_mpi4py() -> None:
    source = """
        import sys
        import ncclcomm, ncclcomm.comm, ncclcomm.communicator
        ncclcomm.device_count(), ncclcomm.xp.arange(3), ncclcomm.Communicator
        print([name for name in sys.modules if name.startswith("mpi4py")])
    """
    ended = run(source)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[]\n", "")


def test_import_inside_ranks_starts_no_mpi(flavour: Flavour) -> None:
    source = "import sys, ncclcomm; ncclcomm.device_count(); sys.exit('mpi4py.MPI' in sys.modules)"
    ended = flavour.run(2, ["-c", source], timeout_s=60)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCLCOMM_DEVICES", "gpu"),
        ("NCCLCOMM_DEVICES", "host:0"),
        ("NCCLCOMM_CHUNK_BYTES", "1e6"),
        ("NCCLCOMM_NODE_SIZE", "0"),
        ("NCCLCOMM_CHECK", "maybe"),
    ],
)
def test_values_that_make_no_sense(name: str, value: str) -> None:
    ended = run("import ncclcomm; ncclcomm.init()", {name: value})
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("ncclcomm.errors.ArgumentError"), ended.stderr
    assert name in last
    assert value in last


def test_numpy_results_are_there_when_a_call_returns_with_streams_that_run_later() -> None:
    ended = run(
        """
        import numpy as np
        import ncclcomm
        comm = ncclcomm.init()
        for turn in range(5):
            x = np.full((1 << 20, 2), turn + 1.0)[:, 0]
            out = np.zeros((1 << 20, 2))[:, 1]
            for got in (comm.all_reduce(x), comm.reduce(x, op="avg"), comm.gather(x), comm.scatter(x)):
                assert (got == turn + 1).all(), turn
            assert (comm.all_reduce(x, out=out) == turn + 1).all()
        """,
        {"NCCLCOMM_HOST_STREAMS": "async"},
    )
    assert ended.returncode == 0, ended.stderr


def test_init_again_with_another_device_is_refused() -> None:
    ended = run(
        """
        import ncclcomm
        first = ncclcomm.init(device=1)
        assert ncclcomm.init() is first and ncclcomm.init(device=1) is first
        try:
            ncclcomm.init(device=2)
        except ncclcomm.ArgumentError as error:
            print(error)
        """
    )
    assert "joined with device 1" in ended.stdout, ended.stderr
