"""In-process broadcast_coalesced and reduce_add_coalesced."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from contract.array_samples import (
    LAYOUTS,
    MOVABLE,
    REDUCIBLE,
    addends,
    assert_same_bits,
    eight_devices,  # noqa: F401
    sample,
)
from ncclcomm import ArgumentError, UnsupportedError, asarray, device, device_index, to_numpy
from ncclcomm.comm import broadcast_coalesced, reduce_add, reduce_add_coalesced

pytestmark = pytest.mark.usefixtures("eight_devices")


@pytest.mark.parametrize("devices", [[3], [0, 1], [2, 0, 1], [1, 3, 0, 2], range(8), [1, 1]], ids=str)
def test_broadcast_of_every_dtype_and_layout(devices: Any) -> None:
    bases = [sample(dtype, shape, 1) for dtype in MOVABLE for shape, _ in LAYOUTS.values()]
    looks = [look for _ in MOVABLE for _, look in LAYOUTS.values()]
    tensors = [look(asarray(base, device=1)) for base, look in zip(bases, looks, strict=True)]
    tensors[3] = looks[3](bases[3])  # in host memory
    results = broadcast_coalesced(iter(tensors), iter(devices))
    assert type(results) is tuple
    assert len(results) == len(devices)
    for number, copies in zip(devices, results, strict=True):
        assert type(copies) is tuple
        for tensor, copy, base, look in zip(tensors, copies, bases, looks, strict=True):
            assert device_index(copy) == number
            assert (copy is tensor) == (device_index(tensor) == number)
            assert_same_bits(to_numpy(copy), look(base).copy())


def test_broadcast_of_no_array_and_of_no_dimension() -> None:
    assert broadcast_coalesced([], [0, 1]) == ((), ())
    ((copy,),) = broadcast_coalesced((asarray(np.array(2.5), device=0),), [1], 1)
    assert_same_bits(to_numpy(copy), np.array(2.5))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("destination", [None, 0, 5, "cpu", -1], ids=str)
def test_sums_as_reduce_add_gives_them(n: int, destination: Any) -> None:
    values = [[addends(dtype, (3, 2), i) for dtype in REDUCIBLE["sum"]] for i in range(n)]
    lists = [[asarray(value, device=i) for value in some] for i, some in enumerate(values)]
    with device(3):
        found = reduce_add_coalesced((iter(some) for some in lists), destination)
        expected = [reduce_add([some[place] for some in lists], destination) for place in range(len(values[0]))]
    assert type(found) is tuple
    for got, want in zip(found, expected, strict=True):
        assert device_index(got) == device_index(want)
        assert_same_bits(to_numpy(got), to_numpy(want))
    for some, kept in zip(lists, values, strict=True):
        for array, value in zip(some, kept, strict=True):
            assert_same_bits(to_numpy(array), value, "an input")


def test_sums_are_exact() -> None:
    lists = [[asarray(np.arange(5) * (i + 1), device=i), asarray(np.array(i + 0.5), device=i)] for i in range(4)]
    whole, point = reduce_add_coalesced(lists, 2, buffer_size=8)
    assert_same_bits(to_numpy(whole), np.arange(5) * 10)
    assert_same_bits(to_numpy(point), np.array(8.0))


def test_sum_of_no_array_and_of_one_list() -> None:
    assert reduce_add_coalesced([[], []], 1) == ()
    array = asarray(np.arange(3.0), device=1)
    (same,) = reduce_add_coalesced([[array]], 1)
    assert same is array
    (other,) = reduce_add_coalesced([[array]], 0)
    assert device_index(other) == 0
    assert_same_bits(to_numpy(other), np.arange(3.0))


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "8"], ids=str)
def test_bad_buffer_size(size: Any) -> None:
    array = asarray(np.zeros(3), device=0)
    with pytest.raises(ArgumentError, match="^broadcast_coalesced: buffer_size must be"):
        broadcast_coalesced([array], [1], size)
    with pytest.raises(ArgumentError, match="^reduce_add_coalesced: buffer_size must be"):
        reduce_add_coalesced([[array]], 1, size)


def test_broadcast_refusals() -> None:
    array = asarray(np.zeros(3), device=0)
    with pytest.raises(ArgumentError, match="^broadcast_coalesced: tensors must be an iterable of arrays, not one"):
        broadcast_coalesced(array, [1])
    with pytest.raises(ArgumentError, match="^broadcast_coalesced: devices is empty"):
        broadcast_coalesced([array], [])
    with pytest.raises(ArgumentError, match=r"^broadcast_coalesced: devices\[1\].*99 is not there"):
        broadcast_coalesced([array], [1, 99])
    with pytest.raises(UnsupportedError, match=r"^broadcast_coalesced: tensors\[1\]: float is not a supported array"):
        broadcast_coalesced([array, 1.5], [1])


def test_sum_refusals() -> None:
    first, second = (asarray(np.zeros(3), device=i) for i in range(2))
    call = "^reduce_add_coalesced: "
    with pytest.raises(ArgumentError, match=call + r"inputs\[1\] has 1 arrays; expected 2 as inputs\[0\]"):
        reduce_add_coalesced([[first, first], [second]])
    with pytest.raises(ArgumentError, match=call + "inputs is empty"):
        reduce_add_coalesced([])
    with pytest.raises(ArgumentError, match=call + r"inputs\[0\] must be an iterable of arrays, not one"):
        reduce_add_coalesced([first, second])
    with pytest.raises(ArgumentError, match=call + r"inputs\[1\]\[1\] has shape \(2,\); expected .* as inputs\[0\]"):
        reduce_add_coalesced([[first, first], [second, second[:2]]])
    with pytest.raises(ArgumentError, match=call + r"inputs\[1\]\[0\] is in host memory"):
        reduce_add_coalesced([[first], [np.zeros(3)]])
    with pytest.raises(UnsupportedError, match=call + "sum of dtype datetime64"):
        reduce_add_coalesced([[asarray(np.zeros(3, "M8[s]"), device=0)]])
    with pytest.raises(ArgumentError, match=call + "destination"):
        reduce_add_coalesced([[first], [second]], 99)
