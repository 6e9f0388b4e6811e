"""`ncclcomm doctor` and `ncclcomm info` in one process, without a launcher or with its promises broken."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from faults.test_doctor_ranks import DEADLINE_S, Told, read
from faults.test_world_alone import BLOCKED, ROOT
from flavours import Flavour, find, run_tree

MAIN = "from ncclcomm.cli import main\nraise SystemExit(main(['doctor', '--json']))\n"


def alone(flavour: Flavour, env: dict[str, str] | None = None, program: str = MAIN) -> Told:
    """Run the doctor without a launcher."""
    full = flavour.env({"PYTHONPATH": str(ROOT), **(env or {})})
    return read(run_tree([flavour.python, "-c", program], env=full, timeout_s=DEADLINE_S))


@pytest.fixture
def mpich() -> Flavour:
    return find("mpich")


def test_a_sound_process_passes_in_seconds(flavour: Flavour) -> None:
    started = time.monotonic()
    told = alone(flavour)
    assert time.monotonic() - started < 20
    assert told.status == 0
    assert not told.fails()
    assert str(Path(flavour.python).parent / "mpiexec") in told.lines["mpi.launcher"]["found"]
    assert told.lines["trial.devices"]["status"] == "pass"
    for name in ("gpu.driver", "gpu.cupy", "gpu.nccl", "gpu.kernels", "devices.shared", "trial.node", "trial.nodes"):
        assert told.lines[name]["status"] == "not checked"
        assert told.lines[name]["found"]


def test_without_mpi4py(mpich: Flavour) -> None:
    told = alone(mpich, program=BLOCKED + MAIN)
    assert told.status == 0
    assert told.lines["mpi.launcher"]["status"] == "warn"
    assert "pip install" in told.lines["mpi.launcher"]["mend"]
    assert told.lines["trial.devices"]["status"] == "pass"


SLURM_TASK = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "a[1-2]",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURMD_NODENAME": "a1",
}


def test_ranks_promised_to_a_process_without_mpi4py(mpich: Flavour) -> None:
    told = alone(mpich, SLURM_TASK, BLOCKED + MAIN)
    told.failed("mpi.launcher", "SLURM_STEP_NUM_TASKS=4", "pip install")


def test_srun_without_the_right_mpi(flavour: Flavour) -> None:
    told = alone(flavour, SLURM_TASK)
    wanted = "pmix" if flavour.name == "openmpi" else "pmi2"
    told.failed("world.size", "SLURM_STEP_NUM_TASKS=4", "sees 1", f"--mpi={wanted}")
    assert told.lines["slurm.variables"]["status"] == "pass"


def test_only_one_process_of_a_broken_job_reports(mpich: Flavour) -> None:
    env = mpich.env({"PYTHONPATH": str(ROOT), **SLURM_TASK, "SLURM_PROCID": "2"})
    ended = run_tree([mpich.python, "-c", MAIN], env=env, timeout_s=DEADLINE_S)
    assert ended.stdout == ""
    assert ended.returncode == 0


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ({"SLURM_JOB_NODELIST": "a[1-"}, ("SLURM_JOB_NODELIST", "a[1-")),
        ({"SLURM_JOB_NODELIST": "b[1-2]"}, ("none of the job's nodes", "b1")),
        ({"SLURM_STEP_NUM_NODES": "5"}, ("SLURM_STEP_NUM_NODES=5", "the job has 2")),
    ],
)
def test_slurm_variables_that_lie(mpich: Flavour, lie: dict[str, str], words: tuple[str, ...]) -> None:
    told = alone(mpich, {**SLURM_TASK, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", **lie})
    told.failed("slurm.variables", *words)
    assert told.fails() == ["slurm.variables"]


def test_gpus_demanded_and_none_there(mpich: Flavour) -> None:
    told = alone(mpich, {"NCCLCOMM_DEVICES": "cuda"}, "import sys\nsys.modules['cupy'] = None\n" + MAIN)
    told.failed("devices.backend", "NCCLCOMM_DEVICES=cuda", "pip install", "NCCLCOMM_DEVICES=host")
    assert told.fails() == ["devices.backend"]


def test_gpus_of_slurm_that_cannot_be_used(mpich: Flavour) -> None:
    env = {"NCCLCOMM_DEVICES": "auto", "SLURM_JOB_GPUS": "0,1"}
    told = alone(mpich, env, "import sys\nsys.modules['cupy'] = None\n" + MAIN)
    told.failed("devices.backend", "SLURM_JOB_GPUS=0,1")


def test_an_interface_that_is_not_there(mpich: Flavour) -> None:
    told = alone(mpich, {"NCCL_SOCKET_IFNAME": "=nosuch0"})
    told.failed("network.nccl_interface", "=nosuch0", "lo", "unset NCCL_SOCKET_IFNAME")
    assert told.fails() == ["network.nccl_interface"]


def test_settings(mpich: Flavour) -> None:
    told = alone(mpich, {"NCCLCOMM_DEVICES": "gpu"})
    told.failed("settings.values", "NCCLCOMM_DEVICES='gpu'", "unset NCCLCOMM_DEVICES")
    assert told.fails() == ["settings.values"]
    told = alone(mpich, {"NCCLCOMM_TIMEOUTS": "3"})
    line = told.lines["settings.names"]
    assert line["status"] == "warn"
    assert "NCCLCOMM_TIMEOUTS" in line["found"]
    assert "NCCLCOMM_TIMEOUT_S" in line["mend"]
    assert told.status == 0


SECRETS = ("SLURM_JWT", "NCCLCOMM_JOB_LINK", "SLURM_REST_token", "NCCL_Password", "CUDA_API_KEY", "UCX_SECRET_X")


def test_reports_show_no_secrets(mpich: Flavour) -> None:
    env = mpich.env({"PYTHONPATH": str(ROOT), "NCCL_DEBUG": "WARN", **dict.fromkeys(SECRETS, "s3cr3t")})
    for words in (["doctor", "--json"], ["info", "--json"], ["info"]):
        ended = run_tree([mpich.python, "-m", "ncclcomm", *words], env=env, timeout_s=DEADLINE_S)
        assert "NCCL_DEBUG" in ended.stdout or words == ["doctor"]
        assert "s3cr3t" not in ended.stdout + ended.stderr


def test_variables_that_are_no_text(mpich: Flavour) -> None:
    env = {**mpich.env({"PYTHONPATH": str(ROOT)}), "NCCL_DEBUG_FILE": os.fsdecode(b"\xff"), "PYTHONUTF8": "1"}
    argv = [mpich.python, "-m", "ncclcomm", "info"]
    ended = subprocess.run(argv, env=env, capture_output=True, timeout=DEADLINE_S, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert b"NCCL_DEBUG_FILE=\xff" in ended.stdout


def test_bad_options_are_one_line(mpich: Flavour) -> None:
    for words in (["--timeout", "soon"], ["--timeout", "0"], ["--frob"]):
        ended = run_tree([mpich.python, "-m", "ncclcomm", "doctor", *words], env=mpich.env({"PYTHONPATH": str(ROOT)}))
        assert ended.returncode == 2
        assert len([line for line in ended.stderr.splitlines() if "error:" in line]) == 1
