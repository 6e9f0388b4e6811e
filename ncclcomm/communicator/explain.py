"""Says in words which way a collective goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ncclcomm.chunks import whole_number
from ncclcomm.communicator.hierarchy import steps
from ncclcomm.errors import ArgumentError

if TYPE_CHECKING:
    from ncclcomm.communicator.communicator import Communicator

__all__ = ["explain"]

_OPS = {
    "broadcast": "broadcast",
    "scatter": "scatter",
    "gather": "gather",
    "reduce": "reduce",
    "reduce_add": "reduce",
    "all_reduce": "all_reduce",
    "barrier": "barrier",
}


def explain(comm: Communicator, op: str, nbytes: int) -> str:
    """See Communicator.explain."""
    if op not in _OPS:
        raise ArgumentError(f"explain: {op!r} is no collective; use one of {', '.join(_OPS)}")
    size = whole_number(nbytes, "explain: nbytes")
    if size < 0:
        raise ArgumentError(f"explain: nbytes is {size}; expected 0 or more")
    intra, inter = comm._member.transport_names
    where = f"{comm.size} rank{'s' * (comm.size != 1)} on {comm.num_nodes} node{'s' * (comm.num_nodes != 1)}"
    if comm.num_nodes == 1:
        way = f"{_OPS[op]} in the node ({intra})"
    else:
        names = {"intra": f"in the node ({intra})", "inter": f"across nodes ({inter})"}
        way = ", ".join(f"{s.op.replace('move', 'copy')} {names[s.level]}" for s in steps(_OPS[op], comm.topology, 0))
    return f"{op} of {size} bytes over {where}, {comm.backend} backend: {way}"
