"""`ncclcomm bench` over ranks of each MPI: its files, its one line about bad input, its answer to a wrong result."""

from __future__ import annotations

import json
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from flavours import Flavour, find, missing

QUICK = ["-b", "8", "-e", "64K", "-f", "128", "--iters", "2", "--rounds", "3", "--warmup", "1"]
OPS = ["broadcast", "scatter", "gather", "reduce", "reduce_add", "all_reduce", "barrier"]


@cache
def has_packages(python: str) -> bool:
    """True if the packages of the bench extra are there."""
    asked = subprocess.run(
        [python, "-c", "import rich, tqdm, matplotlib"], capture_output=True, check=False, timeout=60
    )
    return asked.returncode == 0


@pytest.fixture
def bench(flavour: Flavour) -> Flavour:
    """A flavour whose Python has the packages of the bench extra."""
    if not has_packages(flavour.python):
        missing(f"bench packages of {flavour.name}", f"{flavour.python}: pip install 'ncclcomm[bench]'")
    return flavour


def error_lines(ended: subprocess.CompletedProcess[str]) -> list[str]:
    """What ncclcomm says on stderr, without what the launcher adds."""
    return [line for line in ended.stderr.splitlines() if line.startswith("ncclcomm")]


def test_all_collectives_beside_their_peers(bench: Flavour, tmp_path: Path) -> None:
    files = tmp_path / "result.json", tmp_path / "picture.png"
    ended = bench.run(
        2, ["-m", "ncclcomm", "bench", *QUICK, "--against", "mpi4py,raw,gloo", "--json", files[0], "--plot", files[1]]
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told: dict[str, Any] = json.loads(files[0].read_text())
    assert [row["op"] for row in told["rows"]] == [op for op in OPS for _ in range(1 if op == "barrier" else 2)]
    assert (told["where"]["ranks"], told["machine"]["hosts"], told["machine"]["ranks_per_host"]) == (2, 1, [2])
    assert {"mpi", "mpi4py"} <= set(told["versions"])
    taking_part = {"ncclcomm", "mpi4py", "raw"}
    for row in told["rows"]:
        assert taking_part <= set(row["contenders"]), row["absent"]
        for contender in row["contenders"].values():
            assert contender["wrong"] == ""
            assert all(us > 0 for us in contender["rounds"]["time_us"])
    assert ("gloo" in told["absent"]) != ("torch" in told["versions"])
    assert "JOB" not in files[0].read_text(), "what the launcher set is no setting, and may be secret"
    assert files[1].read_bytes().startswith(b"\x89PNG\r\n")
    assert ended.stdout.count("busbw GB/s") == len(OPS), "each table once, from rank 0"
    assert "\x1b" not in ended.stdout, "colours in a log"


@pytest.mark.parametrize(
    "more",
    [
        ["--fresh", "--root", "rotate", "--dtype", "int16,bfloat16", "--op", "sum,avg"],
        ["--root", "2", "--dtype", "bool,complex128", "--op", "sum,prod"],
    ],
)
def test_forms_and_dtypes_are_right(bench: Flavour, more: list[str], tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    ended = bench.run(3, ["-m", "ncclcomm", "bench", *QUICK, *more, "--against", "mpi4py,raw", "--json", path])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = json.loads(path.read_text())
    assert {row["op"] for row in told["rows"]} == set(OPS)
    for row in told["rows"]:
        assert all(not contender["wrong"] for contender in row["contenders"].values()), row


SPOILT = """
import dataclasses, sys
from ncclcomm.bench import ops
from ncclcomm.cli import main

op = ops.RANK_OPS["all_reduce"]

def ours(comm, case):
    call = op.ours(comm, case)
    def wrong():
        result = call()
        if comm.rank == 1 and result.size > 700:
            result[700] += 1
        return result
    return wrong

ops.RANK_OPS["all_reduce"] = dataclasses.replace(op, ours=ours)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("more", [[], ["--fresh"]])
def test_a_wrong_answer_on_one_rank(bench: Flavour, more: list[str], tmp_path: Path) -> None:
    script = tmp_path / "spoilt.py"
    script.write_text(SPOILT)
    argv = [script, "bench", "all_reduce", "-b", "8", "-e", "8K", "-f", "1024", "--dtype", "int64", *more]
    ended = bench.run(3, argv)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    (line,) = error_lines(ended)
    start = "ncclcomm bench: WRONG ANSWER: all_reduce sum of 8192 bytes of int64: rank 1, element 700: expected "
    assert line.startswith(start)
    numbers = line.removeprefix(start).replace(",", "").split()
    assert int(numbers[2]) == int(numbers[0]) + 1, line


SPOILT_BARRIER = """
import dataclasses, sys
from ncclcomm.bench import ops
from ncclcomm.cli import main

op = ops.RANK_OPS["barrier"]

def ours(comm, case):
    left_out = int(sys.argv[1])
    part = comm.mpi_comm.Split(int(comm.rank == left_out), 0)
    return part.Barrier

ops.RANK_OPS["barrier"] = dataclasses.replace(op, ours=ours)
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("left_out", [0, 2])
def test_a_barrier_that_does_not_wait_for_all(bench: Flavour, left_out: int, tmp_path: Path) -> None:
    script = tmp_path / "spoilt.py"
    script.write_text(SPOILT_BARRIER)
    ended = bench.run(3, [script, left_out, "bench", "barrier", "--rounds", "2"])
    assert ended.returncode == 1, ended.stdout + ended.stderr
    (line,) = error_lines(ended)
    said = re.fullmatch(r"ncclcomm bench: WRONG ANSWER: barrier: rank (\d) left before rank (\d) came, .*", line)
    assert said, line
    assert (int(said[1]) == left_out) != (int(said[2]) == left_out), line


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["-b", "0"], "-b '0' is no size"),
        (["--json", "/nonexistent/a.json"], "'/nonexistent/a.json' can't be written: No such file"),
        (["-b", "900T", "-e", "900T", "all_reduce"], "all_reduce of 900 TiB needs "),
        (["--nosuch"], "unrecognized arguments: --nosuch"),
    ],
)
def test_bad_input_is_told_once_by_rank_0(bench: Flavour, argv: list[str], said: str) -> None:
    ended = bench.run(3, ["-m", "ncclcomm", "bench", *argv])
    assert ended.returncode == 2, ended.stdout + ended.stderr
    (line,) = error_lines(ended)
    assert said in line
    assert "Traceback" not in ended.stderr


def test_under_ncclcomm_run(tmp_path: Path) -> None:
    mpich = find("mpich")
    if not has_packages(mpich.python):
        missing("bench packages of mpich", "pip install 'ncclcomm[bench]'")
    path = tmp_path / "result.json"
    program = "import sys; from ncclcomm.cli import main; sys.exit(main(sys.argv[1:]))"
    argv = ["run", "-n", "2", "-m", "ncclcomm", "bench", "barrier", "--rounds", "2", "--json", str(path)]
    ended = subprocess.run(
        [mpich.python, "-c", program, *argv], env=mpich.env(), capture_output=True, text=True, check=False, timeout=100
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = json.loads(path.read_text())
    assert told["where"]["ranks"] == 2
    assert "mpi4py" in told["versions"], "ranks go over it where no peer does"
    assert not [name for name in told["settings"]["variables"] if "JOB" in name]
