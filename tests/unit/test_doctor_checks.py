"""The doctor's other lines, from facts; those that only another machine would show."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ncclcomm import config
from ncclcomm.doctor.check_node import check_node
from ncclcomm.doctor.check_settings import check_settings
from ncclcomm.doctor.check_world import check_world
from ncclcomm.doctor.facts import RankFacts, rdma_devices
from ncclcomm.doctor.findings import Findings
from ncclcomm.doctor.lines import Line
from ncclcomm.doctor.network import interfaces, named_interfaces
from ncclcomm.doctor.report import as_json, facts_as_text, judge, lines_as_text
from ncclcomm.doctor.shared_memory import Readable, read_neighbour, yama_scope

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
BY_SRUN = {"variable": "SLURM_NTASKS", "size": 2, "by_srun": True}


def a_rank(rank: int = 0, **changes: Any) -> RankFacts:
    """A rank in which nothing is wrong."""
    own = {
        "size": 2,
        "promised": {"variable": "PMI_SIZE", "size": 2, "rank": rank, "by_srun": False},
        "host": "n0",
        "cores": 2,
        "executable": "/opt/venv/bin/python",
        "python": "3.11.2",
        "numpy": "2.1.0",
        "ncclcomm": "0.1.0",
        "mpi4py": "4.1.0",
        "mpi_library": "MPICH 5.0.2",
        "mpi_flavour": "MPICH",
        "launcher_flavour": "MPICH",
        "threads": "multiple",
        "cuda_aware": False,
        "backend": "host",
        "devices": [{"name": "", "uuid": f"host-{i}"} for i in range(4)],
        "gpu_reason": "CuPy is not installed",
        "shm": {"size_bytes": 1 << 30, "free_bytes": 1 << 30, "error": ""},
        "interfaces": {"lo": ["127.0.0.1"], "eth0": ["192.0.2.7"]},
    }
    return RankFacts(rank=rank, **{**own, **changes})


def found_of(*ranks: RankFacts, **changes: Any) -> Findings:
    """Findings of these ranks, or of two sound ones."""
    facts = list(ranks) or [a_rank(0), a_rank(1)]
    return Findings(facts, **{"size": len(facts), "no_trials": "not here", **changes})


def line_of(name: str, *ranks: RankFacts, **changes: Any) -> Line:
    """One line of the report."""
    return next(line for line in judge(found_of(*ranks, **changes)) if line.id == name)


def test_sound_ranks_fail_nowhere() -> None:
    lines = judge(found_of())
    assert {line.status for line in lines} == {"pass", "not checked"}
    assert len({line.id for line in lines}) == len(lines)
    assert all(line.found and "\n" not in line.found for line in lines)


@pytest.mark.parametrize(
    ("name", "status", "changes"),
    [
        ("mpi.library", "fail", {"mpi_library": "MPICH 4.3.0"}),
        ("mpi.mpi4py", "fail", {"mpi4py": ""}),
        ("mpi.threads", "fail", {"threads": "serialized"}),
        ("mpi.cuda", "warn", {"cuda_aware": None}),
        ("versions.python", "warn", {"python": "3.11.9"}),
        ("versions.python", "fail", {"python": "3.12.1"}),
        ("versions.numpy", "fail", {"numpy": "1.26.4"}),
        ("versions.ncclcomm", "fail", {"ncclcomm": "0.0.9"}),
        ("settings.values", "fail", {"settings_error": "NCCLCOMM_CHECK='x': use true, false"}),
        ("node.shm", "fail", {"host": "n1", "shm": {"size_bytes": 0, "free_bytes": 0, "error": "No such file"}}),
        ("node.shm", "fail", {"host": "n1", "shm": {"size_bytes": 64 * MIB, "free_bytes": MIB, "error": ""}}),
        ("node.shm", "warn", {"host": "n1", "shm": {"size_bytes": 64 * MIB, "free_bytes": 63 * MIB, "error": ""}}),
        ("node.memlock", "warn", {"rdma": ["mlx5_0"], "memlock_bytes": 8 * MIB}),
        ("node.memlock", "pass", {"rdma": ["mlx5_0"], "memlock_bytes": None}),
        ("node.memlock", "pass", {"memlock_bytes": 64 << 10}),
        ("network.nccl_interface", "fail", {"variables": {"NCCL_SOCKET_IFNAME": "ib"}}),
        ("network.nccl_interface", "pass", {"variables": {"NCCL_SOCKET_IFNAME": "eth"}}),
    ],
)
def test_rank_1_differs(name: str, status: str, changes: dict[str, Any]) -> None:
    line = line_of(name, a_rank(0), a_rank(1, **changes))
    assert line.status == status, line
    if status != "pass":
        assert "rank 1" in line.found or "n1" in line.found
        assert line.mend


@pytest.mark.parametrize(
    ("name", "changes", "mend"),
    [
        ("mpi.launcher", {"launcher_flavour": "Open MPI"}, "ncclcomm run -n 2"),
        ("mpi.launcher", {"mpi_error": "No module named 'mpi4py'", "mpi_flavour": ""}, "pip install"),
        ("world.size", {"size": 1}, "ncclcomm run -n 2"),
        ("world.size", {"size": 1, "promised": {**BY_SRUN, "rank": 0}}, "--mpi=pmi2"),
    ],
)
def test_a_world_that_is_none(name: str, changes: dict[str, Any], mend: str) -> None:
    line = line_of(name, a_rank(0, **changes))
    assert line.status == "fail", line
    assert mend in line.mend


def test_intel_mpi_and_mpich_start_each_others_ranks() -> None:
    assert line_of("mpi.launcher", a_rank(0, mpi_flavour="Intel MPI"), a_rank(1)).status == "pass"


def test_no_launcher_at_all() -> None:
    alone = {"promised": None, "launcher_flavour": "", "size": 1}
    assert line_of("mpi.launcher", a_rank(**alone), mpiexec="/opt/venv/bin/mpiexec").status == "pass"
    line = line_of("mpi.launcher", a_rank(**alone), mpiexec_error="no mpiexec is beside python")
    assert line.status == "fail"


def test_missing_ranks_are_named() -> None:
    line = line_of("world.answers", a_rank(0), size=3, missing=[1, 2], limit_s=20.0)
    assert line.status == "fail"
    assert "ranks 1-2" in line.found
    assert "20 s" in line.found


SPARED = ("FI_PROVIDER", "^sockets,udp")


def two_hosts(**changes: Any) -> Line:
    """The line on the way between two hosts."""
    return line_of("network.path", a_rank(0, **changes), a_rank(1, host="n1", first_on_host=1, **changes))


def test_the_way_between_hosts() -> None:
    assert two_hosts().status == "pass"
    assert "TCP" in two_hosts().found
    rdma = {"rdma": ["mlx5_0"]}
    assert two_hosts(**rdma).status == "not checked"
    assert "mlx5_0" in two_hosts(**rdma).found
    for name, value in (("FI_PROVIDER", "tcp;ofi_rxm"), ("UCX_TLS", "tcp,self"), ("OMPI_MCA_btl", "self,sm,tcp")):
        line = two_hosts(**rdma, variables={name: value})
        assert line.status == "warn", line
        assert f"unset {name}" in line.mend
    for name, value in (
        ("FI_PROVIDER", "verbs"),
        ("UCX_TLS", "rc,tcp"),
        ("OMPI_MCA_btl", "^tcp"),
        ("UCX_TLS", "all"),
        SPARED,
    ):
        assert two_hosts(**rdma, variables={name: value}).status == "not checked", value


def test_rdma_devices_are_read_from_the_kernel(tmp_path: Path) -> None:
    assert rdma_devices(str(tmp_path)) == []
    for device in ("infiniband/mlx5_1", "infiniband/mlx5_0", "cxi/cxi0", "net/eth0"):
        (tmp_path / device).mkdir(parents=True)
    assert rdma_devices(str(tmp_path)) == ["mlx5_0", "mlx5_1", "cxi0"]


@pytest.mark.parametrize(
    ("setting", "left"),
    [
        ("eth", ["eth0", "eth1"]),
        ("eth1,ib", ["eth1", "ib0"]),
        ("=eth", []),
        ("=eth0,lo", ["lo", "eth0"]),
        ("^eth,lo", ["ib0"]),
        ("^=eth0", ["lo", "eth1", "ib0"]),
        ("wlan", []),
        ("^lo,eth,ib", []),
    ],
)
def test_nccl_socket_ifname(setting: str, left: list[str]) -> None:
    assert named_interfaces(setting, ["lo", "eth0", "eth1", "ib0"]) == left


@pytest.mark.parametrize(
    ("there", "named"),
    [
        ({"lo": ["127.0.0.1"], "eth0": [], "eth1": ["192.0.2.7"]}, "eth1"),
        ({"lo": [], "eth0": []}, "eth0"),
        ({"lo": []}, "lo"),
    ],
)
def test_the_interface_that_is_likely_meant(there: dict[str, list[str]], named: str) -> None:
    rank = a_rank(0, variables={"NCCL_SOCKET_IFNAME": "ib"}, interfaces=there)
    assert line_of("network.nccl_interface", rank).mend.endswith(f"NCCL_SOCKET_IFNAME={named}")


def test_interfaces_of_this_machine() -> None:
    assert "127.0.0.1" in interfaces()["lo"]


MPICH_DENIED = {"readers": 2, "unreadable": {1: "Operation not permitted"}}


def test_memory_that_may_not_be_read() -> None:
    def line(error: str | None, scope: int | None = None, **changes: Any) -> Line:
        trial = {"node_ranks": {"error": error}, "init_error": "", "ways": None, "devices": None, "leaders": None}
        trials = None if error is None else [trial, trial]
        lines = check_node(found_of(a_rank(0, **changes), a_rank(1), trials=trials, yama_scope=scope, **MPICH_DENIED))
        return next(line for line in lines if line.id == "node.process_vm_readv")

    assert line(None).status == "fail"
    assert "MPIR_CVAR_CH4_CMA_ENABLE=0" in line("all_reduce failed").mend
    assert line("").status == "warn"
    assert line(None, variables={"MPIR_CVAR_CH4_CMA_ENABLE": "0"}).status == "warn"
    assert line(None, mpi_flavour="Open MPI").status == "warn"
    assert "SYS_PTRACE" in line("").mend
    assert "kernel.yama.ptrace_scope=0" in line("", 1).mend


def test_reading_memory() -> None:
    memory = Readable()
    ticket = memory.ticket()
    assert read_neighbour(ticket) == ""
    assert "No such process" in read_neighbour({**ticket, "pid": 2**22 + 1})
    assert "process ids" in read_neighbour({**ticket, "token": "00"})


def test_yama_scope(tmp_path: Path) -> None:
    (tmp_path / "scope").write_text("2\n")
    assert yama_scope(str(tmp_path / "scope")) == 2
    assert yama_scope(str(tmp_path / "none")) is None


SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "0"}


def slurm(name: str, *changes: dict[str, str], hosts: tuple[str, ...] = ("n0", "n1")) -> Line:
    """A line of ranks that srun started, one a host."""
    ranks = [
        a_rank(
            rank,
            host=hosts[rank],
            launcher_flavour="",
            variables={**SLURM, "SLURM_PROCID": str(rank), **(changes[rank] if rank < len(changes) else {})},
            promised={**BY_SRUN, "rank": rank},
        )
        for rank in range(2)
    ]
    return next(line for line in check_settings(found_of(*ranks)) if line.id == name)


def test_slurm_variables_against_what_is_seen() -> None:
    assert slurm("slurm.variables").status == "pass"
    assert slurm("slurm.variables", hosts=("n0.cluster", "n1.cluster")).status == "pass"
    for line, word in (
        (slurm("slurm.variables", {}, {"SLURM_PROCID": "5"}), "SLURM_PROCID=5"),
        (slurm("slurm.variables", hosts=("n0", "other")), "rank 1 on other"),
        (slurm("slurm.variables", {"SLURM_JOB_NODELIST": "n0"}), "2 hosts"),
        (slurm("slurm.variables", {"SLURM_JOB_NODELIST": "n[0-"}), "SLURM_JOB_NODELIST"),
    ):
        assert line.status == "fail", line
        assert word in line.found
        assert line.mend
    assert slurm("slurm.variables", {}, {"SLURMD_NODENAME": "n1"}, hosts=("n0", "other")).status == "pass"


def test_slurm_cores() -> None:
    line = slurm("slurm.cores", {}, {"SLURM_CPUS_PER_TASK": "8"})
    assert line.status == "warn"
    assert "--cpus-per-task=8" in line.mend
    assert slurm("slurm.cores", {"SLURM_CPUS_PER_TASK": "2"}).status == "pass"


def test_every_variable_of_the_project_is_known() -> None:
    written = "NCCLCOMM_" + r"[A-Z][A-Z_]*[A-Z]\b"
    used = set()
    for folder in ("ncclcomm", "launch", "slurm"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix != ".pyc":
                used |= set(re.findall(written, path.read_text(encoding="utf-8")))
    assert {"NCCLCOMM_DEVICES", "NCCLCOMM_JOB_ID"} <= used
    ranks = [a_rank(0, variables=dict.fromkeys(sorted(used), "1"))]
    assert line_of("settings.names", *ranks).status == "pass", line_of("settings.names", *ranks)


def test_settings_are_the_variables_that_config_reads() -> None:
    class Seen(dict[str, str]):
        def get(self, name: str, default: Any = None) -> Any:
            asked.add(name)
            return super().get(name, default)

    asked: set[str] = set()
    config.load(Seen())
    assert asked == set(config.SETTINGS)


def test_unknown_variables() -> None:
    line = line_of("settings.names", a_rank(0, variables={"NCCLCOMM_DEVISES": "host", "NCCLCOMM_TEST_X": "1"}))
    assert line.status == "warn"
    assert "NCCLCOMM_TEST_X" not in line.found
    assert "was NCCLCOMM_DEVICES meant?" in line.mend


def test_text_is_a_line_each_and_aligned() -> None:
    found = found_of(a_rank(0), a_rank(1, numpy="1.0"))
    lines = judge(found)
    text = lines_as_text(found, lines, colour=False)
    assert "\033" not in text
    assert "\033[31m" in lines_as_text(found, lines, colour=True)
    shown = text.splitlines()
    assert shown[0] == "ncclcomm doctor: 2 ranks on n0"
    rows = [row for row in shown[2:-2] if "->" not in row]
    columns = {row.index(line.found) for row, line in zip(rows, lines, strict=True)}
    assert len(columns) == 1
    (mend,) = [row for row in shown if row.lstrip().startswith("->")]
    assert mend.index("->") == columns.pop()
    assert re.fullmatch(r"\d+ pass, 0 warn, 1 fail, \d+ not checked", shown[-1])


def test_json_has_stable_keys() -> None:
    found = found_of()
    report = json.loads(as_json(found, judge(found)))
    assert sorted(report) == ["facts", "lines"]
    assert all(sorted(line) == ["found", "id", "mend", "status"] for line in report["lines"])
    assert sorted(report["facts"]) == ["missing", "mpiexec", "ranks", "size"]
    assert RankFacts(**report["facts"]["ranks"][1]) == a_rank(1)


def test_facts_of_another_version_are_read() -> None:
    text = json.dumps({"rank": 3, "host": "n3", "colour": "blue"})
    assert RankFacts.from_json(text) == RankFacts(rank=3, host="n3")


def test_facts_for_people_name_ranks_that_differ() -> None:
    text = facts_as_text(found_of(a_rank(0), a_rank(1, numpy="1.0")))
    rows = [row for row in text.splitlines() if row.startswith("numpy")]
    assert [row.split(maxsplit=1)[1] for row in rows] == ["rank 0: 2.1.0", "rank 1: 1.0"]
    assert len([row for row in text.splitlines() if row.startswith("Python")]) == 1


def test_every_line_of_the_world_has_a_place_where_mpi_is_missing() -> None:
    rank = a_rank(0, mpi_error="no mpi4py", mpi_library="", mpi_flavour="", threads="", promised=None, size=1)
    lines = check_world(found_of(rank))
    assert {line.id: line.status for line in lines if line.id.startswith("mpi")} == {
        "mpi.launcher": "warn",
        "mpi.library": "not checked",
        "mpi.mpi4py": "pass",
        "mpi.threads": "not checked",
        "mpi.cuda": "not checked",
    }
