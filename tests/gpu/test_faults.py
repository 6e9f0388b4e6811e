"""Ranks that never come, die or don't fit, with work queued on GPUs: told in time, and the GPUs free afterwards."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.rank_programs import ENDS_WITHIN_S
from flavours import Flavour, missing

FREE_WITHIN_S = 10.0
SLACK_MIB = 64
"""What the driver itself may take or give back meanwhile."""

_HEAD = """
import os, signal, sys, threading, time
import cupy
import numpy as np
import ncclcomm
comm = ncclcomm.init({init})
array = ncclcomm.asarray(np.full(1 << 20, comm.rank + 1, np.float32))
comm.all_reduce(array)
ncclcomm.synchronize()  # NCCL has connected, and kernels are loaded
spin = cupy.RawKernel(r'''
extern "C" __global__ void spin(long long cycles) {{
    long long start = clock64();
    while (clock64() - start < cycles) {{}}
}}
''', "spin")
spin((1,), (1,), (np.int64(1),))
ncclcomm.synchronize()
def elsewhere(signal):
    while not os.path.exists(signal):
        time.sleep(0.01)
"""


def _used_mib() -> list[int]:
    """Memory in use on each GPU."""
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    said = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout
    return [int(line) for line in said.split()]


@pytest.fixture(autouse=True)
def gpus_are_free_afterwards(gpus: int) -> Iterator[None]:
    """Holds that a job leaves no memory in use on any GPU, which a kernel that still runs would be."""
    if shutil.which("nvidia-smi") is None:
        missing("nvidia-smi", "it tells how much memory of a GPU is in use", ci_has_it=False)
    before = _used_mib()
    yield
    deadline = time.monotonic() + FREE_WITHIN_S
    while any(now > then + SLACK_MIB for now, then in zip(_used_mib(), before, strict=True)):
        assert time.monotonic() < deadline, f"MiB in use before the job: {before}, after it: {_used_mib()}"
        time.sleep(0.1)


def _run(
    any_flavour: Flavour, folder: Path, body: str, init: str, n: int = 2, **env: str
) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run a program on ranks with a GPU each; how it ended, and after how many seconds from its first call on."""
    script, start = folder / "program.py", folder / "started"
    script.write_text(_HEAD.format(init=init) + f"open({str(start)!r}, 'w').close()\n{body}")
    ended = any_flavour.run(n, [script], env={"NCCLCOMM_DEVICES": "cuda", "SIGNAL": str(folder / "signal"), **env})
    return ended, time.time() - start.stat().st_mtime


@pytest.mark.gpu(2, ranks=True)
def test_a_late_rank_is_told_once_and_the_job_goes_on(any_flavour: Flavour, tmp_path: Path) -> None:
    body = """
if comm.rank == 0:
    total = comm.all_reduce(array)
    from ncclcomm.communicator.board import BOARD
    while not BOARD.queued[comm._member.name].oldest().is_told:
        time.sleep(0.01)
    open(os.environ["SIGNAL"], "w").close()
else:
    elsewhere(os.environ["SIGNAL"])
    total = comm.all_reduce(array)
os.write(1, f"sum {float(total.max())} {float(total.min())}\\n".encode())
comm.close()
"""
    ended, _ = _run(any_flavour, tmp_path, body, "check=False", NCCLCOMM_STALL_S="2")
    assert (ended.returncode, ended.stdout) == (0, "sum 3.0 3.0\n" * 2), ended.stderr
    assert ended.stderr.count("its device work has not ended: still waiting") == 1, ended.stderr
    assert re.search(r"rank 1 .*: last finished all_reduce \(call 0\), at program.py:\d+ in elsewhere", ended.stderr)


@pytest.mark.gpu(2, ranks=True)
def test_a_rank_that_never_comes(any_flavour: Flavour, tmp_path: Path) -> None:
    body = """
if comm.rank == 1:
    elsewhere(os.environ["SIGNAL"])
    sys.exit(0)
try:
    comm.all_reduce(array)
except ncclcomm.CommTimeoutError as error:
    os.write(1, f"told {error}\\n".encode())
open(os.environ["SIGNAL"], "w").close()
"""
    ended, seconds = _run(any_flavour, tmp_path, body, "check=False, timeout_s=2")
    assert ended.returncode != 0
    assert seconds < ENDS_WITHIN_S
    assert "told ncclcomm: rank 0 (node 0, local 0): waited 2 s in all_reduce (call 1" in ended.stdout, ended.stderr


@pytest.mark.gpu(2, ranks=True)
@pytest.mark.parametrize("leave", ["sys.exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"], ids=["exit 0", "SIGKILL"])
def test_a_rank_that_leaves(any_flavour: Flavour, tmp_path: Path, leave: str) -> None:
    body = f"""
if comm.rank == 1:
    {leave}
comm.all_reduce(array)
ncclcomm.synchronize()
"""
    ended, seconds = _run(any_flavour, tmp_path, body, "check=False")
    assert ended.returncode != 0
    assert seconds < ENDS_WITHIN_S
    if "exit" in leave:
        assert ended.stderr.count("its device work has not ended: rank 1 will not come") == 1, ended.stderr


@pytest.mark.gpu(2, ranks=True)
def test_ranks_whose_calls_do_not_fit(any_flavour: Flavour, tmp_path: Path) -> None:
    # Unchecked, the ranks come to different calls: NCCL waits on one of them, MPI on the other.
    body = """
if comm.rank == 0:
    comm.all_reduce(array)
    ncclcomm.synchronize()
else:
    comm.barrier()
"""
    ended, seconds = _run(any_flavour, tmp_path, body, "check=False, timeout_s=2")
    assert ended.returncode != 0
    assert seconds < ENDS_WITHIN_S
    assert "the time limit of 2 s is over" in ended.stderr, ended.stderr


@pytest.mark.gpu(2, ranks=True)
@pytest.mark.parametrize("wait", ["ncclcomm.synchronize()", "array.get()", "cupy.cuda.runtime.free(memory)"])
def test_a_kernel_that_never_ends(any_flavour: Flavour, tmp_path: Path, wait: str) -> None:
    # The last one waits inside the driver, with its lock held.
    body = f"""
memory = cupy.cuda.runtime.malloc(1 << 20)
if comm.rank == 1:
    spin((1,), (1,), (np.int64(1 << 62),))
comm.all_reduce(array)
{wait}
"""
    ended, seconds = _run(any_flavour, tmp_path, body, "timeout_s=2")
    assert ended.returncode != 0
    assert seconds < ENDS_WITHIN_S
    assert ended.stderr.count("its device work has not ended: the time limit of 2 s is over") == 1, ended.stderr
    assert "queued, and not ended, on the device of: ranks 0-1\n" in ended.stderr
    assert "a stream waits for other work" in ended.stderr


@pytest.mark.gpu(2, ranks=True)
def test_a_full_queue_does_not_silence_the_watchdog(any_flavour: Flavour, tmp_path: Path) -> None:
    # A stream takes some thousand kernels; then whoever launches one waits in the driver.
    body = """
spin((1,), (1,), (np.int64(1 << 62),))
for _ in range(20_000):
    comm.all_reduce(array)
"""
    ended, seconds = _run(any_flavour, tmp_path, body, "check=False, timeout_s=2")
    assert ended.returncode != 0
    assert seconds < ENDS_WITHIN_S
    assert "the time limit of 2 s is over" in ended.stderr, ended.stderr


@pytest.mark.gpu(2, ranks=True)
def test_a_graph_capture_is_not_disturbed(any_flavour: Flavour, tmp_path: Path) -> None:
    # The watchdog asks for work on the side stream several times while the main thread captures another one.
    body = """
side = ncclcomm.Stream()
stream = cupy.cuda.Stream(non_blocking=True)
filled = cupy.zeros(4)
with stream:
    filled += 0  # loads the kernel, which would wait for one that runs
    stream.synchronize()
comm.all_reduce(array)  # the ranks share the GPU, maybe: both are ready now
ncclcomm.synchronize()
with ncclcomm.stream(side):
    spin((1,), (1,), (np.int64(4_000_000_000),))
    comm.all_reduce(array)
with stream:
    stream.begin_capture()
    filled += 1
    time.sleep(1)
    filled += 1
    graph = stream.end_capture()
    graph.launch()
    stream.synchronize()
os.write(1, f"{not side.query()} {filled.get().tolist()}\\n".encode())
comm.close()
"""
    ended, _ = _run(any_flavour, tmp_path, body, "check=False")
    assert (ended.returncode, ended.stdout) == (0, "True [2.0, 2.0, 2.0, 2.0]\n" * 2), ended.stderr


@pytest.mark.gpu(2)
def test_other_gpus_get_no_context(any_flavour: Flavour, tmp_path: Path, gpus: int) -> None:
    # A thread that asks about an event without having chosen a device makes a context on device 0.
    body = """
from ncclcomm.communicator.board import BOARD
comm.all_reduce(array)
work = BOARD.queued[comm._member.name]
while work.oldest() is not None:
    time.sleep(0.01)
command = "nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits"
os.write(1, os.popen(command).read().encode())
comm.close()
"""
    before = _used_mib()
    env = {"NCCLCOMM_SHARE_DEVICES": "1"}
    ended, _ = _run(any_flavour, tmp_path, body, f"device={gpus - 1}, check=False", **env)
    assert ended.returncode == 0, ended.stderr
    grown = [int(now) - then for now, then in zip(ended.stdout.split()[:gpus], before, strict=True)]
    assert sum(mib > SLACK_MIB for mib in grown) == 1, grown
