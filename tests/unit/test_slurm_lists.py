"""Host lists, task counts and the kinds of srun, against a plain model and SLURM's own scontrol."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from flavours import clean_env, missing
from ncclcomm.errors import ArgumentError, BackendUnavailableError
from ncclcomm.launcher.command import MPICH, OPENMPI
from ncclcomm.launcher.slurm import (
    Allocation,
    allocation,
    expand_hosts,
    mpi_types,
    parse_mpi_list,
    split_hosts,
    srun_mpi,
    task_counts,
)

HOSTS = {
    "linux[1,2]": "linux1 linux2",
    "alpha,beta": "alpha beta",
    "node[001-003,007]": "node001 node002 node003 node007",
    "b04-[09-10]": "b04-09 b04-10",
    "a,b[001,003],c": "a b001 b003 c",
    "a[01-03,7],b,c[1-2]-ib[0-1]": "a01 a02 a03 a7 b c1-ib0 c1-ib1 c2-ib0 c2-ib1",
    "a[9-010]": "a9 a10",
    "a[98-101]": "a98 a99 a100 a101",
    "a[00-0]": "a00",
    "[1-2]": "1 2",
    "a1-3": "a1-3",
    "n[1-2].cluster.example": "n1.cluster.example n2.cluster.example",
    "a[1,1],a1": "a1 a1 a1",
}
NO_HOSTS = [
    *["a[1-", "a[1", "a[1-]", "a[-1]", "a[]", "a[1,]", "a[3-1]", "a[x]", "a[1-2-3]", "a]1[", "a[[1]]", "a[1]]"],
    *["", " ", "a,", ",a", "a,,b", "a b", " a", "a[1, 2]", "a\n", "a[1]\n", "-a", ".a", "a/b", "a;b", "a:2", "$(id)"],
    *["ä", "a[\u0661]", "a[0-65536]", "a[0-9999999999999999999]", "a[0-999],b[0-99999]", "a[1-300][1-300]"],
]
COUNTS = {
    "2(x3),1": [2, 2, 2, 1],
    "4": [4],
    "1(x2)": [1, 1],
    "2,1(x2)": [2, 1, 1],
    "0,3": [0, 3],
    "72(x65536)": [72] * 65536,
}
NO_COUNTS = ["", "x(2)", "2(x)", "2(x0)", "2(x3", "2x3", "-1", "2,", ",2", "2,,2", "1.5", " 2", "2\n", "2(x65537)"]
NO_COUNTS += ["1(x9999999999)", "99999999999", "\u0663"]


@pytest.mark.parametrize("text", list(HOSTS))
def test_lists_of_hosts(text: str) -> None:
    assert expand_hosts(text) == tuple(HOSTS[text].split())


@pytest.mark.parametrize("text", NO_HOSTS)
def test_texts_that_are_no_lists_of_hosts(text: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        expand_hosts(text, "THAT_LIST")
    assert str(caught.value).startswith(f"THAT_LIST={text!r}")
    with pytest.raises(ArgumentError, match="^SLURM_JOB_NODELIST="):
        expand_hosts(text)


def test_the_longest_list() -> None:
    hosts = expand_hosts("a[0-65535]")
    assert (len(hosts), hosts[-1]) == (65536, "a65535")
    with pytest.raises(ArgumentError, match="more than 65536"):
        expand_hosts("a[0-65535],b")


@pytest.mark.parametrize(("text", "entries"), [("h1:4,n[1,2]:2", ["h1:4", "n[1,2]:2"]), ("a", ["a"])])
def test_entries_of_a_list(text: str, entries: list[str]) -> None:
    assert split_hosts(text, "--hosts") == tuple(entries)


def a_bracket(chance: random.Random) -> tuple[str, list[str]]:
    """Some numbers and ranges in brackets, and what they stand for."""
    parts, numbers = [], []
    for _ in range(chance.randint(1, 3)):
        low = chance.choice([0, 1, 8, 98])
        high = low + chance.randint(0, 5)
        first = str(low).zfill(chance.randint(1, 4))
        parts.append(first if high == low else f"{first}-{high}")
        numbers += [str(number).zfill(len(first)) for number in range(low, high + 1)]
    return f"[{','.join(parts)}]", numbers


def a_list(seed: int) -> tuple[str, list[str]]:
    """Some list of hosts, and what it stands for."""
    chance = random.Random(seed)
    entries, hosts = [], []
    for _ in range(chance.randint(1, 4)):
        text = chance.choice(["a", "node-", "b2", "x_y.z"])
        made = [text]
        # Of three brackets SLURM counts up the last, the first, the second; two are as one would think.
        for before in chance.choice([[], [""], ["-r"], ["", "-ib"], ["x", ""]]):
            bracket, numbers = a_bracket(chance)
            text += before + bracket
            made = [name + before + number for name in made for number in numbers]
        entries.append(text)
        hosts += made
    return ",".join(entries), hosts


@pytest.mark.parametrize("seed", range(20))
def test_lists_against_a_model(seed: int) -> None:
    for number in range(seed * 100, seed * 100 + 100):
        text, hosts = a_list(number)
        assert expand_hosts(text) == tuple(hosts), text


@pytest.fixture(scope="module")
def slurm_conf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What scontrol must read before it does arithmetic."""
    if shutil.which("scontrol") is None:
        missing("scontrol", "apt-get install slurm-client")
    path = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    path.write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=n1\nPartitionName=p Nodes=ALL\n")
    return path


def test_lists_against_scontrol(slurm_conf: Path) -> None:
    several = ["a[1-2]b[3-4]c[5-6]", "a[1-2]b[3-4]c[5-6]d[07-8]", "[1-2][3-4][5-6]"]
    texts = [a_list(number)[0] for number in range(200)] + several
    texts += [text for text in HOSTS if "]." not in text]
    for text in texts:
        asked = subprocess.run(
            ["scontrol", "show", "hostnames", text],
            env={**clean_env(), "SLURM_CONF": str(slurm_conf)},
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
        assert expand_hosts(text) == tuple(asked.stdout.split()), text


@pytest.mark.parametrize("text", list(COUNTS))
def test_task_counts(text: str) -> None:
    assert task_counts(text) == tuple(COUNTS[text])


@pytest.mark.parametrize("text", NO_COUNTS)
def test_texts_that_are_no_task_counts(text: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        task_counts(text, "THOSE_COUNTS")
    assert str(caught.value).startswith(f"THOSE_COUNTS={text!r}")


JOB = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NODELIST": "h[1-2]",
    "SLURM_TASKS_PER_NODE": "3,1",
    "SLURM_JOB_CPUS_PER_NODE": "8(x2)",
    "SLURM_CPUS_PER_TASK": "2",
    "SLURM_GPUS_PER_NODE": "4",
    "SLURM_GPUS_ON_NODE": "3",
}
FOUND = Allocation("12", ("h1", "h2"), (3, 1), (8, 8), 2, 4, None, False)


def test_the_allocation_of_a_batch_script() -> None:
    assert allocation(JOB) == FOUND
    assert FOUND.size == 4


@pytest.mark.parametrize(
    ("changes", "field", "expected"),
    [
        ({"SLURM_TASKS_PER_NODE": ""}, "tasks_per_node", None),
        ({"SLURM_TASKS_PER_NODE": ""}, "size", None),
        ({"SLURM_JOB_NODELIST": "", "SLURM_NODELIST": "x,y"}, "nodes", ("x", "y")),
        ({"SLURM_CPUS_PER_TASK": ""}, "cpus_per_task", None),
        ({"SLURM_GPUS_PER_NODE": "a100:4"}, "gpus_per_node", 4),
        ({"SLURM_GPUS_PER_NODE": "a100:2,gpu:v100:1"}, "gpus_per_node", 3),
        ({"SLURM_GPUS_PER_NODE": ""}, "gpus_per_node", 3),
        ({"SLURM_GPUS_PER_NODE": "", "SLURM_GPUS_ON_NODE": ""}, "gpus_per_node", None),
        ({"SLURM_GPUS_PER_TASK": "h100:1"}, "gpus_per_task", 1),
        ({"SLURM_STEP_ID": "0", "SLURM_LOCALID": "0"}, "in_task", True),
        # The shell that salloc opens on a node, and the batch step of versions that number it.
        ({"SLURM_STEP_ID": "4294967290", "SLURM_LOCALID": "0"}, "in_task", False),
        ({"SLURM_STEP_ID": "4294967291", "SLURM_LOCALID": "0"}, "in_task", False),
        # A step over one of the job's two nodes says the step's number of tasks.
        ({"SLURM_STEP_ID": "0", "SLURM_LOCALID": "0", "SLURM_TASKS_PER_NODE": "1"}, "tasks_per_node", None),
    ],
)
def test_parts_of_an_allocation(changes: dict[str, str], field: str, expected: object) -> None:
    assert getattr(allocation({**JOB, **changes}), field) == expected


def test_no_allocation() -> None:
    for environ in ({}, {"SLURM_JOB_ID": "1"}, {"SLURM_JOB_NODELIST": "a"}, {**JOB, "SLURM_JOB_ID": ""}):
        assert allocation(environ) is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("SLURM_JOB_ID", "x1"),
        ("SLURM_JOB_NODELIST", "h[1-"),
        ("SLURM_TASKS_PER_NODE", "x(2)"),
        ("SLURM_TASKS_PER_NODE", "2(x3)"),
        ("SLURM_JOB_CPUS_PER_NODE", "8"),
        ("SLURM_CPUS_PER_TASK", "0"),
        ("SLURM_CPUS_PER_TASK", "two"),
        ("SLURM_GPUS_PER_NODE", "a100"),
        ("SLURM_GPUS_PER_TASK", "1.5"),
    ],
)
def test_variables_that_make_no_sense(name: str, text: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        allocation({**JOB, name: text})
    assert str(caught.value).startswith(f"{name}={text!r}")


def test_a_bad_count_of_gpus() -> None:
    with pytest.raises(ArgumentError, match="^SLURM_GPUS_ON_NODE='many'"):
        allocation({**JOB, "SLURM_GPUS_PER_NODE": "", "SLURM_GPUS_ON_NODE": "many"})


MPI_LISTS = {
    # 22.05, 20.11 on stderr, and one of a site.
    "MPI plugin types are...\n\tpmix\n\tnone\n\tcray_shasta\n\tpmi2\n"
    "specific pmix plugin versions available: pmix_v4\n": "pmix none cray_shasta pmi2 pmix_v4",
    "srun: MPI types are...\nsrun: none\nsrun: pmi2\nsrun: openmpi\n": "none pmi2 openmpi",
    "MPI plugin types are...\n\tnone\n\tpmix\nspecific pmix plugin versions available: pmix_v3,pmix_v5\n": (
        "none pmix pmix_v3 pmix_v5"
    ),
    "MPI plugin types are...\n": "",
    "srun: error: no such option\n": "",
    "": "",
}


@pytest.mark.parametrize("text", list(MPI_LISTS))
def test_the_kinds_that_srun_lists(text: str) -> None:
    assert parse_mpi_list(text) == tuple(MPI_LISTS[text].split())


@pytest.mark.parametrize(
    ("flavour", "types", "expected"),
    [
        (MPICH, "pmix none pmi2", "pmi2"),
        (MPICH, "pmix none", None),
        (OPENMPI, "pmix none pmi2 pmix_v4", "pmix"),
        (OPENMPI, "none pmi2 pmix_v4 pmix_v10", "pmix_v10"),
        (OPENMPI, "none pmi2", None),
        ("Intel MPI", "pmix none pmi2", "pmi2"),
        ("Intel MPI", "pmix none", "pmix"),
        ("Intel MPI", "none cray_shasta", None),
    ],
)
def test_the_kind_that_fits(flavour: str, types: str, expected: str | None) -> None:
    assert srun_mpi(flavour, tuple(types.split())) == expected


def test_srun_is_asked(tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\n[ "$*" = --mpi=list ] || exit 1\necho "MPI types are..."; echo "$KIND" >&2\n')
    srun.chmod(0o755)
    assert mpi_types({"KIND": "pmi2"}, str(srun)) == ("pmi2",)


@pytest.mark.parametrize(
    ("body", "said"),
    [("echo none; echo 'no configuration' >&2; exit 1", "exits 1.*no configuration"), ("exit 0", "exits 0.*nothing")],
)
def test_an_srun_that_fails(body: str, said: str, tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text(f"#!/bin/sh\n{body}\n")
    srun.chmod(0o755)
    with pytest.raises(BackendUnavailableError, match=said):
        mpi_types({}, str(srun))


def test_no_srun(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailableError, match="gives no answer.*load SLURM"):
        mpi_types({}, str(tmp_path / "srun"))
