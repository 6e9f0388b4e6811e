"""The packages of the cuda12 or cuda13 extra without a GPU: imports, the host backend, and clear reports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flavours import missing

VARIABLE = "NCCLCOMM_TEST_PYTHON_CUDA"
PROJECT = Path(__file__).parents[2]


@pytest.fixture
def python() -> str:
    """A Python with CuPy, on a machine where CuPy sees no GPU."""
    found = os.environ.get(VARIABLE) or sys.executable
    asked = subprocess.run([found, "-c", "import cupy"], capture_output=True, text=True, check=False)
    if asked.returncode:
        reason = f"{found} has no CuPy; `make test-cuda` makes an environment that has"
        missing("CuPy without a GPU", reason, ci_has_it=VARIABLE in os.environ)
    return found


def _run(python: str, program: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a program with no GPU visible."""
    return subprocess.run(
        [python, "-c", program],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(PROJECT), **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_auto_runs_on_the_host_and_import_starts_no_cuda(python: str) -> None:
    ended = _run(
        python,
        "import sys, ncclcomm; assert 'cupy' not in sys.modules\n"
        "print(ncclcomm.is_available(), ncclcomm.device_count(), float(ncclcomm.xp.ones(3).sum()))",
        NCCLCOMM_DEVICES="auto",
    )
    assert (ended.returncode, ended.stdout.split(), ended.stderr) == (0, ["False", "4", "3.0"], "")


def test_demanded_gpus_are_an_error_that_says_why(python: str) -> None:
    ended = _run(python, "import ncclcomm; ncclcomm.device_count()", NCCLCOMM_DEVICES="cuda")
    last = ended.stderr.strip().splitlines()[-1]
    assert ended.returncode == 1
    assert last.startswith("ncclcomm.errors.BackendUnavailableError: NCCLCOMM_DEVICES=cuda demands GPUs"), ended.stderr
    assert "driver" in last or "no GPU" in last


def test_allotted_gpus_that_cannot_be_used_are_an_error(python: str) -> None:
    ended = _run(python, "import ncclcomm; ncclcomm.init()", NCCLCOMM_DEVICES="auto", SLURM_JOB_GPUS="0,1")
    assert ended.returncode == 1
    assert "SLURM allotted GPUs (SLURM_JOB_GPUS=0,1)" in ended.stderr


def test_nccl_is_found(python: str) -> None:
    ended = _run(
        python, "from ncclcomm.transport import nccl; print(nccl.version() > 20000, len(nccl.new_unique_id()))"
    )
    assert ended.stdout.split() == ["True", "128"], ended.stderr
