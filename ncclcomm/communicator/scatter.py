"""Scatter over ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ncclcomm.arrays import HOST_MEMORY, check_out, kind_named, view
from ncclcomm.chunks import check_chunk_sizes, check_dim, even_counts, whole_number
from ncclcomm.communicator.agree import (
    Facts,
    agree_with_root,
    check_after_header,
    check_root,
    facts_of,
    fit_in_words,
    fit_of,
)
from ncclcomm.communicator.buffers import Target, fill, pack, parts_in, payload_of, target_for
from ncclcomm.communicator.call import begin, end, in_call
from ncclcomm.communicator.checks import raise_mismatch
from ncclcomm.communicator.quick import MISSED, data_of, fill_whole
from ncclcomm.communicator.wire import dtype_of, header_of, split_header
from ncclcomm.devices.host_array import HostArray
from ncclcomm.errors import ArgumentError

if TYPE_CHECKING:
    from ncclcomm.communicator.communicator import Communicator
    from ncclcomm.communicator.quick import Quick

__all__ = ["scatter"]

_CALL = "scatter"


class _Local(NamedTuple):
    """This rank's arguments."""

    packed: Any
    """On the root, all ranks' parts."""
    device: int
    """On the root, where its array is."""
    target: Target | None
    """What this rank's out gives; None where the header must come first."""
    root: int


def scatter(
    comm: Communicator, array: Any, root: Any, chunk_sizes: Any, dim: Any, out: Any, timeout_s: float | None
) -> Any:
    """See Communicator.scatter."""
    quick = comm._quick
    key = None
    if quick is not None and quick.serves(comm, root, timeout_s):
        key = _key(comm, quick, array, root, chunk_sizes, dim, out)
        done = MISSED if key is None else _scatter_quickly(comm, quick, key, array, root, chunk_sizes, out)
        if done is not MISSED:
            return done
    return _scatter(comm, key, array, root, chunk_sizes, dim, out, timeout_s)


def _scatter(
    comm: Communicator, key: Any, array: Any, root: Any, chunk_sizes: Any, dim: Any, out: Any, timeout_s: float | None
) -> Any:
    """The long way; the short one learns from it what fits a key."""

    def body() -> Any:
        local, facts, told = agree_with_root(
            comm, _CALL, lambda: _validate(comm, array, root, chunk_sizes, dim, out), root
        )
        sent = facts[local.root]
        shape, dtype, counts, axis = sent["shape"], dtype_of(sent["dtype"]), sent["chunk sizes"], sent["axis"]
        shapes = [(*shape[:axis], count, *shape[axis + 1 :]) for count in counts]
        check_after_header(comm, lambda: _check_outs(comm, facts, local.root, shapes))
        comm._committed = True
        sizes = [math.prod(part) for part in shapes]
        device = local.device
        if comm.rank != local.root:
            device = HOST_MEMORY if sent["memory kind"] == "host memory" else comm.device
        kind = kind_named(sent.get("kind"), device)
        target = local.target or target_for(comm, shapes[comm.rank], dtype, device, None, kind)
        if told.payload:
            fill(target.flat, told.payload[parts_in(sizes, dtype.itemsize, comm.topology.node_order)[comm.rank]])
        else:
            comm._engine(device).scatter(local.packed, sizes, target.flat, local.root)
        result = target.finish()
        quick = comm._quick
        is_reached = device == HOST_MEMORY or comm.backend == "host"
        if quick is not None and key is not None and is_reached and kind is None and quick.fits(max(sizes), dtype):
            known = (shapes[comm.rank], dtype, device, parts_in(sizes, dtype.itemsize, range(comm.size)))
            quick.learn((key, told.said) if comm.rank != local.root else key, (told.said, known))
        return result

    return in_call(comm, _CALL, (array, out), timeout_s, body)


def _key(
    comm: Communicator, quick: Quick, array: Any, root: int, chunk_sizes: Any, dim: Any, out: Any
) -> tuple[Any, ...] | None:
    """What makes calls alike for the short way; None where it does not take this one."""
    if type(dim) is not int or dim != 0:
        return None
    if chunk_sizes is not None:
        if type(chunk_sizes) not in (list, tuple) or any(type(count) is not int for count in chunk_sizes):
            return None
        chunk_sizes = tuple(chunk_sizes)
    filled = None
    if out is not None:
        if not quick.takes_out(out):
            return None
        filled = (type(out), out.dtype, out.shape)
    if root != comm.rank:
        return (_CALL, root, chunk_sizes, filled)
    if not quick.takes(array) or not (out is None or quick.apart(out, out.flags.num, array)):
        return None
    device = array._device_id if type(array) is HostArray else HOST_MEMORY  # where the result goes
    return (_CALL, root, chunk_sizes, filled, device, array.dtype, array.shape)


def _scatter_quickly(
    comm: Communicator, quick: Quick, key: Any, array: Any, root: int, chunk_sizes: Any, out: Any
) -> Any:
    """Scatter along the first dimension, where a call like this one is known."""
    is_root = root == comm.rank
    known = quick.known.get(key)
    result = out
    if is_root:
        if known is None:
            return MISSED
        if out is None:
            try:
                result = quick.empty(*known[1][:3])
            except MemoryError:
                return MISSED  # the long way takes the call's number first
    try:
        begin(comm, _CALL, (array, out), None)
        number = comm._calls
        comm._calls = number + 1
        if is_root:
            _send_parts(comm, quick, known, number, array, result)
        else:
            header = comm._control.broadcast_bytes(b"", root)
            other, said, payload = split_header(header)
            known = quick.known.get((key, said)) if other == number else None
            if known is None:
                comm._received, comm._calls = header, number
                return _scatter(comm, key, array, root, chunk_sizes, 0, out, None)
            comm._committed = True
            _, (shape, dtype, device, parts) = known
            if out is None:
                result = quick.empty(shape, dtype, device)
            if payload:
                fill_whole(result, payload[parts[comm.rank]])
            elif result.nbytes:
                quick.raw.Recv((result, result.nbytes, quick.byte), root)
        end(comm, None, None)
    except BaseException as error:  # whatever it is, the others may wait for this rank now
        quick.fail(comm, error)
    return result


def _send_parts(comm: Communicator, quick: Quick, known: Any, number: int, array: Any, result: Any) -> None:
    """The root's part of a scatter."""
    said, (_, dtype, _, parts) = known
    messages, ranks = [], []
    if comm.size > 1:
        payload = payload_of(comm, array)
        comm._control.broadcast_bytes(header_of(number, said, payload), comm.rank)
        comm._committed = True
        for rank, part in enumerate(parts):
            nbytes = part.stop - part.start
            if nbytes and rank != comm.rank and not payload:
                messages.append((array, (nbytes, part.start), quick.byte))
                ranks.append(rank)

    own = parts[comm.rank]
    target, source = data_of(result), data_of(array)[own.start // dtype.itemsize : own.stop // dtype.itemsize]
    if messages:
        quick.post_and_wait(quick.raw.Isend, messages, ranks, [(target, source)])
    else:
        target[...] = source


def _validate(comm: Communicator, array: Any, root: Any, chunk_sizes: Any, dim: Any, out: Any) -> Facts[_Local]:
    """Look at this rank's arguments."""
    rank = check_root(root, comm.size, _CALL)
    sizes = None
    if chunk_sizes is not None:
        sizes = check_chunk_sizes(chunk_sizes, comm.size, None, _CALL, "ranks")
    own: dict[str, Any] = {"chunk sizes": sizes}
    found = None
    if rank == comm.rank:
        if array is None:
            raise ArgumentError("scatter: the root's array is None; the root must pass the array to scatter")
        found = view(array, "scatter: array")
        axis = check_dim(dim, found.data.ndim, _CALL)
        n = found.data.shape[axis]
        own["chunk sizes"] = (
            even_counts(n, comm.size) if sizes is None else check_chunk_sizes(sizes, comm.size, n, _CALL, "ranks")
        )
        own["axis"] = axis
        own.update(facts_of(found))
        if found.kind is not None:
            own["kind"] = found.kind.name
    target = None
    if out is not None:
        target = view(out, "scatter: out")
        check_out(target, target.data.shape, target.data.dtype, "scatter: out", [found] if found is not None else [])
        own["out"] = fit_of(target)
    same = {"root": rank, "dim": whole_number(dim, "scatter: dim")}
    packed = None if found is None else pack(comm, found, own["chunk sizes"], own["axis"])
    device = HOST_MEMORY if found is None else found.device
    goal = None if target is None else target_for(comm, (), None, target.device, target)
    payload = b"" if packed is None else payload_of(comm, packed)
    return Facts(_Local(packed, device, goal, rank), same, own, payload)


def _check_outs(comm: Communicator, facts: list[Mapping[str, Any]], root: int, shapes: list[tuple[int, ...]]) -> None:
    """Raise where a rank's out or chunk_sizes don't fit what the root sends; on every rank that knows."""
    sent = facts[root]
    for rank, own in enumerate(facts):
        expected = (shapes[rank], sent["dtype"], sent["memory kind"])
        if own.get("out", expected) != expected:
            shown = [fit_in_words(o["out"]) if "out" in o else "no out" for o in facts]
            raise_mismatch(
                comm.topology,
                comm.rank,
                f"scatter: rank {rank}'s out doesn't fit its chunk ({fit_in_words(expected)})",
                shown,
                "Pass an out of the chunk's shape and dtype, or none.",
            )
    sizes = [own.get("chunk sizes") or sent["chunk sizes"] for own in facts]
    if any(size != sizes[0] for size in sizes):
        raise_mismatch(
            comm.topology,
            comm.rank,
            "scatter: ranks disagree on chunk_sizes",
            sizes,
            "The root's count; other ranks pass the same, or None.",
        )
