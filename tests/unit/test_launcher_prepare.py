"""What `ncclcomm run` makes of its options, the environment and the machine, as its dry run shows; what it refuses."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ncclcomm.cli import main
from ncclcomm.errors import BackendUnavailableError
from ncclcomm.launcher import machine, prepare, run
from ncclcomm.launcher.command import CHILD, OPENMPI
from ncclcomm.launcher.flavour import guess_launcher
from ncclcomm.launcher.machine import count_gpus, physical_cores

Dry = Callable[..., list[str]]
Refused = Callable[..., str]

JOB = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_TASKS_PER_NODE": "4(x2),2",
    "SLURM_JOB_CPUS_PER_NODE": "8(x3)",
}
TASK = {**JOB, "SLURM_STEP_ID": "0", "SLURM_LOCALID": "0", "SLURM_PROCID": "0"}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No launcher, no SLURM, an MPICH beside the interpreter, and a program."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "NCCLCOMM_", "OMPI_", "PRTE_", "MPIR_", "I_MPI_", "CUDA_", "FI_")):
            monkeypatch.delenv(name)
    for name in ("mpiexec", "mpiexec.hydra", "ssh"):
        program(tmp_path / "bin" / name, "exit 9")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.py").write_text("")


def program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def srun(tmp_path: Path) -> Callable[[str], None]:
    """Put an srun on PATH whose --mpi=list shows these types."""
    path, head = tmp_path / "bin" / "srun", "echo 'MPI plugin types are...'"
    return lambda types: program(path, f"{head}; printf '\\t%s\\n' {types}")


@pytest.fixture
def dry(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Dry:
    """The words of the command that a dry run prints."""

    def run(*options: str, **environ: str) -> list[str]:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        status = main(["run", "--dry-run", *options, "p.py"])
        out, err = capsys.readouterr()
        assert (status, err) == (0, "")
        words = shlex.split(out)
        assert words[words.index(CHILD) + 1 :] == ["p.py"]
        return words

    return run


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """The one line with which options are refused, with status 2."""

    def run(*options: str, **environ: str) -> str:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        assert main(["run", *options, "p.py"]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        (line,) = err.splitlines()
        assert line.startswith("ncclcomm run: ")
        return line

    return run


def test_auto_takes_physical_cores(dry: Dry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "physical_cores", lambda: 7)
    monkeypatch.setattr(prepare, "count_gpus", lambda environ: 0)
    assert "-n 7 " in shlex.join(dry("-n", "auto"))
    assert "-n 3 " in shlex.join(dry("-n", "auto", "--ranks-per-node", "3"))


def test_auto_takes_gpus_before_cores(dry: Dry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "count_gpus", lambda environ: 4)
    assert "-n 4 " in shlex.join(dry("-n", "auto"))
    assert "-n 2 " in shlex.join(dry("-n", "auto", "--devices-per-rank", "2"))


def test_auto_takes_the_slots_of_hosts(dry: Dry) -> None:
    words = shlex.join(dry("-n", "auto", "--hosts", "h1:2,h2:3"))
    assert "-hosts h1:2,h2:3 -n 5 " in words


def test_hostfile(dry: Dry, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("h1 slots=2\nh2  # one\n")
    assert "-hosts h1:2,h2:1 -n 3 " in shlex.join(dry("-n", "3", "--hostfile", "hosts"))


def test_ssh_and_its_options(dry: Dry, tmp_path: Path) -> None:
    words = dry("-n", "2", "--hosts", "h1,h2", NCCLCOMM_SSH="ssh -p 7")
    assert words[words.index("-launcher-exec") + 1] == str(tmp_path / "bin" / "ssh")
    assert any(word.startswith("HYDRA_LAUNCHER_EXTRA_ARGS=-p 7 -o ") for word in words)
    assert any("-p 9" in word for word in dry("-n", "2", "--hosts", "h1,h2", "--ssh", "ssh -p 9"))


@pytest.mark.parametrize("value", ["a b", 'it\'s "so"', "", "one\ntwo\n", "a=b", "=", "$HOME `x` \\ ;|&*", " x "])
def test_env_is_shown_exactly(dry: Dry, value: str) -> None:
    assert f"X={value}" in dry("-n", "1", "--env", f"X={value}")
    assert f"Y={value}" in dry("-n", "1", "--env", "Y", Y=value)


def test_env_wins_over_the_environment(dry: Dry) -> None:
    assert "X=2" in dry("-n", "1", "--env", "X=1", "--env", "X=2", X="0")


@pytest.mark.parametrize(
    ("options", "environ", "said"),
    [
        (["--env", "1X=2"], {}, "--env '1X=2': '1X' is no variable's name"),
        (["--env", "=2"], {}, "'' is no variable's name"),
        (["--env", "NOT_SET_ANYWHERE"], {}, "--env NOT_SET_ANYWHERE: no such variable is set"),
        (["--env", "NCCLCOMM_JOB_ID=3"], {}, "itself sets NCCLCOMM_JOB_"),
        (["--env", "NCCLCOMM_CHECK=maybe"], {}, "NCCLCOMM_CHECK='maybe'"),
        ([], {"NCCLCOMM_TIMEOUT_S": "soon"}, "NCCLCOMM_TIMEOUT_S='soon'"),
        ([], {"NCCLCOMM_DEVICES": "tpu"}, "NCCLCOMM_DEVICES='tpu'"),
        ([], {"NCCLCOMM_DEVICES_PER_RANK": "-1"}, "NCCLCOMM_DEVICES_PER_RANK='-1'"),
        (["--hosts", "h1,,h2"], {}, "--hosts='h1,,h2' has an empty entry"),
        (["--hosts", ""], {}, "--hosts='' has an empty entry"),
        (["--hosts", "h1:1,h2:1"], {}, "-n 3 is more than the 2 slots of h1:1,h2:1"),
        (["--hostfile", "no/such"], {}, "--hostfile 'no/such' cannot be read: No such file"),
        (["--hostfile", "."], {}, "--hostfile '.' cannot be read: Is a directory"),
        (["--hostfile", "bytes"], {}, "--hostfile 'bytes' cannot be read: it is no text"),
        (["--ranks-per-node", "2"], {}, "-n 3 is more than --ranks-per-node 2 on this host alone"),
        (["--hosts", "h1", "--ssh", "no-such-ssh"], {}, "--ssh 'no-such-ssh': there is no command 'no-such-ssh'"),
        (["--hosts", "h1", "--ssh", "ssh 'x"], {}, "is no command: No closing quotation"),
        (["--hosts", "h1", "--ssh", "ssh -o 'a b'"], {}, "'a b' holds a space"),
        (["--hosts", "h1", "--ssh", "'a b/ssh'"], {}, "a b/ssh' holds a space"),
        (["--hosts", "h1", "--ssh", ""], {}, "--ssh '': expected words"),
        (["--hosts", "h1", "--ssh", "ssh ''"], {}, "expected words that are not empty"),
        (["--ssh", "ssh -p 9"], {}, "--ssh 'ssh -p 9' reaches other hosts, and none is named"),
        (["--mpi", "pmix", "--dry-run"], {}, "--mpi pmix is srun's, and ranks are started by"),
        (["--mpi", "pmix", "--hosts", "h1", "--dry-run"], JOB, "--mpi pmix is srun's"),
        (["--env", "NCCLCOMM_DEVICES_PER_RANK=1"], {"CUDA_VISIBLE_DEVICES": "0"}, "='0' shows 1 devices"),
        (["--hosts", "h1"], {"NCCLCOMM_SSH": "'"}, 'NCCLCOMM_SSH "\'" is no command'),
        (["--devices-per-rank", "1"], {"CUDA_VISIBLE_DEVICES": "0,1"}, "CUDA_VISIBLE_DEVICES='0,1' shows 2 devices"),
        (["--devices-per-rank", "1"], {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES='' shows 0 devices"),
        (["--launcher", "srun"], {}, "--launcher srun needs a SLURM job"),
        (["--launcher", "srun", "--hosts", "h1"], {}, "leave out --hosts"),
        ([], {**JOB, "SLURM_JOB_NODELIST": "n[1-"}, "SLURM_JOB_NODELIST='n[1-'"),
        ([], {**JOB, "SLURM_TASKS_PER_NODE": "x(2)"}, "SLURM_TASKS_PER_NODE='x(2)'"),
        (["--ranks-per-node", "4"], JOB, "4 is more than the 2 slots of n3: ask SLURM for more in job 12"),
        ([], {**TASK, "SLURM_STEP_NUM_TASKS": "3"}, "srun runs `ncclcomm run` in 3 tasks (SLURM_STEP_NUM_TASKS)"),
        (["--launcher", "srun"], {**TASK, "SLURM_STEP_NUM_TASKS": "1"}, "can't be used inside a task of srun"),
    ],
)
def test_refused_in_one_line(
    refused: Refused, tmp_path: Path, options: list[str], environ: dict[str, str], said: str
) -> None:
    program(tmp_path / "a b" / "ssh", "exit 9")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    assert said in refused("-n", "3", *options, **environ)


def test_more_devices_than_there_are(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "count_gpus", lambda environ: 2)
    assert "CUDA_VISIBLE_DEVICES='0,1' shows 2 devices" in refused("-n", "3", "--devices-per-rank", "1")
    assert "--devices-per-rank 3 is more than the 2 GPUs" in refused("-n", "auto", "--devices-per-rank", "3")


def test_a_slurm_job_gets_srun(dry: Dry, srun: Callable[[str], None], tmp_path: Path) -> None:
    srun("none pmix pmi2")
    line = shlex.join(dry("-n", "5", "--label", **JOB, SLURM_CPUS_PER_TASK="2"))
    assert f"{tmp_path}/bin/srun --mpi=pmi2 --kill-on-bad-exit=1 --ntasks=5 --distribution=arbitrary " in line
    assert " --nodelist=n1,n1,n1,n1,n2 " in line
    assert " --export=ALL " in line
    assert " --cpus-per-task=2 " in line
    assert " --label " in line
    assert " --ntasks=10 " in shlex.join(dry("-n", "auto"))
    assert " --nodes=1 --ntasks=4 --ntasks-per-node=4 " in shlex.join(dry("-n", "4"))
    assert " --nodes=3 --ntasks=6 " in shlex.join(dry("-n", "auto", "--ranks-per-node", "2"))
    assert "--mpi=cray_shasta" in dry("-n", "4", "--mpi", "cray_shasta")


def test_the_type_of_srun_is_the_flavours(dry: Dry, srun: Callable[[str], None], tmp_path: Path) -> None:
    srun("none pmix_v4 pmi2")
    (tmp_path / "bin" / "mpiexec.hydra").unlink()
    program(tmp_path / "bin" / "prterun", "exit 9")
    assert "--mpi=pmix_v4" in dry("-n", "4", **JOB)


def test_mpiexec_where_srun_has_no_type(dry: Dry, srun: Callable[[str], None]) -> None:
    srun("none pmix")
    assert "-launcher slurm -hosts n1:4,n2:1 -n 5 " in shlex.join(dry("-n", "5", **JOB))


def test_srun_demanded_where_it_has_no_type(
    refused: Refused, srun: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    srun("none pmi2")
    monkeypatch.setattr(prepare, "find_flavour", lambda environ: OPENMPI)
    assert "srun --mpi=list has no type for Open MPI" in refused("-n", "5", "--launcher", "srun", **JOB)


def test_no_srun_on_path(dry: Dry, refused: Refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(prepare, "find_flavour", lambda environ: OPENMPI)
    assert "-launcher slurm -hosts n1:4,n2:1 -n 5 " in shlex.join(dry("-n", "5", **JOB))
    assert "there is no srun on PATH" in refused("-n", "5", "--launcher", "srun")


def test_hosts_by_name_inside_a_slurm_job_go_by_ssh(dry: Dry, srun: Callable[[str], None]) -> None:
    srun("pmi2")
    assert "-launcher ssh " in shlex.join(dry("-n", "2", "--hosts", "n1,n2", **JOB))


def test_a_task_of_srun_starts_ranks_on_its_own_host(dry: Dry, srun: Callable[[str], None]) -> None:
    srun("pmi2")
    words = dry("-n", "2", **TASK, SLURM_STEP_NUM_TASKS="1")
    assert {"HYDRA_LAUNCHER=fork", "HYDRA_RMK=user"} < set(words)
    assert "-hosts" not in words


def test_physical_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 6})
    for cpu in range(8):
        folder = tmp_path / f"devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    assert physical_cores(tmp_path) == 4
    (tmp_path / "fs/cgroup").mkdir(parents=True)
    for share, cores in (("max 100000\n", 4), ("150000 100000\n", 2), ("1000 100000\n", 1), ("900000 100000\n", 4)):
        (tmp_path / "fs/cgroup/cpu.max").write_text(share)
        assert physical_cores(tmp_path) == cores
    assert physical_cores(tmp_path / "nothing there") == 5


def test_gpus_are_counted_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert count_gpus({**os.environ, "NCCLCOMM_DEVICES": "host:3"}) == 0
    with pytest.raises(BackendUnavailableError, match=r"can't be counted: .*NCCLCOMM_DEVICES"):
        count_gpus({**os.environ, "NCCLCOMM_DEVICES": "tpu"})


@pytest.mark.parametrize("line", ["print('hello')", "import atexit; atexit.register(print, 'bye')"])
def test_gpus_are_counted_where_python_prints_lines_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.undo()
    (tmp_path / "sitecustomize.py").write_text(f"{line}\n")
    environ = {**os.environ, "NCCLCOMM_DEVICES": "host", "PYTHONPATH": str(tmp_path)}
    if "bye" in line:
        with pytest.raises(BackendUnavailableError, match="printed 'bye', not a number"):
            count_gpus(environ)
    else:
        assert count_gpus(environ) == 0


@pytest.mark.parametrize(("cpus", "shared"), [("2,8(x2)", True), ("4,1(x2)", False)])
def test_nodes_of_a_slurm_job_have_cores_of_their_own(dry: Dry, cpus: str, shared: bool) -> None:
    job = {**JOB, "SLURM_JOB_CPUS_PER_NODE": cpus}
    words = dry("-n", "5", "--launcher", "mpiexec", **job)
    assert "n1:4,n2:1" in words
    assert ("MPIR_CVAR_CH4_NETMOD=ofi" in words) is shared


def test_devices_per_rank_of_another_job_are_dropped(dry: Dry, monkeypatch: pytest.MonkeyPatch) -> None:
    outer = {"NCCLCOMM_DEVICES_PER_RANK": "4", "CUDA_VISIBLE_DEVICES": "0"}
    assert "NCCLCOMM_DEVICES_PER_RANK=" in dry("-n", "1", **outer)
    assert "NCCLCOMM_DEVICES_PER_RANK=1" in dry("-n", "1", "--devices-per-rank", "1")
    assert "NCCLCOMM_DEVICES_PER_RANK=1" in dry("-n", "1", "--env", "NCCLCOMM_DEVICES_PER_RANK=1")


def test_the_folder_goes_by_its_name_in_the_shell(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def look(_hosts: object, *, folder: str, **_more: object) -> tuple[list[str], dict[str, int]]:
        seen.append(folder)
        return ["host h1 is not there"], {}

    seen: list[str] = []
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.setattr(run, "check_hosts", look)
    monkeypatch.setattr(prepare, "find_launcher", lambda environ: guess_launcher())
    for named in ("link", ".", "elsewhere"):
        monkeypatch.setenv("PWD", named if named == "." else str(tmp_path / named))
        assert main(["run", "-n", "1", "--hosts", "h1", "p.py"]) == 2
    assert seen == [str(tmp_path / "link"), str(tmp_path), str(tmp_path)]
    assert capsys.readouterr().err == "ncclcomm run: host h1 is not there\n" * 3
