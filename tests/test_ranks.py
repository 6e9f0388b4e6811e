"""Runs tests/ranks inside 1 to 4 ranks of each common MPI flavour, and inside 3 of the others."""

from __future__ import annotations

import pytest

from flavours import COMMON_FLAVOURS, FLAVOURS, Flavour
from rank_jobs import TESTS, run_rank_tests

JOB_DEADLINE_S = 600.0


@pytest.mark.timeout(JOB_DEADLINE_S + 60)
@pytest.mark.parametrize(
    ("flavour", "n"),
    [(name, n) for name in FLAVOURS for n in ((1, 2, 3, 4) if name in COMMON_FLAVOURS else (3,))],
    indirect=["flavour"],
)
def test_inside_ranks(flavour: Flavour, n: int) -> None:
    job = run_rank_tests(flavour, n, [TESTS / "ranks"], timeout_s=JOB_DEADLINE_S)
    if job.status:
        pytest.fail(job.report, pytrace=False)
