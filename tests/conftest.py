"""What every test shares: MPI flavours, and the list of components that were not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flavours import FLAVOURS, Flavour, find, skipped_components

RANK_TESTS = Path(__file__).parent / "ranks"

# The same tests on every machine; those of GPUs ask for the CUDA backend themselves.
os.environ.setdefault("NCCLCOMM_DEVICES", "host")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Make the pytests of a job one, where this is one of its ranks."""
    if config.getoption("with_mpi", default=False):
        config.pluginmanager.import_plugin("rank_plugin")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave tests/ranks to the ranks, which run nothing else."""
    for_ranks = RANK_TESTS in collection_path.parents
    return True if collection_path.is_file() and for_ranks != config.getoption("with_mpi", default=False) else None


@pytest.fixture(params=FLAVOURS)
def flavour(request: pytest.FixtureRequest) -> Flavour:
    """Each MPI flavour in turn: `.run(n, argv)` starts ranks under a deadline, on failure nothing of them is left."""
    return find(request.param)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which components were not tested, and why."""
    if skipped_components:
        terminalreporter.section("components not tested")
        for component, reason in sorted(skipped_components.items()):
            terminalreporter.write_line(f"{component}: {reason}")
