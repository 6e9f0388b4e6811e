"""`ncclcomm doctor` on a machine in which one thing is wrong: its mounts, limits, libraries or interpreters."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from faults.test_doctor_alone import MAIN, SLURM_TASK, alone
from faults.test_doctor_ranks import DEADLINE_S, DOCTOR, ROOT, Told, doctor, read, shim
from flavours import FLAVOURS, Flavour, find, missing, private_sessions, run_tree


@pytest.fixture
def mpich() -> Flavour:
    """The flavour that starts fastest, where the fault has nothing to do with the MPI."""
    return find("mpich")


def with_mounts(flavour: Flavour, commands: str, argv: Sequence[str | Path], env: dict[str, str] | None = None) -> Told:
    """Run a doctor that sees mounts of its own, which shell commands make."""
    if os.geteuid() or not shutil.which("unshare"):
        missing("mounts of a test's own", "they need root and unshare: apt-get install util-linux")
    with private_sessions() as sessions:
        whole = flavour.env({"PYTHONPATH": str(ROOT), **sessions, **(env or {})})
        mounted = ["unshare", "-m", "sh", "-euc", f'{commands}\nexec "$@"', "sh", *argv]
        return read(run_tree(mounted, env=whole, timeout_s=DEADLINE_S))


def ranks(flavour: Flavour, n: int, *options: str) -> list[str]:
    """The command of a doctor on ranks."""
    return [flavour.mpiexec, "-n", str(n), flavour.python, *DOCTOR, *options]


def beside(flavour: Flavour, *words: str | Path) -> Told:
    """Run a doctor on two ranks, the second of which is started by these words and the doctor's own."""
    return read(flavour.run(1, [*DOCTOR, ":", "-n", "1", *words, *DOCTOR], {"PYTHONPATH": str(ROOT)}, DEADLINE_S))


def library_of(flavour: Flavour) -> tuple[Path, str]:
    """The MPI library's file, and its version."""
    fact = alone(flavour).facts["ranks"][0]
    return Path(fact["mpi_path"]), fact["mpi_library"].split()[1]


def test_a_dev_shm_that_a_container_gives(mpich: Flavour) -> None:
    for size, status in (("32m", "warn"), ("1500k", "fail")):
        told = with_mounts(mpich, f"mount -t tmpfs -o size={size} tmpfs /dev/shm", [mpich.python, "-c", MAIN])
        assert told.lines["node.shm"]["status"] == status, told.lines["node.shm"]
        assert "--shm-size=1g" in told.lines["node.shm"]["mend"]
        assert told.status == (status == "fail")


def test_a_tiny_dev_shm(flavour: Flavour) -> None:
    # MPICH and Intel MPI would die of it in MPI_Init, Open MPI goes on slowly.
    told = with_mounts(flavour, "mount -t tmpfs -o size=256k tmpfs /dev/shm", ranks(flavour, 2))
    assert told.status != 0
    line = told.lines["node.shm"]
    assert line["status"] == "fail", line
    assert "of 0.25 MiB" in line["found"]
    assert "--shm-size=1g" in line["mend"]
    if flavour.name != "openmpi":
        told.failed("world.size", "MPI_Init")


def test_a_dev_shm_that_cannot_be_written(mpich: Flavour) -> None:
    told = with_mounts(mpich, "mount -t tmpfs -o ro tmpfs /dev/shm", [mpich.python, "-c", MAIN])
    told.failed("node.shm", "/dev/shm can't be written by user 0")
    mend = told.lines["node.shm"]["mend"]
    assert "mount -t tmpfs -o mode=1777,size=1g tmpfs /dev/shm" in mend
    assert "remount" not in mend, "it is not too small"


RDMA = "mount -t tmpfs tmpfs /sys/class; mkdir -p /sys/class/infiniband/mlx5_0"
"""Makes an adapter, as far as the kernel's list of them tells."""


def test_too_little_locked_memory_for_an_adapter(mpich: Flavour, tmp_path: Path) -> None:
    less = "import resource\nresource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))"
    told = with_mounts(mpich, RDMA, ranks(mpich, 2), shim(tmp_path, less))
    line = told.lines["node.memlock"]
    assert line["status"] == "warn", line
    assert re.match(r"rank 1 on \S+ may lock 0\.0625 MiB, too little for an RDMA device \(mlx5_0 on ", line["found"])
    assert "ulimit -l unlimited" in line["mend"]
    assert (told.status, told.fails()) == (0, [])


def test_a_driver_without_cupy(mpich: Flavour) -> None:
    if not Path("/proc/driver").is_dir():
        missing("/proc/driver", "this kernel has none to mount over", ci_has_it=False)
    version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23"
    folder = "/proc/driver/nvidia"
    mount = f"mount -t tmpfs tmpfs /proc/driver; mkdir {folder}; echo '{version}' >{folder}/version"
    program = "import sys\nsys.modules['cupy'] = None\n" + MAIN
    told = with_mounts(mpich, mount, [mpich.python, "-c", program], {"NCCLCOMM_DEVICES": "auto"})
    line = told.lines["devices.backend"]
    assert line["status"] == "warn", line
    assert "an NVIDIA driver (570.86.15) is loaded" in line["found"]
    assert "pip install 'ncclcomm[cuda13]'" in line["mend"]
    assert told.status == 0
    told = with_mounts(mpich, mount, [mpich.python, "-c", program], {"NCCLCOMM_DEVICES": "host"})
    assert told.lines["devices.backend"]["status"] == "pass"


@pytest.mark.parametrize("there", ["none", "another MPI's"])
def test_the_mpiexec_is_gone(mpich: Flavour, tmp_path: Path, there: str) -> None:
    other = find("openmpi")
    if there == "none":
        path, words = str(tmp_path), ("no mpiexec is beside", mpich.python)
    else:
        path, words = str(Path(other.mpiexec).parent), ("MPICH", "Open MPI", other.mpiexec)
    own = Path(mpich.mpiexec).parent.glob("mpiexec*")
    told = with_mounts(
        mpich,
        "\n".join(f"mount --bind /dev/null '{file}'" for file in own),
        ["env", f"PATH={path}", mpich.python, "-c", MAIN],
    )
    told.failed("mpi.launcher", *words)
    assert told.fails() == ["mpi.launcher"]


def test_a_rank_with_another_mpi_library(mpich: Flavour, tmp_path: Path) -> None:
    library, version = library_of(mpich)
    other = f"{version[:-1]}x"
    text = library.read_bytes()
    for old, new in ((f"\0{version}\0", f"\0{other}\0"), ("X_Query_cuda_support\0", "X_Query_cuda_suppor_\0")):
        assert old.encode() in text
        text = text.replace(old.encode(), new.encode())
    for entry in library.parent.iterdir():  # where it looks for others
        (tmp_path / entry.name).symlink_to(entry)
    (tmp_path / library.name).unlink()
    (tmp_path / library.name).write_bytes(text)
    told = beside(mpich, "env", f"LD_PRELOAD={tmp_path / library.name}", mpich.python)
    told.failed("mpi.library", "rank 0 on ", f": MPICH {version}; rank 1 on ", f": MPICH {other}")
    assert told.fails() == ["mpi.library"]
    assert told.lines["trial.init"]["found"] == "ranks load different MPI libraries"
    line = told.lines["mpi.cuda"]
    assert line["status"] == "warn", line
    assert re.search("rank 0 on .*: (?!.*no such function.*; rank 1).*; rank 1 on .*no such function", line["found"])


def test_ranks_of_two_mpis_that_never_meet(mpich: Flavour) -> None:
    # They have one interface for programs, and none between ranks.
    intel = find("intelmpi")
    argv = [*DOCTOR, "--timeout", "1.5"]
    ended = mpich.run(1, [*argv, ":", "-n", "1", intel.python, *argv], {"PYTHONPATH": str(ROOT)}, DEADLINE_S)
    assert ended.returncode != 0
    assert re.search(r"fail  ncclcomm doctor: rank \d on .* in MPI_Init", ended.stderr), ended
    assert re.search(r"-> this rank loads (MPICH \d|Intel\(R\) MPI).*, as all must", ended.stderr), ended


@pytest.mark.parametrize(
    ("setting", "level"), [("THREAD_LEVEL=serialized", "serialized"), ("THREADS=no", "single")], ids=["level", "none"]
)
def test_an_mpi_that_serves_no_threads(flavour: Flavour, setting: str, level: str) -> None:
    name, _, value = setting.partition("=")
    told = doctor(flavour, 2, {f"MPI4PY_RC_{name}": value})
    line = told.lines["mpi.threads"]
    assert line["status"] == "warn", line
    assert re.match(rf"ranks 0-1 on \S+: MPI gives threads={level},", line["found"])
    assert "unset MPI4PY_RC_THREADS and MPI4PY_RC_THREAD_LEVEL" in line["mend"]
    assert (told.status, told.fails()) == (0, [])


@pytest.mark.flavours(*FLAVOURS)
def test_a_rank_with_another_thread_level(flavour: Flavour, tmp_path: Path) -> None:
    told = doctor(flavour, 2, shim(tmp_path, "os.environ['MPI4PY_RC_THREADS'] = 'no'"))
    if flavour.name == "mpich":
        told.failed("mpi.threads", "rank 0 on ", ": multiple; rank 1 on ", ": single", "unset MPI4PY_RC_THREADS")
        assert told.fails() == ["mpi.threads"]
        assert told.lines["trial.node"]["status"] == "not checked"
        return
    line = told.lines["mpi.threads"]
    assert line["status"] == "warn", line
    assert re.match(r"rank 1 on \S+: MPI gives threads=single,", line["found"])
    assert told.lines["trial.node"]["status"] == "pass"


def ask(python: str | Path, what: str) -> str:
    """What an interpreter prints of itself; '' from one that does not run."""
    argv = [str(python), "-c", f"import platform, sysconfig; print({what})"]
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip()


def test_a_rank_with_another_python(mpich: Flavour) -> None:
    own = ask(mpich.python, "platform.python_version()")
    minor = own.rpartition(".")[0]  # another one could not load NumPy
    folders = ("/usr/bin", "/usr/local/bin", *os.environ["PATH"].split(os.pathsep))
    there = [file for folder in folders if os.access(file := f"{folder}/python{minor}", os.X_OK)]
    others = {file: version for file in there if (version := ask(file, "platform.python_version()")) not in ("", own)}
    if not others:
        missing("another Python", f"each of {there} is {own} or does not run", ci_has_it=False)
    other, version = next(iter(others.items()))
    packages = ask(mpich.python, "sysconfig.get_path('platlib')")
    library, _ = library_of(mpich)
    told = beside(mpich, "env", f"PYTHONPATH={ROOT}:{packages}", f"LD_LIBRARY_PATH={library.parent}", other)
    line = told.lines["versions.python"]
    assert line["status"] == "warn", line
    assert f"; rank 1 on {told.facts['ranks'][1]['host']}: {version} ({other})" in line["found"]
    assert line["mend"].endswith(f"by its path: {told.facts['ranks'][0]['executable']}")
    assert (told.status, told.fails()) == (0, [])


def test_fewer_cores_than_slurm_counts(mpich: Flavour) -> None:
    program = "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n" + MAIN
    task = {**SLURM_TASK, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "SLURM_CPUS_PER_TASK": "2"}
    told = alone(mpich, task, program)
    line = told.lines["slurm.cores"]
    assert line["status"] == "warn", line
    assert "may use 1 cores; SLURM_CPUS_PER_TASK=2" in line["found"]
    assert "srun --cpus-per-task=2" in line["mend"]
    assert (told.status, told.fails()) == (0, [])
