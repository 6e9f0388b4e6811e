"""Calls over the devices of one process with arrays of other libraries in host memory, and in a world of one."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import ncclcomm
from contract.array_samples import assert_same_bits, host_backend, sample  # noqa: F401
from contract.foreign_arrays import Array
from flavours import missing
from ncclcomm import comm
from ncclcomm.devices.host_array import HostArray

pytestmark = pytest.mark.usefixtures("host_backend")


@pytest.fixture(scope="module")
def torch() -> Any:
    """PyTorch."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch
    except ModuleNotFoundError:
        missing("torch", "no PyTorch here; pip install torch (a build for the CPU will do)", ci_has_it=False)
    return torch


def test_from_a_tensor_to_virtual_devices(torch: Any) -> None:
    values = sample("f4", (5, 2), 1)
    tensor = torch.from_numpy(values.copy())
    for index, copy in enumerate(comm.broadcast(tensor, range(3))):
        assert (type(copy), ncclcomm.device_index(copy)) == (HostArray, index)
        assert_same_bits(ncclcomm.to_numpy(copy), values)
    parts = comm.scatter(tensor, range(3), chunk_sizes=[1, 3, 1])
    assert [type(part) for part in parts] == [HostArray] * 3
    assert_same_bits(comm.gather(parts, destination="cpu"), values)
    copies = comm.broadcast_coalesced([tensor, tensor.T], [1, 2])
    assert_same_bits(ncclcomm.to_numpy(copies[1][1]), np.ascontiguousarray(values.T))


def test_a_tensor_is_filled(torch: Any) -> None:
    values = sample("f4", (4, 2), 2)
    parts = comm.scatter(values, range(4))
    out = torch.zeros(4, 2)
    assert comm.gather(parts, out=out) is out
    assert_same_bits(out.numpy(), values)
    strided = torch.zeros(2, 4).T
    comm.gather(parts, out=strided)
    assert_same_bits(strided.numpy().copy(order="C"), values)


def test_tensors_are_no_arrays_of_devices(torch: Any) -> None:
    for call in (comm.gather, comm.reduce_add, comm.all_reduce):
        with pytest.raises(ncclcomm.ArgumentError, match=r"\[0\] is in host memory; expected an array of a device"):
            call([torch.ones(2), torch.ones(2)])


def test_a_world_of_one(torch: Any) -> None:
    tensor = torch.arange(4.0)
    with ncclcomm.Communicator() as world:
        for result in (
            world.all_reduce(tensor),
            world.reduce(tensor, op="avg"),
            world.gather(tensor),
            world.scatter(tensor),
            world.broadcast(tensor),
        ):
            assert type(result) is torch.Tensor
            assert result.tolist() == [0, 1, 2, 3]
        assert world.broadcast(tensor) is tensor
        assert type(world.gather(torch.ones(()))) is torch.Tensor
        with torch.no_grad():
            assert type(world.all_reduce(torch.nn.Parameter(tensor))) is torch.Tensor


def test_an_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ModuleType("arrays_of_a_test")
    made.from_dlpack = lambda array: Array(np.array(np.from_dlpack(array)))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, made.__name__, made)
    values = np.arange(6.0)
    parts = comm.scatter(Array(values), range(2))
    assert_same_bits(comm.gather(parts, destination="cpu"), values)
    with ncclcomm.Communicator() as world:
        for result in (world.all_reduce(Array(values)), world.gather(Array(values)), world.scatter(Array(values))):
            assert type(result) is Array
            assert_same_bits(result.array, values)
