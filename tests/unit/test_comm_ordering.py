"""How in-process calls are ordered with the streams of every device they touch.

In each scenario one stream is held by a closed gate. Later work notes whether the gate was open when it ran: it must
run after what it depends on, and so with the gate open. Each is shown to go wrong when event waits do nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import ncclcomm
from ncclcomm import Stream, comm, current_stream, stream, synchronize
from ncclcomm.devices import use_backend
from ncclcomm.devices.host import HostBackend, HostEvent
from ncclcomm.transport import peer

PATIENCE_S = 0.03
"""How long a right run gives work that must not run yet; a wrong run is found out as soon as it does."""

DEADLINE_S = 30.0
DEVICES = 3

Calls = dict[str, tuple[tuple[int, ...], tuple[int, ...], Callable[[list[Any]], Any]]]


def _single(result: Any) -> list[Any]:
    """One result as a list."""
    return [result]


CALLS: Calls = {
    "broadcast": ((1,), (0, 1, 2), lambda x: comm.broadcast(x[0], [0, 1, 2])),
    "broadcast out": ((1,), (2, 0), lambda x: comm.broadcast(x[0], out=[_blank(2), _blank(0)])),
    "scatter": ((1,), (2, 1, 0), lambda x: comm.scatter(x[0], [2, 1, 0])),
    "scatter streams": ((1,), (2, 0), lambda x: comm.scatter(x[0], [2, 0], streams=[Stream(2), Stream(0)])),
    "scatter out": ((0,), (1, 2), lambda x: comm.scatter(x[0], out=[_blank(1, 2), _blank(2, 4)])),
    "gather": ((0, 1, 2), (1,), lambda x: _single(comm.gather(x, destination=1))),
    "gather elsewhere": ((0, 2), (1,), lambda x: _single(comm.gather(x, destination=1))),
    "gather out": ((0, 2), (1,), lambda x: _single(comm.gather(x, out=_blank(1, 12)))),
    "reduce_add": ((0, 1, 2), (2,), lambda x: _single(comm.reduce_add(x, destination=2))),
    "reduce_add elsewhere": ((0, 1), (2,), lambda x: _single(comm.reduce_add(x, destination=2))),
    "broadcast_coalesced": ((1, 0), (2, 2), lambda x: comm.broadcast_coalesced(x, [2])[0]),
    "reduce_add_coalesced": ((0, 1), (2,), lambda x: comm.reduce_add_coalesced([[each] for each in x], 2)),
    "all_reduce": ((0, 1, 2), (0, 1, 2), lambda x: comm.all_reduce(x)),
    "all_reduce sliced": ((2, 0, 1), (2, 0, 1), lambda x: _sliced(x)),
    "all_reduce out": ((1, 0), (1, 0), lambda x: comm.all_reduce(x, out=[_blank(1), _blank(0)])),
    "all_reduce avg": ((0, 1, 2), (0, 1, 2), lambda x: comm.all_reduce(x, "avg")),
    "all_gather": ((0, 2, 1), (0, 2, 1), lambda x: comm.all_gather(x)),
    "all_gather out": ((2, 0), (2, 0), lambda x: comm.all_gather(x, out=[_blank(2, 12), _blank(0, 12)])),
    "reduce_scatter": ((0, 1, 2), (0, 1, 2), lambda x: comm.reduce_scatter(x)),
    "reduce_scatter out": ((2, 1), (2, 1), lambda x: comm.reduce_scatter(x, out=[_blank(2, 3), _blank(1, 3)])),
    "asarray": ((2,), (0,), lambda x: _single(ncclcomm.asarray(x[0], device=0))),
}
"""For each call: the devices of its inputs, those of its results, and the call on arrays of 6 elements."""


def _blank(device: int, n: int = 6) -> Any:
    """An array to fill."""
    return ncclcomm.asarray(np.full(n, -7.0), device=device)


def _sliced(inputs: list[Any]) -> Any:
    """An all_reduce that its devices share out, as of large arrays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer, "SLICED_BYTES", 0)
        return comm.all_reduce(inputs)


def _expected(name: str, values: list[np.ndarray[Any, Any]]) -> list[list[float]]:
    """What NumPy makes of the inputs, one list a result."""
    count = len(CALLS[name][1])
    total = np.sum(values, axis=0)
    if name.startswith("all_reduce"):
        return [(total / len(values) if name.endswith("avg") else total).tolist()] * count
    if name.startswith("all_gather"):
        return [np.concatenate(values).tolist()] * count
    if name.startswith("reduce_scatter"):
        return [part.tolist() for part in np.array_split(total, count)]
    if name == "broadcast_coalesced":
        return [value.tolist() for value in values]
    if name.startswith("scatter"):
        cuts = [2] if name.endswith("out") else [6 // count * i for i in range(1, count)]
        return [part.tolist() for part in np.split(values[0], cuts)]
    if name.startswith("gather"):
        return [np.concatenate(values).tolist()]
    if name.startswith("reduce_add"):
        return [total.tolist()]
    return [values[0].tolist()] * count


class Scene:
    """Inputs on their devices, a gate, and what later work saw."""

    def __init__(self, name: str) -> None:
        self.sources, self.targets, self.call = CALLS[name]
        self.values = [np.arange(6.0) + 10 * (i + 1) for i in range(len(self.sources))]
        self.expected = _expected(name, self.values)
        self.inputs = [ncclcomm.asarray(np.zeros(6), device=device) for device in self.sources]
        for device in range(DEVICES):
            synchronize(device)
        self.gate = threading.Event()
        self.read: dict[int, list[float]] = {}
        self.gate_open: dict[str, bool] = {}
        self.ran = {f"{what} {device}": threading.Event() for what in ("read", "write") for device in range(DEVICES)}

    def hold(self, device: int) -> None:
        """Close the gate before all later work of the device's current stream."""
        current_stream(device).launch(self.gate.wait, DEADLINE_S)

    def fill_inputs(self) -> None:
        """Queue the inputs' values on their devices."""
        for array, value in zip(self.inputs, self.values, strict=True):
            current_stream(array.device).launch(np.copyto, array.view(np.ndarray), value)

    def read_later(self, place: int, result: Any) -> None:
        """Queue a look at a result on its device."""

        def look() -> None:
            self.gate_open[f"read {result.device.id}"] = self.gate.is_set()
            self.read[place] = result.view(np.ndarray).tolist()
            self.ran[f"read {result.device.id}"].set()

        current_stream(result.device).launch(look)

    def overwrite_later(self, array: Any) -> None:
        """Queue new values of an input on its device."""

        def overwrite() -> None:
            self.gate_open[f"write {array.device.id}"] = self.gate.is_set()
            array.view(np.ndarray).fill(-99.0)
            self.ran[f"write {array.device.id}"].set()

        current_stream(array.device).launch(overwrite)

    def finish(self, watched: str, patience_s: float) -> None:
        """Give the watched work its chance to run too early, then let everything run."""
        self.ran[watched].wait(patience_s)
        self.gate.set()
        for device in range(DEVICES):
            synchronize(device)


@pytest.fixture(autouse=True)
def _later() -> Iterator[None]:
    """Devices whose streams run their work later than the call."""
    with use_backend(HostBackend(DEVICES, immediate=False)):
        yield


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits for events do nothing."""
    monkeypatch.setattr(HostEvent, "wait", lambda self, stream: None)


FIRST_THEN_REST = ("all_reduce", "all_reduce out", "all_reduce avg")
"""Calls that read their inputs on the first device alone, whatever the others do."""


def _pairs(apart: bool, held_by_destination: bool = False) -> list[Any]:
    """Every call with each of its inputs, and each device that gets a result.

    Args:
        apart: leave out results on the input's own device, which its stream orders.
        held_by_destination: leave out the calls whose reading a busy destination holds by waits alone: those that copy
            on given streams, and those that read on another device.
    """
    return [
        pytest.param(name, source, target, id=f"{name}: {CALLS[name][0][source]} to {CALLS[name][1][target]}")
        for name in CALLS
        for source in range(len(CALLS[name][0]))
        for target in range(len(CALLS[name][1]))
        if not (apart and CALLS[name][0][source] == CALLS[name][1][target])
        if not (held_by_destination and (name == "scatter streams" or (name in FIRST_THEN_REST and target)))
    ]


def late_input(name: str, source: int, target: int, patience_s: float) -> Scene:
    """One input is written late; the result is read by work queued after the call on its device."""
    scene = Scene(name)
    scene.hold(scene.sources[source])
    scene.fill_inputs()
    results = scene.call(scene.inputs)
    for place, result in enumerate(results):
        scene.read_later(place, result)
    scene.finish(f"read {scene.targets[target]}", patience_s)
    return scene


def busy_destination(name: str, source: int, target: int, patience_s: float) -> Scene:
    """The destination is busy; the input is overwritten by work queued after the call on its own device."""
    scene = Scene(name)
    scene.fill_inputs()
    for device in scene.sources:
        synchronize(device)
    scene.hold(scene.targets[target])
    results = scene.call(scene.inputs)
    for place, result in enumerate(results):
        # A part that aliases the input shows later writes to it, as it should.
        if not np.shares_memory(result.view(np.ndarray), scene.inputs[0].view(np.ndarray)):
            scene.read_later(place, result)
    scene.overwrite_later(scene.inputs[source])
    scene.finish(f"write {scene.sources[source]}", patience_s)
    return scene


def _right_where_read(scene: Scene) -> bool:
    """True if everything that was read is as expected."""
    assert scene.read
    return all(scene.read[place] == scene.expected[place] for place in scene.read)


@pytest.mark.parametrize(("name", "source", "target"), _pairs(apart=False))
def test_results_wait_for_inputs(name: str, source: int, target: int) -> None:
    scene = late_input(name, source, target, PATIENCE_S)
    assert [scene.read[place] for place in range(len(scene.targets))] == scene.expected
    assert scene.gate_open[f"read {scene.targets[target]}"]


@pytest.mark.parametrize(("name", "source", "target"), _pairs(apart=False))
def test_inputs_may_be_overwritten_after_the_call(name: str, source: int, target: int) -> None:
    scene = busy_destination(name, source, target, PATIENCE_S)
    assert _right_where_read(scene)
    assert scene.gate_open[f"write {scene.sources[source]}"]


@pytest.mark.usefixtures("no_waits")
@pytest.mark.parametrize(("name", "source", "target"), _pairs(apart=True))
def test_results_are_wrong_without_waits(name: str, source: int, target: int) -> None:
    scene = late_input(name, source, target, DEADLINE_S)
    assert not scene.gate_open[f"read {scene.targets[target]}"]
    assert not _right_where_read(scene)


@pytest.mark.usefixtures("no_waits")
@pytest.mark.parametrize(("name", "source", "target"), _pairs(apart=True, held_by_destination=True))
def test_overwriting_corrupts_without_waits(name: str, source: int, target: int) -> None:
    scene = busy_destination(name, source, target, DEADLINE_S)
    assert not scene.gate_open[f"write {scene.sources[source]}"]
    assert not _right_where_read(scene)


def _scatter_on_side_streams(held: str, patience_s: float) -> tuple[bool, list[float], bool]:
    """A scatter on a stream of its own, which is held or whose device's current stream is; what later work saw."""
    gate, looked = threading.Event(), threading.Event()
    source = ncclcomm.asarray(np.arange(6.0), device=0)
    synchronize(0)
    side = Stream(device=1)
    (side if held == "side" else current_stream(1)).launch(gate.wait, DEADLINE_S)
    ran_early = threading.Event()
    (part,) = comm.scatter(source, [1], streams=[side])
    side.launch(lambda: ran_early.set() if not gate.is_set() else None)
    seen: list[Any] = []

    def look() -> None:
        seen.append((gate.is_set(), part.view(np.ndarray).tolist()))
        looked.set()

    current_stream(1).launch(look)
    (looked if held == "side" else ran_early).wait(patience_s)
    gate.set()
    synchronize(0)
    synchronize(1)
    return seen[0][0], seen[0][1], ran_early.is_set()


@pytest.mark.parametrize("held", ["side", "current"])
def test_scatter_streams_are_ordered_with_the_current_one(held: str) -> None:
    assert _scatter_on_side_streams(held, PATIENCE_S) == (True, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], False)


@pytest.mark.usefixtures("no_waits")
def test_scatter_streams_go_wrong_without_waits() -> None:
    was_open, _, _ = _scatter_on_side_streams("side", DEADLINE_S)
    assert not was_open
    _, _, ran_early = _scatter_on_side_streams("current", DEADLINE_S)
    assert ran_early


def test_current_streams_are_the_ones_used() -> None:
    gate, source = threading.Event(), ncclcomm.asarray(np.arange(6.0), device=0)
    synchronize(0)
    for device in range(2):
        current_stream(device).launch(gate.wait, DEADLINE_S)
    first, second = Stream(device=0), Stream(device=1)
    with stream(first), stream(second):
        copy = comm.broadcast(source, [1])[0]
        total = comm.reduce_add([source, copy], destination=1)
        whole = comm.gather([source, copy], destination=0)
    first.synchronize()
    second.synchronize()
    assert not gate.is_set()
    np.testing.assert_array_equal(total.get(), 2 * np.arange(6.0))
    np.testing.assert_array_equal(whole.get(), np.tile(np.arange(6.0), 2))
    gate.set()
    for device in range(2):
        synchronize(device)


@pytest.mark.parametrize("call", ["gather", "gather out", "reduce_add", "reduce_add_coalesced", "asarray", "to_numpy"])
@pytest.mark.parametrize("late", [0, 1])
def test_host_memory_is_complete_at_return(call: str, late: int) -> None:
    gate = threading.Event()
    arrays = [_blank(device, 3) for device in (0, 1)]
    for device in range(2):
        synchronize(device)
    current_stream(late).launch(gate.wait, DEADLINE_S)
    for value, array in enumerate(arrays):
        current_stream(array.device).launch(array.view(np.ndarray).fill, value + 1.0)
    opener = threading.Timer(PATIENCE_S, gate.set)
    opener.start()
    out = np.zeros(6)
    found = {
        "gather": lambda: comm.gather(arrays, destination="cpu"),
        "gather out": lambda: comm.gather(arrays, out=out),
        "reduce_add": lambda: comm.reduce_add(arrays, destination=-1),
        "reduce_add_coalesced": lambda: comm.reduce_add_coalesced([[array] for array in arrays], "cpu")[0],
        "asarray": lambda: ncclcomm.asarray(arrays[late], device="cpu"),
        "to_numpy": lambda: ncclcomm.to_numpy(arrays[late]),
    }[call]()
    seen, was_open = np.array(found), gate.is_set()
    opener.join()
    expected = {"gather": [1, 1, 1, 2, 2, 2], "gather out": [1, 1, 1, 2, 2, 2], "reduce_add": [3, 3, 3]}
    expected["reduce_add_coalesced"] = expected["reduce_add"]
    np.testing.assert_array_equal(seen, expected.get(call, [late + 1] * 3))
    assert type(found) is np.ndarray
    assert was_open


@pytest.mark.parametrize(
    "call",
    ["broadcast", "broadcast out", "broadcast_coalesced", "scatter", "scatter streams", "asarray", "asarray dtype"],
)
def test_host_memory_may_be_overwritten_at_return(call: str) -> None:
    gate, source = threading.Event(), np.arange(6.0)
    out = _blank(1)
    synchronize(1)
    current_stream(1).launch(gate.wait, DEADLINE_S)
    found = {
        "broadcast": lambda: comm.broadcast(source, [1])[0],
        "broadcast out": lambda: comm.broadcast(source, out=[out])[0],
        "broadcast_coalesced": lambda: comm.broadcast_coalesced([source], [1])[0][0],
        "scatter": lambda: comm.scatter(source, [1])[0],
        "scatter streams": lambda: comm.scatter(source, [1], streams=[Stream(device=1)])[0],
        "asarray": lambda: ncclcomm.asarray(source, device=1),
        "asarray dtype": lambda: ncclcomm.asarray(source, device=1, dtype="f4"),
    }[call]()
    assert not gate.is_set()
    source.fill(-99.0)
    gate.set()
    np.testing.assert_array_equal(ncclcomm.to_numpy(found), np.arange(6.0))


def test_a_busy_device_holds_no_other_one() -> None:
    """The copies of one call wait for what was queued before it, and not for each other."""
    gate = threading.Event()
    source = ncclcomm.asarray(np.arange(6.0), device=0)
    synchronize(0)
    current_stream(1).launch(gate.wait, DEADLINE_S)
    copies = comm.broadcast(source, [1, 2])
    current_stream(2).synchronize()
    assert not gate.is_set()
    np.testing.assert_array_equal(copies[1].view(np.ndarray), np.arange(6.0))
    gate.set()
    np.testing.assert_array_equal(ncclcomm.to_numpy(copies[0]), np.arange(6.0))


def test_what_was_enqueued_before_an_error_is_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, ran_early = threading.Event(), threading.Event()
    source, out, other = ncclcomm.asarray(np.arange(6.0), device=0), _blank(1), _blank(2)
    for device in range(DEVICES):
        synchronize(device)
    copy = HostBackend.copy

    def once(self: HostBackend, dst: Any, src: Any, stream: Any) -> None:
        monkeypatch.setattr(HostBackend, "copy", _out_of_memory)
        copy(self, dst, src, stream)

    monkeypatch.setattr(HostBackend, "copy", once)
    current_stream(1).launch(gate.wait, DEADLINE_S)
    with pytest.raises(MemoryError, match="of the second copy"):
        comm.broadcast(source, out=[out, other])

    def overwrite() -> None:
        if not gate.is_set():
            ran_early.set()
        source.view(np.ndarray).fill(-99.0)

    current_stream(0).launch(overwrite)
    assert not ran_early.wait(PATIENCE_S)
    gate.set()
    synchronize(1)
    np.testing.assert_array_equal(out.view(np.ndarray), np.arange(6.0))


def _out_of_memory(*args: Any) -> None:
    """Stands for a copy that can't be enqueued."""
    raise MemoryError("of the second copy")


def test_arrays_that_are_dropped_live_until_the_call_is_done() -> None:
    gate = threading.Event()
    source = ncclcomm.asarray(np.arange(6.0), device=0)
    synchronize(0)
    current_stream(0).launch(gate.wait, DEADLINE_S)
    total = comm.reduce_add([source, *comm.broadcast(source, [1, 2])[:1]], destination=2)
    del source
    churn = [np.full(6, -1.0) for _ in range(200)]
    gate.set()
    np.testing.assert_array_equal(ncclcomm.to_numpy(total), 2 * np.arange(6.0))
    assert len(churn) == 200
