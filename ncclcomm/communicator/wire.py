"""What a rank says of its call, as a few bytes: most fit a record of fixed size, which one exchange carries."""

from __future__ import annotations

import functools
import marshal
import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = [
    "MOST_PAYLOAD_BYTES",
    "Statement",
    "decode",
    "dtype_code",
    "dtype_of",
    "encode",
    "header_of",
    "said_by",
    "split_header",
    "statement_of",
]

MOST_PAYLOAD_BYTES = 256
"""Data that go behind a header: with most headers they fit one record."""

_MARSHAL_VERSION = 2
"""Later versions write equal values in different bytes, by how often an object is referred to."""


_PICKLE_PROTOCOL = 4
_PICKLE, _LAYOUT = b"p", b"l"
_OF_ANOTHER_PACKAGE = 2
"""What dtype.isbuiltin says of a dtype such as bfloat16, whose name means nothing until its package is imported."""


@dataclass(slots=True)
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


_FRONT = struct.Struct("<QI")
"""In front of a header: the call's number, and how many bytes there are before the payload."""


def said_by(statement: Statement) -> bytes:
    """What a statement says besides its number: calls like each other say the same bytes."""
    whole: Any = (statement.call, statement.same, statement.own, statement.error)
    return marshal.dumps(whole, _MARSHAL_VERSION)


def header_of(number: int, said: bytes, payload: bytes = b"") -> bytes:
    """A call's number, what is said of it, and data behind that."""
    return _FRONT.pack(number, len(said)) + said + payload


def split_header(header: bytes) -> tuple[int, bytes, bytes]:
    """The number, what is said, and the data of a header."""
    number, length = _FRONT.unpack_from(header)
    end = _FRONT.size + length
    return number, header[_FRONT.size : end], header[end:]


def statement_of(number: int, said: bytes) -> Statement:
    """The statement that a rank made."""
    call, same, own, error = _read(said)
    return Statement(call, number, same, own, error)


@functools.lru_cache(maxsize=256)
def _read(said: bytes) -> Any:
    """What was said, in values; a program's calls say few things again and again."""
    return marshal.loads(said)


@functools.lru_cache(maxsize=1024)
def dtype_code(dtype: np.dtype[Any]) -> str | bytes:
    """A plain value that stands for a dtype; equal dtypes have equal ones, however they were made."""
    if dtype.names is not None or dtype.subdtype is not None:
        return _LAYOUT + marshal.dumps(_layout(dtype), _MARSHAL_VERSION)
    return _PICKLE + pickle.dumps(dtype, _PICKLE_PROTOCOL) if dtype.isbuiltin == _OF_ANOTHER_PACKAGE else str(dtype)


@functools.lru_cache(maxsize=1024)
def dtype_of(code: str | bytes) -> np.dtype[Any]:
    """The dtype that a code stands for."""
    if isinstance(code, str):
        return np.dtype(code)
    if code[:1] == _PICKLE:
        found: np.dtype[Any] = pickle.loads(code[1:])
        return found
    return _laid_out(marshal.loads(code[1:]))


def _layout(dtype: np.dtype[Any]) -> Any:
    """What makes a dtype equal to another one: of a pickle that can't be said."""
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return "array", _layout(base), shape
    if dtype.names is None or dtype.fields is None:
        return dtype_code(dtype)
    fields = [(name, *dtype.fields[name]) for name in dtype.names]
    return "struct", tuple((name, _layout(kind), *rest) for name, kind, *rest in fields), dtype.itemsize


def _laid_out(layout: Any) -> np.dtype[Any]:
    """The dtype of a layout."""
    if not isinstance(layout, tuple):
        return dtype_of(layout)
    if layout[0] == "array":
        return np.dtype((_laid_out(layout[1]), layout[2]))
    _, fields, itemsize = layout
    parts: Any = {
        "names": [name for name, *_ in fields],
        "formats": [_laid_out(kind) for _, kind, *_ in fields],
        "offsets": [offset for _, _, offset, *_ in fields],
        "itemsize": itemsize,
    }
    if any(len(field) > 3 for field in fields):
        parts["titles"] = [field[3] if len(field) > 3 else None for field in fields]
    made: np.dtype[Any] = np.dtype(parts)
    return made
