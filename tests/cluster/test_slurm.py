"""The batch scripts of slurm/, submitted to a real Slurm: results, statuses, and nothing left over."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.fake_hosts import Hosts
from cluster.slurm_fixtures import (
    PMI,
    ROOT,
    SCRIPTS,
    SECONDS,
    TELL,
    Slurm,
    slurm_cluster,  # noqa: F401
    told,
    turned_on,
)
from flavours import Flavour, find, run_tree

DIGITS = ROOT / "docs" / "examples" / "digits.py"
STEPS = 40
SCRIPT_NODES = {"single_node": 1, "multi_node": 2}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the example gives in one process, with no Slurm."""
    folder = tmp_path_factory.mktemp("alone")
    env = find("mpich").env({"PYTHONPATH": str(ROOT), "NCCLCOMM_DEVICES": "host"})
    argv = [find("mpich").python, DIGITS, "--steps", str(STEPS), "--json", "result.json"]
    ended = run_tree(argv, env=env, cwd=folder, timeout_s=60)
    assert ended.returncode == 0, ended.stderr
    return json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize("script", list(SCRIPT_NODES))
def test_the_example_gives_what_one_process_gives(
    slurm: Slurm, flavour: Flavour, script: str, alone: dict[str, Any], tmp_path: Path
) -> None:
    nodes = SCRIPT_NODES[script]
    job = [SCRIPTS / f"{script}.sbatch", DIGITS, "--steps", str(STEPS), "--json", "result.json"]
    ended = slurm.run(flavour, job, cwd=tmp_path, options=["--ntasks-per-node=2"])
    assert (ended.state, ended.status) == ("COMPLETED", 0), ended.output
    result = json.loads((tmp_path / "result.json").read_text())
    assert abs(result["loss"] - alone["loss"]) < 1e-9
    assert result["accuracy"] == alone["accuracy"]
    assert (result["ranks"], result["nodes"], result["backend"]) == (2 * nodes, nodes, "host")
    assert alone["ranks"] == 1
    assert f"--mpi={PMI[flavour.name]} " in ended.output
    assert f"{2 * nodes} ranks on h" in ended.output


def test_defaults_reach_the_ranks_of_a_job_that_exports_nothing(slurm: Slurm, flavour: Flavour, tmp_path: Path) -> None:
    program = tmp_path / "docs" / "examples" / "digits.py"
    program.parent.mkdir(parents=True)
    source = "from mpi4py import MPI\nw = MPI.COMM_WORLD\ntell(w.rank, size=w.size, set=dict(os.environ))\n"
    program.write_text(TELL + source)
    (tmp_path / ".venv").symlink_to(Path(flavour.python).parents[1])
    options = ["--export=NONE", "--cpus-per-task=2"]
    ended = slurm.run(flavour, [SCRIPTS / "multi_node.sbatch"], cwd=tmp_path, options=options)
    assert (ended.state, ended.status) == ("COMPLETED", 0), ended.output
    assert [fact["size"] for fact in told(tmp_path)] == [8] * 8
    assert [fact["host"] for fact in told(tmp_path)] == ["h1"] * 4 + ["h2"] * 4
    for fact in told(tmp_path):
        assert fact["set"]["PYTHONUNBUFFERED"] == "1"
        assert fact["set"]["OMP_NUM_THREADS"] == "2"
        assert fact["set"]["FI_PROVIDER"] == "^sockets,udp"
        # What srun of 22.05 and later takes the cores of a rank from.
        assert fact["set"]["SRUN_CPUS_PER_TASK"] == "2"
        assert "NCCLCOMM_DEVICES" not in fact["set"]


def test_the_kind_of_mpi_can_be_named(slurm: Slurm, tmp_path: Path) -> None:
    job = [SCRIPTS / "single_node.sbatch", "-c", "print(6 * 7)"]
    ended = slurm.run(find("mpich"), job, cwd=tmp_path, env={"NCCLCOMM_SRUN_MPI": "carrier_pigeon"})
    assert (ended.state, ended.status != 0) == ("FAILED", True), ended.output
    assert "--mpi=carrier_pigeon" in ended.output
    assert "42" not in ended.output


def test_an_environment_that_is_not_there(slurm: Slurm, tmp_path: Path) -> None:
    job = [SCRIPTS / "single_node.sbatch"]
    ended = slurm.run(find("mpich"), job, cwd=tmp_path, env={"VENV": str(tmp_path / "nowhere")})
    assert (ended.state, ended.status) == ("FAILED", 2)
    assert f"no {tmp_path}/nowhere/bin/python: set VENV" in ended.output


def test_an_environment_without_mpi4py(slurm: Slurm, tmp_path: Path) -> None:
    python = tmp_path / "bare" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho 'No module named mpi4py' >&2\nexit 1\n")
    python.chmod(0o755)
    job = [SCRIPTS / "single_node.sbatch"]
    ended = slurm.run(find("mpich"), job, cwd=tmp_path, env={"VENV": str(tmp_path / "bare")})
    assert (ended.state, ended.status) == ("FAILED", 1)
    assert "No module named mpi4py" in ended.output
    assert "srun" not in ended.output


BEFORE = "from mpi4py import MPI\nif MPI.COMM_WORLD.rank == 1: raise LookupError('lost')\ncomm = ncclcomm.init()"
FAILURES = {
    "raises before it joins": BEFORE,
    "raises": "comm = ncclcomm.init()\nif comm.rank == 1: raise LookupError('lost')",
    "exits 7": "comm = ncclcomm.init()\nif comm.rank == 1: print('lost', flush=True); sys.exit(7)",
    "is killed": "comm = ncclcomm.init()\nif comm.rank == 1: print('lost', flush=True); os.kill(os.getpid(), 9)",
}


@pytest.mark.parametrize("how", list(FAILURES))
def test_a_rank_that_fails_ends_the_job(slurm: Slurm, flavour: Flavour, how: str, tmp_path: Path) -> None:
    program = tmp_path / "fails.py"
    head = "import os, sys, time\nimport ncclcomm\n"
    program.write_text(f"{head}{FAILURES[how]}\ncomm.barrier()\ncomm.barrier()\nprint('went on')\n")
    start = time.monotonic()
    ended = slurm.run(flavour, [SCRIPTS / "multi_node.sbatch", program], cwd=tmp_path, options=["--ntasks-per-node=2"])
    assert time.monotonic() - start < SECONDS
    assert ended.state == "FAILED", ended.output
    assert ended.status != 0
    assert "lost" in ended.output
    assert "went on" not in ended.output


def test_a_pipe_at_the_end_keeps_the_status(slurm: Slurm, tmp_path: Path) -> None:
    program = tmp_path / "fails.py"
    program.write_text("import ncclcomm\nncclcomm.init()\nraise LookupError('lost')\n")
    script = turned_on("single_node", tmp_path)
    text, last = script.read_text(), 'exec "${command[@]}"\n'
    assert text.endswith(last)
    script.write_text(text.replace(last, last.rstrip() + " 2>&1 | tee log\n"))
    ended = slurm.run(find("mpich"), [script, program], cwd=tmp_path, options=["--ntasks-per-node=2"])
    assert (ended.state, ended.status != 0) == ("FAILED", True), ended.output
    assert "lost" in (tmp_path / "log").read_text()


MODEL = """
import os, time
import numpy as np

steps = 0

def first():
    return np.zeros(1)

def step(x):
    global steps
    steps += 1
    time.sleep(0.05)
    return x + 1

def done(x):
    return steps == 3 and "SLURM_RESTART_COUNT" in os.environ

def report(x):
    print("ended after", int(x[0]), flush=True)
"""
"""A model whose training takes longer than the job has, and three steps more once it has been started again."""


def test_a_job_that_saves_before_its_time_is_over_and_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    section = (ROOT / "docs" / "slurm.md").read_text().partition("## Time limit")[2]
    program = tmp_path / "resumes.py"
    program.write_text(section.partition("```python\n")[2].partition("```")[0])
    (tmp_path / "model.py").write_text(MODEL)
    script = turned_on("multi_node", tmp_path, "requeue", "signal")
    # The signal is due at once, and sent when Slurm looks at its jobs' limits, which it does twice a minute.
    options = ["--ntasks-per-node=1", "--time=2"]
    with slurm.running(find("mpich"), [script, program], cwd=tmp_path, options=options) as number:
        end = time.monotonic() + 90
        while (facts := slurm.facts(number))["Restarts"] == "0":
            assert time.monotonic() < end, slurm.output(number)
            assert facts["JobState"] not in ("COMPLETED", "FAILED"), slurm.output(number)
            time.sleep(0.2)
        while slurm.facts(number)["JobState"] == "COMPLETING":
            assert time.monotonic() < end, slurm.output(number)
            time.sleep(0.1)
        # Left alone it starts two minutes later. slurmd counts whole seconds, and refuses what is issued in the one in
        # which it ended the first run.
        ended_at = time.time()
        while int(time.time()) <= int(ended_at):
            time.sleep(0.05)
        slurm.client("scontrol", "update", f"JobId={number}", "StartTime=now")
        ended = slurm.wait(number)
    assert (ended.state, ended.status) == ("COMPLETED", 0), ended.output
    saved = int(np.load(tmp_path / "state.npy")[0])
    assert saved >= 1
    assert re.findall(r"ended after (\d+)", ended.output) == [str(saved + 3)] * 2
    # Both runs write to one file.
    assert ended.output.count("2 ranks on h[1-2]") == 2


@pytest.mark.parametrize("script", list(SCRIPT_NODES))
def test_every_line_that_can_be_turned_on(slurm: Slurm, script: str, tmp_path: Path) -> None:
    options = re.findall(r"^##SBATCH --(\S+)$", (SCRIPTS / f"{script}.sbatch").read_text(), re.M)
    assert len(options) >= 6
    for option in options:
        slurm.client("sbatch", "--test-only", turned_on(script, tmp_path, option), cwd=tmp_path)


def wait_for_ranks(slurm: Slurm, job: str, folder: Path, count: int) -> None:
    """Wait until that many ranks have told."""
    end = time.monotonic() + 60
    while len(list(folder.glob("told-*"))) < count:
        assert time.monotonic() < end, slurm.output(job)
        time.sleep(0.1)


@pytest.mark.flavours("openmpi")  # SLURM ends the deaf, after 10 s, whatever their MPI
def test_a_cancelled_job_leaves_nothing(slurm: Slurm, flavour: Flavour, tmp_path: Path) -> None:
    program = tmp_path / "waits.py"
    program.write_text(
        TELL + "import signal, ncclcomm\n"
        "from mpi4py import MPI\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "comm = ncclcomm.init()\ntell(comm.rank)\n"
        # Without calls of MPI its last messages might not go out.
        "while comm.rank == 0: MPI.COMM_WORLD.Iprobe()\n"
        "comm.barrier()\n"
    )
    job = [SCRIPTS / "multi_node.sbatch", program]
    with slurm.running(flavour, job, cwd=tmp_path, options=["--ntasks-per-node=2"]) as number:
        wait_for_ranks(slurm, number, tmp_path, 4)
        start = time.monotonic()
        slurm.client("scancel", number)
        ended = slurm.wait(number)
    assert ended.state == "CANCELLED"
    assert time.monotonic() - start < SECONDS


def test_a_cancelled_step_is_an_error(slurm: Slurm, tmp_path: Path) -> None:
    program = tmp_path / "waits.py"
    program.write_text(TELL + "import ncclcomm\ncomm = ncclcomm.init()\ntell(comm.rank)\nwhile True: comm.barrier()\n")
    job = [SCRIPTS / "multi_node.sbatch", program]
    with slurm.running(find("mpich"), job, cwd=tmp_path, options=["--ntasks-per-node=1"]) as number:
        wait_for_ranks(slurm, number, tmp_path, 2)
        slurm.client("scancel", f"{number}.0")
        ended = slurm.wait(number)
    assert (ended.state, ended.status != 0) == ("FAILED", True), ended.output


def test_daemons_listen_in_the_hosts_only(slurm: Slurm) -> None:
    daemons = slurm.daemons()
    assert sorted(daemons) == ["pid", "slurmctld.pid", "slurmd.h1.pid", "slurmd.h2.pid"]
    for name, pid in daemons.items():
        assert os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net"), name


@pytest.mark.usefixtures("slurm")
def test_two_clusters_at_once_and_one_goes(hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    other = Slurm(hosts(1))
    script = tmp_path / "sleeps"
    script.write_text("#!/bin/sh\nsetsid sleep 1000 &\nsleep 1000\n")
    job = other.client("sbatch", "--parsable", script, cwd=tmp_path).strip()
    end = time.monotonic() + 60
    while other.facts(job)["JobState"] != "RUNNING":
        assert time.monotonic() < end, other.facts(job)
        time.sleep(0.1)
    daemons = other.daemons()
    other.close()
    assert not other.folder.exists()
    assert other.hosts.pids("h1") == []
    for name, pid in daemons.items():
        assert not Path(f"/proc/{pid}").exists(), name


def test_the_script_says_how_to_use_it() -> None:
    ended = subprocess.run(
        [Path(__file__).with_name("slurm.sh"), "sideways"], env={"FH": "/nowhere"}, capture_output=True, text=True
    )
    assert ended.returncode == 2
    assert "up N" in ended.stderr
