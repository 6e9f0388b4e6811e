"""The buffers of one row, and what must be in them after a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import ncclcomm
from ncclcomm.bench import patterns
from ncclcomm.bench.ops import Op, Share
from ncclcomm.bench.patterns import Piece, Wrong

__all__ = ["Buffers", "Case", "Row", "bytes_needed"]


@dataclass(frozen=True)
class Row:
    """What a row of the table times, apart from who does it."""

    op: Op
    dtype: np.dtype[Any]
    reduction: str
    """'' where data is only moved."""
    count: int
    """Elements of the whole array; 0 of a barrier."""
    size: int
    """Number of members: ranks, or devices of one process."""
    roots: tuple[int, ...]
    """The roots of the rounds, in turn."""

    @classmethod
    def of(cls, op: Op, dtype: np.dtype[Any], reduction: str, nbytes: int, size: int, root: int | None) -> Row:
        """The row nearest to a size: whole elements, and as many for each member where the array is cut.

        Args:
            op: the collective.
            dtype: the dtype.
            reduction: '' where data is only moved.
            nbytes: the size asked for.
            size: number of members.
            root: None: every member in turn.
        """
        count = -(-nbytes // dtype.itemsize) if op.moves else 0
        if op.split:
            count = -(-count // size) * size
        roots = (0,) if not op.rooted else tuple(range(size)) if root is None else (root,)
        return cls(op, dtype, reduction, count, size, roots)

    @property
    def nbytes(self) -> int:
        """The size that nccl-tests would show."""
        return self.count * self.dtype.itemsize


@dataclass(frozen=True)
class Case:
    """A row with one root: the buffers as the call takes them, one entry for each member that this process is."""

    row: Row
    root: int
    members: tuple[int, ...]
    sends: tuple[Any, ...]
    """None where a member sends nothing."""
    recvs: tuple[Any, ...]
    """None where a member gets nothing."""
    fresh: bool
    """ncclcomm's calls make their results; peers fill `recvs` even so, where they can."""

    @property
    def reduction(self) -> str:
        """The reduction's name."""
        return self.row.reduction

    @property
    def send(self) -> Any:
        """What this rank sends; over ranks, where a process is one member."""
        return self.sends[0]

    @property
    def recv(self) -> Any:
        """Where this rank's result goes; over ranks."""
        return self.recvs[0]

    def for_peers(self) -> Case:
        """The case as peers have it: they copy nothing on the root where ncclcomm's call copies nothing there."""
        if not (self.fresh and self.row.op.keeps):
            return self
        pairs = zip(self.members, self.recvs, strict=True)
        return replace(self, recvs=tuple(None if member == self.root else recv for member, recv in pairs))

    def out(self) -> dict[str, Any]:
        """The argument `out` of ncclcomm's calls over ranks."""
        return {} if self.fresh or self.recv is None else {"out": self.recv}

    def results(self, returned: Any) -> tuple[Any, ...]:
        """The results in the order of the members, of what a call of ncclcomm returned in place of filling `recvs`."""
        if len(self.members) == 1:
            single = returned[0] if isinstance(returned, (tuple, list)) else returned
            return (None if self.recv is None else single,)
        if self.row.op.gets is Share.WHOLE_ROOT:
            return tuple(returned if member == self.root else None for member in self.members)
        return tuple(returned)

    def expected(self, member: int) -> list[Piece]:
        """What a member must have got."""
        row, size = self.row, self.row.size
        part = row.count // size
        start, count = (member * part, part) if row.op.gets is Share.PART_EACH else (0, row.count)
        if row.op.reduces:
            return [Piece(patterns.reduced(row.dtype, row.reduction, size), start, count, exact_bits=False)]
        if row.op.sends is Share.WHOLE_ROOT:
            return [Piece(self._sent(self.root), start, count, exact_bits=True)]
        # What gathers takes the start of each member's array; what exchanges takes this member's part of it.
        start = 0 if row.op.sends is Share.PART_EACH else member * part
        return [Piece(self._sent(source), start, part, exact_bits=True) for source in range(size)]

    def _sent(self, member: int) -> np.ndarray[Any, Any]:
        """A period of what a member sends."""
        return patterns.sent(self.row.dtype, self.row.reduction, member, self.row.size)

    def first_wrong(self, results: Sequence[Any]) -> tuple[int, Wrong] | None:
        """The first member of this process whose result, or input, is not what it must be, and the element.

        Args:
            results: one for each member here, as arrays; None where a member gets nothing.
        """
        for member, send, recv, result in zip(self.members, self.sends, self.recvs, results, strict=True):
            if recv is not None:
                if result is None:
                    return member, Wrong(0, "a result", "None")
                wrong = patterns.first_wrong(result.reshape(-1), self.expected(member), ncclcomm.to_numpy)
                if wrong is not None:
                    return member, wrong
            if send is not None:
                kept = [Piece(self._sent(member), 0, send.size, exact_bits=True)]
                wrong = patterns.first_wrong(send, kept, ncclcomm.to_numpy)
                if wrong is not None:
                    return member, wrong._replace(expected=f"its input unchanged, {wrong.expected}")
        return None

    def poison(self) -> None:
        """Make results of an earlier call wrong."""
        for recv in self.recvs:
            if recv is not None:
                patterns.poison(recv, _write)


def _write(part: Any, block: np.ndarray[Any, Any]) -> None:
    """Write a NumPy array into a slice of an array of any memory."""
    device = ncclcomm.device_index(part)
    if device < 0:
        part[...] = block
        return
    with ncclcomm.device(device):
        part[...] = ncclcomm.asarray(block, device=device)


class Buffers:
    """A row's arrays, made and filled before anything is timed.

    Args:
        row: the row.
        members: the members that this process is.
        devices: where each of them has its arrays: a device number, or 'cpu'.
        fresh: ncclcomm's calls make their results.
    """

    def __init__(self, row: Row, members: Sequence[int], devices: Sequence[Any], fresh: bool) -> None:
        self.row = row
        self.members = tuple(members)
        self._fresh = fresh
        self._sends, self._recvs = [], []
        for member, device in zip(self.members, devices, strict=True):
            send = self._array(row.op.sends, member, device)
            if send is not None:
                patterns.fill(send, patterns.sent(row.dtype, row.reduction, member, row.size), _write)
            self._sends.append(send)
            self._recvs.append(self._array(row.op.gets, member, device))

    def _array(self, share: Share, member: int, device: Any) -> Any:
        """An array for what a member sends or gets with any of the row's roots; None if with none of them."""
        count = max(share.count(self.row.count, member, root, self.row.size) for root in self.row.roots)
        return None if count < 0 else ncclcomm.empty(count, self.row.dtype, device)

    def case(self, root: int) -> Case:
        """The row with one of its roots."""
        row = self.row

        def of(arrays: list[Any], share: Share) -> tuple[Any, ...]:
            counts = [share.count(row.count, member, root, row.size) for member in self.members]
            return tuple(None if count < 0 else array for array, count in zip(arrays, counts, strict=True))

        return Case(row, root, self.members, of(self._sends, row.op.sends), of(self._recvs, row.op.gets), self._fresh)


def bytes_needed(row: Row, members: Sequence[int], fresh: bool) -> int:
    """Bytes that this process holds at a row's worst: its buffers, a fresh result, what the call itself makes.

    Args:
        row: the row.
        members: the members that this process is.
        fresh: ncclcomm's calls make their results.
    """
    total = 0
    for member in members:
        sends, gets = (
            max(0, *(share.count(row.count, member, root, row.size) for root in row.roots))
            for share in (row.op.sends, row.op.gets)
        )
        total += sends + gets * (2 if fresh else 1) + (row.count if row.op.reduces else 0)
    return total * row.dtype.itemsize
