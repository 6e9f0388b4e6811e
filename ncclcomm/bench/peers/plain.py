"""NumPy's own copies and sums, the floor of the in-process calls on virtual devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ncclcomm.bench.case import Case
from ncclcomm.bench.peers.base import Absent, Peer
from ncclcomm.reductions import ufunc_for

if TYPE_CHECKING:
    from ncclcomm.bench.group import Group

__all__ = ["RawNumpy"]

Call = Callable[[], Any]


def _plain(arrays: Any) -> list[Any]:
    """The arrays as NumPy has them, without their device."""
    return [None if array is None else array.view(np.ndarray) for array in arrays]


class RawNumpy(Peer):
    """numpy.copyto and numpy.add with nothing around them."""

    name = "raw"

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        if group.on_gpus or group.comm is not None:
            raise Absent("it is timed on virtual devices of one process")

    def _broadcast(self, case: Case) -> Call:
        source = _plain(case.sends)[case.root]
        targets = [target for target in _plain(case.recvs) if target is not None]

        def broadcast() -> None:
            for target in targets:
                np.copyto(target, source)

        return broadcast

    def _scatter(self, case: Case) -> Call:
        source, targets = _plain(case.sends)[case.root], _plain(case.recvs)
        parts = zip(targets, np.split(source, len(targets)), strict=True)
        pairs = [(target, part) for target, part in parts if target is not None]

        def scatter() -> None:
            for target, part in pairs:
                np.copyto(target, part)

        return scatter

    def _gather(self, case: Case) -> Call:
        parts, target = _plain(case.sends), _plain(case.recvs)[case.root]
        pairs = list(zip(np.split(target, len(parts)), parts, strict=True))

        def gather() -> None:
            for place, part in pairs:
                np.copyto(place, part)

        return gather

    def _reduce_add(self, case: Case) -> Call:
        arrays, target = _plain(case.sends), _plain(case.recvs)[case.root]
        add = np.logical_or if case.row.dtype.kind == "b" else np.add
        first, rest = arrays[0], arrays[1:]

        def reduce_add() -> None:
            np.copyto(target, first)
            for array in rest:
                add(target, array, out=target)

        return reduce_add

    def _all_reduce(self, case: Case) -> Call:
        arrays, targets = _plain(case.sends), _plain(case.recvs)
        first, rest = targets[0], targets[1:]
        reduce = _reduction(case)

        def all_reduce() -> None:
            reduce(first, arrays)
            for target in rest:
                np.copyto(target, first)

        return all_reduce

    def _all_gather(self, case: Case) -> Call:
        parts, targets = _plain(case.sends), _plain(case.recvs)
        pairs = [pair for target in targets for pair in zip(np.split(target, len(parts)), parts, strict=True)]

        def all_gather() -> None:
            for place, part in pairs:
                np.copyto(place, part)

        return all_gather

    def _reduce_scatter(self, case: Case) -> Call:
        arrays, targets = _plain(case.sends), _plain(case.recvs)
        chunks = [list(parts) for parts in zip(*(np.split(array, len(targets)) for array in arrays), strict=True)]
        pairs = list(zip(targets, chunks, strict=True))
        reduce = _reduction(case)

        def reduce_scatter() -> None:
            for target, parts in pairs:
                reduce(target, parts)

        return reduce_scatter


def _reduction(case: Case) -> Callable[[Any, list[Any]], None]:
    """NumPy's calls for a row's reduction: of arrays into a target."""
    average = case.reduction == "avg"
    func = ufunc_for("sum" if average else case.reduction, case.row.dtype)
    divisor = case.row.dtype.type(case.row.size)

    def reduce(target: Any, arrays: list[Any]) -> None:
        np.copyto(target, arrays[0])
        for array in arrays[1:]:
            func(target, array, out=target)
        if average:
            np.divide(target, divisor, out=target)

    return reduce
