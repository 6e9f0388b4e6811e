"""In-process broadcast."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ncclcomm.arrays import HOST_MEMORY, check_out, empty_on, same_memory, view
from ncclcomm.comm._common import devices_of, one_of, peer_of, views_of
from ncclcomm.errors import ArgumentError

__all__ = ["broadcast"]

_CALL = "broadcast"


def broadcast(
    tensor: Any, devices: Iterable[Any] | None = None, *, out: Iterable[Any] | None = None
) -> tuple[Any, ...]:
    """Copy an array to several devices of this process.

    Args:
        tensor: the array to copy, of any shape and dtype, on a device or in host memory.
        devices: the devices to copy to, by number or device object, the source's own among them or not.
        out: in place of devices: arrays to fill, one a device, of tensor's shape and dtype, not in host memory.

    Returns:
        A tuple with one array for each of devices, in their order. Where a device is tensor's own, the entry is tensor
        itself; the others are new and C-contiguous. With out: a tuple of out's arrays.
        Each is ordered on its device's current stream; the source may be written after the call by work queued on its
        device's current stream, host memory by the host.

    Raises:
        ArgumentError: both or neither of devices and out, no device, an unknown device, an out that doesn't fit.
        UnsupportedError: tensor is no supported array, or of a dtype that holds references.

    See: torch.cuda.comm.broadcast.
    """
    one_of(devices, out, _CALL)
    source = view(tensor, f"{_CALL}: tensor")
    peer = peer_of()
    if out is not None:
        outs = views_of(out, _CALL, "out")
        for index, target in enumerate(outs):
            name = f"{_CALL}: out[{index}]"
            if target.device == HOST_MEMORY:
                raise ArgumentError(f"{name} is in host memory; expected an array of a device")
            check_out(target, source.data.shape, source.data.dtype, name, [source, *outs[:index]], alias_ok=True)
        for target in outs:
            if target.device != source.device or not same_memory(target.data, source.data):
                peer.copy(target, source)
        return tuple(target.obj for target in outs)
    assert devices is not None
    results = []
    for device in devices_of(devices, _CALL):
        if device == source.device:
            results.append(source.obj)
            continue
        target = empty_on(peer.backend, source.data.shape, source.data.dtype, device)
        peer.copy(target, source)
        results.append(target.obj)
    return tuple(results)
