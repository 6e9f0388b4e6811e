"""`ncclcomm run` over several hosts: placement, failures, signals, lost hosts, and nothing left on any of them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.fake_hosts import Hosts
from cluster.run_programs import MEETS, SAVES, WAITS, program, ranks_saved, ranks_up
from flavours import Flavour, find
from rank_jobs import TESTS

ROOT = TESTS.parent
UP_LIMIT_S = 60.0
END_LIMIT_S = 15.0
"""What "in seconds" means for the end of a job, on a busy machine."""
LOST_LIMIT_S = 30.0
"""A silent host is given up after 9 s; mpiexec, which may wait for it for ever, some more."""
LAUNCHERS_OWN = ("OMPI_", "PRTE_", "MPIR_", "I_MPI_", "FI_")


@dataclass(frozen=True)
class Runner:
    """`ncclcomm run` on the first of some hosts, each of which has an sshd."""

    hosts: Hosts
    ssh: str

    def command(self, flavour: Flavour, *args: str | Path) -> list[str | Path]:
        """What runs on the first host."""
        return [flavour.python, "-m", "ncclcomm", "run", "--ssh", self.ssh, *args]

    def env(self, flavour: Flavour) -> dict[str, str]:
        """A shell's environment: the settings of MPI are the launcher's to make, but for what two cores need."""
        yields = ("OMPI_MCA_mpi_yield_when_idle", "MPIR_CVAR_CH4_NETMOD")
        whole = flavour.env({"PYTHONPATH": str(ROOT), **self.hosts.env})
        return {k: v for k, v in whole.items() if k in yields or not k.startswith((*LAUNCHERS_OWN, "NCCLCOMM_JOB"))}

    @contextmanager
    def clean(self, *lost: str) -> Iterator[None]:
        """See that hosts, but for lost ones, run afterwards what they ran before."""
        hosts = [host for host in self.hosts.names if host not in lost]
        idle = {host: set(self.hosts.pids(host)) for host in hosts}
        yield
        for host in hosts:
            end = time.monotonic() + 5
            while (left := set(self.hosts.pids(host)) - idle[host]) and time.monotonic() < end:
                time.sleep(0.02)  # sshd's own process of a session ends a little later
            assert not left, f"on {host}: {[Path(f'/proc/{pid}/cmdline').read_bytes() for pid in left]}"

    def __call__(self, flavour: Flavour, *args: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run a job to its end, which leaves nothing."""
        with self.clean():
            return self.hosts.exec("h1", self.command(flavour, *args), env=self.env(flavour), cwd=cwd, timeout_s=60)

    @contextmanager
    def running(
        self, flavour: Flavour, *args: str | Path, cwd: Path, ranks: int = 3, lost: Sequence[str] = ()
    ) -> Iterator[Running]:
        """A job whose ranks are up (WAITS); it leaves nothing."""
        with self.clean(*lost), tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                self.hosts.command("h1", self.command(flavour, *args)),
                env=self.env(flavour),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            job = Running(process, output.fileno())
            try:
                end = time.monotonic() + UP_LIMIT_S
                while ranks_up(cwd) < ranks:
                    assert process.poll() is None, job.output()
                    assert time.monotonic() < end, job.output()
                    time.sleep(0.02)
                yield job
            finally:
                process.kill()
                process.wait()


@dataclass(frozen=True)
class Running:
    """A job's `ncclcomm run`; hosts.sh becomes it."""

    process: subprocess.Popen[bytes]
    descriptor: int

    def output(self) -> str:
        """What has been written so far."""
        return os.pread(self.descriptor, 1 << 20, 0).decode(errors="replace")


@pytest.fixture(scope="module")
def run(hosts: Callable[[int], Hosts]) -> Runner:
    pair = hosts(2)
    return Runner(pair, pair.start_sshd())


@pytest.fixture
def lone(hosts: Callable[[int], Hosts]) -> Runner:
    """Hosts for one test, which loses one."""
    pair = hosts(2)
    return Runner(pair, pair.start_sshd())


PLACES = ("--hosts", "h1:2,h2:1")


def test_ranks_devices_and_folder(run: Runner, flavour: Flavour, tmp_path: Path) -> None:
    body = """
import json
mine = [world.rank, world.size, socket.gethostname(), os.environ["CUDA_VISIBLE_DEVICES"], os.getcwd(), sys.argv[1:]]
everyone = world.gather(mine)
if world.rank == 0: Path("told").write_text(json.dumps(everyone))
"""
    args = [*PLACES, "-n", "3", "--devices-per-rank", "2", "--env", "CUDA_VISIBLE_DEVICES=GPU-a,MIG-b,2,3"]
    done = run(flavour, *args, program(tmp_path, body, name="a program.py"), "a b", "", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rest = [str(tmp_path), ["a b", ""]]
    assert json.loads((tmp_path / "told").read_text()) == [
        [0, 3, "h1", "GPU-a,MIG-b", *rest],
        [1, 3, "h1", "2,3", *rest],
        [2, 3, "h2", "GPU-a,MIG-b", *rest],
    ]
    assert "ncclcomm run:" not in done.stderr


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("if world.rank == 2: raise LookupError('far away')", 1, "exited with status 1"),
        ("if world.rank == 2: os.kill(os.getpid(), 9)\ntime.sleep(1000)", 137, "was killed by SIGKILL"),
    ],
    ids=["exception", "SIGKILL"],
)
def test_a_rank_of_the_other_host_fails(
    run: Runner, flavour: Flavour, tmp_path: Path, body: str, status: int, said: str
) -> None:
    # Without the mark, and as a daemon, only the watcher of its rank can find it.
    leaves = "subprocess.Popen(['env', '-u', 'NCCLCOMM_JOB_ID', 'setsid', 'sleep', '1000'])"
    file = program(tmp_path, leaves, MEETS, body, "world.Barrier()\nPath('went-on').touch()")
    start = time.monotonic()
    done = run(flavour, *PLACES, "-n", "3", file, cwd=tmp_path)
    assert time.monotonic() - start < END_LIMIT_S
    assert done.returncode == status, done.stderr
    assert done.stderr.count("ncclcomm run: ") == 1, done.stderr
    assert f"ncclcomm run: rank 2 on host h2 {said}\n" in done.stderr
    assert done.stderr.count("LookupError: far away") == ("LookupError" in body)
    assert not (tmp_path / "went-on").exists()


@pytest.mark.parametrize(
    ("flavour", "how", "status"),
    [("mpich", "SIGINT", 130), ("mpich", "SIGTERM", 143), ("openmpi", "SIGTERM", 143), ("mpich", "--timeout", 124)],
)
def test_a_stopped_job_may_save_its_work(run: Runner, flavour: str, tmp_path: Path, how: str, status: int) -> None:
    limit = ["--timeout", "5"] if how == "--timeout" else []
    options = [*PLACES, "-n", "3", "--grace", "30", *limit]
    with run.running(find(flavour), *options, program(tmp_path, SAVES, WAITS), cwd=tmp_path) as job:
        if not limit:
            job.process.send_signal(signal.Signals[how])
        assert job.process.wait(END_LIMIT_S) == status, job.output()
    assert ranks_saved(tmp_path) == [0, 1, 2]


def test_a_killed_launcher_leaves_nothing(run: Runner, flavour: Flavour, tmp_path: Path) -> None:
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    with run.running(flavour, *PLACES, "-n", "3", program(tmp_path, deaf, WAITS), cwd=tmp_path) as job:
        job.process.kill()


def test_a_host_that_goes_down_ends_the_job(lone: Runner, flavour: Flavour, tmp_path: Path) -> None:
    file = program(tmp_path, SAVES, WAITS)
    with lone.running(flavour, "--hosts", "h1:1,h2:2", "-n", "3", file, cwd=tmp_path, lost=["h2"]) as job:
        lone.hosts.crash("h2")
        assert job.process.wait(LOST_LIMIT_S) not in (0, 124), job.output()
        assert re.search(r"ncclcomm run: .*ranks? 1(, 2)? on host h2 .*(killed|lost)", job.output())
    if flavour.name == "mpich":  # Open MPI's mpiexec may kill rank 0 itself first, as 1 of 12 times on a busy machine
        assert 0 in ranks_saved(tmp_path)  # one of the other host may, while that goes down


def test_a_host_that_is_cut_off_ends_its_ranks_and_the_job(run: Runner, tmp_path: Path) -> None:
    options = ["--hosts", "h1:2,h2:1", "-n", "3"]
    # Its mpiexec would wait for ever.
    with run.running(find("mpich"), *options, program(tmp_path, SAVES, WAITS), cwd=tmp_path) as job:
        job.process.send_signal(signal.SIGSTOP)  # hosts are one machine here, which it would clean up
        run.hosts.cut("h2")
        try:
            rank = Path("/proc", (tmp_path / "up-2").read_text(), "environ")
            end = time.monotonic() + LOST_LIMIT_S
            while rank.exists():
                assert time.monotonic() < end, "rank 2 runs on"
                time.sleep(0.1)
            job.process.send_signal(signal.SIGCONT)
            assert job.process.wait(LOST_LIMIT_S) == 1, job.output()
        finally:
            run.hosts.exec("h2", ["ip", "link", "set", "eth0", "up"])
        assert "ncclcomm run: rank 2 on host h2 was lost: the host does not answer\n" in job.output()
    assert ranks_saved(tmp_path) == [0, 1]


def test_hosts_that_cannot_be_reached_are_told_at_once(run: Runner, tmp_path: Path) -> None:
    start = time.monotonic()
    file = program(tmp_path, "Path('started').touch()")
    done = run(find("mpich"), "--hosts", "h1,h9,h2,10.77.0.99", "-n", "4", file, cwd=tmp_path)
    assert time.monotonic() - start < 20
    assert done.returncode == 2
    h9, dead = done.stderr.splitlines()
    assert re.fullmatch(r"ncclcomm run: host h9 can't be reached: .*resolve.*", h9)
    assert re.fullmatch(r"ncclcomm run: host 10\.77\.0\.99 can't be reached: .*(No route to host|timed out).*", dead)
    assert not (tmp_path / "started").exists()


def test_cores_are_those_of_each_host(lone: Runner, flavour: Flavour, tmp_path: Path) -> None:
    whole, one = os.sched_getaffinity(0), min(os.sched_getaffinity(0))
    if len(whole) < 2:
        pytest.skip("a host with fewer cores than another needs two")
    file = tmp_path / "tell.py"
    file.write_text("import os; open(f'at-{os.getpid()}', 'w').write(repr(dict(os.environ)))")
    yields = "'OMPI_MCA_mpi_yield_when_idle': '1'" if flavour.name == "openmpi" else "'MPIR_CVAR_CH4_NETMOD': 'ofi'"
    env = {k: v for k, v in lone.env(flavour).items() if not k.startswith(LAUNCHERS_OWN)}

    def is_crowded(places: str, starter: set[int], h2: set[int]) -> bool:
        """Start ranks; whether they are told to give cores away."""
        for pid in lone.hosts.pids("h2"):
            os.sched_setaffinity(pid, h2)
        taskset = ["taskset", "-c", ",".join(map(str, starter))]
        argv = [*taskset, *lone.command(flavour, "--hosts", places, "-n", "auto", file)]
        done = lone.hosts.exec("h1", argv, env=env, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        told = {yields in path.read_text() for path in tmp_path.glob("at-*")}
        for path in tmp_path.glob("at-*"):
            path.unlink()
        (same,) = told
        return same

    assert not is_crowded("h1:2,h2:2", whole, whole)
    assert is_crowded("h1:2,h2:2", whole, {one})
    assert not is_crowded("h2:2", {one}, whole)  # a small host may start ranks on large ones
    assert is_crowded("h1:2", {one}, whole)  # and ssh find more cores than ranks get


def test_what_a_host_lacks_is_told(lone: Runner, tmp_path: Path) -> None:
    mpich, folder = find("mpich"), tmp_path / "whole" / "project"
    folder.mkdir(parents=True)
    file = program(folder, "Path('started').touch()", name="a program.py")

    def hide(path: Path) -> None:
        assert lone.hosts.exec("h2", ["mount", "-t", "tmpfs", "tmpfs", path]).returncode == 0

    def told(cwd: Path) -> str:
        done = lone(mpich, *PLACES, "-n", "3", file, cwd=cwd)
        assert done.returncode == 2, done.stderr
        (line,) = done.stderr.splitlines()
        return line

    hide(tmp_path / "whole")
    assert f"ncclcomm run: host h2 has no folder {folder};" in told(folder)
    assert told(tmp_path) == f"ncclcomm run: host h2 has no file {file} in {tmp_path}"
    hide(Path(mpich.python).parent)
    assert f"host h2 has no {mpich.python};" in told(tmp_path)
    assert not list(tmp_path.rglob("started"))
