"""Arrays of other libraries over ranks: PyTorch's tensors, and arrays that come by DLPack."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import ncclcomm
from contract.foreign_arrays import Array
from flavours import missing
from ranks.expected import Findings, average, communicator, data, numbers, reduced

pytestmark = pytest.mark.mpi


class Library:
    """How a library's arrays are made, and what they are."""

    def __init__(self, kind: type, make: Any) -> None:
        self.kind = kind
        self.make = make

    def same(self, found: Findings, got: Any, want: np.ndarray[Any, Any], what: str) -> None:
        """Note where an array is not of the library, or of other elements."""
        found.holds(type(got) is self.kind, f"{what}: {type(got).__name__} came out")
        found.same(ncclcomm.to_numpy(got), want, what)


@pytest.fixture(params=["torch", "DLPack"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """A library with arrays in host memory."""
    if request.param == "torch":
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import torch
        except ModuleNotFoundError:
            missing("torch", "no PyTorch here; pip install torch (a build for the CPU will do)", ci_has_it=False)
        yield Library(torch.Tensor, lambda array: torch.from_numpy(array.copy()))
        return
    made = ModuleType("arrays_of_a_test")
    made.from_dlpack = lambda array: Array(np.array(np.from_dlpack(array)))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, made.__name__, made)
    yield Library(Array, lambda array: Array(array.copy()))


TURNS = 3
"""Once calls are not checked, the first is learned from."""


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("count", [5, 700])
def test_every_call(library: Library, check: bool, count: int) -> None:
    with communicator(check=check) as comm, Findings() as found:
        inputs = [numbers(rank, (count, 2), "f4") for rank in range(comm.size)]
        whole = np.concatenate(inputs)
        for turn in range(TURNS):
            root = turn % comm.size
            is_root = comm.rank == root
            mine = library.make(inputs[comm.rank])
            library.same(found, comm.all_reduce(mine), reduced("sum", inputs), "all_reduce")
            averages = comm.all_reduce(mine, op="avg")
            found.holds(type(averages) is library.kind, "avg: the kind")
            found.close_to(ncclcomm.to_numpy(averages), average(inputs), "avg")
            total = comm.reduce(mine, op="max", root=root)
            gathered = comm.gather(mine, root=root)
            if is_root:
                library.same(found, total, reduced("max", inputs), "reduce")
                library.same(found, gathered, whole, "gather")
            else:
                found.holds(total is None and gathered is None, "something came off the root")
            sent = comm.broadcast(mine if is_root else None, root=root)
            library.same(found, sent, inputs[root], "broadcast")
            found.holds(not is_root or sent is mine, "broadcast: another array came out on the root")
            part = comm.scatter(library.make(whole) if is_root else None, root=root)
            library.same(found, part, inputs[comm.rank], "scatter")
            part = comm.scatter(library.make(whole.T.copy()) if is_root else None, root=root, dim=1)
            library.same(found, part, np.ascontiguousarray(inputs[comm.rank].T), "scatter along columns")
            library.same(found, mine, inputs[comm.rank], "the input")


@pytest.mark.parametrize("check", [True, False])
def test_numpy_and_others_among_ranks(library: Library, check: bool) -> None:
    with communicator(check=check) as comm, Findings() as found:
        inputs = [numbers(rank, (40,), "f8") for rank in range(comm.size)]
        for turn in range(TURNS):
            is_numpy = comm.rank % 2 == 0
            mine = inputs[comm.rank] if is_numpy else library.make(inputs[comm.rank])
            got = comm.all_reduce(mine)
            found.holds(type(got) is (np.ndarray if is_numpy else library.kind), f"{type(got).__name__} came out")
            found.same(ncclcomm.to_numpy(got), reduced("sum", inputs), f"turn {turn}")
            for root in range(comm.size):
                received = comm.broadcast(mine if comm.rank == root else None, root=root)
                of = np.ndarray if root % 2 == 0 else library.kind
                found.holds(type(received) is of, f"{type(received).__name__} came from {root}")
                found.same(ncclcomm.to_numpy(received), inputs[root], f"from {root}")
                filled = np.zeros(40) if comm.rank != root else mine
                comm.broadcast(filled, root=root)
                found.same(ncclcomm.to_numpy(filled), inputs[root], f"from {root}, to be filled")


def test_arrays_to_fill(library: Library) -> None:
    if library.kind is Array and np.lib.NumpyVersion(np.__version__) < "2.1.0":
        pytest.skip("this NumPy takes what comes by DLPack as constant")
    with communicator() as comm, Findings() as found:
        inputs = [numbers(rank, (6,), "i4") for rank in range(comm.size)]
        mine, out = library.make(inputs[comm.rank]), library.make(np.zeros(6, "i4"))
        found.holds(comm.all_reduce(mine, out=out) is out, "all_reduce: out was not returned")
        library.same(found, out, reduced("sum", inputs), "all_reduce")
        found.holds(comm.all_reduce(mine, out=mine) is mine, "in place: the array was not returned")
        library.same(found, mine, reduced("sum", inputs), "in place")
        out = library.make(inputs[comm.rank])
        comm.broadcast(out=out, root=comm.size - 1)
        library.same(found, out, inputs[-1], "broadcast")
        out = library.make(np.zeros(6 * comm.size, "i4"))
        comm.gather(library.make(inputs[comm.rank]), root=0, out=out if comm.rank == 0 else None)
        if comm.rank == 0:
            library.same(found, out, np.concatenate(inputs), "gather")
        part = library.make(np.zeros(6, "i4"))
        comm.scatter(out if comm.rank == 0 else None, out=part)
        library.same(found, part, inputs[comm.rank], "scatter")


def test_every_bit_of_bfloat16() -> None:
    if "torch" not in sys.modules:
        missing("torch", "no PyTorch here; pip install torch (a build for the CPU will do)", ci_has_it=False)
    import torch

    with communicator() as comm, Findings() as found:
        parts = [data(rank, (9,), "i2") for rank in range(comm.size)]
        mine = torch.from_numpy(parts[comm.rank]).view(torch.bfloat16)
        whole = comm.gather(mine)
        if comm.rank == 0:
            found.holds(whole.dtype is torch.bfloat16, str(whole.dtype))
            found.same(whole.view(torch.int16).numpy(), np.concatenate(parts), "gather")
        ones = comm.all_reduce(torch.ones(3, dtype=torch.bfloat16))
        found.holds(ones.tolist() == [comm.size] * 3, str(ones))


def test_what_autograd_follows_is_refused_on_every_rank() -> None:
    if "torch" not in sys.modules:
        missing("torch", "no PyTorch here; pip install torch (a build for the CPU will do)", ci_has_it=False)
    import torch

    with communicator() as comm:
        with pytest.raises(ncclcomm.UnsupportedError, match="requires grad"):
            comm.all_reduce(torch.ones(3, requires_grad=comm.rank == comm.size - 1))
        assert comm.all_reduce(torch.ones(3)).tolist() == [comm.size] * 3
