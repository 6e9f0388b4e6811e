"""MPI flavours whose ranks start on several fake hosts, by mpiexec alone, as a user's mpirun would."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.fake_hosts import Hosts
from flavours import DEADLINE_S, Flavour

__all__ = ["PLACEMENTS", "Placed"]

PLACEMENTS = {
    "block": [0, 0, 1, 1],
    "round-robin": [0, 1, 0, 1],
    "two and one": [0, 0, 1],
}
"""For each placement the host of each rank."""


@dataclass(frozen=True)
class Placed(Flavour):
    """A flavour that places its ranks on the hosts of a set, in one of PLACEMENTS."""

    hosts: Hosts
    placement: str

    @classmethod
    def of(cls, flavour: Flavour, hosts: Hosts, placement: str) -> Placed:
        """That flavour on those hosts."""
        return cls(flavour.name, flavour.python, flavour.mpiexec, hosts, placement)

    def _options(self) -> list[str]:
        """The options of mpiexec that place the ranks."""
        agent, one_by_one = str(self.hosts.agent), self.placement == "round-robin"
        if self.name == "openmpi":
            places = ",".join(f"{name}:2" for name in self.hosts.names)
            return ["--prtemca", "plm_ssh_agent", agent, "--host", places, "--map-by", "node" if one_by_one else "slot"]
        names = ",".join(self.hosts.names)
        return ["-launcher", "ssh", "-launcher-exec", agent, "-hosts", names, "-ppn", "1" if one_by_one else "2"]

    def env(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """See Flavour.env; the ranks find their nodes themselves, over plain TCP."""
        found = {**super().env(extra), **self.hosts.env, "FI_PROVIDER": "tcp"}
        return {name: value for name, value in found.items() if not name.startswith("NCCLCOMM_NODE_")}

    def run(
        self,
        n: int,
        argv: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        timeout_s: float = DEADLINE_S,
        cwd: str | Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """See Flavour.run; mpiexec runs on the first host."""
        command = [self.mpiexec, *self._options(), "-n", str(n), self.python, *argv]
        return self.hosts.exec(self.hosts.names[0], command, env=self.env(env), cwd=cwd, timeout_s=timeout_s)
