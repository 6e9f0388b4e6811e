"""How much Python a call on small arrays takes, counted: what a clock can't hold on a busy machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

import ncclcomm

CHECKED = 4

MOST = {
    "all_reduce": 20,
    "reduce": 19,
    "barrier": 11,
    "broadcast": 13,
    "broadcast out": 14,
    "scatter": 25,
    "gather": 30,
    "all_reduce of a device": 30,
    "strided all_reduce": 88,
}
"""Functions, of Python and of C, that a call may enter: what it takes now. Each is 50 ns or more."""


def entered(call: Callable[[], object]) -> int:
    """How many functions a call enters, itself included."""
    count = 0

    def note(frame: FrameType, event: str, value: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count - 2  # this test's own lambda, and the last setprofile


def calls(comm: ncclcomm.Communicator) -> dict[str, Callable[[], object]]:
    """The calls that are counted."""
    array, out = np.ones(4), np.empty(4)
    wide = np.ones(8)[::2]
    device, device_out = (ncclcomm.asarray(x, device=comm.device) for x in (array, out))
    return {
        "all_reduce": lambda: comm.all_reduce(array, out=out),
        "reduce": lambda: comm.reduce(array, out=out),
        "barrier": lambda: comm.barrier(),
        "broadcast": lambda: comm.broadcast(array),
        "broadcast out": lambda: comm.broadcast(out=array),
        "scatter": lambda: comm.scatter(array, out=out),
        "gather": lambda: comm.gather(array, out=out),
        "all_reduce of a device": lambda: comm.all_reduce(device, out=device_out),
        "strided all_reduce": lambda: comm.all_reduce(wide, out=out),
    }


@pytest.mark.parametrize("name", list(MOST))
def test_a_call_enters_few_functions(name: str) -> None:
    with ncclcomm.Communicator(check=CHECKED) as comm:
        call = calls(comm)[name]
        for _ in range(CHECKED + 2):
            call()
        counts = {entered(call) for _ in range(3)}
        assert max(counts) <= MOST[name], f"{name} enters {sorted(counts)} functions; {MOST[name]} were enough"


def test_the_count_sees_what_is_added() -> None:
    assert entered(lambda: None) == 0
    assert entered(lambda: max(len(()), abs(-1))) == 3


def test_the_short_way_is_taken_when_checks_are_over() -> None:
    with ncclcomm.Communicator(check=CHECKED) as comm:
        call = calls(comm)["all_reduce"]
        for _ in range(CHECKED):
            before = entered(call)
        call()
        assert entered(call) < before / 2, "checked calls must take the long way, and later ones the short one"
