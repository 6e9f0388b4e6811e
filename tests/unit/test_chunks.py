"""How a dimension is cut, and the checks on it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ncclcomm.chunks import check_chunk_sizes, check_dim, chunk_slices, even_counts, torch_chunk_counts, whole_number
from ncclcomm.errors import ArgumentError, ArgumentIndexError


def test_even_counts_are_array_splits() -> None:
    for n in range(40):
        for parts in range(1, 9):
            assert even_counts(n, parts) == [len(part) for part in np.array_split(np.empty(n), parts)]


def test_torch_chunk_counts() -> None:
    for n in range(1, 40):
        for parts in range(1, 9):
            counts = torch_chunk_counts(n, parts)
            size = (n + parts - 1) // parts
            assert sum(counts) == n
            assert len(counts) <= parts
            assert all(count == size for count in counts[:-1])
            assert 1 <= counts[-1] <= size
    assert torch_chunk_counts(0, 3) == [0, 0, 0]
    assert torch_chunk_counts(9, 4) == [3, 3, 3]
    assert torch_chunk_counts(5, 4) == [2, 2, 1]


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("counts", [[6], [1, 2, 3], [0, 6, 0], [2, 0, 4]])
def test_chunk_slices(dim: int, counts: list[int]) -> None:
    array = np.arange(216).reshape(6, 6, 6)
    for index, part in zip(chunk_slices(counts, dim), np.split(array, np.cumsum(counts)[:-1], axis=dim), strict=True):
        np.testing.assert_array_equal(array[index], part)


def test_dims() -> None:
    assert [check_dim(dim, 3, "call") for dim in (0, 2, -1, -3, np.int64(1))] == [0, 2, 2, 0, 1]


@pytest.mark.parametrize(("dim", "ndim"), [(3, 3), (-4, 3), (0, 0), (-1, 0), (1, 1)])
def test_dim_out_of_range(dim: int, ndim: int) -> None:
    with pytest.raises(ArgumentIndexError, match=f"^call: dim {dim} is out of range; an array of {ndim} dim"):
        check_dim(dim, ndim, "call")


@pytest.mark.parametrize("value", [True, np.True_, 1.0, "1", None, [1], np.zeros(2, int)], ids=str)
def test_not_a_whole_number(value: Any) -> None:
    with pytest.raises(ArgumentError, match="^call: dim must be a whole number, not "):
        whole_number(value, "call: dim")
    with pytest.raises(ArgumentError, match="^call: dim must be a whole number, not "):
        check_dim(value, 3, "call")


def test_chunk_sizes() -> None:
    for sizes in ([1, 2, 0], (1, 2, 0), iter([1, 2, 0]), np.array([1, 2, 0], "u1")):
        found = check_chunk_sizes(sizes, 3, 3, "call", "devices")
        assert found == [1, 2, 0]
        assert all(type(size) is int for size in found)
    assert check_chunk_sizes([4, 5], 2, None, "call", "ranks") == [4, 5]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([4, 5], r"chunk_sizes \[4, 5\] sum to 9, but the dimension has 10"),
        ([12, -2], r"chunk_sizes \[12, -2\] has a negative entry"),
        ([5, 5, 0], "chunk_sizes has 3 entries for 2 ranks"),
        ([5.0, 5], "chunk_sizes must be a whole number, not 5.0"),
        ([False, 10], "chunk_sizes must be a whole number, not False"),
        ("28", "chunk_sizes must be whole numbers, one for each of the 2 ranks"),
        (10, "chunk_sizes must be whole numbers, one for each of the 2 ranks"),
    ],
    ids=str,
)
def test_bad_chunk_sizes(sizes: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=f"^call: {words}"):
        check_chunk_sizes(sizes, 2, 10, "call", "ranks")
