"""Each line of the doctor that can fail or warn has a test that breaks that very thing."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CHECKS = sorted((TESTS.parent / "ncclcomm" / "doctor").glob("check_*.py"))
STATUSES = {"failed": "fail", "warned": "warn"}
LINE = re.compile(r"[a-z]+\.[a-z0-9_]+")

ALONE, RANKS, MACHINE = (f"faults/test_doctor_{name}.py::test_" for name in ("alone", "ranks", "machine"))
CLUSTER = "cluster/test_doctor_cluster.py::test_"
GPUS = "unit/test_doctor_devices.py::test_"
"""There a stand-in for CuPy and CUDA's runtime has the fault; the way from there to the line is the doctor's own."""

PROVOKED = {
    "mpi.launcher fail": f"{RANKS}the_launcher_of_another_mpi",
    "mpi.launcher warn": f"{ALONE}without_mpi4py",
    "mpi.library fail": f"{MACHINE}a_rank_with_another_mpi_library",
    "mpi.mpi4py fail": f"{RANKS}versions_that_differ",
    "mpi.threads fail": f"{MACHINE}a_rank_with_another_thread_level",
    "mpi.threads warn": f"{MACHINE}an_mpi_that_serves_no_threads",
    "mpi.cuda warn": f"{MACHINE}a_rank_with_another_mpi_library",
    "world.size fail": f"{ALONE}srun_without_the_right_mpi",
    "world.answers fail": f"{RANKS}a_rank_that_does_not_answer_is_named",
    "versions.python fail": f"{RANKS}pythons_that_differ",
    "versions.python warn": f"{MACHINE}a_rank_with_another_python",
    "versions.numpy fail": f"{RANKS}versions_that_differ",
    "versions.ncclcomm fail": f"{RANKS}versions_that_differ",
    "settings.values fail": f"{ALONE}settings",
    "settings.names warn": f"{ALONE}settings",
    "slurm.variables fail": f"{CLUSTER}tasks_whose_variables_lie",
    "slurm.cores warn": f"{MACHINE}fewer_cores_than_slurm_counts",
    "devices.backend fail": f"{ALONE}gpus_demanded_and_none_there",
    "devices.backend warn": f"{MACHINE}a_driver_without_cupy",
    "devices.ranks fail": f"{GPUS}more_ranks_than_visible_gpus",
    "devices.shared fail": f"{GPUS}ranks_that_see_the_same_gpu_alone",
    "devices.shared warn": f"{GPUS}ranks_that_see_the_same_gpu_alone",
    "devices.ways fail": f"{RANKS}wrong_copies_and_sums_between_devices",
    "devices.ways warn": f"{GPUS}gpus_that_reach_each_other_through_host_memory",
    "gpu.driver warn": f"{GPUS}drivers_that_differ",
    "gpu.cupy fail": f"{GPUS}cupys_that_differ",
    "gpu.nccl fail": f"{GPUS}a_rank_whose_nccl_is_missing_or_another",
    "gpu.kernels fail": f"{GPUS}kernels_that_cannot_be_compiled",
    "node.shm fail": f"{MACHINE}a_tiny_dev_shm",
    "node.shm warn": f"{MACHINE}a_dev_shm_that_a_container_gives",
    "node.process_vm_readv fail": f"{RANKS}an_mpich_that_fails_where_it_may_not_read",
    "node.process_vm_readv warn": f"{RANKS}ranks_that_may_not_read_each_other",
    "node.memlock warn": f"{MACHINE}too_little_locked_memory_for_an_adapter",
    "network.nccl_interface fail": f"{ALONE}an_interface_that_is_not_there",
    "network.path warn": f"{CLUSTER}adapters_that_mpi_is_held_away_from",
    "trial.init fail": f"{RANKS}nodes_that_cannot_be",
    "trial.devices fail": f"{RANKS}wrong_copies_and_sums_between_devices",
    "trial.node fail": f"{RANKS}wrong_sums_of_one_rank",
    "trial.nodes fail": f"{RANKS}wrong_broadcast_across_nodes",
}


def lines_of(source: str) -> set[str]:
    """The lines that the functions of a file can give with a status of STATUSES, as `LINE STATUS`."""
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    ids, names = {}, {}
    for name, function in functions.items():
        nodes = list(ast.walk(function))
        texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        ids[name] = {text for text in texts if LINE.fullmatch(text)}
        names[name] = {node.id for node in nodes if isinstance(node, ast.Name)}
    found = set()
    for name in functions:
        # A function without a line of its own judges for the line that it is called with.
        judged = names[name].union(*(names[other] for other in names[name] & ids.keys() if not ids[other]))
        found |= {f"{line} {STATUSES[word]}" for line in ids[name] for word in judged & STATUSES.keys()}
    return found


def test_every_line_that_can_fail_or_warn_is_provoked() -> None:
    assert len(CHECKS) == 5
    assert set().union(*(lines_of(path.read_text()) for path in CHECKS)) == set(PROVOKED)


@pytest.mark.parametrize("line", PROVOKED)
def test_the_test_is_there(line: str) -> None:
    file, _, test = PROVOKED[line].partition("::")
    _, found, rest = (TESTS / file).read_text().partition(f"\ndef {test}(")
    assert found, f"{file} has no {test}"
    name, body = line.partition(" ")[0], rest.partition("\n\n\n")[0]
    assert f'"{name}"' in body or (name.startswith("versions.") and 'f"versions.{what}"' in body), body
