"""`ncclcomm run` inside a SLURM allocation: statuses, signals, and nothing left over."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.run_programs import MEETS, SAVES, WAITS, program, ranks_saved, ranks_up
from cluster.slurm_fixtures import ROOT, SECONDS, Slurm, batch, slurm_cluster  # noqa: F401
from flavours import Flavour, find, run_tree

FOUR_RANKS = ("--nodes=2", "--ntasks-per-node=2")
RUN = '"$VENV/bin/python" -m ncclcomm run'


@contextmanager
def running(slurm: Slurm, flavour: Flavour, folder: Path, line: str) -> Iterator[str]:
    """A job whose batch script is that line and whose ranks are up (WAITS)."""
    script = batch(folder / "job.sh", line)
    with slurm.running(flavour, [script], cwd=folder, options=FOUR_RANKS) as number:
        end = time.monotonic() + 60
        while ranks_up(folder) < 4:
            assert time.monotonic() < end, slurm.output(number)
            time.sleep(0.05)
        yield number


def test_placement_and_a_rank_that_fails(slurm: Slurm, flavour: Flavour, tmp_path: Path) -> None:
    file = program(
        tmp_path,
        "Path(f'at-{world.rank}-{socket.gethostname()}-of-{world.size}').touch()",
        "world.Barrier()",
        "if world.rank == 3: sys.exit(3)",
        "world.Barrier()",
    )
    script = batch(tmp_path / "job.sh", f"{RUN} -n 4 {file} | tee log", 'exit "${PIPESTATUS[0]}"')
    start = time.monotonic()
    ended = slurm.run(flavour, [script], cwd=tmp_path, options=FOUR_RANKS)
    assert time.monotonic() - start < SECONDS
    assert (ended.state, ended.status) == ("FAILED", 3), ended.output
    assert ended.output.count("ncclcomm run: rank 3 on host h2 exited with status 3\nSystemExit: 3 at ") == 1
    assert ended.output.count("ncclcomm run: ") == 1, ended.output
    assert sorted(path.name for path in tmp_path.glob("at-*")) == [
        "at-0-h1-of-4",
        "at-1-h1-of-4",
        "at-2-h2-of-4",
        "at-3-h2-of-4",
    ]


def test_a_rank_that_is_killed(slurm: Slurm, flavour: Flavour, tmp_path: Path) -> None:
    file = program(tmp_path, MEETS, "if world.rank == 3: os.kill(os.getpid(), 9)\ntime.sleep(1000)")
    script = batch(tmp_path / "job.sh", f"{RUN} -n 4 {file}")
    ended = slurm.run(flavour, [script], cwd=tmp_path, options=FOUR_RANKS)
    assert (ended.state, ended.status) == ("FAILED", 137), ended.output
    assert "ncclcomm run: rank 3 on host h2 was killed by SIGKILL\n" in ended.output


def test_a_cancelled_job_saves_its_work_and_leaves_nothing(slurm: Slurm, flavour: Flavour, tmp_path: Path) -> None:
    with running(slurm, flavour, tmp_path, f"{RUN} -n 4 {program(tmp_path, SAVES, WAITS)}") as number:
        start = time.monotonic()
        slurm.client("scancel", number)
        ended = slurm.wait(number)
    assert time.monotonic() - start < SECONDS
    assert ended.state == "CANCELLED"
    assert ranks_saved(tmp_path) == [0, 1, 2, 3], ended.output


def test_ranks_that_slurm_asks_to_end_end_the_job(slurm: Slurm, flavour: Flavour, tmp_path: Path) -> None:
    """As before a time limit, with `sbatch --signal=TERM@60`."""
    with running(slurm, flavour, tmp_path, f"{RUN} -n 4 {program(tmp_path, SAVES, WAITS)}") as number:
        slurm.client("scancel", "--signal=TERM", number)
        ended = slurm.wait(number)
    assert (ended.state, ended.status) == ("FAILED", 143), ended.output
    assert ranks_saved(tmp_path) == [0, 1, 2, 3], ended.output


def test_a_time_limit_of_its_own(slurm: Slurm, tmp_path: Path) -> None:
    line = f"{RUN} -n 4 --timeout 5 --grace 30 {program(tmp_path, SAVES, WAITS)}"
    with running(slurm, find("mpich"), tmp_path, line) as number:
        ended = slurm.wait(number)
    assert (ended.state, ended.status) == ("FAILED", 124), ended.output
    assert ranks_saved(tmp_path) == [0, 1, 2, 3], ended.output


def test_a_killed_launcher_leaves_nothing(slurm: Slurm, tmp_path: Path) -> None:
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    line = f"{RUN} -n 4 {program(tmp_path, deaf, WAITS)} & echo $! >pid; wait $!; echo ended $?; sleep 1000"
    with running(slurm, find("mpich"), tmp_path, line) as number:
        idle = {host: slurm.hosts.pids(host) for host in slurm.hosts.names}
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        end = time.monotonic() + SECONDS
        # The batch script and its sleep stay, and two of SLURM's own.
        while len(slurm.hosts.pids("h2")) >= len(idle["h2"]) - 4 or "ended 137" not in slurm.output(number):
            assert time.monotonic() < end, [slurm.output(number), slurm.hosts.pids("h2"), idle]
            time.sleep(0.05)
        slurm.client("scancel", number)
        slurm.wait(number)


@pytest.mark.parametrize("interrupt", [False, True], ids=["a rank fails", "Ctrl-C"])
def test_in_an_interactive_allocation(slurm: Slurm, tmp_path: Path, interrupt: bool) -> None:
    mpich = find("mpich")
    fails = "if world.rank == 3: sys.exit(3)\nworld.Barrier()"
    file = program(tmp_path, *([SAVES, WAITS] if interrupt else [fails]))
    shell = tmp_path / "shell.sh"
    # A terminal sends Ctrl-C to the command alone, not to salloc.
    shell.write_text(f"echo $$ >pid\nexec {mpich.python} -m ncclcomm run -n 4 --grace 30 {file}\n")
    argv = slurm.hosts.command("h1", ["salloc", "--quiet", "--cpus-per-task=1", *FOUR_RANKS, "sh", shell])
    env = {**mpich.env({"PYTHONPATH": str(ROOT)}), **slurm.hosts.env, "SLURM_CONF": str(slurm.folder / "slurm.conf")}
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(run_tree, argv, env=env, cwd=tmp_path, timeout_s=60)
        while interrupt and not job.done():  # which it is at its deadline
            if ranks_up(tmp_path) == 4:
                os.kill(int((tmp_path / "pid").read_text()), signal.SIGINT)
                break
            time.sleep(0.05)
        ended = job.result()
    assert ended.returncode == (130 if interrupt else 3), ended.stderr
    assert ("rank 3 on host h2 exited with status 3" in ended.stderr) != interrupt
    assert ranks_saved(tmp_path) == ([0, 1, 2, 3] if interrupt else [])
