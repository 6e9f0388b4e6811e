"""Large copies and sums of host memory: in pieces, by two threads, with the same bits as in one."""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import Any

import numpy as np
import pytest

from contract.array_samples import FLOATS, LAYOUTS, REDUCIBLE, addends, assert_same_bits, sample
from ncclcomm import asarray, comm, to_numpy
from ncclcomm.devices import host_work, use_backend
from ncclcomm.devices.host import HostBackend
from ncclcomm.devices.host_work import copy_each, reduce_each
from ncclcomm.reductions import reduce_into

DEADLINE_S = 30.0


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is large, and cut into small pieces, for two cores."""
    monkeypatch.setattr(host_work, "SPLIT_BYTES", 64)
    monkeypatch.setattr(host_work, "PIECE_BYTES", 48)
    monkeypatch.setattr(host_work, "BLOCK_BYTES", 16)
    monkeypatch.setattr(host_work, "_cores", lambda: 2)
    monkeypatch.setattr(host_work, "SHORTEST_REST_S", 0.0)
    monkeypatch.setattr(host_work, "LONGEST_REST_S", 0.0)
    monkeypatch.setattr(host_work, "_helper", host_work._Helper())


@pytest.fixture(params=["one core", "two cores"])
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One core, and two."""
    monkeypatch.setattr(host_work, "_cores", lambda: 1 if request.param == "one core" else 2)


class Job(host_work._Job):
    """A job whose caller begins when the helper has, so that both take part."""

    def __init__(self, pieces: Any) -> None:
        super().__init__(pieces)
        self.begun = threading.Event()
        self.helper: int | None = None

    def run(self) -> None:
        """Wait for the helper first."""
        assert self.begun.wait(DEADLINE_S)
        super().run()

    def help(self) -> None:
        """Say that the helper is there."""
        self.helper = threading.get_ident()
        self.begun.set()
        super().help()


@pytest.mark.usefixtures("cores")
def test_copies_of_every_layout() -> None:
    for (shape, look), (other_shape, other) in zip(LAYOUTS.values(), list(LAYOUTS.values())[::-1], strict=True):
        for dtype in ("f8", "i1", ">U3"):
            source, target = sample(dtype, shape, 1), sample(dtype, shape, 2)
            expected = target.copy()
            look(expected)[...] = look(source)
            copy_each([(look(target), look(source))])
            assert_same_bits(target, expected)
            # two pairs of different shapes in one call
            first, second = np.zeros_like(look(source)), sample(dtype, other_shape, 3)
            copy_each([(first, look(source)), (other(second), other(second).copy())])
            assert_same_bits(first, look(source).copy())
            assert_same_bits(second, sample(dtype, other_shape, 3))


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("count", [10007, 64, 7])
def test_copies_of_uneven_counts(count: int) -> None:
    source, target = sample("i2", count, 1), np.full(count + 2, -7, "i2")
    copy_each([(target[1:-1], source)])
    assert_same_bits(target[1:-1].copy(), source)
    assert (target[0], target[-1]) == (-7, -7)


@pytest.mark.usefixtures("cores")
def test_copy_within_one_array() -> None:
    for shift in (1, -1):
        array = np.arange(1000)
        expected = array[1:].copy() if shift > 0 else array[:-1].copy()
        target, source = (array[:-1], array[1:]) if shift > 0 else (array[1:], array[:-1])
        copy_each([(target, source)])
        np.testing.assert_array_equal(target, expected)


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("terms", [1, 2, 3, 5])
@pytest.mark.parametrize("op", ["sum", "prod", "min", "max"])
def test_reductions_of_every_dtype_and_layout(op: str, terms: int) -> None:
    for dtype in REDUCIBLE[op]:
        for shape, look in LAYOUTS.values():
            arrays = [look(addends(dtype, shape, i, op)) for i in range(terms)]
            expected, found = np.empty_like(arrays[0]), np.empty_like(arrays[0])
            reduce_into(expected, [array.copy() for array in arrays], op)
            reduce_each(found, arrays, op)
            assert_same_bits(found, expected, dtype)


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums_have_the_same_bits(dtype: np.dtype[Any]) -> None:
    arrays = [np.random.default_rng(i).normal(size=10007).astype(dtype) for i in range(4)]
    expected, found = np.empty_like(arrays[0]), np.empty_like(arrays[0])
    reduce_into(expected, arrays, "sum")
    reduce_each(found, arrays, "sum")
    assert_same_bits(found, expected)


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_sums_in_place(place: int) -> None:
    arrays = [addends("i8", 1009, i) for i in range(4)]
    expected = np.sum(arrays, axis=0)
    # by a view of its own, which is another object
    reduce_each(arrays[place][:], arrays, "sum")
    assert_same_bits(arrays[place], expected)


@pytest.mark.usefixtures("cores")
def test_sum_into_memory_that_overlaps_a_term() -> None:
    whole = np.arange(1010)
    terms = [whole[1:].copy(), whole[:-1], whole[:-1].copy()]
    expected = np.sum(terms, axis=0)
    reduce_each(whole[1:], terms, "sum")
    np.testing.assert_array_equal(whole[1:], expected)


def test_overflow_is_quiet_in_both_threads() -> None:
    with np.errstate(all="raise"):
        total = np.empty(1000, "f2")
        reduce_each(total, [np.full(1000, 60000, "f2")] * 3, "sum")
    assert np.isinf(total).all()


def test_two_threads_share_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Job] = []
    monkeypatch.setattr(host_work, "_Job", lambda pieces: made.append(Job(pieces)) or made[-1])
    both = threading.Barrier(2, timeout=DEADLINE_S)
    ran: list[int] = []

    def piece() -> None:
        both.wait()  # is passed only while each of two threads is in a piece
        ran.append(threading.get_ident())

    host_work._run(deque((piece, ()) for _ in range(6)))
    assert sorted(ran) == sorted([threading.get_ident(), made[0].helper] * 3)


@pytest.mark.parametrize("who", ["caller", "helper"])
def test_an_error_of_a_piece_reaches_the_caller(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_work, "_Job", Job)
    caller = threading.get_ident()
    both = threading.Barrier(2, timeout=DEADLINE_S)
    after: list[int] = []

    def piece(number: int) -> None:
        if number < 2:
            both.wait()
            if (threading.get_ident() == caller) == (who == "caller"):
                raise MemoryError(who)
            failed.wait(DEADLINE_S)
        after.append(number)

    # The other thread goes on only once the failed one has taken the remaining pieces away.
    failed = threading.Event()
    pieces = [(piece, (number,)) for number in range(50)]
    with pytest.raises(MemoryError, match=who):
        host_work._run(_Watched(pieces, failed))
    assert after in ([0], [1])
    total = np.zeros(1000)
    reduce_each(total, [np.ones(1000)] * 2, "sum")
    assert (total == 2).all()


class _Watched(deque[Any]):
    """Pieces that tell when they are taken away."""

    def __init__(self, pieces: Any, cleared: threading.Event) -> None:
        super().__init__(pieces)
        self._cleared = cleared

    def clear(self) -> None:
        """Take them away."""
        super().clear()
        self._cleared.set()


def test_a_busy_helper_is_not_waited_for() -> None:
    gate, busy = threading.Event(), threading.Event()

    def hold() -> None:
        busy.set()
        assert gate.wait(DEADLINE_S)

    job = host_work._Job(deque([(hold, ())]))
    host_work._helper.offer(job)
    assert busy.wait(DEADLINE_S)
    source, target = np.arange(5000.0), np.zeros(5000)
    copy_each([(target, source)])
    np.testing.assert_array_equal(target, source)
    gate.set()
    job.run()


def _rest_after(waited_s: float, worked_s: float, helped: bool = True) -> bool:
    """What the helper does after such a job."""
    job = host_work._Job(deque())
    job.helped, job.waited_s, job.worked_s = helped, waited_s, worked_s
    host_work._helper.learn(job)
    return host_work._helper.rests()


def test_helper_rests_longer_and_longer_where_it_brings_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(host_work, "perf_counter", lambda: now_s)
    monkeypatch.setattr(host_work, "SHORTEST_REST_S", 0.01)
    monkeypatch.setattr(host_work, "LONGEST_REST_S", 0.04)
    monkeypatch.setattr(host_work, "_helper", host_work._Helper())
    assert not _rest_after(0.001, 0.002)
    for rest_s, waited_s, helped in ((0.01, 9.0, True), (0.02, 9.0, True), (0.04, 0.0, False), (0.04, 9.0, True)):
        assert _rest_after(waited_s, 0.002, helped)
        assert not host_work._two_may_work()
        now_s += rest_s - 1e-6
        assert host_work._helper.rests()
        now_s += 2e-6
        assert host_work._two_may_work()
    assert not _rest_after(0.001, 0.002)
    assert _rest_after(0.003, 0.002)
    now_s += 0.02 + 1e-6
    assert not host_work._helper.rests()


def test_nothing_is_cut_while_the_helper_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_work._helper, "_rests_until_s", float("inf"))
    monkeypatch.setattr(host_work, "_run", lambda pieces: pytest.fail("was cut"))
    source, target = np.arange(5000.0), np.zeros(5000)
    copy_each([(target, source)])
    np.testing.assert_array_equal(target, source)
    reduce_each(target, [source, source, source], "sum")
    np.testing.assert_array_equal(target, 3 * source)


def test_huge_pieces_where_there_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_work, "HUGE_BYTES", 4096)
    sizes: list[list[int]] = []
    run = host_work._run

    def noted(pieces: Any) -> None:
        sizes.append([args[0].nbytes for _, args in pieces])
        run(pieces)

    monkeypatch.setattr(host_work, "_run", noted)
    source = np.arange(512.0)
    targets = [np.zeros(512), np.zeros(512)]
    copy_each([(target, source) for target in targets])
    copy_each([(targets[0], source[::-1])])
    assert sizes == [[4096, 4096], [48] * 85 + [16]]
    np.testing.assert_array_equal(targets[0], source[::-1])
    np.testing.assert_array_equal(targets[1], source)


def test_no_thread_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    source, target = np.arange(5000.0), np.zeros(5000)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        copy_each([(target, source)])
    np.testing.assert_array_equal(target, source)
    assert host_work._helper._thread is None
    copy_each([(target, source + 1)])
    np.testing.assert_array_equal(target, source + 1)
    assert host_work._helper._thread is not None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_a_helper_of_its_own() -> None:
    source, target = np.arange(5000.0), np.zeros(5000)
    copy_each([(target, source)])
    child = os.fork()
    if child == 0:
        try:
            copy_each([(target, source * 2)])
            os._exit(0 if (target == source * 2).all() else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("immediate", [True, False], ids=["host-sync", "host-async"])
def test_calls_from_several_threads(immediate: bool) -> None:
    with use_backend(HostBackend(3, immediate=immediate)):
        failures: list[Any] = []

        def work(seed: int) -> None:
            try:
                values = [np.arange(300) * (seed + i) for i in range(3)]
                arrays = [asarray(value, device=i) for i, value in enumerate(values)]
                for _ in range(10):
                    for got in comm.all_reduce(arrays):
                        np.testing.assert_array_equal(to_numpy(got), np.sum(values, axis=0))
                    whole = comm.gather(comm.scatter(arrays[0], [2, 1]), destination=0)
                    np.testing.assert_array_equal(to_numpy(whole), values[0])
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert not failures
        assert not any(thread.is_alive() for thread in threads)
