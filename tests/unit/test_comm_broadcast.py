"""In-process broadcast: results, layouts, outs and refusals."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import ncclcomm
from contract.array_samples import DEVICES, LAYOUTS, MOVABLE, assert_same_bits, host_backend, sample  # noqa: F401
from ncclcomm import ArgumentError, UnsupportedError, asarray, device_index, to_numpy
from ncclcomm.comm import broadcast

pytestmark = pytest.mark.usefixtures("host_backend")

ORDERS = [order for n in range(1, DEVICES + 1) for order in itertools.permutations(range(DEVICES), n)]


@pytest.mark.parametrize("source", [-1, *range(DEVICES)])
def test_every_order_of_devices(source: int) -> None:
    value = sample("f8", (3, 2), source + 1)
    array = asarray(value.copy(), device=source)
    for order in ORDERS:
        copies = broadcast(array, order)
        assert type(copies) is tuple
        assert [device_index(copy) for copy in copies] == list(order)
        for device, copy in zip(order, copies, strict=True):
            assert (copy is array) == (device == source)
            assert_same_bits(to_numpy(copy), value, order)
            assert copy.flags.c_contiguous
    assert_same_bits(to_numpy(array), value)


@pytest.mark.parametrize("dtype", MOVABLE, ids=str)
def test_every_dtype_and_layout(dtype: np.dtype[Any]) -> None:
    for layout, (shape, look) in LAYOUTS.items():
        base = sample(dtype, shape, 1)
        for array in (look(asarray(base, device=1)), look(base)):
            copies = broadcast(array, [2, 0])
            for copy in copies:
                assert_same_bits(to_numpy(copy), look(base).copy(), layout)
                assert copy.flags.c_contiguous
            assert not np.shares_memory(to_numpy(copies[0]), base)


def test_no_dimension() -> None:
    value = np.array(2.5)
    for copy in broadcast(asarray(value, device=3), range(DEVICES)):
        assert_same_bits(to_numpy(copy), value)


def test_read_only_and_repeating_input() -> None:
    row = np.arange(4.0)
    row.flags.writeable = False
    for array in (row, np.broadcast_to(row, (3, 4))):
        (copy,) = broadcast(array, [1])
        assert_same_bits(to_numpy(copy), array.copy())
        assert copy.flags.writeable


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["i4", ">f8", "S5"])
def test_out_views_are_filled_in_place(layout: str, dtype: str) -> None:
    shape, look = LAYOUTS[layout]
    value = look(sample(dtype, shape, 1)).copy()
    bases = [sample(dtype, shape, 10 + device) for device in (2, 0, 2)]
    whole = [asarray(base, device=device) for base, device in zip(bases, (2, 0, 2), strict=True)]
    outs = [look(array) for array in whole]
    found = broadcast(asarray(value, device=0), out=outs)
    assert type(found) is tuple
    assert all(a is b for a, b in zip(found, outs, strict=True))
    for base, array in zip(bases, whole, strict=True):
        expected = base.copy()
        look(expected)[...] = value
        assert_same_bits(to_numpy(array), expected, layout)


def test_source_may_be_among_out() -> None:
    array, out = asarray(np.arange(6.0), device=1), asarray(np.zeros(6), device=2)
    found = broadcast(array, out=iter([array, out]))
    assert found[0] is array
    for each in found:
        np.testing.assert_array_equal(to_numpy(each), np.arange(6.0))


def test_devices_are_any_iterable_of_names() -> None:
    array = asarray(np.arange(3), device=0)
    objects = [np.int64(1), "cuda:2", "host:3", ncclcomm.device(1), asarray(np.zeros(1), device=2).device]
    for devices in (objects, tuple(objects), iter(objects), (each for each in objects)):
        assert [device_index(copy) for copy in broadcast(array, devices)] == [1, 2, 3, 1, 2]
    assert [device_index(copy) for copy in broadcast(array, range(1, 3))] == [1, 2]
    assert [device_index(copy) for copy in broadcast(array, np.array([3, 1]))] == [3, 1]


def test_device_may_stand_twice() -> None:
    first, second = broadcast(asarray(np.arange(3), device=0), [1, 1])
    assert first is not second
    assert not np.shares_memory(first.view(np.ndarray), second.view(np.ndarray))


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ([], "devices is empty; expected at least one"),
        ([0, 99], r"devices\[1\].*99 is not there.*4 devices"),
        ([0, -1], r"devices\[1\].*-1"),
        ([True], r"devices\[0\].*True.*not a device"),
        ([1.0], r"devices\[0\].*1\.0.*not a device"),
        ([None], r"devices\[0\].*None"),
        (["cpu"], r"devices\[0\].*cpu"),
        ("cuda:0", "iterable of device numbers, not 'cuda:0'"),
        ("", "iterable of device numbers, not ''"),
        (1, "iterable of device numbers, not 1"),
        (None, "exactly one of devices and out.*neither"),
    ],
    ids=str,
)
def test_bad_devices(devices: Any, words: str) -> None:
    array = asarray(np.arange(3.0), device=0)
    with pytest.raises(ArgumentError, match=f"^broadcast: .*{words}") as caught:
        broadcast(array, devices)
    assert isinstance(caught.value, (RuntimeError, ValueError))
    np.testing.assert_array_equal(to_numpy(array), np.arange(3.0))


def _outs() -> list[Any]:
    """Two arrays that fit."""
    return [asarray(np.zeros(6), device=device) for device in (1, 2)]


def _readonly(array: Any) -> Any:
    """The array, not to be written."""
    array.flags.writeable = False
    return array


def _bad_out(kind: str, source: Any) -> list[Any]:
    """Arrays of which the last can't take the result."""
    good = _outs()[0]
    shared = asarray(np.zeros(9), device=3)
    return {
        "empty": [],
        "shape": [good, asarray(np.zeros(5), device=2)],
        "dimensions": [good, asarray(np.zeros((1, 6)), device=2)],
        "dtype": [good, asarray(np.zeros(6, "f4"), device=2)],
        "byte order": [good, asarray(np.zeros(6, ">f8"), device=2)],
        "host": [good, np.zeros(6)],
        "read-only": [good, _readonly(asarray(np.zeros(6), device=2))],
        "repeating": [good, np.lib.stride_tricks.as_strided(asarray(np.zeros(6), device=2), (6,), (0,), subok=True)],
        "reversed input": [good, source[::-1]],
        "each other": [good, shared[:6], shared[3:]],
    }[kind]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("empty", "out is empty; expected at least one array"),
        ("shape", r"out\[1\] has shape \(5,\).*float64.*the result has shape \(6,\)"),
        ("dimensions", r"out\[1\] has shape \(1, 6\).*the result has shape \(6,\)"),
        ("dtype", r"out\[1\].*float32; the result.*float64"),
        ("byte order", r"out\[1\].*>f8; the result.*float64"),
        ("host", r"out\[1\] is in host memory; expected an array of a device"),
        ("read-only", r"out\[1\] is read-only"),
        ("repeating", r"out\[1\].*share memory"),
        ("reversed input", r"out\[1\] overlaps an input"),
        ("each other", r"out\[2\] overlaps"),
    ],
)
def test_bad_out_writes_nothing(kind: str, words: str) -> None:
    source = asarray(np.arange(6.0), device=1)
    outs = _bad_out(kind, source)
    before = [to_numpy(out) for out in outs]
    with pytest.raises(ArgumentError, match=f"^broadcast: {words}"):
        broadcast(source, out=outs)
    for out, was in zip(outs, before, strict=True):
        assert_same_bits(to_numpy(out), was, kind)


def test_overlap_within_an_input_is_found_and_interleaving_is_fine() -> None:
    whole = asarray(np.arange(12.0), device=1)
    with pytest.raises(ArgumentError, match=r"out\[0\] overlaps an input"):
        broadcast(whole[:6], out=[whole[3:9]])
    np.testing.assert_array_equal(to_numpy(whole), np.arange(12.0))
    broadcast(whole[::2], out=[whole[1::2]])
    np.testing.assert_array_equal(to_numpy(whole), np.repeat(np.arange(0.0, 12.0, 2), 2))


def test_both_devices_and_out() -> None:
    outs = _outs()
    with pytest.raises(ArgumentError, match="exactly one of devices and out.*both"):
        broadcast(asarray(np.arange(6.0), device=0), [1, 2], out=outs)
    assert not to_numpy(outs[0]).any()


@pytest.mark.parametrize("out", [5, "ab", np.zeros(3)], ids=["int", "str", "array"])
def test_out_is_a_list(out: Any) -> None:
    with pytest.raises(ArgumentError, match="broadcast: out must be an iterable of arrays"):
        broadcast(asarray(np.zeros(3), device=0), out=out)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "NoneType"),
        (3.5, "float"),
        ([1, 2], "list"),
        ("text", "str"),
        (np.array([None, 1]), "dtype object"),
        (np.zeros(2, [("a", object)]), "dtype.*object"),
        (np.ma.array([1, 2], mask=[0, 1]), "MaskedArray"),
        (np.eye(2).view(np.matrix), "matrix"),
    ],
    ids=["None", "float", "list", "str", "object", "record of objects", "masked", "matrix"],
)
def test_unsupported_kinds_are_named(value: Any, words: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^broadcast: tensor: .*{words}") as caught:
        broadcast(value, [0, 1])
    assert isinstance(caught.value, TypeError)
