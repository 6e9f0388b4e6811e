"""The collectives that the benchmark knows: one entry each, over ranks and in one process.

A new collective adds itself with an entry here, and a method of its name to each peer that has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

from ncclcomm import comm as in_process
from ncclcomm.bench.stats import bus_of_all_reduce, bus_of_parts, bus_of_whole

if TYPE_CHECKING:
    from ncclcomm.bench.case import Case

__all__ = ["DEVICE_OPS", "RANK_OPS", "Op", "Share"]


class Share(Enum):
    """What each member, a rank or a device, sends or gets of the row's array."""

    NONE = "nothing"
    WHOLE_ROOT = "the root all of it"
    WHOLE_OTHERS = "all of it, but for the root"
    WHOLE_EACH = "each all of it"
    PART_EACH = "each an equal part"

    def count(self, whole: int, member: int, root: int, size: int) -> int:
        """How many elements a member sends or gets; -1 where it takes no part.

        Args:
            whole: elements of the row's array, a multiple of `size`.
            member: the rank or device.
            root: the root of the call.
            size: how many members there are.
        """
        if self is Share.PART_EACH:
            return whole // size
        takes_part = {Share.WHOLE_EACH: True, Share.WHOLE_ROOT: member == root, Share.WHOLE_OTHERS: member != root}
        return whole if takes_part.get(self, False) else -1


@dataclass(frozen=True)
class Op:
    """A collective."""

    name: str
    sends: Share
    gets: Share
    bus: Callable[[int], float]
    """nccl-tests' factor from algbw to busbw, of the number of members."""
    ours: Callable[[Any, Case], Callable[[], Any]]
    """ncclcomm's own call, ready to be timed, of a Communicator (None in one process) and a case."""
    reduction: str | None = None
    """What it does to the data: '*' whatever --op says, or the one reduction that it has; None: it only moves it."""
    keeps: bool = False
    """Where results are fresh the root's own one is its input, or a part of it: nothing is copied there."""

    @property
    def reduces(self) -> bool:
        """True if it combines the members' data."""
        return self.reduction is not None

    @property
    def rooted(self) -> bool:
        """True if it has a root."""
        return bool({self.sends, self.gets} & {Share.WHOLE_ROOT, Share.WHOLE_OTHERS})

    @property
    def split(self) -> bool:
        """True if the array is cut into equal parts, so that its count is a multiple of the number of members."""
        return Share.PART_EACH in (self.sends, self.gets)

    @property
    def moves(self) -> bool:
        """False of a barrier, which has no size."""
        return self.sends is not Share.NONE

    def reductions(self, asked: tuple[str, ...]) -> tuple[str, ...]:
        """The reductions to time it with, of those that were asked for."""
        return asked if self.reduction == "*" else (self.reduction or "",)


def _broadcast(comm: Any, case: Case) -> Callable[[], Any]:
    """The header form where results are fresh: receivers know nothing of the array."""
    if case.fresh:
        return partial(comm.broadcast, case.send, root=case.root)
    return partial(comm.broadcast, out=case.recv if case.send is None else case.send, root=case.root)


def _scatter(comm: Any, case: Case) -> Callable[[], Any]:
    return partial(comm.scatter, case.send, root=case.root, **case.out())


def _gather(comm: Any, case: Case) -> Callable[[], Any]:
    return partial(comm.gather, case.send, root=case.root, **case.out())


def _reduce(comm: Any, case: Case) -> Callable[[], Any]:
    return partial(comm.reduce, case.send, op=case.reduction, root=case.root, **case.out())


def _reduce_add(comm: Any, case: Case) -> Callable[[], Any]:
    return partial(comm.reduce_add, case.send, root=case.root, **case.out())


def _all_reduce(comm: Any, case: Case) -> Callable[[], Any]:
    return partial(comm.all_reduce, case.send, op=case.reduction, **case.out())


def _barrier(comm: Any, case: Case) -> Callable[[], Any]:
    barrier: Callable[[], Any] = comm.barrier
    return barrier


RANK_OPS = {
    op.name: op
    for op in (
        Op("broadcast", Share.WHOLE_ROOT, Share.WHOLE_OTHERS, bus_of_whole, _broadcast),
        Op("scatter", Share.WHOLE_ROOT, Share.PART_EACH, bus_of_parts, _scatter),
        Op("gather", Share.PART_EACH, Share.WHOLE_ROOT, bus_of_parts, _gather),
        Op("reduce", Share.WHOLE_EACH, Share.WHOLE_ROOT, bus_of_whole, _reduce, "*"),
        Op("reduce_add", Share.WHOLE_EACH, Share.WHOLE_ROOT, bus_of_whole, _reduce_add, "sum"),
        Op("all_reduce", Share.WHOLE_EACH, Share.WHOLE_EACH, bus_of_all_reduce, _all_reduce, "*"),
        Op("barrier", Share.NONE, Share.NONE, bus_of_whole, _barrier),
    )
}
"""Over ranks: a member is a rank."""


def _broadcast_devices(_: Any, case: Case) -> Callable[[], Any]:
    source = case.sends[case.root]
    if case.fresh:
        return partial(in_process.broadcast, source, case.members)
    return partial(in_process.broadcast, source, out=case.recvs)


def _scatter_devices(_: Any, case: Case) -> Callable[[], Any]:
    source = case.sends[case.root]
    if case.fresh:
        return partial(in_process.scatter, source, case.members)
    return partial(in_process.scatter, source, out=case.recvs)


def _gather_devices(_: Any, case: Case) -> Callable[[], Any]:
    if case.fresh:
        return partial(in_process.gather, case.sends, destination=case.root)
    return partial(in_process.gather, case.sends, out=case.recvs[case.root])


def _reduce_add_devices(_: Any, case: Case) -> Callable[[], Any]:
    return partial(in_process.reduce_add, case.sends, destination=case.root)


def _all_reduce_devices(_: Any, case: Case) -> Callable[[], Any]:
    return partial(in_process.all_reduce, case.sends, case.reduction, **_outs(case))


def _all_gather_devices(_: Any, case: Case) -> Callable[[], Any]:
    return partial(in_process.all_gather, case.sends, **_outs(case))


def _reduce_scatter_devices(_: Any, case: Case) -> Callable[[], Any]:
    return partial(in_process.reduce_scatter, case.sends, case.reduction, **_outs(case))


def _outs(case: Case) -> dict[str, Any]:
    """The argument `out` of in-process calls that give every device a result."""
    return {} if case.fresh else {"out": case.recvs}


DEVICE_OPS = {
    op.name: op
    for op in (
        Op("broadcast", Share.WHOLE_ROOT, Share.WHOLE_EACH, bus_of_whole, _broadcast_devices, keeps=True),
        Op("scatter", Share.WHOLE_ROOT, Share.PART_EACH, bus_of_parts, _scatter_devices, keeps=True),
        Op("gather", Share.PART_EACH, Share.WHOLE_ROOT, bus_of_parts, _gather_devices),
        Op("reduce_add", Share.WHOLE_EACH, Share.WHOLE_ROOT, bus_of_whole, _reduce_add_devices, "sum"),
        Op("all_reduce", Share.WHOLE_EACH, Share.WHOLE_EACH, bus_of_all_reduce, _all_reduce_devices, "*"),
        Op("all_gather", Share.PART_EACH, Share.WHOLE_EACH, bus_of_parts, _all_gather_devices),
        Op("reduce_scatter", Share.WHOLE_EACH, Share.PART_EACH, bus_of_parts, _reduce_scatter_devices, "*"),
    )
}
"""In one process: a member is a device."""
