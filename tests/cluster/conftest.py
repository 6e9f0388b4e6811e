"""Fixtures of the tests that run over several hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from cluster.fake_hosts import Hosts


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
