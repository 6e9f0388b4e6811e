"""What device_of makes of arrays, tensors, storages and pointers, on devices that pass for GPUs and on virtual ones."""

from __future__ import annotations

import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ncclcomm.devices import current_device, device_of, set_device, use_backend
from ncclcomm.devices.host import HostBackend
from ncclcomm.errors import ArgumentError


class Gpus(HostBackend):
    """Virtual devices that pass for GPUs."""

    name = "cuda"


class Exported:
    """An array that has DLPack alone."""

    def __init__(self, kind: int, number: int) -> None:
        self._place = (kind, number)

    def __dlpack__(self, **_: Any) -> Any:
        """To be asked where it is must not export it."""
        raise AssertionError

    def __dlpack_device__(self) -> tuple[int, int]:
        """Where it is."""
        return self._place


class NumbaLike:
    """An array that has CUDA's interface alone, and no elements."""

    __cuda_array_interface__ = {"data": (0, False), "shape": (0,), "typestr": "<f4", "version": 3}


def _tensor(*, is_cuda: bool, number: int = 2) -> Any:
    """What tensors and storages of PyTorch have in common."""
    return SimpleNamespace(is_cuda=is_cuda, device=SimpleNamespace(type="cuda" if is_cuda else "cpu", index=number))


ON_GPU_2 = [Exported(2, 2), Exported(13, 2), _tensor(is_cuda=True), SimpleNamespace(device_id=2)]
IN_HOST_MEMORY = [
    Exported(1, 0),
    Exported(3, 0),
    _tensor(is_cuda=False),
    np.zeros(2),
    np.float32(1),
    b"bytes",
    bytearray(2),
    memoryview(b"bytes"),
    array.array("i", [1]),
]


@pytest.mark.parametrize("obj", ON_GPU_2)
def test_on_a_gpu(obj: Any) -> None:
    with use_backend(Gpus(3)), device_of(obj):
        assert current_device() == 2
    with use_backend(Gpus(2)), pytest.raises(ArgumentError, match="device 2 is not there"):
        device_of(obj)


@pytest.mark.parametrize("obj", [*ON_GPU_2, NumbaLike()])
def test_on_a_gpu_while_virtual_devices_are_in_use(obj: Any) -> None:
    with use_backend(HostBackend(3)), pytest.raises(ArgumentError, match=f"{type(obj).__name__} is in a GPU's memory"):
        device_of(obj)


@pytest.mark.parametrize("kind", [HostBackend, Gpus])
@pytest.mark.parametrize("obj", IN_HOST_MEMORY)
def test_in_host_memory(obj: Any, kind: type[HostBackend]) -> None:
    with use_backend(kind(2)):
        set_device(1)
        with device_of(obj):
            assert current_device() == 1


def test_on_a_device_of_another_kind() -> None:
    with use_backend(Gpus(2)), pytest.raises(ArgumentError, match="Exported is on a device .* number 8"):
        device_of(Exported(8, 0))


def test_storages_of_pytorch() -> None:
    torch = pytest.importorskip("torch")
    with use_backend(HostBackend(2)):
        set_device(1)
        for obj in (torch.ones(2), torch.ones(2, requires_grad=True), torch.ones(2).untyped_storage()):
            with device_of(obj):
                assert current_device() == 1
