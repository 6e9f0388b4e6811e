"""What every transport must do: functions that check one through the contract in transport/base.py alone.

Each takes the transport and `settle`, which returns when all work queued on the members' devices is done. All
processes that drive members call the same function. A member's data follow from its number, so that every process
knows what all members hold.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from contract.array_samples import FLOATS, MOVABLE, REDUCIBLE, addends, assert_same_bits, sample
from ncclcomm.transport.base import REDUCTIONS, Transport

__all__ = ["CHECKS"]

LENGTHS = (0, 1, 13, 1009)
LARGE = 10_007

Settle = Callable[[], None]
Array = np.ndarray[Any, Any]

_UFUNCS: dict[str, Callable[..., Any]] = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


def _sizes_and_dtypes() -> list[tuple[int, np.dtype[Any]]]:
    """Every length with one dtype, and every dtype with one length."""
    lengths = [(n, np.dtype("f4")) for n in LENGTHS] + [(LARGE, np.dtype("i8"))]
    return lengths + [(13, dtype) for dtype in MOVABLE]


def _frozen(array: Array) -> Array:
    """The array, read-only, so that a transport that changes an input fails."""
    array.flags.writeable = False
    return array


def _blank(like: Array) -> Array:
    """An array of another content, to be filled."""
    return np.zeros(like.shape, like.dtype)


def _reduced(arrays: list[Array], op: str) -> Array:
    """What NumPy makes of all members' arrays."""
    func = np.logical_or if op == "sum" and arrays[0].dtype.kind == "b" else _UFUNCS[op]
    with np.errstate(all="ignore"):
        return np.asarray(functools.reduce(func, arrays)).astype(arrays[0].dtype, copy=False)


_found: list[AssertionError] = []


def _note(check: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Keep a failure for the end: members that stopped here would leave the others waiting in the next call."""
    try:
        check(*args, **kwargs)
    except AssertionError as error:
        _found.append(error)


def _complete(check: Callable[[Transport, Settle], None]) -> Callable[[Transport, Settle], None]:
    """A check that raises its first failure once all its calls are made."""

    @functools.wraps(check)
    def run(transport: Transport, settle: Settle) -> None:
        _found.clear()
        check(transport, settle)
        if _found:
            raise AssertionError(f"{len(_found)} results are wrong; the first: {_found[0]}")

    return run


def check_identity(transport: Transport, settle: Settle) -> None:
    """A transport has a name, and drives some of its members."""
    assert isinstance(transport.name, str)
    assert transport.name
    assert len(transport.members) == len(set(transport.members)) >= 1
    assert set(transport.members) <= set(range(transport.size))


def check_broadcast(transport: Transport, settle: Settle) -> None:
    """Every member gets the root's bits; the root's buffer may be read-only."""
    for root in range(transport.size):
        for n, dtype in _sizes_and_dtypes():
            sent = sample(dtype, n, root)
            buffers = [_frozen(sent.copy()) if m == root else sample(dtype, n, 50 + m) for m in transport.members]
            transport.broadcast(buffers, root)
            settle()
            for buffer in buffers:
                _note(assert_same_bits, buffer, sent, (root, n, dtype))


def _part_lengths(size: int, n: int) -> list[int]:
    """Lengths of all members' parts: uneven, one of them 0 unless n is."""
    return [n * ((3 * member + 2) % 5) // 2 for member in range(size)]


def check_scatter(transport: Transport, settle: Settle) -> None:
    """Member i gets part i, also where the root's out is its own part."""
    for root in range(transport.size):
        for n, dtype in _sizes_and_dtypes():
            for alias in (False, True):
                sent = [sample(dtype, k, 10 * root + i) for i, k in enumerate(_part_lengths(transport.size, n))]
                drives_root = root in transport.members
                parts = [_frozen(part.copy()) for part in sent] if drives_root else None
                outs = [parts[root] if parts and alias and m == root else _blank(sent[m]) for m in transport.members]
                transport.scatter(parts, outs, root)
                settle()
                for member, out in zip(transport.members, outs, strict=True):
                    _note(assert_same_bits, out, sent[member], (root, n, dtype, alias))


def check_gather(transport: Transport, settle: Settle) -> None:
    """The root's part i is member i's array, also where the root's array is its own part."""
    for root in range(transport.size):
        for n, dtype in _sizes_and_dtypes():
            for alias in (False, True):
                sent = [sample(dtype, k, 20 * root + i) for i, k in enumerate(_part_lengths(transport.size, n))]
                arrays = [_frozen(sent[m].copy()) for m in transport.members]
                parts = [_blank(part) for part in sent] if root in transport.members else None
                if parts is not None and alias:
                    parts[root] = arrays[transport.members.index(root)]
                transport.gather(arrays, parts, root)
                settle()
                for member, part in enumerate(parts or ()):
                    _note(assert_same_bits, part, sent[member], (root, n, dtype, alias))


def check_packed_parts(transport: Transport, settle: Settle) -> None:
    """Parts that are consecutive views of one array: nothing is written outside a part."""
    for root in range(transport.size):
        ends = np.cumsum([0, *_part_lengths(transport.size, 13)])
        whole = sample("i8", int(ends[-1]) + 2, root)
        inner = whole[1:-1]
        sent = [inner[a:b] for a, b in zip(ends, ends[1:], strict=False)]
        packed = np.full_like(whole, -5)
        parts = [packed[1:-1][a:b] for a, b in zip(ends, ends[1:], strict=False)]
        transport.gather([sent[m] for m in transport.members], parts if root in transport.members else None, root)
        settle()
        expected = np.concatenate([[-5], inner, [-5]]) if root in transport.members else np.full_like(whole, -5)
        _note(np.testing.assert_array_equal, packed, expected)


def check_move(transport: Transport, settle: Settle) -> None:
    """A member's array reaches any other one, and only that."""
    for source in range(transport.size):
        for dest in set(range(transport.size)) - {source}:
            for n, dtype in _sizes_and_dtypes():
                sent = sample(dtype, n, 30 * source + dest)
                array = _frozen(sent.copy()) if source in transport.members else None
                out = _blank(sent) if dest in transport.members else None
                if array is not None or out is not None:
                    transport.move(array, out, source, dest)
                settle()
                if out is not None:
                    _note(assert_same_bits, out, sent, (source, dest, n, dtype))


def _reductions() -> list[tuple[str, int, np.dtype[Any]]]:
    """Every reduction with every dtype it takes, long enough for vector code; every length with one dtype."""
    cases = [(op, 101, dtype) for op in REDUCTIONS for dtype in REDUCIBLE[op]]
    return cases + [("sum", n, np.dtype("i4")) for n in (*LENGTHS, LARGE)]


def check_reduce(transport: Transport, settle: Settle) -> None:
    """The root gets NumPy's result, in place or not; inputs stay."""
    for root in range(transport.size):
        for op, n, dtype in _reductions():
            held = [addends(dtype, n, 100 + m, op) for m in range(transport.size)]
            expected = _reduced(held, op)
            for in_place in (False, True):
                arrays = [
                    held[m].copy() if in_place and m == root else _frozen(held[m].copy()) for m in transport.members
                ]
                outs = [
                    None if m != root else array if in_place else _blank(expected)
                    for m, array in zip(transport.members, arrays, strict=True)
                ]
                transport.reduce(arrays, outs, op, root)
                settle()
                for out in outs:
                    if out is not None:
                        _note(np.testing.assert_array_equal, out, expected, str((root, op, n, dtype, in_place)))


def check_all_reduce(transport: Transport, settle: Settle) -> None:
    """Every member gets NumPy's result, in place or not; inputs stay."""
    for op, n, dtype in _reductions():
        held = [addends(dtype, n, 200 + m, op) for m in range(transport.size)]
        expected = _reduced(held, op)
        for in_place in (False, True):
            arrays = [held[m].copy() if in_place else _frozen(held[m].copy()) for m in transport.members]
            outs = arrays if in_place else [_blank(expected) for _ in transport.members]
            transport.all_reduce(arrays, outs, op)
            settle()
            for out in outs:
                _note(np.testing.assert_array_equal, out, expected, str((op, n, dtype, in_place)))


def check_extremes(transport: Transport, settle: Settle) -> None:
    """Max and min carry NaN, whichever member holds it, and know the infinities."""
    for dtype in FLOATS:
        for holder in range(transport.size):
            held = [addends(dtype, 13, 300 + m) for m in range(transport.size)]
            held[holder][[2, 5, 7]] = np.array([np.nan, np.inf, -np.inf]).astype(dtype)
            for op in ("min", "max"):
                outs = [_blank(held[0]) for _ in transport.members]
                transport.all_reduce([_frozen(held[m].copy()) for m in transport.members], outs, op)
                settle()
                # NumPy compares NaN as equal only in floats of its own.
                expected = _reduced(held, op).astype("f8")
                assert np.isnan(expected[2])
                for out in outs:
                    _note(np.testing.assert_array_equal, out.astype("f8"), expected, str((dtype, holder, op)))


def _gathered(transport: Transport, settle: Settle, outs: list[Array]) -> list[Array] | None:
    """All members' arrays, where this process drives member 0."""
    parts = [_blank(outs[0]) for _ in range(transport.size)] if 0 in transport.members else None
    transport.gather(outs, parts, 0)
    settle()
    return parts


def check_identical_bits(transport: Transport, settle: Settle) -> None:
    """all_reduce gives all members the same bits, where rounding, signed zeros and NaN payloads depend on the order."""
    for dtype in (np.dtype("f4"), np.dtype("f2"), np.dtype("f8")):
        for op in REDUCTIONS:
            held = [np.random.default_rng([400, m]).normal(size=101).astype(dtype) for m in range(transport.size)]
            for member, array in enumerate(held):
                array[:2] = (0.0, -0.0) if member % 2 else (-0.0, 0.0)
                if op in ("min", "max"):
                    array[2:5].view(f"u{dtype.itemsize}")[:] = (
                        np.array(np.nan, dtype).view(f"u{dtype.itemsize}") + member + 1
                    )
            outs = [_blank(held[0]) for _ in transport.members]
            transport.all_reduce([_frozen(held[m].copy()) for m in transport.members], outs, op)
            settle()
            for part in _gathered(transport, settle, outs) or ():
                _note(
                    np.testing.assert_allclose, part.astype("f8"), _reduced(held, op).astype("f8"), rtol=0.05, atol=0.05
                )
                _note(assert_same_bits, part, outs[0], (dtype, op))


def check_sequence(transport: Transport, settle: Settle) -> None:
    """Calls that follow one another, each on the result of the last, without a wait between them."""
    buffers = [np.full(31, m + 1, "i8") for m in transport.members]
    outs = [np.zeros(31, "i8") for _ in transport.members]
    values = [m + 1 for m in range(transport.size)]
    for root in (*range(transport.size), 0):
        transport.all_reduce(buffers, outs, "sum")
        total = sum(values)
        transport.barrier()
        targets = [buffer if m == root else None for m, buffer in zip(transport.members, buffers, strict=True)]
        transport.reduce(outs, targets, "max", root)
        values[root] = total
        transport.broadcast(buffers, (root + 1) % transport.size)
        values = [values[(root + 1) % transport.size]] * transport.size
    settle()
    for buffer in buffers:
        _note(np.testing.assert_array_equal, buffer, np.full(31, values[0]))


_CHECKS: tuple[Callable[[Transport, Settle], None], ...] = (
    check_identity,
    check_broadcast,
    check_scatter,
    check_gather,
    check_packed_parts,
    check_move,
    check_reduce,
    check_all_reduce,
    check_extremes,
    check_identical_bits,
    check_sequence,
)

CHECKS = tuple(map(_complete, _CHECKS))
