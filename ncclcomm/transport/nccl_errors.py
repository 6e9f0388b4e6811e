"""NCCL's errors and CUDA's as ours, with what NCCL said last and a hint; imported only where there is a GPU."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from cupy.cuda import nccl

from ncclcomm.devices.cuda_streams import translation
from ncclcomm.errors import NcclError

__all__ = ["ours", "translated"]

P = ParamSpec("P")
R = TypeVar("R")

_NAMES = {
    1: "ncclUnhandledCudaError",
    2: "ncclSystemError",
    3: "ncclInternalError",
    4: "ncclInvalidArgument",
    5: "ncclInvalidUsage",
    6: "ncclRemoteError",
    7: "ncclInProgress",
    8: "ncclTimeout",
}

_HINTS = {
    1: "a CUDA call failed; look for an earlier error of this rank, and at nvidia-smi for memory in use",
    2: "a call of the system failed: is /dev/shm full or too small, and is NCCL_SOCKET_IFNAME an interface that all "
    "ranks have?",
    3: "this is likely a fault of NCCL or memory that was overwritten",
    4: "an argument is wrong",
    5: "the calls of the ranks don't fit each other",
    6: "another rank failed or died; its own message says why",
    7: "an earlier call has not come to its end",
    8: "another rank didn't take part in time",
}


def _last_error() -> str:
    """NCCL's own last words, or ''."""
    try:
        library = ctypes.CDLL("libnccl.so.2")
        library.ncclGetLastError.restype = ctypes.c_char_p
        text = library.ncclGetLastError(None)
    except (OSError, AttributeError):
        return ""
    return text.decode(errors="replace").strip() if text else ""


def translated(func: Callable[P, R]) -> Callable[P, R]:
    """Turn NCCL's errors into NcclError, with the code, its name, NCCL's last words and a hint; CUDA's as elsewhere."""

    @functools.wraps(func)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return func(*args, **kwargs)
        except (RuntimeError, KeyError) as error:
            found = ours(error, func.__name__, func.__qualname__)
            if found is error:
                raise
            raise found from error

    return call


def ours(error: BaseException, call: str, where: str) -> BaseException:
    """Our error for one of NCCL's or CUDA's; others as they are."""
    if isinstance(error, nccl.NcclError):
        return _error_of(int(error.status), call)
    # CuPy's table of names ends before ncclInProgress and ncclTimeout, and its lookup raises instead.
    if type(error) is KeyError and error.args and error.args[0] in _NAMES:
        return _error_of(int(error.args[0]), call)
    return (translation(error, where) if isinstance(error, RuntimeError) else None) or error


def _error_of(code: int, call: str) -> NcclError:
    """The error of a code."""
    name = _NAMES.get(code, f"ncclResult {code}")
    words = _last_error()
    said = f" NCCL says: {words}." if words else ""
    hint = _HINTS.get(code, "see NCCL's documentation")
    return NcclError(
        f"NCCL {call} failed: {name} (code {code}).{said} Hint: {hint}. NCCL_DEBUG=INFO shows more",
        code=code,
        name=name,
        call=call,
    )
