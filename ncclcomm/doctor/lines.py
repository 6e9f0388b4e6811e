"""A line of the report."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FAIL", "NOT_CHECKED", "PASS", "WARN", "Line", "failed", "not_checked", "passed", "warned"]

PASS, WARN, FAIL, NOT_CHECKED = "pass", "warn", "fail", "not checked"


@dataclass(frozen=True)
class Line:
    """One thing that was looked at."""

    id: str
    """Its name, which stays the same from version to version."""
    status: str
    """PASS, WARN, FAIL or NOT_CHECKED."""
    found: str
    """What was found, or why it was not looked at; one line."""
    mend: str = ""
    """What to type or to set; '' where there is nothing to mend."""


def passed(name: str, found: str) -> Line:
    """A line for what is as it should be."""
    return Line(name, PASS, found)


def warned(name: str, found: str, mend: str) -> Line:
    """A line for what works, and may be slow or not what was meant."""
    return Line(name, WARN, found, mend)


def failed(name: str, found: str, mend: str) -> Line:
    """A line for what keeps a program from running, or from being right."""
    return Line(name, FAIL, found, mend)


def not_checked(name: str, why: str, mend: str = "") -> Line:
    """A line for what could not be looked at."""
    return Line(name, NOT_CHECKED, why, mend)
