"""Which backend is chosen, and what the choice says when it can't be met."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ncclcomm import config
from ncclcomm.devices import (
    cuda,
    current_blas_handle,
    current_device,
    device_count,
    is_available,
    registry,
    use_backend,
)
from ncclcomm.devices.base import DeviceBackend
from ncclcomm.devices.host import HostBackend
from ncclcomm.errors import ArgumentError, BackendUnavailableError

DEADLINE_S = 30.0


class Fake(HostBackend):
    """Stands for the CUDA backend, where only the choice matters."""

    name = "cuda"

    def __init__(self) -> None:
        super().__init__(2)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No backend is chosen, no variable is set, and CuPy is not there."""
    monkeypatch.setattr(registry, "_backend", None)
    for name in (
        "NCCLCOMM_DEVICES",
        "NCCLCOMM_HOST_STREAMS",
        "SLURM_STEP_GPUS",
        "SLURM_JOB_GPUS",
        "SLURM_GPUS_ON_NODE",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(cuda, "CudaBackend", Fake, raising=False)


def _cupy(monkeypatch: pytest.MonkeyPatch, count: int | Exception, driver: int = 12040) -> None:
    """Put a CuPy in place whose runtime counts so many devices, or fails so."""

    def get_device_count() -> int:
        if isinstance(count, Exception):
            raise count
        return count

    runtime = SimpleNamespace(
        getDeviceCount=get_device_count, driverGetVersion=lambda: driver, runtimeGetVersion=lambda: 13000
    )
    package, part = ModuleType("cupy"), ModuleType("cupy.cuda")
    part.runtime = runtime  # type: ignore[attr-defined]
    package.cuda = part  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", package)
    monkeypatch.setitem(sys.modules, "cupy.cuda", part)


def test_host_is_the_default_without_cupy() -> None:
    chosen = registry.current_backend()
    assert (chosen.name, chosen.device_count(), chosen.immediate) == ("host", config.DEFAULT_HOST_DEVICES, True)
    assert registry.current_backend() is chosen


def test_host_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCLCOMM_DEVICES", "host:7")
    monkeypatch.setenv("NCCLCOMM_HOST_STREAMS", "async")
    _cupy(monkeypatch, 2)
    assert (device_count(), registry.current_backend().immediate, is_available()) == (7, False, False)


@pytest.mark.parametrize("asked", ["auto", "cuda", ""])
def test_gpus_are_taken_where_there_are_some(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv("NCCLCOMM_DEVICES", asked)
    _cupy(monkeypatch, 2)
    assert isinstance(registry.current_backend(), Fake)
    assert is_available()


NO_DRIVER = RuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient")
NO_DEVICE = RuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")


@pytest.mark.parametrize(
    ("count", "driver", "words"),
    [
        (0, 12040, "CUDA_VISIBLE_DEVICES"),
        (NO_DEVICE, 12040, "CUDA_VISIBLE_DEVICES"),
        (NO_DRIVER, 0, "no NVIDIA driver"),
        (NO_DRIVER, 12040, r"too old.*12\.4.*13\.0"),
        (RuntimeError("cudaErrorUnknown: unknown error"), 12040, "cudaErrorUnknown"),
    ],
)
def test_reasons(monkeypatch: pytest.MonkeyPatch, count: Any, driver: int, words: str) -> None:
    _cupy(monkeypatch, count, driver)
    number, reason = cuda.probe()
    assert number == 0
    monkeypatch.setenv("NCCLCOMM_DEVICES", "cuda")
    with pytest.raises(BackendUnavailableError, match=f"NCCLCOMM_DEVICES=cuda.*{words}") as caught:
        registry.current_backend()
    assert reason in str(caught.value)
    if isinstance(count, Exception):
        assert caught.value.__cause__ is not None
        assert caught.value.__cause__.__cause__ is count


def test_reason_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    number, reason = cuda.probe()
    assert number == 0
    for command in ("pip install 'ncclcomm[cuda13]'", "pip install 'ncclcomm[cuda12]'"):
        assert command in reason
    monkeypatch.setenv("NCCLCOMM_DEVICES", "cuda")
    with pytest.raises(BackendUnavailableError, match="CuPy is not installed"):
        device_count()
    assert not is_available()


def test_cupy_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("libcuda is of another world")

    monkeypatch.setitem(sys.modules, "cupy", Broken("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", Broken("cupy.cuda"))
    assert "another world" in cuda.probe()[1]


@pytest.mark.parametrize("name", ["SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE"])
def test_gpus_of_slurm_are_never_replaced_silently(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "2")
    with pytest.raises(BackendUnavailableError, match=f"{name}=2.*CuPy is not installed.*NCCLCOMM_DEVICES=host"):
        registry.current_backend()
    assert not is_available()
    monkeypatch.setenv("NCCLCOMM_DEVICES", "host")
    assert device_count() == config.DEFAULT_HOST_DEVICES


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, ""),
        ({"SLURM_JOB_GPUS": " "}, ""),
        ({"SLURM_GPUS_ON_NODE": "0"}, ""),
        ({"SLURM_JOB_GPUS": "0"}, "SLURM_JOB_GPUS=0"),
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_STEP_GPUS": "1,3"}, "SLURM_STEP_GPUS=1,3"),
    ],
)
def test_slurm_gpus(environ: dict[str, str], found: str) -> None:
    assert config.slurm_gpus(environ) == found


def test_is_available_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCLCOMM_DEVICES", "tpu")
    assert not is_available()
    with pytest.raises(ArgumentError, match="NCCLCOMM_DEVICES='tpu'"):
        device_count()


def test_chosen_once_among_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(8)

    def choose() -> DeviceBackend:
        together.wait(DEADLINE_S)
        return registry.current_backend()

    with ThreadPoolExecutor(8) as pool:
        chosen = list(pool.map(lambda _: choose(), range(8)))
    assert len({id(backend) for backend in chosen}) == 1


def _fail_under(backend: DeviceBackend) -> None:
    """Leave the block of a backend of three devices by an exception."""
    with use_backend(backend):
        assert device_count() == 3
        raise KeyError("inside")


def test_use_backend_is_for_every_thread_and_restores() -> None:
    before, mine, other = registry.current_backend(), HostBackend(2), HostBackend(3)
    with use_backend(mine) as given, ThreadPoolExecutor(1) as pool:
        assert given is mine
        assert pool.submit(device_count).result(DEADLINE_S) == 2
        with pytest.raises(KeyError, match="inside"):
            _fail_under(other)
        assert registry.current_backend() is mine
    assert registry.current_backend() is before


def test_blas_handle_of_the_host() -> None:
    with use_backend(HostBackend(1)), pytest.raises(BackendUnavailableError, match="no cuBLAS"):
        current_blas_handle()
    assert current_device() == 0


def test_fork_after_counting() -> None:
    code = (
        "import os, ncclcomm.devices as d; counted = d.device_count(); pid = os.fork()\n"
        "if pid == 0:\n"
        "    d.Stream(device=1).synchronize(); os._exit(d.device_count())\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != counted)"
    )
    environ = {**os.environ, "NCCLCOMM_DEVICES": "host:5"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0


def test_import_brings_no_cupy_and_no_mpi() -> None:
    code = (
        "import sys, ncclcomm.devices as d; "
        "sys.exit(any(name.partition('.')[0] in ('cupy', 'mpi4py', 'torch') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=DEADLINE_S, check=False).returncode == 0
