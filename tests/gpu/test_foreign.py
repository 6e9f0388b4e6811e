"""PyTorch's tensors on GPUs: bits, kinds, and order with the work on PyTorch's own streams."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import ncclcomm
from contract.array_samples import assert_same_bits, sample
from flavours import missing
from ncclcomm import comm
from ncclcomm.devices.cuda import CudaBackend

_SPIN_CYCLES = 100_000_000
"""Some 50 ms."""


@pytest.fixture(scope="module")
def torch() -> Any:
    """PyTorch with CUDA."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch
    except ModuleNotFoundError:
        missing("torch on GPUs", "no PyTorch here; pip install torch", ci_has_it=False)
    if not torch.cuda.is_available():
        missing("torch on GPUs", "PyTorch sees no GPU", ci_has_it=False)
    return torch


DTYPES = ["bool", "uint8", "int16", "int64", "float16", "bfloat16", "float32", "float64", "complex64", "float8_e4m3fn"]


def on(torch: Any, name: str, device: int, shape: tuple[int, ...], seed: int) -> tuple[Any, bytes]:
    """A tensor of random bits, and these."""
    dtype = getattr(torch, name)
    size = torch.empty((), dtype=dtype).element_size()
    flat = sample("?" if name == "bool" else "u1", int(np.prod(shape)) * size, seed)
    tensor = torch.from_numpy(flat).view(dtype).reshape(shape)
    return tensor.to(f"cuda:{device}"), flat.tobytes()


def bits(torch: Any, tensor: Any) -> bytes:
    """A tensor's elements in C order."""
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy())


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_there_and_back(torch: Any, backend: CudaBackend, gpus: int, name: str) -> None:
    for home in range(gpus):
        tensor, expected = on(torch, name, home, (6, 4), 1)
        devices = list(range(gpus))
        copies = comm.broadcast(tensor, devices)
        assert copies[home] is tensor
        parts = comm.scatter(tensor, devices)
        assert parts[home].data_ptr() in range(tensor.data_ptr(), tensor.data_ptr() + 24 * tensor.element_size())
        whole = comm.gather(parts, destination=home)
        in_host = comm.gather(parts, destination="cpu")
        for device, found in [*zip(devices, copies, strict=True), (home, whole), (None, in_host)]:
            assert type(found) is torch.Tensor
            assert found.dtype == tensor.dtype
            assert found.device == torch.device("cpu" if device is None else f"cuda:{device}")
            assert bits(torch, found) == expected
        assert bits(torch, ncclcomm_back(torch, tensor)) == expected


def ncclcomm_back(torch: Any, tensor: Any) -> Any:
    """A tensor from the host copy that to_numpy makes."""
    return torch.from_numpy(ncclcomm.to_numpy(tensor).reshape(-1).view(np.uint8))


@pytest.mark.parametrize("name", ["int64", "float16", "bfloat16", "float32", "complex64"])
def test_sums(torch: Any, backend: CudaBackend, gpus: int, name: str) -> None:
    dtype = getattr(torch, name)
    tensors = [torch.arange(1000, device=f"cuda:{i % gpus}").remainder(7).to(dtype) + i for i in range(3)]
    expected = sum(tensor.cpu() for tensor in tensors)
    assert torch.equal(comm.reduce_add(tensors, 0).cpu(), expected)
    assert torch.equal(comm.reduce_add(tensors, "cpu"), expected)
    for found, tensor in zip(comm.all_reduce(tensors), tensors, strict=True):
        assert found.device == tensor.device
        assert torch.equal(found.cpu(), expected)
    assert comm.all_reduce(tensors, out=tensors)[0] is tensors[0]
    assert torch.equal(tensors[1].cpu(), expected)


def test_strided_tensors(torch: Any, backend: CudaBackend, gpus: int) -> None:
    base = torch.arange(48, device="cuda:0").reshape(6, 8)
    for tensor in (base.T, base[:, 1::2], base[1:], base[:1].expand(4, 8), base[2, 3], base[:0]):
        for copy in comm.broadcast(tensor, [gpus - 1, 0]):
            assert torch.equal(copy.cpu(), tensor.cpu())
        assert_same_bits(ncclcomm.to_numpy(tensor), tensor.cpu().numpy().copy(order="C"))
        assert_same_bits(ncclcomm.to_numpy(ncclcomm.asarray(tensor)), tensor.cpu().numpy().copy(order="C"))


def test_calls_are_in_order_with_pytorchs_stream(torch: Any, backend: CudaBackend, gpus: int) -> None:
    last = gpus - 1
    sides = [torch.cuda.Stream(device) for device in range(gpus)]
    before = [backend.current_stream(device).handle for device in range(gpus)]
    tensor = torch.zeros(1 << 20, device="cuda:0")
    torch.cuda.synchronize()
    with torch.cuda.stream(sides[0]):
        torch.cuda._sleep(_SPIN_CYCLES)
        tensor.fill_(5)  # late, on a stream that CuPy knows nothing of
        with torch.cuda.stream(sides[last]), torch.cuda.device(0):
            copies = comm.broadcast(tensor, [last, last])
            total = comm.reduce_add([tensor, tensor], last)
            gathered = comm.gather([tensor, tensor], destination=last)
        tensor.fill_(-1)  # after the call read it
        with torch.cuda.stream(sides[last]):
            sums = [float(found.sum()) for found in (total, gathered)]
            if last:
                sums += [float(copy.sum()) for copy in copies]
    assert set(sums) == {5.0 * 2 * (1 << 20), *([5.0 * (1 << 20)] if last else [])}
    assert [backend.current_stream(device).handle for device in range(gpus)] == before


def test_arrays_lent_to_cupy(torch: Any, backend: CudaBackend) -> None:
    side = torch.cuda.Stream(0)
    tensor = torch.zeros(1 << 20, device="cuda:0")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(_SPIN_CYCLES)
        tensor.fill_(3)
        array = ncclcomm.asarray(tensor)
        host = ncclcomm.to_numpy(tensor)
    assert array.data.ptr == tensor.data_ptr()
    assert float(array.sum()) == 3 * (1 << 20)
    assert float(host.sum()) == 3 * (1 << 20)
    assert ncclcomm.device_index(tensor) == 0
    assert torch.from_dlpack(array).data_ptr() == tensor.data_ptr()


def test_both_libraries_in_one_call_are_refused(torch: Any, backend: CudaBackend, gpus: int) -> None:
    import cupy

    tensor, array = torch.ones(3, device="cuda:0"), cupy.ones(3, "f4")
    for call in (
        lambda: comm.gather([tensor, array]),
        lambda: comm.reduce_add([array, tensor]),
        lambda: comm.broadcast(tensor, out=[cupy.empty(3, "f4")]),
    ):
        with pytest.raises(ncclcomm.ArgumentError, match="can't be mixed on GPUs"):
            call()


def test_streams_and_events_of_pytorch(torch: Any, backend: CudaBackend) -> None:
    theirs, ours, event = torch.cuda.Stream(0), ncclcomm.Stream(device=0), torch.cuda.Event()
    ours.wait_event(event)
    value = torch.zeros(1, device="cuda:0")
    torch.cuda.synchronize()
    with torch.cuda.stream(theirs):
        torch.cuda._sleep(_SPIN_CYCLES)
        value.fill_(1)
    ours.wait_stream(theirs)
    assert ours.record_event(event) is event
    assert not event.query()
    event.synchronize()
    assert theirs.query()
    with ncclcomm.stream(theirs):
        assert ncclcomm.current_stream(0).handle == theirs.cuda_stream
    assert comm.scatter(value, [0], streams=[theirs])[0].item() == 1
    done = ncclcomm.Event()
    done.record(theirs)
    done.synchronize()


def test_what_has_no_plain_memory(torch: Any, backend: CudaBackend) -> None:
    for tensor in (
        torch.ones(2, dtype=torch.complex64, device="cuda:0").conj(),
        torch.eye(2, device="cuda:0").to_sparse(),
        torch.ones(2, device="cuda:0", requires_grad=True),
    ):
        with pytest.raises(ncclcomm.UnsupportedError):
            comm.broadcast(tensor, [0])


def test_what_comes_by_the_interface_or_by_dlpack(torch: Any, backend: CudaBackend, gpus: int) -> None:
    import cupy

    class Exporter:
        def __init__(self, array: Any) -> None:
            self.array = array

        def __dlpack__(self, **kwargs: Any) -> Any:
            return self.array.__dlpack__(**kwargs)

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

    class Interface:
        def __init__(self, array: Any) -> None:
            self.__cuda_array_interface__ = array.__cuda_array_interface__

    array = cupy.arange(5)
    for given in (Exporter(array), Interface(array)):
        copy = comm.broadcast(given, [gpus - 1])[0]
        assert gpus == 1 or type(copy) is cupy.ndarray
        assert_same_bits(ncclcomm.to_numpy(copy), np.arange(5))
    with pytest.raises(ncclcomm.ArgumentError, match="whether its memory on the GPU may be written to"):
        comm.broadcast(np.arange(5), out=[Exporter(array)])
    comm.broadcast(np.arange(5) + 1, out=[Interface(array)])
    assert_same_bits(ncclcomm.to_numpy(array), np.arange(5) + 1)


def test_a_world_of_one(torch: Any, backend: CudaBackend) -> None:
    side = torch.cuda.Stream(0)
    tensor = torch.zeros(1000, device="cuda:0")
    torch.cuda.synchronize()
    with ncclcomm.Communicator() as world, torch.cuda.stream(side):
        torch.cuda._sleep(_SPIN_CYCLES)
        tensor.fill_(2)
        results = [world.all_reduce(tensor), world.gather(tensor), world.scatter(tensor), world.broadcast(tensor)]
        assert results.pop() is tensor
        for result in results:
            assert type(result) is torch.Tensor
            assert float(result.sum()) == 2000
