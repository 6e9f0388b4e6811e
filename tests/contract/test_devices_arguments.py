"""Device arguments: what names a device, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ncclcomm.devices import (
    Stream,
    current_device,
    current_stream,
    default_stream,
    device,
    device_count,
    resolve_device,
    set_device,
    synchronize,
)
from ncclcomm.devices.base import DeviceBackend
from ncclcomm.devices.index import is_host_memory
from ncclcomm.errors import ArgumentError

pytestmark = pytest.mark.usefixtures("backend")


def _named(backend: DeviceBackend) -> list[Any]:
    """Device 1, named in every way."""
    return [
        1,
        np.int32(1),
        np.uint8(1),
        "cuda:1",
        f"{backend.name}:1",
        SimpleNamespace(type="cuda", index=1),
        SimpleNamespace(id=1),
        backend.empty((1,), np.uint8, 1).device,
        device(1),
        device("cuda:1"),
    ]


def test_ways_to_name_a_device(backend: DeviceBackend) -> None:
    for value in _named(backend):
        assert resolve_device(value) == 1
        assert Stream(value).device == 1
        assert current_stream(value) == default_stream(value)
        synchronize(value)
        with device(value):
            assert current_device() == 1
        set_device(value)
        assert current_device() == 1
        set_device(0)


def test_no_number_means_the_current_device(backend: DeviceBackend) -> None:
    with device(1):
        for value in (None, -1, -7, "cuda", backend.name, SimpleNamespace(type="cuda", index=None), device(-1)):
            assert resolve_device(value, optional=True) == 1
            with pytest.raises(ArgumentError, match="no particular device"):
                resolve_device(value)


@pytest.mark.parametrize(
    "value",
    [
        True,
        False,
        np.True_,
        1.0,
        "1",
        "cuda:",
        "cuda:-1",
        "cuda:x",
        "cpu",
        "gpu:0",
        "",
        [0],
        (0,),
        b"cuda:0",
        {},
        np.zeros(1),
    ]
    + [SimpleNamespace(type="cpu", index=None), SimpleNamespace(id="0"), SimpleNamespace(id=True)],
)
def test_not_a_device(value: Any) -> None:
    for call in (resolve_device, device, set_device, Stream, current_stream, default_stream, synchronize):
        with pytest.raises(ArgumentError, match="is not a device"):
            call(value)
    assert current_device() == 0


@pytest.mark.parametrize("far", [0, 96])
def test_out_of_range(backend: DeviceBackend, far: int) -> None:
    count = device_count()
    for call in (resolve_device, device, set_device, Stream, current_stream, default_stream, synchronize):
        for value in (count + far, f"cuda:{count + far}", np.int64(count + far)):
            with pytest.raises(ArgumentError, match=f"device {count + far} is not there.*{count} device") as caught:
                call(value)
            if backend.name == "host":
                assert f"NCCLCOMM_DEVICES=host:{count + far + 1}" in str(caught.value)


def test_both_names_of_the_argument() -> None:
    for block in (device(1), device(idx=1), device(device=1)):
        with block:
            assert current_device() == 1
    with device(1), device(device=None), device(idx=-1):
        assert current_device() == 1
    for wrong in ({}, {"idx": 1, "device": 1}, {"idx": None, "device": None}):
        with pytest.raises(ArgumentError, match="pass one device"):
            device(**wrong)


def test_host_memory() -> None:
    named: list[Any] = ["cpu", "cpu:0", "cpu:12", -1, np.int64(-1), SimpleNamespace(type="cpu", index=0)]
    others: list[Any] = [
        "cpu:",
        "cpu:x",
        "cpu:-1",
        "cpus",
        "",
        "cuda:0",
        "cuda",
        0,
        -2,
        None,
        SimpleNamespace(type="cuda"),
    ]
    assert [is_host_memory(value) for value in named] == [True] * len(named)
    assert [is_host_memory(value) for value in others] == [False] * len(others)


def test_set_device_needs_one() -> None:
    with pytest.raises(ArgumentError, match="no particular device"):
        set_device(None)
