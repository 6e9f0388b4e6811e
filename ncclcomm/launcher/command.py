"""The command that starts the ranks: from what is asked for to a command line and variables.

Nothing here looks at the machine; what it depends on is handed in.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CHILD", "MPICH", "OPENMPI", "Command", "build_command"]

MPICH = "MPICH"
OPENMPI = "Open MPI"

CHILD = str(Path(__file__).with_name("child.py"))
"""What each rank's Python runs; see there why by its path."""


@dataclass(frozen=True)
class Command:
    """A command line and the variables it needs on top of the environment."""

    argv: tuple[str, ...]
    variables: Mapping[str, str]

    def __str__(self) -> str:
        """One line that a shell runs as it is."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.variables.items())]
        return " ".join([*settings, shlex.join(self.argv)])


def build_command(
    *,
    flavour: str,
    mpiexec: str,
    python: str,
    program: Sequence[str],
    size: int,
    cores: int,
    is_root: bool,
    environ: Mapping[str, str],
) -> Command:
    """The command that starts the ranks of one host.

    Args:
        flavour: MPICH or OPENMPI, the family of `mpiexec`.
        mpiexec: path of the MPI launcher.
        python: path of the interpreter that each rank runs.
        program: `[-m] PROGRAM ARGS...`, passed on unchanged.
        size: number of ranks, 1 or more.
        cores: cores that this process may use.
        is_root: whether the user is root.
        environ: the user's environment; variables set there are left as they are.
    """
    wanted = _openmpi_variables(size, cores, is_root) if flavour == OPENMPI else _mpich_variables(size, cores)
    variables = {name: value for name, value in wanted.items() if name not in environ}
    return Command((mpiexec, "-n", str(size), python, CHILD, *program), variables)


def _openmpi_variables(size: int, cores: int, is_root: bool) -> dict[str, str]:
    """What Open MPI needs to start ranks on one host."""
    variables = {
        # Slots default to the number of cores, and more ranks than slots are refused.
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        # The default pins each of two ranks to a core of its own, threads of NumPy included.
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        # Looking for network interfaces that one host has no use for takes most of a second.
        "OMPI_MCA_btl": "^ofi",
    }
    if size > cores:
        variables["OMPI_MCA_mpi_yield_when_idle"] = "1"  # a rank that waits must not hold a core that others need
    if is_root:
        variables["OMPI_ALLOW_RUN_AS_ROOT"] = "1"
        variables["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return variables


def _mpich_variables(size: int, cores: int) -> dict[str, str]:
    """What MPICH needs to start ranks on one host."""
    # UCX spins without yielding, which costs whole time slices once ranks share cores.
    return {"MPIR_CVAR_CH4_NETMOD": "ofi"} if size > cores else {}
