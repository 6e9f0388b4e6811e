"""What a rank says of its call, as a few bytes: most fit a record of fixed size, which one exchange carries."""

from __future__ import annotations

import functools
import marshal
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Statement", "decode", "dtype_code", "dtype_of", "encode"]

_MARSHAL_VERSION = 2
"""Later versions write equal values in different bytes, by how often an object is referred to."""


@dataclass(frozen=True)
class Statement:
    """What one rank says of its call.

    Values are Python's own str, int, bool, None and tuples of them, with dtypes as their codes: a number of NumPy's
    would arrive as bytes.
    """

    call: str
    number: int
    """How many calls of this communicator came before it."""
    same: Mapping[str, Any] = field(default_factory=dict)
    """What must be equal on all ranks, by the names that messages use."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """What may differ, and others need to know."""
    error: tuple[str, str] | None = None
    """Class and message of what is wrong with this rank's arguments."""


def encode(statement: Statement) -> bytes:
    """The statement's bytes; equal statements have equal ones."""
    whole: Any = (statement.call, statement.number, statement.same, statement.own, statement.error)
    return marshal.dumps(whole, _MARSHAL_VERSION)


def decode(data: bytes) -> Statement:
    """The statement that a rank encoded."""
    return Statement(*marshal.loads(data))


@functools.lru_cache(maxsize=1024)
def dtype_code(dtype: np.dtype[Any]) -> str | bytes:
    """A plain value that stands for a dtype: its name where that is enough, else its pickle."""
    is_numpys_own = dtype.isbuiltin != 2 and dtype.names is None and dtype.subdtype is None
    return str(dtype) if is_numpys_own else pickle.dumps(dtype)


@functools.lru_cache(maxsize=1024)
def dtype_of(code: str | bytes) -> np.dtype[Any]:
    """The dtype that a code stands for."""
    return np.dtype(code) if isinstance(code, str) else pickle.loads(code)
