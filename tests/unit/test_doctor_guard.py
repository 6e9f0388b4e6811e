"""The process beside a rank: what it says and does when the rank is late, dies, or is well."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

HEAD = """
import os, signal, sys
sys.path.insert(0, {root!r})
from ncclcomm.doctor.guard import Guard
with Guard("rank 3 on n1") as guard:
"""


def rank(body: str) -> subprocess.CompletedProcess[str]:
    """Run the body of a `with Guard` block in a process of its own, with all that it starts under a deadline."""
    program = HEAD.format(root=str(ROOT)) + textwrap.indent(textwrap.dedent(body), "    ")
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)


def test_a_rank_that_is_well_hears_nothing() -> None:
    ended = rank("guard.stage('MPI_Init', 30, 'mend')\nguard.stage('the trials', 30, 'mend', last_words='report')")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_a_late_rank_is_ended_even_where_it_holds_the_interpreter() -> None:
    ended = rank(
        "import ctypes\nguard.stage('MPI_Init', 0.3, 'try this', last_words='the report')\nctypes.PyDLL(None).sleep(25)"
    )
    assert ended.returncode == -signal.SIGKILL
    assert ended.stdout == "the report\n"
    assert "fail  ncclcomm doctor: rank 3 on n1 has been in MPI_Init for 0.3 s, and was ended" in ended.stderr
    assert "      -> try this" in ended.stderr


@pytest.mark.parametrize("may_end", [False, True])
def test_a_rank_that_dies(may_end: bool) -> None:
    ended = rank(f"guard.stage('MPI_Init', 30, 'try this', may_end={may_end})\nos.kill(os.getpid(), signal.SIGSEGV)")
    assert ended.returncode == -signal.SIGSEGV
    assert ("rank 3 on n1 ended in MPI_Init" in ended.stderr) != may_end


def test_an_exception_lets_the_guard_go() -> None:
    ended = rank("guard.stage('MPI_Init', 30, 'try this')\nraise ValueError('own trouble')")
    assert ended.returncode == 1
    assert "own trouble" in ended.stderr
    assert "ncclcomm doctor" not in ended.stderr
