"""The short way among the devices of a process: bits, waits, and what is kept, on one GPU that stands for two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from contract.array_samples import REDUCIBLE, addends, assert_same_bits
from gpu.second_gpu import second_gpu
from ncclcomm import comm
from ncclcomm.devices.registry import current_backend

COUNT = 1 << 20
LONG = np.int64(60_000_000)
"""Cycles: some 30 ms."""

_SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
}
"""


@pytest.fixture
def streams(gpus: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The current streams of two devices that are one; the long way is closed."""
    from ncclcomm.devices import cuda_memory

    def refuse(*_: Any) -> None:
        raise AssertionError("plain arrays went the long way")

    with second_gpu() as found:
        monkeypatch.setattr(cuda_memory, "copy", refuse)
        monkeypatch.setattr(cuda_memory, "reduce", refuse)
        yield found


def _spin() -> Any:
    """A kernel that holds its stream back, compiled and loaded."""
    import cupy

    kernel = cupy.RawKernel(_SPIN, "spin")
    kernel((1,), (1,), (np.int64(1),))
    cupy.cuda.runtime.deviceSynchronize()
    return kernel


def _up(values: Any, device: int, streams: list[Any]) -> Any:
    """An array on a device, whose current stream fills it."""
    import cupy

    made = current_backend().empty(values.shape, values.dtype, device)
    with streams[device]:
        plain = cupy.ndarray(made.shape, made.dtype, cupy.cuda.MemoryPointer(_on_device_0(made), 0))
        plain.set(values)
    return made


def _on_device_0(array: Any) -> Any:
    """The array's memory, as CuPy finds it on the GPU that is there."""
    import cupy

    return cupy.cuda.UnownedMemory(array.data.ptr, array.nbytes, array, 0)


def _down(array: Any) -> Any:
    """What an array holds, once all work is done."""
    import cupy

    cupy.cuda.runtime.deviceSynchronize()
    plain = cupy.ndarray(array.shape, array.dtype, cupy.cuda.MemoryPointer(_on_device_0(array), 0))
    return plain.get()


SUMMED = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
"""Dtypes that the kernel adds."""


def test_every_other_dtype_goes_the_long_way() -> None:
    from ncclcomm.devices.cuda_sum import sum_type

    assert {dtype for dtype in REDUCIBLE["sum"] if sum_type(dtype)} == {np.dtype(code) for code in SUMMED}


@pytest.mark.parametrize("code", SUMMED)
def test_sums_are_numpys(streams: list[Any], code: str) -> None:
    dtype = np.dtype(code)
    for terms in (2, 3, 5, 8):
        for count in (1, 5, 4096, 100_003):
            held = [addends(dtype, count + 3, seed) for seed in range(terms)]
            arrays = [_up(values, seed % 2, streams) for seed, values in enumerate(held)]
            for skipped in (0, 1, 3):  # addresses that are no multiple of 16 too
                parts = [values[skipped : skipped + count] for values in held]
                expected = parts[0].copy()
                for part in parts[1:]:
                    expected = (expected | part) if dtype.kind == "b" else (expected + part).astype(dtype)
                got = comm.reduce_add([array[skipped : skipped + count] for array in arrays], 1)
                assert got.data.device_id == 1
                assert_same_bits(_down(got), expected, (dtype, terms, count, skipped))


def test_all_reduce_in_place_and_sliced(streams: list[Any]) -> None:
    for count in (7, COUNT):
        held = [addends(np.dtype("f4"), count, seed) for seed in range(2)]
        arrays = [_up(values, device, streams) for device, values in enumerate(held)]
        for got in (*comm.all_reduce(arrays), *comm.all_reduce(arrays, out=arrays)):
            assert_same_bits(_down(got), held[0] + held[1], count)


@pytest.mark.parametrize("slow", [0, 1])
def test_calls_wait_for_what_is_queued_and_later_work_waits_for_them(streams: list[Any], slow: int) -> None:
    spin = _spin()
    values = [np.full(COUNT, 1 + device, np.int32) for device in (0, 1)]
    sources = [_up(np.zeros(COUNT, np.int32), device, streams) for device in (0, 1)]
    comm.all_reduce(sources)
    comm.gather(sources, 0, 0)
    _down(sources[0])

    def fill(device: int, value: int) -> None:
        import cupy

        with streams[device]:
            memory = cupy.cuda.MemoryPointer(_on_device_0(sources[device]), 0)
            memory.memset_async(value, sources[device].nbytes)

    for device in (0, 1):
        with streams[device]:
            if device == slow:
                spin((1,), (1,), (LONG,))
        fill(device, 1 + device)
    one, two = (np.frombuffer(bytes([byte]) * 4, np.int32)[0] for byte in (1, 2))
    copies = [comm.broadcast(sources[device], [1 - device])[0] for device in (0, 1)]
    joined = [comm.gather(sources, 0, device) for device in (0, 1)]
    parts = comm.scatter(joined[0], [1], balanced=True)
    sums = [comm.reduce_add(sources, device) for device in (0, 1)]
    for device in (0, 1):
        fill(device, 9)
    assert not streams[slow].done, "the host waited"
    assert [_down(copy).tolist()[::COUNT] for copy in copies] == [[one], [two]]
    for both in (*joined, *parts):
        found = _down(both)
        assert (found[:COUNT] == one).all()
        assert (found[COUNT:] == two).all()
    for total in sums:
        assert (_down(total) == one + two).all()
    assert values[0].size == COUNT


def _copy_of_a_dropped_array(streams: list[Any]) -> int:
    """Copy an array behind a long kernel, drop it, fill new memory of its stream; the least of what arrives."""
    import cupy

    spin = _spin()
    least = 5
    for _ in range(5):
        array = _up(np.full(COUNT, 5, np.int32), 0, streams)
        own = streams[0]
        own.synchronize()
        streams[0] = cupy.cuda.Stream(non_blocking=True)  # another current stream than that of the memory
        with streams[1]:
            spin((1,), (1,), (LONG,))
        (got,) = comm.broadcast(array, [1])
        del array
        streams[0] = own
        with own:
            _up(np.full(COUNT, -1, np.int32), 0, streams)
        least = min(least, int(_down(got).min()))
    return least


def test_dropped_inputs_are_held_until_they_are_read(streams: list[Any]) -> None:
    assert _copy_of_a_dropped_array(streams) == 5


def test_a_dropped_input_that_is_not_held_is_overwritten(streams: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from ncclcomm.devices import cuda_peer

    monkeypatch.setattr(cuda_peer, "hold_until", lambda done, device, handle, objects: None)
    assert _copy_of_a_dropped_array(streams) == -1


@pytest.mark.parametrize("captured", [0, 1])
def test_calls_are_captured_into_a_graph_and_replayed(streams: list[Any], captured: int) -> None:
    import cupy

    def set_to(device: int, value: int) -> None:
        memory = cupy.cuda.MemoryPointer(_on_device_0(arrays[device]), 0)
        with streams[device]:
            memory.memset_async(value, arrays[device].nbytes)

    arrays = [_up(np.zeros(COUNT, np.int32), device, streams) for device in (0, 1)]
    outs = [_up(np.zeros(COUNT, np.int32), device, streams) for device in (0, 1)]
    both = _up(np.zeros(2 * COUNT, np.int32), 1, streams)
    comm.all_reduce(arrays)  # loads the kernel
    _down(both)
    streams[captured].begin_capture()
    comm.broadcast(arrays[0], out=[outs[1]])
    comm.gather(arrays, out=both)
    total = comm.reduce_add(arrays, 0)
    comm.all_reduce(arrays, out=arrays)
    graph = streams[captured].end_capture()
    for first in (1, 3):
        for device in (0, 1):
            set_to(device, first + device)
        _down(arrays[0])
        graph.launch(streams[captured])
        one, two = (np.frombuffer(bytes([first + device]) * 4, np.int32)[0] for device in (0, 1))
        assert (_down(outs[1]) == one).all()
        assert (_down(both) == np.repeat([one, two], COUNT)).all()
        for found in (total, *arrays):
            assert (_down(found) == one + two).all()
