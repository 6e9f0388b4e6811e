"""The packages of the cuda12 or cuda13 extra without a GPU: imports, the host backend, and clear reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from flavours import missing
from unit import cuda_logic, cuda_simulated

VARIABLE = "NCCLCOMM_TEST_PYTHON_CUDA"
PROJECT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
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


def test_the_doctor_says_what_keeps_gpus_away(python: str) -> None:
    program = "from ncclcomm.cli import main; raise SystemExit(main(['doctor', '--json']))"
    for demanded, allotted in (("cuda", {}), ("auto", {"SLURM_JOB_GPUS": "0,1"})):
        ended = _run(python, program, NCCLCOMM_DEVICES=demanded, **allotted)
        line = next(line for line in json.loads(ended.stdout)["lines"] if line["id"] == "devices.backend")
        assert (ended.returncode, line["status"]) == (1, "fail"), line
        assert "driver" in line["found"] or "no GPU" in line["found"]
        assert line["mend"] == "NCCLCOMM_DEVICES=host runs without GPUs"


def test_nccl_is_found(python: str) -> None:
    ended = _run(
        python, "from ncclcomm.transport import nccl; print(nccl.version() > 20000, len(nccl.new_unique_id()))"
    )
    assert ended.stdout.split() == ["True", "128"], ended.stderr


_WATCHED = """
import threading
from types import SimpleNamespace
from cupy.cuda import runtime
from ncclcomm.devices import cuda_driver, cuda_streams
from ncclcomm.errors import DeviceError

done, code = [], 600
driver = SimpleNamespace(
    cuEventQuery=lambda event: done.append(("query", event)) or code,
    cuThreadExchangeStreamCaptureMode=lambda mode: done.append(("mode", mode._obj.value)) or 0,
)
cuda_driver._driver = lambda: driver
cuda_driver.runtime = SimpleNamespace(
    setDevice=lambda device: done.append(("device", device)), CUDARuntimeError=runtime.CUDARuntimeError
)
event = cuda_streams.CudaEvent(timing=False, blocking=False, interprocess=False)
assert event.poll()
event.device, event.cupy = 1, SimpleNamespace(ptr=77)
handle, captured = 0, False
cuda_streams.cupy = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda device: SimpleNamespace(ptr=handle)))
def is_capturing(stream):
    assert stream > 1  # the legacy stream must not be asked about
    return captured
cuda_streams.runtime = SimpleNamespace(
    streamIsCapturing=is_capturing,
    eventRecord=lambda event, stream: done.append(("record", event, stream)),
    CUDARuntimeError=runtime.CUDARuntimeError,
)
assert cuda_streams.record_current(event, 1)
handle = 9
assert cuda_streams.record_current(event, 1)
captured = True
assert not cuda_streams.record_current(event, 1)
assert done == [("record", 77, 0), ("record", 77, 9)], done

def watch():
    global code
    done.clear()
    assert not event.poll()
    code = 0
    assert event.poll()
    code = 700
    try:
        event.poll()
    except DeviceError as error:
        done.append((error.code, error.name))
expected = [("device", 1), ("mode", 2), ("query", 77), ("query", 77), ("query", 77), (700, "cudaErrorIllegalAddress")]
for _ in range(2):  # each thread has a device and a capture mode of its own
    code = 600
    thread = threading.Thread(target=watch)
    thread.start(); thread.join()
    print(done == expected, "" if done == expected else done)
"""


def test_events_are_asked_for_the_watchdog(python: str) -> None:
    # What a GPU's driver would answer is the test's own; that CuPy has the names that are used is CuPy's.
    ended = _run(python, _WATCHED)
    assert ended.stdout.split() == ["True", "True"], ended.stdout + ended.stderr


_HIDE = """
from cuda import pathfinder
load, header = pathfinder.load_nvidia_dynamic_lib, pathfinder.find_nvidia_header_directory
def without(name):
    if name in {names!r}:
        raise pathfinder.DynamicLibNotFoundError(f"no {{name}} here")
    return load(name)
pathfinder.load_nvidia_dynamic_lib = without
pathfinder.find_nvidia_header_directory = lambda name: None if name in {names!r} else header(name)
"""


def test_without_nccl_ranks_hear_why(python: str) -> None:
    program = (
        "import sys, warnings; sys.modules['cupy_backends.cuda.libs.nccl'] = None; warnings.simplefilter('ignore')\n"
        "from ncclcomm.communicator.gpu import _nccl_version; print(_nccl_version())"
    )
    ended = _run(python, program)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("(0, \"CuPy can't load NCCL: pip install nvidia-nccl-cu13"), ended.stdout


_COMPILE = """
from cupy._core import core
from cupy_backends.cuda.libs import nvrtc
from ncclcomm.devices.cuda_streams import translated
translated(lambda: nvrtc.getVersion())()
options = translated(lambda: core.assemble_cupy_compiler_options(()))()
"""


@pytest.mark.parametrize("name", ["nvrtc", "cudart"])
def test_without_the_compiler_or_its_headers_the_error_is_ours(python: str, name: str) -> None:
    ended = _run(python, _HIDE.format(names=[name]) + _COMPILE)
    last = ended.stderr.strip().splitlines()[-1]
    assert ended.returncode == 1
    assert last.startswith("ncclcomm.errors.BackendUnavailableError: "), ended.stderr
    assert "pip install nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12" in last


def test_the_extra_brings_what_compiles_kernels(python: str) -> None:
    # With a kernel that includes what sums of every dtype do; a toolkit of the system must not be what was found.
    program = """
import os, sys
from cuda import pathfinder
places = [pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path, pathfinder.find_nvidia_header_directory("cudart")]
assert all(os.path.realpath(place).startswith(os.path.realpath(sys.prefix)) for place in places), places
headers = [*core._cupy_header_list, "cupy/float16.cuh", "cupy/bfloat16.cuh"]
source = "".join(f"#include <{header}>\\n" for header in headers) + (
    "extern \\"C\\" __global__ void add(float16* a, bfloat16* b, complex<float>* c) "
    "{ a[0] = a[0] + a[1]; b[0] = b[0] + b[1]; c[0] = c[0] + c[1]; }"
)
kernel = nvrtc.createProgram(source, "add.cu", (), ())
try:
    nvrtc.compileProgram(kernel, (*options, "-arch=sm_90", "--device-as-default-execution-space"))
finally:
    print(nvrtc.getProgramLog(kernel))
print(len(nvrtc.getCUBIN(kernel)) > 1000)
"""
    ended = _run(python, _COMPILE + program)
    assert (ended.returncode, ended.stdout.split()[-1:]) == (0, ["True"]), ended.stdout + ended.stderr


def _told(python: str, program: str, checks: Iterable[str]) -> dict[str, str]:
    """What each check of a program beside this file says, '' where it passed."""
    ended = _run(python, Path(__file__).with_name(program).read_text(encoding="utf-8"))
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    told: dict[str, str] = json.loads(ended.stdout)
    assert set(told) == set(checks)
    return told


@pytest.fixture(scope="module")
def logic(python: str) -> dict[str, str]:
    """What the backend's own decisions are found to be."""
    return _told(python, "cuda_logic.py", cuda_logic.CHECKS)


@pytest.fixture(scope="module")
def simulated(python: str) -> dict[str, str]:
    """What the collectives do on simulated GPUs."""
    return _told(python, "cuda_simulated.py", cuda_simulated.CHECKS)


@pytest.mark.parametrize("name", cuda_logic.CHECKS)
def test_logic(logic: dict[str, str], name: str) -> None:
    if logic[name]:
        pytest.fail(logic[name], pytrace=False)


@pytest.mark.parametrize("name", cuda_simulated.CHECKS)
def test_on_simulated_gpus(simulated: dict[str, str], name: str) -> None:
    if simulated[name]:
        pytest.fail(simulated[name], pytrace=False)
