"""In-process broadcast."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ncclcomm.arrays import empty_on, same_memory
from ncclcomm.comm._common import check_outs, devices_of, one_of, peer_of, view_of, views_of

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
    source = view_of(tensor, _CALL, "tensor")
    if out is not None:
        outs = views_of(out, _CALL, "out")
        check_outs(outs, [source.data.shape] * len(outs), source.data.dtype, _CALL, (source,), alias_ok=True)
        peer_of(outs[0].kind).copy_all(
            [
                (target, source)
                for target in outs
                if target.device != source.device or not same_memory(target.data, source.data)
            ]
        )
        return tuple([target.obj for target in outs])
    assert devices is not None
    data, home = source.data, source.device
    peer = peer_of(source.kind)
    results, pairs = [], []
    for device in devices_of(devices, _CALL):
        if device == home:
            results.append(source)
            continue
        target = empty_on(peer.backend, data.shape, data.dtype, device, source.kind)
        pairs.append((target, source))
        results.append(target)
    peer.copy_all(pairs)
    return tuple([found.obj for found in results])
