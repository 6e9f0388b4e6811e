"""Ranks that never come, and work that never ends: a time limit tells every rank that waits where the others are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from faults.rank_programs import ENDS_WITHIN_S, run_program
from flavours import FLAVOURS, Flavour


@pytest.mark.flavours(*FLAVOURS)
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
    ended, seconds = run_program(flavour, tmp_path, body, init="timeout_s=2")
    assert ended.returncode != 0, "a job whose ranks gave up on each other must not end well"
    assert seconds < ENDS_WITHIN_S
    assert ended.stdout.count("told 0 2.0 True") == 1, ended.stdout
    assert ended.stdout.count("told 2 2.0 True") == 1, ended.stdout
    assert ended.stdout.count("closed to calls") == 2
    assert "rank 1 (node 0, local 1): last finished all_reduce (call 0), at program.py" in ended.stdout
    assert "in elsewhere" in ended.stdout


def test_a_call_within_its_limit_is_a_call_as_others(flavour: Flavour, tmp_path: Path) -> None:
    body = "print(comm.all_reduce(np.ones(2), timeout_s=30)[0]); comm.barrier(timeout_s=30); comm.close()\n"
    ended, _ = run_program(flavour, tmp_path, body)
    assert (ended.returncode, ended.stdout.count("3.0")) == (0, 3), ended.stderr


def test_a_stall_is_told_once_and_the_job_goes_on(flavour: Flavour, tmp_path: Path) -> None:
    body = """
if comm.rank == 2:
    time.sleep(7)
print(comm.all_reduce(np.ones(2))[0])
comm.close()
"""
    ended, _ = run_program(flavour, tmp_path, body, NCCLCOMM_STALL_S="2")
    assert (ended.returncode, ended.stdout.count("3.0")) == (0, 3), ended.stderr
    assert ended.stderr.count("still waiting") == 1, ended.stderr
    assert "in this call: ranks 0-1" in ended.stderr
    stalled = r"rank 2 \(node 0, local 2\): last finished all_reduce \(call 0\), at program.py:\d+ in <module>"
    assert re.search(stalled, ended.stderr), ended.stderr


@pytest.mark.parametrize("limit", ["-1", "0", "'2'", "True", "float('nan')"])
def test_a_time_limit_that_is_none(flavour: Flavour, tmp_path: Path, limit: str) -> None:
    body = f"""
try:
    comm.barrier(timeout_s={limit})
except ncclcomm.ArgumentError as error:
    os.write(1, f"told {{'timeout_s is' in str(error)}}\\n".encode())
comm.close()
"""
    ended, _ = run_program(flavour, tmp_path, body, n=2)
    assert (ended.returncode, ended.stdout) == (0, "told True\n" * 2), ended.stderr


def test_a_time_limit_that_is_none_is_told_unchecked_too(flavour: Flavour, tmp_path: Path) -> None:
    body = """
try:
    comm.barrier(timeout_s="2")
except ncclcomm.ArgumentError as error:
    os.write(1, f"told {'timeout_s is' in str(error)}\\n".encode())
"""
    ended, _ = run_program(flavour, tmp_path, body, init="check=False", n=2)
    assert (ended.returncode, ended.stdout) == (0, "told True\n" * 2), ended.stderr


@pytest.mark.flavours("mpich")
@pytest.mark.parametrize("init", ["", "timeout_s=30"])
def test_a_time_limit_that_is_none_on_one_rank_alone(flavour: Flavour, tmp_path: Path, init: str) -> None:
    body = """
try:
    comm.barrier(timeout_s=-1 if comm.rank == 1 else None)
except ncclcomm.ArgumentError as error:
    os.write(1, f"told {'timeout_s is -1' in str(error)} {'rank 1' in str(error)}\\n".encode())
comm.close()
"""
    ended, seconds = run_program(flavour, tmp_path, body, init=init)
    assert (ended.returncode, ended.stdout) == (0, "told True True\n" * 3), ended.stderr
    assert seconds < ENDS_WITHIN_S


@pytest.mark.flavours("mpich")
def test_a_limit_counts_from_the_start_of_the_call(flavour: Flavour, tmp_path: Path) -> None:
    body = """
if comm.rank == 1:
    while not os.path.exists(os.environ["SIGNAL"]):
        time.sleep(0.01)
    sys.exit(0)
from ncclcomm.communicator import reduce
prepare = reduce.target_for
def prepare_slowly(*args):
    time.sleep(1.5)
    return prepare(*args)
reduce.target_for = prepare_slowly
start = time.monotonic()
try:
    comm.all_reduce(np.ones(7))
except ncclcomm.CommTimeoutError as error:
    os.write(1, f"told {comm.rank} {time.monotonic() - start < 3.4}\\n".encode())
open(os.environ["SIGNAL"], "w").close()
"""
    signal = str(tmp_path / "signal")
    ended, _ = run_program(flavour, tmp_path, body, init="timeout_s=2", SIGNAL=signal)
    assert sorted(ended.stdout.splitlines()) == ["told 0 True", "told 2 True"], ended.stdout + ended.stderr


def test_work_of_a_device_that_does_not_end(flavour: Flavour, tmp_path: Path) -> None:
    body = """
array = ncclcomm.asarray(np.ones(4))
comm.all_reduce(array)
if comm.rank == 1:
    ncclcomm.current_stream().launch(threading.Event().wait)
try:
    comm.all_reduce(array)
except ncclcomm.CommTimeoutError as error:
    os.write(1, f"told {comm.rank}: {error}\\n".encode())
"""
    ended, seconds = run_program(flavour, tmp_path, body, init="timeout_s=2", NCCLCOMM_HOST_STREAMS="async")
    assert ended.returncode != 0
    assert seconds < ENDS_WITHIN_S
    stuck = "rank 1 (node 0, local 1): in this call, waiting for work queued on its device"
    told = re.findall(r"told ([02]): ncclcomm: rank \1 ", ended.stdout)
    assert sorted(told) == ["0", "2"], ended.stdout + ended.stderr
    assert stuck in ended.stdout, ended.stdout
    # The thread of rank 1 is out of reach of an exception.
    assert ended.stderr.count("ncclcomm: rank 1 (node 0, local 1): waited") == 1, ended.stderr
    assert stuck in ended.stderr, ended.stderr


def test_work_of_a_device_that_does_not_end_in_a_world_of_one(flavour: Flavour, tmp_path: Path) -> None:
    body = """
ncclcomm.current_stream().launch(threading.Event().wait)
comm.all_reduce(ncclcomm.asarray(np.ones(4)))
"""
    ended, seconds = run_program(flavour, tmp_path, body, init="timeout_s=1", n=1, NCCLCOMM_HOST_STREAMS="async")
    assert ended.returncode != 0
    assert seconds < ENDS_WITHIN_S
    assert "in this call, waiting for work queued on its device" in ended.stderr, ended.stderr


_QUEUES = """
array = ncclcomm.asarray(np.ones((2, 2))).T  # a contiguous one may go past the engine
engine, gate = comm._engine(0), threading.Event()
move = engine.all_reduce
def queue(*args):
    # As a GPU's calls do, which return with their work queued; here on the ranks that are told to.
    move(*args)
    if comm.rank in queues_on:
        ncclcomm.current_stream().launch(gate.wait)
engine.all_reduce = queue
def elsewhere(signal):
    while not os.path.exists(signal):
        time.sleep(0.01)
"""
"""Work that a call leaves behind on its stream, and that ends when the gate opens."""


@pytest.mark.parametrize("limit", ["comm", "call"])
def test_queued_work_that_does_not_end(flavour: Flavour, tmp_path: Path, limit: str) -> None:
    body = f"""
queues_on = (0, 2)
{_QUEUES}
comm.all_reduce(array{", timeout_s=2" if limit == "call" else ""})
os.write(1, b"returned\\n")
elsewhere("never")
"""
    init = "timeout_s=2" if limit == "comm" else ""
    ended, seconds = run_program(flavour, tmp_path, body, init=init, NCCLCOMM_HOST_STREAMS="async")
    assert ended.returncode != 0
    assert seconds < ENDS_WITHIN_S
    assert ended.stdout.count("returned") == 3, ended.stdout
    head = r"ncclcomm: rank 0 \(node 0, local 0\): all_reduce \(call 1, shape \(2, 2\), float64\) was queued \d+ s ago"
    assert len(re.findall(f"{head}, its device work has not ended: the time limit of 2 s is over", ended.stderr)) == 1
    assert ended.stderr.count("has not ended") == 1, ended.stderr
    assert "queued, and not ended, on the device of: ranks 0, 2\n" in ended.stderr
    missing = r"rank 1 \(node 0, local 1\): last finished all_reduce \(call 1\), at program.py:\d+ in elsewhere"
    assert re.search(missing, ended.stderr), ended.stderr


def test_queued_work_that_takes_long_is_told_once_and_the_job_goes_on(flavour: Flavour, tmp_path: Path) -> None:
    body = f"""
queues_on = (1,)
{_QUEUES}
comm.all_reduce(array)
if comm.rank == 1:
    from ncclcomm.communicator.board import BOARD
    work = BOARD.queued[comm._member.name]
    while not (call := work.oldest()).is_told:
        time.sleep(0.01)
    gate.set()
    ncclcomm.synchronize()
print(comm.all_reduce(np.ones(2))[0])
comm.close()
os.write(1, f"forgotten {{not BOARD.queued}}\\n".encode() if comm.rank == 1 else b"")
"""
    ended, _ = run_program(flavour, tmp_path, body, NCCLCOMM_HOST_STREAMS="async", NCCLCOMM_STALL_S="2")
    assert (ended.returncode, ended.stdout.count("3.0")) == (0, 3), ended.stderr
    assert "forgotten True" in ended.stdout
    told = ended.stderr.count("its device work has not ended: still waiting")
    assert told == 1, ended.stderr


@pytest.mark.parametrize("leave", ["sys.exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"], ids=["exit 0", "SIGKILL"])
def test_queued_work_that_waits_for_a_rank_that_left(flavour: Flavour, tmp_path: Path, leave: str) -> None:
    # What NCCL does where a rank doesn't come: the call returns, its work waits. No limit is needed to find out.
    body = f"""
queues_on = (0, 2)
{_QUEUES}
if comm.rank == 1:
    {leave}
engine.all_reduce = lambda flat, out, op: ncclcomm.current_stream().launch(gate.wait)
comm.all_reduce(array)
ncclcomm.synchronize()
"""
    ended, seconds = run_program(flavour, tmp_path, body, init="check=False", NCCLCOMM_HOST_STREAMS="async")
    assert ended.returncode != 0
    assert seconds < ENDS_WITHIN_S
    if "exit" in leave:
        assert ended.stderr.count("its device work has not ended: rank 1 will not come") == 1, ended.stderr
        assert "queued, and not ended, on the device of: ranks 0, 2\n" in ended.stderr


_CLOSES = """
close = engine.close
def wait_and_close():
    ncclcomm.synchronize()  # as NCCL's transport does
    close()
engine.close = wait_and_close
"""


def test_a_close_that_waits_for_queued_work_is_watched(flavour: Flavour, tmp_path: Path) -> None:
    body = f"queues_on = (1,)\n{_QUEUES}{_CLOSES}comm.all_reduce(array)\ncomm.close()\n"
    ended, seconds = run_program(flavour, tmp_path, body, init="timeout_s=2", NCCLCOMM_HOST_STREAMS="async")
    assert ended.returncode != 0
    assert seconds < ENDS_WITHIN_S
    # The limit is that of both calls, which begin together.
    head = r"rank 1 \(node 0, local 1\): (waited \d s in close|all_reduce .* its device work has not ended).*: the time"
    assert re.search(head, ended.stderr), ended.stderr


def test_a_close_may_wait_for_work_after_the_others_have_left(flavour: Flavour, tmp_path: Path) -> None:
    # MPI may let the other ranks' processes end meanwhile, of which this rank's watchdog then hears nothing.
    body = f"""
queues_on = (1,)
{_QUEUES}{_CLOSES}
comm.all_reduce(array)
if comm.rank == 1:
    threading.Timer(5, gate.set).start()
comm.close()
os.write(1, b"closed\\n")
"""
    ended, _ = run_program(flavour, tmp_path, body, NCCLCOMM_HOST_STREAMS="async")
    assert (ended.returncode, ended.stdout) == (0, "closed\n" * 3), ended.stderr


def test_without_the_watchdog_nothing_watches(flavour: Flavour, tmp_path: Path) -> None:
    body = """
import glob
names = {thread.name for thread in threading.enumerate()}
sockets = sum(os.readlink(name).startswith("socket:") for name in glob.glob("/proc/self/fd/*") if os.path.islink(name))
os.write(1, f"{names} {sys.excepthook is sys.__excepthook__}\\n".encode())
if comm.rank == 1:
    open(os.environ["SIGNAL"], "w").close()
    sys.exit(0)
while not os.path.exists(os.environ["SIGNAL"]):
    time.sleep(0.01)
try:
    comm.all_reduce(np.ones(2))
except ncclcomm.CommTimeoutError as error:
    os.write(1, f"told {comm.rank}: {error}\\n".encode())
"""
    signal = str(tmp_path / "signal")
    ended, seconds = run_program(flavour, tmp_path, body, init="timeout_s=3", NCCLCOMM_WATCHDOG="false", SIGNAL=signal)
    assert ended.stdout.count("{'MainThread'} True") == 3, ended.stdout
    assert ended.returncode != 0
    assert seconds < ENDS_WITHIN_S
    assert "will not come" not in ended.stderr
    for rank in (0, 2):
        head = rf"told {rank}: ncclcomm: rank {rank} \(node 0, local {rank}\): waited 3 s in all_reduce \(call 1, shape"
        assert re.search(head, ended.stdout), ended.stdout
    assert ended.stdout.count("NCCLCOMM_WATCHDOG=false") == 2
