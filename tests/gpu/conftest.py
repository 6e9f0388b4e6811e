"""Tests of GPUs: skipped, with the reason, where there is none; a CI machine has none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flavours import Flavour, find, missing
from ncclcomm.devices.cuda import CudaBackend, probe
from ncclcomm.devices.registry import use_backend


@pytest.fixture(autouse=True)
def gpus(request: pytest.FixtureRequest) -> int:
    """The number of GPUs; skips where there are fewer than the test's `gpu` mark asks for (1 without one)."""
    mark = request.node.get_closest_marker("gpu")
    needed = mark.args[0] if mark else 1
    count, reason = probe()
    if count < needed:
        missing(f"{needed} GPU{'s' * (needed > 1)}", reason or f"there is {count}", ci_has_it=False)
    return count


@pytest.fixture
def backend(gpus: int) -> Iterator[CudaBackend]:
    """The CUDA backend, in use."""
    with use_backend(CudaBackend()) as chosen:
        assert isinstance(chosen, CudaBackend)
        yield chosen


@pytest.fixture
def any_flavour() -> Flavour:
    """The MPI that is here: a GPU machine need not have both."""
    for name in ("openmpi", "mpich"):
        try:
            found = find(name)
        except pytest.skip.Exception:
            continue
        return found
    return find("mpich")
