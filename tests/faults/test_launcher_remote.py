"""What `ncclcomm run` does on other hosts over ssh, with stand-ins for ssh."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from flavours import clean_env, find, run_tree
from ncclcomm.launcher import remote
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
    return check_hosts(hosts, ssh=ssh, folder=str(folder), python=python, script=script)


def test_hosts_that_are_right(ssh: Stand, python: str, tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s "a" $HOME; folder'
    folder.mkdir()
    (folder / "my script.py").write_text("")
    noisy = OPTIONS + 'echo "Welcome to $host"; echo ready\nsh -c "$*"\necho bye; exit 3\n'
    for lines in (HERE, noisy):
        assert check(ssh(lines), ["a", "b"], folder, python, "my script.py") == []
        assert check(ssh(lines), ["a", "b"], folder, python) == []


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
        sweep_hosts(["a", "b"], ssh=ssh(HERE), job_id=job, environ=dict(os.environ))
        assert [process.wait(10) for process in started[:2]] == [-9, -9]
        assert started[2].poll() is None
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_hosts_are_swept_after_the_loss_of_a_rank(ssh: Stand, tmp_path: Path) -> None:
    mpich, log, script = find("mpich"), tmp_path / "log", tmp_path / "script.py"
    script.write_text("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nsignal.pause()\n")
    words = ssh(f'{OPTIONS}echo "$host: $*" >>\'{log}\'\nexec sh -c "$*"\n')
    (tmp_path / "ssh").symlink_to(words[0])  # words of --ssh have no spaces
    argv = [mpich.python, "-m", "ncclcomm", "run", "-n", "1", "--hosts", "some-host", "--ssh", tmp_path / "ssh", script]
    ended = run_tree(argv, env=mpich.env({"PYTHONPATH": str(ROOT)}), timeout_s=60)
    assert ended.returncode not in (0, 2), ended.stderr
    assert re.fullmatch(r"some-host: sh -s -- [0-9a-f]{32}", log.read_text().splitlines()[-1])
