"""Every exception that ncclcomm raises on purpose.

One root, `NcclCommError`, and below it classes that are also the built-in class a caller of
`torch.cuda`, NumPy or mpi4py would catch (ValueError, TypeError, IndexError, TimeoutError).
"""

from __future__ import annotations

__all__ = [
    "AbortedError",
    "ArgumentError",
    "ArgumentIndexError",
    "BackendUnavailableError",
    "ClosedError",
    "CommTimeoutError",
    "DeviceError",
    "MismatchError",
    "MpiError",
    "NcclCommError",
    "NcclError",
    "UnsupportedError",
]


class NcclCommError(RuntimeError):
    """Root of every error that ncclcomm raises."""


class ArgumentError(NcclCommError, ValueError):
    """An argument of this call is wrong; found before any data moved."""


class ArgumentIndexError(ArgumentError, IndexError):
    """A dimension or device index is out of range, where torch raises IndexError."""


class MismatchError(NcclCommError):
    """Ranks disagree about a call; raised on every rank, before any data moved."""


class UnsupportedError(NcclCommError, TypeError):
    """A dtype, operation or kind of array that ncclcomm does not take; found before any data moved."""


class BackendUnavailableError(NcclCommError):
    """A package or a device that was asked for is missing; the message names what brings it."""


class _CodedError(NcclCommError):
    """An error of a library below: its code, its name and the call that returned it."""

    def __init__(self, message: str, *, code: int = 0, name: str = "", call: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.name = name
        self.call = call


class DeviceError(_CodedError):
    """A call of the device's runtime failed."""


class NcclError(_CodedError):
    """A call of NCCL failed."""


class MpiError(_CodedError):
    """A call of MPI failed."""


class CommTimeoutError(NcclCommError, TimeoutError):
    """A call did not complete within its time limit."""

    def __init__(self, message: str, *, timeout_s: float = 0.0) -> None:
        super().__init__(message)
        self.timeout_s = timeout_s


class ClosedError(NcclCommError):
    """The object was closed by this program before the call."""


class AbortedError(NcclCommError):
    """Another rank aborted the communicator."""
