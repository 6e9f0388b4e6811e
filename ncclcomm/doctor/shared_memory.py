"""Whether a rank can read another one's memory by its process id, as MPI does to copy once instead of twice."""

from __future__ import annotations

import ctypes
import os
import secrets
from pathlib import Path

__all__ = ["Readable", "read_neighbour", "yama_scope"]

_TOKEN_BYTES = 32


class _Span(ctypes.Structure):
    """The struct iovec of the C library."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class Readable:
    """Bytes that others of the host may read, for as long as this object lives."""

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(secrets.token_bytes(_TOKEN_BYTES), _TOKEN_BYTES)

    def ticket(self) -> dict[str, object]:
        """What a neighbour needs: process id, address, and what is to be read there."""
        return {"pid": os.getpid(), "address": ctypes.addressof(self._memory), "token": self._memory.raw.hex()}


def read_neighbour(ticket: dict[str, object]) -> str:
    """Read another process's memory, and say why that fails; '' where it works.

    Args:
        ticket: what that process's `Readable.ticket` gave.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "process_vm_readv"):
        return "this C library has no process_vm_readv"
    here = ctypes.create_string_buffer(_TOKEN_BYTES)
    local = _Span(ctypes.addressof(here), _TOKEN_BYTES)
    remote = _Span(int(str(ticket["address"])), _TOKEN_BYTES)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    got = libc.process_vm_readv(int(str(ticket["pid"])), ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    if got < 0:
        return os.strerror(ctypes.get_errno())
    if here.raw.hex() != ticket["token"]:
        return "another process has that number here (the ranks have process ids of different containers)"
    return ""


def yama_scope(where: str = "/proc/sys/kernel/yama/ptrace_scope") -> int | None:
    """How far the kernel restricts reading other processes' memory, 0 to 3; None where it has no such setting."""
    try:
        return int(Path(where).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
