"""Lines on devices: driver, CuPy, NCCL, which rank has which, and the ways between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ncclcomm.doctor.facts import RankFacts
from ncclcomm.doctor.findings import Findings, by_value, on_ranks
from ncclcomm.doctor.lines import Line, failed, not_checked, passed, warned

__all__ = ["check_devices"]

_INSTALL = "pip install 'ncclcomm[cuda13]' (or 'ncclcomm[cuda12]', by the driver)"

_MOST_NAMED = 8
"""Ranks, or ways between devices, that one line names."""


def check_devices(found: Findings) -> list[Line]:
    """All lines on devices."""
    return [
        _backend(found),
        _driver(found),
        _cupy(found),
        _nccl(found),
        _kernels(found),
        _devices(found),
        _shared(found),
        _ways(found),
    ]


def _backend(found: Findings) -> Line:
    """Is the backend the one that is wanted, and the same everywhere?"""
    name = "devices.backend"
    if any(fact.settings_error for fact in found.ranks):
        return not_checked(name, "a NCCLCOMM_ variable makes no sense (see settings.values)")
    broken = [(error, facts) for error, facts in by_value(found.ranks, lambda fact: fact.backend_error) if error]
    if broken:
        error, members = broken[0]
        mend = "NCCLCOMM_DEVICES=host runs without GPUs"
        return failed(name, f"{on_ranks(members)}: {error}", mend)
    groups = by_value(found.ranks, lambda fact: fact.backend)
    if len(groups) > 1:
        told = "; ".join(f"{on_ranks(members)}: {backend}" for backend, members in groups)
        return failed(name, f"ranks have different backends: {told}", "NCCLCOMM_DEVICES=host, or GPUs on every rank")
    here = found.here
    if here.backend == "cuda":
        return passed(name, "GPUs, through CuPy")
    chosen = here.variables.get("NCCLCOMM_DEVICES", "").startswith("host")
    if here.driver and not chosen:
        return warned(
            name,
            f"virtual devices in host memory, though an NVIDIA driver ({here.driver}) is loaded: {here.gpu_reason}",
            f"{_INSTALL}; NCCLCOMM_DEVICES=host says that this is meant",
        )
    why = "as NCCLCOMM_DEVICES says" if chosen else here.gpu_reason
    return passed(name, f"virtual devices in host memory: {why}")


def _no_gpus(found: Findings) -> str:
    """Why lines on GPUs can't be written; '' where they can."""
    if all(fact.backend == "cuda" for fact in found.ranks):
        return ""
    return "no GPU is in use (see devices.backend)"


def _same_or(
    found: Findings, name: str, what: str, of: Callable[[RankFacts], object], judge: Callable[[str, str, str], Line]
) -> Line:
    """A line on a version that should be one."""
    groups = by_value(found.ranks, of)
    if len(groups) == 1:
        return passed(name, f"{what} {groups[0][0]}")
    told = "; ".join(f"{on_ranks(members)}: {version or 'none'}" for version, members in groups)
    return judge(name, f"{what} differs: {told}", "install the same one for all ranks")


def _driver(found: Findings) -> Line:
    """Is the driver there and new enough?"""
    name = "gpu.driver"
    if reason := _no_gpus(found):
        return not_checked(name, reason)

    def words(fact: RankFacts) -> str:
        return f"{fact.driver or 'of unknown version'} (CUDA {fact.cuda.get('driver', '?')})"

    return _same_or(found, name, "NVIDIA driver", words, warned)


def _cupy(found: Findings) -> Line:
    """Is it one CuPy?"""
    if reason := _no_gpus(found):
        return not_checked("gpu.cupy", reason)

    def words(fact: RankFacts) -> str:
        return f"{fact.cupy or 'of unknown version'} for CUDA {fact.cuda.get('runtime', '?')}"

    return _same_or(found, "gpu.cupy", "CuPy", words, failed)


def _nccl(found: Findings) -> Line:
    """Is there one NCCL?"""
    name = "gpu.nccl"
    if reason := _no_gpus(found):
        return not_checked(name, reason)
    lacking = [fact for fact in found.ranks if not fact.nccl]
    if lacking:
        mend = "pip install nvidia-nccl-cu13 (or nvidia-nccl-cu12, by CuPy's CUDA)"
        return failed(name, f"{on_ranks(lacking)} can't use NCCL: {lacking[0].nccl_error}", mend)
    return _same_or(found, name, "NCCL", lambda fact: _dotted(fact.nccl), failed)


def _dotted(version: int) -> str:
    """NCCL's number, 22807 or the 2708 of before 2.9, as 2.28.7."""
    base = 10000 if version >= 10000 else 1000
    return f"{version // base}.{version % base // 100}.{version % 100}"


def _kernels(found: Findings) -> Line:
    """Has CuPy what it compiles its kernels with, NVRTC and CUDA's headers?"""
    name = "gpu.kernels"
    if reason := _no_gpus(found):
        return not_checked(name, reason)
    if found.trials is None:
        return not_checked(name, found.no_trials)
    tried = {fact.rank: told["kernel"] for fact, told in zip(found.ranks, found.trials, strict=True) if told["kernel"]}
    if not tried:
        return not_checked(name, "ncclcomm.init failed")
    ranks = [fact for fact in found.ranks if fact.rank in tried]
    for error, members in by_value(ranks, lambda fact: tried[fact.rank]["error"]):
        if error:
            text = f"{on_ranks(members)} can't compile and run a kernel of CuPy's: {error}"
            return failed(name, text, _kernel_mend(members[0], tried[members[0].rank]))
    versions = dict.fromkeys(kernel["nvrtc"] for kernel in tried.values())
    return passed(name, f"CuPy compiles and runs a kernel, by NVRTC {' and '.join(versions)}")


def _kernel_mend(fact: RankFacts, kernel: dict[str, Any]) -> str:
    """What to type where no kernel can be compiled."""
    if kernel["is_file_error"]:
        return "CUPY_CACHE_DIR=... names a folder that can be written, CUPY_CACHE_IN_MEMORY=1 needs none"
    if fact.cuda.get("runtime", "").startswith("12."):
        return "pip install -U nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12"
    return "pip install -U 'nvidia-cuda-nvrtc==13.*' 'nvidia-cuda-runtime==13.*'"


def _devices(found: Findings) -> Line:
    """Has every rank a device?"""
    name = "devices.ranks"
    if any(fact.backend_error for fact in found.ranks):
        return not_checked(name, "a rank has no backend")
    if found.missing:
        return not_checked(name, "not all ranks answered")
    here = found.here
    if here.backend == "host":
        return passed(name, f"{len(here.devices)} virtual devices on each rank, shared by the ranks of a node")
    for node, ranks in enumerate(found.topology.ranks_of):
        counts = [len(found.ranks[r].devices) for r in ranks]
        if 1 < min(counts) < len(ranks) and not here.share_devices:
            return failed(
                name,
                f"node {node} has {len(ranks)} ranks and {min(counts)} visible GPUs",
                f"start {min(counts)} ranks a node, or NCCLCOMM_SHARE_DEVICES=1 lets ranks share GPUs (slower)",
            )
    told = "; ".join(
        f"rank {fact.rank}: device {found.device_of(index)} of {len(fact.devices)} ({fact.devices[0]['name']})"
        for index, fact in enumerate(found.ranks[:_MOST_NAMED])
    )
    return passed(name, told + ("; ..." if len(found.ranks) > _MOST_NAMED else ""))


def _shared(found: Findings) -> Line:
    """Do two ranks have one GPU?"""
    name = "devices.shared"
    if reason := _no_gpus(found):
        return not_checked(name, reason)
    if found.missing:
        return not_checked(name, "not all ranks answered")
    users: dict[str, list[RankFacts]] = {}
    for index, fact in enumerate(found.ranks):
        users.setdefault(fact.devices[found.device_of(index)]["uuid"], []).append(fact)
    shared = "; ".join(f"{on_ranks(facts)} have the GPU {uuid}" for uuid, facts in users.items() if len(facts) > 1)
    if not shared:
        return passed(name, "every rank has a GPU of its own")
    if found.here.share_devices:
        return warned(name, f"{shared}; their arrays go through host memory and MPI", "one rank a GPU is faster")
    return failed(
        name, shared, "one rank a GPU (srun --gpus-per-task=1, or fewer ranks a node); or NCCLCOMM_SHARE_DEVICES=1"
    )


def _ways(found: Findings) -> Line:
    """Do copies between a process's devices arrive?"""
    name = "devices.ways"
    tried = [(i, told["ways"]) for i, told in enumerate(found.trials or []) if told.get("ways")]
    if not tried:
        return not_checked(name, found.no_trials or "no process sees two devices")
    if bad := _named_ways(found, "bad"):
        return failed(
            name,
            f"a pattern arrived wrong between devices: {bad}",
            "turn the IOMMU and PCIe ACS off; until then NCCLCOMM_DEVICES=host goes on without GPUs",
        )
    if indirect := _named_ways(found, "indirect"):
        return warned(
            name,
            f"copies arrive, but go through host memory between {indirect}",
            "nvidia-smi topo -p2p r shows which GPUs reach each other",
        )
    count = len(found.ranks[tried[0][0]].devices)
    return passed(name, f"a pattern arrives each way between {count} devices")


def _named_ways(found: Findings, kind: str) -> str:
    """The ways between devices that are bad, or indirect, with who found them so; '' for none."""
    told = []
    for fact, trial in zip(found.ranks, found.trials or [], strict=False):
        ways = trial["ways"][kind] if trial["ways"] else []
        if ways:
            told.append(f"{on_ranks([fact])}: {', '.join(ways[:_MOST_NAMED])}{', ...' * (len(ways) > _MOST_NAMED)}")
    return "; ".join(told)
