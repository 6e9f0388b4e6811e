"""Copies and sums of CUDA memory, on streams; imported only where there is a GPU."""

from __future__ import annotations

import functools
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from ncclcomm.devices.cuda_held import hold
from ncclcomm.devices.cuda_streams import CudaStream, on_device, order, using
from ncclcomm.reductions import ufunc_for

__all__ = ["copy", "enable_peer", "is_pinned", "reduce"]

_TO_DEVICE, _TO_HOST, _WITHIN = 1, 2, 3
"""cudaMemcpyKind."""

_PEER_ALREADY_ENABLED, _TOO_MANY_PEERS = 704, 711

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def copy(dst: Any, src: Any, stream: CudaStream) -> None:
    """Enqueue `dst[...] = src`: same shape and dtype, any strides, either side in host memory or on any device.

    A copy to host memory may return before it is done. Device arrays of another device than the stream's are held.
    """
    if dst.size == 0:
        return
    if isinstance(dst, np.ndarray):
        _to_host(dst, src, stream)
    elif isinstance(src, np.ndarray):
        _to_device(dst, src, stream)
    elif dst.device.id == src.device.id:
        _within(dst, src, stream)
    else:
        _across(dst, src, stream)


def _raw(array: Any) -> Any:
    """The array as words that CuPy can copy, whatever the dtype."""
    word = _WORDS.get(array.dtype.itemsize)
    if word is not None:
        return cupy.ndarray(array.shape, word, array.data, array.strides)
    return cupy.ndarray((*array.shape, array.dtype.itemsize), np.uint8, array.data, (*array.strides, 1))


def _within(dst: Any, src: Any, stream: CudaStream) -> None:
    """Copy on one device."""
    if dst.flags.c_contiguous and src.flags.c_contiguous:
        with on_device(stream.device):
            runtime.memcpyAsync(dst.data.ptr, src.data.ptr, dst.nbytes, _WITHIN, stream.handle)
        return
    with using(stream):
        cupy.copyto(_raw(dst), _raw(src))


def _across(dst: Any, src: Any, stream: CudaStream) -> None:
    """Copy between devices, on a stream of dst's device; strided sides go through contiguous ones of their device."""
    enable_peer(dst.device.id, src.device.id)
    given = src
    if not src.flags.c_contiguous:
        here = cupy.cuda.get_current_stream(src.device.id)
        staged = _empty_like(src)
        own = CudaStream(src.device.id, here)
        _within(staged, src, own)
        order(own, stream)
        src = staged
    landing = dst if dst.flags.c_contiguous else _empty_like(dst)
    with on_device(stream.device):
        runtime.memcpyPeerAsync(
            landing.data.ptr, landing.device.id, src.data.ptr, src.device.id, dst.nbytes, stream.handle
        )
    if landing is not dst:
        _within(dst, landing, stream)
    hold(stream, given, src, landing)


def _empty_like(array: Any) -> Any:
    """A new C-contiguous array on the same device, from its current stream's memory."""
    with on_device(array.device.id):
        return cupy.empty(array.shape, array.dtype)


@functools.cache
def enable_peer(device: int, peer: int) -> bool:
    """Let copies between two devices go directly, where the machine can; each way once.

    Returns:
        True if kernels of the device can load from the peer.
    """
    is_enabled = True
    for here, there in ((peer, device), (device, peer)):
        is_enabled = bool(runtime.deviceCanAccessPeer(here, there))
        if is_enabled:
            with on_device(here):
                try:
                    runtime.deviceEnablePeerAccess(there)
                except runtime.CUDARuntimeError as error:
                    # A device has only so many peers, eight over PCIe; copies between others go through the host.
                    if error.status not in (_PEER_ALREADY_ENABLED, _TOO_MANY_PEERS):
                        raise
                    is_enabled = error.status == _PEER_ALREADY_ENABLED
    return is_enabled


def is_pinned(array: np.ndarray[Any, Any]) -> bool:
    """True for host memory that the GPU reads by itself, later than the call that enqueues a copy."""
    attributes = runtime.pointerGetAttributes(array.ctypes.data)
    return int(attributes.type) != 0


def _to_device(dst: Any, src: np.ndarray[Any, Any], stream: CudaStream) -> None:
    """Copy from host memory; pageable memory may be reused at once."""
    plain = np.ascontiguousarray(src)
    landing = dst if dst.flags.c_contiguous else _empty_like(dst)
    with on_device(stream.device):
        runtime.memcpyAsync(landing.data.ptr, plain.ctypes.data, dst.nbytes, _TO_DEVICE, stream.handle)
    if landing is not dst:
        _within(dst, landing, stream)
        hold(stream, landing)
    if plain is not src or is_pinned(plain):
        hold(stream, plain)


def _to_host(dst: np.ndarray[Any, Any], src: Any, stream: CudaStream) -> None:
    """Copy to host memory; a strided side waits for the host's part."""
    if not src.flags.c_contiguous:
        staged = _empty_like(src)
        _within(staged, src, stream)
        hold(stream, staged)
        src = staged
    plain = dst if dst.flags.c_contiguous else np.empty(dst.shape, dst.dtype)
    with on_device(stream.device):
        runtime.memcpyAsync(plain.ctypes.data, src.data.ptr, dst.nbytes, _TO_HOST, stream.handle)
        if plain is not dst:
            stream.cupy.synchronize()
            np.copyto(dst, plain)


def reduce(out: Any, arrays: list[Any], op: str, stream: CudaStream) -> None:
    """Enqueue out = arrays[0] op arrays[1] op ..., on out's device and a stream of it; out may be any one of them."""
    if out.size == 0:
        return
    func = getattr(cupy, ufunc_for(op, out.dtype).__name__)
    if len(arrays) == 1:
        copy(out, arrays[0], stream)
        return
    with using(stream):
        aliased = any(array.device.id == out.device.id and cupy.may_share_memory(out, array) for array in arrays[1:])
        total = cupy.empty(out.shape, out.dtype) if aliased else out
        landing: list[Any] = []
        func(_near(arrays[0], out, stream, landing), _near(arrays[1], out, stream, landing), out=total)
        landing = landing[:1]
        for array in arrays[2:]:
            func(total, _near(array, out, stream, landing, reuse=True), out=total)
        if aliased:
            cupy.copyto(out, total)
        hold(stream, *arrays, *landing, total)


def _near(array: Any, out: Any, stream: CudaStream, landing: list[Any], *, reuse: bool = False) -> Any:
    """The array on out's device: itself, or a copy in a landing buffer, which the stream's order lets us use again."""
    if array.device.id == out.device.id:
        return array
    if not (reuse and landing):
        landing.append(cupy.empty(array.shape, array.dtype))
    near = landing[-1]
    _across(near, array, stream)
    return near
