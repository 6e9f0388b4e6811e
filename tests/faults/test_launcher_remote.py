"""What `ncclcomm run` does on other hosts over ssh, with stand-ins for ssh."""

from __future__ import annotations

import os
import re
import resource
import signal
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flavours import clean_env, find, run_tree
from ncclcomm.launcher import remote
from ncclcomm.launcher.leftovers import kill_marked
from ncclcomm.launcher.remote import check_hosts, sweep_hosts

ROOT = Path(__file__).resolve().parents[2]
Stand = Callable[[str], tuple[str, ...]]

OPTIONS = """
while [ "${1#-}" != "$1" ]; do
    case $1 in -o) shift 2 ;; *) shift ;; esac
done
host=$1
shift
"""
"""Takes ssh's options and its host."""
HERE = OPTIONS + 'exec sh -c "$*"\n'
"""Runs the command on this host."""


@pytest.fixture
def ssh(tmp_path: Path) -> Stand:
    """Make a stand-in of the lines of a shell script; the words that call it."""

    def make(lines: str) -> tuple[str, ...]:
        path = tmp_path / "ssh stand-in"
        path.write_text(f"#!/bin/sh\n{lines}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return (str(path),)

    return make


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter whose mpi4py works, as far as can be told by importing it."""
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\nexit 0\n")
    path.chmod(0o755)
    return str(path)


def check(ssh: tuple[str, ...], hosts: list[str], folder: Path, python: str, script: str | None = None) -> list[str]:
    return check_hosts(hosts, ssh=ssh, folder=str(folder), python=python, script=script)[0]


def test_hosts_that_are_right(ssh: Stand, python: str, tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s "a" $HOME; folder'
    folder.mkdir()
    (folder / "my script.py").write_text("")
    noisy = OPTIONS + 'echo "Welcome to $host"; echo ready\nsh -c "$*"\necho bye; exit 3\n'
    for lines in (HERE, noisy):
        assert check(ssh(lines), ["a", "b"], folder, python, "my script.py") == []
        assert check(ssh(lines), ["a", "b"], folder, python) == []


def test_hosts_tell_their_cores(ssh: Stand, python: str, tmp_path: Path) -> None:
    words = ssh(OPTIONS + 'if [ "$host" = a ]; then exec taskset -c "$ONE" sh -c "$*"; fi\nexec sh -c "$*"\n')
    one = str(min(os.sched_getaffinity(0)))

    def cores(python: str) -> tuple[list[str], dict[str, int]]:
        environ = {**os.environ, "ONE": one}
        hosts = ["a", "b"]
        return check_hosts(hosts, ssh=words, folder=str(tmp_path), python=python, script=None, environ=environ)

    here = len(os.sched_getaffinity(0))
    assert cores(find("mpich").python) == ([], {"a": 1, "b": here})
    # One that prints a line of its own first, and one whose last word is no number.
    Path(python).write_text(f'#!/bin/sh\necho 1 welcome 9 times\n"{find("mpich").python}" "$@"\n')
    assert cores(python) == ([], {"a": 1, "b": here})
    Path(python).write_text("#!/bin/sh\necho 7; echo bye\n")
    assert cores(python) == ([], {})


def test_what_is_missing(ssh: Stand, python: str, tmp_path: Path) -> None:
    words = ssh(HERE)
    assert check(words, ["a"], tmp_path / "none", python) == [
        f"host a has no folder {tmp_path}/none; the project must be at the same path on every host"
    ]
    assert check(words, ["a"], tmp_path, "/no/python") == [
        "host a has no /no/python; the Python environment must be at the same path on every host"
    ]
    assert check(words, ["a"], tmp_path, python, "x.py") == [f"host a has no file x.py in {tmp_path}"]
    Path(python).write_text("#!/bin/sh\nexit 1\n")
    assert check(words, ["a", "b"], tmp_path, python) == [
        f"host {host} has no mpi4py that works in the environment of {python}" for host in "ab"
    ]


def test_hosts_that_cannot_be_reached(ssh: Stand, python: str, tmp_path: Path) -> None:
    words = ssh(OPTIONS + 'if [ "$host" = b ]; then echo "no way" >&2; echo "to $host" >&2; exit 255; fi\nexit 7\n')
    assert check(words, ["a", "b"], tmp_path, python) == [
        f"host a can't be reached: {words[0]} ended with status 7",
        "host b can't be reached: to b",
    ]


def test_an_ssh_that_cannot_be_started_is_the_hosts_trouble(python: str, tmp_path: Path) -> None:
    (line,) = check((f"{tmp_path}/none",), ["a"], tmp_path, python)
    assert line.startswith("host a can't be reached: [Errno 2]")
    assert sweep_hosts(["a"], ssh=(f"{tmp_path}/none",), job_id="0", environ={}) == []


def test_more_hosts_than_files_may_be_open(ssh: Stand, python: str, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    words, taken = ssh(HERE), set(map(int, os.listdir("/proc/self/fd")))
    free = [number for number in range(200) if number not in taken]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[20], hard))
    try:
        assert check(words, [f"h{number}" for number in range(30)], tmp_path, python) == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_silent_hosts_are_given_up_together(
    ssh: Stand, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_CHECK_LIMIT_S", 1.0)
    start = time.monotonic()
    said = check(ssh(f"echo $$ >'{tmp_path}'/pid-$$\nexec sleep 1000\n"), ["a", "b", "c"], tmp_path, python)
    assert said == [f"host {host} did not answer within 1 s" for host in "abc"]
    assert time.monotonic() - start < 10
    pids = [file.read_text().strip() for file in tmp_path.glob("pid-*")]
    assert len(pids) == 3
    assert not [pid for pid in pids if Path("/proc", pid).exists()]


def test_a_sweep_kills_what_bears_the_mark(ssh: Stand, tmp_path: Path) -> None:
    job = uuid.uuid4().hex
    sleeper = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(1000)"]
    started = [
        subprocess.Popen(sleeper, env={**clean_env(), "NCCLCOMM_JOB_ID": mark}, stdout=subprocess.PIPE)
        for mark in (job, job, "another")
    ]
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
        assert sweep_hosts(["a", "b"], ssh=ssh(HERE), job_id=job, environ=dict(os.environ)) == []
        assert [process.wait(10) for process in started[:2]] == [-9, -9]
        assert started[2].poll() is None
    finally:
        for process in started:
            process.kill()
            process.communicate()


@pytest.fixture
def marked() -> Iterator[subprocess.Popen[bytes]]:
    """A process that bears the mark of a job: its own number."""
    line = 'NCCLCOMM_JOB_ID=job-$$ exec "$0" -c "import time; print(flush=True); time.sleep(1000)"'
    process = subprocess.Popen(["sh", "-c", line, sys.executable], stdout=subprocess.PIPE, env=clean_env())
    assert process.stdout is not None
    assert process.stdout.readline() == b"\n"
    yield process
    process.kill()
    process.communicate()


def test_a_sweep_names_what_it_cannot_kill(ssh: Stand, marked: subprocess.Popen[bytes]) -> None:
    # The sweep of this host kills nothing, and gives up at once.
    words = ssh(f"""{OPTIONS}(echo 'kill() {{ :; }}'; sed 's/ + 10/ + 0/') | sh -c "$*"\n""")
    said = sweep_hosts(["a"], ssh=words, job_id=f"job-{marked.pid}", environ=dict(os.environ))
    assert said == [f"processes {marked.pid} on host a do not end on SIGKILL"]


def test_a_python_without_pidfds_finds_leftovers_too(
    marked: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    assert kill_marked(f"job-{marked.pid}") == []
    assert marked.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize(("places", "crowded"), [("a:{0},b:1", False), ("a:{1},b:1", True), ("a:1,b:{1}", True)])
def test_the_script_asks_for_yielding_where_a_host_has_more_ranks_than_cores(
    ssh: Stand, python: str, tmp_path: Path, places: str, crowded: bool
) -> None:
    (tmp_path / "mpiexec").write_text("#!/bin/sh\necho HYDRA\n")
    (tmp_path / "mpiexec").chmod(0o755)
    cores = len(os.sched_getaffinity(0))
    hosts = places.format(cores, cores + 1)
    ssh(HERE)
    (tmp_path / "ssh").symlink_to("ssh stand-in")
    argv = [ROOT / "launch" / "multi_node.sh", "--hosts", hosts, "--ssh", tmp_path / "ssh", "-m", "any"]
    ended = run_tree(argv, env={**clean_env(), "PYTHON": python}, timeout_s=60)
    assert ended.returncode == 0, ended.stderr
    assert ("MPIR_CVAR_CH4_NETMOD=ofi" in ended.stdout) == crowded, ended.stdout


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a host with fewer cores than this one needs two here")
@pytest.mark.parametrize(("places", "crowded"), [("a:1,b:2", False), ("a:2,b:1", True)])
def test_the_script_goes_by_each_hosts_own_cores(
    ssh: Stand, python: str, tmp_path: Path, places: str, crowded: bool
) -> None:
    (tmp_path / "mpiexec").write_text("#!/bin/sh\necho HYDRA\n")
    (tmp_path / "mpiexec").chmod(0o755)
    # One that prints a line of its own first.
    Path(python).write_text(f'#!/bin/sh\necho 1 welcome 9 times\n"{find("mpich").python}" "$@"\n')
    ssh(OPTIONS + 'if [ "$host" = a ]; then exec taskset -c "$ONE" sh -c "$*"; fi\nexec sh -c "$*"\n')
    (tmp_path / "ssh").symlink_to("ssh stand-in")
    argv = [ROOT / "launch" / "multi_node.sh", "--hosts", places, "--ssh", tmp_path / "ssh", "-m", "any"]
    environ = {**clean_env(), "PYTHON": python, "ONE": str(min(os.sched_getaffinity(0)))}
    ended = run_tree(argv, env=environ, timeout_s=60)
    assert ended.returncode == 0, ended.stderr
    assert ("MPIR_CVAR_CH4_NETMOD=ofi" in ended.stdout) == crowded, ended.stdout


def test_hosts_are_swept_after_the_loss_of_a_rank(ssh: Stand, tmp_path: Path) -> None:
    mpich, log, script = find("mpich"), tmp_path / "log", tmp_path / "script.py"
    script.write_text("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nsignal.pause()\n")
    words = ssh(f'{OPTIONS}echo "$host: $*" >>\'{log}\'\nexec sh -c "$*"\n')
    (tmp_path / "ssh").symlink_to(words[0])  # words of --ssh have no spaces
    argv = [mpich.python, "-m", "ncclcomm", "run", "-n", "1", "--hosts", "some-host", "--ssh", tmp_path / "ssh", script]
    ended = run_tree(argv, env=mpich.env({"PYTHONPATH": str(ROOT)}), timeout_s=60)
    assert ended.returncode not in (0, 2), ended.stderr
    assert "ncclcomm run: mpiexec ended with status" in ended.stderr
    assert re.fullmatch(r"some-host: sh -s -- [0-9a-f]{32} [0-9a-f]{16}", log.read_text().splitlines()[-1])
