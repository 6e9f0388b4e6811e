"""Collectives over MPI and NCCL for CuPy and NumPy programs.

Devices, streams and events as `torch.cuda` has them; `ncclcomm.comm` for several devices of one process;
`ncclcomm.init` and `Communicator` for ranks. Importing it starts neither CUDA nor MPI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ncclcomm import comm
from ncclcomm.communicator import Communicator, init
from ncclcomm.creation import array_module, asarray, device_index, empty, to_numpy, zeros
from ncclcomm.devices import (
    Event,
    ExternalStream,
    Stream,
    current_blas_handle,
    current_device,
    current_stream,
    default_stream,
    device,
    device_count,
    device_of,
    is_available,
    set_device,
    stream,
    synchronize,
)
from ncclcomm.errors import (
    AbortedError,
    ArgumentError,
    ArgumentIndexError,
    BackendUnavailableError,
    ClosedError,
    CommTimeoutError,
    DeviceError,
    MismatchError,
    MpiError,
    NcclCommError,
    NcclError,
    UnsupportedError,
)

if TYPE_CHECKING:
    xp: Any
    """NumPy's functions on the arrays of the backend in use: CuPy, or a NumPy namespace of virtual devices."""

__version__ = "0.1.0"

__all__ = [
    "AbortedError",
    "ArgumentError",
    "ArgumentIndexError",
    "BackendUnavailableError",
    "ClosedError",
    "CommTimeoutError",
    "Communicator",
    "DeviceError",
    "Event",
    "ExternalStream",
    "MismatchError",
    "MpiError",
    "NcclCommError",
    "NcclError",
    "Stream",
    "UnsupportedError",
    "array_module",
    "asarray",
    "comm",
    "current_blas_handle",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "device_index",
    "device_of",
    "empty",
    "init",
    "is_available",
    "set_device",
    "stream",
    "synchronize",
    "to_numpy",
    "xp",
    "zeros",
]


def __getattr__(name: str) -> Any:
    """Choose the backend only when `xp` is first asked for."""
    if name == "xp":
        return array_module()
    raise AttributeError(f"module 'ncclcomm' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names."""
    return [*__all__, "__version__"]
