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
    "two for each node, by --gres": (["--gres=gpu:2"], ["0,1"] * 4),
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
        assert "SLURM_STEP_NUM_TASKS=4 promises 4 ranks, but MPI sees 1" in message
        assert f"Start with `srun --mpi={PMI[flavour.name]}`" in message


def test_srun_with_the_other_flavours_mpi_fails(slurm: Slurm, flavour: Flavour, who: Path, tmp_path: Path) -> None:
    other = PMI["openmpi" if flavour.name == "mpich" else "mpich"]
    options = ["--nodes=2", "--ntasks-per-node=2"]
    ended = run_alone(slurm, flavour, tmp_path, options, f"srun -K --mpi={other} $VENV/bin/python {who}")
    assert (ended.state, ended.status != 0) == ("FAILED", True), ended.output
    assert told(tmp_path) == []
    if flavour.name == "openmpi":
        assert "PMI_SIZE=4 promises 4 ranks, but MPI sees 1" in ended.output
        assert "Start with `srun --mpi=pmix`" in ended.output
    else:
        assert "unsupported PMI version PMIx" in ended.output


def test_a_batch_script_is_a_world_of_one(slurm: Slurm, flavour: Flavour, who: Path, tmp_path: Path) -> None:
    mpi_first = tmp_path / "mpi_first.py"
    mpi_first.write_text(f"from mpi4py import MPI\n{WHO}")
    lines = [f"$VENV/bin/python {who}", "mkdir mpi && cd mpi", f"$VENV/bin/python {mpi_first}"]
    ended = run_alone(slurm, flavour, tmp_path, ["--nodes=2", "--ntasks=4"], "set -e", *lines)
    assert (ended.state, ended.status) == ("COMPLETED", 0), ended.output
    for folder in (tmp_path, tmp_path / "mpi"):
        assert variable(folder, "SLURM_NTASKS") == ["4"]
        assert (of_each(folder, "size"), of_each(folder, "num_nodes")) == ([1], [1])


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


IN_SALLOC = """
set -euo pipefail
each() { mkdir "$1" && (cd "$1" && "${@:2}"); }
each alone "$VENV/bin/python" "$WHO"
each mpiexec "$VENV/bin/mpiexec" "$VENV/bin/python" "$WHO"
each srun srun --mpi="$KIND" "$VENV/bin/python" "$WHO"
each script bash "$SCRIPT" "$WHO"
"""
"""What a user types in the shell that salloc opens, in a folder each."""
SHELLS = {
    "where salloc was called": ("mpich", []),
    # As salloc itself opens one, but for the terminal.
    "on a node": ("openmpi", ["srun", "--interactive", "--preserve-env", "--mpi=none", "--nodes=1", "--ntasks=1"]),
}


@pytest.mark.parametrize("shell", list(SHELLS))
def test_the_shell_of_salloc(slurm: Slurm, shell: str, who: Path, tmp_path: Path) -> None:
    name, opens = SHELLS[shell]
    flavour = find(name)
    script = {"WHO": str(who), "KIND": PMI[name], "SCRIPT": str(SCRIPTS / "multi_node.sbatch")}
    env = slurm.env(flavour, script)
    # As in a batch script, the policy would fill the first node.
    env.pop("PRTE_MCA_rmaps_default_mapping_policy", None)
    options = ["--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1"]
    slurm.client("salloc", *options, *opens, "bash", batch(tmp_path / "typed", IN_SALLOC), env=env, cwd=tmp_path)
    assert of_each(tmp_path / "alone", "size") == [1]
    for way in ("mpiexec", "srun", "script"):
        folder = tmp_path / way
        assert of_each(folder, "host") == ["h1", "h1", "h2", "h2"], way
        assert of_each(folder, "size") == [4] * 4, way
        assert of_each(folder, "local_rank") == [0, 1, 0, 1], way
        assert of_each(folder, "total") == [10.0] * 4, way


PLAIN = """
import os, signal, sys
import ncclcomm
how, rank = sys.argv[1], int(sys.argv[2])
comm = ncclcomm.init()
comm.barrier()
if comm.rank == rank:
    if how == "raises": raise LookupError("lost")
    if how == "exits": sys.exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
comm.barrier()
print("went on", flush=True)
"""
PLAIN_STEPS = """
for how in raises exits dies; do
    for rank in 0 3; do
        start=$EPOCHREALTIME status=0
        srun --kill-on-bad-exit=1 --mpi="$KIND" "$VENV/bin/python" plain.py $how $rank || status=$?
        echo "$how $rank $status $start $EPOCHREALTIME" >>ended
    done
done
"""
"""Steps in which a rank of the first node, or of the second, leaves the others waiting; and how each step ended."""
PLAIN_SECONDS = 15.0


def test_a_rank_that_leaves_under_plain_python(slurm: Slurm, flavour: Flavour, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN)
    options, env = ["--nodes=2", "--ntasks-per-node=2"], {"KIND": PMI[flavour.name]}
    ended = slurm.run(
        flavour, [batch(tmp_path / "job", PLAIN_STEPS)], cwd=tmp_path, options=options, env=env, timeout_s=120
    )
    rows = [line.split() for line in (tmp_path / "ended").read_text().splitlines()]
    assert [row[:2] for row in rows] == [[how, rank] for how in ("raises", "exits", "dies") for rank in ("0", "3")]
    for how, rank, status, start, end in rows:
        assert status != "0", (how, rank, ended.output)
        assert float(end) - float(start) < PLAIN_SECONDS, (how, rank, ended.output)
    assert "went on" not in ended.output
    assert ended.output.count("LookupError: lost") == 2
    for rank in (0, 3):
        assert f"rank {rank} will not come" in ended.output


def test_intel_mpi(slurm: Slurm, who: Path, tmp_path: Path) -> None:
    flavour = find("intelmpi")
    options = ["--nodes=2", "--ntasks-per-node=2"]
    # The flavour's own setting is for one host.
    env = {"I_MPI_FABRICS": "shm:ofi", "FI_PROVIDER": "tcp"}
    lines = [
        f"bash {SCRIPTS}/multi_node.sbatch {who}",
        f"mkdir mpiexec && (cd mpiexec && $VENV/bin/mpiexec $VENV/bin/python {who})",
        f"mkdir no && cd no && srun $VENV/bin/python {who}",
    ]
    ended = slurm.run(flavour, [batch(tmp_path / "job", "set -e", *lines)], cwd=tmp_path, options=options, env=env)
    assert (ended.state, ended.status) == ("FAILED", 1), ended.output
    assert "--mpi=pmi2 " in ended.output
    for folder in (tmp_path, tmp_path / "mpiexec"):
        assert of_each(folder, "host") == ["h1", "h1", "h2", "h2"]
        assert of_each(folder, "size") == [4] * 4
        assert of_each(folder, "local_rank") == [0, 1, 0, 1]
        assert of_each(folder, "total") == [10.0] * 4
    assert told(tmp_path / "no") == []
    assert "Start with `srun --mpi=pmi2`, and I_MPI_PMI_LIBRARY naming SLURM's libpmi2.so" in ended.output
