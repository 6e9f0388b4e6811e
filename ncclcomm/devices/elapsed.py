"""What `elapsed_time` says of events that have no time between them; the same words on every backend."""

from __future__ import annotations

from ncclcomm.errors import ArgumentError

__all__ = ["no_timing", "not_complete", "not_recorded", "two_devices"]


def no_timing(which: str) -> ArgumentError:
    """The error for the `which` ('start' or 'end') event, made without timing."""
    return ArgumentError(f"elapsed_time: the {which} event measures no time; make it with Event(enable_timing=True)")


def not_recorded(which: str) -> ArgumentError:
    """The error for the `which` ('start' or 'end') event, never recorded."""
    return ArgumentError(f"elapsed_time: the {which} event was never recorded; call its record() on a stream first")


def two_devices(start: int | None, end: int | None) -> ArgumentError:
    """The error for events of two devices, whose clocks are not one."""
    return ArgumentError(
        f"elapsed_time: the start event was recorded on device {start} and the end event on device {end}; "
        "record both on streams of one device"
    )


def not_complete(which: str) -> ArgumentError:
    """The error for the `which` ('start' or 'end') event, whose mark is not reached yet."""
    return ArgumentError(
        f"elapsed_time: the {which} event is not complete, its stream still has work before it; "
        "call its synchronize() first"
    )
