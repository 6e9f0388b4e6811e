"""Which MPI this Python uses, and the mpiexec that belongs to it.

A launcher of another MPI starts every rank as a world of its own, often with exit status 0, so the two are matched
before anything starts. MPI itself is only ever loaded in a process of its own.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ncclcomm.errors import BackendUnavailableError
from ncclcomm.launcher.command import INTELMPI, MPICH, OPENMPI

__all__ = ["Launcher", "family", "find_flavour", "find_launcher", "guess_launcher"]

_QUERY_TIMEOUT_S = 60.0

_NAMES = ("mpiexec", "mpiexec.openmpi", "mpiexec.mpich", "mpiexec.hydra")
"""What mpiexec is called; the longer names where a system has several MPIs side by side."""

_QUERY = """
import sys
sys.path = [entry for entry in sys.path if entry]  # not the current directory: a mpi4py.py may lie there
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
maps = open("/proc/self/maps").read().split() if sys.platform == "linux" else []
print(next((word for word in maps if "/libmpi" in word), ""))
print(MPI.Get_library_version())
"""

_INSTALL = "pip install 'ncclcomm[mpich]'"

_OWN_FILES = {
    OPENMPI: ("prterun", "orterun", "ompi_info"),
    INTELMPI: ("hydra_bstrap_proxy", "impi_info"),
    MPICH: ("mpiexec.hydra", "hydra_pmi_proxy"),
}
"""Programs that come with a flavour's mpiexec; Intel MPI has those of MPICH too."""


@dataclass(frozen=True)
class Launcher:
    """An mpiexec and the MPI family that it starts ranks of."""

    flavour: str
    mpiexec: str


def family(text: str) -> str:
    """The flavour that a library's or launcher's version text speaks of; what descends from MPICH counts as MPICH."""
    if any(word in text for word in ("Open MPI", "OpenRTE", "PRRTE")):
        return OPENMPI
    return INTELMPI if "Intel(R) MPI" in text else MPICH


def find_flavour(environ: Mapping[str, str] | None = None) -> str:
    """The flavour of the MPI library that mpi4py loads, where no mpiexec is needed.

    Args:
        environ: the ranks' whole environment; None: this process's.

    Raises:
        BackendUnavailableError: no mpi4py, or no MPI library.
    """
    return _ask_mpi4py(environ)[0]


def find_launcher(environ: Mapping[str, str] | None = None) -> Launcher:
    """The mpiexec of the MPI that mpi4py loads in this Python environment.

    Looks beside the interpreter, then in the MPI library's prefix, then on PATH, and takes the first of the library's
    flavour.

    Args:
        environ: the ranks' whole environment, which may lead mpi4py to another library; None: this process's.

    Raises:
        BackendUnavailableError: no mpi4py, no MPI library, no mpiexec, or none of the library's flavour.
    """
    flavour, library = _ask_mpi4py(environ)
    others = []
    for mpiexec in _candidates(library):
        found = _flavour_of(mpiexec) or _ask_version(mpiexec)
        if found == flavour:
            return Launcher(flavour, mpiexec)
        others.append(f"{mpiexec} ({found})")
    if others:
        raise BackendUnavailableError(
            f"mpi4py loads {flavour} ({library or 'path unknown'}), but the mpiexec found is another MPI's: "
            f"{', '.join(others)}; put {flavour}'s mpiexec first on PATH"
        )
    raise BackendUnavailableError(
        f"mpi4py loads {flavour} ({library or 'path unknown'}), but no mpiexec is beside {sys.executable}, in the "
        f"library's prefix or on PATH; put {flavour}'s mpiexec on PATH, or {_INSTALL} in a new environment"
    )


def guess_launcher() -> Launcher:
    """The mpiexec that a look at files alone suggests; starts no process. MPICH's plain `mpiexec` if there is none."""
    for mpiexec in _candidates(""):
        has_intels = any(Path(mpiexec).resolve().with_name(name).exists() for name in _OWN_FILES[INTELMPI])
        return Launcher(_flavour_of(mpiexec) or (INTELMPI if has_intels else MPICH), mpiexec)
    return Launcher(MPICH, "mpiexec")


def _ask_mpi4py(environ: Mapping[str, str] | None) -> tuple[str, str]:
    """Flavour and path of the MPI library that mpi4py loads, as a child process finds them."""
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _QUERY],
            env=environ,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_QUERY_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendUnavailableError(f"asking mpi4py for its MPI library failed: {error}") from error
    if asked.returncode:
        reason = (asked.stderr.strip() or f"exit status {asked.returncode}").splitlines()[-1]
        if "No module named 'mpi4py'" in reason:
            raise BackendUnavailableError(f"{sys.executable} has no mpi4py: {_INSTALL}")
        raise BackendUnavailableError(f"mpi4py of {sys.executable} loads no MPI library ({reason}): {_INSTALL}")
    library, _, version = asked.stdout.partition("\n")
    return family(version), library


def _candidates(library: str) -> Iterator[str]:
    """Paths of mpiexec in the order of preference, each once."""
    seen = set()
    beside = Path(sys.executable).parent
    prefix = [str(parent / "bin") for parent in Path(library).parents[1:4]] if library else []
    for folders in (str(beside), *prefix, os.environ.get("PATH", os.defpath)):
        for folder, name in itertools.product(folders.split(os.pathsep), _NAMES):
            found = shutil.which(name, path=folder or os.curdir)
            if found and os.path.realpath(found) not in seen:
                seen.add(os.path.realpath(found))
                yield os.path.abspath(found)


def _flavour_of(mpiexec: str) -> str | None:
    """The flavour that the launcher's name, or the files beside it, give away; None if they don't."""
    real = Path(mpiexec).resolve()
    for flavour, words in ((OPENMPI, ("orterun", "prterun", "openmpi")), (MPICH, ("mpich",))):
        if any(word in real.name for word in words):
            return flavour
    owners = [flavour for flavour, names in _OWN_FILES.items() if any((real.parent / name).exists() for name in names)]
    return owners[0] if len(owners) == 1 else None


def _ask_version(mpiexec: str) -> str:
    """The flavour that `mpiexec --version` names."""
    try:
        asked = subprocess.run(
            [mpiexec, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_QUERY_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendUnavailableError(f"{mpiexec} --version does not run: {error}") from error
    return family(asked.stdout + asked.stderr)
