"""The doctor's lines on GPUs, from facts and from stand-ins for what a machine with GPUs would tell."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ncclcomm.devices import cuda_facts
from ncclcomm.devices.host import HostBackend
from ncclcomm.devices.registry import use_backend
from ncclcomm.doctor.check_devices import check_devices
from ncclcomm.doctor.facts import RankFacts, gather_facts
from ncclcomm.doctor.findings import Findings
from ncclcomm.doctor.lines import Line
from ncclcomm.doctor.trials import try_devices, try_ways
from ncclcomm.errors import DeviceError


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
    ways = {"ways": {"bad": [], "indirect": []}}
    lines = lines_of(gpu_rank(0), gpu_rank(1), trials=[ways, {"ways": None}])
    assert {line.status for line in lines.values()} == {"pass"}
    assert lines["gpu.driver"].found == "NVIDIA driver 570.86 (CUDA 12.8)"
    assert lines["gpu.cupy"].found == "CuPy 14.2.0 for CUDA 12.8"
    assert lines["gpu.nccl"].found == "NCCL 2.28.7"
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
        return lines_of(gpu_rank(0), trials=[{"ways": {"bad": bad, "indirect": indirect}}])["devices.ways"]

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


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for CuPy's runtime with two GPUs that reach each other one way."""
    fake = SimpleNamespace(
        driverGetVersion=lambda: 13010,
        runtimeGetVersion=lambda: 12080,
        getDeviceCount=lambda: 2,
        getDeviceProperties=lambda device: {"name": f"GPU {device}".encode()},
        deviceCanAccessPeer=lambda device, peer: int(device < peer),
    )
    cupy, cuda, nccl = ModuleType("cupy"), ModuleType("cupy.cuda"), ModuleType("ncclcomm.transport.nccl")
    cupy.__dict__["cuda"], cuda.__dict__["runtime"], nccl.__dict__["version"] = cuda, fake, lambda: 22807
    for module in (cupy, cuda, nccl):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("ncclcomm.transport.nccl", nccl, raising=False)
    return fake


def test_cuda_facts(runtime: SimpleNamespace) -> None:
    assert cuda_facts.versions() == {"driver": "13.1", "runtime": "12.8"}
    assert cuda_facts.device_names() == ["GPU 0", "GPU 1"]
    assert cuda_facts.peer_access(0, 1)
    assert not cuda_facts.peer_access(1, 0)

    def refuse(*_: object) -> int:
        raise RuntimeError("cudaErrorInvalidDevice")

    runtime.deviceCanAccessPeer = refuse
    with pytest.raises(DeviceError, match="cudaErrorInvalidDevice"):
        cuda_facts.peer_access(0, 9)


@pytest.mark.usefixtures("runtime")
def test_facts_of_a_process_with_gpus() -> None:
    backend = HostBackend(2, immediate=True)
    backend.name = "cuda"
    with use_backend(backend):
        facts = gather_facts()
    assert facts.backend == "cuda"
    assert [device["name"] for device in facts.devices] == ["GPU 0", "GPU 1"]
    assert len({device["uuid"] for device in facts.devices}) == 2
    assert facts.cuda == {"driver": "13.1", "runtime": "12.8"}
    assert facts.nccl == 22807
    assert RankFacts.from_json(facts.to_json()) == facts
