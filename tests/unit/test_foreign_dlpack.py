"""Arrays that come by DLPack or `__cuda_array_interface__`, and results in arrays of their library."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ncclcomm
from contract.array_samples import LAYOUTS, assert_same_bits, sample
from contract.foreign_arrays import Array, Exporter
from ncclcomm.arrays import HOST_MEMORY, View, check_one_library, check_out, empty_on, followed, kind_named, view
from ncclcomm.devices import use_backend
from ncclcomm.devices.base import DeviceBackend, StreamImpl
from ncclcomm.devices.foreign import Following, Foreign, follow, joined
from ncclcomm.devices.host import HostBackend
from ncclcomm.devices.host_array import HostArray, as_host_array
from ncclcomm.errors import ArgumentError, UnsupportedError

DLPACK_DTYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]


class OldExporter(Exporter):
    """As before DLPack could say what may be written to."""

    def __dlpack__(self, stream: Any = None) -> Any:  # type: ignore[override]
        return self.array.__dlpack__(stream=stream)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The library of Array; like others it copies what it takes."""
    made = ModuleType("arrays_of_a_test")
    made.from_dlpack = lambda data: Array(np.array(np.from_dlpack(data)))  # type: ignore[attr-defined]
    made.asarray = lambda data: Array(np.array(data))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


@pytest.fixture
def backend() -> Iterator[DeviceBackend]:
    """Two virtual devices."""
    with use_backend(HostBackend(2)) as chosen:
        yield chosen


@pytest.mark.parametrize("kind", [Exporter, OldExporter])
@pytest.mark.parametrize("dtype", DLPACK_DTYPES)
def test_memory_is_shared(kind: type[Exporter], dtype: str) -> None:
    exporter = kind(sample(dtype, (3, 4), 1))
    found = view(exporter, "call: x")
    assert found.obj is exporter
    assert (type(found.data), found.device, found.kind) == (np.ndarray, HOST_MEMORY, None)
    assert np.shares_memory(found.data, exporter.array)
    assert_same_bits(found.data, exporter.array)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout: str) -> None:
    shape, look = LAYOUTS[layout]
    array = look(sample("i4", shape, 2))
    assert_same_bits(view(Exporter(array), "call: x").data, array)


def test_what_may_be_written_to() -> None:
    array = np.zeros(3)
    constant = array.copy()
    constant.flags.writeable = False
    refused: list[Exporter] = [OldExporter(array)]
    if np.lib.NumpyVersion(np.__version__) >= "2.1.0":  # the first that hears of it
        check_out(view(Exporter(array), "out"), (3,), array.dtype, "call: out")
        refused.append(Exporter(constant))
    for given in refused:
        with pytest.raises(ArgumentError, match="^call: out is read-only"):
            check_out(view(given, "out"), (3,), array.dtype, "call: out")


def test_dtypes_that_dlpack_lacks() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")

    class Bfloats(Exporter):
        """Exports what NumPy's DLPack doesn't take."""

        def __dlpack__(self, **kwargs: Any) -> Any:
            raise BufferError("bfloat16")

        def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
            return self.array

    given = Bfloats(np.arange(3).astype(ml_dtypes.bfloat16))
    given.__dlpack_device__ = lambda: (1, 0)  # type: ignore[method-assign]
    found = view(given, "call: x")
    assert_same_bits(found.data, given.array)
    with pytest.raises(ArgumentError, match="read-only"):
        check_out(found, (3,), found.data.dtype, "call: out")
    assert given.array.flags.writeable


class Failing:
    """Exports nothing in the end."""

    def __init__(self, error: Exception, place: int = 1) -> None:
        self.error, self.place = error, place

    def __dlpack__(self, **kwargs: Any) -> Any:
        raise self.error

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.place, 0


@pytest.mark.parametrize("error", [BufferError("no\nway"), TypeError("no"), ValueError("no"), RuntimeError()], ids=repr)
def test_an_export_that_fails(error: Exception) -> None:
    with pytest.raises(
        UnsupportedError, match=r"^call: x: .*Failing can't be taken by DLPack \((no|RuntimeError)\)"
    ) as e:
        view(Failing(error), "call: x")
    assert e.value.__cause__ is error


@pytest.mark.parametrize("place", [4, 7, 8, 10, 14])
def test_other_kinds_of_devices(place: int) -> None:
    with pytest.raises(
        UnsupportedError, match=f"^call: x: .*Failing is on a device that DLPack gives the number {place}"
    ):
        view(Failing(BufferError(), place), "call: x")


class GpuMemory:
    """Says that it is in a GPU's memory."""

    def __init__(self, constant: bool = False) -> None:
        self.__cuda_array_interface__ = {"shape": (3,), "typestr": "<f4", "data": (4096, constant), "version": 3}


@pytest.mark.parametrize(
    "given",
    [Failing(BufferError(), 2), Failing(BufferError(), 13), GpuMemory()],
    ids=["DLPack", "managed memory", "interface"],
)
def test_memory_of_a_gpu_where_none_is_in_use(backend: DeviceBackend, given: Any) -> None:
    with pytest.raises(ArgumentError, match="^call: x: .* is in a GPU's memory, and the host backend is in use"):
        view(given, "call: x")


def test_results_of_the_same_library(library: ModuleType, backend: DeviceBackend) -> None:
    kind = view(Array(np.zeros(3, "f4")), "call: x").kind
    assert kind is not None
    assert (kind.name, kind.namespace) == (library.__name__, library)
    assert kind is view(Array(np.zeros(1)), "call: x").kind
    made = empty_on(backend, (2, 2), np.dtype("f4"), HOST_MEMORY, kind)
    assert (type(made.data), made.data.shape, made.device, made.kind) == (np.ndarray, (2, 2), HOST_MEMORY, kind)
    made.data[...] = 7  # before the library makes its array of it, which copies
    assert type(made.obj) is Array
    assert made.obj is made.obj
    assert made.obj.array.tolist() == [[7, 7], [7, 7]]


def test_results_of_a_dtype_that_dlpack_lacks(library: ModuleType, backend: DeviceBackend) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kind = view(Array(np.zeros(3, "f4")), "call: x").kind
    made = empty_on(backend, (2,), np.dtype(ml_dtypes.bfloat16), HOST_MEMORY, kind)
    made.data[...] = 3
    assert made.obj.array.dtype == ml_dtypes.bfloat16
    assert made.obj.array.astype(float).tolist() == [3, 3]


def test_results_on_devices_are_our_own(library: ModuleType, backend: DeviceBackend) -> None:
    kind = view(Array(np.zeros(3)), "call: x").kind
    made = empty_on(backend, (2,), np.dtype("f4"), 1, kind)
    assert (type(made.obj), made.device, made.kind) == (HostArray, 1, None)


def test_a_library_that_takes_no_dlpack(library: ModuleType, backend: DeviceBackend) -> None:
    del library.from_dlpack
    assert view(Array(np.zeros(3)), "call: x").kind is None


def test_of_another_rank(library: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = kind_named(library.__name__, HOST_MEMORY)
    assert kind is not None
    assert kind.namespace is library
    assert kind_named("json", HOST_MEMORY) is None  # a module, and no array library
    monkeypatch.delitem(sys.modules, library.__name__)
    assert kind_named(library.__name__, HOST_MEMORY) is None


def test_to_our_own_arrays(library: ModuleType, backend: DeviceBackend) -> None:
    given = Array(sample("f4", (3, 2), 4))
    there = ncclcomm.asarray(given, device=1)
    assert type(there) is HostArray
    assert_same_bits(ncclcomm.to_numpy(there), given.array)
    here = ncclcomm.asarray(given, device="cpu")
    assert type(here) is np.ndarray
    assert np.shares_memory(here, given.array)
    assert_same_bits(ncclcomm.to_numpy(given), given.array)
    assert ncclcomm.device_index(given) == -1
    assert ncclcomm.array_module(given) is library
    assert ncclcomm.array_module(Exporter(given.array)) is np


class FakeGpus(HostBackend):
    """Virtual devices that pass for GPUs."""

    name = "cuda"

    def __init__(self) -> None:
        super().__init__(3, immediate=False)
        self.made: list[tuple[str, Any]] = []

    def array_namespace(self) -> Any:
        """In CuPy's place; its arrays are on device 2."""

        def make(how: str) -> Any:
            def call(obj: Any) -> Any:
                self.made.append((how, obj))
                return SimpleNamespace(
                    dtype=np.dtype("f4"),
                    shape=(3,),
                    device=SimpleNamespace(id=2),
                    flags=SimpleNamespace(c_contiguous=True),
                )

            return call

        return SimpleNamespace(from_dlpack=make("from_dlpack"), asarray=make("asarray"))


@pytest.fixture
def gpus() -> Iterator[FakeGpus]:
    """Devices that pass for GPUs."""
    backend = FakeGpus()
    with use_backend(backend):
        yield backend


@pytest.mark.parametrize(
    ("given", "how", "can_be_filled"),
    [
        (Failing(BufferError(), 2), "from_dlpack", False),
        (GpuMemory(constant=False), "asarray", True),
        (GpuMemory(constant=True), "asarray", False),
    ],
    ids=["DLPack", "interface", "constant"],
)
def test_memory_of_a_gpu(gpus: FakeGpus, given: Any, how: str, can_be_filled: bool) -> None:
    found = view(given, "call: x")
    assert gpus.made == [(how, given)]
    assert (found.obj, found.device) == (given, 2)
    assert found.kind is not None
    if can_be_filled:
        check_out(found, (3,), np.dtype("f4"), "call: out")
    else:
        with pytest.raises(
            ArgumentError, match="^call: out: .*doesn't say whether its memory on the GPU may be written"
        ):
            check_out(found, (3,), np.dtype("f4"), "call: out")


class Streamed(Foreign):
    """A library with current streams of its own."""

    name, namespace, own_streams = "streamed", None, True

    def __init__(self, streams: dict[int, StreamImpl]) -> None:
        self.streams = streams

    def before_fill(self, obj: Any, what: str) -> None:
        """Nothing to tell."""

    def current_stream(self, backend: DeviceBackend, device: int) -> StreamImpl | None:
        """The one it was given."""
        return self.streams.get(device)


def fail_if(fails: bool) -> None:
    """Raise, or not."""
    if fails:
        raise ZeroDivisionError


def follow_and_fail(gpus: FakeGpus, kind: Foreign) -> None:
    """Go over to a library's stream of device 1, and raise."""
    before = current(gpus)
    follow(kind, 1)
    assert current(gpus) != before
    raise ZeroDivisionError


def current(backend: DeviceBackend) -> list[int]:
    """Handles of the current streams."""
    return [backend.current_stream(device).handle for device in range(backend.device_count())]


def test_streams_are_followed_and_restored(gpus: FakeGpus) -> None:
    theirs = {device: gpus.create_stream(device, 0) for device in (0, 2)}
    kind = Streamed(theirs)
    before = current(gpus)
    with Following(gpus):
        assert current(gpus) == before
        follow(kind, 2)
        follow(kind, 2)
        follow(kind, HOST_MEMORY)
        assert current(gpus) == [before[0], before[1], theirs[2].handle]
        with Following(gpus) as inner:
            inner.add(kind, 0)
            assert current(gpus) == [theirs[0].handle, before[1], theirs[2].handle]
        assert current(gpus) == [before[0], before[1], theirs[2].handle]
    assert current(gpus) == before
    follow(kind, 2)  # in no block
    assert current(gpus) == before


def test_streams_are_restored_after_an_exception(gpus: FakeGpus) -> None:
    kind = Streamed({1: gpus.create_stream(1, 0)})
    before = current(gpus)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), Following(gpus):
            follow_and_fail(gpus, kind)
        assert current(gpus) == before


def test_a_block_around_is_entered_and_left(gpus: FakeGpus) -> None:
    seen: list[Any] = []

    @contextmanager
    def around() -> Iterator[None]:
        seen.append(current(gpus))
        try:
            yield
        finally:
            seen.append(current(gpus))

    before = current(gpus)
    with pytest.raises(ZeroDivisionError), Following(gpus, around()):
        follow_and_fail(gpus, Streamed({1: gpus.create_stream(1, 0)}))
    assert seen == [before, before]


def test_a_transport_is_called_on_the_streams_of_its_views(gpus: FakeGpus) -> None:
    theirs = {device: gpus.create_stream(device, 0) for device in range(3)}
    before = current(gpus)
    seen: list[tuple[Any, list[int]]] = []
    transport = SimpleNamespace(copy_all=lambda *args: seen.append((args, current(gpus))))
    kind = Streamed(theirs)
    one, two, host = (View(None, None, device) for device in (1, 2, HOST_MEMORY))
    pairs = [(one, host), (host, two)]
    followed(gpus, kind, transport).copy_all(pairs, ())
    assert seen == [((pairs, ()), [before[0], theirs[1].handle, theirs[2].handle])]
    assert current(gpus) == before
    assert followed(gpus, kind, transport).backend is gpus
    assert followed(gpus, None, transport) is transport
    assert followed(HostBackend(2), kind, transport) is transport


def test_memory_without_streams_is_held_to_the_end(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Any] = []
    monkeypatch.setattr(gpus, "keep", lambda device, data: held.append((device, data)))
    with Following(gpus):
        found = view(GpuMemory(), "call: x")
        assert held == []
    assert held == [(2, found.data)]


def test_a_block_that_fails_restores_the_streams(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = gpus.create_stream(1, 0), gpus.create_stream(1, 0)
    gpus.set_current_stream(ours)

    def fail(device: int, data: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(gpus, "keep", fail)
    block = Following(gpus)
    block.__enter__()
    block.add(Streamed({1: theirs}), 1)
    block.add(Streamed({}), 1, object())
    assert gpus.current_stream(1).handle == theirs.handle
    with pytest.raises(ZeroDivisionError):
        block.__exit__(None, None, None)
    assert gpus.current_stream(1).handle == ours.handle
    block = Following(gpus)
    block.__enter__()
    block.add(Streamed({1: theirs}), 1)
    block.end()  # as where a signal's exception came before the block's own end
    assert gpus.current_stream(1).handle == ours.handle
    block.end()


@pytest.mark.parametrize("fails", [False, True])
def test_both_streams_are_joined(gpus: FakeGpus, fails: bool) -> None:
    ours, theirs = gpus.create_stream(1, 0), gpus.create_stream(1, 0)
    gpus.set_current_stream(ours)
    done: list[str] = []
    theirs.launch(done.append, "before")
    with pytest.raises(ZeroDivisionError) if fails else nullcontext(), joined(gpus, Streamed({1: theirs}), 1):
        ours.launch(done.append, "within")
        fail_if(fails)
    theirs.launch(done.append, "after")
    theirs.synchronize()
    assert done == ["before", "within", "after"]


def test_libraries_with_streams_of_their_own_are_not_mixed() -> None:
    kind, ours = Streamed({}), as_host_array(np.zeros(3), 1)
    theirs = View(None, np.zeros(3), 1, kind)
    host = View(None, np.zeros(3), HOST_MEMORY, kind)
    check_one_library([view(ours, "x"), host, view(np.zeros(3), "x")], "call")
    check_one_library([theirs, theirs, host], "call")
    with pytest.raises(ArgumentError, match="^call: .*can't be mixed on GPUs"):
        check_one_library([theirs, view(ours, "x")], "call")
    with pytest.raises(ArgumentError, match="^call: out: .*can't be mixed on GPUs"):
        check_out(view(ours, "out"), (3,), ours.dtype, "call: out", [theirs])


def test_no_library_is_imported() -> None:
    program = """
import sys
import numpy as np, ncclcomm
class Exporter:
    def __init__(self, array): self.array = array
    def __dlpack__(self, **kwargs): return self.array.__dlpack__(**kwargs)
    def __dlpack_device__(self): return self.array.__dlpack_device__()
print(ncclcomm.to_numpy(Exporter(np.arange(3.0))).tolist())
sys.exit(any(name.partition(".")[0] in ("torch", "jax", "cupy", "ml_dtypes") for name in sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False, env=None
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[0.0, 1.0, 2.0]", "")
