"""launch/multi_node.sh: ranks over a real ssh, and what a user hears when something is wrong."""

from __future__ import annotations

import json
import re
import subprocess
import textwrap
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.fake_hosts import Hosts
from flavours import FLAVOURS, Flavour, find
from rank_jobs import TESTS

SCRIPT = TESTS.parent / "launch" / "multi_node.sh"
HEAD = """
import json, os, socket, sys, time
from pathlib import Path
from mpi4py import MPI
world = MPI.COMM_WORLD
def tell(path, value):
    told = world.gather(value)
    if world.rank == 0: Path(path).write_text(json.dumps(told))
"""
LOOP = """
import numpy as np, ncclcomm
with ncclcomm.init() as comm:
    tell(sys.argv[1] + ".new", os.getpid())
    if comm.rank == 0: os.rename(sys.argv[1] + ".new", sys.argv[1])
    while True: comm.all_reduce(np.ones(3))
"""
SECONDS_TO_END = 15.0
MPIEXEC_HUNG = "all ranks have ended, but mpiexec did not"


@dataclass(frozen=True)
class Launch:
    """multi_node.sh on the first of some hosts, of which each has an sshd."""

    hosts: Hosts
    ssh: str

    def __call__(
        self,
        flavour: Flavour,
        *args: str | Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        lost: str = "",
    ) -> subprocess.CompletedProcess[str]:
        """Run it; it must end, and leave nothing but sshd on any host but a lost one."""
        idle = {host: set(self.hosts.pids(host)) for host in self.hosts.names if host != lost}
        whole = flavour.env({"PYTHON": flavour.python, "NCCLCOMM_SSH": self.ssh, "PYTHONPATH": str(TESTS.parent)})
        # Its own settings are under test, but for the one that two hosts with the cores of one machine need.
        yields = ("OMPI_MCA_mpi_yield_when_idle", "MPIR_CVAR_CH4_NETMOD")
        vendor = ("OMPI_", "PRTE_", "MPIR_", "I_MPI_")
        kept = {name: value for name, value in whole.items() if name in yields or not name.startswith(vendor)}
        done = self.hosts.exec("h1", [SCRIPT, *args], env={**kept, **(env or {})}, cwd=cwd, timeout_s=90)
        for host, before in idle.items():
            end = time.monotonic() + 5
            while (left := set(self.hosts.pids(host)) - before) and time.monotonic() < end:
                time.sleep(0.02)  # sshd's own process of a session ends a little later
            assert not left, f"{left} left on {host}\n{done.stdout}{done.stderr}"
        return done


@pytest.fixture(scope="module")
def launch(hosts: Callable[[int], Hosts]) -> Launch:
    pair = hosts(2)
    return Launch(pair, pair.start_sshd())


def program(folder: Path, body: str) -> Path:
    """A program that ranks run."""
    path = folder / "program with a space.py"
    path.write_text(HEAD + textwrap.dedent(body))
    return path


PLACES = [
    (["--hosts", "h1,h2", "-n", "3"], ["h1", "h1", "h2"]),
    (["--hosts", "h1,h2"], ["h1", "h2"]),
    (["--hosts", "h[1-2]", "--ppn", "2"], ["h1", "h1", "h2", "h2"]),
    (["--hosts", "h2:1,h1", "--ppn", "2", "-n", "2"], ["h2", "h1"]),
    (["--hostfile", "hosts.txt"], ["h2", "h2", "h1"]),
]


@pytest.mark.parametrize(("args", "expected"), PLACES, ids=[" ".join(args) for args, _ in PLACES])
def test_ranks_go_where_they_should(
    launch: Launch, flavour: Flavour, tmp_path: Path, args: list[str], expected: list[str]
) -> None:
    (tmp_path / "hosts.txt").write_text("# the second first\nh2 slots=2  # two\n\n  h1:1")
    file = program(tmp_path, "tell(sys.argv[1], socket.gethostname())")
    done = launch(flavour, *args, file, tmp_path / "told", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "told").read_text()) == expected
    assert re.search(r"^\+ .*mpiexec .* -m mpi4py ", done.stdout, re.M), "the command is not shown"


@pytest.mark.flavours(*FLAVOURS)
def test_environment_arguments_and_folder_arrive_exactly(launch: Launch, flavour: Flavour, tmp_path: Path) -> None:
    values = {
        "NCCLCOMM_TEST_VALUE": 'it\'s "so"  $HOME `x` \\ ;|&*,= %d',
        "NCCL_DEBUG": "",
        "NCCL_DEBUG_SUBSYS": "INIT",
        "OMP_PLACES": "two\nlines",
        "OPENBLAS_NUM_THREADS": "3",
        "MINE": " asked for ",
        "PYTHONPATH": f"{TESTS.parent}:/no/such folder",
    }
    not_sent = {"NOT_MINE": "stays"}
    file = program(tmp_path, f"tell(sys.argv[1], [{list(values)!r}, dict(os.environ), sys.argv[2:], os.getcwd()])")
    args = ["a  b", "'\"", "", "--hosts", "-n"]
    done = launch(
        flavour, "--hosts", "h2,h1", "-x", "MINE", file.name, "told", *args, env={**values, **not_sent}, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for _, environ, argv, folder in json.loads((tmp_path / "told").read_text()):
        assert {name: environ.get(name) for name in values} == values
        assert argv == args
        assert folder == str(tmp_path)
    on_h2 = json.loads((tmp_path / "told").read_text())[0][1]
    assert "NOT_MINE" not in on_h2


@pytest.mark.parametrize(("places", "banner"), [("h1:1,h2:1", ""), ("h2:1", "Welcome, all is logged")])
def test_mpiexec_that_outlives_its_ranks_is_ended(launch: Launch, tmp_path: Path, places: str, banner: str) -> None:
    """Open MPI's does so in 1 of 100 jobs that MPI_Abort ends on a busy machine: it waits for a lock of its own."""
    flavour = find("openmpi")
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {flavour.python} "$@"\n')
    (tmp_path / "mpiexec").write_text(f'#!/bin/sh\n{flavour.mpiexec} "$@"\n[ "$1" = --version ] || exec sleep 1000\n')
    (tmp_path / "ssh").write_text(f'#!/bin/sh\n[ -z "{banner}" ] || echo "{banner}" >&2\nexec {launch.ssh} "$@"\n')
    for name in ("python", "mpiexec", "ssh"):
        (tmp_path / name).chmod(0o755)
    file = program(tmp_path, "time.sleep(5); tell(sys.argv[1], os.getpid())")
    start = time.monotonic()
    env = {"PYTHON": str(tmp_path / "python"), "NCCLCOMM_SSH": str(tmp_path / "ssh")}
    done = launch(flavour, "--hosts", places, file, tmp_path / "told", env=env)
    assert (tmp_path / "told").exists(), "ended before its ranks"
    assert done.returncode == 1, done.stdout + done.stderr
    said = [line for line in done.stderr.splitlines() if line != banner]
    assert said == [f"{SCRIPT}: {MPIEXEC_HUNG}, and was killed: how the ranks ended is not known"]
    assert 5 < time.monotonic() - start < 5 + 2 * SECONDS_TO_END


@pytest.mark.parametrize(
    ("body", "statuses"),
    [("world.rank == 2 and sys.exit(7); world.barrier()", (7,)), ("assert world.rank != 1; world.barrier()", (1,))],
    ids=["exit", "exception"],
)
def test_failing_rank_ends_the_job(
    launch: Launch, flavour: Flavour, tmp_path: Path, body: str, statuses: tuple[int, ...]
) -> None:
    start = time.monotonic()
    done = launch(flavour, "--hosts", "h1:1,h2:2", program(tmp_path, body))
    hung = MPIEXEC_HUNG in done.stderr
    assert time.monotonic() - start < SECONDS_TO_END * (2 if hung else 1)
    assert done.returncode in statuses or hung, done.stdout + done.stderr
    assert "was lost" not in done.stderr


def test_what_ranks_leave_behind_is_ended(launch: Launch, flavour: Flavour, tmp_path: Path) -> None:
    body = """
        import subprocess
        null = subprocess.DEVNULL
        left = subprocess.Popen(["sleep", "600"], start_new_session=True, stdin=null, stdout=null, stderr=null)
        tell(sys.argv[1], left.pid)
    """
    done = launch(flavour, "--hosts", "h1,h2", program(tmp_path, body), tmp_path / "told")
    assert done.returncode == 0, done.stdout + done.stderr
    pids = json.loads((tmp_path / "told").read_text())
    assert len(pids) == 2
    for pid in pids:
        line = Path(f"/proc/{pid}/cmdline")
        assert not line.exists() or line.read_bytes() == b"", f"{pid} runs on; a dead one has no command line"


def test_sigterm_ends_the_job_everywhere(launch: Launch, flavour: Flavour, tmp_path: Path) -> None:
    file = program(tmp_path, "world.rank == 1 and os.kill(int(os.environ['NCCLCOMM_TEST_PID']), 15)\ntime.sleep(60)")
    shell = tmp_path / "shell.sh"
    shell.write_text(f'export NCCLCOMM_TEST_PID=$$\nexec {SCRIPT} "$@"\n')
    start = time.monotonic()
    whole = flavour.env({"PYTHON": flavour.python, "NCCLCOMM_SSH": launch.ssh})
    done = launch.hosts.exec("h1", ["bash", shell, "--hosts", "h1,h2", file], env=whole, timeout_s=60)
    assert time.monotonic() - start < SECONDS_TO_END
    assert done.returncode == 143, done.stdout + done.stderr


def test_folder_that_another_host_lacks(launch: Launch, flavour: Flavour, tmp_path: Path) -> None:
    (tmp_path / "whole" / "project").mkdir(parents=True)
    file = program(tmp_path / "whole" / "project", "Path('started').touch()")
    done = launch.hosts.exec("h2", ["mount", "-t", "tmpfs", "tmpfs", tmp_path / "whole"])
    assert done.returncode == 0, done.stderr
    done = launch(flavour, "--hosts", "h1,h2", file, cwd=file.parent)
    assert done.returncode == 2
    assert re.search(rf"host h2 has no folder {file.parent}", done.stderr), done.stderr
    assert "host h1" not in done.stderr
    done = launch(flavour, "--hosts", "h1,h2", file, cwd=tmp_path)
    assert done.returncode == 2
    assert f"host h2 has no file {file} in {tmp_path}" in done.stderr
    assert not list(tmp_path.rglob("started"))


WRONG = [
    (["--hosts", "h1,10.77.0.99"], r"host 10\.77\.0\.99 can't be reached: .*(No route to host|timed out)"),
    (["--hosts", "h1,h9"], r"host h9 can't be reached: .*resolve"),
    (["--hosts", "h1,,h2"], r"--hosts: '' is no host name"),
    (["--hosts", "h1,h2,"], r"--hosts: '' is no host name"),
    (["--hosts", "h1 h2"], r"--hosts: 'h1 h2' is no host name"),
    (["--hosts", "h1,-oProxyCommand=x"], r"'-oProxyCommand=x' is no host name"),
    (["--hosts", "h1:x"], r"'h1:x' must end in a number of slots"),
    (["--hosts", "h1:0"], r"'h1:0' must end in a number of slots"),
    (["--hosts", "h1:"], r"'h1:' must end in a number of slots"),
    (["--hosts", "h[1-2"], r"brackets in 'h\[1-2' don't match"),
    (["--hosts", "h1-2]"], r"brackets in 'h1-2\]' don't match"),
    (["--hosts", "h[[1-2]]"], r"brackets"),
    (["--hosts", "h[]"], r"'h\[\]' is no host name"),
    (["--hosts", "h[2-1]"], r"'2-1' in 'h\[2-1\]' must go up"),
    (["--hosts", "h[1,]"], r"'' in 'h\[1,\]' is no number or range"),
    (["--hosts", "h[a-b]"], r"'a-b' in 'h\[a-b\]' is no number or range"),
    (["--hosts", "h[1-2],h2"], r"host h2 is named twice"),
    (["--hosts", ""], r"--hosts needs a value"),
    (["--hostfile", "none.txt"], r"--hostfile: 'none\.txt' is no file that can be read"),
    (["--hostfile", "."], r"--hostfile: '\.' is no file that can be read"),
    (["--hostfile", "empty.txt"], r"--hostfile: 'empty\.txt' names no host"),
    (["--hostfile", "bad.txt"], r"bad\.txt, line 3: 'h2 or so' is no host name"),
    (["--hostfile", "slots.txt"], r"slots\.txt, line 1: 'h1:many' must end in a number of slots"),
    (["--hosts", "h1,h2", "--hostfile", "bad.txt"], r"one of --hosts and --hostfile"),
    ([], r"one of --hosts and --hostfile"),
    (["--hosts", "h1:2,h2:2", "-n", "5"], r"-n 5 is more than the hosts' 4 slots"),
    (["--hosts", "h1,h2", "--ppn", "2", "-n", "5"], r"-n 5 is more than the hosts' 4 slots"),
    (["--hosts", "h1,h2", "-n", "0"], r"-n '0' is no number of ranks"),
    (["--hosts", "h1,h2", "--ppn", "two"], r"--ppn 'two' is no number of ranks"),
    (["--hosts", "h1,h2", "--np", "2"], r"unknown option --np"),
    (["--hosts", "h1,h2", "-x", "NO_SUCH"], r"-x: there is no variable 'NO_SUCH'"),
    (["--hosts", "h1,h2", "--ssh", "no-such-ssh -v"], r"--ssh: there is no command 'no-such-ssh'"),
]


@pytest.mark.flavours("mpich")
@pytest.mark.parametrize(("args", "message"), WRONG, ids=[" ".join(args) for args, _ in WRONG])
def test_wrong_input_is_told_before_any_rank_starts(
    launch: Launch, flavour: Flavour, tmp_path: Path, args: list[str], message: str
) -> None:
    (tmp_path / "empty.txt").write_text("\n# nothing\n")
    (tmp_path / "bad.txt").write_text("h1\n\nh2 or so\n")
    (tmp_path / "slots.txt").write_text("h1 slots=many\n")
    file = program(tmp_path, "Path('started').touch()")
    start = time.monotonic()
    done = launch(flavour, *args, file, cwd=tmp_path)
    assert time.monotonic() - start < SECONDS_TO_END
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert re.search(message, line), line
    assert not (tmp_path / "started").exists()


@pytest.mark.flavours("mpich")
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "no program given"),
        (["none.py"], "no file 'none.py'"),
        (["-m"], "-m needs the name of a module"),
        (["-m", "there", ":", "touch"], "takes what follows a ':' for a second program"),
    ],
)
def test_missing_program(launch: Launch, flavour: Flavour, tmp_path: Path, args: list[str], message: str) -> None:
    done = launch(flavour, "--hosts", "h1,h2", *args, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr


LISTS = {
    "linux[1,2]": ["linux1", "linux2"],
    "alpha,beta": ["alpha", "beta"],
    "node[001-003,007]": ["node001", "node002", "node003", "node007"],
    "b04-[09-10]": ["b04-09", "b04-10"],
    "a,b[001,003],c": ["a", "b001", "b003", "c"],
    "r[1-2]n[8-9].x": ["r1n8.x", "r1n9.x", "r2n8.x", "r2n9.x"],
    "g[1-2]:4,h:2": ["g1", "g2", "h"],
}


@pytest.mark.flavours("mpich")
@pytest.mark.parametrize("text", list(LISTS))
def test_host_lists_are_read_as_slurm_writes_them(flavour: Flavour, tmp_path: Path, text: str) -> None:
    agent = tmp_path / "agent"
    agent.write_text("#!/bin/sh\necho refused >&2\nexit 1\n")
    agent.chmod(0o755)
    done = subprocess.run(
        [SCRIPT, "--hosts", text, "--ssh", agent, program(tmp_path, "")],
        env={**flavour.env(), "PYTHON": flavour.python},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    asked = re.findall(r"host (\S+) can't be reached: refused$", done.stderr, re.M)
    assert sorted(asked) == LISTS[text]
    assert len(asked) == len(done.stderr.splitlines())


@pytest.mark.parametrize("how", ["crash", "cut"])
def test_lost_host_ends_the_job(hosts: Callable[[int], Hosts], flavour: Flavour, tmp_path: Path, how: str) -> None:
    if how == "cut" and flavour.name != "mpich":
        pytest.skip("the wait for a silent host is ssh's own; once is enough, with the mpiexec that waits for ever")
    trio = hosts(3)
    launch = Launch(trio, trio.start_sshd())
    up = tmp_path / "up"
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(launch, flavour, "--hosts", "h1:2,h2:1,h3:1", program(tmp_path, LOOP), up, lost="h3")
        end = time.monotonic() + 60
        while not (up.exists() or job.done()):
            assert time.monotonic() < end, "the ranks did not come up"
            time.sleep(0.02)
        start = time.monotonic()
        getattr(trio, how)("h3")
        done = job.result()
    # A host that is silent has 12 s to speak up, and mpiexec then some to end.
    assert time.monotonic() - start < (SECONDS_TO_END if how == "crash" else 25)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "host h3 was lost" in done.stderr
    assert "host h2" not in done.stderr
