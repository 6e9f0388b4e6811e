"""The fault campaign: every collective x every rank x every fault, at 3 ranks; prints what each rank was told.

    python tests/faults/campaign.py                 the whole, under each MPI that is here
    python tests/faults/campaign.py --within 5      and every job must end so soon: for an idle machine
    python tests/faults/campaign.py --unchecked     with checks and watchdogs off: it must fail

Each cell states beforehand who raises which class, or prints what, and which rank the message names. The table says how
many cells were injected, in how many all who wait were told (or the job ended with a failure, in time), in how many by
the right message, how long the longest took, and how many left a process behind. After a SIGKILL it is MPI's launcher
that speaks, in words of its own: no message is stated.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from flavours import COMMON_FLAVOURS, FLAVOURS, Flavour, find

__all__ = ["DEADLY", "OFF", "OPS", "TOLD", "Result", "deadly_cells", "run_deadly", "run_told", "told_cells"]

RANKS = 3
OPS = ("broadcast", "scatter", "gather", "reduce", "reduce_add", "all_reduce", "barrier")
TOLD = ("wrong shape", "wrong dtype", "wrong root", "bad array", "skipped call", "extra call")
"""Faults after which every rank raises and the communicator goes on."""

DEADLY = ("raise", "exit", "SIGKILL", "SIGSTOP")
"""Faults after which the job ends."""

OFF = {"NCCLCOMM_CHECK": "false", "NCCLCOMM_WATCHDOG": "false"}
"""The settings with which the campaign must fail."""

OFF_LIMIT_S = 10.0
"""With them most jobs never end."""

ENDS_WITHIN_S = 20.0
"""How long a job may take from its start to its end, on a busy machine."""

LIMIT_S = 3
"""The time limit of a call, by which a stopped rank is found."""

OTHERS_ARE_TOLD_S = 3.0
"""What a rank whose limit is over leaves the others to come to the end of theirs."""

_CALLS = """
import json, os, signal, sys, time
import numpy as np
import ncclcomm

def call(comm, op, me, fault=None):
    shape, dtype, root = (4, 3), np.float64, 0
    if fault == "wrong shape":
        shape = (4, 5)
    if fault == "wrong dtype":
        dtype = np.float32
    if fault == "wrong root":
        root = 1
    array = [1.0] if fault == "bad array" else np.full(shape, me, dtype)
    if op == "barrier":
        return comm.barrier()
    if op == "scatter":
        out = [1.0] if fault == "bad array" else np.zeros((2 if fault == "wrong shape" else 1, 3), dtype)
        return comm.scatter(np.ones((3, 3)), root=root, out=out)
    if op in ("all_reduce",):
        return comm.all_reduce(array)
    return getattr(comm, op)(array, root=root)
"""

_TOLD_PROGRAM = (
    _CALLS
    + """
cells = json.loads(sys.argv[1])
comm = ncclcomm.init(check=os.environ.get("NCCLCOMM_CHECK") != "false")
me, answers = comm.rank, []
for op, rank, fault in cells:
    mine = rank == me
    try:
        if fault == "skipped call":
            comm.barrier() if mine else call(comm, op, me)
        elif fault == "extra call":
            call(comm, op, me) if mine else comm.barrier()
        else:
            call(comm, op, me, fault if mine else None)
        answers.append(["", ""])
    except Exception as error:
        answers.append([type(error).__name__, str(error)])
    comm.all_reduce(np.ones(1))
told = comm.mpi_comm.gather(answers)
if me == 0:
    print(json.dumps(told))
comm.close()
"""
)

_DEADLY_PROGRAM = (
    _CALLS
    + """
op, rank, fault = sys.argv[1], int(sys.argv[2]), sys.argv[3]
comm = ncclcomm.init(timeout_s=LIMIT_S)
comm.barrier()
if comm.rank == rank:
    if fault == "raise":
        raise LookupError("campaign")
    if fault == "exit":
        sys.exit(0)
    os.kill(os.getpid(), getattr(signal, fault))
try:
    call(comm, op, comm.rank)
    comm.barrier()
except ncclcomm.CommTimeoutError as error:
    os.write(1, f"TOLD {comm.rank} {str(error)!r}\\n".encode())
"""
)


@dataclass(frozen=True)
class Result:
    """What became of a cell."""

    cell: tuple[str, int, str]
    told: bool
    """Every rank that waits got an error, or the job ended with a status that is not 0, in time."""
    right: bool
    """And by the right message."""
    seconds: float
    survivors: bool
    """It did not end, or left a process behind."""
    detail: str


def told_cells() -> list[tuple[str, int, str]]:
    """The cells after which the job goes on, less those that mean nothing."""
    pointless = {("all_reduce", "wrong root"), *(("barrier", f) for f in TOLD)}
    return [(op, rank, fault) for op in OPS for rank in range(RANKS) for fault in TOLD if (op, fault) not in pointless]


def deadly_cells() -> list[tuple[str, int, str]]:
    """The cells after which the job ends."""
    return [(op, rank, fault) for op in OPS for rank in range(RANKS) for fault in DEADLY]


def _hung(cell: tuple[str, int, str], seconds: float, failure: BaseException) -> Result:
    """The result of a cell whose job left processes behind, or had to be killed."""
    return Result(cell, told=False, right=False, seconds=seconds, survivors=True, detail=str(failure)[:200])


def _wrong_message(cell: tuple[str, int, str], answers: list[tuple[str, str]]) -> str:
    """What is wrong with what the ranks were told; '' if nothing is."""
    op, rank, fault = cell
    wanted = "UnsupportedError" if fault == "bad array" else "MismatchError"
    for other, (name, message) in enumerate(answers):
        if name != wanted:
            return f"rank {other} got {name or 'no error'} ({message[:80]}), expected {wanted}"
        if not re.search(_passed(op, rank, fault), message):
            return f"rank {other}'s message doesn't say what rank {rank} passed: {message[:250]}"
    return ""


def _passed(op: str, rank: int, fault: str) -> str:
    """A pattern of how messages say what a rank passed."""
    if fault == "bad array":
        return rf"rank {rank} \(node 0, local {rank}\)[^;]*{op}: (array|out): list is not a supported array"
    passed = {
        "wrong shape": {"scatter": "(2, 3)", "gather": "('*', 5)"}.get(op, "(4, 5)"),
        "wrong dtype": "float32",
        "wrong root": "1",
        "skipped call": "barrier (call ",
        "extra call": f"{op} (call ",
    }
    return rf"rank {rank}: [^;]*{re.escape(passed[fault])}"


def run_told(flavour: Flavour, cells: list[tuple[str, int, str]], timeout_s: float = 120, **env: str) -> list[Result]:
    """Run cells of faults that are told, in one job."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "told.py"
        program.write_text(_TOLD_PROGRAM)
        try:
            ended = flavour.run(RANKS, [program, json.dumps(cells)], env=env, timeout_s=timeout_s)
        except pytest.fail.Exception as failure:
            return [_hung(cell, timeout_s, failure) for cell in cells]
    seconds = (time.monotonic() - start) / len(cells)
    if ended.returncode:
        return [Result(cell, False, False, seconds, False, ended.stderr[-300:]) for cell in cells]
    by_rank = json.loads(ended.stdout)
    results = []
    for index, cell in enumerate(cells):
        answers = [tuple(answers[index]) for answers in by_rank]
        problem = _wrong_message(cell, answers)
        results.append(Result(cell, all(name for name, _ in answers), not problem, seconds, False, problem))
    return results


def run_deadly(
    flavour: Flavour, cell: tuple[str, int, str], timeout_s: float = 40, within_s: float = ENDS_WITHIN_S, **env: str
) -> Result:
    """Run one cell after which the job ends; leftovers fail it, and an end later than within_s after its start.

    A stopped rank may take the time limit, and the time in which the others are told, besides.
    """
    op, rank, fault = cell
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "deadly.py"
        program.write_text(f"LIMIT_S = {LIMIT_S}\n{_DEADLY_PROGRAM}")
        try:
            ended = flavour.run(RANKS, [program, op, str(rank), fault], env=env, timeout_s=timeout_s)
        except pytest.fail.Exception as failure:
            return _hung(cell, time.monotonic() - start, failure)
    seconds = time.monotonic() - start
    told = ended.returncode != 0 and seconds <= within_s + (LIMIT_S + OTHERS_ARE_TOLD_S) * (fault == "SIGSTOP")
    problems = [] if told else [f"status {ended.returncode} after {seconds:.0f} s"]
    problems += _wrong_words(rank, fault, ended.stdout, ended.stderr)
    return Result(cell, told, not problems, seconds, False, "; ".join(problems))


def _wrong_words(rank: int, fault: str, stdout: str, stderr: str) -> list[str]:
    """What is wrong with what a job printed that a fault of that rank ended."""
    problems = []
    if fault == "raise":
        if stderr.count("LookupError: campaign") != 1:
            problems.append(f"the traceback is shown {stderr.count('LookupError: campaign')} times")
        if f"in rank {rank} of {RANKS}, on " not in stderr:
            problems.append(f"no word of which rank raised: {stderr[-200:]}")
    # A busy machine may come to the time limit first.
    named = f"rank {rank} (node 0, local {rank}): "
    if fault == "exit" and f"rank {rank} will not come" not in stderr and f"{named}last finished" not in stdout:
        problems.append(f"no word of who left: {stdout[-200:]}{stderr[-200:]}")
    if fault == "SIGSTOP":
        for other in set(range(RANKS)) - {rank}:
            if f"TOLD {other}" not in stdout:
                problems.append(f"rank {other} was not told: {stdout[-200:]}{stderr[-200:]}")
        if f"{named}does not answer" not in stdout:
            problems.append(f"no word of who is silent: {stdout[-200:]}")
    return problems


def _run_flavour(flavour: Flavour, unchecked: bool, within_s: float) -> list[Result]:
    """Run every cell under one MPI."""
    if not unchecked:
        deadly = [run_deadly(flavour, cell, within_s=within_s) for cell in deadly_cells()]
        return run_told(flavour, told_cells()) + deadly
    results = []
    for op, fault in dict.fromkeys((op, fault) for op, _, fault in told_cells()):
        # A job for few cells: one that hangs takes the others of its job with it.
        cells = [cell for cell in told_cells() if (cell[0], cell[2]) == (op, fault)]
        results += run_told(flavour, cells, OFF_LIMIT_S, **OFF)
    return results + [run_deadly(flavour, cell, OFF_LIMIT_S, **OFF) for cell in deadly_cells()]


def main() -> int:
    """Run the whole and print a table; the status says whether every cell is right."""
    parser = argparse.ArgumentParser(description="The fault campaign.")
    parser.add_argument("--unchecked", action="store_true", help="with checks and watchdogs off, so that it must fail")
    parser.add_argument("--within", type=float, default=ENDS_WITHIN_S, help="seconds a job may take to end")
    parser.add_argument("--flavour", choices=FLAVOURS, help="one MPI alone")
    args = parser.parse_args()
    wrong = 0
    print("| MPI | fault | injected | told | right message | longest, s | survivors |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for name in COMMON_FLAVOURS if args.flavour is None else [args.flavour]:
        results = _run_flavour(find(name), args.unchecked, args.within)
        for fault in (*TOLD, *DEADLY):
            found = [result for result in results if result.cell[2] == fault]
            told, right = sum(result.told for result in found), str(sum(result.right for result in found))
            right = "-" if fault == "SIGKILL" else right
            longest_s, left = max(result.seconds for result in found), sum(result.survivors for result in found)
            print(f"| {name} | {fault} | {len(found)} | {told} | {right} | {longest_s:.1f} | {left} |", flush=True)
        for result in results:
            if not result.right:
                wrong += 1
                print(f"WRONG {name} {result.cell}: {result.detail}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
