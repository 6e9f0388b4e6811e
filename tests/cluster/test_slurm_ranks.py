"""What ranks find that a real Slurm has started: nodes, GPUs, and errors where they can't find each other."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from cluster.slurm_fixtures import PMI, SCRIPTS, SECONDS, TELL, Ended, Slurm, batch, slurm_cluster, told  # noqa: F401
from flavours import Flavour, find

WHO = (
    TELL
    + """
import numpy as np
import ncclcomm
from ncclcomm import config

comm = ncclcomm.init()
total = comm.all_reduce(np.array([comm.rank + 1.0]))
last = comm.broadcast(np.array([comm.rank]) if comm.rank == comm.size - 1 else None, root=comm.size - 1)
tell(
    comm.rank, size=comm.size, node=comm.node, num_nodes=comm.num_nodes, local_rank=comm.local_rank,
    local_size=comm.local_size, device=comm.device, total=float(total[0]), last=int(last[0]),
    gpus=config.slurm_gpus(),
)
"""
)


@pytest.fixture
def who(tmp_path: Path) -> Path:
    """A program whose ranks tell where they are."""
    program = tmp_path / "who.py"
    program.write_text(WHO)
    return program


def of_each(folder: Path, name: str) -> list[Any]:
    """One fact of every rank, in rank order."""
    return [fact[name] for fact in told(folder)]


def variable(folder: Path, name: str) -> list[str | None]:
    """One variable of every rank, in rank order; None where it is unset."""
    return [fact["env"].get(name) for fact in told(folder)]


PLACEMENTS = {
    "two and two": (["--ntasks-per-node=2"], ["h1", "h1", "h2", "h2"]),
    "two and two, in turn": (["--ntasks-per-node=2", "--distribution=cyclic"], ["h1", "h2", "h1", "h2"]),
    "three and one": (["--ntasks=4", "--distribution=plane=3"], ["h1", "h1", "h1", "h2"]),
    "two and one, in turn": (["--ntasks=3", "--distribution=cyclic"], ["h1", "h2", "h1"]),
}


@pytest.mark.parametrize("name", list(PLACEMENTS))
def test_nodes_are_as_slurm_placed_the_ranks(
    slurm: Slurm, flavour: Flavour, name: str, who: Path, tmp_path: Path
) -> None:
    options, hosts = PLACEMENTS[name]
    ended = slurm.run(flavour, [SCRIPTS / "multi_node.sbatch", who], cwd=tmp_path, options=options)
    assert (ended.state, ended.status) == ("COMPLETED", 0), ended.output
    size = len(hosts)
    assert of_each(tmp_path, "host") == hosts
    assert of_each(tmp_path, "size") == [size] * size
    assert of_each(tmp_path, "num_nodes") == [2] * size
    assert of_each(tmp_path, "node") == [int(host[1:]) - 1 for host in hosts]
    assert of_each(tmp_path, "local_rank") == [hosts[:rank].count(hosts[rank]) for rank in range(size)]
    assert of_each(tmp_path, "local_size") == [hosts.count(host) for host in hosts]
    assert of_each(tmp_path, "total") == [size * (size + 1) / 2] * size
    assert of_each(tmp_path, "last") == [size - 1] * size
    for ours, theirs in (("node", "SLURM_NODEID"), ("local_rank", "SLURM_LOCALID"), ("size", "SLURM_STEP_NUM_TASKS")):
        assert variable(tmp_path, theirs) == [str(value) for value in of_each(tmp_path, ours)]
    assert variable(tmp_path, "SLURM_PROCID") == [str(rank) for rank in range(size)]


GPU_REQUESTS = {
    "one for each task": (["--gpus-per-task=1"], ["0", "1", "0", "1"]),
    "two for each node": (["--gpus-per-node=2"], ["0,1"] * 4),
    "four in all, where Slurm likes": (["--gpus=4"], ["0,1,2", "0,1,2", "0", "0"]),
    "two for each node, bound to no task": (["--gpus-per-node=2", "--gpu-bind=none"], [None] * 4),
    "none": ([], [None] * 4),
}
"""Options of sbatch and each rank's CUDA_VISIBLE_DEVICES."""


@pytest.mark.parametrize("name", list(GPU_REQUESTS))
def test_gpus_that_ranks_are_given(slurm: Slurm, name: str, who: Path, tmp_path: Path) -> None:
    options, visible = GPU_REQUESTS[name]
    ended = slurm.run(
        find("mpich"),
        [SCRIPTS / "multi_node.sbatch", who],
        cwd=tmp_path,
        options=["--ntasks-per-node=2", *options],
        env={"NCCLCOMM_DEVICES": "host"},
    )
    assert (ended.state, ended.status) == ("COMPLETED", 0), ended.output
    assert variable(tmp_path, "CUDA_VISIBLE_DEVICES") == visible
    assert [bool(gpus) for gpus in of_each(tmp_path, "gpus")] == [bool(options)] * 4
    # Virtual devices: what GPUs a rank sees plays no part.
    assert of_each(tmp_path, "device") == [0, 1, 0, 1]


REFUSED = (
    TELL
    + """
sys.modules["cupy"] = None  # the same wherever the test runs, with a GPU or without
from mpi4py import MPI
import ncclcomm
try:
    ncclcomm.init()
except ncclcomm.BackendUnavailableError as error:
    tell(MPI.COMM_WORLD.rank, error=str(error))
    MPI.COMM_WORLD.Barrier()  # the first to fail ends the others
    raise
print("joined")
"""
)


@pytest.mark.parametrize("asked", ["", "cuda", "the script's"])
def test_gpus_that_cannot_be_used_are_an_error(slurm: Slurm, flavour: Flavour, asked: str, tmp_path: Path) -> None:
    program = tmp_path / "refused.py"
    program.write_text(REFUSED)
    job = [batch(tmp_path / "job", f"srun -K --mpi={PMI[flavour.name]} $VENV/bin/python refused.py")]
    if asked == "the script's":
        job = [SCRIPTS / "multi_node.sbatch", program]
    options = ["--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2"]
    start = time.monotonic()
    ended = slurm.run(
        flavour, job, cwd=tmp_path, options=options, env={"NCCLCOMM_DEVICES": "cuda" if asked == "cuda" else ""}
    )
    assert time.monotonic() - start < SECONDS
    assert (ended.state, ended.status != 0) == ("FAILED", True), ended.output
    assert "joined" not in ended.output
    errors = of_each(tmp_path, "error")
    assert len(errors) == 4
    for error in errors:
        assert ("NCCLCOMM_DEVICES=cuda" if asked else "SLURM_STEP_GPUS=0,1") in error
        assert "CuPy is not installed" in error
        assert "pip install" in error
        if not asked:
            assert "NCCLCOMM_DEVICES=host" in error


def run_alone(slurm: Slurm, flavour: Flavour, folder: Path, options: list[str], *lines: str) -> Ended:
    """Run a batch script of the test's own."""
    start = time.monotonic()
    ended = slurm.run(flavour, [batch(folder / "job", *lines)], cwd=folder, options=options)
    assert time.monotonic() - start < SECONDS
    return ended


def test_srun_without_mpi_is_an_error(slurm: Slurm, flavour: Flavour, who: Path, tmp_path: Path) -> None:
    options = ["--nodes=2", "--ntasks-per-node=2"]
    ended = run_alone(slurm, flavour, tmp_path, options, f"srun $VENV/bin/python {who}")
    assert (ended.state, ended.status) == ("FAILED", 1), ended.output
    assert told(tmp_path) == []
    messages = [line for line in ended.output.splitlines() if line.startswith("ncclcomm.errors.NcclCommError")]
    assert len(messages) == 4
    for message in messages:
        assert "promises 4 ranks, but MPI sees 1" in message
        assert "--mpi=pmi2 (MPICH) or --mpi=pmix (Open MPI)" in message


def test_srun_with_the_other_flavours_mpi_fails(slurm: Slurm, flavour: Flavour, who: Path, tmp_path: Path) -> None:
    other = PMI["openmpi" if flavour.name == "mpich" else "mpich"]
    options = ["--nodes=2", "--ntasks-per-node=2"]
    ended = run_alone(slurm, flavour, tmp_path, options, f"srun -K --mpi={other} $VENV/bin/python {who}")
    assert (ended.state, ended.status != 0) == ("FAILED", True), ended.output
    assert told(tmp_path) == []
    if flavour.name == "openmpi":
        assert "PMI_SIZE=4 promises 4 ranks, but MPI sees 1" in ended.output
    else:
        assert "unsupported PMI version PMIx" in ended.output


def test_a_batch_script_is_a_world_of_one(slurm: Slurm, flavour: Flavour, who: Path, tmp_path: Path) -> None:
    ended = run_alone(slurm, flavour, tmp_path, ["--nodes=2", "--ntasks=4"], f"$VENV/bin/python {who}")
    assert (ended.state, ended.status) == ("COMPLETED", 0), ended.output
    assert variable(tmp_path, "SLURM_NTASKS") == ["4"]
    assert (of_each(tmp_path, "size"), of_each(tmp_path, "num_nodes")) == ([1], [1])


def test_a_step_of_one_task_in_a_larger_job_is_a_world_of_one(
    slurm: Slurm, flavour: Flavour, who: Path, tmp_path: Path
) -> None:
    # --preserve-env keeps the job's SLURM_NTASKS, as the shell does that salloc opens on a node.
    step = f"srun --preserve-env --nodes=1 --ntasks=1 $VENV/bin/python {who}"
    ended = run_alone(slurm, flavour, tmp_path, ["--nodes=2", "--ntasks=4"], step)
    assert (ended.state, ended.status) == ("COMPLETED", 0), ended.output
    assert variable(tmp_path, "SLURM_NTASKS") == ["4"]
    assert variable(tmp_path, "SLURM_STEP_NUM_TASKS") == ["1"]
    assert of_each(tmp_path, "size") == [1]


def test_mpiexec_in_a_batch_script(slurm: Slurm, flavour: Flavour, who: Path, tmp_path: Path) -> None:
    options = ["--nodes=2", "--ntasks-per-node=2"]
    # The policy that the flavour sets for more ranks than cores would fill the first node.
    lines = ["unset PRTE_MCA_rmaps_default_mapping_policy", f"$VENV/bin/mpiexec $VENV/bin/python {who}"]
    ended = run_alone(slurm, flavour, tmp_path, options, *lines)
    assert (ended.state, ended.status) == ("COMPLETED", 0), ended.output
    assert of_each(tmp_path, "host") == ["h1", "h1", "h2", "h2"]
    assert of_each(tmp_path, "node") == [0, 0, 1, 1]
    assert of_each(tmp_path, "size") == [4] * 4
    assert of_each(tmp_path, "total") == [10.0] * 4


def test_ncclcomm_run_in_a_batch_script(slurm: Slurm, flavour: Flavour, who: Path, tmp_path: Path) -> None:
    options = ["--nodes=1", "--ntasks-per-node=3"]
    ended = run_alone(slurm, flavour, tmp_path, options, f"$VENV/bin/python -m ncclcomm run -n 3 {who}")
    assert (ended.state, ended.status) == ("COMPLETED", 0), ended.output
    assert of_each(tmp_path, "size") == [3] * 3
    assert of_each(tmp_path, "local_rank") == [0, 1, 2]
    assert of_each(tmp_path, "host") == ["h1"] * 3
