"""Gather over ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ncclcomm.arrays import HOST_MEMORY, View, check_out, view
from ncclcomm.chunks import check_dim, whole_number
from ncclcomm.communicator.agree import (
    NOTHING_TOLD,
    Facts,
    Told,
    agree,
    agree_at_root,
    check_root,
    fit_in_words,
    fit_of,
    memory_of,
    raise_alike,
)
from ncclcomm.communicator.buffers import fill, packed_target, parts_in, payload_of, settled_flat, target_for, unpack
from ncclcomm.communicator.call import begin, end, in_call
from ncclcomm.communicator.checks import raise_mismatch
from ncclcomm.communicator.engine import split_flat
from ncclcomm.communicator.quick import MISSED, data_of, is_plain_dtype
from ncclcomm.communicator.wire import dtype_code, header_of, split_header
from ncclcomm.devices.host_array import HostArray

if TYPE_CHECKING:
    from ncclcomm.communicator.communicator import Communicator
    from ncclcomm.communicator.quick import Quick

__all__ = ["gather"]

_CALL = "gather"


class _Local(NamedTuple):
    """This rank's arguments."""

    array: View
    flat: Any
    out: View | None
    root: int
    axis: int


def gather(comm: Communicator, array: Any, root: Any, dim: Any, out: Any, timeout_s: float | None) -> Any:
    """See Communicator.gather."""
    quick = comm._quick
    key = None
    if quick is not None and quick.serves(comm, root, timeout_s):
        key = _key(comm, quick, array, root, dim, out)
        done = MISSED if key is None else _gather_quickly(comm, quick, key, array, root, out)
        if done is not MISSED:
            return done
    return _gather(comm, key, array, root, dim, out, timeout_s)


def _gather(comm: Communicator, key: Any, array: Any, root: Any, dim: Any, out: Any, timeout_s: float | None) -> Any:
    """The long way; the short one learns from it what fits a key."""

    def body() -> Any:
        quick = comm._quick
        told: list[Told] = [NOTHING_TOLD] * comm.size
        if not _is_told_at_root(comm):
            local, facts = agree(comm, _CALL, lambda: _validate(comm, array, root, dim, out), header="all")
        else:
            local, facts, told = agree_at_root(comm, _CALL, lambda: _validate(comm, array, root, dim, out), root)
            if comm.rank != local.root:
                comm._committed = True
                engine = comm._engine(local.array.device)  # made by all ranks, whether they need it or not
                if not told[0].payload:
                    engine.intra.gather([local.flat], None, local.root)
                if quick is not None and key is not None:
                    quick.learn(key, told[0].said)
                return None
        shapes = [own["shape"] for own in facts]
        counts = [shape[local.axis] for shape in shapes]
        data = local.array.data
        shape = (*data.shape[: local.axis], sum(counts), *data.shape[local.axis + 1 :])
        raise_alike(comm, lambda: _check_out(comm, facts, local, shape))
        sizes = [math.prod(part) for part in shapes]
        comm._committed = True
        result = _collect(comm, local, shape, counts, sizes, [one.payload for one in told])
        if quick is not None and key is not None and quick.fits(max(sizes), data.dtype):
            said = [one.said for one in told]
            quick.learn(key, said[comm.rank])
            known = (shape, data.dtype, local.array.device, parts_in(sizes, data.dtype.itemsize, range(comm.size)))
            quick.learn((key, *said), known)
        return result

    return in_call(comm, _CALL, (array,), timeout_s, body)


def _is_told_at_root(comm: Communicator) -> bool:
    """True where the root alone hears of the parts; the same on all ranks.

    The leaders of several nodes need the counts too, and a first engine is made by all ranks or by none.
    """
    member = comm._member
    return (
        comm.size > 1
        and comm.num_nodes == 1
        and comm._calls >= comm._checked_calls
        and (member._host_engine is not None or member._device_engine is not None)
    )


def _collect(
    comm: Communicator,
    local: _Local,
    shape: tuple[int, ...],
    counts: list[int],
    sizes: list[int],
    payloads: list[bytes],
) -> Any:
    """Bring all parts to the root, less those that came with their facts, and complete the root's array."""
    engine = comm._engine(local.array.device)
    if comm.rank != local.root:
        engine.gather(local.flat, sizes, None, local.root)
        return None
    target = target_for(comm, shape, local.array.data.dtype, local.array.device, local.out, local.array.kind)
    packed, in_place = packed_target(comm, target.near, local.axis)
    if any(payloads):
        parts = split_flat(packed, sizes)
        for rank, payload in enumerate(payloads):
            if payload and rank != comm.rank:
                fill(parts[rank], payload)
                parts[rank] = parts[rank][:0]
        engine.intra.gather([local.flat], parts, local.root)
    else:
        engine.gather(local.flat, sizes, packed, local.root)
    if not in_place:
        unpack(comm, packed, target.near, counts, local.axis)
    return target.finish_near()


def _key(comm: Communicator, quick: Quick, array: Any, root: int, dim: Any, out: Any) -> tuple[Any, ...] | None:
    """What makes calls alike for the short way; None where it does not take this one."""
    if type(dim) is not int or dim != 0 or not quick.takes(array) or not is_plain_dtype(array.dtype):
        return None
    if root != comm.rank:
        return (_CALL, root, type(array), array.dtype, array.shape)
    device = array._device_id if type(array) is HostArray else HOST_MEMORY  # where the result goes
    if out is None:
        return (_CALL, root, device, array.dtype, array.shape)
    if not quick.takes_out(out) or not quick.apart(out, out.flags.num, array):
        return None
    return (_CALL, root, device, array.dtype, array.shape, out.dtype, out.shape)


def _gather_quickly(comm: Communicator, quick: Quick, key: Any, array: Any, root: int, out: Any) -> Any:
    """Gather along the first dimension, where a call like this one is known."""
    mine = quick.known.get(key)
    if mine is None:
        return MISSED
    result = None
    try:
        begin(comm, _CALL, (array,), None)
        number = comm._calls
        comm._calls = number + 1
        if root != comm.rank:
            payload = payload_of(comm, array)
            comm._control.gather_bytes(header_of(number, mine, payload), root)
            if not payload:
                comm._committed = True
                quick.raw.Send((array, array.nbytes, quick.byte), root)
        else:
            headers = comm._control.gather_bytes(header_of(number, mine), root)
            said, payloads = [mine] * comm.size, [b""] * comm.size
            is_known = True
            for rank, header in enumerate(headers):
                if rank != root:
                    other, said[rank], payloads[rank] = split_header(header)
                    is_known &= other == number
            known = quick.known.get((key, *said))
            if known is None or not is_known:
                comm._received, comm._calls = headers, number
                return _gather(comm, key, array, root, 0, out, None)
            comm._committed = True
            result = _receive_parts(comm, quick, known, payloads, array, out)
        end(comm, None, None)
    except BaseException as error:  # whatever it is, the others may wait for this rank now
        quick.fail(comm, error)
    return result


def _receive_parts(
    comm: Communicator, quick: Quick, known: Any, payloads: Sequence[bytes], array: Any, out: Any
) -> Any:
    """The root's part of a gather."""
    shape, dtype, device, parts = known
    result = quick.empty(shape, dtype, device) if out is None else out
    messages, ranks = [], []
    data = data_of(result)
    for rank, part in enumerate(parts):
        place = slice(part.start // dtype.itemsize, part.stop // dtype.itemsize)
        nbytes = part.stop - part.start
        if rank == comm.rank:
            own = data[place]
        elif payloads[rank]:
            data[place] = np.frombuffer(payloads[rank], dtype)
        elif nbytes:
            messages.append((result, (nbytes, part.start), quick.byte))
            ranks.append(rank)
    if messages:
        quick.post_and_wait(quick.raw.Irecv, messages, ranks, [(own, data_of(array))])
    else:
        own[...] = data_of(array)
    return result


def _check_out(comm: Communicator, facts: list[Mapping[str, Any]], local: _Local, shape: tuple[int, ...]) -> None:
    """Raise where the root's out can't take the result; on every rank that knows."""
    data = local.array.data
    wanted = (shape, dtype_code(data.dtype), memory_of(local.array))
    if facts[local.root].get("out", wanted) != wanted:
        raise_mismatch(
            comm.topology,
            comm.rank,
            f"gather: the root's out doesn't fit the result ({fit_in_words(wanted)})",
            [fit_in_words(own["out"]) if "out" in own else f"part of shape {own['shape']}" for own in facts],
            "Pass an out of the result's shape and dtype, or none.",
        )


def _validate(comm: Communicator, array: Any, root: Any, dim: Any, out: Any) -> Facts[_Local]:
    """Look at this rank's arguments."""
    rank = check_root(root, comm.size, _CALL)
    found = view(array, "gather: array")
    if found.data.ndim == 0:
        found = View(found.obj, found.data.reshape(1), found.device, found.kind)
    axis = check_dim(dim, found.data.ndim, _CALL)
    shape = tuple(found.data.shape)
    same = {
        "root": rank,
        "dim": whole_number(dim, "gather: dim"),
        "dtype": dtype_code(found.data.dtype),
        "memory kind": memory_of(found),
        "shape apart from dim": (*shape[:axis], "*", *shape[axis + 1 :]),
    }
    own: dict[str, Any] = {"shape": shape}
    target = None
    if out is not None and rank == comm.rank:
        target = view(out, "gather: out")
        check_out(target, target.data.shape, target.data.dtype, "gather: out", [found])
        own["out"] = fit_of(target)
    flat = settled_flat(comm, found)
    payload = payload_of(comm, flat) if rank != comm.rank and comm.num_nodes == 1 else b""
    return Facts(_Local(found, flat, target, rank, axis), same, own, payload)
