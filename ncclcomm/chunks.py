"""How an array is cut along a dimension: sizes, offsets and the checks on them; pure arithmetic."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from ncclcomm.errors import ArgumentError, ArgumentIndexError

__all__ = ["check_chunk_sizes", "check_dim", "chunk_slices", "even_counts", "torch_chunk_counts", "whole_number"]


def even_counts(n: int, parts: int) -> list[int]:
    """Sizes as numpy.array_split cuts them: the first n % parts parts get one more."""
    base, extra = divmod(n, parts)
    return [base + 1] * extra + [base] * (parts - extra)


def torch_chunk_counts(n: int, parts: int) -> list[int]:
    """Sizes as torch.chunk cuts them: parts of ceil(n / parts), the last smaller, and fewer parts when n runs out.

    n = 0 gives `parts` empty ones.
    """
    size = -(-n // parts)
    if size == 0:
        return [0] * parts
    full, rest = divmod(n, size)
    return [size] * full + [rest] * (rest > 0)


def chunk_slices(counts: Sequence[int], dim: int) -> list[slice | tuple[slice, ...]]:
    """Index expressions that cut an array into chunks of these sizes along a dimension."""
    slices: list[slice | tuple[slice, ...]] = []
    start = 0
    for count in counts:
        stop = start + count
        slices.append((*(slice(None),) * dim, slice(start, stop)) if dim else slice(start, stop))
        start = stop
    return slices


def check_dim(dim: Any, ndim: int, call: str) -> int:
    """The dimension as a number from 0 to ndim - 1.

    Raises:
        ArgumentError: not a whole number.
        ArgumentIndexError: out of range, also for a 0-d array.
    """
    number = dim if type(dim) is int else whole_number(dim, f"{call}: dim")
    if not -ndim <= number < ndim:
        span = f"from {-ndim} to {ndim - 1}" if ndim else "none: the array has no dimension"
        raise ArgumentIndexError(f"{call}: dim {number} is out of range; an array of {ndim} dimensions takes {span}")
    return number % ndim


def check_chunk_sizes(chunk_sizes: Iterable[Any], parts: int, n: int | None, call: str, owners: str) -> list[int]:
    """The chunk sizes as a list of ints.

    Args:
        chunk_sizes: what the caller passed.
        parts: how many there must be.
        n: what they must sum to; None where this rank can't know.
        call: the call's name, for messages.
        owners: what gets one chunk each, such as 'devices'.

    Raises:
        ArgumentError: not whole numbers of 0 or more, a wrong number of them, or a wrong sum.
    """
    if isinstance(chunk_sizes, (str, bytes)) or not isinstance(chunk_sizes, Iterable):
        raise ArgumentError(f"{call}: chunk_sizes must be whole numbers, one for each of the {parts} {owners}")
    sizes = [whole_number(size, f"{call}: chunk_sizes") for size in chunk_sizes]
    if len(sizes) != parts:
        raise ArgumentError(
            f"{call}: chunk_sizes has {len(sizes)} entries for {parts} {owners}; they must be of the same length"
        )
    if any(size < 0 for size in sizes):
        raise ArgumentError(f"{call}: chunk_sizes {sizes} has a negative entry")
    if n is not None and sum(sizes) != n:
        raise ArgumentError(f"{call}: chunk_sizes {sizes} sum to {sum(sizes)}, but the dimension has {n} elements")
    return sizes


def whole_number(value: Any, what: str) -> int:
    """The value as an int.

    Raises:
        ArgumentError: no whole number; bool and float are none.
    """
    if isinstance(value, bool):
        raise ArgumentError(f"{what} must be a whole number, not {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise ArgumentError(f"{what} must be a whole number, not {value!r}") from None
