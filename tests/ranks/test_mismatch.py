"""Ranks that disagree, and ranks with bad arguments: every rank raises, nothing has moved, and work goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ncclcomm
from ncclcomm import ArgumentError, ArgumentIndexError, MismatchError, UnsupportedError
from ranks.expected import Findings, Kept, communicator, data, numbers, on, rejected

pytestmark = pytest.mark.mpi

Call = Callable[[Any, bool, Kept], object]
"""Makes a rank's call; the flag is True on the one rank that is the odd one out."""


def array(shape: tuple[int, ...] = (2, 3), dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    """Numbers to pass."""
    return numbers(7, shape, dtype)


def memory(comm: Any, odd: bool) -> Any:
    """An array in host memory, on the odd rank one on its device."""
    return on(comm, "device" if odd else "numpy", array())


DISAGREE: dict[str, tuple[Call, tuple[str, ...]]] = {
    "barrier among all_reduce": (
        lambda comm, odd, keep: comm.barrier() if odd else comm.all_reduce(keep(array())),
        ("barrier", "all_reduce"),
    ),
    "broadcast among gather": (
        lambda comm, odd, keep: comm.broadcast(keep(array())) if odd else comm.gather(keep(array())),
        ("broadcast", "gather"),
    ),
    "scatter among reduce": (
        lambda comm, odd, keep: comm.scatter(keep(array())) if odd else comm.reduce(keep(array())),
        ("scatter", "reduce"),
    ),
    "all_reduce among reduce": (
        lambda comm, odd, keep: (comm.all_reduce if odd else comm.reduce)(keep(array())),
        ("all_reduce", "reduce"),
    ),
    "split among barrier": (lambda comm, odd, keep: comm.split(0) if odd else comm.barrier(), ("split", "barrier")),
    "root of broadcast": (lambda comm, odd, keep: comm.broadcast(keep(array()), root=int(odd)), ("root",)),
    "root of broadcast with out": (lambda comm, odd, keep: comm.broadcast(out=keep(array()), root=int(odd)), ("root",)),
    "root of scatter": (lambda comm, odd, keep: comm.scatter(keep(array()), root=int(odd)), ("root",)),
    "root of gather": (lambda comm, odd, keep: comm.gather(keep(array()), root=int(odd)), ("root",)),
    "root of reduce": (lambda comm, odd, keep: comm.reduce(keep(array()), root=int(odd)), ("root",)),
    "dim of scatter": (lambda comm, odd, keep: comm.scatter(keep(array()), dim=int(odd)), ("dim",)),
    "dim of gather": (lambda comm, odd, keep: comm.gather(keep(array((2, 2))), dim=int(odd)), ("dim",)),
    "dtype of all_reduce": (
        lambda comm, odd, keep: comm.all_reduce(keep(array(dtype="f8" if odd else "f4"))),
        ("dtype", "float64", "float32"),
    ),
    "dtype of one size": (
        lambda comm, odd, keep: comm.reduce(keep(array(dtype="i8" if odd else "f8"))),
        ("dtype", "int64", "float64"),
    ),
    "dtype of gather": (
        lambda comm, odd, keep: comm.gather(keep(array(dtype="i4" if odd else "u4"))),
        ("dtype", "int32", "uint32"),
    ),
    "shape of all_reduce": (
        lambda comm, odd, keep: comm.all_reduce(keep(array((3, 2) if odd else (2, 3)))),
        ("shape", "(3, 2)", "(2, 3)"),
    ),
    "shape of reduce": (
        lambda comm, odd, keep: comm.reduce_add(keep(array((200,) if odd else (100,)))),
        ("shape", "(200,)", "(100,)"),
    ),
    "other dimensions of gather": (lambda comm, odd, keep: comm.gather(keep(array((2, 4 if odd else 3)))), ("4", "3")),
    "number of dimensions of gather": (
        lambda comm, odd, keep: comm.gather(keep(array((2,) if odd else (2, 3)))),
        ("3",),
    ),
    "reduction": (
        lambda comm, odd, keep: comm.all_reduce(keep(array()), op="max" if odd else "sum"),
        ("op", "max", "sum"),
    ),
    "reduction to a root": (
        lambda comm, odd, keep: comm.reduce(keep(array()), op="avg" if odd else "prod"),
        ("op", "avg", "prod"),
    ),
    "memory of all_reduce": (lambda comm, odd, keep: comm.all_reduce(keep(memory(comm, odd))), ("memory",)),
    "memory of reduce": (lambda comm, odd, keep: comm.reduce(keep(memory(comm, odd))), ("memory",)),
    "memory of gather": (lambda comm, odd, keep: comm.gather(keep(memory(comm, odd))), ("memory",)),
    "memory of broadcast": (lambda comm, odd, keep: comm.broadcast(keep(memory(comm, odd))), ("memory",)),
    "memory of broadcast with out": (lambda comm, odd, keep: comm.broadcast(out=keep(memory(comm, odd))), ("memory",)),
    "forms of broadcast": (
        lambda comm, odd, keep: comm.broadcast(keep(array())) if odd else comm.broadcast(out=keep(array())),
        ("out", "header"),
    ),
    "a receiver's shape": (
        lambda comm, odd, keep: comm.broadcast(keep(array((3, 2) if odd else (2, 3)))),
        ("(3, 2)", "(2, 3)"),
    ),
    "a receiver's dtype": (
        lambda comm, odd, keep: comm.broadcast(keep(array(dtype="i4" if odd else "f4"))),
        ("int32", "float32"),
    ),
    "shape of broadcast with out": (
        lambda comm, odd, keep: comm.broadcast(out=keep(array((6,) if odd else (2, 3)))),
        ("(6,)", "(2, 3)"),
    ),
    "chunk_sizes of scatter": (
        lambda comm, odd, keep: comm.scatter(
            keep(array((2 * comm.size,))),
            chunk_sizes=[1, 3, *[2] * (comm.size - 2)] if odd else [2] * comm.size,
        ),
        ("chunk_sizes", "1, 3"),
    ),
    "shape of scatter's out": (
        lambda comm, odd, keep: comm.scatter(
            keep(array((comm.size, 3))), out=keep(array((3,) if odd else (1, 3), np.float32))
        ),
        ("(3,)", "(1, 3)"),
    ),
    "dtype of scatter's out": (
        lambda comm, odd, keep: comm.scatter(
            keep(array((comm.size, 3))), out=keep(array((1, 3), np.int32 if odd else np.float32))
        ),
        ("int32", "float32"),
    ),
    "memory of scatter's out": (
        lambda comm, odd, keep: comm.scatter(
            keep(array((comm.size, 3))), out=keep(on(comm, "device" if odd else "numpy", array((1, 3))))
        ),
        ("memory",),
    ),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", list(DISAGREE))
def test_ranks_disagree(name: str) -> None:
    call, words = DISAGREE[name]
    with communicator(NCCLCOMM_NODE_SIZE="2") as comm, Findings() as found:
        for odd in {0, comm.size - 1}:
            rejected(
                comm,
                found,
                lambda keep, odd=odd: call(comm, comm.rank == odd, keep),
                MismatchError,
                f"{name}, rank {odd} differs",
                [*words, f"rank {odd}"],
            )


@pytest.mark.mpi(min_size=3)
def test_every_group_of_ranks_is_named_with_what_it_passed() -> None:
    with communicator() as comm, Findings() as found:
        shapes = [(4,), (5,), (4,), (6,)]
        groups = {3: ["ranks 0, 2: (4,)", "rank 1: (5,)"], 4: ["ranks 0, 2: (4,)", "rank 1: (5,)", "rank 3: (6,)"]}
        mine = array(shapes[comm.rank % 4])
        words = groups.get(comm.size, [])
        rejected(comm, found, lambda keep: comm.all_reduce(keep(mine)), MismatchError, "three shapes", words)


ROOTED: dict[str, Callable[[Any, Any], object]] = {
    "broadcast": lambda comm, root: comm.broadcast(array(), root=root),
    "broadcast with out": lambda comm, root: comm.broadcast(out=array(), root=root),
    "scatter": lambda comm, root: comm.scatter(array((comm.size, 2)), root=root),
    "gather": lambda comm, root: comm.gather(array(), root=root),
    "reduce": lambda comm, root: comm.reduce(array(), root=root),
    "reduce_add": lambda comm, root: comm.reduce_add(array(), root=root),
}


@pytest.mark.parametrize("call", list(ROOTED))
@pytest.mark.parametrize("none", [False, True], ids=["numbers", "None"])
def test_roots_that_are_no_rank(call: str, none: bool) -> None:
    with communicator() as comm, Findings() as found:
        for bad in (None,) if none else (-1, comm.size, True, False, 1.0, "0"):
            for odd in {0, comm.size - 1}:
                root = bad if comm.rank == odd else 0
                what = f"{call}, root {bad!r} on rank {odd}"
                words = ["root", repr(bad), f"rank {odd}"]
                rejected(comm, found, lambda keep, root=root: ROOTED[call](comm, root), ArgumentError, what, words)
            what = f"{call}, root {bad!r} everywhere"
            rejected(comm, found, lambda keep, bad=bad: ROOTED[call](comm, bad), ArgumentError, what, [repr(bad)])


BAD_ARRAYS: dict[str, tuple[Any, str]] = {
    "list": ([1.0, 2.0], "list"),
    "number": (3.5, "float"),
    "text": ("abc", "str"),
    "objects": (np.array([1, None], dtype=object), "object"),
    "masked": (np.ma.masked_array([1, 2], [0, 1]), "MaskedArray"),
    "record with objects": (np.zeros(2, [("a", "i4"), ("b", "O")]), "O"),
}


@pytest.mark.parametrize("call", ["broadcast", "scatter", "gather", "reduce", "reduce_add", "all_reduce"])
def test_objects_that_are_no_arrays(call: str) -> None:
    with communicator() as comm, Findings() as found:
        for turn, (name, (bad, word)) in enumerate(BAD_ARRAYS.items()):
            odd = turn % comm.size
            root = {} if call == "all_reduce" else {"root": odd}
            mine = bad if comm.rank == odd else array()
            told = rejected(
                comm,
                found,
                lambda keep, mine=mine, root=root: getattr(comm, call)(mine, **root),
                UnsupportedError,
                f"{call} of {name} on rank {odd}",
                [word, f"rank {odd}"],
            )
            found.holds(all(issubclass(o.error or object, TypeError) for o in told), f"{call}: {told} is no TypeError")


@pytest.mark.parametrize("call", ["broadcast", "scatter", "gather", "reduce", "all_reduce"])
def test_no_array_where_one_is_needed(call: str) -> None:
    with communicator() as comm, Findings() as found:
        odd = comm.size - 1
        root = {} if call == "all_reduce" else {"root": odd}
        mine = None if comm.rank == odd else array()
        error = (ArgumentError, UnsupportedError)
        rejected(comm, found, lambda keep: getattr(comm, call)(mine, **root), error, call, ["None", f"rank {odd}"])


def test_chunk_sizes_that_do_not_fit() -> None:
    with communicator() as comm, Findings() as found:
        size = comm.size
        whole = data(0, (10, 2))
        cases: dict[str, Any] = {
            "too few elements": [9] + [0] * (size - 1),
            "too many elements": [10] * size + [1],
            "a wrong sum": [6, 5, *[0] * (size - 2)] if size > 1 else [11],
            "negative": [12, -2, *[0] * (size - 2)] if size > 1 else [-10],
            "too long": [10] + [0] * size,
            "too short": [10] + [0] * (size - 2) if size > 1 else [],
            "a float": [10.0] + [0] * (size - 1),
            "a bool": [True] * size,
            "a string": "10",
            "a number": 10,
        }
        for name, sizes in cases.items():
            for root in {0, size - 1}:
                for everywhere in (True, False):
                    passed = sizes if everywhere or comm.rank == root else None
                    rejected(
                        comm,
                        found,
                        lambda keep, passed=passed, root=root: comm.scatter(
                            keep(whole.copy()), root=root, chunk_sizes=passed
                        ),
                        ArgumentError,
                        f"{name}: {sizes}, root {root}",
                        ["chunk_sizes"],
                    )


@pytest.mark.parametrize("call", ["scatter", "gather"])
def test_dimensions_out_of_range(call: str) -> None:
    with communicator() as comm, Findings() as found:
        for dim in (2, -3, 100):
            for everywhere in (True, False):
                mine = dim if everywhere or comm.rank == 0 else 0
                error = ArgumentIndexError if everywhere or comm.size == 1 else (ArgumentIndexError, MismatchError)
                what = f"{call}, dim {dim}"
                words = [str(dim)]
                rejected(
                    comm,
                    found,
                    lambda keep, mine=mine: getattr(comm, call)(keep(array()), dim=mine),
                    error,
                    what,
                    words,
                )


@pytest.mark.parametrize("call", ["scatter", "gather"])
def test_dimensions_that_are_no_number(call: str) -> None:
    with communicator() as comm, Findings() as found:
        for dim in (True, 0.0, None, "0"):
            mine = dim if comm.rank == comm.size - 1 else 0
            rejected(
                comm,
                found,
                lambda keep, mine=mine: getattr(comm, call)(keep(array()), dim=mine),
                ArgumentError,
                f"{call}, dim {dim!r}",
                ["dim", repr(dim), f"rank {comm.size - 1}"],
            )


def test_a_number_has_no_dimension_to_scatter_along() -> None:
    with communicator() as comm, Findings() as found:
        rejected(comm, found, lambda keep: comm.scatter(keep(array(()))), ArgumentIndexError, "0-d", ["dim"])


UNSUPPORTED = [
    ("max", "c8"),
    ("min", "c16"),
    ("max", "?"),
    ("prod", "?"),
    ("avg", "?"),
    ("avg", "i4"),
    ("sum", "datetime64[s]"),
    ("sum", "timedelta64[s]"),
    ("sum", [("a", "i4"), ("b", "f4")]),
    ("sum", "S4"),
    ("sum", ml_dtypes.float8_e5m2),
    ("max", ml_dtypes.float8_e4m3fn),
]


@pytest.mark.parametrize("call", ["reduce", "all_reduce"])
def test_reductions_that_a_dtype_does_not_have(call: str) -> None:
    with communicator() as comm, Findings() as found:
        for op, dtype in UNSUPPORTED:
            mine = data(comm.rank, (4,), dtype)
            rejected(
                comm,
                found,
                lambda keep, mine=mine, op=op: getattr(comm, call)(keep(mine), op=op),
                UnsupportedError,
                f"{call} {op} of {dtype}",
                [op, str(np.dtype(dtype))],
            )


def test_reductions_that_do_not_exist() -> None:
    with communicator() as comm, Findings() as found:
        for turn, op in enumerate(["mean", "SUM", "", None, 3, np.add]):
            odd = turn % comm.size
            mine = op if comm.rank == odd else "sum"
            what = f"op {op!r} on rank {odd}"
            words = [repr(op), f"rank {odd}", "sum, prod, min, max"]
            rejected(
                comm, found, lambda keep, mine=mine: comm.all_reduce(keep(array()), op=mine), ArgumentError, what, words
            )


def bad_outs(wanted: np.ndarray[Any, Any]) -> dict[str, tuple[Any, type[BaseException]]]:
    """Outs that can't take a result like `wanted`, each with the class of the error."""
    frozen = wanted.copy()
    frozen.flags.writeable = False
    spread = np.lib.stride_tricks.as_strided(np.zeros(wanted.shape[-1], wanted.dtype), wanted.shape, (0, 4))
    other = np.dtype("i4") if wanted.dtype == np.float32 else np.dtype("f4")
    return {
        "shape": (np.zeros((*wanted.shape, 1), wanted.dtype), ArgumentError),
        "same number of elements": (np.zeros(wanted.size, wanted.dtype), ArgumentError),
        "dtype": (np.zeros(wanted.shape, other), ArgumentError),
        "byte order": (np.zeros(wanted.shape, wanted.dtype.newbyteorder(">")), ArgumentError),
        "read-only": (frozen, ArgumentError),
        "elements that share memory": (spread, ArgumentError),
        "another memory": (ncclcomm.zeros(wanted.shape, wanted.dtype), ArgumentError),
        "list": ([0.0], UnsupportedError),
    }


@pytest.mark.parametrize("call", ["gather", "reduce", "all_reduce"])
def test_outs_that_cannot_take_the_result(call: str) -> None:
    with communicator() as comm, Findings() as found:
        shape = (2 * comm.size, 3) if call == "gather" else (2, 3)
        for turn, (name, (out, error)) in enumerate(bad_outs(np.zeros(shape, np.float32)).items()):
            odd = turn % comm.size
            root = {} if call == "all_reduce" else {"root": odd}
            passed = out if comm.rank == odd else None
            # Only together do the ranks know the shape of a gather's result.
            errors = (error, MismatchError) if call == "gather" else error
            rejected(
                comm,
                found,
                lambda keep, passed=passed, root=root: getattr(comm, call)(
                    keep(array()), out=keep(passed) if hasattr(passed, "dtype") else passed, **root
                ),
                errors,
                f"{call}, out of wrong {name} on rank {odd}",
                ["out"],
            )


def test_outs_that_overlap_the_input() -> None:
    with communicator() as comm, Findings() as found:
        buffer = data(comm.rank, (4 * comm.size + 4,), np.float32)
        for call in (comm.reduce, comm.all_reduce):
            what = f"{call.__name__}, one element further"
            rejected(
                comm,
                found,
                lambda keep, call=call: call(buffer[:4], out=keep(buffer)[1:5]),
                ArgumentError,
                what,
                ["overlap"],
            )
            what = f"{call.__name__}, reversed"
            rejected(
                comm,
                found,
                lambda keep, call=call: call(buffer[:4], out=keep(buffer)[3::-1]),
                ArgumentError,
                what,
                ["overlap"],
            )
        many = 4 * comm.size
        rejected(
            comm,
            found,
            lambda keep: comm.gather(buffer[:4], out=keep(buffer)[:many]),
            ArgumentError,
            "gather into memory that holds the part",
            ["overlap"],
        )
        rejected(
            comm,
            found,
            lambda keep: comm.scatter(buffer[:many], out=keep(buffer)[:4]),
            ArgumentError,
            "scatter into memory that holds the whole",
            ["overlap"],
        )


def test_broadcast_takes_an_array_or_out() -> None:
    with communicator() as comm, Findings() as found:
        rejected(
            comm, found, lambda keep: comm.broadcast(keep(array()), out=keep(array())), ArgumentError, "both", ["out"]
        )
        rejected(comm, found, lambda keep: comm.broadcast(None, root=comm.size - 1), ArgumentError, "none", ["root"])
