"""In-process collectives on simulated GPUs: what is queued runs in any order that streams and events allow.

Run as a program by a Python that has CuPy, with no GPU, it prints, as JSON, each check's name and traceback ('' where
it passed). CuPy's arrays lie in host memory here, and the runtime's calls only queue. Memory that is dropped is
overwritten in the order of the stream that it was allocated on, as the memory pool's next user would.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import random
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

CHECKS: dict[str, Callable[[], None]] = {}
SEEDS = range(12)


def check(func: Callable[[], None]) -> Callable[[], None]:
    """List a check."""
    CHECKS[func.__name__] = func
    return func


def _device_of(handle: int) -> int:
    """The device of a simulated stream or event."""
    return handle // 1000 - 1


class Machine:
    """GPUs that run what is queued when told to, in an order of their own choice.

    Args:
        devices: how many there are.
        seed: decides the order.
    """

    def __init__(self, devices: int, seed: int) -> None:
        self.devices = devices
        self.device = 0
        self.current: dict[int, int] = {}
        self._random = random.Random(seed)
        self._queues: dict[tuple[int, int], deque[tuple[str, Any]]] = {}
        self._recorded: dict[int, int] = {}
        self._reached: dict[int, int] = {}
        self._handles = itertools.count(100)
        self.freed: list[Any] = []

    def stream(self, device: int) -> Any:
        """CuPy's current stream of a device."""
        return SimpleNamespace(ptr=self.current.get(device, 0), device_id=device)

    def queue(self, kind: str, what: Any, handle: int | None = None) -> None:
        """Put work on a stream of the current device; other handles than the default stream's say their device."""
        handle = self.current.get(self.device, 0) if handle is None else handle
        device = self.device if handle == 0 else _device_of(handle)
        self._queues.setdefault((device, handle), deque()).append((kind, what))

    def run(self) -> None:
        """Run all that is queued."""
        while any(self._queues.values()):
            ready = [queue for queue in self._queues.values() if queue and self._may_run(*queue[0])]
            assert ready, "the streams wait for each other"
            queue = self._random.choice(ready)
            # A stream often gets on for a while before another does.
            for _ in range(self._random.choice((1, 1, 3, 100))):
                if not queue or not self._may_run(*queue[0]):
                    break
                self._do(*queue.popleft())

    def _may_run(self, kind: str, what: Any) -> bool:
        return kind != "wait" or self._reached.get(what[0], 0) >= what[1]

    def _do(self, kind: str, what: Any) -> None:
        if kind == "record":
            self._reached[what[0]] = max(what[1], self._reached.get(what[0], 0))
        elif kind == "do":
            what()

    def is_complete(self, event: int, device: int) -> bool:
        return self._reached.get(event, 0) >= self._recorded.get(event, 0)

    def runtime(self) -> Any:
        """The calls of cupy.cuda.runtime."""
        from cupy.cuda import runtime

        def set_device(device: int) -> None:
            assert 0 <= device < self.devices
            self.device = device

        def event_record(event: int, handle: int) -> None:
            device = self.device if handle == 0 else _device_of(handle)
            assert _device_of(event) == device, "an event of another device"
            self._recorded[event] = self._recorded.get(event, 0) + 1
            self.queue("record", (event, self._recorded[event]), handle)

        def wait_event(handle: int, event: int) -> None:
            self.queue("wait", (event, self._recorded.get(event, 0)), handle)

        def copy(dst: int, src: int, nbytes: int, kind: int, handle: int) -> None:
            self.queue("do", lambda: ctypes.memmove(dst, src, nbytes), handle)

        def copy_peer(dst: int, there: int, src: int, here: int, nbytes: int, handle: int) -> None:
            copy(dst, src, nbytes, 0, handle)

        return SimpleNamespace(
            CUDARuntimeError=runtime.CUDARuntimeError,
            getDevice=lambda: self.device,
            setDevice=set_device,
            eventRecord=event_record,
            streamWaitEvent=wait_event,
            memcpyAsync=copy,
            memcpyPeerAsync=copy_peer,
            streamIsCapturing=lambda handle: False,
            deviceCanAccessPeer=lambda here, there: True,
            deviceEnablePeerAccess=lambda there: None,
        )

    def event(self, **_: Any) -> Any:
        """A CuPy event of the current device."""
        return SimpleNamespace(ptr=(self.device + 1) * 1000 + next(self._handles))

    def alloc(self, nbytes: int) -> Any:
        """Memory of the current device and its current stream."""
        import cupy

        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(*self._block(nbytes), self.device), 0)

    def _block(self, nbytes: int) -> tuple[int, int, Any]:
        block = _Block(self, nbytes)
        return ctypes.addressof(block.memory), nbytes, block

    def array(self, values: Any) -> Any:
        """An array of the current device and stream, which its stream fills."""
        import cupy
        import numpy as np

        values = np.asarray(values)
        made = cupy.ndarray(values.shape, values.dtype, self.alloc(values.nbytes))
        self.fill(made, values)
        return made

    def fill(self, array: Any, values: Any) -> None:
        """Write to an array on the current stream of its device, behind what is queued there."""
        target = plain(array)
        stream = self.stream(array.data.device_id)
        before, self.device = self.device, array.data.device_id
        self.queue("do", lambda: target.__setitem__(..., values), stream.ptr)
        self.device = before

    def sum_kernel(self, dtype: Any, terms: int, device: int) -> Callable[[int, Sequence[int], int], None]:
        """As cuda_sum.sum_kernel."""
        import numpy as np

        def launch(out: int, addresses: Sequence[int], count: int) -> None:
            nbytes = count * dtype.itemsize
            target, *arrays = [
                np.frombuffer((ctypes.c_char * nbytes).from_address(at), dtype) for at in (out, *addresses)
            ]

            def add() -> None:
                total = arrays[0].copy()
                for array in arrays[1:]:
                    total = total + array
                target[...] = total

            self.queue("do", add)

        return launch


class _Block:
    """Memory of a stream's pool, which is written over in that stream's order once nobody has it."""

    def __init__(self, machine: Machine, nbytes: int) -> None:
        self.memory = (ctypes.c_ubyte * max(nbytes, 1))()
        ctypes.memset(self.memory, 0xEE, nbytes)
        self._machine, self._nbytes, self._device = machine, nbytes, machine.device
        self._handle = machine.current.get(machine.device, 0)

    def __del__(self) -> None:
        memory, nbytes, machine = self.memory, self._nbytes, self._machine
        machine.freed.append(memory)
        before, machine.device = machine.device, self._device
        machine.queue("do", lambda: ctypes.memset(memory, 0xDD, nbytes), self._handle)
        machine.device = before


def plain(array: Any) -> Any:
    """The NumPy array in which a simulated one lies."""
    import numpy as np

    nbytes = int(array.nbytes)
    memory = np.frombuffer((ctypes.c_char * nbytes).from_address(array.data.ptr), np.uint8)
    return memory.view(array.dtype).reshape(array.shape)


class _EveryDtype(set[Any]):
    """What CuPy is taken to have."""

    def __contains__(self, dtype: object) -> bool:
        return True


@contextmanager
def simulated(devices: int, seed: int) -> Iterator[Machine]:
    """The CUDA backend over a machine, in use."""
    import cupy

    from ncclcomm.devices import cuda, cuda_driver, cuda_held, cuda_memory, cuda_peer, cuda_streams
    from ncclcomm.devices.registry import use_backend
    from ncclcomm.transport import peer

    def refuse(*_: Any) -> None:
        raise AssertionError("plain arrays went the long way")

    machine = Machine(devices, seed)
    runtime = machine.runtime()
    with ExitStack() as stack:

        def put(where: Any, name: str, value: Any) -> None:
            stack.enter_context(patch.object(where, name, value))

        for module in (cuda_held, cuda_memory, cuda_peer, cuda_streams):
            put(module, "runtime", runtime)
        put(cuda, "count_devices", lambda: devices)
        put(cupy.cuda, "get_current_stream", machine.stream)
        put(cupy.cuda, "Event", machine.event)
        put(cupy.cuda, "alloc", machine.alloc)
        put(cuda_peer, "get_current_stream", machine.stream)
        put(cuda_peer, "sum_kernel", machine.sum_kernel)
        put(cuda_driver, "is_complete", machine.is_complete)
        put(cuda_driver, "is_plainly_allocated", lambda address: True)
        put(cuda_streams, "marks", cuda_streams._Marks())
        put(cuda_peer, "marks", cuda_streams.marks)
        put(cuda_memory, "copy", refuse)
        put(cuda_memory, "reduce", refuse)
        put(peer, "SLICED_BYTES", 1 << (seed % 2 * 20))
        put(cuda_held, "_held", {})
        put(cuda_held, "_spare", {})
        put(cuda_held._keeper, "looks", True)  # it sleeps: the checks look
        cuda_memory.enable_peer.cache_clear()
        backend = cuda.CudaBackend()
        backend._runtime = runtime
        backend._dtypes = _EveryDtype()
        with use_backend(backend):
            yield machine
        cuda_memory.enable_peer.cache_clear()


def _orders(devices: int) -> list[list[int]]:
    """Devices in some orders."""
    return [list(range(devices)), list(reversed(range(devices))), [devices - 1, 0]]


def _values(seed: int, rows: int = 12) -> Any:
    """Numbers to move."""
    import numpy as np

    return (np.arange(rows * 3).reshape(rows, 3) + 100 * seed).astype("i8")


def _choose_streams(machine: Machine, chance: random.Random) -> None:
    """Make other streams current ones, or the default ones."""
    for device in range(machine.devices):
        machine.current[device] = chance.choice((0, (device + 1) * 1000 + 1, (device + 1) * 1000 + 2))
    machine.device = chance.randrange(machine.devices)


def _everything(devices: int, seed: int) -> None:
    """Each call: of what was queued before, dropped and written over at once, and used by what is queued after."""
    import numpy as np

    from ncclcomm import comm
    from ncclcomm.devices import cuda_held

    chance = random.Random(seed)
    for order in _orders(devices):
        with simulated(devices, seed) as machine:
            _choose_streams(machine, chance)
            made = []
            for index, device in enumerate(order):
                machine.device = device
                made.append(machine.array(np.full((12, 3), -1, "i8")))
                machine.fill(made[-1], _values(index))
            machine.device = home = chance.randrange(devices)
            # The memory of the arrays is of other streams than the current ones.
            if chance.random() < 0.5:
                machine.run()
                _choose_streams(machine, chance)
                home = machine.device
            expected = [_values(index) for index in range(len(order))]
            total = np.sum(expected, axis=0)
            found: list[tuple[Any, Any]] = []
            copies = comm.broadcast(made[0], order[1:] + order[:1])
            found += [(copy, expected[0]) for copy in copies if copy is not made[0]]
            whole = comm.gather(made, destination=chance.choice(order))
            found.append((whole, np.concatenate(expected)))
            parts = comm.scatter(whole, order, balanced=True)
            found += list(zip(parts, np.array_split(np.concatenate(expected), len(order)), strict=True))
            found.append((comm.reduce_add(made, destination=chance.choice(order)), total))
            found += [(one, total) for one in comm.all_reduce(made)]
            found += [(one, np.concatenate(expected)) for one in comm.all_gather(made)]
            found += list(zip(comm.reduce_scatter(made), np.array_split(total, len(order)), strict=True))
            assert machine.device == home, "another current device"
            own = []
            for index, device in enumerate(order):
                machine.device = device
                own.append(machine.array(_values(index)))
            machine.device = home
            found += [(one, total) for one in comm.all_reduce(own, out=own)]
            # Who wrote to the inputs after the calls did so behind them; and here they are dropped, and written over.
            for array in made:
                machine.fill(array, -7)
            del array, made, whole, parts, copies, own
            cuda_held.drop_ended()
            machine.run()
            for place, (array, values) in enumerate(found):
                assert np.array_equal(plain(array), values), (devices, seed, order, place)
            del found, array
            cuda_held.drop_ended()
            assert not any(cuda_held._held.values()), "something is held for ever"
            machine.run()


@check
def calls_are_ordered_on_two_devices() -> None:
    for seed in SEEDS:
        _everything(2, seed)


@check
def calls_are_ordered_on_more_devices() -> None:
    for seed in SEEDS:
        _everything(3, seed)
        _everything(4, seed)


def _finds(name: str, fake: Any) -> None:
    """Hold that the check above fails where a part of the calls is left out."""
    from ncclcomm.devices import cuda_peer

    with patch.object(cuda_peer, name, fake):
        for seed in range(40):
            try:
                _everything(2, seed)
            except AssertionError:
                return
    raise AssertionError(f"nothing was found without {name}")


@check
def a_missing_wait_before_is_found() -> None:
    _finds("_wait_before", lambda uses, streams: None)


@check
def a_missing_wait_after_is_found() -> None:
    _finds("_wait_after", lambda uses, streams, used, keep: None)


@check
def a_dropped_input_that_is_not_held_is_found() -> None:
    _finds("hold_until", lambda done, device, handle, objects: None)


def main() -> None:
    """Run the checks and print what they found."""
    told = {}
    for name, func in CHECKS.items():
        try:
            func()
            told[name] = ""
        except Exception:
            told[name] = traceback.format_exc()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
