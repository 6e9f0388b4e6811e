"""A sample of the fault campaign; campaign.py runs the whole."""

from __future__ import annotations

import pytest

from faults.campaign import DEADLY, OPS, deadly_cells, run_deadly, run_told, told_cells
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


def test_without_checks_the_campaign_fails(flavour: Flavour) -> None:
    cells = [("all_reduce", 1, "wrong dtype")]
    assert not any(result.right for result in run_told(flavour, cells, timeout_s=8, NCCLCOMM_CHECK="false"))
