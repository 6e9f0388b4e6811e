"""Arrays of a library that ncclcomm doesn't know, which export their memory by DLPack."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np

__all__ = ["Array", "Exporter"]


class Exporter:
    """An array of a library that only exports."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


class Array(Exporter):
    """An array that names its library, which a test puts among the modules."""

    def __array_namespace__(self, *, api_version: str | None = None) -> ModuleType:
        return sys.modules["arrays_of_a_test"]
