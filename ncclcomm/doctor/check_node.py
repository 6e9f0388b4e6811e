"""Lines on what a host gives its ranks: shared memory, each other's memory, locked memory, networks."""

from __future__ import annotations

from collections.abc import Iterator

from ncclcomm.doctor.facts import RankFacts
from ncclcomm.doctor.findings import Findings, by_value, on_ranks
from ncclcomm.doctor.lines import Line, failed, not_checked, passed, warned
from ncclcomm.doctor.network import named_interfaces
from ncclcomm.launcher.command import MPICH
from ncclcomm.topology import format_ranks

__all__ = ["check_node", "lacks_shared_memory", "shared_memory_mend"]

LEAST_SHM_BYTES = 64 << 20
"""What a container gets unless it asks for more; NCCL takes some 10 MiB for each pair of GPUs without direct access."""

RANK_SHM_BYTES = 2 << 20
"""What a rank's MPI takes at its start: 1.0 MiB MPICH 5, 1.6 MiB Intel MPI 2021, 0.2 MiB Open MPI 5."""

RDMA_LOCKED_BYTES = 64 << 20
"""Locked memory below which adapters that bypass the kernel fail to register buffers."""

_TO_TCP = {
    "FI_PROVIDER": ("tcp", "sockets", "net"),
    "UCX_TLS": ("tcp",),
    "OMPI_MCA_btl": ("tcp",),
    "I_MPI_OFI_PROVIDER": ("tcp", "sockets"),
}
"""Variables that may hold MPI to TCP, and by which words."""

_PAST_TCP = ("ib", "rc", "dc", "ud", "verbs", "cxi", "psm", "efa", "opx", "ofi", "all")
"""Words in these variables that allow more than TCP."""


def check_node(found: Findings) -> list[Line]:
    """All lines on hosts and networks."""
    return [_shared_memory(found), _neighbours(found), _locked_memory(found), _nccl_interface(found), _path(found)]


def lacks_shared_memory(fact: RankFacts, ranks: int = 1) -> str:
    """Why a rank's MPI can't start for want of shared memory; '' where it can.

    Args:
        fact: the rank.
        ranks: how many ranks share its host.
    """
    shm = fact.shm
    if shm.get("error"):
        return f"no shared memory: {shm['error']}"
    if shm.get("free_bytes", 0) < ranks * RANK_SHM_BYTES:
        return (
            f"/dev/shm has {_mib(shm.get('free_bytes', 0))} free of {_mib(shm.get('size_bytes', 0))}; "
            f"MPI takes up to {_mib(ranks * RANK_SHM_BYTES)} for {ranks} rank{'s' * (ranks != 1)}"
        )
    return ""


def shared_memory_mend(fact: RankFacts) -> str:
    """What to type where a rank lacks shared memory, or has little of it.

    Args:
        fact: the rank.
    """
    if fact.shm.get("error"):
        # Missing, read-only or another user's: a new one over it mends them all.
        return (
            "in a container: docker run --tmpfs /dev/shm:rw,mode=1777,size=1g; else, as root: "
            "mkdir -p /dev/shm && mount -t tmpfs -o mode=1777,size=1g tmpfs /dev/shm"
        )
    return "in a container: docker run --shm-size=1g (or --ipc=host); else, as root: mount -o remount,size=1g /dev/shm"


def _mib(nbytes: int) -> str:
    """A size in MiB, of three digits."""
    return f"{nbytes / (1 << 20):.3g} MiB" if nbytes < 1000 << 20 else f"{nbytes / (1 << 30):.3g} GiB"


def _shared_memory(found: Findings) -> Line:
    """Is /dev/shm large enough?"""
    name = "node.shm"
    hosts = [_emptiest(members) for _, members in by_value(found.ranks, lambda fact: fact.host)]
    for fact in hosts:
        if reason := lacks_shared_memory(fact, fact.ranks_on_host):
            leftovers = "; files of dead jobs there may be deleted" if fact.shm.get("size_bytes", 0) > 1 << 30 else ""
            return failed(name, f"{fact.host}: {reason}{leftovers}", shared_memory_mend(fact))
    least = min(hosts, key=lambda fact: int(fact.shm["free_bytes"]))
    text = f"/dev/shm has {_mib(least.shm['free_bytes'])} free of {_mib(least.shm['size_bytes'])} on {least.host}"
    if least.shm["free_bytes"] < LEAST_SHM_BYTES:
        wanted = f"Open MPI wants 16 MiB a rank, NCCL {_mib(LEAST_SHM_BYTES)} and more"
        return warned(name, f"{text}; {wanted}", shared_memory_mend(least))
    return passed(name, text)


def _emptiest(members: list[RankFacts]) -> RankFacts:
    """Of the ranks of a host the one that looked at /dev/shm before the others' MPI took some of it."""
    return max(members, key=lambda fact: (not fact.shm.get("error"), fact.shm.get("free_bytes", 0)))


def _neighbours(found: Findings) -> Line:
    """Can ranks read each other's memory?"""
    name = "node.process_vm_readv"
    if not found.readers:
        return not_checked(name, found.no_trials or "no host has two ranks")
    if not found.unreadable:
        return passed(name, "ranks of a node can read each other's memory")
    rank, reason = min(found.unreadable.items())
    scope = "" if found.yama_scope is None else f"; kernel.yama.ptrace_scope is {found.yama_scope}"
    text = (
        f"{format_ranks(list(found.unreadable))} can't read a neighbour's memory ({reason}, on "
        f"{found.ranks[rank].host}{scope})"
    )
    if found.yama_scope:
        mend = "as root: sysctl kernel.yama.ptrace_scope=0"
    else:
        mend = "in containers: --cap-add=SYS_PTRACE, and one container for all ranks of a host"
    if _mpich_reads_all_the_same(found):
        # MPICH 5 takes for granted that it may, and its large messages fail; other MPIs look first.
        mend = f"export MPIR_CVAR_CH4_CMA_ENABLE=0; or {mend}"
        return failed(name, f"{text}, which MPICH does for large messages", mend)
    return warned(name, f"{text}: MPI copies large messages twice", mend)


def _mpich_reads_all_the_same(found: Findings) -> bool:
    """True where MPICH's large messages within a node fail, or are to be expected to."""
    here = found.here
    if here.mpi_flavour != MPICH or here.variables.get("MPIR_CVAR_CH4_CMA_ENABLE") == "0":
        return False
    sent = [told["node_ranks"] for told in found.trials or [] if told["node_ranks"]]
    return not sent or any(trial["error"] for trial in sent)


def _locked_memory(found: Findings) -> Line:
    """Can memory be locked, where that is needed?"""
    name = "node.memlock"
    least = min(found.ranks, key=lambda fact: float("inf") if fact.memlock_bytes is None else fact.memlock_bytes)
    if least.memlock_bytes is None:
        return passed(name, "locked memory has no limit")
    text = f"{on_ranks([least])} may lock {_mib(least.memlock_bytes)}"
    if any(fact.rdma for fact in found.ranks) and least.memlock_bytes < RDMA_LOCKED_BYTES:
        mend = "ulimit -l unlimited; for good in /etc/security/limits.conf, under SLURM LimitMEMLOCK=infinity of slurmd"
        return warned(name, f"{text}, too little for an RDMA device ({_rdma(found)})", mend)
    return passed(name, f"{text}; {'enough' if any(fact.rdma for fact in found.ranks) else 'no RDMA device needs it'}")


def _rdma(found: Findings) -> str:
    """The RDMA devices, by host."""
    told = {fact.host: fact.rdma for fact in found.ranks if fact.rdma}
    return "; ".join(f"{', '.join(devices)} on {host}" for host, devices in list(told.items())[:4])


def _nccl_interface(found: Findings) -> Line:
    """Does NCCL_SOCKET_IFNAME name an interface?"""
    name = "network.nccl_interface"
    for fact in found.ranks:
        setting = fact.variables.get("NCCL_SOCKET_IFNAME", "").strip()
        if setting and not named_interfaces(setting, fact.interfaces):
            there = ", ".join(fact.interfaces)
            return failed(
                name,
                f"{on_ranks([fact])}: NCCL_SOCKET_IFNAME={setting} names no interface; there are {there}",
                f"unset NCCL_SOCKET_IFNAME, or export NCCL_SOCKET_IFNAME={_likely(fact)}",
            )
    setting = found.here.variables.get("NCCL_SOCKET_IFNAME", "").strip()
    there = ", ".join(f"{key} {' '.join(value)}".strip() for key, value in found.here.interfaces.items())
    if setting:
        return passed(name, f"NCCL_SOCKET_IFNAME={setting} fits on every host; {found.here.host} has {there}")
    return passed(name, f"NCCL_SOCKET_IFNAME is not set, NCCL chooses; {found.here.host} has {there}")


def _likely(fact: RankFacts) -> str:
    """The interface that is most likely meant: the first with an address that isn't the loopback one."""
    outward = [key for key, value in fact.interfaces.items() if value and not value[0].startswith("127.")]
    others = [key for key in fact.interfaces if key != "lo"]  # a host may have IPv6 addresses alone
    return (outward or others or ["lo"])[0]


def _path(found: Findings) -> Line:
    """Which way does MPI cross nodes?"""
    name = "network.path"
    if len(by_value(found.ranks, lambda fact: fact.first_on_host)) < 2:
        return not_checked(name, "all ranks are on one host")
    told = ", ".join(dict.fromkeys(f"{key}={value}" for fact in found.ranks for key, value in _choices(fact)))
    if not all(fact.rdma for fact in found.ranks):
        lacking = next(fact for fact in found.ranks if not fact.rdma)
        return passed(name, f"TCP: {lacking.host} has no RDMA device{'; ' * bool(told)}{told}")
    held = [f"{key}={value}" for fact in found.ranks for key, value in _choices(fact) if _means_tcp(key, value)]
    if held:
        return warned(
            name,
            f"{held[0]} holds MPI to TCP, though there is {_rdma(found)}",
            f"unset {held[0].partition('=')[0]}, if this MPI can use the device",
        )
    mend = "FI_LOG_LEVEL=info (MPICH, Intel MPI) or OMPI_MCA_pml_base_verbose=10, UCX_LOG_LEVEL=info show it"
    what = f"there is {_rdma(found)}; MPI doesn't tell whether it uses it{'; ' * bool(told)}{told}"
    return not_checked(name, what, mend)


def _choices(fact: RankFacts) -> Iterator[tuple[str, str]]:
    """A rank's variables by which MPI chooses its network."""
    for key, value in fact.variables.items():
        if key in _TO_TCP or key in ("OMPI_MCA_pml", "OMPI_MCA_mtl", "MPIR_CVAR_CH4_NETMOD", "I_MPI_FABRICS"):
            yield key, value


def _means_tcp(key: str, value: str) -> bool:
    """True if the variable allows nothing but TCP between nodes."""
    words = value.replace(";", ",").split(",")
    if value.startswith("^") or any(word.startswith(_PAST_TCP) for word in words if word != "ofi_rxm"):
        return False
    return any(word in _TO_TCP.get(key, ()) for word in words)
