"""The harness of the tests itself: what is run again, and what a program that does not end leaves to read."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from flavours import FAULTS_OF_OPENMPI, run_tree

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("message", "runs", "status"),
    [(FAULTS_OF_OPENMPI[0], 2, 0), (FAULTS_OF_OPENMPI[1], 2, 0), ("a fault of ours", 1, 1)],
)
def test_only_what_open_mpi_spoiled_is_run_again(tmp_path: Path, message: str, runs: int, status: int) -> None:
    body = f"""
        import pytest
        from pathlib import Path

        def test_once():
            with Path({str(tmp_path / "runs")!r}).open("a") as file:
                file.write("x")
            if Path(file.name).read_text() == "x":
                pytest.fail({message!r})
    """
    (tmp_path / "test_generated.py").write_text(textwrap.dedent(body))
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = " + str(TESTS))
    args = ["-p", "conftest", "--rootdir", tmp_path, "-c", tmp_path / "pytest.ini", tmp_path / "test_generated.py"]
    done = run_tree([sys.executable, "-m", "pytest", *args], cwd=tmp_path)
    assert done.returncode == status, done.stdout + done.stderr
    assert (tmp_path / "runs").read_text() == "x" * runs


@pytest.mark.parametrize(("name", "told"), [("sleep", "left: sleep"), ("prterun", FAULTS_OF_OPENMPI[1])])
def test_what_does_not_end_is_named(tmp_path: Path, name: str, told: str) -> None:
    program = tmp_path / name
    program.symlink_to("/bin/sleep")
    with pytest.raises(pytest.fail.Exception, match=told):
        run_tree([program, "100"], timeout_s=0.5)
