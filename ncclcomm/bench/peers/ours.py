"""ncclcomm itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ncclcomm
from ncclcomm.bench.case import Case
from ncclcomm.bench.peers.base import Peer

__all__ = ["Ours"]


class Ours(Peer):
    """The calls of `ncclcomm.Communicator`, or of `ncclcomm.comm` in one process."""

    name = "ncclcomm"

    def versions(self) -> dict[str, str]:
        """See Peer.versions."""
        return {"ncclcomm": ncclcomm.__version__}

    def call(self, case: Case) -> Callable[[], Any]:
        """See Peer.call; it has every collective."""
        return case.row.op.ours(self.group.comm, case)

    def results(self, case: Case, returned: Any) -> tuple[Any, ...]:
        """See Peer.results."""
        return case.results(returned) if case.fresh or returned is not None else case.recvs
