"""Collectives over several devices of one process, as `torch.cuda.comm`.

One process drives all the devices; nothing here knows of ranks. All calls are enqueued on each device's current stream,
after the work already queued there, and return without waiting for it, unless host memory is the destination.
"""

from __future__ import annotations

from ncclcomm.comm.broadcast import broadcast
from ncclcomm.comm.gather import gather
from ncclcomm.comm.reduce_add import reduce_add
from ncclcomm.comm.scatter import scatter

__all__ = ["broadcast", "gather", "reduce_add", "scatter"]
