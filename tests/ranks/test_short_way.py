"""The short way of plain arrays: the results of the long way, also where some ranks take one and some the other."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import ncclcomm
from ncclcomm import AbortedError, ArgumentError, DeviceError, MismatchError, MpiError
from ncclcomm.communicator.board import BOARD
from ranks.expected import KINDS, WORLD, Findings, average, communicator, data, environment, numbers, on, reduced

pytestmark = pytest.mark.mpi

TURNS = 3
"""Of each call, the first is learned from; in the others each rank has its own reason to take the long way, or none."""

COUNTS = [1, 32, 33, 700]
"""Of 8 bytes: their data go with the header, just so, just not, and not at all."""


@pytest.fixture(autouse=True, scope="module")
def one_host() -> None:
    """Over several there is no short way."""
    here = WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    least = WORLD.allreduce(here.size, op=MPI.MIN)
    here.Free()
    if least < WORLD.size:
        pytest.skip("the short way is that of one node")


def odd(array: np.ndarray[Any, Any], rank: int, turn: int) -> np.ndarray[Any, Any]:
    """The array, on some ranks in some turns with strides that MPI can't be given."""
    if turn == 0 or (rank + turn) % 2:
        return array
    wide = np.zeros((*array.shape, 2), array.dtype)
    wide[..., 0] = array
    return wide[..., 0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", COUNTS)
def test_reductions(kind: str, count: int) -> None:
    with communicator(check=False) as comm, Findings() as found:
        for op in ("sum", "prod", "min", "max", "avg"):
            for dtype in ("i4", "f8", "f2", "c16", ml_dtypes.bfloat16):
                # The signs of zeros in a complex product depend on the order in which MPI multiplies.
                if (dtype == "c16" and op in ("prod", "min", "max")) or (dtype == "i4" and op == "avg"):
                    continue
                inputs = [numbers(rank, (count,), dtype, seed=5) for rank in range(comm.size)]
                for turn in range(TURNS):
                    what = f"{op} of {dtype}, turn {turn}"
                    mine = on(comm, kind, odd(inputs[comm.rank], comm.rank, turn))
                    root = turn % comm.size
                    totals = [comm.all_reduce(mine, op=op)]
                    out = on(comm, kind, odd(np.zeros(count, dtype), comm.rank + 1, turn))
                    found.holds(comm.all_reduce(mine, op=op, out=out) is out, f"{what}: out was not returned")
                    totals.append(out)
                    same = on(comm, kind, odd(inputs[comm.rank].copy(), comm.rank, turn))
                    totals.append(comm.all_reduce(same, op=op, out=same))
                    to_root = comm.reduce(mine, op=op, root=root)
                    found.holds((to_root is None) == (comm.rank != root), f"{what}: {to_root!r}")
                    for total in totals + [to_root] * (comm.rank == root):
                        if op == "avg":
                            found.close_to(total, average(inputs), what)
                        else:
                            found.same(total, reduced(op, inputs), what, kind, comm.device)
                    found.same(mine, inputs[comm.rank], f"{what}: the input")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk_bytes", ["64", "1000000"])
def test_moves(kind: str, chunk_bytes: str) -> None:
    with communicator(check=False, NCCLCOMM_CHUNK_BYTES=chunk_bytes) as comm, Findings() as found:
        me, size = comm.rank, comm.size
        for dtype in ("f8", "?", ml_dtypes.bfloat16):
            for count in COUNTS:
                for turn in range(2 * TURNS):
                    root = turn // TURNS % size
                    what = f"{count} of {dtype}, root {root}, turn {turn}"
                    sent = data(root, (count, 2), dtype, seed=turn)
                    mine = on(comm, kind, odd(sent if me == root else np.zeros_like(sent), me, turn))
                    given = mine if me == root or turn % 2 else None
                    found.same(comm.broadcast(given, root=root), sent, f"broadcast, {what}", kind, comm.device)
                    mine = on(comm, kind, odd(sent if me == root else np.zeros_like(sent), me, turn))
                    found.same(comm.broadcast(out=mine, root=root), sent, f"broadcast out, {what}", kind, comm.device)

                    whole = data(root, (count * size, 2), dtype, seed=turn)
                    counts = None if turn % 3 else [count * size, *[0] * (size - 1)]
                    parts = np.array_split(whole, size) if counts is None else [whole] + [whole[:0]] * (size - 1)
                    mine = on(comm, kind, odd(whole, me, turn)) if me == root else None
                    out = on(comm, kind, odd(np.zeros_like(parts[me]), me + 1, turn)) if turn % 2 else None
                    got = comm.scatter(mine, root=root, chunk_sizes=counts, out=out)
                    found.same(got, parts[me], f"scatter, {what}", kind, comm.device)
                    found.holds(out is None or got is out, f"scatter, {what}: out was not returned")

                    lengths = [count + (rank if turn % 3 else 0) for rank in range(size)]
                    parts = [data(rank, (lengths[rank], 2), dtype, seed=turn) for rank in range(size)]
                    joined = np.frombuffer(b"".join(part.tobytes() for part in parts), dtype).reshape(-1, 2)
                    out = on(comm, kind, odd(np.zeros_like(joined), me + 1, turn)) if turn % 2 and me == root else None
                    got = comm.gather(on(comm, kind, odd(parts[me], me, turn)), root=root, out=out)
                    if me == root:
                        found.same(got, joined, f"gather, {what}", kind, comm.device)
                        found.holds(out is None or got is out, f"gather, {what}: out was not returned")
                    else:
                        found.holds(got is None, f"gather, {what}: {got!r}")


def test_calls_are_numbered_and_told_of_as_others() -> None:
    with communicator(check=2) as comm, Findings() as found:
        name = comm._member.name
        for number in range(20):
            call = (comm.all_reduce, comm.broadcast, comm.gather, comm.reduce_add)[number % 4]
            call(np.ones(2))
            found.holds(comm._calls == number + 1, f"{comm._calls} calls, not {number + 1}")
            found.holds(BOARD.last[name] == (call.__name__, number), f"{BOARD.last[name]} after call {number}")
            found.holds(not BOARD.running, f"still running: {BOARD.running}")
        found.holds(comm._quick is not None, "the short way was never taken")


def test_no_array_is_kept() -> None:
    with communicator(check=False) as comm, Findings() as found:
        comm.barrier()
        calls = (comm.all_reduce, comm.reduce, comm.broadcast, comm.gather, comm.scatter)
        for call in calls * 2:
            array = np.ones(4 * comm.size)
            call(array)
            gone = weakref.ref(array)
            del array
            gc.collect()
            found.holds(gone() is None, f"{call.__name__} keeps its array")


@pytest.mark.parametrize("bad", ["op", "root", "read-only", "overlap", "shape", "dim", "sizes"])
def test_bad_arguments_are_told_in_the_same_words(bad: str) -> None:
    """The rank that makes the bad call raises, and the communicator is as usable afterwards as on the long way."""
    with communicator(check=False) as comm:
        for _ in range(2):
            comm.all_reduce(np.ones(4))
            comm.broadcast(np.ones(4))
            comm.scatter(np.ones(4 * comm.size))
        whole = np.ones(8)
        frozen = np.ones(4)
        frozen.flags.writeable = False
        calls = {
            "op": lambda: comm.all_reduce(np.ones(4), op="mean"),
            "root": lambda: comm.broadcast(out=np.ones(4), root=True),
            "read-only": lambda: comm.all_reduce(np.ones(4), out=frozen),
            "overlap": lambda: comm.all_reduce(whole[:4], out=whole[2:6]),
            "shape": lambda: comm.all_reduce(np.ones(4), out=np.ones(3)),
            "dim": lambda: comm.scatter(np.ones(4 * comm.size), dim=3),
            "sizes": lambda: comm.scatter(np.ones(comm.size), chunk_sizes=[True] * comm.size),
        }
        words = {"root": "True", "op": "'mean'", "dim": "dim 3", "sizes": "True"}
        with pytest.raises((ArgumentError, IndexError, MismatchError), match=words.get(bad, bad)):
            calls[bad]()
        comm.barrier()
        np.testing.assert_array_equal(comm.all_reduce(np.ones(4)), np.full(4, comm.size))


@pytest.mark.mpi(min_size=2)
def test_what_fails_while_data_move_makes_the_communicator_unusable() -> None:
    def fail(*args: object) -> None:
        raise OSError("the network is gone")

    with environment(), Findings() as found:
        comm = ncclcomm.Communicator(WORLD, check=False)
        comm.all_reduce(np.ones(3))
        found.holds(comm._quick is not None, "no short way")
        comm._quick.bcast = fail
        with pytest.raises(OSError, match="the network is gone"):
            comm.broadcast(out=np.ones(3))
        with pytest.raises(AbortedError, match="broadcast failed on this rank while data moved: OSError: the network"):
            comm.all_reduce(np.ones(3))
        found.holds(not BOARD.running, f"still running: {BOARD.running}")
        comm.close()


@pytest.mark.mpi(min_size=2)
def test_ranks_in_different_calls_are_told_where_a_header_says_so() -> None:
    with environment(), Findings() as found:
        comm = ncclcomm.Communicator(WORLD, check=False)
        for _ in range(2):
            comm.broadcast(np.ones(3))
            comm.scatter(np.ones(3 * comm.size))
        if comm.rank == 0:
            comm.scatter(np.ones(3 * comm.size))
        else:
            with pytest.raises(MismatchError, match=r"rank 0: scatter \(call 4\).*: broadcast \(call 4\)"):
                comm.broadcast(np.ones(3))
        comm.abort()
        comm.close()
        found.holds(not BOARD.running, f"still running: {BOARD.running}")


def skip_on_gpus() -> None:
    """Virtual devices are the short way's; GPUs have the long way alone."""
    if ncclcomm.xp.__name__ == "cupy":
        pytest.skip("the short way takes no GPU arrays")


@pytest.mark.parametrize("op", ["gather", "scatter"])
def test_results_are_on_the_device_of_the_array_at_hand(op: str) -> None:
    skip_on_gpus()
    with communicator(check=False) as comm, Findings() as found:
        comm.barrier()
        for device in (1, 1, 2, 2, 1):
            got = getattr(comm, op)(ncclcomm.asarray(np.ones(2 * comm.size), device=device))
            if comm.rank == 0:
                found.holds(got.device.id == device, f"{op} of an array of device {device} is on {got.device}")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("op", ["broadcast", "scatter", "gather"])
def test_what_failed_on_a_stream_is_told_to_the_others(op: str) -> None:
    skip_on_gpus()

    def fail() -> None:
        raise ValueError("the user's work")

    with environment(), Findings() as found:
        comm = ncclcomm.Communicator(WORLD, check=False)
        # Few data: a message that nobody takes would go to the next communicator, once this one is freed.
        array = ncclcomm.asarray(np.ones(4 * comm.size), device=comm.device)
        for _ in range(3):
            getattr(comm, op)(array)
        comm.barrier()
        bad = comm.size - 1 if op == "gather" else 0
        if comm.rank == bad:
            ncclcomm.current_stream(comm.device).launch(fail)
        if op != "gather" or comm.rank in (0, bad):
            with pytest.raises(DeviceError, match="the user's work"):
                getattr(comm, op)(array)
        else:
            comm.gather(array)
        if op != "gather":
            got = getattr(comm, op)(array)
            found.holds(bool(np.all(ncclcomm.to_numpy(got) == 1)), f"then {op} gave {got}")
        comm.abort()
        comm.close()


@pytest.mark.mpi(min_size=2)
def test_no_memory_for_the_roots_part_of_a_scatter_harms_nobody() -> None:
    def no_memory(*args: object) -> None:
        raise MemoryError

    with communicator(check=False) as comm, Findings() as found:
        whole = np.arange(1000.0 * comm.size)
        for turn in range(4):
            if turn == 3 and comm.rank == 0:
                assert comm._quick is not None
                comm._quick.empty = no_memory
            mine = whole + turn
            got = comm.scatter(mine)
            mine[:] = -1
            found.same(got, (whole + turn)[1000 * comm.rank : 1000 * (comm.rank + 1)], f"turn {turn}")


def test_a_root_that_passes_nothing_is_told() -> None:
    for comm in (communicator(check=False), ncclcomm.Communicator(check=False)):
        with comm as one:
            one.barrier()
            one.broadcast(np.ones(3))
            if one.size == 1:
                for _ in range(2):
                    with pytest.raises(ArgumentError, match="the root's array is None"):
                        one.broadcast()


@pytest.mark.parametrize("check", [True, False])
def test_an_average_warns_of_nothing(check: bool) -> None:
    """Warnings are errors here, and would make the communicator unusable."""
    values = np.array([complex(np.inf, 0), complex(3, 1)])
    with communicator(check=check) as comm, Findings() as found:
        comm.barrier()
        for turn in range(3):
            got = comm.all_reduce(values, op="avg")
            found.holds(np.isinf(got[0].real) and got[1] == values[1], f"turn {turn}: {got}")
        with np.errstate(all="raise"):
            comm.all_reduce(np.array([5e-324]), op="avg")
        found.holds(not comm._broken, comm._broken)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("op", ["barrier", "broadcast", "broadcast out"])
def test_errors_of_mpi_are_translated_and_named_once(op: str) -> None:
    def fail(*args: object) -> None:
        raise MPI.Exception(MPI.ERR_OTHER)

    class Failing:
        """The transport's communicator."""

        size, Bcast = WORLD.size, staticmethod(fail)

    with environment(), Findings() as found:
        comm = ncclcomm.Communicator(WORLD, check=False)
        call = {
            "barrier": comm.barrier,
            "broadcast": lambda: comm.broadcast(np.ones(3)),
            "broadcast out": lambda: comm.broadcast(out=np.ones(3)),
        }[op]
        for _ in range(3):
            call()
        comm.barrier()
        assert comm._quick is not None
        comm._quick.barrier = comm._quick.bcast = fail
        comm._control.comm = Failing()
        with pytest.raises(MpiError, match=rf"^rank {comm.rank} \(.*MPI .*failed") as raised:
            call()
        found.holds(str(raised.value).count(f"rank {comm.rank} (") == 1, str(raised.value))
        with pytest.raises(AbortedError):
            call()
        comm.close()
