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
    "asarray": ((2,), (0,), lambda x: _single(ncclcomm.asarray(x[0], device=0))),
}
"""For each call: the devices of its inputs, those of its results, and the call on arrays of 6 elements."""


def _blank(device: int, n: int = 6) -> Any:
    """An array to fill."""
    return ncclcomm.asarray(np.full(n, -7.0), device=device)


def _expected(name: str, values: list[np.ndarray[Any, Any]]) -> list[list[float]]:
    """What NumPy makes of the inputs, one list a result."""
    count = len(CALLS[name][1])
    if name.startswith("scatter"):
        cuts = [2] if name.endswith("out") else [6 // count * i for i in range(1, count)]
        return [part.tolist() for part in np.split(values[0], cuts)]
    if name.startswith("gather"):
        return [np.concatenate(values).tolist()]
    if name.startswith("reduce_add"):
        return [sum(values).tolist()]  # type: ignore[union-attr]
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


def _pairs(apart: bool, own_streams: bool = True) -> list[Any]:
    """Every call with each of its inputs, and each device that gets a result.

    Args:
        apart: leave out results on the input's own device, which its stream orders.
        own_streams: take the calls that copy on given streams, which a busy current stream holds by waits alone.
    """
    return [
        pytest.param(name, source, target, id=f"{name}: {CALLS[name][0][source]} to {CALLS[name][1][target]}")
        for name in CALLS
        for source in range(len(CALLS[name][0]))
        for target in range(len(CALLS[name][1]))
        if not (apart and CALLS[name][0][source] == CALLS[name][1][target])
        if own_streams or name != "scatter streams"
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
@pytest.mark.parametrize(("name", "source", "target"), _pairs(apart=True, own_streams=False))
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


@pytest.mark.parametrize("call", ["gather", "gather out", "reduce_add", "asarray", "to_numpy"])
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
        "asarray": lambda: ncclcomm.asarray(arrays[late], device="cpu"),
        "to_numpy": lambda: ncclcomm.to_numpy(arrays[late]),
    }[call]()
    seen, was_open = np.array(found), gate.is_set()
    opener.join()
    expected = {"gather": [1, 1, 1, 2, 2, 2], "gather out": [1, 1, 1, 2, 2, 2], "reduce_add": [3, 3, 3]}
    np.testing.assert_array_equal(seen, expected.get(call, [late + 1] * 3))
    assert type(found) is np.ndarray
    assert was_open


@pytest.mark.parametrize(
    "call", ["broadcast", "broadcast out", "scatter", "scatter streams", "asarray", "asarray dtype"]
)
def test_host_memory_may_be_overwritten_at_return(call: str) -> None:
    gate, source = threading.Event(), np.arange(6.0)
    out = _blank(1)
    synchronize(1)
    current_stream(1).launch(gate.wait, DEADLINE_S)
    found = {
        "broadcast": lambda: comm.broadcast(source, [1])[0],
        "broadcast out": lambda: comm.broadcast(source, out=[out])[0],
        "scatter": lambda: comm.scatter(source, [1])[0],
        "scatter streams": lambda: comm.scatter(source, [1], streams=[Stream(device=1)])[0],
        "asarray": lambda: ncclcomm.asarray(source, device=1),
        "asarray dtype": lambda: ncclcomm.asarray(source, device=1, dtype="f4"),
    }[call]()
    assert not gate.is_set()
    source.fill(-99.0)
    gate.set()
    np.testing.assert_array_equal(ncclcomm.to_numpy(found), np.arange(6.0))


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
