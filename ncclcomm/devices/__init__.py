"""Devices, streams and events, with the calls of torch.cuda."""

from __future__ import annotations

from ncclcomm.devices.event import Event
from ncclcomm.devices.functions import (
    current_blas_handle,
    current_device,
    device,
    device_count,
    device_of,
    is_available,
    set_device,
    synchronize,
)
from ncclcomm.devices.index import resolve_device
from ncclcomm.devices.registry import current_backend, use_backend
from ncclcomm.devices.stream import ExternalStream, Stream, StreamContext, current_stream, default_stream, stream

__all__ = [
    "Event",
    "ExternalStream",
    "Stream",
    "StreamContext",
    "current_backend",
    "current_blas_handle",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "device_of",
    "is_available",
    "resolve_device",
    "set_device",
    "stream",
    "synchronize",
    "use_backend",
]
