"""Where a rank's watchdog listens, and how the others find it."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
from dataclasses import dataclass

__all__ = ["Address", "listen"]

_SIOCGIFADDR = 0x8915
_GLOBAL_SCOPE = "00"
"""As /proc/net/if_inet6 says it: not of one link alone, and not the loopback address."""


@dataclass(frozen=True)
class Address:
    """Where a rank's watchdog listens."""

    host: str
    """Which host it is on: boot and network, so that only processes that share both use the loopback address."""
    host_name: str
    """The host's name, for reports alone: names need not be distinct."""
    addresses: tuple[str, ...]
    port: int
    token: str


def listen() -> tuple[socket.socket, Address]:
    """A new listening socket, for IPv6 too where the host has it, and the address to tell the others.

    Raises:
        OSError: no socket is to be had.
    """
    listening = _listening_socket()
    # A forked child that kept it would make a rank that died look as if it were stopped.
    os.register_at_fork(after_in_child=listening.close)
    port = listening.getsockname()[1]
    address = Address(_host_identity(), socket.gethostname(), _addresses(), port, secrets.token_hex(8))
    return listening, address


def _listening_socket() -> socket.socket:
    """A socket that listens at every address of this host."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 may be switched off
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=128)


def _host_identity() -> str:
    """What processes share that reach each other over the loopback address."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/net')}"


def _addresses() -> tuple[str, ...]:
    """This host's addresses: IPv4, then IPv6, the loopback ones last."""
    import fcntl

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(answer[20:24]))
    return tuple(sorted(found + _ipv6_addresses(), key=lambda address: address.startswith("127.")))


def _ipv6_addresses() -> list[str]:
    """This host's IPv6 addresses that other hosts can reach."""
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as file:
            lines = [line.split() for line in file]
    except OSError:
        return []
    return [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line[0])) for line in lines if line[3] == _GLOBAL_SCOPE]
