"""Streams and events of CUDA where the host has no like: dropped at work, broken, captured, another process's."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import ncclcomm
from ncclcomm.devices.cuda import CudaBackend

_SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
}
"""
LONG = np.int64(100_000_000)
"""Cycles: some 50 ms."""
COUNT = 1 << 20
TIMEOUT_S = 60.0


def _spin() -> Any:
    """A kernel that holds its stream back, compiled and loaded."""
    import cupy

    kernel = cupy.RawKernel(_SPIN, "spin")
    kernel((1,), (1,), (np.int64(1),))
    cupy.cuda.Device().synchronize()
    return kernel


def test_a_stream_dropped_at_work_is_not_the_next_one(backend: CudaBackend) -> None:
    import cupy

    spin = _spin()
    cupy.full(COUNT, 0, np.int32).copy()  # loads both kernels
    for turn in range(5):
        old = ncclcomm.Stream()
        handle = old.handle
        with ncclcomm.stream(old):
            array = cupy.full(COUNT, 5, np.int32)
            got = cupy.empty(COUNT, np.int32)
            old.synchronize()
            spin((1,), (1,), (LONG,))
            cupy.copyto(got, array)
            done = old.record_event()
        # Memory and stream are free for others now, and the copy has yet to read.
        del array, old
        new = ncclcomm.Stream()
        with ncclcomm.stream(new):
            cupy.full(COUNT, -1, np.int32)
        if turn:  # at first there was memory to allocate, which may wait
            assert not done.query(), "the copy came too early to see anything"
            assert new.handle != handle
        new.synchronize()
        done.synchronize()
        assert int(got.min()) == 5


def test_a_stream_whose_work_is_done_is_used_again(backend: CudaBackend) -> None:
    handles = set()
    for _ in range(50):
        stream = ncclcomm.Stream()
        with ncclcomm.stream(stream):
            ncclcomm.zeros(3)
        stream.synchronize()
        handles.add(stream.handle)
        del stream
    assert len(handles) < 50


def _run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, on GPUs."""
    return subprocess.run(
        [sys.executable, "-c", "import os; os.environ['NCCLCOMM_DEVICES'] = 'cuda'\n" + program, *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def test_queries_raise_after_an_error() -> None:
    # Each loop would not end if the error read as work that runs.
    program = """
import sys, cupy, numpy as np, ncclcomm
write = cupy.RawKernel('extern "C" __global__ void write(int* where) { *where = 1; }', "write")
stream = ncclcomm.Stream()
start, end = (ncclcomm.Event(enable_timing=True) for _ in range(2))
with ncclcomm.stream(stream):
    start.record()
    write((1,), (1,), (np.uint64(8),))
    end.record()
for call in (stream.query, end.query):
    try:
        while not call():
            pass
    except ncclcomm.DeviceError as error:
        print(error.name)
try:
    start.elapsed_time(end)
except ncclcomm.DeviceError as error:
    print(error.name)
sys.stdout.flush()
os._exit(0)  # CuPy's destructors would speak of the broken device
"""
    ended = _run(program)
    assert ended.stdout.split() == ["cudaErrorIllegalAddress"] * 3, ended.stdout + ended.stderr


def test_an_external_stream(backend: CudaBackend, gpus: int) -> None:
    import cupy

    last = gpus - 1
    with cupy.cuda.Device(last):
        given = cupy.cuda.Stream(non_blocking=True)
    stream = ncclcomm.ExternalStream(given.ptr, last)  # warnings are errors here
    assert (stream.handle, stream.device) == (given.ptr, last)
    with ncclcomm.stream(stream):
        assert cupy.cuda.get_current_stream().ptr == given.ptr
        assert cupy.cuda.runtime.getDevice() == last
        array = ncclcomm.zeros(3)
    stream.synchronize()
    assert ncclcomm.to_numpy(array).tolist() == [0, 0, 0]
    del stream
    given.synchronize()  # it is the other library's still


def test_an_event_of_another_process(backend: CudaBackend) -> None:
    program = """
import sys, ncclcomm
event, stream = ncclcomm.Event(interprocess=True), ncclcomm.Stream()
print(event.ipc_handle().hex(), flush=True)
sys.stdin.readline()
stream.launch(sys.stdin.readline)
event.record(stream)
print("recorded", flush=True)
stream.synchronize()
sys.stdin.readline()
"""
    command = [sys.executable, "-c", "import os; os.environ['NCCLCOMM_DEVICES'] = 'cuda'\n" + program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdin is not None
            assert other.stdout is not None

            def say() -> None:
                print("go on", file=other.stdin, flush=True)

            event = ncclcomm.Event.from_ipc_handle(0, bytes.fromhex(other.stdout.readline()))
            say()
            assert other.stdout.readline() == "recorded\n"
            side = ncclcomm.Stream()
            side.wait_event(event)
            waiting = side.record_event()
            assert not event.query()
            assert not waiting.query()
            say()
            event.synchronize()
            waiting.synchronize()
            assert event.query()
            say()
            assert other.wait(TIMEOUT_S) == 0
        finally:
            other.kill()


def test_nccl_in_a_graph_capture(backend: CudaBackend) -> None:
    import cupy

    from ncclcomm.transport.nccl import NcclTransport, new_unique_id

    transport = NcclTransport(new_unique_id(), 1, 0, 0)
    array, out = cupy.ones(COUNT, np.float32), cupy.zeros(COUNT, np.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        transport.all_reduce([array], [out], "sum")  # connects
        stream.synchronize()
        stream.begin_capture()
        for _ in range(100):  # time enough for a thread that asks for what is captured
            transport.all_reduce([array], [out], "sum")
        graph = stream.end_capture()
        array.fill(3)
        graph.launch()
        stream.synchronize()
    assert float(out.min()) == 3
    del graph  # NCCL's end waits for the graphs
    transport.close()


def test_what_cannot_be_captured_is_refused(backend: CudaBackend) -> None:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    ours = ncclcomm.ExternalStream(stream.ptr, 0)
    array = cupy.zeros(4)
    with stream:
        array += 0  # loads the kernel
        stream.synchronize()
        stream.begin_capture()
        array += 1
        with pytest.raises(ncclcomm.UnsupportedError, match="graph"):
            ours.launch(print)
        with pytest.raises(ncclcomm.UnsupportedError, match="graph"):
            backend.refuse_capture(0, "this")
        ncclcomm.Stream()  # asks dropped ones whether they are idle
        graph = stream.end_capture()
        graph.launch()
        stream.synchronize()
    assert array.tolist() == [1, 1, 1, 1]


@pytest.mark.gpu(2)
def test_threads_make_no_context_on_another_gpu() -> None:
    program = """
import ctypes, threading, weakref, ncclcomm
from ncclcomm.devices import cuda_held
ncclcomm.set_device(1)
stream = ncclcomm.Stream()
stream.launch(print, "ran")
stream.synchronize()
class Thing: pass
thing, gone = Thing(), threading.Event()
weakref.finalize(thing, gone.set)
cuda_held.hold(stream._impl, thing)
del thing
assert gone.wait(30)
flags, active = ctypes.c_uint(), ctypes.c_int()
assert ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)) == 0
print("active" if active.value else "none")
"""
    ended = _run(program)
    assert ended.stdout.split() == ["ran", "none"], ended.stdout + ended.stderr


def test_a_uuid_is_the_drivers(backend: CudaBackend, gpus: int) -> None:
    asked = ["nvidia-smi", "-L"]
    listed = subprocess.run(asked, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout
    found = [backend.uuid(device) for device in range(gpus)]
    assert len(set(found)) == gpus
    for uuid in found:
        assert uuid in listed
