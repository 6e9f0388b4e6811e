"""What every test shares: MPI flavours, and the list of components that were not there."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from flavours import COMMON_FLAVOURS, FAULTS_OF_OPENMPI, Flavour, find, skipped_components

# A shell without job control has what it runs in the background ignore Ctrl-C, which programs under test would inherit.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

RUNS = 3
"""How often a test is run, at the most."""
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest file, which would keep one process busy when the others are done."""
    items.sort(key=lambda item: item.path != RANK_TESTS.parent / "test_ranks.py")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give tests with the `flavour` fixture the flavours that their `flavours` mark names, or the common ones."""
    chosen = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "flavour" in metafunc.fixturenames and not any("flavour" in names for names in chosen):
        mark = metafunc.definition.get_closest_marker("flavours")
        metafunc.parametrize("flavour", mark.args if mark else COMMON_FLAVOURS, indirect=True)


@pytest.fixture
def flavour(request: pytest.FixtureRequest) -> Flavour:
    """One MPI flavour after another: `.run(n, argv)` starts ranks under a deadline, and leaves nothing of them."""
    return find(request.param)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test again that a known fault of Open MPI's spoiled."""
    if item.config.getoption("with_mpi", default=False):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for run in range(RUNS):
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        failures = [report.longreprtext for report in reports if report.failed]
        if run == RUNS - 1 or not any(fault in text for fault in FAULTS_OF_OPENMPI for text in failures):
            break
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that prints which components this one did not find."""
    output = getattr(session.config, "workeroutput", None)  # there in a process of pytest-xdist's
    if output is not None:
        output["skipped_components"] = skipped_components


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Hear it."""
    skipped_components.update(getattr(node, "workeroutput", {}).get("skipped_components", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which components were not tested, and why."""
    if skipped_components:
        terminalreporter.section("components not tested")
        for component, reason in sorted(skipped_components.items()):
            terminalreporter.write_line(f"{component}: {reason}")
