"""Inputs whose result is known, and the comparison that finds any element that differs."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest

import ncclcomm
from ncclcomm.bench import patterns
from ncclcomm.bench.case import Buffers, Row
from ncclcomm.bench.ops import DEVICE_OPS, RANK_OPS, Op, Share
from ncclcomm.bench.patterns import Piece
from ncclcomm.bench.stats import bus_of_parts
from ncclcomm.errors import UnsupportedError
from ncclcomm.reductions import OPS, check_reduction, ufunc_for

DTYPES = [np.dtype(d) for d in "?bBhHiIlLefdFD"]


def reducible() -> list[Any]:
    """Every reduction with every dtype that it takes, those of ml_dtypes too."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    found = []
    for dtype in [*DTYPES, np.dtype(ml_dtypes.bfloat16)]:
        for reduction in OPS:
            try:
                check_reduction(reduction, dtype, "test")
            except UnsupportedError:
                continue
            found.append(pytest.param(dtype, reduction, id=f"{reduction}-{dtype.name}"))
    return found


@pytest.mark.parametrize(("dtype", "reduction"), reducible())
@pytest.mark.parametrize("size", [1, 3, 4])
def test_any_order_of_adding_gives_the_expected_bits(dtype: np.dtype[Any], reduction: str, size: int) -> None:
    func = ufunc_for("sum" if reduction == "avg" else reduction, dtype)
    arrays = [patterns.sent(dtype, reduction, member, size) for member in range(size)]
    expected = patterns.reduced(dtype, reduction, size)
    assert expected.dtype == dtype
    assert len(set(expected.tolist())) > 1, "a constant would hide elements that change places"
    for order in permutations(range(size)):
        total = arrays[order[0]]
        for member in order[1:]:
            total = func(total, arrays[member])
        if reduction == "avg":
            total = (total / dtype.type(size)).astype(dtype)
        assert np.array_equal(total, expected)


@pytest.mark.parametrize(
    ("reduction", "name"),
    [
        (r, n)
        for r in ("sum", "prod", "avg")
        for n in ("int8", "float16", "bfloat16", "float32")
        if (r, n) != ("avg", "int8")
    ],
)
def test_many_members_stay_exact(reduction: str, name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    size = 300
    exact = np.full(patterns.PERIOD, 1.0 if reduction == "prod" else 0.0)
    for member in range(size):
        one = patterns.sent(dtype, reduction, member, size).astype(np.float64)
        exact = exact * one if reduction == "prod" else exact + one
    if reduction == "avg":
        exact /= size
        assert len({patterns.sent(dtype, reduction, member, size).tobytes() for member in range(size)}) == size
    assert np.array_equal(patterns.reduced(dtype, reduction, size).astype(np.float64), exact)


def test_members_send_different_data() -> None:
    for dtype in DTYPES:
        assert len({patterns.sent(dtype, "", member, 4).tobytes() for member in range(4)}) == 4
        assert len({patterns.sent(dtype, "sum", member, 4).tobytes() for member in range(4)}) == 4


@pytest.mark.parametrize("size", [2, 3, 4, 17, 64])
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"])
def test_no_members_data_are_the_average(name: str, size: int) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    average = patterns.reduced(dtype, "avg", size)
    assert len(set(average.tolist())) > 1
    seen = set()
    exact, most = np.zeros(patterns.PERIOD, np.complex128), np.zeros(patterns.PERIOD)
    for member in range(size):
        one = patterns.sent(dtype, "avg", member, size)
        assert np.mean(one != average) > 0.3, f"what member {member} sends is nearly the result"
        seen.add(one.tobytes())
        exact += one.astype(np.complex128)
        most += np.maximum(np.abs(one.astype(np.complex128).real), np.abs(one.astype(np.complex128).imag))
    assert len(seen) == size
    assert np.array_equal(exact / size, average.astype(np.complex128))
    assert most.max() <= patterns._EXACT.get(name, 1 << 53), "partial sums round"


def fetch(array: Any) -> Any:
    """A plain array is in host memory already."""
    return array


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("exact_bits", [True, False])
def test_a_wrong_element_is_found_wherever_it_is(
    dtype: np.dtype[Any], exact_bits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "_BLOCK", patterns.PERIOD * 3)
    if exact_bits:
        first, second = (patterns.sent(dtype, "", member, 2) for member in (0, 1))
    else:
        first, second = patterns.reduced(dtype, "sum", 2), patterns.sent(dtype, "sum", 1, 2)
    count = patterns.PERIOD * 3 + 31  # more than one block of comparison
    pieces = [Piece(first, 17, count, exact_bits), Piece(second, 0, 1000, exact_bits)]
    good = np.concatenate([np.tile(first, 5)[17 : 17 + count], second[:1000]])
    assert patterns.first_wrong(good, pieces, fetch) is None
    for place in (0, 1, patterns.PERIOD, count - 32, count - 1, count, count + 999):
        bad = good.copy()
        bad[place] = ~bad[place] if dtype.kind == "b" else bad[place] + dtype.type(1)
        if np.array_equal(bad[place : place + 1], good[place : place + 1], equal_nan=dtype.kind in "fc"):
            bad[place] = 0  # adding 1 did not change a huge number, or what is none
        wrong = patterns.first_wrong(bad, pieces, fetch)
        assert wrong is not None, place
        assert wrong.where == place
        assert (wrong.expected, wrong.got) == (str(good[place]), str(bad[place]))


def test_the_first_of_several_is_named() -> None:
    pattern = patterns.sent(np.dtype("i4"), "", 0, 1)
    bad = np.tile(pattern, 2)
    bad[[40, 7, 9000]] += 1
    wrong = patterns.first_wrong(bad, [Piece(pattern, 0, bad.size, exact_bits=True)], fetch)
    assert wrong is not None
    assert wrong.where == 7


def test_wrong_length_and_dtype_are_found() -> None:
    pattern = patterns.sent(np.dtype("i4"), "", 0, 1)
    pieces = [Piece(pattern, 0, 100, exact_bits=True)]
    short = patterns.first_wrong(pattern[:99], pieces, fetch)
    assert short is not None
    assert (short.where, short.expected, short.got) == (99, "100 elements", "99 elements")
    other = patterns.first_wrong(pattern[:100].astype("i8"), pieces, fetch)
    assert other is not None
    assert (other.expected, other.got) == ("dtype int32", "dtype int64")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_poison_is_no_result(dtype: np.dtype[Any]) -> None:
    array = np.empty(1000, dtype)
    patterns.poison(array, np.copyto)
    for member in range(4):
        pieces = [Piece(patterns.sent(dtype, "", member, 4), 0, 1000, exact_bits=True)]
        assert patterns.first_wrong(array, pieces, fetch) is not None
    if dtype.kind != "b":
        pieces = [Piece(patterns.reduced(dtype, "sum", 4), 0, 1000, exact_bits=False)]
        assert patterns.first_wrong(array, pieces, fetch) is not None


def model(op: Op, arrays: list[Any], root: int) -> list[Any]:
    """What NumPy gives each member, of what all send; None where a member gets nothing."""
    size = len(arrays)
    if op.reduces:
        whole = np.add.reduce(arrays, dtype=arrays[0].dtype)
    elif op.sends is Share.WHOLE_ROOT:
        whole = arrays[root]
    elif op.sends is Share.PART_EACH:
        whole = np.concatenate(arrays)
    else:
        return [np.concatenate([np.split(array, size)[member] for array in arrays]) for member in range(size)]
    if op.gets is Share.PART_EACH:
        return list(np.split(whole, size))
    return [whole if op.gets.count(1, member, root, size) >= 0 else None for member in range(size)]


LATER_OPS = {
    "all_gather": Op("all_gather", Share.PART_EACH, Share.WHOLE_EACH, bus_of_parts, lambda *_: print),
    "reduce_scatter": Op("reduce_scatter", Share.WHOLE_EACH, Share.PART_EACH, bus_of_parts, lambda *_: print, "*"),
    "all_to_all": Op("all_to_all", Share.WHOLE_EACH, Share.WHOLE_EACH, bus_of_parts, lambda *_: print),
}
"""Shapes of collectives that add themselves in one entry."""


@pytest.mark.parametrize("op", [*RANK_OPS.values(), *DEVICE_OPS.values(), *LATER_OPS.values()], ids=lambda op: op.name)
@pytest.mark.parametrize("root", [0, 2])
def test_expected_results_are_numpys(op: Op, root: int) -> None:
    size = 3
    row = Row.of(op, np.dtype("i4"), "sum" if op.reduces else "", 4 * 33, size, root)
    root = row.roots[0]
    buffers = Buffers(row, range(size), ["cpu"] * size, fresh=False)
    case = buffers.case(root)
    sent = [np.array([]) if send is None else send for send in case.sends]
    results = model(op, sent, root) if op.moves else [None] * size
    assert [recv is None for recv in case.recvs] == [result is None for result in results]
    assert case.first_wrong(results) is None
    for member, result in enumerate(results):
        if result is not None:
            result = result.copy()
            result[-1] += 1
            changed = [*results[:member], result, *results[member + 1 :]]
            found = case.first_wrong(changed)
            assert found is not None
            assert (found[0], found[1].where) == (member, result.size - 1)


def test_a_changed_input_is_found() -> None:
    row = Row.of(RANK_OPS["all_reduce"], np.dtype("i4"), "sum", 400, 2, 0)
    case = Buffers(row, [1], ["cpu"], fresh=False).case(0)
    results = [np.tile(patterns.reduced(row.dtype, "sum", 2), 1)[:100]]
    assert case.first_wrong(results) is None
    case.send[3] += 1
    found = case.first_wrong(results)
    assert found is not None
    assert found[0] == 1
    assert "its input unchanged" in found[1].expected


def test_buffers_are_where_they_are_asked_for() -> None:
    row = Row.of(DEVICE_OPS["scatter"], np.dtype("f4"), "", 4 * 33, 3, None)
    buffers = Buffers(row, range(3), range(3), fresh=False)
    case = buffers.case(1)
    assert [send is None for send in case.sends] == [True, False, True]
    assert [ncclcomm.device_index(recv) for recv in case.recvs] == [0, 1, 2]
