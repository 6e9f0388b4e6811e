"""Ranks that leave, die or fail alone: the others are told, once, and the job ends in time."""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path

import pytest

from faults.rank_programs import ENDS_WITHIN_S, run_program
from flavours import FLAVOURS, Flavour


@pytest.mark.flavours(*FLAVOURS)
@pytest.mark.parametrize(
    ("leave", "words"),
    [
        ("sys.exit(3)", "rank 1 will not come"),
        ("sys.exit(0)", "rank 1 will not come"),
        ("raise LookupError('lost')", "LookupError: lost"),
        ("fail_in_a_thread()", "ZeroDivisionError: division by zero"),
        ("os._exit(5)", ""),
        ("os.kill(os.getpid(), signal.SIGKILL)", ""),
        ("ctypes.string_at(0)", ""),
        ("faulthandler.enable(); ctypes.string_at(0)", "Fatal Python error: Segmentation fault"),
    ],
    ids=["exit 3", "exit 0", "raise", "thread raises", "os._exit", "SIGKILL", "segfault", "faulthandler"],
)
def test_a_rank_that_leaves_ends_the_job(flavour: Flavour, tmp_path: Path, leave: str, words: str) -> None:
    body = f"""
import ctypes, faulthandler
def fail_in_a_thread():
    failing = threading.Thread(target=lambda: 1 / 0)
    failing.start(); failing.join(); time.sleep(60)
if comm.rank == 1:
    {leave}
comm.all_reduce(np.ones(3))
"""
    ended, seconds = run_program(flavour, tmp_path, body)
    assert ended.returncode != 0
    assert seconds < ENDS_WITHIN_S
    assert ended.stderr.count(words) == 1 or not words, ended.stderr
    assert ended.stderr.count("will not come") <= 1, ended.stderr


def test_the_rank_that_raised_is_named_below_its_traceback(flavour: Flavour, tmp_path: Path) -> None:
    ended, _ = run_program(flavour, tmp_path, "if comm.rank == 1:\n    raise LookupError('lost')\ncomm.barrier()\n")
    named = rf"LookupError: lost\nncclcomm: nobody caught that exception in rank 1 of 3, on {socket.gethostname()},"
    assert re.search(named, ended.stderr), ended.stderr


def test_a_traceback_is_written_in_one_piece(flavour: Flavour, tmp_path: Path) -> None:
    body = """
class Terminal:
    def write(self, text):
        os.write(1, f"wrote {text!r}\\n".encode())
    def flush(self):
        pass
if comm.rank == 1:
    sys.stderr = Terminal()
    raise LookupError("lost")
comm.barrier()
"""
    ended, _ = run_program(flavour, tmp_path, body)
    wrote = [line for line in ended.stdout.splitlines() if line.startswith("wrote")]
    assert len(wrote) == 2, ended.stdout
    assert re.fullmatch(r"wrote ['\"]Traceback \(most recent call last\):.*LookupError: lost\\n['\"]", wrote[0]), wrote


def test_a_rank_that_exits_is_named_with_what_it_last_did(flavour: Flavour, tmp_path: Path) -> None:
    ended, _ = run_program(flavour, tmp_path, "if comm.rank == 1:\n    sys.exit(0)\ncomm.all_reduce(np.ones((2, 5)))\n")
    assert re.search(
        r"rank [02] \(node 0, local [02]\): waited \d+ s in all_reduce \(call 1, shape \(2, 5\)", ended.stderr
    )
    assert "rank 1 will not come" in ended.stderr
    assert re.search(r"in this call: ranks 0, 2", ended.stderr), ended.stderr
    # MPI may let it go, or hold it in MPI_Finalize, where its watchdog still answers.
    left = r"(its process has ended|last finished all_reduce \(call 0\), its program has ended)"
    assert re.search(rf"rank 1 \(node 0, local 1\): {left}", ended.stderr), ended.stderr


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
    ended, seconds = run_program(flavour, tmp_path, body)
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
    ended, _ = run_program(flavour, tmp_path, body)
    assert ended.returncode == 0, ended.stderr
    lines = sorted(ended.stdout.split("\n"))
    assert lines == ["", "MemoryError True", *["NcclCommError True"] * 2, *["after 3.0"] * 3]


def test_a_rank_that_went_on_and_left_is_not_waited_for(flavour: Flavour, tmp_path: Path) -> None:
    # What an unchecked call that needs nobody leaves behind, as a root's broadcast.
    body = """
from ncclcomm.communicator import watchdog
watchdog.LEFT_S = 1.0
if comm.rank == 1:
    from ncclcomm.communicator.board import BOARD
    BOARD.last[comm._member.name] = ("broadcast", comm._calls)
    sys.exit(0)
comm.all_reduce(np.ones(2))
"""
    ended, seconds = run_program(flavour, tmp_path, body)
    assert ended.returncode != 0
    assert seconds < ENDS_WITHIN_S
    assert "rank 1 will not come" in ended.stderr


@pytest.mark.flavours("mpich")
@pytest.mark.parametrize("block", ["with comm", "if True"], ids=["closed", "left open"])
def test_a_rank_that_did_its_part_and_ended_is_no_fault(flavour: Flavour, tmp_path: Path, block: str) -> None:
    # An unchecked reduce needs nothing of rank 1 once it has sent its part; this MPI lets it end meanwhile.
    body = f"""
from ncclcomm.communicator import watchdog
watchdog.LEFT_S = 0.5
{block}:
    if comm.rank == 2:
        time.sleep(3.5)
    total = comm.reduce(np.ones(2))
if comm.rank == 0:
    print(total[0])
"""
    ended, _ = run_program(flavour, tmp_path, body, init="check=False")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "3.0\n", "")


def test_close_waits_for_all_unchecked_too(flavour: Flavour, tmp_path: Path) -> None:
    body = """
if comm.rank == 2:
    while not os.path.exists(os.environ["SIGNAL"]):
        time.sleep(0.01)
    open(os.environ["LATE"], "w").close()
if comm.rank == 0:
    open(os.environ["SIGNAL"], "w").close()
comm.close()
os.write(1, f"closed after the last had come: {os.path.exists(os.environ['LATE'])}\\n".encode())
"""
    files = {"SIGNAL": str(tmp_path / "signal"), "LATE": str(tmp_path / "late")}
    ended, _ = run_program(flavour, tmp_path, body, init="check=False", **files)
    assert (ended.returncode, ended.stdout) == (0, "closed after the last had come: True\n" * 3), ended.stderr


@pytest.mark.flavours("mpich")
def test_a_call_that_is_interrupted_while_ranks_agree(flavour: Flavour, tmp_path: Path) -> None:
    body = """
if comm.rank == 1:
    def interrupt(data):
        raise KeyboardInterrupt
    comm._control.all_gather_bytes = interrupt
    try:
        comm.all_reduce(np.ones(4))
    except KeyboardInterrupt:
        pass
    try:
        comm.all_reduce(np.ones(4))
    except ncclcomm.AbortedError as error:
        os.write(1, f"refused: {error}\\n".encode())
    time.sleep(60)
comm.all_reduce(np.ones(4))
"""
    ended, seconds = run_program(flavour, tmp_path, body)
    assert ended.returncode != 0
    assert seconds < ENDS_WITHIN_S
    assert "refused: rank 1" in ended.stdout
    assert "can't go on: all_reduce was interrupted on this rank" in ended.stderr, ended.stderr


@pytest.mark.flavours("mpich")
def test_a_watchdog_that_cannot_start_on_one_rank_is_told_to_all(flavour: Flavour, tmp_path: Path) -> None:
    body = """
from mpi4py import MPI
from ncclcomm.communicator import setup
if comm.rank == 1:
    def fail(end_job):
        raise OSError("no socket")
    kept, setup.watchdog = setup.watchdog, fail
try:
    ncclcomm.Communicator(MPI.COMM_WORLD)
except (OSError, ncclcomm.NcclCommError) as error:
    os.write(1, f"{type(error).__name__} {'no socket' in str(error)}\\n".encode())
if comm.rank == 1:
    setup.watchdog = kept
ncclcomm.Communicator(MPI.COMM_WORLD).close()
comm.close()
"""
    ended, _ = run_program(flavour, tmp_path, body)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == [*["NcclCommError True"] * 2, "OSError True"]


@pytest.mark.parametrize("when", ["before init", "inside init"])
@pytest.mark.parametrize("fault", ["SIGKILL", "raise"])
def test_a_rank_that_is_lost_before_there_is_a_communicator(
    flavour: Flavour, tmp_path: Path, fault: str, when: str
) -> None:
    script = tmp_path / "program.py"
    script.write_text(f"""
import os, signal
from mpi4py import MPI
import ncclcomm
from ncclcomm.communicator import setup

def fail():
    if {fault == "SIGKILL"}:
        os.kill(os.getpid(), signal.SIGKILL)
    raise LookupError("lost")

if MPI.COMM_WORLD.rank == 1:
    if {when == "before init"}:
        fail()
    setup.current_backend = fail
ncclcomm.init()
""")
    # Before init nothing of ours is there yet, so that an exception needs MPI's own runner.
    runner = ["-m", "mpi4py"] if (fault, when) == ("raise", "before init") else []
    start = time.monotonic()
    ended = flavour.run(3, [*runner, script], timeout_s=60)
    assert ended.returncode != 0
    assert time.monotonic() - start < ENDS_WITHIN_S
    if fault == "raise":
        assert "LookupError: lost" in ended.stderr, ended.stderr
