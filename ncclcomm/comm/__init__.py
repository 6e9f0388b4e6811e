"""Collectives over several devices of one process, as `torch.cuda.comm`.

One process drives all the devices; nothing here knows of ranks. All calls are enqueued on each device's current stream,
after the work already queued there, and return without waiting for it, unless host memory is the destination.
"""

from __future__ import annotations

from ncclcomm.comm.all_gather import all_gather
from ncclcomm.comm.all_reduce import all_reduce
from ncclcomm.comm.broadcast import broadcast
from ncclcomm.comm.coalesced import broadcast_coalesced, reduce_add_coalesced
from ncclcomm.comm.gather import gather
from ncclcomm.comm.reduce_add import reduce_add
from ncclcomm.comm.reduce_scatter import reduce_scatter
from ncclcomm.comm.scatter import scatter

__all__ = [
    "all_gather",
    "all_reduce",
    "broadcast",
    "broadcast_coalesced",
    "gather",
    "reduce_add",
    "reduce_add_coalesced",
    "reduce_scatter",
    "scatter",
]
