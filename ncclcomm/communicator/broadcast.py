"""Broadcast over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ncclcomm.arrays import HOST_MEMORY, View, check_out, kind_named, view
from ncclcomm.communicator.agree import (
    Facts,
    agree,
    agree_with_root,
    check_after_header,
    check_root,
    facts_of,
    fit_in_words,
)
from ncclcomm.communicator.buffers import Target, fill, payload_of, settled_flat, target_for
from ncclcomm.communicator.call import begin, end, in_call
from ncclcomm.communicator.checks import raise_mismatch
from ncclcomm.communicator.quick import MISSED, fill_whole, is_plain_dtype
from ncclcomm.communicator.wire import dtype_of, header_of, split_header
from ncclcomm.errors import ArgumentError

if TYPE_CHECKING:
    from ncclcomm.communicator.communicator import Communicator
    from ncclcomm.communicator.quick import Quick

__all__ = ["broadcast"]

_CALL = "broadcast"


class _Local(NamedTuple):
    """This rank's arguments."""

    array: View | None
    root: int
    flat: Any
    """On the root, the array, flat."""
    target: Target | None
    """On another rank, what its own array gives, or None where the header must come first."""


def broadcast(comm: Communicator, array: Any, root: Any, out: Any, timeout_s: float | None) -> Any:
    """See Communicator.broadcast."""
    quick = comm._quick
    key = None
    if quick is not None and quick.serves(comm, root, timeout_s):
        given = out if array is None else array
        if given is not None and not (
            (quick.takes(given) if root == comm.rank else quick.takes_out(given)) and is_plain_dtype(given.dtype)
        ):
            pass
        elif out is None:
            key = (_CALL, root) if array is None else (_CALL, root, type(array), array.dtype, array.shape)
            done = _broadcast_quickly(comm, quick, key, array, root, timeout_s)
            if done is not MISSED:
                return done
        elif array is None:
            return _fill_quickly(comm, quick, out, root)
    gpu = comm._quick_gpu
    if gpu is not None and array is None and timeout_s is None and comm._entry is None and not gpu.is_over():
        done = gpu.fill(comm, out, root)
        if done is not MISSED:
            return done
    return _broadcast(comm, key, array, root, out, timeout_s)


def _broadcast(comm: Communicator, key: Any, array: Any, root: Any, out: Any, timeout_s: float | None) -> Any:
    """The long way; the short one learns from it what fits a key."""

    def body() -> Any:
        if out is not None:
            local, _ = agree(comm, _CALL, lambda: _validate(comm, array, root, out))
            return _move(comm, local, local.target)
        local, facts, told = agree_with_root(comm, _CALL, lambda: _validate(comm, array, root, None), root)
        check_after_header(comm, lambda: _check_receivers(comm, facts, local.root))
        target = local.target
        if target is None and comm.rank != local.root:
            sent = facts[local.root]
            device = HOST_MEMORY if sent["memory kind"] == "host memory" else comm.device
            target = target_for(
                comm, sent["shape"], dtype_of(sent["dtype"]), device, None, kind_named(sent.get("kind"), device)
            )
        result = _move(comm, local, target, told.payload)
        if key is not None and told.said:
            _learn(comm, key, told.said, target)
        return result

    return in_call(comm, _CALL, (array, out), timeout_s, body)


def _learn(comm: Communicator, key: Any, said: bytes, target: Target | None) -> None:
    """Have the short way know a call like this one."""
    quick = comm._quick
    if quick is None:
        return
    if target is None:
        quick.learn(key, said)
    elif target.kind is None and (comm.backend == "host" or target.near.device == HOST_MEMORY):
        data = target.near.data
        if data.size and quick.fits(data.size, data.dtype):
            quick.learn((key, said), (tuple(data.shape), data.dtype, target.near.device))


def _broadcast_quickly(
    comm: Communicator, quick: Quick, key: Any, array: Any, root: int, timeout_s: float | None
) -> Any:
    """Broadcast with a header, where one like it is known."""
    if root == comm.rank and (array is None or (comm.size > 1 and key not in quick.known)):
        return MISSED
    result = array
    try:
        begin(comm, _CALL, (array, None), None)
        number = comm._calls
        comm._calls = number + 1
        if root != comm.rank:
            header = comm._control.broadcast_bytes(b"", root)
            other, said, payload = split_header(header)
            made_of = quick.known.get((key, said)) if other == number else None
            if made_of is None:
                comm._received, comm._calls = header, number
                return _broadcast(comm, key, array, root, None, timeout_s)
            comm._committed = True
            if array is None:
                result = quick.empty(*made_of)
            if payload:
                fill_whole(result, payload)
            else:
                quick.bcast((result, result.nbytes, quick.byte), root)
        elif comm.size > 1:
            payload = payload_of(comm, array)
            comm._control.broadcast_bytes(header_of(number, quick.known[key], payload), root)
            if not payload:
                comm._committed = True
                quick.bcast((array, array.nbytes, quick.byte), root)
        end(comm, None, None)
    except BaseException as error:  # whatever it is, the others may wait for this rank now
        quick.fail(comm, error)
    return result


def _fill_quickly(comm: Communicator, quick: Quick, out: Any, root: int) -> Any:
    """Fill an array that MPI can be given as it is with the root's."""
    try:
        begin(comm, _CALL, (None, out), None)
        comm._calls += 1
        comm._committed = True
        quick.bcast((out, out.nbytes, quick.byte), root)
        end(comm, None, None)
    except BaseException as error:  # whatever it is, the others may wait for this rank now
        quick.fail(comm, error)
    return out


def _move(comm: Communicator, local: _Local, target: Target | None, payload: bytes = b"") -> Any:
    """Give the root's elements to every rank's target; `payload`: those that went with the header."""
    comm._committed = True
    if target is None:
        assert local.array is not None
        if not payload:
            comm._engine(local.array.device).broadcast(local.flat, local.root)
        return local.array.obj
    if payload:
        fill(target.flat, payload)
    else:
        comm._engine(target.near.device).broadcast(target.flat, local.root)
    return target.finish()


def _validate(comm: Communicator, array: Any, root: Any, out: Any) -> Facts[_Local]:
    """Look at this rank's arguments."""
    rank = check_root(root, comm.size, _CALL)
    if out is not None and array is not None:
        raise ArgumentError("broadcast: pass the array, or out on every rank (the root included), not both")
    given = out if array is None else array
    found = None if given is None else view(given, "broadcast: array")
    if found is None and rank == comm.rank:
        raise ArgumentError("broadcast: the root's array is None; the root must pass the array to broadcast")
    if found is not None and rank != comm.rank:
        check_out(found, found.data.shape, found.data.dtype, "broadcast: array")
    flat = target = None
    payload = b""
    if found is not None and rank == comm.rank:
        flat = settled_flat(comm, found)
        if out is None:
            payload = payload_of(comm, flat)
    elif found is not None:
        target = target_for(comm, found.data.shape, found.data.dtype, found.device, found)
    local = _Local(found, rank, flat, target)
    if not comm._stated:
        return Facts(local, {}, {})
    own = {} if found is None else facts_of(found)
    form = "array (a header goes first)" if out is None else "out= (no header)"
    same = {"root": rank, "form of the call": form, **({} if out is None else own)}
    if out is None and rank == comm.rank and found is not None and found.kind is not None:
        own["kind"] = found.kind.name
    return Facts(local, same, own, payload)


def _check_receivers(comm: Communicator, facts: list[Mapping[str, Any]], root: int) -> None:
    """Raise where a receiver's array can't take the root's; on every rank whose exchange told it."""
    sent = {**facts[root]}
    sent.pop("kind", None)
    if any(own and own != sent for rank, own in enumerate(facts) if rank != root):
        shown = [fit_in_words((own["shape"], own["dtype"], own["memory kind"])) if own else "None" for own in facts]
        raise_mismatch(
            comm.topology,
            comm.rank,
            f"broadcast: a receiver's array doesn't fit the root's (root {root})",
            shown,
            "A receiver passes None, or an array like the root's to be filled.",
        )
