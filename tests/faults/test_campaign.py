"""A sample of the fault campaign; campaign.py runs the whole."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from faults.campaign import DEADLY, OFF, OPS, deadly_cells, run_deadly, run_told, told_cells
from flavours import Flavour


def test_faults_that_every_rank_is_told_of(flavour: Flavour) -> None:
    wrong = [f"{result.cell}: {result.detail}" for result in run_told(flavour, told_cells()) if not result.right]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("fault", DEADLY)
def test_faults_that_end_the_job(flavour: Flavour, fault: str) -> None:
    # Another operation and rank for each fault; the campaign has them all.
    index = DEADLY.index(fault)
    cell = (OPS[(2 * index + 1) % len(OPS)], index % 3, fault)
    assert cell in deadly_cells()
    result = run_deadly(flavour, cell)
    assert result.right, result.detail


def test_without_checks_and_watchdogs_the_campaign_fails(flavour: Flavour) -> None:
    with ThreadPoolExecutor(1) as pool:  # both jobs hang most of the time
        other = pool.submit(run_deadly, flavour, ("all_reduce", 1, "exit"), timeout_s=15, **OFF)
        (told,) = run_told(flavour, [("all_reduce", 1, "wrong dtype")], timeout_s=8, **OFF)
        deadly = other.result()
    assert not told.right
    # That it is this, and no failure of the job to start.
    assert told.survivors or "got no error" in told.detail or "MismatchError" in told.detail, told.detail
    assert not deadly.right
    assert deadly.survivors or "no word of who left" in deadly.detail, deadly.detail
