"""How communicators end: closed, dropped, aborted, from threads, at exit, after MPI's own end, in every order."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.rank_programs import ENDS_WITHIN_S, run_program
from flavours import FLAVOURS, Flavour

AT_EXIT = {
    "close at exit": "comm.close, kept[1].close, comm.close",
    "abort at exit": "comm.abort, comm.close, comm.abort",
    "finalize at exit": "lambda: MPI.Finalize(), comm.close, kept[1].close",
}
"""What a program's own handler may do at exit; it can be registered before or after init."""


ENDINGS = {
    "nothing": "",
    "close": "comm.close()",
    "finalize": "MPI.Finalize()",
    "drop": "kept.clear(); del comm",
    "close, finalize, close": "comm.close(); MPI.Finalize(); comm.close(); comm.abort(); kept[1].close()",
    "finalize, close, abort": "MPI.Finalize(); comm.close(); comm.close(); comm.abort()",
    "finalize, abort, close": "MPI.Finalize(); comm.abort(); comm.abort(); comm.close()",
    "finalize in a block": "with comm, kept[1]: MPI.Finalize()",
    "abort, finalize": "comm.abort(); MPI.Finalize()",
    **{name: f"at_exit += [{steps}]" for name, steps in AT_EXIT.items()},
    **{f"{name}, first": f"at_exit += [{steps}]; atexit.unregister(again)" for name, steps in AT_EXIT.items()},
    "finalize itself at exit": "atexit.register(MPI.Finalize)",
    "finalize itself at exit, first": "",
    "close in a thread": "in_threads(comm.close); comm.close(); comm.abort()",
    "abort in threads": "in_threads(comm.abort, comm.abort, comm.close); comm.close()",
}
"""Orders in which a program may end what it made; all ranks do the same."""


def test_exit_is_silent_in_every_order(flavour: Flavour, tmp_path: Path) -> None:
    body = """
import atexit, threading
import numpy as np
import ncclcomm
from mpi4py import MPI

at_exit = []
def end():
    while at_exit:
        at_exit.pop(0)()
def again():
    end()
if "{name}" == "finalize itself at exit, first":
    atexit.register(MPI.Finalize)
atexit.register(end)

def in_threads(*steps):
    threads = [threading.Thread(target=step) for step in steps]
    for thread in threads: thread.start()
    for thread in threads: thread.join()

comm = ncclcomm.init()
atexit.register(again)
array, stream, event = ncclcomm.asarray(np.ones(3)), ncclcomm.Stream(), ncclcomm.Event()
with ncclcomm.stream(stream):
    event.record()
kept = [array, comm.split(comm.rank % 2), ncclcomm.Communicator(MPI.COMM_WORLD), stream, event]
comm.all_reduce(array)
"""
    wrong = []
    script = tmp_path / "program.py"
    for name, last in ENDINGS.items():
        script.write_text(body.replace("{name}", name) + last)
        ended = flavour.run(2, [script], timeout_s=60)
        if (ended.returncode, ended.stdout, ended.stderr) != (0, "", ""):
            wrong.append(f"{name}: status {ended.returncode}, {ended.stdout}{ended.stderr}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.flavours(*FLAVOURS)
def test_a_call_after_the_programs_own_finalize_is_refused(flavour: Flavour, tmp_path: Path) -> None:
    body = """
from mpi4py import MPI
MPI.Finalize()
for call in (lambda: comm.all_reduce(np.ones(2)), lambda: comm.split(0), lambda: comm.barrier(timeout_s=3)):
    try:
        call()
    except ncclcomm.ClosedError as error:
        os.write(1, f"{'MPI was finalized' in str(error)}\\n".encode())
"""
    ended, _ = run_program(flavour, tmp_path, body)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "True\n" * 9, "")


def test_one_rank_may_drop_what_the_others_close(flavour: Flavour, tmp_path: Path) -> None:
    # close is collective, so that it must be told that the one rank will not call it.
    body = """
import gc
from mpi4py import MPI
other = ncclcomm.Communicator(MPI.COMM_WORLD)
other.barrier()
if comm.rank == 1:
    del other
    gc.collect()
    comm.all_reduce(np.ones(2))
else:
    comm.all_reduce(np.ones(2))
    other.close()
"""
    ended, seconds = run_program(flavour, tmp_path, body)
    assert seconds < ENDS_WITHIN_S
    assert ended.returncode != 0
    assert ended.stderr.count("rank 1 will not come") == 1, ended.stderr


def test_close_counts_as_a_call(flavour: Flavour, tmp_path: Path) -> None:
    body = """
try:
    comm.close() if comm.rank == 1 else comm.all_reduce(np.ones(2))
except ncclcomm.MismatchError as error:
    print("rank 1: close" in str(error), "ranks 0, 2: all_reduce" in str(error), flush=True)
comm.close()
"""
    ended, _ = run_program(flavour, tmp_path, body)
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
    ended, seconds = run_program(flavour, tmp_path, body)
    assert ended.returncode != 0
    assert seconds < ENDS_WITHIN_S
    assert "left its `with` block by KeyError" in ended.stderr, ended.stderr


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
    ended, seconds = run_program(flavour, tmp_path, body)
    assert ended.returncode != 0
    assert seconds < ENDS_WITHIN_S
    assert "refused rank 1" in ended.stdout
    assert "local 1): last finished all_reduce (call 0), can't go on: aborted: the disk is full" in ended.stderr


def test_a_communicator_that_all_ranks_gave_up_lets_the_job_end_well(flavour: Flavour, tmp_path: Path) -> None:
    ended, _ = run_program(flavour, tmp_path, "comm.abort(); comm.abort(); comm.close(); comm.abort(); comm.close()\n")
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
    ended, _ = run_program(flavour, tmp_path, body, n=1)
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr


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
    ended, _ = run_program(flavour, tmp_path, body, n=2, SIGNAL=str(tmp_path / "signal"))
    assert ended.returncode == 0, ended.stderr
    assert "is in barrier in another thread" in ended.stdout


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
            exits._leave(MPI, os.getppid(), lambda: os._exit(1))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
os.write(1, f"{comm.all_reduce(np.ones(1))[0]}\\n".encode())
comm.close()
"""
    ended, _ = run_program(flavour, tmp_path, body)
    assert (ended.returncode, ended.stdout) == (0, "3.0\n" * 3), ended.stderr


@pytest.mark.flavours("mpich")
def test_an_interactive_interpreter_goes_on_after_an_exception(flavour: Flavour, tmp_path: Path) -> None:
    body = """
sys.stderr = open(os.devnull, "w")
if comm.rank == 1:
    sys.ps1 = ">>> "
    try:
        1 / 0
    except ZeroDivisionError:
        sys.excepthook(*sys.exc_info())
    failing = threading.Thread(target=lambda: 1 / 0)
    failing.start(); failing.join()
os.write(1, f"{comm.all_reduce(np.ones(1))[0]}\\n".encode())
comm.close()
"""
    ended, _ = run_program(flavour, tmp_path, body)
    assert (ended.returncode, ended.stdout) == (0, "3.0\n" * 3), ended.stderr


@pytest.mark.flavours("mpich")
def test_alone_exceptions_are_pythons_own_affair(flavour: Flavour, tmp_path: Path) -> None:
    body = """
import atexit
atexit.register(print, "at exit", flush=True)
failing = threading.Thread(target=lambda: 1 / 0)
failing.start(); failing.join()
print("goes on", flush=True)
raise LookupError("lost")
"""
    ended, _ = run_program(flavour, tmp_path, body, n=1)
    assert ended.returncode != 0
    assert ended.stdout == "goes on\nat exit\n", ended.stdout + ended.stderr
    assert ended.stderr.count("LookupError: lost") == 1, ended.stderr


@pytest.mark.flavours("mpich")  # it compares the lengths
@pytest.mark.parametrize("timeout_s", [None, 30], ids=["short way", "long way"])
def test_an_error_of_mpi_names_its_rank_and_a_way_on(flavour: Flavour, tmp_path: Path, timeout_s: float | None) -> None:
    body = f"comm.broadcast(out=np.zeros(6 if comm.rank == 0 else 3), timeout_s={timeout_s})"
    ended, _ = run_program(flavour, tmp_path, body, init="check=False", n=2)
    assert ended.returncode != 0
    assert "MpiError: rank 1 (node 0, local 1): MPI broadcast failed: " in ended.stderr
    assert "NCCLCOMM_CHECK=true finds out" in ended.stderr
