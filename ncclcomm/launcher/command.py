"""The command that starts the ranks: from what is asked for to a command line and variables.

Nothing here looks at the machine; what it depends on is handed in. See mpiexec.py and srun.py for the two kinds.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ncclcomm.launcher.hosts import Place

__all__ = ["CHILD", "INTELMPI", "MPICH", "OPENMPI", "Command", "Plan", "Step", "is_forwarded"]

MPICH = "MPICH"
OPENMPI = "Open MPI"
INTELMPI = "Intel MPI"

CHILD = str(Path(__file__).with_name("child.py"))
"""What each rank's Python runs; see there why by its path."""

_FORWARDED_NAMES = ("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV")
_FORWARDED_PREFIXES = (
    *("PYTHON", "NCCLCOMM_", "NCCL_", "CUDA_", "CUPY_", "OMP_", "OPENBLAS_", "MKL_", "NUMEXPR_"),
    *("FI_", "UCX_", "MPIR_CVAR_", "I_MPI_"),
)


def is_forwarded(name: str) -> bool:
    """Whether ranks on other hosts get a variable unasked; ssh itself passes nothing on."""
    return name in _FORWARDED_NAMES or name.startswith(_FORWARDED_PREFIXES)


@dataclass(frozen=True)
class Step:
    """What srun is to be told beside the places."""

    mpi: str
    """The type of its --mpi."""
    cpus_per_task: int | None = None


@dataclass(frozen=True)
class Plan:
    """What to start, where, and what that depends on."""

    flavour: str
    """MPICH, OPENMPI or INTELMPI, the family of `starter` and of what mpi4py loads."""
    starter: str
    """Path of mpiexec, or of srun where there is a `step`."""
    python: str
    """Path of the interpreter that each rank runs."""
    program: tuple[str, ...]
    """`[-m] PROGRAM ARGS...`, passed on unchanged."""
    size: int
    """Number of ranks, 1 or more."""
    cores: int
    """Cores that ranks may use on this host; of other hosts it is taken to be true until they are asked."""
    is_root: bool
    environ: Mapping[str, str]
    """The user's environment; variables set there are left as they are."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """What --env sets, or names in the environment; wins over everything else, and reaches every host."""
    places: tuple[Place, ...] = ()
    """Which hosts get the ranks; none for this host alone."""
    ssh: tuple[str, ...] = ()
    """Words of the command that reaches the hosts, none with a space; none where SLURM reaches them."""
    step: Step | None = None
    devices_per_rank: int | None = None
    bind: str | None = None
    """'none', 'core', 'socket', 'numa', or None for what the user's variables say, else none."""
    label: bool = False
    """Whether each line of output begins with its rank."""

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on one host, this one or another."""
        return len(self.places) < 2

    @property
    def crowded(self) -> bool:
        """Whether some host has more ranks than cores.

        One answer for all hosts: ranks that choose different networks of MPICH can't talk to each other.
        """
        if not self.places:
            return self.size > self.cores
        return any(at.ranks > (self.cores if at.cores is None else at.cores) for at in self.places)

    def spread(self, own: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str]:
        """The command's variables: what is wanted unless the user has set it, then the launcher's own, then --env's."""
        unset = {name: value for name, value in wanted.items() if name not in self.environ}
        asked = {}
        if self.devices_per_rank is not None:
            asked["NCCLCOMM_DEVICES_PER_RANK"] = str(self.devices_per_rank)
        elif "NCCLCOMM_DEVICES_PER_RANK" in self.environ:
            asked["NCCLCOMM_DEVICES_PER_RANK"] = ""  # inherited from another job, whose devices are not these ranks'
        if self.label:
            asked["NCCLCOMM_LABELLED"] = "1"
        return {**unset, **own, **asked, **self.settings}

    @property
    def words(self) -> tuple[str, ...]:
        """What each rank's process is started with: the interpreter, child.py, and what that one runs.

        A lone colon would end the command for mpiexec, which would take what follows for a second program.
        """
        escaped = ("--escaped", *(f"={word}" for word in self.program)) if ":" in self.program else self.program
        return (self.python, CHILD, *escaped)


@dataclass(frozen=True)
class Command:
    """A command line and the variables it needs on top of the environment."""

    argv: tuple[str, ...]
    variables: Mapping[str, str]
    forward: str = ""
    """The option by which the launcher passes named variables to other hosts: -x, -genvlist, or none needed."""
    before: int = 1
    """How many words come before the launcher's options: its own path, and what starts it."""

    def __str__(self) -> str:
        """One line that a shell runs as it is."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.variables.items())]
        return " ".join([*settings, shlex.join(self.argv)])

    def marked(self, marks: Mapping[str, str]) -> Command:
        """The command with variables of one run, which reach the ranks of every host too.

        Values stay out of the command line, which other users can see.
        """
        head, rest = self.argv[: self.before], list(self.argv[self.before :])
        names: tuple[str, ...] = tuple(marks)
        if self.forward == "-x":
            rest = [word for name in names for word in ("-x", name)] + rest
        elif self.forward:
            if rest[:1] == [self.forward]:
                names, rest = (*filter(None, [rest[1]]), *names), rest[2:]
            rest = [self.forward, ",".join(names), *rest]
        return replace(self, argv=(*head, *rest), variables={**self.variables, **marks})
