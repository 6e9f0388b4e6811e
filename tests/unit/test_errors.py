"""Every error has the one root, and the built-in class that callers of torch, NumPy or MPI would catch."""

from __future__ import annotations

import pickle

import pytest

import ncclcomm
from ncclcomm import errors

BUILT_IN = {
    "NcclCommError": RuntimeError,
    "ArgumentError": ValueError,
    "ArgumentIndexError": IndexError,
    "MismatchError": RuntimeError,
    "UnsupportedError": TypeError,
    "BackendUnavailableError": RuntimeError,
    "DeviceError": RuntimeError,
    "NcclError": RuntimeError,
    "MpiError": RuntimeError,
    "CommTimeoutError": TimeoutError,
    "ClosedError": RuntimeError,
    "AbortedError": RuntimeError,
}


@pytest.mark.parametrize("name", BUILT_IN)
def test_classes(name: str) -> None:
    error = getattr(errors, name)
    assert issubclass(error, (errors.NcclCommError, RuntimeError))
    assert issubclass(error, BUILT_IN[name])
    assert getattr(ncclcomm, name) is error
    assert str(error("what went wrong")) == "what went wrong"


def test_all_are_listed() -> None:
    assert set(errors.__all__) == set(BUILT_IN)
    assert issubclass(errors.ArgumentIndexError, errors.ArgumentError)


@pytest.mark.parametrize("name", ["DeviceError", "NcclError", "MpiError"])
def test_codes(name: str) -> None:
    error = getattr(errors, name)("failed", code=3, name="internal error", call="ncclAllReduce")
    assert (error.code, error.name, error.call) == (3, "internal error", "ncclAllReduce")
    bare = getattr(errors, name)("failed")
    assert (bare.code, bare.name, bare.call) == (0, "", "")


def test_timeout() -> None:
    assert errors.CommTimeoutError("late", timeout_s=2.5).timeout_s == 2.5


@pytest.mark.parametrize("name", BUILT_IN)
def test_pickled(name: str) -> None:
    error = pickle.loads(pickle.dumps(getattr(errors, name)("what went wrong")))
    assert type(error) is getattr(errors, name)
    assert str(error) == "what went wrong"
