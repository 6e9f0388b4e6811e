"""Network interfaces, and which of them NCCL's variable names."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import Iterable

__all__ = ["interfaces", "named_interfaces"]

_SIOCGIFADDR = 0x8915
_MOST_NAME_BYTES = 15


def interfaces() -> dict[str, list[str]]:
    """This process's network interfaces, each with its IPv4 addresses."""
    found: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            found[name] = []
            request = struct.pack("256s", name.encode()[:_MOST_NAME_BYTES])
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                found[name].append(socket.inet_ntoa(answer[20:24]))
    return found


def named_interfaces(setting: str, names: Iterable[str]) -> list[str]:
    """The interfaces that NCCL_SOCKET_IFNAME leaves to NCCL.

    Args:
        setting: its value: names, or beginnings of names, with commas between; `=` in front means exact names, `^`
            all but these, `^=` both.
        names: the interfaces there are.
    """
    excluded, exact = setting.startswith("^"), setting.removeprefix("^").startswith("=")
    words = [word for word in setting.removeprefix("^").removeprefix("=").split(",") if word]

    def is_named(name: str) -> bool:
        return any(name == word if exact else name.startswith(word) for word in words)

    return [name for name in names if is_named(name) != excluded]
