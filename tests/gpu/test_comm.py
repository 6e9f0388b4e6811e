"""In-process collectives on GPUs: bits, destinations, and order among the streams of all devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ncclcomm
from contract.array_samples import LAYOUTS, REDUCIBLE, addends, assert_same_bits, sample
from ncclcomm import comm
from ncclcomm.devices.cuda import CudaBackend

HELD = [dtype for dtype in REDUCIBLE["sum"] if dtype.itemsize]
"""What CuPy's arrays hold."""

_SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
}
"""
LONG = np.int64(100_000_000)
"""Cycles: some 50 ms."""


def _spin() -> Any:
    """A kernel that holds its stream back, compiled and loaded."""
    import cupy

    kernel = cupy.RawKernel(_SPIN, "spin")
    kernel((1,), (1,), (np.int64(1),))
    cupy.cuda.Device().synchronize()
    return kernel


def _orders(gpus: int) -> list[list[int]]:
    """Device lists to try."""
    return [[0], [0, 0], *([[0, 1], [1, 0]] if gpus > 1 else [])]


def test_broadcast_every_dtype(backend: CudaBackend, gpus: int) -> None:
    for dtype in HELD:
        sent = sample(dtype, (5, 3), 1)
        for devices in _orders(gpus):
            for source in (sent, ncclcomm.asarray(sent, device=devices[-1])):
                for device, got in zip(devices, comm.broadcast(source, devices), strict=True):
                    assert ncclcomm.device_index(got) == device
                    assert_same_bits(ncclcomm.to_numpy(got), sent, (dtype, devices))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(backend: CudaBackend, gpus: int, layout: str) -> None:
    shape, cut = LAYOUTS[layout]
    base = sample("i4", shape, 3)
    for devices in _orders(gpus):
        for source_device in range(gpus):
            source = cut(ncclcomm.asarray(base, device=source_device))
            for got in comm.broadcast(source, devices):
                assert_same_bits(ncclcomm.to_numpy(got), np.ascontiguousarray(cut(base)), (layout, devices))
            for dim in range(source.ndim):
                parts = comm.scatter(source, devices, dim=dim)
                whole = comm.gather(parts, dim=dim, destination="cpu")
                assert_same_bits(whole, np.ascontiguousarray(cut(base)), (layout, devices, dim))


def test_sums_of_every_dtype(backend: CudaBackend, gpus: int) -> None:
    for dtype in HELD:
        held = [addends(dtype, 101, seed) for seed in range(4)]
        expected = held[0]
        for array in held[1:]:
            expected = (expected | array) if dtype.kind == "b" else (expected + array).astype(dtype)
        for destination in [*range(gpus), "cpu"]:
            arrays = [ncclcomm.asarray(array, device=i % gpus) for i, array in enumerate(held)]
            got = comm.reduce_add(arrays, destination)
            assert_same_bits(ncclcomm.to_numpy(got), expected, (dtype, destination))
            for array, before in zip(arrays, held, strict=True):
                assert_same_bits(ncclcomm.to_numpy(array), before, "an input")


def test_every_device_gets_the_result(backend: CudaBackend, gpus: int) -> None:
    for count in (7, 1 << 19):  # as a whole, and in slices
        for n in range(1, gpus + 2):
            held = [addends("f4", count, seed) for seed in range(n)]
            total = np.sum(held, axis=0, dtype="f4")
            arrays = [ncclcomm.asarray(array, device=i % gpus) for i, array in enumerate(held)]
            for got in comm.all_reduce(arrays):
                assert_same_bits(ncclcomm.to_numpy(got), total, n)
            for got in comm.all_reduce(arrays, "avg"):
                assert_same_bits(ncclcomm.to_numpy(got), total / np.float32(n), n)
            for got in comm.all_gather(arrays):
                assert_same_bits(ncclcomm.to_numpy(got), np.concatenate(held), n)
            for got, part in zip(comm.reduce_scatter(arrays), np.array_split(total, n), strict=True):
                assert_same_bits(ncclcomm.to_numpy(got), part.copy(), n)
            (coalesced,) = comm.reduce_add_coalesced([[array] for array in arrays], "cpu")
            assert_same_bits(ncclcomm.to_numpy(coalesced), total, n)
            for copies in comm.broadcast_coalesced(arrays, range(gpus)):
                for copy, array in zip(copies, held, strict=True):
                    assert_same_bits(ncclcomm.to_numpy(copy), array, n)
            for array, before in zip(arrays, held, strict=True):
                assert_same_bits(ncclcomm.to_numpy(array), before, "an input")
            comm.all_reduce(arrays, out=arrays)
            for array in arrays:
                assert_same_bits(ncclcomm.to_numpy(array), total, "in place")


def test_calls_follow_the_work_queued_before_and_precede_what_comes_after(backend: CudaBackend, gpus: int) -> None:
    spin = _spin()
    devices = list(range(gpus))
    for source in devices:
        streams = [ncclcomm.Stream(device=device) for device in devices]
        with ncclcomm.stream(streams[source]):  # memory, access to peers, and kernels, whose first load waits
            warm = ncclcomm.zeros(1 << 20, np.float32)
            warm.fill(1)
            spin((1,), (1,), (np.int64(1),))
            comm.broadcast(warm, devices)
            for device in devices:
                comm.gather([warm, warm], destination=device)
        array = ncclcomm.zeros(1 << 20, np.float32, device=source)
        ncclcomm.synchronize(source)
        with ncclcomm.stream(streams[source]):
            spin((1,), (1,), (LONG,))
            array.fill(7)
            got = comm.broadcast(array, devices)
            joined = [comm.gather([array, array], destination=device) for device in devices]
            array.fill(9)
            assert not streams[source].query(), "the host waited"
        streams[source].synchronize()
        for device, copy in zip(devices, got, strict=True):
            # The source's own device gets the array itself, and the others copies of what it was.
            assert ncclcomm.to_numpy(copy).max() == (9 if device == source else 7), (source, device)
        for device, both in zip(devices, joined, strict=True):
            values = ncclcomm.to_numpy(both)
            assert (values.min(), values.max()) == (7, 7), (source, device)


def test_the_callers_device_and_streams_stay(backend: CudaBackend, gpus: int) -> None:
    import cupy

    last = gpus - 1
    with ncclcomm.stream(ncclcomm.Stream(device=last)) as chosen:
        comm.gather(comm.scatter(np.arange(10.0), range(gpus)), destination=0)
        with pytest.raises(ncclcomm.ArgumentError):
            comm.broadcast(np.ones(3), [99])
        assert cupy.cuda.runtime.getDevice() == last
        assert cupy.cuda.get_current_stream().ptr == chosen.handle


def _copy_of_a_dropped_array() -> int:
    """Copy an array behind a long kernel, drop it, fill new memory of its stream with -1; the least of what arrives.

    The stream of the array's memory is not the current one in the call, so that nothing orders it after the copy.
    """
    spin = _spin()
    own, side = ncclcomm.Stream(device=0), ncclcomm.Stream(device=1)
    least = 5
    for turn in range(5):
        with ncclcomm.stream(own):
            array = ncclcomm.asarray(np.full(1 << 20, 5, np.int32))
        own.synchronize()
        with ncclcomm.stream(side):
            spin((1,), (1,), (LONG if turn else np.int64(1),))
            (got,) = comm.broadcast(array, [1])
        del array
        with ncclcomm.stream(own):
            ncclcomm.asarray(np.full(1 << 20, -1, np.int32))
        side.synchronize()
        least = min(least, int(ncclcomm.to_numpy(got).min()))
    return least


@pytest.mark.gpu(2)
def test_dropped_inputs_are_held_until_they_are_read(backend: CudaBackend) -> None:
    assert _copy_of_a_dropped_array() == 5


@pytest.mark.gpu(2)
def test_a_dropped_input_that_is_not_held_is_overwritten(backend: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    from ncclcomm.devices import cuda_memory

    monkeypatch.setattr(cuda_memory, "hold", lambda stream, *objects: None)
    assert _copy_of_a_dropped_array() == -1


def test_more_than_2_to_the_31_elements(backend: CudaBackend, gpus: int) -> None:
    import cupy

    count = (1 << 31) + 5
    one, two = cupy.full(count, 1, np.int8), cupy.full(count, 2, np.int8)
    total = comm.reduce_add([one, two], gpus - 1)
    assert (int(total[0]), int(total[-1]), int(total.min()), int(total.max())) == (3, 3, 3, 3)
    whole = comm.gather([one, two], destination=gpus - 1)
    assert whole.size == 2 * count
    assert [int(whole[place]) for place in (0, count - 1, count, -1)] == [1, 1, 2, 2]
    first, second = comm.scatter(whole, [0, 0])
    assert (int(first.max()), int(second.min())) == (1, 2)


def test_dtypes_that_cupy_lacks(backend: CudaBackend) -> None:
    with pytest.raises(ncclcomm.UnsupportedError, match="datetime64"):
        ncclcomm.asarray(np.zeros(3, "M8[s]"))


def test_launched_work(backend: CudaBackend) -> None:
    ran: list[int] = []
    stream = ncclcomm.Stream()
    stream.launch(ran.append, 1)
    stream.launch(ran.append, 2)
    stream.synchronize()
    assert ran == [1, 2]
    stream.launch(lambda: 1 / 0)
    with pytest.raises(ncclcomm.DeviceError) as caught:
        stream.synchronize()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    stream.synchronize()
