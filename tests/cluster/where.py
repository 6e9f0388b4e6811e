"""Run by ranks on fake hosts: every collective with every root on the nodes as they are; rank 0 tells where all are.

Takes the name of a file, which gets a JSON list with one object a rank.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import ncclcomm
from ranks.expected import KINDS, Findings, every_op


def main() -> None:
    """Exercise the world communicator and write who is where."""
    with ncclcomm.init() as comm:
        with Findings() as found:
            for kind in KINDS:
                every_op(comm, found, kind=kind)
                every_op(comm, found, count=10_007, kind=kind)
        topology = comm._member.topology
        mine = {
            "host": socket.gethostname(),
            "rank": comm.rank,
            "node": comm.node,
            "num_nodes": comm.num_nodes,
            "local_rank": comm.local_rank,
            "local_size": comm.local_size,
            "device": comm.device,
            "ranks_of": topology.ranks_of,
            "rail": topology.rail(comm.rank),
        }
        everyone = comm.mpi_comm.gather(mine)
        if comm.rank == 0:
            Path(sys.argv[1]).write_text(json.dumps(everyone), encoding="utf-8")


if __name__ == "__main__":
    main()
