"""Ranks that leave, die, fail alone or never come: the others are told, once, and the job ends in time."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

from flavours import Flavour

ENDS_WITHIN_S = 20.0
"""Far above the 5 s that a job on an idle machine takes to end, far below what a hang would take."""

_HEAD = """
import os, signal, sys, threading, time
import numpy as np
import ncclcomm
comm = ncclcomm.init({init})
comm.all_reduce(np.ones(3))
"""


def _run(
    flavour: Flavour, folder: Path, body: str, init: str = "", n: int = 3, **env: str
) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run a program on n ranks; how it ended, and after how many seconds."""
    script = folder / "program.py"
    script.write_text(_HEAD.format(init=init) + body)
    start = time.monotonic()
    ended = flavour.run(n, [script], env=env, timeout_s=60)
    return ended, time.monotonic() - start


@pytest.mark.parametrize(
    ("leave", "words"),
    [
        ("sys.exit(3)", "rank 1 will not come"),
        ("sys.exit(0)", "rank 1 will not come"),
        ("raise LookupError('lost')", "LookupError: lost"),
        ("threading.Thread(target=lambda: 1 / 0).start(); time.sleep(60)", "ZeroDivisionError: division by zero"),
        ("os._exit(5)", ""),
        ("os.kill(os.getpid(), signal.SIGKILL)", ""),
    ],
    ids=["exit 3", "exit 0", "raise", "thread raises", "os._exit", "SIGKILL"],
)
def test_a_rank_that_leaves_ends_the_job(flavour: Flavour, tmp_path: Path, leave: str, words: str) -> None:
    ended, seconds = _run(flavour, tmp_path, f"if comm.rank == 1:\n    {leave}\ncomm.all_reduce(np.ones(3))\n")
    assert ended.returncode != 0
    assert seconds < ENDS_WITHIN_S
    assert words in ended.stderr, ended.stderr
    assert ended.stderr.count("will not come") <= 1, ended.stderr


def test_a_rank_that_exits_is_named_with_what_it_last_did(flavour: Flavour, tmp_path: Path) -> None:
    ended, _ = _run(flavour, tmp_path, "if comm.rank == 1:\n    sys.exit(0)\ncomm.all_reduce(np.ones((2, 5)))\n")
    assert re.search(
        r"rank [02] \(node 0, local [02]\): waited \d+ s in all_reduce \(call 1, shape \(2, 5\)", ended.stderr
    )
    assert "rank 1 will not come" in ended.stderr
    assert re.search(r"in this call: ranks 0, 2", ended.stderr), ended.stderr
    # MPI may let it go, or hold it in MPI_Finalize, where its watchdog still answers.
    left = r"rank 1: (its process has ended|last finished all_reduce \(call 0\), its program has ended)"
    assert re.search(left, ended.stderr), ended.stderr


def test_a_rank_that_fails_alone_while_data_moves(flavour: Flavour, tmp_path: Path) -> None:
    body = """
if comm.rank == 1:
    def fail(count, dtype):
        raise MemoryError("no room")
    engine = comm._engine(-1)
    engine.all_reduce = lambda *args: fail(1, 2)
    try:
        comm.all_reduce(np.ones(4))
    except MemoryError:
        pass
    try:
        comm.all_reduce(np.ones(4))
    except ncclcomm.AbortedError as error:
        print("refused:", error, flush=True)
    time.sleep(60)
comm.all_reduce(np.ones(4))
"""
    ended, seconds = _run(flavour, tmp_path, body)
    assert ended.returncode != 0
    assert seconds < ENDS_WITHIN_S
    assert "refused: rank 1" in ended.stdout
    assert "rank 1 will not come" in ended.stderr, ended.stderr
    assert "no room" in ended.stderr


def test_what_cannot_be_prepared_is_told_to_all(flavour: Flavour, tmp_path: Path) -> None:
    body = """
array = np.ones((4, 4))[:, ::2]
if comm.rank == 1:
    from ncclcomm.communicator import reduce
    def fail(*args):
        raise MemoryError("no room")
    reduce.target_for = fail
try:
    comm.all_reduce(array)
except (MemoryError, ncclcomm.NcclCommError) as error:
    os.write(1, f"{type(error).__name__} {'no room' in str(error)}\\n".encode())
if comm.rank == 1:
    from ncclcomm.communicator.buffers import target_for
    reduce.target_for = target_for
os.write(1, f"after {comm.all_reduce(np.ones(1))[0]}\\n".encode())
comm.close()
"""
    ended, _ = _run(flavour, tmp_path, body)
    assert ended.returncode == 0, ended.stderr
    lines = sorted(ended.stdout.split("\n"))
    assert lines == ["", "MemoryError True", *["NcclCommError True"] * 2, *["after 3.0"] * 3]


def test_a_time_limit_raises_on_every_waiting_rank(flavour: Flavour, tmp_path: Path) -> None:
    body = """
def elsewhere():
    time.sleep(8)

if comm.rank == 1:
    elsewhere()
    sys.exit(0)
try:
    comm.all_reduce(np.ones(7))
except ncclcomm.CommTimeoutError as error:
    print("told", comm.rank, error.timeout_s, isinstance(error, TimeoutError), error, flush=True)
try:
    comm.barrier()
except ncclcomm.AbortedError:
    print("closed to calls", flush=True)
comm.close()
"""
    ended, seconds = _run(flavour, tmp_path, body, init="timeout_s=2")
    assert ended.returncode != 0, "a job whose ranks gave up on each other must not end well"
    assert seconds < ENDS_WITHIN_S
    assert ended.stdout.count("told 0 2.0 True") == 1, ended.stdout
    assert ended.stdout.count("told 2 2.0 True") == 1, ended.stdout
    assert ended.stdout.count("closed to calls") == 2
    assert "rank 1: last finished all_reduce (call 0), at program.py" in ended.stdout
    assert "in elsewhere" in ended.stdout


def test_a_call_within_its_limit_is_a_call_as_others(flavour: Flavour, tmp_path: Path) -> None:
    body = "print(comm.all_reduce(np.ones(2), timeout_s=30)[0]); comm.barrier(timeout_s=30); comm.close()\n"
    ended, _ = _run(flavour, tmp_path, body)
    assert (ended.returncode, ended.stdout.count("3.0")) == (0, 3), ended.stderr


def test_a_stall_is_told_once_and_the_job_goes_on(flavour: Flavour, tmp_path: Path) -> None:
    body = """
if comm.rank == 2:
    time.sleep(7)
print(comm.all_reduce(np.ones(2))[0])
comm.close()
"""
    ended, _ = _run(flavour, tmp_path, body, NCCLCOMM_STALL_S="2")
    assert (ended.returncode, ended.stdout.count("3.0")) == (0, 3), ended.stderr
    assert ended.stderr.count("still waiting") == 1, ended.stderr
    assert "in this call: ranks 0-1" in ended.stderr
    assert re.search(r"rank 2: last finished all_reduce \(call 0\), at program.py:\d+ in <module>", ended.stderr)


def test_close_counts_as_a_call(flavour: Flavour, tmp_path: Path) -> None:
    body = """
try:
    comm.close() if comm.rank == 1 else comm.all_reduce(np.ones(2))
except ncclcomm.MismatchError as error:
    print("rank 1: close" in str(error), "ranks 0, 2: all_reduce" in str(error), flush=True)
comm.close()
"""
    ended, _ = _run(flavour, tmp_path, body)
    assert (ended.returncode, ended.stdout.count("True")) == (0, 6), ended.stdout + ended.stderr


def test_a_with_block_left_by_an_exception(flavour: Flavour, tmp_path: Path) -> None:
    body = """
try:
    with comm:
        if comm.rank == 1:
            raise KeyError("mine")
        comm.all_reduce(np.ones(2))
except KeyError:
    time.sleep(60)
"""
    ended, seconds = _run(flavour, tmp_path, body)
    assert ended.returncode != 0
    assert seconds < ENDS_WITHIN_S
    assert "left its `with` block by KeyError" in ended.stderr, ended.stderr


def test_exit_is_silent(flavour: Flavour, tmp_path: Path) -> None:
    body = """
from mpi4py import MPI
kept = [comm, comm.split(comm.rank % 2), ncclcomm.Communicator(MPI.COMM_WORLD)]
comm.all_reduce(np.ones(3))
{last}
"""
    for last in ("", "comm.close()", "MPI.Finalize()", "kept.clear(); del comm"):
        ended, _ = _run(flavour, tmp_path, body.format(last=last))
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", ""), (last, ended.stderr)


def test_abort_is_told_and_ends_the_job(flavour: Flavour, tmp_path: Path) -> None:
    body = """
if comm.rank == 1:
    other = threading.Thread(target=comm.abort, args=("the disk is full",))
    other.start(); other.join()
    comm.abort()
    try:
        comm.barrier()
    except ncclcomm.AbortedError as error:
        os.write(1, f"refused {error}\\n".encode())
    time.sleep(60)
comm.all_reduce(np.ones(2))
"""
    ended, seconds = _run(flavour, tmp_path, body)
    assert ended.returncode != 0
    assert seconds < ENDS_WITHIN_S
    assert "refused rank 1" in ended.stdout
    assert "rank 1: last finished all_reduce (call 0), can't go on: aborted: the disk is full" in ended.stderr


def test_a_communicator_that_all_ranks_gave_up_lets_the_job_end_well(flavour: Flavour, tmp_path: Path) -> None:
    ended, _ = _run(flavour, tmp_path, "comm.abort(); comm.abort(); comm.close(); comm.abort(); comm.close()\n")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_three_thousand_communicators(flavour: Flavour, tmp_path: Path) -> None:
    body = """
from mpi4py import MPI
for turn in range(3000):
    with ncclcomm.Communicator(MPI.COMM_WORLD) as one:
        if turn % 100 == 0:
            one.all_reduce(np.ones(2))
print(threading.active_count() < 10)
"""
    ended, _ = _run(flavour, tmp_path, body, n=1)
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr


def test_a_rank_that_went_on_and_left_is_not_waited_for(flavour: Flavour, tmp_path: Path) -> None:
    # What an unchecked call that needs nobody leaves behind, as a root's broadcast.
    body = """
if comm.rank == 1:
    from ncclcomm.communicator.board import BOARD
    BOARD.last[comm._member.name] = ("broadcast", comm._calls)
    sys.exit(0)
comm.all_reduce(np.ones(2))
"""
    ended, seconds = _run(flavour, tmp_path, body)
    assert ended.returncode != 0
    assert seconds < 2 * ENDS_WITHIN_S
    assert "rank 1 will not come" in ended.stderr


@pytest.mark.parametrize("limit", ["-1", "0", "'2'", "True", "float('nan')"])
def test_a_time_limit_that_is_none(flavour: Flavour, tmp_path: Path, limit: str) -> None:
    body = f"""
try:
    comm.barrier(timeout_s={limit})
except ncclcomm.ArgumentError as error:
    os.write(1, f"told {{'timeout_s is' in str(error)}}\\n".encode())
comm.close()
"""
    ended, _ = _run(flavour, tmp_path, body, n=2)
    assert (ended.returncode, ended.stdout) == (0, "told True\n" * 2), ended.stderr


def test_a_call_from_a_second_thread_is_refused(flavour: Flavour, tmp_path: Path) -> None:
    body = """
if comm.rank == 0:
    waiting = threading.Thread(target=comm.barrier)
    waiting.start()
    while not comm._entry:
        time.sleep(0.01)
    try:
        comm.barrier()
    except ncclcomm.ArgumentError as error:
        os.write(1, f"{error}\\n".encode())
    open(os.environ["SIGNAL"], "w").close()
    waiting.join()
else:
    while not os.path.exists(os.environ["SIGNAL"]):
        time.sleep(0.01)
    comm.barrier()
comm.close()
"""
    ended, _ = _run(flavour, tmp_path, body, n=2, SIGNAL=str(tmp_path / "signal"))
    assert ended.returncode == 0, ended.stderr
    assert "is in barrier in another thread" in ended.stdout


def test_a_time_limit_that_is_none_is_told_unchecked_too(flavour: Flavour, tmp_path: Path) -> None:
    body = """
try:
    comm.barrier(timeout_s="2")
except ncclcomm.ArgumentError as error:
    os.write(1, f"told {'timeout_s is' in str(error)}\\n".encode())
"""
    ended, _ = _run(flavour, tmp_path, body, init="check=False", n=2)
    assert (ended.returncode, ended.stdout) == (0, "told True\n" * 2), ended.stderr


def test_a_forked_child_is_no_rank(flavour: Flavour, tmp_path: Path) -> None:
    body = """
import warnings
warnings.simplefilter("ignore")
for fail in (False, True):
    child = os.fork()
    if child == 0:
        from ncclcomm.communicator import exits
        sys.stderr = open(os.devnull, "w")
        if fail:
            sys.excepthook(KeyError, KeyError("child"), None)
        else:
            from mpi4py import MPI
            exits._leave(MPI, os.getppid())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
os.write(1, f"{comm.all_reduce(np.ones(1))[0]}\\n".encode())
comm.close()
"""
    ended, _ = _run(flavour, tmp_path, body)
    assert (ended.returncode, ended.stdout) == (0, "3.0\n" * 3), ended.stderr
