"""Tests of GPUs: skipped, with the reason, where there is none; a CI machine has none.

The mark `gpu(n)` asks for n GPUs; `gpu(n, ranks=True)` for n ranks with a GPU each, which can also share the only one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from flavours import Flavour, find, missing
from ncclcomm.devices.cuda import CudaBackend, probe
from ncclcomm.devices.registry import use_backend

ONE_GPU = Path(__file__).parent / "one_gpu"


class _OnOneGpu(Flavour):
    """Ranks that take the only GPU for one of their own; see one_gpu."""

    def env(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment in which its ranks start."""
        env = super().env(extra)
        path = os.pathsep.join([str(ONE_GPU), *filter(None, [env.get("PYTHONPATH")])])
        return {**env, "PYTHONPATH": path, "NCCL_SOCKET_IFNAME": "lo"}


def _asked(request: pytest.FixtureRequest) -> tuple[int, bool]:
    """How many GPUs the test's mark asks for (1 without one), and whether ranks that share one do."""
    mark = request.node.get_closest_marker("gpu")
    return (mark.args[0], mark.kwargs.get("ranks", False)) if mark else (1, False)


@pytest.fixture(autouse=True)
def gpus(request: pytest.FixtureRequest) -> int:
    """The number of GPUs; skips where there are fewer than the test's `gpu` mark asks for."""
    needed, by_ranks = _asked(request)
    count, reason = probe()
    if count < (1 if by_ranks else needed):
        missing(f"{needed} GPU{'s' * (needed > 1)}", reason or f"there is {count}", ci_has_it=False)
    return count


@pytest.fixture
def backend(gpus: int) -> Iterator[CudaBackend]:
    """The CUDA backend, in use."""
    with use_backend(CudaBackend()) as chosen:
        assert isinstance(chosen, CudaBackend)
        yield chosen


@pytest.fixture
def any_flavour(request: pytest.FixtureRequest, gpus: int) -> Flavour:
    """The MPI that is here: a GPU machine need not have both."""
    found = _find_any()
    return found if gpus >= _asked(request)[0] else _OnOneGpu(found.name, found.python, found.mpiexec)


def _find_any() -> Flavour:
    """The first flavour that is here."""
    for name in ("openmpi", "mpich"):
        try:
            found = find(name)
        except pytest.skip.Exception:
            continue
        return found
    return find("mpich")
