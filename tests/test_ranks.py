"""Runs tests/ranks inside 1 to 4 ranks of each MPI flavour."""

from __future__ import annotations

import pytest

from flavours import Flavour
from rank_jobs import TESTS, run_rank_tests

JOB_DEADLINE_S = 600.0


@pytest.mark.timeout(JOB_DEADLINE_S + 60)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_inside_ranks(flavour: Flavour, n: int) -> None:
    job = run_rank_tests(flavour, n, [TESTS / "ranks"], timeout_s=JOB_DEADLINE_S)
    if job.status:
        pytest.fail(job.report, pytrace=False)
