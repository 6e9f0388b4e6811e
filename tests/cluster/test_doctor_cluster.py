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
from faults.test_doctor_machine import RDMA
from faults.test_doctor_ranks import DOCTOR, read, shim
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


def test_adapters_that_mpi_is_held_away_from(hosts: Callable[[int], Hosts]) -> None:
    own = hosts(2)
    mount = f"{RDMA}; mkdir /sys/class/cxi /sys/class/cxi/cxi0"
    for host in own.names:
        assert own.exec(host, ["sh", "-euc", mount]).returncode == 0
    placed = Placed.of(find("mpich"), own, "two and one")
    told = read(placed.run(3, DOCTOR, {"PYTHONPATH": str(ROOT), "FI_PROVIDER": "tcp"}, timeout_s=60))
    line = told.lines["network.path"]
    assert line["status"] == "warn", line
    adapters = "mlx5_0, cxi0 on h1; mlx5_0, cxi0 on h2"
    assert line["found"] == f"FI_PROVIDER=tcp holds MPI to TCP, though there is {adapters}"
    assert "unset FI_PROVIDER" in line["mend"]
    assert (told.status, told.fails()) == (0, [])


LIES = {
    # With Open MPI: MPICH and its ranks go by PMI_RANK, and nobody reads the other.
    "SLURM_PROCID=$((1 - SLURM_PROCID))": "rank 0 on h1 has SLURM_PROCID=1",
    "SLURM_JOB_NODELIST=h1": "SLURM_STEP_NUM_NODES=2, but the job has 1 (h1)",
    "SLURM_STEP_NUM_NODES= SLURM_JOB_NODELIST=h2": "ranks are on 2 hosts (h1, h2), the job has 1",
    "SLURM_JOB_NODELIST=h[1,3]": "rank 1 on h2 is on none of the job's nodes (h1, h3)",
}


@pytest.mark.parametrize("lie", LIES)
def test_tasks_whose_variables_lie(slurm: Slurm, tmp_path: Path, lie: str) -> None:
    flavour = find("openmpi" if "PROCID" in lie else "mpich")
    doctor = f"'SLURMD_NODENAME= {lie} exec {flavour.python} {' '.join(DOCTOR)}'"
    line = f"srun --mpi={PMI[flavour.name]} sh -c {doctor}"
    options = ["--nodes=2", "--ntasks-per-node=1"]
    ended = slurm.run(flavour, [batch(tmp_path / "doctor.sbatch", line)], cwd=tmp_path, options=options)
    told = read(subprocess.CompletedProcess([], ended.status, ended.output, ended.output))
    told.failed("slurm.variables", LIES[lie])
    assert told.fails() == ["slurm.variables"]


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
