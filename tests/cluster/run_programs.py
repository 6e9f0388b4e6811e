"""Programs that `ncclcomm run` starts in tests over several hosts; they show what they did by files in their folder."""

from __future__ import annotations

from pathlib import Path

__all__ = ["MEETS", "SAVES", "WAITS", "program", "ranks_saved", "ranks_up"]

_HEAD = """
import os, signal, socket, subprocess, sys, time
from pathlib import Path
from mpi4py import MPI
world = MPI.COMM_WORLD
"""
MEETS = """
world.Barrier()
Path(f"met-{world.rank}").touch()
while len(list(Path().glob("met-*"))) < world.size: time.sleep(0.01)
"""
"""No rank is in MPI afterwards, where Open MPI ends a job itself when it sees a connection break, and can be faster."""
SAVES = """
def save(*_):
    Path(f"saved-{world.rank}").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
"""
"""What each rank does when it is asked to end."""
WAITS = """
world.Barrier()
Path(f"up-{world.rank}.new").write_text(str(os.getpid()))
os.rename(f"up-{world.rank}.new", f"up-{world.rank}")
while True: time.sleep(1)
"""
"""Each rank leaves its process id, and waits to be ended."""


def program(folder: Path, *parts: str, name: str = "program.py") -> Path:
    """Write a program of these parts."""
    path = folder / name
    path.write_text(_HEAD + "\n".join(parts))
    return path


def ranks_up(folder: Path) -> int:
    """How many ranks wait (WAITS)."""
    return len(list(folder.glob("up-?")))


def ranks_saved(folder: Path) -> list[int]:
    """The ranks that have saved their work (SAVES)."""
    return sorted(int(path.name.partition("-")[2]) for path in folder.glob("saved-*"))
