"""Inputs whose result is exactly predictable in every dtype, and the comparison of a result with it.

What a member sends repeats after PERIOD elements, a prime, so that no chunk, part or buffer of a collective fits it.
Values depend on the member. For reductions they are whole numbers so small that no order of adding rounds; else they
are any bits at all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ncclcomm.reductions import ufunc_for

__all__ = ["Piece", "Wrong", "fill", "first_wrong", "poison", "reduced", "sent"]

Write = Callable[[Any, Any], None]

PERIOD = 9973
_BLOCK = PERIOD * 100
"""Elements compared at a time: the comparison holds a few blocks, not a second copy of the result."""

_EXACT = {"bfloat16": 256, "float16": 2048, "float32": 1 << 24, "float64": 1 << 53, "complex64": 1 << 24}
"""Up to here every whole number has its own value."""
_MOST_VALUE = 100
_NOBODY = 1 << 40
"""In place of a member."""
_MOST_FACTORS = 6
"""Factors of 2 in a product: the product fits a signed byte."""


class Wrong(NamedTuple):
    """The first element of a result that is not what it must be."""

    where: int
    """Its index in the flat result."""
    expected: str
    got: str


@dataclass(frozen=True)
class Piece:
    """A stretch of an expected result: `count` elements of a pattern, from its element `start` on."""

    pattern: np.ndarray[Any, Any]
    start: int
    count: int
    exact_bits: bool
    """Compared as bits, for what was only moved; else as values, as the sign of a zero is free."""


def _noise(member: int, count: int = PERIOD, salt: int = 0) -> np.ndarray[Any, Any]:
    """64 bits for each element, the same on every machine."""
    with np.errstate(over="ignore"):
        x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x += np.uint64(member + 1) * np.uint64(0xBF58476D1CE4E5B9) + np.uint64(salt) * np.uint64(0xD6E8FEB86659FD93)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(x ^ (x >> np.uint64(31)))


@functools.lru_cache(maxsize=256)
def sent(dtype: np.dtype[Any], reduction: str, member: int, size: int) -> np.ndarray[Any, Any]:
    """One period of what a member sends.

    Args:
        dtype: the dtype.
        reduction: what the data goes into: 'sum', 'prod', 'min', 'max' or 'avg'; '' where it is only moved.
        member: the rank or device, from 0.
        size: how many there are.
    """
    if not reduction:
        return _any_bits(dtype, member)
    if dtype.kind == "b":
        # True with one member in 2 * size on average, so that a sum of all is True about as often as not.
        return np.asarray(_noise(member) % np.uint64(2 * size) == 0)
    numbers = _numbers(dtype, reduction, member, size)
    if dtype.kind != "c":
        return numbers.astype(dtype)
    if reduction == "prod":
        return np.where(numbers == 1, 1, 1j).astype(dtype)
    return (numbers + 1j * _numbers(dtype, reduction, member, size, salt=1)).astype(dtype)


def _any_bits(dtype: np.dtype[Any], member: int) -> np.ndarray[Any, Any]:
    """A period of arbitrary bits; of a bool its two values."""
    if dtype.kind == "b":
        return np.asarray(_noise(member) % np.uint64(2) == 0)
    words = -(-PERIOD * dtype.itemsize // 8)
    return _noise(member, words).view(np.uint8)[: PERIOD * dtype.itemsize].view(dtype)


def _numbers(dtype: np.dtype[Any], reduction: str, member: int, size: int, salt: int = 0) -> np.ndarray[Any, Any]:
    """A period of whole numbers that a reduction over all members keeps exact."""
    noise = _noise(member, salt=salt)
    place = (np.arange(PERIOD) + member) % size
    if reduction == "prod":
        return np.asarray(np.where(place < _MOST_FACTORS, noise % np.uint64(2) + np.uint64(1), 1), np.int64)
    limit = int(np.iinfo(dtype).max) if dtype.kind in "iu" else _EXACT.get(dtype.name, 1 << 53)
    if reduction == "avg":
        # An average is exact where the sum is a multiple of the number of members: one value for all, 0 where there are
        # too many members for another, and what sums to 0 over them.
        most = min(_MOST_VALUE, limit // (2 * size))
        mean = np.asarray(_noise(0, salt=salt) % np.uint64(most + 1), np.int64)
        lent, got = (_lent(one, size, limit // 2, salt) for one in (member, (member + 1) % size))
        return np.asarray(mean + lent - got)
    most = min(_MOST_VALUE, limit if reduction in ("min", "max") else max(1, limit // size))
    numbers = np.asarray(noise % np.uint64(most + 1), np.int64)
    if reduction == "sum" and size > limit:
        numbers[place >= limit] = 0
    return numbers


def _lent(member: int, size: int, limit: int, salt: int) -> np.ndarray[Any, Any]:
    """What a member has more in an average and the one before it less; over all members at most `limit`."""
    lenders = min(size, limit)
    place = (np.arange(PERIOD) + member) % size
    noise = _noise(member, salt=salt + 2)
    return np.asarray(np.where(place < lenders, noise % np.uint64(min(_MOST_VALUE, limit // lenders) + 1), 0), np.int64)


@functools.lru_cache(maxsize=64)
def reduced(dtype: np.dtype[Any], reduction: str, size: int) -> np.ndarray[Any, Any]:
    """One period of what a reduction over all members gives.

    Args:
        dtype: the dtype.
        reduction: 'sum', 'prod', 'min', 'max' or 'avg'.
        size: how many members there are.
    """
    func = ufunc_for("sum" if reduction == "avg" else reduction, dtype)
    total = sent(dtype, reduction, 0, size)
    for member in range(1, size):
        total = func(total, sent(dtype, reduction, member, size))
    return np.asarray(total / dtype.type(size)).astype(dtype) if reduction == "avg" else np.asarray(total)


def _blocks(pattern: np.ndarray[Any, Any], start: int, count: int) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    """The elements from `start` on, block by block, each with its distance from `start`."""
    shift = start % PERIOD
    rows = -(-(min(count, _BLOCK) + shift) // PERIOD)
    tiled = np.tile(pattern, rows)[shift : shift + min(count, _BLOCK)]
    for done in range(0, count, _BLOCK):
        yield done, tiled[: count - done]


def fill(array: Any, pattern: np.ndarray[Any, Any], write: Write) -> None:
    """Fill a flat array with a pattern, from its first element on.

    Args:
        array: a flat array of any memory.
        pattern: one period, of the array's dtype.
        write: writes a NumPy array into a slice of the array.
    """
    for start, block in _blocks(pattern, 0, array.size):
        write(array[start : start + block.size], block)


def poison(array: Any, write: Write) -> None:
    """Fill a flat array with bits that no member sends, so that a result left from before can't pass for a new one.

    Args:
        array: a flat array of any memory.
        write: writes a NumPy array into a slice of the array.
    """
    fill(array, _any_bits(array.dtype, _NOBODY), write)


def first_wrong(array: Any, pieces: list[Piece], fetch: Any) -> Wrong | None:
    """Compare every element of a result; the first wrong one, or None.

    Args:
        array: the result, flat, of any memory.
        pieces: what it must be, in order, to its end.
        fetch: gives a copy of an array in host memory.
    """
    total = sum(piece.count for piece in pieces)
    if array.size != total:
        return Wrong(min(array.size, total), f"{total} elements", f"{array.size} elements")
    base = 0
    for piece in pieces:
        for done, expected in _blocks(piece.pattern, piece.start, piece.count):
            got = fetch(array[base + done : base + done + expected.size])
            if got.dtype != expected.dtype:
                return Wrong(0, f"dtype {expected.dtype}", f"dtype {got.dtype}")
            place = _first_difference(got, expected, piece.exact_bits)
            if place is not None:
                return Wrong(base + done + place, str(expected[place]), str(got[place]))
        base += piece.count
    return None


def _first_difference(got: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], exact_bits: bool) -> int | None:
    """Where two arrays first differ."""
    if exact_bits:
        shape = (-1, expected.dtype.itemsize)
        differ = (got.view(np.uint8) != np.ascontiguousarray(expected).view(np.uint8)).reshape(shape).any(axis=1)
    else:
        with np.errstate(invalid="ignore"):  # a result may hold anything, signalling NaNs too
            differ = np.asarray(got != expected)
    return int(differ.argmax()) if differ.any() else None
