"""A second device number for the only GPU: memory of its own, a current stream of its own, real copies and kernels.

What tells devices apart in cuda_peer is the number that an array's memory bears and the calls of the runtime; both are
led to device 0 here. So the waits, copies and kernels between two devices run for real where there is one GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

__all__ = ["second_gpu"]


class _Runtime:
    """The runtime's calls, with device 1 led to device 0 and a stream of its own."""

    def __init__(self, streams: list[Any]) -> None:
        from cupy.cuda import runtime

        self._real = runtime
        self._streams = streams
        self._device = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def getDevice(self) -> int:  # noqa: N802
        return self._device

    def setDevice(self, device: int) -> None:  # noqa: N802
        self._device = device
        self._streams[device].use()

    def memcpyPeerAsync(self, dst: int, here: int, src: int, there: int, nbytes: int, stream: int) -> None:  # noqa: N802
        assert {here, there} == {0, 1}
        self._real.memcpyPeerAsync(dst, 0, src, 0, nbytes, stream)

    def deviceCanAccessPeer(self, here: int, there: int) -> bool:  # noqa: N802
        return True

    def deviceEnablePeerAccess(self, there: int) -> None:  # noqa: N802
        pass


class _EveryDtype(set[Any]):
    """What CuPy is taken to have: the first array of a dtype would be of device 0."""

    def __contains__(self, dtype: object) -> bool:
        return True


@contextmanager
def second_gpu() -> Iterator[list[Any]]:
    """The CUDA backend with a second device, in use; gives the current streams of both, which may be replaced."""
    import cupy

    from ncclcomm.devices import cuda, cuda_held, cuda_memory, cuda_peer, cuda_streams
    from ncclcomm.devices.registry import use_backend

    streams = [cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)]
    runtime = _Runtime(streams)
    alloc = cupy.cuda.alloc

    def alloc_here(nbytes: int) -> Any:
        memory = alloc(nbytes)  # from the pool of the stream that setDevice made the current one
        if runtime.getDevice() == 0:
            return memory
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(memory.ptr, nbytes, memory, 1), 0)

    with ExitStack() as stack:
        for module in (cuda_held, cuda_memory, cuda_peer, cuda_streams):
            stack.enter_context(patch.object(module, "runtime", runtime))
        stack.enter_context(patch.object(cuda, "count_devices", lambda: 2))
        stack.enter_context(patch.object(cupy.cuda, "get_current_stream", lambda device=None: streams[device or 0]))
        stack.enter_context(patch.object(cuda_peer, "get_current_stream", lambda device: streams[device]))
        stack.enter_context(patch.object(cuda_streams, "marks", cuda_streams._Marks()))
        stack.enter_context(patch.object(cuda_peer, "marks", cuda_streams.marks))
        stack.enter_context(patch.object(cuda_held, "_spare", {}))
        cuda_memory.enable_peer.cache_clear()
        backend = cuda.CudaBackend()
        backend._runtime = runtime
        backend._dtypes = _EveryDtype()
        backend._alloc = alloc_here
        runtime.setDevice(0)
        with use_backend(backend):
            yield streams
        cuda_held.settle()
        cuda_memory.enable_peer.cache_clear()
        cupy.cuda.Stream.null.use()
