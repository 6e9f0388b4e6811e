"""In-process scatter: how it cuts, what it gives back, and what it refuses."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from contract.array_samples import DEVICES, LAYOUTS, MOVABLE, assert_same_bits, host_backend, sample  # noqa: F401
from ncclcomm import (
    ArgumentError,
    ArgumentIndexError,
    Stream,
    UnsupportedError,
    asarray,
    current_stream,
    device_index,
    to_numpy,
)
from ncclcomm.comm import gather, scatter

pytestmark = pytest.mark.usefixtures("host_backend")

ROWS = {9: [3, 3, 3], 5: [2, 2, 1], 4: [1, 1, 1, 1], 1: [1], 0: [0, 0, 0, 0], 8: [2, 2, 2, 2], 7: [2, 2, 2, 1]}
"""torch.chunk of so many rows into 4."""


@pytest.mark.parametrize("source", [-1, *range(DEVICES)])
def test_every_order_of_devices(source: int) -> None:
    value = sample("f8", (7, 2), source + 1)
    array = asarray(value.copy(), device=source)
    for order in itertools.permutations(range(DEVICES)):
        chunks = scatter(array, order)
        assert type(chunks) is tuple
        assert [device_index(chunk) for chunk in chunks] == list(order)
        for device, chunk, part in zip(order, chunks, np.split(value, [2, 4, 6]), strict=True):
            assert_same_bits(to_numpy(chunk), part, order)
            shares = source >= 0 and np.shares_memory(chunk.view(np.ndarray), array.view(np.ndarray))
            assert shares == (device == source)
            assert chunk.flags.c_contiguous
    assert_same_bits(to_numpy(array), value)


@pytest.mark.parametrize("rows", ROWS)
def test_cuts_as_torch_chunk(rows: int) -> None:
    value = sample("i4", (rows, 3), rows)
    order = [3, 1, 0, 2]
    chunks = scatter(asarray(value, device=1), order)
    assert [chunk.shape for chunk in chunks] == [(n, 3) for n in ROWS[rows]]
    assert [device_index(chunk) for chunk in chunks] == order[: len(ROWS[rows])]
    assert_same_bits(to_numpy(gather(chunks, destination=2)), value)


@pytest.mark.parametrize("rows", [0, 1, 4, 5, 9, 13])
def test_balanced_cuts_as_array_split(rows: int) -> None:
    value = sample("i4", (rows, 3), rows)
    chunks = scatter(asarray(value, device=1), [3, 1, 0, 2], balanced=True)
    for chunk, part in zip(chunks, np.array_split(value, 4), strict=True):
        assert_same_bits(to_numpy(chunk), part.copy())
    assert_same_bits(to_numpy(gather(chunks)), value)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
@pytest.mark.parametrize("sizes", [(1, 2, 3), (0, 6, 0), (6, 0, 0), (np.int64(2), np.uint8(2), 2)])
def test_chunk_sizes_along_any_dim(dim: int, sizes: tuple[int, ...]) -> None:
    value = sample("f4", (6, 6, 6), 3)
    for source, given in ((2, list(sizes)), (0, tuple(sizes)), (-1, iter(sizes))):
        chunks = scatter(asarray(value, device=source), [2, 0, 1], given, dim)
        parts = np.split(value, np.cumsum(sizes)[:-1], axis=dim)
        for chunk, part in zip(chunks, parts, strict=True):
            assert_same_bits(to_numpy(chunk), part.copy(), (dim, sizes, source))


@pytest.mark.parametrize("dtype", MOVABLE, ids=str)
def test_every_dtype_and_layout(dtype: np.dtype[Any]) -> None:
    for layout, (shape, look) in LAYOUTS.items():
        base = sample(dtype, shape, 2)
        value = look(base)
        for array in (look(asarray(base, device=1)), value):
            for chunk, part in zip(scatter(array, [0, 2], balanced=True), np.array_split(value, 2), strict=True):
                assert_same_bits(to_numpy(chunk), part.copy(), layout)
                assert chunk.flags.c_contiguous


def test_chunk_of_own_device_is_a_view() -> None:
    array = asarray(np.arange(6.0), device=1)
    own = scatter(array, [0, 1], streams=[None, current_stream(1)])[1]
    array.view(np.ndarray)[3:] = -1
    np.testing.assert_array_equal(to_numpy(own), [-1, -1, -1])


def test_streams() -> None:
    value = sample("f8", 9, 1)
    array = asarray(value, device=0)
    streams = [Stream(device=1), None, Stream(device=0)]
    for given in (streams, tuple(streams)):
        chunks = scatter(array, [1, 2, 0], None, 0, given)
        for chunk, part in zip(chunks, np.split(value, 3), strict=True):
            assert_same_bits(to_numpy(chunk), part)


@pytest.mark.parametrize(
    ("streams", "words"),
    [
        ([1, 2], r"streams\[0\].*expected an ncclcomm.Stream, not 1"),
        ("", "sequence of Stream or None, not ''"),
        ("ab", "sequence of Stream or None, not 'ab'"),
        (5, "sequence of Stream or None, not 5"),
        ([None], "1 entries for 2 devices"),
        ([None] * 3, "3 entries for 2 devices"),
        ([], "0 entries for 2 devices"),
    ],
    ids=str,
)
def test_bad_streams(streams: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=f"^scatter: .*{words}"):
        scatter(asarray(np.zeros(4), device=0), [0, 1], streams=streams)


def test_stream_of_another_device() -> None:
    with pytest.raises(ArgumentError, match=r"streams\[1\] is of device 2; expected one of device 1"):
        scatter(asarray(np.zeros(4), device=0), [0, 1], streams=[None, Stream(device=2)])


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([4, 5], r"\[4, 5\] sum to 9, but the dimension has 10"),
        ([12, -2], r"\[12, -2\].*negative"),
        ([5, 5, 0], "3 entries for 2 devices"),
        ([10], "1 entries for 2 devices"),
        ([], "0 entries for 2 devices"),
        ([5.0, 5.0], "whole number, not 5.0"),
        ([True, 9], "whole number, not True"),
        ([np.True_, 9], "whole number, not .*True"),
        (["5", 5], "whole number, not '5'"),
        ("55", "chunk_sizes"),
        (10, "chunk_sizes"),
    ],
    ids=str,
)
def test_bad_chunk_sizes(sizes: Any, words: str) -> None:
    array = asarray(np.arange(10.0), device=0)
    with pytest.raises(ArgumentError, match=f"^scatter: .*{words}"):
        scatter(array, [0, 1], sizes)
    np.testing.assert_array_equal(to_numpy(array), np.arange(10.0))


def test_chunk_of_zero_is_documented_support() -> None:
    whole, none = scatter(asarray(np.arange(10.0), device=0), [1, 2], [10, 0])
    assert (whole.shape, none.shape, device_index(none)) == ((10,), (0,), 2)


@pytest.mark.parametrize(("dim", "shape"), [(2, (3, 4)), (-3, (3, 4)), (1, (3,)), (0, ()), (-1, ())])
def test_dim_out_of_range(dim: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentIndexError, match=f"^scatter: dim {dim} is out of range") as caught:
        scatter(asarray(np.zeros(shape), device=0), [0, 1], dim=dim)
    assert isinstance(caught.value, IndexError)


@pytest.mark.parametrize("dim", [None, 0.0, "0", True, [0]], ids=str)
def test_dim_is_a_whole_number(dim: Any) -> None:
    with pytest.raises(ArgumentError, match="^scatter: dim must be a whole number, not"):
        scatter(asarray(np.zeros((3, 4)), device=0), [0, 1], dim=dim)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", ["i4", ">f8", "S5"])
def test_out_views_are_filled_in_place(dim: int, dtype: str) -> None:
    value = sample(dtype, (6, 6), 1)
    cut = [(2, 6), (0, 6), (4, 6)] if dim == 0 else [(6, 2), (6, 0), (6, 4)]
    bases = [sample(dtype, (2 * a + 1, 2 * b + 1), 5 + i) for i, (a, b) in enumerate(cut)]
    whole = [asarray(base, device=device) for base, device in zip(bases, (2, 3, 0), strict=True)]
    outs = [array[1::2, -2::-2] for array in whole]
    found = scatter(asarray(value, device=0), out=iter(outs), dim=dim - 2)
    assert type(found) is tuple
    assert all(a is b for a, b in zip(found, outs, strict=True))
    for base, array, part in zip(bases, whole, np.split(value, [2, 2], axis=dim), strict=True):
        expected = base.copy()
        expected[1::2, -2::-2] = part
        assert_same_bits(to_numpy(array), expected)


def _bad_out(kind: str, source: Any) -> list[Any]:
    """Arrays of which the last can't take its chunk of 10 by 3."""
    good = asarray(np.zeros((4, 3)), device=1)
    frozen = asarray(np.zeros((6, 3)), device=2)
    frozen.flags.writeable = False
    shared = asarray(np.zeros((7, 3)), device=3)
    return {
        "empty": [],
        "sum": [good, asarray(np.zeros((5, 3)), device=2)],
        "other dim": [good, asarray(np.zeros((6, 2)), device=2)],
        "dimensions": [good, asarray(np.zeros(6), device=2)],
        "dtype": [good, asarray(np.zeros((6, 3), "i8"), device=2)],
        "host": [good, np.zeros((6, 3))],
        "read-only": [good, frozen],
        "input": [good, source[2:8]],
        "each other": [good, shared[:3], shared[2:5]],
    }[kind]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("empty", "out is empty"),
        ("sum", "sum to 9; tensor has 10"),
        ("other dim", r"out\[1\] has shape \(6, 2\).*\(6, 3\)"),
        ("dimensions", r"out\[1\] has 1 dimensions; expected 2"),
        ("dtype", r"out\[1\].*int64; the result.*float64"),
        ("host", r"out\[1\] is in host memory; expected an array of a device"),
        ("read-only", r"out\[1\] is read-only"),
        ("input", r"out\[1\] overlaps an input"),
        ("each other", r"out\[2\] overlaps"),
    ],
)
def test_bad_out_writes_nothing(kind: str, words: str) -> None:
    source = asarray(np.arange(30.0).reshape(10, 3), device=0)
    outs = _bad_out(kind, source)
    before = [to_numpy(out) for out in outs]
    with pytest.raises(ArgumentError, match=f"^scatter: .*{words}"):
        scatter(source, out=outs)
    for out, was in zip([*outs, source], [*before, np.arange(30.0).reshape(10, 3)], strict=True):
        assert_same_bits(to_numpy(out), was, kind)


def test_out_on_streams() -> None:
    outs = [asarray(np.zeros(4), device=1), asarray(np.zeros(6), device=2)]
    side = Stream(device=2)
    parts = scatter(asarray(np.arange(10.0), device=0), out=outs, streams=[None, side])
    assert all(a is b for a, b in zip(parts, outs, strict=True))
    np.testing.assert_array_equal(to_numpy(outs[0]), np.arange(4.0))
    side.synchronize()
    np.testing.assert_array_equal(to_numpy(outs[1]), np.arange(4.0, 10.0))


@pytest.mark.parametrize(
    ("streams", "words"),
    [
        ([None], "streams has 1 entries for 2 devices"),
        ([None, 5], r"streams\[1\].*expected an ncclcomm.Stream, not 5"),
        ("ab", "streams must be a sequence"),
    ],
    ids=["too few", "no stream", "str"],
)
def test_bad_streams_with_out_write_nothing(streams: Any, words: str) -> None:
    outs = [asarray(np.zeros(4), device=1), asarray(np.zeros(6), device=2)]
    with pytest.raises(ArgumentError, match=f"^scatter: {words}"):
        scatter(asarray(np.ones(10), device=0), out=outs, streams=streams)
    with pytest.raises(ArgumentError, match=r"streams\[1\] is of device 1; expected one of device 2"):
        scatter(asarray(np.ones(10), device=0), out=outs, streams=[None, Stream(device=1)])
    assert not any(to_numpy(out).any() for out in outs)


@pytest.mark.parametrize("extra", [{"chunk_sizes": [4, 6]}, {"devices": [1, 2]}], ids=str)
def test_out_excludes(extra: dict[str, Any]) -> None:
    outs = [asarray(np.zeros(4), device=1), asarray(np.zeros(6), device=2)]
    with pytest.raises(ArgumentError, match="^scatter: .*out"):
        scatter(asarray(np.arange(10.0), device=0), out=outs, **extra)
    assert not to_numpy(outs[0]).any()


@pytest.mark.parametrize(
    ("devices", "words"),
    [([], "devices is empty"), ([0, 99], r"devices\[1\].*99"), ("01", "iterable"), (None, "neither")],
    ids=str,
)
def test_bad_devices(devices: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=f"^scatter: .*{words}"):
        scatter(asarray(np.zeros(4), device=0), devices)


def test_no_array() -> None:
    with pytest.raises(UnsupportedError, match="^scatter: tensor: list is not a supported array"):
        scatter([1, 2, 3], [0])
