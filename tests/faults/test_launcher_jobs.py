"""Jobs of `ncclcomm run` that end badly: their status, their one report, and nothing left of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flavours import FLAVOURS, Flavour, clean_env, run_tree

ROOT = Path(__file__).resolve().parents[2]
MARK = "NCCLCOMM_TEST_LAUNCH"
JOB_LIMIT_S = 40.0
DOWN_LIMIT_S = 15.0

FAILING = """
import ctypes, os, signal, sys
rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK")
how, when = sys.argv[1:3]
def fail():
    if how == "raise": raise ValueError(f"rank {rank} gives up")
    if how == "exit": sys.exit(7)
    if how == "message": sys.exit("no luck today")
    if how == "_exit": os._exit(5)
    if how == "_exit9": os._exit(9)
    if how == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if how == "segv": ctypes.string_at(0)
if when == "before" and rank == "1": fail()
from mpi4py import MPI
if when == "during" and rank == "1": fail()
if when == "all": fail()
MPI.COMM_WORLD.Barrier()
print("not reached")
"""

WAITING = """
import signal, sys, time
if "deaf" in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "tidy" in sys.argv:
    def tidy(*_):
        print("tidied up")
        sys.exit(0)
    signal.signal(signal.SIGTERM, tidy)
from mpi4py import MPI
print("up", MPI.COMM_WORLD.rank)
if "tidy" in sys.argv or MPI.COMM_WORLD.rank == 0: time.sleep(600)
MPI.COMM_WORLD.Barrier()
"""


def environment(mark: str) -> dict[str, str]:
    """A shell's environment, without the settings that the launcher has to make, and with a mark to find survivors."""
    environ = {k: v for k, v in clean_env().items() if not k.startswith("NCCLCOMM_JOB")}
    return {**environ, "PYTHONPATH": str(ROOT), MARK: mark}


def launch_argv(flavour: Flavour, *args: str | Path) -> list[str]:
    return [flavour.python, "-m", "ncclcomm", "run", *map(str, args)]


def survivors(mark: str) -> list[str]:
    """Command lines of processes that still bear the mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(f"{entry.name}: {(entry / 'cmdline').read_bytes().decode()}")
            except OSError:
                continue  # ended meanwhile
    return found


def launch(flavour: Flavour, *args: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a job to its end and see that nothing is left the moment its launcher returns."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as folder:
        env = {**environment(mark), "TMPDIR": folder}
        ended = run_tree(launch_argv(flavour, *args), env=env, timeout_s=JOB_LIMIT_S, cwd=cwd)
        assert survivors(mark) == []
        assert list(Path(folder).glob("ncclcomm-*")) == []
    return ended


@contextmanager
def running(
    flavour: Flavour, size: int, *args: str | Path, shell: str = 'exec "$@"'
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A job whose ranks are all up, started by a line of shell; whatever is left of it is killed at the end."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        ["sh", "-c", shell, "sh", *launch_argv(flavour, "-n", str(size), *args)],
        env=environment(mark),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        up = sorted(process.stdout.readline() for _ in range(size))
        assert up == [f"up {rank}\n" for rank in range(size)]
        yield process, mark
    finally:
        process.kill()
        for line in survivors(mark):
            os.kill(int(line.partition(":")[0]), signal.SIGKILL)
        process.communicate(timeout=DOWN_LIMIT_S)


def wait_for_none(mark: str, limit_s: float) -> list[str]:
    """Survivors after at most that many seconds."""
    end = time.monotonic() + limit_s
    while (left := survivors(mark)) and time.monotonic() < end:
        time.sleep(0.05)
    return left


@pytest.fixture
def failing(tmp_path: Path) -> Path:
    path = tmp_path / "failing.py"
    path.write_text(FAILING)
    return path


@pytest.fixture
def waiting(tmp_path: Path) -> Path:
    path = tmp_path / "waiting.py"
    path.write_text(WAITING)
    return path


@pytest.mark.flavours(*FLAVOURS)
@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("raise", 1, "ValueError: rank 1 gives up"),
        ("exit", 7, "rank 1 exited with status 7"),
        ("message", 1, "no luck today"),
        ("_exit", 5, "rank 1 exited with status 5"),
        ("_exit9", 9, "rank 1 exited with status 9"),
        ("kill", 137, "rank 1 was killed by SIGKILL"),
        ("segv", 139, "rank 1 was killed by SIGSEGV"),
    ],
)
def test_first_failure_ends_the_job(
    flavour: Flavour, failing: Path, how: str, status: int, said: str, when: str
) -> None:
    ended = launch(flavour, "-n", "3", failing, how, when)
    assert ended.returncode == status, ended.stderr
    assert ended.stderr.count(said) == 1, ended.stderr
    assert ended.stderr.count("ncclcomm run: ") == 1, ended.stderr
    assert "not reached" not in ended.stdout


@pytest.mark.flavours(*FLAVOURS)
def test_traceback_is_plain_pythons(flavour: Flavour, failing: Path) -> None:
    plain = subprocess.run(
        [flavour.python, failing, "raise", "before"],
        env={**environment("plain"), "PMI_RANK": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=JOB_LIMIT_S,
    )
    ended = launch(flavour, "-n", "3", failing, "raise", "during")
    head, _, trace = ended.stderr.partition("\n")
    trace = trace.partition("-----")[0]
    line_of = {text: str(number) for number, text in enumerate(FAILING.splitlines(), 1)}
    before = line_of['if when == "before" and rank == "1": fail()']
    during = line_of['if when == "during" and rank == "1": fail()']
    expected = plain.stderr.replace(f"line {before},", f"line {during},").replace('"before"', '"during"')
    assert (head, trace) == ("ncclcomm run: rank 1 exited with status 1", expected)


def test_only_one_of_many_failures_is_shown(flavour: Flavour, failing: Path) -> None:
    ended = launch(flavour, "-n", "4", failing, "raise", "all")
    assert ended.returncode == 1
    assert ended.stderr.count("Traceback") == 1, ended.stderr


def test_the_programs_own_abort_gives_its_status(flavour: Flavour, tmp_path: Path) -> None:
    script = tmp_path / "abort.py"
    script.write_text(
        "from mpi4py import MPI\nc = MPI.COMM_WORLD\nif c.rank == 1: c.Abort(6)\nc.Barrier()\n", encoding="utf-8"
    )
    assert launch(flavour, "-n", "3", script).returncode == 6


def test_hook_that_aborts_still_has_its_words_shown(flavour: Flavour, tmp_path: Path) -> None:
    script = tmp_path / "hook.py"
    script.write_text(
        "import sys\nfrom mpi4py import MPI\nc = MPI.COMM_WORLD\n"
        "def hook(kind, error, trace):\n"
        "    print('hook saw', kind.__name__, file=sys.stderr)\n"
        "    c.Abort(4)\n"
        "sys.excepthook = hook\nif c.rank == 1: raise KeyError(3)\nc.Barrier()\n"
    )
    ended = launch(flavour, "-n", "3", script)
    assert ended.returncode in (1, 4)  # Abort may return, or end the process
    assert ended.stderr.count("hook saw KeyError") == 1, ended.stderr


def test_child_without_ncclcomm_run_ends_the_job_by_mpi(flavour: Flavour, failing: Path) -> None:
    child = ROOT / "ncclcomm" / "launcher" / "child.py"
    ended = flavour.run(3, [child, failing, "exit", "during"], timeout_s=JOB_LIMIT_S)
    assert ended.returncode == 7, ended.stderr


@pytest.mark.parametrize("size", [1, 3])
def test_time_limit(flavour: Flavour, waiting: Path, size: int) -> None:
    started = time.monotonic()
    ended = launch(flavour, "-n", str(size), "--timeout", "4", waiting)
    assert ended.returncode == 124, ended.stderr
    assert "time limit of 4 s" in ended.stderr
    assert time.monotonic() - started > 4


def test_time_limit_kills_ranks_that_ignore_sigterm(flavour: Flavour, waiting: Path) -> None:
    ended = launch(flavour, "-n", "3", "--timeout", "4", "--grace", "0.5", waiting, "deaf")
    assert ended.returncode == 124, ended.stderr


def test_ranks_use_their_grace(flavour: Flavour, waiting: Path) -> None:
    ended = launch(flavour, "-n", "3", "--timeout", "4", "--grace", "20", waiting, "tidy")
    assert ended.returncode == 124, ended.stderr
    assert ended.stdout.count("tidied up") == 3


@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGHUP", 129)])
def test_signal_to_the_launcher(flavour: Flavour, waiting: Path, name: str, status: int) -> None:
    with running(flavour, 3, waiting) as (process, mark):
        process.send_signal(signal.Signals[name])
        assert process.wait(DOWN_LIMIT_S) == status
        assert survivors(mark) == []


@pytest.mark.flavours("mpich")
def test_a_signal_that_is_ignored_at_the_start_stays_so(flavour: Flavour, waiting: Path) -> None:
    with running(flavour, 1, waiting, shell="trap '' INT; exec \"$@\"") as (process, mark):
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
        assert int(fields["SigIgn"], 16) & 1 << (signal.SIGINT - 1)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DOWN_LIMIT_S) == 143
        assert survivors(mark) == []


@pytest.mark.flavours("mpich")
def test_a_time_limit_of_many_days(flavour: Flavour, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('done')")
    ended = launch(flavour, "-n", "1", "--timeout", "1e12", script)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


def test_closed_streams_keep_the_status(flavour: Flavour, failing: Path) -> None:
    argv = ["sh", "-c", '"$@" >&- 2>&-', "sh", *launch_argv(flavour, "-n", "2", failing, "exit", "during")]
    ended = run_tree(argv, env=environment("closed"), timeout_s=JOB_LIMIT_S)
    assert ended.returncode == 7


def test_second_signal_skips_the_grace(flavour: Flavour, waiting: Path) -> None:
    with running(flavour, 2, "--grace", "600", waiting, "deaf") as (process, mark):
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert "SIGINT: stopping" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(DOWN_LIMIT_S) == 130
        assert survivors(mark) == []


def test_killed_launcher_takes_its_ranks_along(flavour: Flavour, waiting: Path) -> None:
    with running(flavour, 3, waiting) as (process, mark):
        process.kill()
        assert process.wait(DOWN_LIMIT_S) == -signal.SIGKILL
        assert wait_for_none(mark, DOWN_LIMIT_S) == []


WITH_NCCLCOMM = """
import signal, sys, threading, time
import ncclcomm
comm = ncclcomm.init()
def save(*_):
    time.sleep(0.3)
    print("saved", comm.rank)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
comm.barrier()
if comm.rank == 1 and sys.argv[1] == "thread": threading.Thread(target=lambda: 1 / 0).start()
if comm.rank == 1 and sys.argv[1] == "main": 1 / 0
time.sleep(600)
"""


@pytest.mark.flavours("mpich", "openmpi")
@pytest.mark.parametrize("where", ["main", "thread"])
def test_ranks_of_ncclcomm_have_their_grace_too(flavour: Flavour, tmp_path: Path, where: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(WITH_NCCLCOMM)
    start = time.monotonic()
    ended = launch(flavour, "-n", "3", "--grace", "30", script, where)
    assert time.monotonic() - start < 25, "ranks that have saved their work wait for the one that failed"
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.count("ZeroDivisionError: division by zero") == 1, ended.stderr
    assert "ncclcomm run: rank 1 exited with status 1" in ended.stderr
    # MPICH's mpiexec writes there too, at times, of ranks that it was told to end.
    assert sorted(line for line in ended.stdout.splitlines() if line.startswith("saved")) == ["saved 0", "saved 2"]


IN_VAIN = """
import sys, time
import numpy as np
import ncclcomm
comm = ncclcomm.init()
comm.barrier()
if comm.rank == 1: time.sleep(600 * (sys.argv[1] == "caught"))
else:
    try: comm.all_reduce(np.ones(3), timeout_s=2 if sys.argv[1] == "caught" else None)
    except ncclcomm.CommTimeoutError: pass
"""


@pytest.mark.flavours(*FLAVOURS)
def test_the_rank_that_waits_in_vain_is_named(flavour: Flavour, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(IN_VAIN)
    ended = launch(flavour, "-n", "3", script, "left")
    assert ended.returncode == 1, ended.stderr
    said = re.search(r"^ncclcomm: rank ([02]) .*: rank 1 will not come$", ended.stderr, re.MULTILINE)
    assert said, ended.stderr
    named = f"ncclcomm run: rank {said[1]} exited with status 1\nncclcomm: it waited in vain, as its report says\n"
    assert named in ended.stderr, ended.stderr
    assert ended.stderr.count("ncclcomm run: ") == ended.stderr.count("will not come") == 1, ended.stderr
    assert "MPI_Abort" not in ended.stderr


@pytest.mark.flavours("mpich")
def test_a_rank_that_ends_after_its_time_limit_is_named(flavour: Flavour, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(IN_VAIN)
    ended = launch(flavour, "-n", "3", script, "caught")
    assert ended.returncode == 1, ended.stderr
    assert re.fullmatch(r"ncclcomm run: rank [02] exited with status 1: .*\n", ended.stderr), ended.stderr


@pytest.mark.flavours("mpich")
def test_sigusr1_reaches_the_ranks(flavour: Flavour, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\nfrom mpi4py import MPI\n"
        "print('up', MPI.COMM_WORLD.rank)\nsignal.sigwait([signal.SIGUSR1])\nprint('heard')\n"
    )
    with running(flavour, 2, script) as (process, mark):
        process.send_signal(signal.SIGUSR1)
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["heard\n"] * 2
        assert process.wait(DOWN_LIMIT_S) == 0
        assert survivors(mark) == []


def test_closed_stdout_ends_the_job(flavour: Flavour, tmp_path: Path) -> None:
    script = tmp_path / "chatty.py"
    script.write_text("while True: print('line ' * 20)\n")
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        launch_argv(flavour, "-n", "2", script),
        env=environment(mark),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        process.stdout.read(100)
        process.stdout.close()
        assert process.wait(DOWN_LIMIT_S) != 0
        assert survivors(mark) == []
    finally:
        process.kill()
        process.wait()


def test_pipeline_keeps_the_status(flavour: Flavour, failing: Path, tmp_path: Path) -> None:
    line = 'set -o pipefail; "$@" 2>&1 | tee "$0"'
    log = tmp_path / "log"
    argv = ["bash", "-c", line, log, *launch_argv(flavour, "-n", "3", failing, "exit", "during")]
    ended = run_tree(argv, env=environment("tee"), timeout_s=JOB_LIMIT_S)
    assert ended.returncode == 7
    assert "rank 1 exited with status 7" in log.read_text()


def test_python_of_the_tests_is_not_assumed(flavour: Flavour) -> None:
    """The launcher pairs each Python with its own mpiexec, whichever comes first on PATH."""
    ended = run_tree(
        launch_argv(flavour, "-n", "1", "--dry-run", __file__),
        env={**environment("path"), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
    )
    assert str(Path(flavour.python).parent / "mpiexec") in ended.stdout


@pytest.mark.flavours("openmpi")
def test_mpiexec_that_outlives_ranks_that_ended_well(flavour: Flavour, failing: Path) -> None:
    program = """
        import subprocess, sys
        from ncclcomm import cli
        from ncclcomm.launcher import job

        class Lingering(subprocess.Popen):
            def __init__(self, argv, *args, start_new_session=False, **kwargs):
                if start_new_session:
                    argv = ["sh", "-c", '"$@"; exec sleep 600', "sh", *argv]
                super().__init__(argv, *args, start_new_session=start_new_session, **kwargs)

        job._IDLE_MPIEXEC_S = 1.0
        subprocess.Popen = Lingering
        sys.exit(cli.main(sys.argv[1:]))
    """
    argv = ["-c", textwrap.dedent(program), "run", "-n", "2", failing, "never", "never"]
    ended = run_tree([flavour.python, *argv], env=environment(uuid.uuid4().hex), timeout_s=JOB_LIMIT_S)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("not reached") == 2
    assert "every rank has ended well, but mpiexec has not, 1 s later: killed" in ended.stderr


def test_what_all_ranks_leave_is_ended_though_one_is_quicker(flavour: Flavour, tmp_path: Path) -> None:
    """An MPI launcher that sees the quicker one go kills the other's watcher, which is not through then."""
    script = tmp_path / "leaves.py"
    script.write_text("""
import subprocess, sys
from mpi4py import MPI
world = MPI.COMM_WORLD
if world.rank == 0:
    unmarked = ["env", "-u", "NCCLCOMM_JOB_ID", "setsid", "sleep", "600"]
    for _ in range(200): subprocess.Popen(unmarked)
world.Barrier()
if world.rank == 1: sys.exit(3)
world.Barrier()
""")
    ended = launch(flavour, "-n", "2", script)
    assert ended.returncode == 3, ended.stderr
