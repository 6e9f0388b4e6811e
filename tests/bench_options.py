"""Options of `ncclcomm bench` for tests, without a command line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ncclcomm.bench.options import Options

__all__ = ["options"]

DEFAULTS = {
    "ops": [],
    "begin": "8",
    "end": "1G",
    "factor": "4",
    "dtype": "float32",
    "op": "sum",
    "iters": "auto",
    "rounds": "auto",
    "warmup": "3",
    "check": True,
    "root": "0",
    "out": True,
    "in_process": False,
    "devices": None,
    "against": "",
    "json": None,
    "plot": None,
}


def options(**changed: Any) -> Options:
    """Options of a command line that differs from the defaults."""
    return Options.of(SimpleNamespace(**{**DEFAULTS, **changed}))
