"""Importing ncclcomm is quick, starts nothing and needs NumPy alone."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

LIMIT_S = 0.15
RUNS = 5

MEASURE = """
import time, numpy
start = time.process_time()
import ncclcomm
print(time.process_time() - start)
"""

LIST_MODULES = "import ncclcomm, sys, json; print(json.dumps(sorted(sys.modules)))"

ONLY_NUMPY = """
import sys, importlib.abc

class OnlyNumPy(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names or top in ("numpy", "ncclcomm"):
            return None
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, OnlyNumPy())
"""


def python(program: str) -> str:
    """Standard output of a program in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_takes_little_longer_than_numpy() -> None:
    # Processor time, and the best of several runs: other processes of the machine only ever add to it.
    assert min(float(python(MEASURE)) for _ in range(RUNS)) < LIMIT_S


@pytest.mark.parametrize(
    "module", ["mpi4py", "cupy", "cuda", "torch", "matplotlib", "tqdm", "rich", "ml_dtypes", "sklearn", "asyncio"]
)
def test_import_leaves_other_packages_alone(module: str) -> None:
    assert module not in {name.partition(".")[0] for name in json.loads(python(LIST_MODULES))}


def test_import_and_devices_need_numpy_alone() -> None:
    program = ONLY_NUMPY + "import ncclcomm; print(ncclcomm.is_available(), ncclcomm.device_count() > 0)"
    assert python(program).split() == ["False", "True"]


def test_a_world_of_one_needs_numpy_alone() -> None:
    program = """
import numpy as np, ncclcomm
with ncclcomm.init() as comm:
    print(comm.rank, comm.size, comm.all_reduce(np.arange(3.0)).tolist())
"""
    assert python(ONLY_NUMPY + program).strip() == "0 1 [0.0, 1.0, 2.0]"


@pytest.mark.parametrize("arguments", ["['--help']", "['run', '--help']"])
def test_help_starts_no_mpi(arguments: str) -> None:
    program = f"""
import sys
from ncclcomm.cli import main
try:
    main({arguments})
except SystemExit as done:
    assert not done.code
assert "mpi4py" not in sys.modules
"""
    assert "usage" in python(program).lower()
