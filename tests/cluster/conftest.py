"""Fixtures of the tests that run over several hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from _pytest.runner import runtestprotocol

from cluster.fake_hosts import Hosts
from cluster.slurm_fixtures import CRASH_IN_INIT, STARTS


@pytest.fixture(scope="session")
def hosts() -> Iterator[Callable[..., Hosts]]:
    """Make fake hosts: `hosts(2)` brings two up, of the caller's own. All go at the end, and nothing may be left."""
    made: list[Hosts] = []

    def make(count: int, rate: str = "") -> Hosts:
        made.append(Hosts(count, rate))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test again where a known fault of Open MPI's spoiled the start of its job; see CRASH_IN_INIT."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for start in range(STARTS):
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        if start == STARTS - 1 or not any(one.failed and CRASH_IN_INIT in one.longreprtext for one in reports):
            break
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
