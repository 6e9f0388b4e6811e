"""What SLURM's variables mean to a rank, and the batch scripts as text."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from flavours import clean_env
from ncclcomm.communicator.gpu import agree_on_gpus
from ncclcomm.communicator.setup import _device_for
from ncclcomm.communicator.world import _alone
from ncclcomm.config import Launch, launched, slurm_gpus
from ncclcomm.errors import DeviceError
from ncclcomm.launcher.slurm import srun_mpi
from ncclcomm.topology import Topology

SCRIPTS = Path(__file__).parents[2] / "slurm"

BATCH = {
    "SLURM_JOB_ID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_GTIDS": "0",
}
"""What a batch script of two nodes finds in Slurm 22.05."""
STEP = {
    **BATCH,
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
}
"""What the last task of its first step finds."""
SALLOC_HERE = {name: BATCH[name] for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES")}
"""What a shell finds that salloc starts where it was called."""
SALLOC_NODE = {**STEP, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
"""What a shell finds that salloc opens on a node: a step of one task, with the job's SLURM_NTASKS."""
HELPER = {**STEP, "PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}
"""What a rank of MPICH's or Intel's mpiexec finds, of which srun started one helper on each of four nodes."""


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (BATCH, None),
        (SALLOC_HERE, None),
        (STEP, ("SLURM_STEP_NUM_TASKS", 4, 3, True)),
        (SALLOC_NODE, ("SLURM_STEP_NUM_TASKS", 1, 0, True)),
        ({**STEP, "SLURM_NTASKS": "1"}, ("SLURM_STEP_NUM_TASKS", 4, 3, True)),
        ({**STEP, "PMI_SIZE": "4", "PMI_RANK": "3"}, ("PMI_SIZE", 4, 3, True)),
        ({**SALLOC_NODE, "PMI_SIZE": "2", "PMI_RANK": "1"}, ("PMI_SIZE", 2, 1, False)),
        ({**BATCH, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, ("OMPI_COMM_WORLD_SIZE", 2, 1, False)),
        ({**STEP, "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}, ("OMPI_COMM_WORLD_SIZE", 4, 3, False)),
        (HELPER, ("PMI_SIZE", 4, 3, False)),
        ({**STEP, "SLURM_STEP_NUM_TASKS": ""}, ("SLURM_NTASKS", 4, 3, True)),
        ({name: value for name, value in STEP.items() if name != "SLURM_LOCALID"}, None),
    ],
)
def test_how_many_ranks_slurm_promises(environ: dict[str, str], expected: tuple[str, int, int, bool] | None) -> None:
    assert launched(environ) == (expected and Launch(*expected))


LIBRARIES = {
    "Open MPI v5.0.11, package: Open MPI x, ident: 5.0.11": "pmix",
    "MPICH Version:      5.0.2\nMPICH ABI:          17:0:5": "pmi2",
    "Intel(R) MPI Library 2021.18 for Linux* OS\x00": "pmi2",
    "MPI VERSION    : CRAY MPICH version 8.1.28.29 (ANL base 3.4a2)": "cray_shasta",
    "MVAPICH Version       :  3.0": "pmi2",
}
"""Texts by which MPI libraries name themselves, and the kind of srun that starts their ranks."""


@pytest.mark.parametrize("version", list(LIBRARIES))
def test_what_to_type_where_srun_promised_more(version: str) -> None:
    by_srun = _alone(Launch("PMI_SIZE", 4, 3, True), version)
    by_another = _alone(Launch("PMI_SIZE", 4, 3, False), version)
    for message in (by_srun, by_another):
        assert message.startswith("PMI_SIZE=4 promises 4 ranks, but MPI sees 1: ")
        assert f"`srun --mpi={LIBRARIES[version]}`" in message
        assert version.split("\n")[0].split()[0] in message
        assert "\x00" not in message
        assert "ncclcomm run" in message
    assert "Start with that MPI's mpiexec" in by_another
    assert ("I_MPI_PMI_LIBRARY" in by_srun) == ("Intel" in version)


def test_what_to_type_with_an_mpi_of_another_name() -> None:
    message = _alone(Launch("SLURM_NTASKS", 2, 0, True), "HPC-X 9")
    assert "`srun --mpi=list`" in message
    assert "(HPC-X 9)" in message


GPUS = [
    # --gpus-per-task=1
    ({"SLURM_JOB_GPUS": "0,1", "SLURM_GPUS_ON_NODE": "2", "SLURM_STEP_GPUS": "1"}, "SLURM_STEP_GPUS=1"),
    # --gpus-per-node=2
    ({"SLURM_JOB_GPUS": "0,1", "SLURM_GPUS_ON_NODE": "2", "SLURM_STEP_GPUS": "0,1"}, "SLURM_STEP_GPUS=0,1"),
    # --gpu-bind=none
    ({"SLURM_JOB_GPUS": "0,1", "SLURM_GPUS_ON_NODE": "2", "SLURM_GPU_BIND": "none"}, "SLURM_JOB_GPUS=0,1"),
    ({"SLURM_GPUS_ON_NODE": "1"}, "SLURM_GPUS_ON_NODE=1"),
    ({"CUDA_VISIBLE_DEVICES": "0,1"}, ""),
    ({}, ""),
]


@pytest.mark.parametrize(("environ", "named"), GPUS)
def test_gpus_that_slurm_gave(environ: dict[str, str], named: str) -> None:
    assert slurm_gpus({**STEP, **environ}) == named


class Gpus:
    """A backend as far as the choice of a rank's device looks at it."""

    name = "cuda"

    def __init__(self, *uuids: str) -> None:
        self.uuids = uuids

    def device_count(self) -> int:
        return len(self.uuids)

    def uuid(self, device: int) -> str:
        return self.uuids[device]


class Virtual(Gpus):
    name = "host"


class Told:
    """A control that answers with what every rank says."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers = answers

    def all_gather_object(self, obj: Any) -> list[Any]:
        if obj is None:  # nothing failed
            return [None] * len(self.answers)
        assert obj in self.answers
        return self.answers


# How four ranks of two nodes see GPUs, and the GPU that each gets. CUDA numbers what CUDA_VISIBLE_DEVICES lists from 0.
SEEN = {
    "--gpus-per-task=1": ([["a0"], ["a1"], ["b0"], ["b1"]], ["a0", "a1", "b0", "b1"]),
    "--gpus-per-node=2": ([["a0", "a1"]] * 2 + [["b0", "b1"]] * 2, ["a0", "a1", "b0", "b1"]),
    "--gpus-per-node=2, on used nodes": ([["a2", "a3"]] * 2 + [["b1", "b3"]] * 2, ["a2", "a3", "b1", "b3"]),
    "--gpu-bind=none": ([["a0", "a1", "a2", "a3"]] * 2 + [["b0", "b1", "b2", "b3"]] * 2, ["a0", "a1", "b0", "b1"]),
}


def choose(seen: list[list[str]], share: bool = False) -> list[str]:
    """The GPU that each of two ranks on each node takes."""
    backends: list[Any] = [Gpus(*uuids) for uuids in seen]
    return [gpus.uuid(_device_for(None, rank % 2, gpus, share)) for rank, gpus in enumerate(backends)]


@pytest.mark.parametrize("request_", list(SEEN))
def test_the_gpu_of_a_rank(request_: str) -> None:
    seen, expected = SEEN[request_]
    assert choose(seen) == expected


def test_two_ranks_that_see_one_gpu_are_told_of_each_other() -> None:
    # --gpus=4 places three GPUs on one node and one on the other.
    seen = [["a0", "a1", "a2"]] * 2 + [["b0"]] * 2
    uuids = choose(seen)
    assert uuids == ["a0", "a1", "b0", "b0"]
    gpus: Any = Gpus(*seen[3])
    control: Any = Told([(uuid, 0, "no NCCL") for uuid in uuids])
    topology = Topology((0, 0, 1, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ncclcomm.communicator.gpu._nccl_version", lambda: (0, "no NCCL"))
        with pytest.raises(DeviceError, match=r"ranks 2-3 of node 1 share the GPU b0.*--gpus-per-task=1"):
            agree_on_gpus(control, topology, 3, 0, gpus, share=False)
        group = agree_on_gpus(control, topology, 3, 0, gpus, share=True)
    assert group is not None
    assert not group.use_nccl


def test_more_ranks_on_a_node_than_gpus() -> None:
    gpus: Any = Gpus("a0", "a1")
    with pytest.raises(DeviceError, match=r"local rank 2 finds 2 GPUs visible.*NCCLCOMM_SHARE_DEVICES=1"):
        _device_for(None, 2, gpus, False)
    assert [_device_for(None, rank, gpus, True) for rank in range(4)] == [0, 1, 0, 1]


def test_virtual_devices_are_shared() -> None:
    devices: Any = Virtual("x", "y", "z")
    assert [_device_for(None, rank, devices, False) for rank in range(5)] == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("listed", ["1", "2,3", "GPU-5a1c", "MIG-5a1c/1/0", "", "no,sense"])
def test_the_list_of_visible_gpus_is_cudas_to_read(listed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    gpus: Any = Gpus("only")
    assert [_device_for(None, rank, gpus, True) for rank in range(3)] == [0, 0, 0]


def script(name: str) -> tuple[list[str], str]:
    """The #SBATCH lines of a batch script, and what comes after them."""
    head, _, body = (SCRIPTS / f"{name}.sbatch").read_text().partition("set -euo pipefail\n")
    return re.findall(r"^#SBATCH (\S+)$", head, re.M), body


def test_the_batch_scripts_differ_in_the_number_of_nodes_alone() -> None:
    (one, one_body), (two, two_body) = script("single_node"), script("multi_node")
    assert one_body == two_body
    assert len(one) >= 5
    assert [(a, b) for a, b in zip(one, two, strict=True) if a != b] == [("--nodes=1", "--nodes=2")]


def run_script(name: str, folder: Path, library: str) -> subprocess.CompletedProcess[str]:
    """Run a batch script whose mpi4py loads a library of that text, and whose srun prints its arguments."""
    for program, body in (("python", 'printf "%s" "$LIBRARY"'), ("srun", 'echo "CPUS=$SRUN_CPUS_PER_TASK $*"')):
        path = folder / "bin" / program
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    env = {
        **clean_env(),
        **{"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "h1", "SLURM_CPUS_PER_TASK": "3"},
        **{"VENV": str(folder), "LIBRARY": library, "PATH": f"{folder}/bin:{os.environ['PATH']}"},
    }
    argv = ["bash", SCRIPTS / f"{name}.sbatch", "train.py", "two words"]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=20, check=False)


@pytest.mark.parametrize("version", list(LIBRARIES))
def test_the_batch_scripts_launcher_and_errors_name_the_same_kind(version: str, tmp_path: Path) -> None:
    kind = LIBRARIES[version]
    ended = run_script("multi_node", tmp_path, version.strip("\x00"))
    assert ended.returncode == 0, ended.stderr
    called = ended.stdout.splitlines()[-1]
    assert called.startswith(f"CPUS=3 --mpi={kind} ")
    assert called.endswith(f" {tmp_path}/bin/python -m mpi4py train.py two words")
    assert "two\\ words" in ended.stdout
    flavours = {"Open MPI": "Open MPI", "MPICH Ver": "MPICH", "Intel": "Intel MPI"}
    for word, flavour in flavours.items():
        if word in version:
            assert srun_mpi(flavour, ("none", "cray_shasta", "pmix", "pmi2")) == kind


def test_a_batch_script_with_an_mpi_of_another_name(tmp_path: Path) -> None:
    ended = run_script("single_node", tmp_path, "HPC-X 9")
    assert ended.returncode == 2
    assert "set NCCLCOMM_SRUN_MPI to what 'srun --mpi=list' has for this MPI: HPC-X 9" in ended.stderr


@pytest.mark.parametrize("name", ["single_node", "multi_node"])
def test_a_batch_script_that_is_not_in_a_job(name: str) -> None:
    path = SCRIPTS / f"{name}.sbatch"
    ended = subprocess.run(["bash", path], env=clean_env(), capture_output=True, text=True, timeout=20, check=False)
    assert ended.returncode != 0
    assert "SLURM_JOB_ID: submit this file with sbatch" in ended.stderr
    assert ended.stdout == ""


def test_the_batch_scripts_name_variables_that_exist() -> None:
    source = (Path(__file__).parents[2] / "ncclcomm" / "config.py").read_text()
    ours = set(re.findall(r"NCCLCOMM_[A-Z_]+", script("multi_node")[1])) - {"NCCLCOMM_SRUN_MPI"}
    assert ours
    for name in ours:
        assert f'"{name}"' in source
