"""Exceptions that come from outside, such as a signal handler's, at every line of a call.

The call is then complete, or had not begun, or the communicator is given up: it is never out of step with other ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import ncclcomm
from faults.rank_programs import run_program
from flavours import Flavour
from ncclcomm.communicator.board import BOARD

PACKAGE = str(Path(ncclcomm.__file__).parent)


class Stop(Exception):
    """What a program's own signal handler raises."""


@contextmanager
def stop_at(number: int) -> Iterator[list[str]]:
    """Raise Stop as the package comes to a line, counted from 1, or enters a function; where that was."""
    count = 0
    where: list[str] = []

    def trace(frame: FrameType, event: str, value: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event in ("call", "line"):
            count += 1
            if count == number:
                where.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
                raise Stop
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield where
    finally:
        sys.settrace(before)


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "all_reduce": lambda comm, array: comm.all_reduce(array),
    "average": lambda comm, array: comm.all_reduce(array, op="avg"),
    "reduce": lambda comm, array: comm.reduce(array),
    "broadcast": lambda comm, array: comm.broadcast(array),
    "broadcast out": lambda comm, array: comm.broadcast(out=array),
    "scatter": lambda comm, array: comm.scatter(array),
    "gather": lambda comm, array: comm.gather(array),
    "barrier": lambda comm, array: comm.barrier() or array,
}


@pytest.mark.parametrize("kind", ["plain", "device", "strided", "checked", "limited"])
@pytest.mark.parametrize("name", list(CALLS))
def test_a_world_of_one_stays_usable(name: str, kind: str) -> None:
    limit_s = 60 if kind == "limited" else None
    with ncclcomm.Communicator(check=kind == "checked", timeout_s=limit_s) as comm:
        call = CALLS[name]
        array: Any = np.arange(8.0)
        if kind == "device":
            array = ncclcomm.asarray(array, device=comm.device)
        if kind == "strided":
            array = array[::2]
        for _ in range(3):
            call(comm, array)
        stops = 0
        for number in range(1, 1000):
            try:
                with stop_at(number) as where:
                    call(comm, array)
            except Stop:
                stops += 1
                assert comm._entry is None, f"the call goes on after an exception at {where}"
                assert not BOARD.running, f"an exception at {where} left {BOARD.running} on the board"
                np.testing.assert_array_equal(ncclcomm.to_numpy(call(comm, array)), ncclcomm.to_numpy(array))
            else:
                break
        assert not where, f"the call swallowed an exception at {where}"
        assert stops >= 15, f"a call of {stops} lines"


IN_STEP = """
sys.path.insert(0, {tests!r})
from faults.test_interrupts import Stop, stop_at
from ncclcomm.communicator.board import BOARD
from mpi4py import MPI

op, kind = {op!r}, {kind!r}
side = MPI.COMM_WORLD.Dup()
me, ends = comm.rank, dict(broken=0, untouched=0, complete=0)
hit = 0 if op == "gather" else 1  # the other rank's messages are small, and need nobody who waits for them
kept = []  # to free a communicator with messages in it could give them to the next one

def fresh():
    made = ncclcomm.Communicator(MPI.COMM_WORLD, check=False)
    kept.append(made)
    for value in range(3):
        made.barrier()
        call(made, value, 0)
    return made

def strided(array):
    wide = np.zeros((len(array), 2))
    wide[:, 0] = array
    return wide[:, 0]

def call(comm, value, number):
    length = 40 + 2 * (number % 200) * (kind == "new")  # up to 4 KiB, which MPI takes before they are asked for
    plain = kind != "strided" or me != hit
    if op == "broadcast":
        if me == 0:
            return comm.broadcast(np.full(length, float(value)))
        return comm.broadcast(None if plain else strided(np.zeros(length)))
    if op == "scatter":
        if me == 0:
            return comm.scatter(np.full(length, float(value)))
        return comm.scatter(None, out=None if plain else strided(np.zeros(length // 2)))
    return comm.gather(np.full(length, float(value)) if plain else strided(np.full(length, float(value))))

now = fresh()
number = 0
going = True
while going:
    number += {step}
    before, stopped, where = now._calls, False, []
    if me == hit:
        try:
            with stop_at(number) as where:
                got = call(now, number, 2 * number)
        except Stop:
            stopped = True
    else:
        call(now, number, 2 * number)
    if me == hit:
        assert now._entry is None and not BOARD.running, where
    stopped, broken, calls = side.bcast((stopped, bool(now._broken), now._calls), hit)
    assert stopped or not broken
    going = stopped
    if broken:
        ends["broken"] += 1
        now.abort()
        now = fresh()
        continue
    if stopped:
        ends["untouched" if calls == before else "complete"] += 1
    if me == hit and calls == before:
        got = call(now, number, 2 * number)
        assert np.all(got == number), (where, got)
    got = call(now, -number, 2 * number + 1)
    if me == hit:
        assert np.all(got == -number), (where, got)
    assert np.all(now.all_reduce(np.full(3, 1.0 + me)) == 3), where
assert ends["broken"] > 3 and ends["untouched"] > 3, ends
print("in step", me, flush=True)
for one in kept:
    one.abort()
    one.close()
comm.close()
"""


@pytest.mark.parametrize("kind", ["known", "new", "strided"])
@pytest.mark.parametrize("op", ["broadcast", "scatter", "gather"])
def test_two_ranks_are_never_out_of_step(flavour: Flavour, tmp_path: Path, op: str, kind: str) -> None:
    tests = str(Path(__file__).parents[1])
    body = IN_STEP.format(tests=tests, op=op, kind=kind, step=1 if kind == "known" else 3)
    ended, _ = run_program(flavour, tmp_path, body, n=2)
    assert (ended.returncode, ended.stdout.count("in step")) == (0, 2), ended.stdout + ended.stderr


AFTER_THE_EXCHANGE = """
op, check, hit = {op!r}, {check}, 0 if {op!r} == "gather" else 1

class Stop(Exception):
    pass

def call():
    return comm.barrier() if op == "barrier" else getattr(comm, op)(np.ones(4))

def stop_after(func):
    def stopped(*args, **kwargs):
        func(*args, **kwargs)
        raise Stop
    return stopped

for _ in range(3):
    call()
if comm.rank != hit:
    call()  # checked, it goes on to move data, which the other rank never does: the watchdog ends the job
    sys.exit(0)
for name in ("all_gather_bytes", "broadcast_bytes", "gather_bytes"):
    setattr(comm._control, name, stop_after(getattr(comm._control, name)))
if not check:
    quick = comm._quick
    quick.barrier, quick.reduce = stop_after(quick.barrier), stop_after(quick.reduce)
    for dtype, (mpi_op, kind, to_all, is_average) in quick._plans["sum"].items():
        quick._plans["sum"][dtype] = (mpi_op, kind, stop_after(to_all), is_average)
try:
    call()
except Stop:
    print("stopped", flush=True)
try:
    call()
except ncclcomm.AbortedError:
    print("refused", flush=True)
comm.close()
"""


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("op", ["broadcast", "scatter", "gather", "reduce", "all_reduce", "barrier"])
def test_an_exception_after_the_exchange_ends_the_use_of_the_communicator(
    flavour: Flavour, tmp_path: Path, op: str, check: bool
) -> None:
    """The other rank has what it needs, and its call is complete: this rank's next call is not the other's."""
    ended, _ = run_program(flavour, tmp_path, AFTER_THE_EXCHANGE.format(op=op, check=check), init=f"check={check}", n=2)
    assert "stopped" in ended.stdout, ended.stdout + ended.stderr
    assert "refused" in ended.stdout, ended.stdout + ended.stderr


POSTED = """
from mpi4py import MPI
from ncclcomm.transport import mpi_messages
side = MPI.COMM_WORLD.Dup()
LENGTH = 1_000_000
me, op, short = comm.rank, {op!r}, {short}


class Stop(Exception):
    pass

def call(value, out=None):
    if op == "scatter":
        return comm.scatter(value if me == 0 else None)
    return comm.gather(value, out=out)

def turn(value):
    return np.full(2 * LENGTH if op == "scatter" else LENGTH, value)

for _ in range(3):
    call(turn(1.0))
if not short:
    comm._find_short_way = lambda: None
    comm._quick = None
comm.barrier()
if me == 0:
    wait = mpi_messages._wait
    def stop(requests):
        mpi_messages._wait = wait
        raise {error}
    mpi_messages._wait = stop
    mine, out = turn(7.0), np.zeros(2 * LENGTH) if op == "gather" else None
    try:
        call(mine, out)
    except (Stop, ncclcomm.MpiError) as found:
        print("raised", type(found).__name__, flush=True)
    kept = list(mpi_messages._unfinished.values())
    print("kept", len(kept), flush=True)
    if kept:
        mpi_messages._wait(kept[0][0])
    elif op == "gather":
        assert np.all(out[LENGTH:] == 8), out
    mine[:] = -1
    side.send(None, 1)
else:
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline and not side.Iprobe():
        pass  # where the root doesn't wait for this rank it has changed its array now
    got = call(turn(8.0))
    assert got is None or np.all(got == 7), got
    side.recv()
print("right", flush=True)
side.Barrier()
comm.abort()
comm.close()
"""


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("op", ["scatter", "gather"])
@pytest.mark.parametrize(("error", "raised", "kept"), [("Stop", "Stop", 0), ("MPI.Exception(15)", "MpiError", 1)])
def test_what_is_posted_is_waited_for_or_kept(
    flavour: Flavour, tmp_path: Path, op: str, short: bool, error: str, raised: str, kept: int
) -> None:
    body = POSTED.format(op=op, short=short, error=error)
    ended, _ = run_program(flavour, tmp_path, body, init="check=False", n=2)
    assert (ended.returncode, ended.stdout.count("right")) == (0, 2), ended.stdout + ended.stderr
    assert f"raised {raised}" in ended.stdout, ended.stdout
    assert f"kept {kept}" in ended.stdout, ended.stdout
