"""What the rank tests share: data that differ by rank, results that NumPy computes from them, and findings.

Any rank can make any other rank's data, so each computes what it expects by itself. Results are compared only after the
last collective of a test: a rank that left a test early would leave the others waiting.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from types import TracebackType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from mpi4py import MPI

import ncclcomm

__all__ = [
    "COMPLEX",
    "FLOATS",
    "INTS",
    "KINDS",
    "LAYOUTS",
    "MOVED",
    "SETTINGS",
    "SHAPES",
    "WORLD",
    "Findings",
    "Kept",
    "Outcome",
    "average",
    "communicator",
    "data",
    "environment",
    "every_op",
    "laid_out",
    "moved",
    "numbers",
    "on",
    "outcomes",
    "reduced",
    "rejected",
]

WORLD = MPI.COMM_WORLD

INTS = [np.dtype(name) for name in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8")]
FLOATS = [np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)]
COMPLEX = [np.dtype(name) for name in ("c8", "c16")]
_RECORD = np.dtype([("id", "<i4"), ("at", ">f8", (2,)), ("tag", "S3")])
MOVED = [
    np.dtype(t)
    for t in (
        bool,
        *INTS,
        *FLOATS,
        *COMPLEX,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e5m2,
        "datetime64[ns]",
        "timedelta64[s]",
        _RECORD,
        ">f8",
        ">i2",
        "S5",
        "U3",
    )
]
"""Every kind of dtype that a collective moves."""

SHAPES: list[tuple[int, ...]] = [(), (0,), (3, 0, 5), (1,), (1009,), (2, 3, 5)]
KINDS = ("numpy", "device")
"""Arrays in host memory, and arrays of ncclcomm.asarray on this rank's device."""

SETTINGS = (
    "NCCLCOMM_CHECK",
    "NCCLCOMM_CHUNK_BYTES",
    "NCCLCOMM_NODE_MAP",
    "NCCLCOMM_NODE_SIZE",
)
"""Variables that a Communicator reads when it is made."""

LAYOUTS: dict[str, tuple[Callable[[tuple[int, ...]], tuple[int, ...]], Callable[[Any], Any]]] = {
    "C": (lambda shape: shape, lambda base: base),
    "Fortran": (lambda shape: shape[::-1], lambda base: base.T),
    "strided": (lambda shape: (*shape[:-1], 2 * shape[-1]), lambda base: base[..., ::2]),
    "column": (lambda shape: (*shape, 3), lambda base: base[..., 1]),
    "reversed": (lambda shape: shape, lambda base: base[::-1]),
    "offset": (lambda shape: (shape[0] + 2, *shape[1:]), lambda base: base[1:-1]),
}
"""For each layout: the shape of the memory behind an array of a shape, and how the array is cut from it."""


def data(rank: int, shape: Sequence[int], dtype: Any = np.float64, seed: int = 0) -> np.ndarray[Any, Any]:
    """A rank's array of any bits that the dtype allows, NaNs and all."""
    rng = np.random.default_rng([rank, seed])
    kind = np.dtype(dtype)
    if kind.kind == "b":
        return rng.integers(0, 2, tuple(shape)).astype(bool)
    if kind.kind == "U":
        return rng.integers(100, 1000, tuple(shape)).astype(kind)
    raw = rng.integers(0, 256, int(np.prod(shape, dtype=int)) * kind.itemsize, dtype=np.uint8)
    return raw.view(kind).reshape(tuple(shape))


def numbers(rank: int, shape: Sequence[int], dtype: Any = np.float64, seed: int = 0) -> np.ndarray[Any, Any]:
    """A rank's numbers: integers of the whole range; floats whose sums and products over four ranks are exact."""
    kind = np.dtype(dtype)
    if kind.kind in "biu":
        return data(rank, shape, kind, seed)
    rng = np.random.default_rng([rank, seed])
    values = rng.integers(-4, 5, tuple(shape)).astype(np.float64)
    if kind.kind == "c":
        values = values + 1j * rng.integers(-4, 5, tuple(shape))
    return np.asarray(values).astype(kind)


def reduced(op: str, arrays: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """The element-by-element reduction of arrays, in their dtype."""
    is_bool = arrays[0].dtype.kind == "b"
    funcs = {"sum": np.logical_or if is_bool else np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
    with np.errstate(all="ignore"):
        return np.asarray(reduce(funcs[op], arrays), arrays[0].dtype)


def average(arrays: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """The mean of arrays in double precision."""
    wide = np.complex128 if arrays[0].dtype.kind == "c" else np.float64
    return np.asarray(sum(array.astype(wide) for array in arrays) / len(arrays))


def moved(kind: str) -> list[np.dtype[Any]]:
    """The dtypes that a kind of array has: CuPy's arrays hold numbers in native byte order only."""
    if kind == "numpy" or ncclcomm.xp.__name__ != "cupy":
        return MOVED
    return [
        dtype for dtype in MOVED if dtype.name == "bfloat16" or (dtype.isnative and dtype.char in "?bBhHiIlLqQefdFD")
    ]


def on(comm: Any, kind: str, array: np.ndarray[Any, Any]) -> Any:
    """The array as a NumPy one, or on the rank's device."""
    return array if kind == "numpy" else ncclcomm.asarray(array, device=comm.device)


def laid_out(comm: Any, kind: str, layout: str, array: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    """An array of that content and layout, and the memory around it, which holds a pattern elsewhere."""
    base_shape, cut = LAYOUTS[layout]
    base = data(77, base_shape(array.shape), array.dtype, seed=77)
    cut(base)[...] = array
    moved = on(comm, kind, base)
    return cut(moved), moved


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set the variables that a Communicator reads, and no others of them, for the time of the block."""
    before = {name: os.environ.pop(name, None) for name in SETTINGS}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in {*SETTINGS, *variables}:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})


@contextmanager
def communicator(check: bool | int = True, mpi_comm: Any = None, **variables: str) -> Iterator[ncclcomm.Communicator]:
    """A Communicator made under an environment, closed at the end of the block."""
    with environment(**variables):
        made = ncclcomm.Communicator(WORLD if mpi_comm is None else mpi_comm, check=check)
    with made as comm:
        yield comm


class Findings:
    """Collects what is wrong, and fails the test at the end of its block, when no rank waits for this one any more."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def __enter__(self) -> Findings:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            shown = "\n".join(self.problems[:20])
            assert not self.problems, f"{len(self.problems)} findings on rank {WORLD.rank}:\n{shown}"

    def holds(self, condition: object, what: str) -> None:
        """Note `what` unless the condition holds."""
        if not condition:
            self.problems.append(what)

    def same(self, got: Any, want: np.ndarray[Any, Any], what: str, kind: str = "", device: int | None = None) -> None:
        """Compare shape, dtype and bytes; with a kind also the kind of array and its device."""
        if got is None or not hasattr(got, "dtype"):
            self.problems.append(f"{what}: got {got!r}")
            return
        host = ncclcomm.to_numpy(got)
        if host.shape != want.shape or host.dtype != want.dtype:
            self.problems.append(f"{what}: got {host.shape} {host.dtype}, want {want.shape} {want.dtype}")
        elif host.tobytes() != want.tobytes():
            self.problems.append(f"{what}: got {host.ravel()[:5]}, want {want.ravel()[:5]}, or they differ further on")
        if kind == "numpy":
            self.holds(type(got) is np.ndarray, f"{what}: NumPy went in, {type(got).__name__} came out")
        elif kind == "device":
            where = ncclcomm.device_index(got)
            self.holds(where >= 0 and device in (None, where), f"{what}: on device {where}, want {device}")

    def close_to(self, got: Any, want: np.ndarray[Any, Any], what: str) -> None:
        """Compare with a result of double precision, within two units in the last place."""
        host = ncclcomm.to_numpy(got)
        wide = np.complex128 if host.dtype.kind == "c" else np.float64
        eps = float(ml_dtypes.finfo(host.dtype).eps)
        error = np.abs(host.astype(wide) - want)
        self.holds(np.all(error <= 2 * eps * np.abs(want)), f"{what}: off by {error.max(initial=0)}")


class Outcome(NamedTuple):
    """What one rank's call ended with: the class of its error, or None, and the message."""

    error: type[BaseException] | None
    message: str


def outcomes(call: Callable[[], object], mpi_comm: Any = WORLD) -> list[Outcome]:
    """Make a call on every rank and tell all ranks how it ended on each."""
    try:
        call()
    except Exception as error:  # whatever it is, the ranks compare it
        mine = Outcome(type(error), str(error))
    else:
        mine = Outcome(None, "")
    return [Outcome(*told) for told in mpi_comm.allgather(tuple(mine))]


def every_op(comm: Any, found: Findings, count: int = 7, kind: str = "numpy", what: str = "") -> None:
    """Every collective with every root, on arrays of uneven lengths around `count`; compares all of it."""
    size, me, device = comm.size, comm.rank, comm.device
    lengths = [count + 3 * rank if rank % 3 else 0 for rank in range(1, size + 1)]
    for root in range(size):
        where = f"{what} root {root}"
        sent = data(root, (count, 3), np.uint8, seed=root)
        got = comm.broadcast(on(comm, kind, sent) if me == root else None, root=root)
        found.same(got, sent, f"broadcast,{where}", kind, device)

        whole = data(root, (sum(lengths), 2), np.int16, seed=1)
        chunks = np.split(whole, np.cumsum(lengths)[:-1])
        got = comm.scatter(on(comm, kind, whole) if me == root else None, root=root, chunk_sizes=lengths)
        found.same(got, chunks[me], f"scatter,{where}", kind, device)

        parts = [data(rank, (2, lengths[rank]), np.float32, seed=2) for rank in range(size)]
        got = comm.gather(on(comm, kind, parts[me]), root=root, dim=1)
        if me == root:
            found.same(got, np.concatenate(parts, axis=1), f"gather,{where}", kind, device)
        else:
            found.holds(got is None, f"gather,{where}: {got!r} off the root")

        inputs = [numbers(rank, (count,), np.int32, seed=3) for rank in range(size)]
        for call in (comm.reduce, comm.reduce_add):
            got = call(on(comm, kind, inputs[me]), root=root)
            if me == root:
                found.same(got, reduced("sum", inputs), f"{call.__name__},{where}", kind, device)
            else:
                found.holds(got is None, f"{call.__name__},{where}: {got!r} off the root")
    inputs = [numbers(rank, (count, 2), np.float64, seed=4) for rank in range(size)]
    for op in ("sum", "max"):
        got = comm.all_reduce(on(comm, kind, inputs[me]), op=op)
        found.same(got, reduced(op, inputs), f"all_reduce {op},{what}", kind, device)
    comm.barrier()


class Kept:
    """Arrays that a call must leave as they are."""

    def __init__(self) -> None:
        self._kept: list[tuple[Any, bytes]] = []

    def __call__(self, array: Any) -> Any:
        """Note an array's content and give the array back."""
        self._kept.append((array, ncclcomm.to_numpy(array).tobytes()))
        return array

    def is_unchanged(self) -> bool:
        """True if every array still has its content."""
        return all(ncclcomm.to_numpy(array).tobytes() == before for array, before in self._kept)


def rejected(
    comm: Any,
    found: Findings,
    call: Callable[[Kept], object],
    error: type[BaseException] | tuple[type[BaseException], ...],
    what: str,
    words: Sequence[str] = (),
) -> list[Outcome]:
    """Make a call that must fail on every rank alike, with all words in each message, and change nothing.

    Args:
        comm: a checked communicator over all of WORLD, which must work afterwards.
        found: takes what is wrong.
        call: makes the call; passes the arrays that must keep their content through its argument.
        error: the class of the error, or those that will do.
        what: the call, for findings.
        words: what every rank's message must contain; a world of one need not name its rank.
    """
    kept = Kept()
    told = outcomes(lambda: call(kept))
    classes = {outcome.error for outcome in told}
    found.holds(len(classes) == 1, f"{what}: ranks raise differently: {told}")
    for rank, outcome in enumerate(told):
        found.holds(outcome.error and issubclass(outcome.error, error), f"{what}: rank {rank} ended with {outcome}")
        if comm.size > 1:
            found.holds(outcome.message.startswith(f"rank {rank} (node "), f"{what}: who speaks? {outcome}")
        for word in words if comm.size > 1 else [word for word in words if not word.startswith("rank ")]:
            found.holds(word in outcome.message, f"{what}: rank {rank} doesn't say {word!r}: {outcome.message}")
    found.holds(kept.is_unchanged(), f"{what}: an array was changed")
    total = comm.all_reduce(np.array([comm.rank + 1]))
    found.holds(total[0] == comm.size * (comm.size + 1) // 2, f"{what}: all_reduce afterwards gives {total}")
    return told
