"""Broadcast over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ncclcomm.arrays import HOST_MEMORY, View, check_out, view
from ncclcomm.communicator.agree import Facts, agree, check_after_header, check_root, facts_of, fit_in_words
from ncclcomm.communicator.buffers import Target, settled_flat, target_for
from ncclcomm.communicator.checks import raise_mismatch
from ncclcomm.communicator.wire import dtype_of
from ncclcomm.errors import ArgumentError

if TYPE_CHECKING:
    from ncclcomm.communicator.communicator import Communicator

__all__ = ["broadcast"]


class _Local(NamedTuple):
    """This rank's arguments."""

    array: View | None
    root: int
    flat: Any
    """On the root, the array, flat."""
    target: Target | None
    """On another rank, what its own array gives, or None where the header must come first."""


def broadcast(comm: Communicator, array: Any, root: Any, out: Any) -> Any:
    """See Communicator.broadcast."""
    header = out is None

    def validate() -> Facts[_Local]:
        """Look at this rank's arguments."""
        rank = check_root(root, comm.size, "broadcast")
        if out is not None and array is not None:
            raise ArgumentError("broadcast: pass the array, or out on every rank (the root included), not both")
        given = out if array is None else array
        found = None if given is None else view(given, "broadcast: array")
        if found is None and rank == comm.rank:
            raise ArgumentError("broadcast: the root's array is None; the root must pass the array to broadcast")
        if found is not None and rank != comm.rank:
            check_out(found, found.data.shape, found.data.dtype, "broadcast: array")
        own = {} if found is None else facts_of(found)
        form = "array (a header goes first)" if header else "out= (no header)"
        same = {"root": rank, "form of the call": form, **({} if header else own)}
        flat = target = None
        if found is not None and rank == comm.rank:
            flat = settled_flat(comm, found)
        elif found is not None:
            target = target_for(comm, found.data.shape, found.data.dtype, found.device, found)
        return Facts(_Local(found, rank, flat, target), same, own)

    local, facts = agree(comm, "broadcast", validate, "root" if header else "none", root)
    if header:
        check_after_header(comm, lambda: _check_receivers(comm, facts, local.root))
    comm._commit()
    if comm.rank == local.root:
        assert local.array is not None
        comm._engine(local.array.device).broadcast(local.flat, local.root)
        return local.array.obj
    target = local.target
    if target is None:
        sent = facts[local.root]
        device = HOST_MEMORY if sent["memory kind"] == "host memory" else comm.device
        target = target_for(comm, sent["shape"], dtype_of(sent["dtype"]), device)
    comm._engine(target.near.device).broadcast(target.flat, local.root)
    return target.finish()


def _check_receivers(comm: Communicator, facts: list[Mapping[str, Any]], root: int) -> None:
    """Raise where a receiver's array can't take the root's; on every rank whose exchange told it."""
    if any(own and own != facts[root] for own in facts):
        shown = [fit_in_words((own["shape"], own["dtype"], own["memory kind"])) if own else "None" for own in facts]
        raise_mismatch(
            comm.topology,
            comm.rank,
            f"broadcast: a receiver's array doesn't fit the root's (root {root})",
            shown,
            "A receiver passes None, or an array like the root's to be filled.",
        )
