"""Ranks on two hosts, started by mpirun: nodes are found by shared memory, and every rank test holds there too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.fake_hosts import Hosts
from cluster.placed import PLACEMENTS, Placed
from flavours import Flavour
from rank_jobs import TESTS, run_rank_tests

JOB_DEADLINE_S = 300.0
DIGITS = TESTS.parent / "docs" / "examples" / "digits.py"

FORCED = (
    *(
        f"test_nodes.py::{test}[{layout}"
        for test in ("test_attributes", "test_every_op_and_root", "test_every_dtype_moves_and_sums", "test_explain")
        for layout in ("nodes of two", "three and one", "one and two", "round-robin", "numbers of any", "leader last")
    ),
    "test_split.py::test_errors_name_the_parts_own_ranks",
    "test_transport_mpi.py::test_barrier_waits_for_all",
)
"""Rank tests that force a layout of nodes on ranks of one host, or need its memory."""


WHOLE = {("round-robin", "mpich"), ("block", "openmpi"), ("two and one", "openmpi")}
"""Where all rank tests run: every placement, and both MPIs, whose own ways between hosts no placement changes."""

FLAT = ("test_transport_mpi.py", "test_transport_device.py")
"""Rank tests of what knows no nodes; one placement is enough."""


@pytest.fixture(scope="module")
def pair(hosts: Callable[[int], Hosts]) -> Hosts:
    return hosts(2)


@pytest.fixture(params=list(PLACEMENTS))
def placed(request: pytest.FixtureRequest, flavour: Flavour, pair: Hosts) -> Placed:
    return Placed.of(flavour, pair, request.param)


def who_is_where(host_of: list[int]) -> list[dict[str, Any]]:
    """What where.py must tell of ranks on those hosts, with two ranks a host at the most."""
    ranks_of = [[rank for rank, host in enumerate(host_of) if host == node] for node in (0, 1)]
    told = []
    for rank, node in enumerate(host_of):
        local_rank = ranks_of[node].index(rank)
        told.append(
            {
                "host": f"h{node + 1}",
                "rank": rank,
                "node": node,
                "num_nodes": 2,
                "local_rank": local_rank,
                "local_size": len(ranks_of[node]),
                "device": local_rank,
                "ranks_of": ranks_of,
                "rail": [ranks[local_rank] for ranks in ranks_of if len(ranks) > local_rank],
            }
        )
    return told


def test_nodes_are_the_hosts(placed: Placed, tmp_path: Path) -> None:
    host_of, told = PLACEMENTS[placed.placement], tmp_path / "where.json"
    env = {"PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
    before = placed.hosts.transferred()
    done = placed.run(len(host_of), [TESTS / "cluster" / "where.py", told], env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(told.read_text()) == who_is_where(host_of)
    after = placed.hosts.transferred()
    for host in placed.hosts.names:
        # The broadcasts of 30,021 bytes alone, from roots on either host.
        assert after[host][1] - before[host][1] > 30_000, f"{host} sent next to nothing: {before} {after}"
        assert not placed.hosts.pids(host)


@pytest.mark.timeout(JOB_DEADLINE_S + 60)
def test_inside_ranks(placed: Placed) -> None:
    if (placed.placement, placed.name) not in WHOLE:
        pytest.skip(f"under {placed.name} all rank tests run in another placement")
    deselect = [word for name in FORCED for word in ("--deselect", f"tests/ranks/{name}")]
    ignore = [] if placed.placement != "two and one" else [f"--ignore={TESTS / 'ranks' / name}" for name in FLAT]
    n = len(PLACEMENTS[placed.placement])
    job = run_rank_tests(placed, n, [TESTS / "ranks", *deselect, *ignore], timeout_s=JOB_DEADLINE_S)
    if job.status:
        pytest.fail(job.report, pytrace=False)
    for host in placed.hosts.names:
        assert not placed.hosts.pids(host)


def test_digits_loss_is_that_of_one_host(flavour: Flavour, pair: Hosts, tmp_path: Path) -> None:
    results = []
    for run, n in ((flavour.run, 1), (Placed.of(flavour, pair, "two and one").run, 3)):
        told = tmp_path / f"{n}.json"
        done = run(n, [DIGITS, "--steps", "60", "--output", tmp_path / "digits.png", "--json", told])
        assert done.returncode == 0, done.stdout + done.stderr
        results.append(json.loads(told.read_text()))
    assert [(result["ranks"], result["nodes"]) for result in results] == [(1, 1), (3, 2)]
    assert results[1]["loss"] == pytest.approx(results[0]["loss"], abs=1e-9)
    assert results[1]["accuracy"] >= 0.9
