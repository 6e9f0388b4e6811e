"""How much Python an in-process call of small arrays runs, in calls of functions: unlike times, the same each time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ncclcomm import asarray, comm, empty
from ncclcomm.devices import use_backend
from ncclcomm.devices.host import HostBackend

MOST = {
    "broadcast": (31, 53),
    "broadcast out": (42, 50),
    "scatter": (42, 68),
    "scatter out": (44, 58),
    "gather": (38, 46),
    "gather out": (36, 44),
    "reduce_add": (44, 54),
    "all_reduce": (61, 91),
    "all_gather": (64, 112),
    "reduce_scatter": (76, 152),
}
"""The most calls of functions with two devices, and with four: two more than there are with Python 3.11."""


def _calls(run: Callable[[], Any]) -> int:
    """How many functions, of Python and of C, a call runs."""
    count = 0

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    run()
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize(("place", "n"), [(0, 2), (1, 4)], ids=["2 devices", "4 devices"])
@pytest.mark.parametrize("name", MOST)
def test_calls_of_functions(name: str, place: int, n: int) -> None:
    with use_backend(HostBackend(n)):
        arrays = [asarray(np.arange(8.0), device=i) for i in range(n)]
        outs = [empty(8, float, i) for i in range(n)]
        parts = [empty(8 // n, float, i) for i in range(n)]
        order = list(range(n))
        call: Callable[[], Any] = {
            "broadcast": lambda: comm.broadcast(arrays[0], order),
            "broadcast out": lambda: comm.broadcast(arrays[0], out=outs),
            "scatter": lambda: comm.scatter(arrays[0], order),
            "scatter out": lambda: comm.scatter(arrays[0], out=parts),
            "gather": lambda: comm.gather(parts, destination=0),
            "gather out": lambda: comm.gather(parts, out=outs[0]),
            "reduce_add": lambda: comm.reduce_add(arrays, 0),
            "all_reduce": lambda: comm.all_reduce(arrays),
            "all_gather": lambda: comm.all_gather(parts),
            "reduce_scatter": lambda: comm.reduce_scatter(arrays),
        }[name]
        assert _calls(call) <= MOST[name][place]
