"""What the CUDA backend decides by itself, checked with CuPy and no GPU: fakes stand in for the runtime's calls.

Run as a program by a Python that has CuPy it prints, as JSON, each check's name and traceback ('' where it passed).
"""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

CHECKS: dict[str, Callable[[], None]] = {}
WITHIN_S = 20.0


def check(func: Callable[[], None]) -> Callable[[], None]:
    """List a check."""
    CHECKS[func.__name__] = func
    return func


@contextmanager
def raises(kind: type[BaseException], *words: str) -> Iterator[None]:
    """Hold that the block raises an error of exactly that class with these words."""
    found: BaseException | None = None
    try:
        yield
    except kind as error:
        found = error
    assert type(found) is kind, repr(found)
    assert all(word in str(found) for word in words), str(found)


@contextmanager
def _pool() -> Iterator[tuple[Any, set[int]]]:
    """The pool of streams, empty, and the handles whose work is not done."""
    import cupy

    from ncclcomm.devices import cuda_pool

    busy: set[int] = set()

    class Owned:
        """In the place of a CuPy stream that owns its handle."""

        made: list[int] = []
        destroyed: list[int] = []
        from_external = cupy.cuda.Stream.from_external

        def __init__(self, non_blocking: bool, priority: int) -> None:
            assert non_blocking
            self.ptr = 1000 + len(self.made)
            self.made.append(self.ptr)

        def __del__(self) -> None:
            self.destroyed.append(self.ptr)

    fake = SimpleNamespace(cuda=SimpleNamespace(Stream=Owned))
    driver = SimpleNamespace(is_idle=lambda handle: handle not in busy)
    with (
        patch.object(cuda_pool, "cupy", fake),
        patch.object(cuda_pool, "cuda_driver", driver),
        patch.object(cuda_pool, "_dropped", {}),
    ):
        yield cuda_pool, busy


@check
def a_dropped_stream_is_used_again_when_its_work_is_done() -> None:
    with _pool() as (pool, busy):
        first = pool.take(0, 0)
        handle = first.ptr
        busy.add(handle)
        del first
        second = pool.take(0, 0)
        assert second.ptr != handle, "its work was not done"
        busy.clear()
        assert pool.take(1, 0).ptr != handle, "another device"
        assert pool.take(0, -1).ptr != handle, "another priority"
        assert pool.take(0, 0).ptr == handle
        assert pool.cupy.cuda.Stream.destroyed == []


@check
def a_stream_that_anyone_holds_is_not_used_again() -> None:
    with _pool() as (pool, _):
        stream = pool.take(0, 0)
        current_in_cupy, handle = stream, stream.ptr
        del stream
        gc.collect()
        assert pool.take(0, 0).ptr != handle
        assert current_in_cupy.ptr == handle


@check
def a_stream_whose_error_was_not_told_is_not_used_again() -> None:
    from ncclcomm.devices.cuda_streams import errors, take_error
    from ncclcomm.errors import DeviceError

    with _pool() as (pool, _):
        stream = pool.take(0, 0)
        handle = stream.ptr
        errors[0, handle] = ValueError("launched")
        del stream
        assert pool.take(0, 0).ptr != handle
        with raises(DeviceError, "launched"):
            take_error(0)
        assert handle in {pool.take(0, 0).ptr, pool.take(0, 0).ptr}


@check
def only_so_many_unused_streams_are_kept() -> None:
    with _pool() as (pool, busy):
        streams = [pool.take(0, 0) for _ in range(100)]
        busy.update(pool.cupy.cuda.Stream.made)
        streams.clear()
        held = [pool.take(0, 0) for _ in range(10)]
        assert pool.cupy.cuda.Stream.destroyed == [], "work that runs"
        busy.clear()
        for _ in range(10):
            held.append(pool.take(0, 0))
        kept = len(pool.cupy.cuda.Stream.made) - len(pool.cupy.cuda.Stream.destroyed)
        assert kept <= len(held) + pool.MOST_UNUSED, kept


@check
def a_foreign_stream_gives_no_warning_and_knows_its_device() -> None:
    from ncclcomm.devices import cuda_pool

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stream = cuda_pool.external(77, 3)
    assert (stream.ptr, stream.device_id) == (77, 3)


@contextmanager
def _runtime(*modules: Any, **calls: Any) -> Iterator[Any]:
    """The modules with a fake runtime, whose device is 0 but for what calls say."""
    from cupy.cuda import runtime

    calls = {"getDevice": lambda: 0, "setDevice": lambda device: None, **calls}
    fake = SimpleNamespace(CUDARuntimeError=runtime.CUDARuntimeError, **calls)
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(patch.object(module, "runtime", fake))
        yield fake


@check
def a_query_tells_errors_from_work_that_runs() -> None:
    from ncclcomm.devices import cuda_streams
    from ncclcomm.errors import ArgumentError, DeviceError

    stream = cuda_streams.CudaStream(0, SimpleNamespace(ptr=5))
    start, end = (cuda_streams.CudaEvent(timing=True, blocking=False, interprocess=False) for _ in range(2))
    for event in (start, end):
        event.device, event.cupy = 0, SimpleNamespace(ptr=6)
    for status, expected in ((0, True), (600, False)):
        with _runtime(
            cuda_streams, streamQuery=lambda _, status=status: status, eventQuery=lambda _, status=status: status
        ):
            assert stream.query() is expected
            assert start.query() is expected
    with _runtime(cuda_streams, eventQuery=lambda _: 600), raises(ArgumentError, "not complete"):
        start.elapsed_ms(end)
    with _runtime(cuda_streams, streamQuery=lambda _: 700, eventQuery=lambda _: 700):
        for call in (stream.query, start.query, lambda: start.elapsed_ms(end)):
            with raises(DeviceError, "cudaErrorIllegalAddress"):
                call()


@check
def calls_that_need_the_events_device_have_it() -> None:
    from ncclcomm.devices import cuda_streams

    device = [0]
    asked: list[tuple[str, int]] = []

    def tell(call: str, answer: Any) -> Any:
        asked.append((call, device[0]))
        return answer

    start, end, unrecorded = (
        cuda_streams.CudaEvent(timing=timing, blocking=False, interprocess=not timing) for timing in (True, True, False)
    )
    for event in (start, end):
        event.device, event.cupy = 1, SimpleNamespace(ptr=6)
    made = SimpleNamespace(
        Event=lambda **_: SimpleNamespace(ptr=7), get_elapsed_time=lambda first, last: tell("elapsed", 2.5)
    )
    calls = {
        "getDevice": lambda: device[0],
        "setDevice": lambda number: device.__setitem__(0, number),
        "eventQuery": lambda _: 0,
        "ipcGetEventHandle": lambda handle: tell("handle", b"of %d" % handle),
    }
    with _runtime(cuda_streams, **calls), patch.object(cuda_streams, "cupy", SimpleNamespace(cuda=made)):
        assert start.elapsed_ms(end) == 2.5
        device[0] = 2
        assert unrecorded.ipc_handle() == b"of 7"
        device[0] = 0
        assert unrecorded.ipc_handle() == b"of 7"
    assert asked == [("elapsed", 1), ("handle", 2), ("handle", 2)]
    assert (unrecorded.device, device) == (2, [0])


@check
def device_of_asks_cuda_where_a_pointer_is() -> None:
    from cupy.cuda import runtime

    from ncclcomm.devices import current_device, device_of, use_backend
    from ncclcomm.devices.host import HostBackend
    from ncclcomm.errors import ArgumentError, DeviceError

    def memory(pointer: int, nbytes: int, owner: Any) -> Any:
        if pointer == 66:
            raise runtime.CUDARuntimeError(1)
        return SimpleNamespace(device_id={64: 1, 65: 7, 67: -2}[pointer])

    class Gpus(HostBackend):
        name = "cuda"

        def array_namespace(self) -> Any:
            return SimpleNamespace(cuda=SimpleNamespace(UnownedMemory=memory))

    def numba(pointer: int) -> Any:
        # What is done on the stream is none of device_of's business.
        return SimpleNamespace(__cuda_array_interface__={"data": (pointer, False), "stream": 5})

    with use_backend(Gpus(2)):
        for pointer, expected in ((64, 1), (0, 0), (67, 0)):  # 67: no memory that CUDA knows
            with device_of(numba(pointer)):
                assert current_device() == expected
        with raises(ArgumentError, "device 7 is not there"):
            device_of(numba(65))
        with raises(DeviceError, "cudaErrorInvalidValue"):
            device_of(numba(66))


@check
def errors_of_the_runtime_are_ours() -> None:
    from cupy.cuda import runtime

    from ncclcomm.devices.cuda_streams import on_device
    from ncclcomm.errors import DeviceError
    from ncclcomm.transport.nccl_errors import translated

    def refused() -> None:
        raise runtime.CUDARuntimeError(2)

    with raises(DeviceError, "on_device: cudaError"), on_device(0):
        pass
    with raises(DeviceError, "refused: cudaErrorMemoryAllocation"):
        translated(refused)()


class _Event:
    """In the place of CuPy's events: its work ends when it is told so."""

    def __init__(self, **_: Any) -> None:
        self.ptr = self
        self.has_ended = False
        self.error: Exception | None = None


class _Thing:
    """What is held."""


def _gone(thing: _Thing) -> threading.Event:
    """An event for the end of a thing, which the caller drops."""
    gone = threading.Event()
    weakref.finalize(thing, gone.set)
    return gone


@contextmanager
def _holding() -> Iterator[tuple[Any, list[_Event], set[str], set[int]]]:
    """The module that holds, the events it records, threads that ask them, streams being captured."""
    from ncclcomm.devices import cuda_held, cuda_streams

    events: list[_Event] = []
    asking: set[str] = set()
    captured: set[int] = set()

    def is_complete(event: _Event, device: int) -> bool:
        asking.add(threading.current_thread().name)
        if event.error is not None:
            raise event.error
        return event.has_ended

    fakes = {
        "cupy": SimpleNamespace(cuda=SimpleNamespace(Event=_Event)),
        "cuda_driver": SimpleNamespace(is_complete=is_complete),
        "_held": {},
        "_spare": {},
        "_for_good": [],
    }
    with ExitStack() as stack:
        calls = {
            "eventRecord": lambda event, handle: events.append(event),
            "streamIsCapturing": lambda handle: handle in captured,
        }
        stack.enter_context(_runtime(cuda_held, cuda_streams, **calls))
        for name, fake in fakes.items():
            stack.enter_context(patch.object(cuda_held, name, fake))
        yield cuda_held, events, asking, captured


def _stream(device: int, handle: int) -> Any:
    """A stream of ours."""
    from ncclcomm.devices.cuda_streams import CudaStream

    return CudaStream(device, SimpleNamespace(ptr=handle))


@check
def a_slow_stream_keeps_only_what_it_uses() -> None:
    with _holding() as (held, events, asking, _):
        slow, quick = _Thing(), _Thing()
        slow_gone, quick_gone = _gone(slow), _gone(quick)
        held.hold(_stream(1, 10), slow)
        held.hold(_stream(1, 11), quick)
        del slow, quick
        events[1].has_ended = True
        assert quick_gone.wait(WITHIN_S)
        assert not slow_gone.is_set()
        events[0].has_ended = True
        assert slow_gone.wait(WITHIN_S)
        assert asking == {"ncclcomm-keeper"}


@check
def the_keeper_wakes_again_after_it_slept() -> None:
    with _holding() as (held, events, _, _):
        for _ in range(2):
            thing = _Thing()
            gone = _gone(thing)
            held.hold(_stream(0, 10), thing)
            del thing
            events[-1].has_ended = True
            assert gone.wait(WITHIN_S)
            deadline = time.monotonic() + WITHIN_S
            while held._keeper.looks:
                assert time.monotonic() < deadline, "it never sleeps"
                time.sleep(0.01)
        assert len(set(events)) == 1, "the event was not used again"


@check
def an_allocation_waits_for_what_is_held() -> None:
    with _holding() as (held, events, _, _):
        assert not held.settle()
        thing = _Thing()
        gone = _gone(thing)
        held.hold(_stream(0, 10), thing)
        del thing
        threading.Timer(0.05, lambda: setattr(events[0], "has_ended", True)).start()
        assert held.settle()
        assert gone.wait(WITHIN_S)


@check
def an_error_ends_no_keeper() -> None:
    from cupy.cuda import runtime

    with _holding() as (held, events, _, _):
        unknown, later = _Thing(), _Thing()
        unknown_gone, later_gone = _gone(unknown), _gone(later)
        held.hold(_stream(0, 10), unknown)
        events[0].error = runtime.CUDARuntimeError(700)
        deadline = time.monotonic() + WITHIN_S
        while not held._for_good:
            assert time.monotonic() < deadline, "the error was not seen"
            time.sleep(0.001)
        held.hold(_stream(0, 10), later)
        del unknown, later
        events[1].has_ended = True
        assert later_gone.wait(WITHIN_S)
        assert not unknown_gone.is_set()


@check
def an_event_that_comes_before_an_earlier_one_frees_nothing_else() -> None:
    # As after two threads have recorded on one stream, or a handle has gone to another stream.
    with _holding() as (held, events, _, _), patch.object(held._keeper, "looks", True):  # it sleeps
        things = [_Thing() for _ in range(3)]
        gone = [_gone(thing) for thing in things]
        for thing in things:
            held.hold(_stream(0, 10), thing)
        things.clear()
        del thing
        events[0].has_ended = events[2].has_ended = True
        assert held.drop_ended()
        assert [one.is_set() for one in gone] == [True, False, False]
        events[1].has_ended = True
        assert not held.drop_ended()
        assert all(one.is_set() for one in gone)


@check
def a_keeper_that_could_not_start_is_started_by_the_next_call() -> None:
    with _holding() as (held, events, _, _), patch.object(held, "_keeper", held._Keeper()):
        no_thread = patch.object(held.threading.Thread, "start", side_effect=RuntimeError("no thread"))
        with no_thread, raises(RuntimeError, "no thread"):
            held.hold(_stream(0, 10), _Thing())
        thing = _Thing()
        gone = _gone(thing)
        held.hold(_stream(0, 10), thing)
        del thing
        for event in events:
            event.has_ended = True
        assert gone.wait(WITHIN_S)


@check
def what_a_captured_stream_uses_stays() -> None:
    with _holding() as (held, events, _, captured):
        captured.add(10)
        thing = _Thing()
        gone = _gone(thing)
        held.hold(_stream(0, 10), thing)
        del thing
        gc.collect()
        assert not gone.is_set()
        assert events == [], "an event in a capture marks the graph's work"


@check
def no_callable_is_launched_in_a_capture() -> None:
    from ncclcomm.devices import cuda_launch
    from ncclcomm.errors import UnsupportedError

    with patch.object(cuda_launch, "is_capturing", lambda handle: True), raises(UnsupportedError, "graph"):
        cuda_launch.launch(_stream(0, 10), print)


@check
def host_memory_is_refused_in_a_capture() -> None:
    from ncclcomm.devices import cuda, cuda_streams
    from ncclcomm.errors import UnsupportedError

    backend = object.__new__(cuda.CudaBackend)
    backend._streams = cuda_streams
    backend._cupy = SimpleNamespace(
        cuda=SimpleNamespace(get_current_stream=lambda device: SimpleNamespace(ptr=10 + device))
    )
    with _runtime(cuda_streams, streamIsCapturing=lambda handle: handle == 11):
        backend.refuse_capture(0, "this")
        with raises(UnsupportedError, "graph"):
            backend.refuse_capture(1, "this")


@check
def the_worker_of_a_stream_waits_on_its_device() -> None:
    from ncclcomm.devices import cuda_launch

    ran = threading.Event()
    watched: list[int] = []
    word = SimpleNamespace(set=ran.set)
    reached = SimpleNamespace(synchronize=lambda: None)
    with patch.object(cuda_launch, "cuda_driver", SimpleNamespace(watch=watched.append)):
        worker = cuda_launch._Worker((2, 10))
        worker.jobs.put(cuda_launch._Job(reached, word, lambda: None, ()))
        assert ran.wait(WITHIN_S)
    assert watched == [2]


@check
def too_many_peers_are_no_error() -> None:
    from cupy.cuda import runtime

    from ncclcomm.devices import cuda_memory

    def refuse(status: int) -> Callable[[int], None]:
        def enable(peer: int) -> None:
            raise runtime.CUDARuntimeError(status)

        return enable

    with patch.object(cuda_memory, "on_device", nullcontext):
        for status in (704, 711):
            cuda_memory.enable_peer.cache_clear()
            with _runtime(cuda_memory, deviceCanAccessPeer=lambda *_: 1, deviceEnablePeerAccess=refuse(status)):
                assert cuda_memory.enable_peer(0, 1) is (status == 704)
        cuda_memory.enable_peer.cache_clear()
        with (
            _runtime(cuda_memory, deviceCanAccessPeer=lambda *_: 1, deviceEnablePeerAccess=refuse(101)),
            raises(runtime.CUDARuntimeError, "cudaErrorInvalidDevice"),
        ):
            cuda_memory.enable_peer(0, 1)


class _Array:
    """As much of a CuPy array as a copy between devices looks at."""

    def __init__(self, device: int, contiguous: bool = True) -> None:
        self.device = SimpleNamespace(id=device)
        self.flags = SimpleNamespace(c_contiguous=contiguous)
        self.data = SimpleNamespace(ptr=0)
        self.nbytes = 8


@check
def a_strided_source_is_held_beside_its_copy() -> None:
    from ncclcomm.devices import cuda_memory

    held: list[Any] = []
    source, staged = _Array(1, contiguous=False), _Array(1)
    current = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda device: SimpleNamespace(ptr=9)))
    fakes = {
        "enable_peer": lambda *_: None,
        "_empty_like": lambda array: staged,
        "_within": lambda *_: None,
        "order": lambda *_: None,
        "on_device": nullcontext,
        "hold": lambda stream, *objects: held.extend(objects),
        "cupy": current,
    }
    with ExitStack() as stack:
        stack.enter_context(_runtime(cuda_memory, memcpyPeerAsync=lambda *_: None))
        for name, fake in fakes.items():
            stack.enter_context(patch.object(cuda_memory, name, fake))
        cuda_memory._across(_Array(0), source, _stream(0, 10))
    assert source in held
    assert staged in held


@check
def nccl_holds_what_every_reduction_uses_on_every_stream() -> None:
    import numpy as np

    from ncclcomm.transport import nccl

    held: list[Any] = []
    done: list[str] = []
    transport = object.__new__(nccl.NcclTransport)
    transport.device = 0
    transport._reduce_gathered = lambda *_: done.append("gathered")  # type: ignore[method-assign]
    array, out = np.ones(3), np.empty(3)
    default = SimpleNamespace(ptr=0)
    current = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda device: default))
    with (
        patch.object(nccl, "hold", lambda stream, *objects: held.append((stream.handle, done[-1], *objects))),
        patch.object(nccl, "cupy", current),
    ):
        transport.all_reduce([array], [out], "max")
        transport.reduce([array], [None], "min", 0)
    assert [entry[:2] for entry in held] == [(0, "gathered"), (0, "gathered")]
    assert held[0][2] is array
    assert held[0][3] is out


@check
def nccl_captures_only_reductions_without_memory_of_their_own() -> None:
    import numpy as np

    from ncclcomm.errors import UnsupportedError
    from ncclcomm.transport import nccl

    transport = object.__new__(nccl.NcclTransport)
    transport._stream = lambda: 10  # type: ignore[method-assign]
    captured = [True]
    with patch.object(nccl, "is_capturing", lambda handle: captured[0]):
        for op, dtype in (("sum", "f4"), ("min", "i8"), ("sum", "c8"), ("sum", "?")):
            transport._refuse_capture(op, np.dtype(dtype))
        for op, dtype in (("max", "f4"), ("sum", "i2"), ("prod", "c8")):
            for reduce in (
                lambda array, op: transport.all_reduce([array], [array], op),
                lambda array, op: transport.reduce([array], [None], op, 0),
            ):
                with raises(UnsupportedError, f"{op} of {np.dtype(dtype)}", "graph"):
                    reduce(np.ones(3, dtype), op)
        captured[0] = False
        transport._refuse_capture("max", np.dtype("f4"))


@check
def a_gpus_uuid_is_whole() -> None:
    from ncclcomm.devices import cuda_driver

    raw = bytes.fromhex("00112233445566778899aabbccddee00")

    def give(found: Any, handle: Any) -> int:
        assert handle.value == 7
        found[:] = raw
        return 0

    def get(handle: Any, device: int) -> int:
        handle._obj.value = device + 5
        return 0

    fake = SimpleNamespace(cuInit=lambda _: 0, cuDeviceGet=get, cuDeviceGetUuid_v2=give)
    with patch.object(cuda_driver, "_driver", lambda: fake):
        assert cuda_driver.device_uuid(2) == "00112233-4455-6677-8899-aabbccddee00"


@check
def asking_whether_a_stream_is_idle_breaks_no_capture() -> None:
    from ncclcomm.devices import cuda_driver

    modes = [0]
    asked: list[tuple[int, int]] = []

    def exchange(pointer: Any) -> int:
        modes[0], pointer._obj.value = pointer._obj.value, modes[0]
        return 0

    def query(handle: int) -> int:
        asked.append((handle, modes[0]))
        return {20: 0, 21: 600, 22: 700}[handle]

    fake = SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange, cuStreamQuery=query)
    with (
        patch.object(cuda_driver, "_driver", lambda: fake),
        _runtime(cuda_driver, streamIsCapturing=lambda handle: handle == 23),
    ):
        assert [cuda_driver.is_idle(handle) for handle in (20, 21, 22, 23)] == [True, False, False, False]
    assert asked == [(20, 2), (21, 2), (22, 2)]
    assert modes == [0]


@contextmanager
def _without_library(*names: str) -> Iterator[None]:
    """No such library is found."""
    from cuda import pathfinder

    load = pathfinder.load_nvidia_dynamic_lib

    def find(name: str) -> Any:
        if name in names:
            raise pathfinder.DynamicLibNotFoundError(f"no {name} here")
        return load(name)

    with patch.object(pathfinder, "load_nvidia_dynamic_lib", find):
        yield


@check
def missing_cublas_is_told() -> None:
    from ncclcomm.devices.cuda import CudaBackend
    from ncclcomm.errors import BackendUnavailableError

    assert "cupy_backends.cuda.libs.cublas" not in sys.modules
    with _without_library("cublas", "cublasLt"), raises(BackendUnavailableError, "pip install nvidia-cublas"):
        object.__new__(CudaBackend).blas_handle()


@check
def cupyx_is_timed_over_mpi_or_not_at_all() -> None:
    from ncclcomm.bench.peers.base import Absent
    from ncclcomm.bench.peers.nccl_packages import Cupyx

    destroyed: list[int] = []
    made = SimpleNamespace(_comm=SimpleNamespace(destroy=lambda: destroyed.append(1)))
    distributed = SimpleNamespace(init_process_group=lambda *_, **__: made)
    group: Any = SimpleNamespace(on_gpus=True, comm=object(), mpi_comm=None, ranks=1, rank=0, wait=lambda: None)
    with patch("importlib.import_module", lambda name: distributed):
        with raises(Absent, "MPI"):
            Cupyx(group)
        group.mpi_comm = object()
        before = sys.getrefcount(made._comm)
        peer = Cupyx(group)
        assert sys.getrefcount(made._comm) == before + 1, "its destructor may not destroy it"
        peer.close()
    assert destroyed == [1]


def main() -> None:
    """Run all checks."""
    told = {}
    for name, run in CHECKS.items():
        try:
            run()
            told[name] = ""
        except Exception:
            told[name] = traceback.format_exc()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
