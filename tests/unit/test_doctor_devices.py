"""The doctor's lines on GPUs: on a machine with GPUs as a stand-in for CUDA's runtime tells of it, and from facts."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ncclcomm.devices import cuda_facts
from ncclcomm.devices.host import HostBackend
from ncclcomm.devices.registry import use_backend
from ncclcomm.doctor.check_devices import check_devices
from ncclcomm.doctor.check_trials import check_trials
from ncclcomm.doctor.facts import RankFacts, gather_facts
from ncclcomm.doctor.findings import Findings
from ncclcomm.doctor.lines import Line
from ncclcomm.doctor.trials import _try_own_devices, try_devices, try_kernel, try_ways
from ncclcomm.errors import BackendUnavailableError, DeviceError


def gpu_rank(rank: int, **changes: Any) -> RankFacts:
    """A rank of a node with two GPUs."""
    devices = [{"name": "NVIDIA H200", "uuid": "a0"}, {"name": "NVIDIA H200", "uuid": "a1"}]
    own = {
        "host": "n0",
        "backend": "cuda",
        "devices": devices,
        "driver": "570.86",
        "cupy": "14.2.0",
        "cuda": {"driver": "12.8", "runtime": "12.8"},
        "nccl": 22807,
        "variables": {},
    }
    return RankFacts(rank=rank, **{**own, **changes})


def lines_of(*ranks: RankFacts, **changes: Any) -> dict[str, Line]:
    """The lines on devices."""
    return {line.id: line for line in check_devices(Findings(list(ranks), size=len(ranks), **changes))}


def test_sound_gpus_pass() -> None:
    kernel = {"nvrtc": "12.9", "error": "", "is_file_error": False}
    trials = [{"ways": {"bad": [], "indirect": []}, "kernel": kernel}, {"ways": None, "kernel": kernel}]
    lines = lines_of(gpu_rank(0), gpu_rank(1), trials=trials)
    assert {line.status for line in lines.values()} == {"pass"}
    assert lines["gpu.driver"].found == "NVIDIA driver 570.86 (CUDA 12.8)"
    assert lines["gpu.cupy"].found == "CuPy 14.2.0 for CUDA 12.8"
    assert lines["gpu.nccl"].found == "NCCL 2.28.7"
    assert lines["gpu.kernels"].found == "CuPy compiles and runs a kernel, by NVRTC 12.9"
    assert "rank 1: device 1 of 2 (NVIDIA H200)" in lines["devices.ranks"].found


@pytest.mark.parametrize(
    ("name", "status", "changes", "words"),
    [
        ("gpu.driver", "warn", {"driver": "550.1"}, ("rank 1 on n0: 550.1", "rank 0 on n0: 570.86")),
        ("gpu.cupy", "fail", {"cupy": "13.4"}, ("rank 1 on n0: 13.4",)),
        ("gpu.nccl", "fail", {"nccl": 22602}, ("2.26.2", "2.28.7")),
        ("gpu.nccl", "fail", {"nccl": 0, "nccl_error": "CuPy can't load NCCL"}, ("rank 1", "CuPy can't load NCCL")),
        ("devices.backend", "fail", {"backend": "host"}, ("rank 0 on n0: cuda", "rank 1 on n0: host")),
        ("devices.backend", "fail", {"backend": "", "backend_error": "no driver"}, ("rank 1 on n0: no driver",)),
        ("devices.shared", "fail", {"devices": [{"name": "", "uuid": "a0"}]}, ("ranks 0-1 on n0", "GPU a0")),
    ],
)
def test_a_rank_that_differs(name: str, status: str, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    line = lines_of(gpu_rank(0), gpu_rank(1, **changes))[name]
    assert line.status == status, line
    assert line.mend
    for word in words:
        assert word in line.found


def test_more_ranks_than_gpus() -> None:
    ranks = [gpu_rank(rank) for rank in range(3)]
    lines = lines_of(*ranks)
    assert lines["devices.ranks"].status == "fail"
    assert "3 ranks and 2 visible GPUs" in lines["devices.ranks"].found
    shared = lines_of(*(gpu_rank(rank, share_devices=True) for rank in range(3)))
    assert shared["devices.ranks"].status == "pass"
    assert shared["devices.shared"].status == "warn"
    assert "ranks 0, 2" in shared["devices.shared"].found


def test_ranks_of_two_nodes_have_gpus_of_their_own() -> None:
    far = [{"name": "", "uuid": "b0"}, {"name": "", "uuid": "b1"}]
    ranks = [gpu_rank(0), gpu_rank(1), *(gpu_rank(r, host="n1", first_on_host=2, devices=far) for r in (2, 3))]
    assert lines_of(*ranks)["devices.shared"].status == "pass"


def test_ways_between_gpus() -> None:
    def line(bad: list[str], indirect: list[str]) -> Line:
        trial = {"ways": {"bad": bad, "indirect": indirect}, "kernel": None}
        return lines_of(gpu_rank(0), trials=[trial])["devices.ways"]

    assert line(["0 to 1"], []).status == "fail"
    assert "0 to 1" in line(["0 to 1"], []).found
    assert line([], ["1 to 0"]).status == "warn"
    assert "1 to 0" in line([], ["1 to 0"]).found


def test_a_driver_without_cupy_is_a_warning_unless_the_host_backend_is_meant() -> None:
    def line(variables: dict[str, str]) -> Line:
        rank = RankFacts(backend="host", driver="570.86", gpu_reason="CuPy is not installed", variables=variables)
        return {line.id: line for line in check_devices(Findings([rank]))}["devices.backend"]

    assert line({}).status == "warn"
    assert "pip install" in line({}).mend
    assert line({"NCCLCOMM_DEVICES": "host:2"}).status == "pass"


class Corrupting(HostBackend):
    """Virtual devices between which one way and one sum go wrong."""

    def copy(self, dst: Any, src: Any, stream: Any) -> None:
        super().copy(dst, src, stream)

        def spoil() -> None:
            # Only once the copy is done is it known whether this is the pattern for device 2.
            if dst.size == 1 << 16 and dst.flat[0] == (31 * 2) % 251:
                dst.flat[9] = 0

        if stream.device == 2:
            stream.launch(spoil)

    def reduce(self, out: Any, arrays: list[Any], op: str, stream: Any) -> None:
        super().reduce(out, arrays, op, stream)
        stream.launch(out.__setitem__, 4, 0)


def test_trials_find_a_backend_that_copies_or_sums_wrongly() -> None:
    with use_backend(HostBackend(3, immediate=False)) as sound:
        assert try_ways(sound, range(3)) == []
        trial = try_devices(sound, range(3))
        assert not trial["error"]
        assert trial["all_reduce"]["wrong"] == trial["broadcast"]["wrong"] == []
        assert trial["all_reduce"]["seconds"] > 0
    with use_backend(Corrupting(3, immediate=False)) as corrupting:
        assert try_ways(corrupting, range(3)) == ["0 to 2", "1 to 2"]
        assert try_devices(corrupting, range(3))["all_reduce"]["wrong"] == ["device 0", "device 1", "device 2"]


def test_a_backend_that_raises_is_told() -> None:
    class Refusing(HostBackend):
        def copy(self, dst: Any, src: Any, stream: Any) -> None:
            raise DeviceError("cudaErrorIllegalAddress", code=700)

    with use_backend(Refusing(2, immediate=False)) as refusing:
        assert "cudaErrorIllegalAddress" in try_ways(refusing, range(2))[0]
        assert "cudaErrorIllegalAddress" in try_devices(refusing, range(2))["error"]


class DynamicLibNotFoundError(RuntimeError):
    """In the place of cuda.pathfinder's."""


class Kernel:
    """In the place of cupy.ElementwiseKernel: doubles on the host what lies on a virtual device."""

    def __init__(self, inputs: str, outputs: str, text: str, name: str) -> None:
        assert (inputs, outputs, text) == ("float16 x", "float16 y", "y = x + x")
        assert name.isidentifier()

    def __call__(self, array: Any) -> Any:
        return array + array


class Posing(HostBackend):
    """Virtual devices that pass for GPUs."""

    name = "cuda"

    def __init__(self, count: int = 2) -> None:
        super().__init__(count, immediate=True)

    def array_namespace(self) -> Any:
        return sys.modules["cupy"]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for CuPy, its runtime and NCCL, on a machine whose two GPUs reach each other one way."""
    runtime = SimpleNamespace(
        driverGetVersion=lambda: 13010,
        runtimeGetVersion=lambda: 12080,
        getDeviceCount=lambda: 2,
        getDeviceProperties=lambda device: {"name": f"GPU {device}".encode()},
        deviceCanAccessPeer=lambda device, peer: int(device < peer),
    )
    cupy, module, nccl = ModuleType("cupy"), ModuleType("cupy.cuda"), ModuleType("ncclcomm.transport.nccl")
    nvrtc = SimpleNamespace(getVersion=lambda: (12, 9))
    cupy.__dict__.update(cuda=module, ElementwiseKernel=Kernel, ndarray=type("ndarray", (), {}))
    module.__dict__.update(runtime=runtime, nvrtc=nvrtc)
    nccl.__dict__["version"] = lambda: 22807
    for each in (cupy, module, nccl):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    monkeypatch.setattr("ncclcomm.transport.nccl", nccl, raising=False)
    return SimpleNamespace(cupy=cupy, runtime=runtime, nvrtc=nvrtc, nccl=nccl)


def told_by(rank: int, devices: int = 2) -> RankFacts:
    """What a rank finds out on that machine, as it comes to rank 0."""
    with use_backend(Posing(devices)):
        facts = gather_facts()
    facts.rank, facts.host = rank, "n0"
    return RankFacts.from_json(facts.to_json())


def kernel_tried() -> dict[str, Any] | None:
    """What the trial of the compiler gives on that machine."""
    with use_backend(Posing()) as backend:
        return try_kernel(backend)


def test_cuda_facts(cuda: SimpleNamespace) -> None:
    assert cuda_facts.versions() == {"driver": "13.1", "runtime": "12.8"}
    assert cuda_facts.device_names() == ["GPU 0", "GPU 1"]
    assert cuda_facts.peer_access(0, 1)
    assert not cuda_facts.peer_access(1, 0)

    def refuse(*_: object) -> int:
        raise RuntimeError("cudaErrorInvalidDevice")

    cuda.runtime.deviceCanAccessPeer = refuse
    with pytest.raises(DeviceError, match="cudaErrorInvalidDevice"):
        cuda_facts.peer_access(0, 9)


@pytest.mark.usefixtures("cuda")
def test_facts_of_a_process_with_gpus() -> None:
    facts = told_by(0)
    assert facts.backend == "cuda"
    assert [device["name"] for device in facts.devices] == ["GPU 0", "GPU 1"]
    assert len({device["uuid"] for device in facts.devices}) == 2
    assert facts.cuda == {"driver": "13.1", "runtime": "12.8"}
    assert facts.nccl == 22807


def test_drivers_that_differ(cuda: SimpleNamespace) -> None:
    first = told_by(0)
    cuda.runtime.driverGetVersion = lambda: 12040
    line = lines_of(first, told_by(1))["gpu.driver"]
    assert line.status == "warn", line
    assert "rank 0 on n0: " in line.found
    assert "(CUDA 12.4)" in line.found


def test_cupys_that_differ(cuda: SimpleNamespace) -> None:
    first = told_by(0)
    cuda.runtime.runtimeGetVersion = lambda: 13000
    line = lines_of(first, told_by(1))["gpu.cupy"]
    assert line.status == "fail", line
    assert "for CUDA 12.8; rank 1 on n0: " in line.found
    assert line.found.endswith("for CUDA 13.0")


def test_a_rank_whose_nccl_is_missing_or_another(cuda: SimpleNamespace) -> None:
    def missing() -> int:
        raise BackendUnavailableError("CuPy can't load NCCL")

    first = told_by(0)
    for version, words in ((lambda: 22602, "rank 1 on n0: 2.26.2"), (missing, "rank 1 on n0 can't use NCCL: CuPy")):
        cuda.nccl.version = version
        line = lines_of(first, told_by(1))["gpu.nccl"]
        assert line.status == "fail", line
        assert words in line.found
        assert line.mend


@pytest.mark.usefixtures("cuda")
def test_more_ranks_than_visible_gpus() -> None:
    line = lines_of(*(told_by(rank) for rank in range(3)))["devices.ranks"]
    assert line.status == "fail", line
    assert "3 ranks and 2 visible GPUs" in line.found
    assert "start 2 ranks a node" in line.mend


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(("allowed", "status"), [("0", "fail"), ("1", "warn")])
def test_ranks_that_see_the_same_gpu_alone(monkeypatch: pytest.MonkeyPatch, allowed: str, status: str) -> None:
    monkeypatch.setenv("NCCLCOMM_SHARE_DEVICES", allowed)
    ranks = [told_by(rank, devices=1) for rank in range(2)]
    line = lines_of(*ranks)["devices.shared"]
    assert line.status == status, line
    assert f"ranks 0-1 on n0 have the GPU {ranks[0].devices[0]['uuid']}" in line.found


@pytest.mark.usefixtures("cuda")
def test_gpus_that_reach_each_other_through_host_memory() -> None:
    told: dict[str, Any] = {"kernel": None}
    with use_backend(Posing()):
        _try_own_devices(told)
    line = lines_of(told_by(0), trials=[told])["devices.ways"]
    assert line.status == "warn", line
    assert "through host memory between rank 0 on n0: 1 to 0" in line.found
    assert told["devices"]["all_reduce"]["wrong"] == []


def test_a_kernel_is_compiled_and_run(cuda: SimpleNamespace) -> None:
    assert kernel_tried() == {"nvrtc": "12.9", "error": "", "is_file_error": False}
    second = {"nvrtc": "12.8", "error": "", "is_file_error": False}
    trials = [{"kernel": kernel, "ways": None} for kernel in (kernel_tried(), second)]
    line = lines_of(told_by(0), told_by(1), trials=trials)["gpu.kernels"]
    assert (line.status, line.found) == ("pass", "CuPy compiles and runs a kernel, by NVRTC 12.9 and 12.8")
    with use_backend(HostBackend(2, immediate=True)) as backend:
        assert try_kernel(backend) is None


NO_NVRTC = DynamicLibNotFoundError('Failure finding "libnvrtc.so.12":\n No such file')
NO_HEADERS = RuntimeError("Failed to find CUDA headers. Please install CUDA toolkit headers")
FULL_DISK = OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("fault", "words", "mend"),
    [
        (NO_NVRTC, 'DynamicLibNotFoundError: Failure finding "libnvrtc.so.12": No such file', "nvidia-cuda-nvrtc-cu12"),
        (NO_HEADERS, "RuntimeError: Failed to find CUDA headers", "nvidia-cuda-runtime-cu12"),
        (FULL_DISK, "OSError: [Errno 28] No space left on device", "CUPY_CACHE_DIR"),
        (None, "it gave wrong numbers", "pip install"),
    ],
    ids=["no NVRTC", "no headers", "no room for the kernel", "wrong numbers"],
)
def test_kernels_that_cannot_be_compiled(cuda: SimpleNamespace, fault: Exception | None, words: str, mend: str) -> None:
    sound = kernel_tried()

    class Failing(Kernel):
        def __call__(self, array: Any) -> Any:
            if fault is None:
                return super().__call__(array) + np.float16(1)
            raise fault

    def find_no_library() -> tuple[int, int]:
        raise NO_NVRTC

    if fault is NO_NVRTC:
        cuda.nvrtc.getVersion = find_no_library
    else:
        cuda.cupy.ElementwiseKernel = Failing
    told: dict[str, Any] = {"init_error": "", "node_ranks": None, "leaders": None, "devices": None}
    trials = [{**told, "ways": None, "kernel": kernel} for kernel in (sound, kernel_tried())]
    found = Findings([told_by(0), told_by(1)], size=2, trials=trials)
    line = {line.id: line for line in check_devices(found)}["gpu.kernels"]
    assert line.status == "fail", line
    assert f"rank 1 on n0 can't compile and run a kernel of CuPy's: {words}" in line.found
    assert mend in line.mend
    sums = {line.id: line for line in check_trials(found)}["trial.devices"]
    assert (sums.status, sums.found) == ("not checked", "kernels can't be compiled (see gpu.kernels)")


def test_the_compiler_of_cuda_13_has_names_of_its_own(cuda: SimpleNamespace) -> None:
    cuda.runtime.runtimeGetVersion = lambda: 13010
    trial = {"kernel": {"nvrtc": "", "error": "no NVRTC", "is_file_error": False}, "ways": None}
    line = lines_of(told_by(0), trials=[trial])["gpu.kernels"]
    assert line.mend == "pip install -U 'nvidia-cuda-nvrtc==13.*' 'nvidia-cuda-runtime==13.*'"


def test_without_a_kernel_no_sums_are_tried(cuda: SimpleNamespace) -> None:
    told: dict[str, Any] = {"kernel": {"nvrtc": "", "error": "no NVRTC"}, "devices": None}
    cuda.runtime.deviceCanAccessPeer = lambda device, peer: 1
    with use_backend(Posing()):
        _try_own_devices(told)
    assert told["ways"] == {"bad": [], "indirect": []}
    assert told["devices"] is None
