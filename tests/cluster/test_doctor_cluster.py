"""`ncclcomm doctor` over hosts, and under a real Slurm."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.fake_hosts import Hosts
from cluster.placed import Placed
from cluster.slurm_fixtures import PMI, ROOT, Slurm, batch, slurm_cluster  # noqa: F401
from faults.test_doctor_ranks import read, shim
from flavours import Flavour, find


@pytest.fixture(scope="module")
def pair(hosts: Callable[[int], Hosts]) -> Hosts:
    return hosts(2)


def test_ranks_on_two_hosts(flavour: Flavour, pair: Hosts) -> None:
    placed = Placed.of(flavour, pair, "two and one")
    told = read(placed.run(3, ["-m", "ncclcomm", "doctor", "--json"], {"PYTHONPATH": str(ROOT)}, timeout_s=60))
    assert told.status == 0, told
    assert told.fails() == []
    assert "node 1: rank 2 on h2" in told.lines["world.hosts"]["found"]
    assert told.lines["trial.nodes"]["status"] == "pass"
    assert "2 nodes" in told.lines["trial.nodes"]["found"]
    assert told.lines["network.path"]["status"] == "pass"
    assert "TCP" in told.lines["network.path"]["found"]
    assert told.lines["node.process_vm_readv"]["status"] == "pass"


def test_an_interface_that_one_host_lacks(pair: Hosts, tmp_path: Path) -> None:
    placed = Placed.of(find("mpich"), pair, "two and one")
    env = {**shim(tmp_path, "os.environ['NCCL_SOCKET_IFNAME'] = 'ib'", rank=2)}
    told = read(placed.run(3, ["-m", "ncclcomm", "doctor", "--json"], env, timeout_s=60))
    told.failed("network.nccl_interface", "rank 2 on h2", "NCCL_SOCKET_IFNAME=ib")


def test_srun_rightly_and_wrongly(slurm: Slurm, tmp_path: Path) -> None:
    mpich = find("mpich")
    doctor = f"{mpich.python} -m ncclcomm doctor --json"
    lines = ["#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=2"]
    runs = [f"srun --mpi={mpi} {doctor}; echo status $?" for mpi in (PMI["mpich"], "none")]
    output = slurm.run(mpich, [batch(tmp_path / "doctor.sbatch", *lines, *runs)], cwd=tmp_path).output
    right, first, wrong, second = re.split(r"^status (\d+)\n", output, flags=re.M)[:4]
    told = read(subprocess.CompletedProcess([], int(first), right, ""))
    assert (told.status, told.fails()) == (0, []), output
    assert told.lines["slurm.variables"]["status"] == "pass"
    assert told.facts["size"] == 4
    told = read(subprocess.CompletedProcess([], int(second), wrong, ""))
    told.failed("world.size", "promises 4 ranks", "MPI sees 1", f"--mpi={PMI['mpich']}")
