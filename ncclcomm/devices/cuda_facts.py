"""What the CUDA runtime tells of versions, devices and the ways between them, for the doctor.

Importing this file imports no CuPy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ncclcomm.errors import DeviceError

__all__ = ["device_names", "peer_access", "versions"]

R = TypeVar("R")


def _asked(call: str, ask: Callable[[], R]) -> R:
    """What the runtime answers; its errors, which are CuPy's classes, as DeviceError."""
    try:
        return ask()
    except Exception as error:
        raise DeviceError(f"CUDA {call} failed: {error}", call=call) from error


def versions() -> dict[str, str]:
    """CUDA's versions, such as 12.8: `driver` is the latest that the driver serves, `runtime` what CuPy was built for.

    Raises:
        DeviceError: CuPy can't be imported, or the runtime refuses.
    """

    def ask() -> dict[str, str]:
        from cupy.cuda import runtime

        numbers = {"driver": int(runtime.driverGetVersion()), "runtime": int(runtime.runtimeGetVersion())}
        return {name: f"{number // 1000}.{number % 1000 // 10}" for name, number in numbers.items()}

    return _asked("version", ask)


def device_names() -> list[str]:
    """The GPUs' product names, by device number; creates no CUDA context.

    Raises:
        DeviceError: the runtime refuses.
    """

    def ask() -> list[str]:
        from cupy.cuda import runtime

        found = (runtime.getDeviceProperties(device)["name"] for device in range(runtime.getDeviceCount()))
        return [name.decode(errors="replace") if isinstance(name, bytes) else str(name) for name in found]

    return _asked("getDeviceProperties", ask)


def peer_access(device: int, peer: int) -> bool:
    """True if kernels and copies of a device reach another one's memory directly; creates no CUDA context.

    Raises:
        DeviceError: no such device.
    """

    def ask() -> bool:
        from cupy.cuda import runtime

        return bool(runtime.deviceCanAccessPeer(device, peer))

    return _asked("deviceCanAccessPeer", ask)
