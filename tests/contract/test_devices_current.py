"""Current devices and streams: what the `with` blocks set and restore, per thread."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from ncclcomm.devices import (
    Stream,
    current_device,
    current_stream,
    default_stream,
    device,
    device_count,
    device_of,
    set_device,
    stream,
)
from ncclcomm.devices.base import DeviceBackend
from ncclcomm.errors import ArgumentError

pytestmark = pytest.mark.usefixtures("backend")

DEADLINE_S = 30.0


def _state() -> tuple[Any, ...]:
    """The calling thread's device and all current streams."""
    return (current_device(), *(current_stream(number) for number in range(device_count())))


def test_starts_on_device_0_and_default_streams() -> None:
    assert _state() == (0, *(default_stream(number) for number in range(device_count())))


def test_device_block_restores() -> None:
    with device(1) as entered:
        assert (current_device(), entered.idx) == (1, 1)
        with device(0):
            assert current_device() == 0
        assert current_device() == 1
        set_device(0)
    assert current_device() == 0


def _fail_inside(block: Any) -> None:
    with block:
        set_device(1)
        raise KeyError("inside")


def test_blocks_restore_after_exceptions() -> None:
    before = _state()
    for block in (device(1), stream(Stream(device=1)), Stream(device=1), device_of(_host_array())):
        with pytest.raises(KeyError, match="inside"):
            _fail_inside(block)
        set_device(0)
        assert _state() == before


def _host_array() -> Any:
    """An array in host memory."""
    return np.zeros(1)


def test_stream_block_makes_the_streams_device_current() -> None:
    before, inner, outer = _state(), Stream(device=1), Stream(device=0)
    with stream(outer):
        assert (current_device(), current_stream()) == (0, outer)
        with stream(inner) as entered:
            assert entered is inner
            assert (current_device(), current_stream(), current_stream(0)) == (1, inner, outer)
        assert (current_device(), current_stream(), current_stream(1)) == (0, outer, default_stream(1))
    assert _state() == before


def test_both_streams_are_restored_whatever_the_body_set() -> None:
    kept, inner = Stream(device=1), Stream(device=1)
    with stream(kept), device(0):
        before = _state()
        with ExitStack() as left_open, inner:
            set_device(0)
            left_open.pop_all()
            current = Stream(device=0)
            current.__enter__()
            set_device(1)
        assert _state() == before
        current.__exit__(None, None, None)
        assert _state() == before


def test_stream_of_the_same_device_restores_it() -> None:
    first, second = Stream(), Stream()
    with first, second:
        assert current_stream() == second
    with first:
        with second:
            pass
        assert current_stream() == first


def test_one_object_entered_twice() -> None:
    before, chosen, one = _state(), stream(Stream(device=1)), device(1)
    with chosen:
        with device(0), chosen, one, device(0), one:
            assert current_device() == 1
        assert (current_device(), current_stream()) == (1, chosen.stream)
    assert _state() == before


@pytest.mark.parametrize("kind", ["device", "context", "stream"])
def test_one_object_in_two_threads_interleaved(kind: str) -> None:
    shared: Any = {"device": device(1), "context": stream(Stream(device=1)), "stream": Stream(device=1)}[kind]
    steps = threading.Barrier(2)
    mine = {0: Stream(device=0), 1: Stream(device=1)}

    def body(number: int) -> list[tuple[Any, ...]]:
        seen = []
        with stream(mine[number]):
            before = _state()
            for turn in range(2):
                # Enters in the order 0 1 and leaves in the same order, so that a shared memory would mix them up.
                if turn == number:
                    shared.__enter__()
                steps.wait(DEADLINE_S)
            seen.append((current_device(),))
            for turn in range(2):
                if turn == number:
                    shared.__exit__(None, None, None)
                steps.wait(DEADLINE_S)
            seen += [_state(), before]
        return seen

    with ThreadPoolExecutor(2) as pool:
        for inside, after, before in pool.map(body, (0, 1)):
            assert inside == (1,)
            assert after == before


def test_new_threads_start_on_device_0_and_default_streams() -> None:
    fresh = _state()
    with stream(Stream(device=1)), ThreadPoolExecutor(1) as pool:
        assert pool.submit(_state).result(DEADLINE_S) == fresh


def test_leaving_in_another_thread_is_an_error() -> None:
    block = device(1)
    with block, ThreadPoolExecutor(1) as pool, pytest.raises(ArgumentError, match="not entered"):
        pool.submit(block.__exit__, None, None, None).result(DEADLINE_S)


def test_blocks_left_out_of_order() -> None:
    first, second = device(1), stream(Stream(device=0))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert current_device() == 0
    second.__exit__(None, None, None)
    assert (current_device(), current_stream(0)) == (1, default_stream(0))
    set_device(0)


def test_no_ops(backend: DeviceBackend) -> None:
    set_device(1)
    with device(-1), stream(None) as nothing, device_of(np.zeros(2)), device_of(memoryview(b"12")):
        assert (current_device(), nothing) == (1, None)
        set_device(-1)
        set_device(np.int64(-3))
        assert current_device() == 1
        set_device(0)
    assert current_device() == 0


def test_device_of_an_array(backend: DeviceBackend) -> None:
    array = backend.empty((3,), np.float32, 1)
    for view in (array, array[1:], array.reshape(3, 1)):
        with device_of(view):
            assert current_device() == 1
    assert current_device() == 0


@pytest.mark.parametrize("value", [3, "text", None, [1.0], object(), Stream, np])
def test_device_of_anything_else(value: Any) -> None:
    with pytest.raises(ArgumentError, match=type(value).__name__):
        device_of(value)
