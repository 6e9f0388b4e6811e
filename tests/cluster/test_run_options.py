"""Where `ncclcomm run` puts ranks, and what they get there, over hosts by ssh and in a SLURM job; each MPI flavour."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.fake_hosts import Hosts
from cluster.slurm_fixtures import ROOT, Slurm, batch, slurm_cluster  # noqa: F401 - a fixture
from flavours import FLAVOURS, Flavour, clean_env

pytestmark = pytest.mark.flavours(*FLAVOURS)

WHERE = """
import json, os, sys
from mpi4py import MPI
names = ("X_", "CUDA_", "NCCL_", "NCCLCOMM_")
mine = [os.uname().nodename, {k: v for k, v in os.environ.items() if k.startswith(names)}, sys.argv[2:], os.getcwd()]
everyone = MPI.COMM_WORLD.gather(mine)
if everyone: open(sys.argv[1], "w").write(json.dumps(everyone))
"""

VALUES = {
    "X_QUOTES": 'it\'s "so"  $HOME `x` \\ ;|&*,= %d',
    "X_EMPTY": "",
    "X_LINES": "two\nlines\n",
    "X_EQUALS": " =a= ",
    "X_EQ": "=",
}


@pytest.fixture
def where(tmp_path: Path) -> Path:
    path = tmp_path / "where it is.py"
    path.write_text(WHERE)
    return path


@pytest.fixture(scope="module")
def trio(hosts: Callable[..., Hosts]) -> tuple[Hosts, str]:
    """Three hosts, and what reaches them."""
    made = hosts(3)
    return made, made.start_sshd()


def told(path: Path) -> list[Any]:
    """What the ranks found, in rank order."""
    return list(json.loads(path.read_text()))


PLACES = {
    "even": (["--hosts", "h2,h1", "--ranks-per-node", "2", "-n", "auto"], ["h2", "h2", "h1", "h1"]),
    "uneven": (["--hosts", "h1:1,h2:3,h3:2", "-n", "5"], ["h1", "h2", "h2", "h2", "h3"]),
}


@pytest.mark.parametrize("form", list(PLACES))
def test_over_hosts(trio: tuple[Hosts, str], flavour: Flavour, where: Path, tmp_path: Path, form: str) -> None:
    hosts, ssh = trio
    options, expected = PLACES[form]
    settings = [word for name, value in VALUES.items() for word in ("--env", f"{name}={value}")]
    env = {name: value for name, value in clean_env().items() if not name.startswith(("NCCLCOMM_", "CUDA_", "NCCL_"))}
    env |= {"PYTHONPATH": str(ROOT), "NCCLCOMM_SSH": ssh, "CUDA_VISIBLE_DEVICES": "GPU-a,MIG-b/1/0,7"}
    env |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT, ENV"}
    args = ["a  b", ":", "", "-n", "*"]
    argv = [flavour.python, "-m", "ncclcomm", "run", *options, *settings, "--devices-per-rank", "1", where.name, "told"]
    done = hosts.exec("h1", [*argv, *args], env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = told(tmp_path / "told")
    assert [host for host, *_ in ranks] == expected
    for number, (host, environ, argv, folder) in enumerate(ranks):
        assert environ.items() >= {**VALUES, "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT, ENV"}.items()
        # MPICH's -genvlist would lose the last one of its environment, which is one of these.
        assert {"NCCLCOMM_DEVICES_PER_RANK", "NCCLCOMM_JOB_ID", "NCCLCOMM_JOB_LINK", "NCCLCOMM_WATCHED"} <= set(environ)
        assert environ["CUDA_VISIBLE_DEVICES"] == ["GPU-a", "MIG-b/1/0", "7"][expected[:number].count(host)]
        assert (argv, folder) == (args, str(tmp_path))


FORMS = {
    "all": ("-n auto", ["h1", "h1", "h2", "h2"]),
    "uneven": ("-n 3", ["h1", "h1", "h2"]),
    "first": ("-n 2", ["h1", "h1"]),
    "mpiexec": ("-n 3 --launcher mpiexec", ["h1", "h1", "h2"]),
}


def test_in_a_slurm_job(slurm: Slurm, flavour: Flavour, where: Path, tmp_path: Path) -> None:
    run = "$VENV/bin/python -m ncclcomm run"
    script = f"'{where}'"
    given = "--env X_EQ='it is \"=\"'"
    lines = [f"{run} {options} {given} {script} '{name}' 'a b' :" for name, (options, _) in FORMS.items()]
    lines.append(f"srun --nodes=1 --ntasks=1 --mpi=none {run} -n 2 {script} 'in a task'")
    lines.append(f"{run} -n 5 {script} none || echo status $?")
    lines.append(f"srun --ntasks=2 --mpi=none {run} -n 2 {script} none || echo status $?")
    job = batch(tmp_path / "job", "set -e", *lines)
    ended = slurm.run(flavour, [job], cwd=tmp_path, options=["--nodes=2", "--ntasks-per-node=2"])
    assert (ended.state, ended.status) == ("COMPLETED", 0), ended.output
    for name, (_, expected) in FORMS.items():
        ranks = told(tmp_path / name)
        assert [host for host, *_ in ranks] == expected, name
        assert all((environ["X_EQ"], argv) == ('it is "="', ["a b", ":"]) for _, environ, argv, _ in ranks)
    assert [host for host, *_ in told(tmp_path / "in a task")] == ["h1", "h1"]
    assert not (tmp_path / "none").exists()
    assert ended.output.count("status 2") == 2, ended.output
    assert "-n 5 is more than the 4 slots of h1:2,h2:2: ask SLURM" in ended.output
    assert "srun runs `ncclcomm run` in 2 tasks" in ended.output
    assert "Warning" not in ended.output
