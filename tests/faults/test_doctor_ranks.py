"""`ncclcomm doctor` on ranks: each fault made for real, and the line that must find it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flavours import FLAVOURS, Flavour, find, run_tree

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0

DOCTOR = ("-m", "ncclcomm", "doctor", "--json")
OTHER_FAMILY = {"mpich": "openmpi", "openmpi": "mpich", "intelmpi": "openmpi"}
"""For each flavour one whose launcher starts ranks that never meet."""


@dataclass(frozen=True)
class Told:
    """What a doctor said."""

    status: int
    lines: dict[str, dict[str, str]]
    facts: dict[str, Any]
    stderr: str

    def fails(self) -> list[str]:
        """The ids of the lines that failed."""
        return [name for name, line in self.lines.items() if line["status"] == "fail"]

    def failed(self, name: str, *words: str) -> dict[str, str]:
        """The line of that name, which must have failed, say these words and name a mend; the exit status must be 1."""
        line = self.lines[name]
        assert line["status"] == "fail", line
        assert self.status == 1, self.status
        assert line["mend"], line
        for word in words:
            assert word in line["found"] + line["mend"], f"{word!r} is not in {line}"
        return line


def read(ended: subprocess.CompletedProcess[str]) -> Told:
    """The one JSON object in what a job wrote."""
    start, end = ended.stdout.find("{"), ended.stdout.rfind("}")
    assert start >= 0, f"no report\n--- stdout\n{ended.stdout}\n--- stderr\n{ended.stderr}"
    report = json.loads(ended.stdout[start : end + 1])
    assert sorted(report) == ["facts", "lines"]
    return Told(ended.returncode, {line["id"]: line for line in report["lines"]}, report["facts"], ended.stderr)


def doctor(flavour: Flavour, n: int, env: dict[str, str] | None = None, *options: str) -> Told:
    """Run the doctor on n ranks."""
    return read(flavour.run(n, [*DOCTOR, *options], {"PYTHONPATH": str(ROOT), **(env or {})}, timeout_s=DEADLINE_S))


def shim(folder: Path, source: str, rank: int = 1) -> dict[str, str]:
    """The environment in which Python runs a piece of source at the start of one rank."""
    lines = "".join(f"    {line}\n" for line in source.strip().splitlines())
    head = "import os, sys\nrank = os.environ.get('PMI_RANK') or os.environ.get('OMPI_COMM_WORLD_RANK')\n"
    (folder / "sitecustomize.py").write_text(f"{head}if rank == '{rank}':\n{lines}")
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


@pytest.fixture
def mpich() -> Flavour:
    """The flavour that starts fastest, where the fault has nothing to do with the MPI."""
    return find("mpich")


@pytest.mark.flavours(*FLAVOURS)
def test_sound_ranks_pass(flavour: Flavour) -> None:
    told = doctor(flavour, 3)
    assert told.status == 0, told
    assert not told.fails()
    for name in ("mpi.launcher", "world.size", "world.answers", "mpi.threads", "versions.numpy", "trial.init"):
        assert told.lines[name]["status"] == "pass", told.lines[name]
    for name, members in (("trial.devices", "4 devices"), ("trial.node", "3 ranks")):
        assert told.lines[name]["status"] == "pass"
        assert members in told.lines[name]["found"]
        assert told.lines[name]["found"].count("GB/s") == 2
    assert [fact["rank"] for fact in told.facts["ranks"]] == [0, 1, 2]
    assert told.lines["trial.nodes"]["status"] == "not checked"


def test_one_report_for_people_from_ranks_of_two_nodes(flavour: Flavour) -> None:
    env = {"PYTHONPATH": str(ROOT), "NCCLCOMM_NODE_SIZE": "1"}
    ended = flavour.run(2, ["-m", "ncclcomm", "doctor"], env, timeout_s=DEADLINE_S)
    assert ended.returncode == 0, ended
    assert ended.stdout.count("ncclcomm doctor: 2 ranks on ") == 1
    (line,) = [line for line in ended.stdout.splitlines() if "trial.nodes" in line]
    assert line.startswith("pass")
    assert "2 nodes" in line
    assert "\033" not in ended.stdout


def test_under_ncclcomm_run(mpich: Flavour) -> None:
    argv = [mpich.python, "-m", "ncclcomm", "run", "-n", "2", "-m", "ncclcomm", "doctor", "--json"]
    told = read(run_tree(argv, env=mpich.env({"PYTHONPATH": str(ROOT)}), timeout_s=DEADLINE_S))
    assert told.status == 0, told
    assert told.facts["size"] == 2


def test_info_tells_the_facts_of_all_ranks(flavour: Flavour, tmp_path: Path) -> None:
    env = shim(tmp_path, "import numpy\nnumpy.__version__ = '0.9'")
    ended = flavour.run(2, ["-m", "ncclcomm", "info"], env, timeout_s=DEADLINE_S)
    assert ended.returncode == 0, ended
    assert [line for line in ended.stdout.splitlines() if line.startswith("numpy") and "rank 1: 0.9" in line]
    told = read(flavour.run(2, ["-m", "ncclcomm", "info", "--json"], env, timeout_s=DEADLINE_S))
    assert told.lines == {}
    assert [fact["rank"] for fact in told.facts["ranks"]] == [0, 1]


@pytest.mark.flavours(*FLAVOURS)
def test_the_launcher_of_another_mpi(flavour: Flavour) -> None:
    other = find(OTHER_FAMILY[flavour.name])
    strange = Flavour(other.name, flavour.python, other.mpiexec)
    told = doctor(strange, 3)
    line = told.failed("mpi.launcher", "3", "ncclcomm run -n 3")
    for name in ("MPICH", "Open MPI") if flavour.name != "intelmpi" else ("Intel", "Open MPI"):
        assert name in line["found"]
    own = next(fact for fact in told.facts["ranks"])["executable"]
    assert str(Path(own).parent / "mpiexec") in line["mend"]
    assert told.lines["world.size"]["status"] == "fail"
    assert told.lines["trial.init"]["status"] == "not checked"


def older(folder: Path, flavour: Flavour, what: str) -> Path:
    """A folder that holds a package, or for mpi4py what its installer says of it, in version 0.9."""
    argv = [flavour.python, "-c", f"import {what} as p; print(p.__file__); print(p.__version__)"]
    file, version = subprocess.run(
        argv, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    ).stdout.split()
    if what == "mpi4py":
        (folder / "mpi4py-0.9.dist-info").mkdir(parents=True)
        (folder / "mpi4py-0.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mpi4py\nVersion: 0.9\n")
        return folder
    (folder / what).mkdir(parents=True)
    for entry in Path(file).parent.iterdir():
        (folder / what / entry.name).symlink_to(entry)
    says = folder / what / ("version.py" if what == "numpy" else "__init__.py")
    text = says.read_text()
    assert f'"{version}"' in text
    says.unlink()
    says.write_text(text.replace(f'"{version}"', '"0.9"'))
    return folder


@pytest.mark.parametrize("what", ["numpy", "mpi4py", "ncclcomm"])
def test_versions_that_differ(mpich: Flavour, tmp_path: Path, what: str) -> None:
    env = shim(tmp_path, f"sys.path.insert(0, {str(older(tmp_path / 'older', mpich, what))!r})")
    # `-m` finds ncclcomm before the shim's path counts, in the current folder: so start elsewhere.
    told = read(mpich.run(3, DOCTOR, env, timeout_s=DEADLINE_S, cwd=tmp_path))
    name = "mpi.mpi4py" if what == "mpi4py" else f"versions.{what}"
    told.failed(name, "rank 1 on ", ": 0.9", "ranks 0, 2 on ")
    assert told.fails() == [name]
    if what == "ncclcomm":
        assert told.lines["trial.init"]["status"] == "not checked"


def test_pythons_that_differ(mpich: Flavour, tmp_path: Path) -> None:
    # Packages of another Python can't be counted on; one of another patch level: test_doctor_machine.py.
    told = doctor(mpich, 2, shim(tmp_path, "import platform\nplatform.python_version = lambda: '3.9.1'"))
    told.failed("versions.python", "rank 1 on ", ": 3.9.1")
    assert told.fails() == ["versions.python"]


def test_a_variable_that_makes_no_sense_on_one_rank(mpich: Flavour, tmp_path: Path) -> None:
    told = doctor(mpich, 2, shim(tmp_path, "os.environ['NCCLCOMM_CHECK'] = 'often'"))
    told.failed("settings.values", "rank 1", "NCCLCOMM_CHECK", "often")
    assert told.fails() == ["settings.values"]
    assert "settings.values" in told.lines["trial.init"]["found"]


def test_nodes_that_cannot_be(mpich: Flavour) -> None:
    told = doctor(mpich, 2, {"NCCLCOMM_NODE_MAP": "0,1,0"})
    told.failed("trial.init", "NCCLCOMM_NODE_MAP has 3 entries for 2 ranks")
    assert told.fails() == ["trial.init"]


def test_gpus_demanded_on_one_rank_that_has_none(mpich: Flavour, tmp_path: Path) -> None:
    source = "os.environ['NCCLCOMM_DEVICES'] = 'cuda'\nsys.modules['cupy'] = None"
    told = doctor(mpich, 2, shim(tmp_path, source))
    told.failed("devices.backend", "rank 1", "NCCLCOMM_DEVICES=cuda", "NCCLCOMM_DEVICES=host")
    assert told.lines["devices.ranks"]["status"] == "not checked"
    assert told.lines["trial.init"]["status"] == "not checked"


def test_wrong_sums_of_one_rank(mpich: Flavour, tmp_path: Path) -> None:
    source = """
from ncclcomm.communicator.communicator import Communicator
right = Communicator.all_reduce
def wrong(self, array, *args, out=None, **kwargs):
    total = right(self, array, *args, out=out, **kwargs)
    total[5] += 1
    return total
Communicator.all_reduce = wrong
"""
    told = doctor(mpich, 3, shim(tmp_path, source, rank=2))
    line = told.failed("trial.node", "all_reduce", "rank 2")
    assert "rank 1" not in line["found"]


def test_wrong_broadcast_across_nodes(mpich: Flavour, tmp_path: Path) -> None:
    source = """
from ncclcomm.communicator.communicator import Communicator
right = Communicator.broadcast
def wrong(self, array=None, *, out=None, **kwargs):
    got = right(self, array, out=out, **kwargs)
    got[-1] ^= 4
    return got
Communicator.broadcast = wrong
"""
    told = doctor(mpich, 2, {**shim(tmp_path, source, rank=0), "NCCLCOMM_NODE_SIZE": "1"})
    line = told.failed("trial.nodes", "broadcast", "rank 0")
    assert "rank 1" not in line["found"]


def test_wrong_copies_and_sums_between_devices(mpich: Flavour, tmp_path: Path) -> None:
    source = """
import numpy as np
from ncclcomm.transport.peer import PeerTransport
right = PeerTransport.copy_all
def wrong(self, pairs, streams=()):
    right(self, pairs, streams)
    for dst, src in pairs:
        if dst.device == 2 and src.device == 1:
            dst.data.reshape(-1)[7] = 0
PeerTransport.copy_all = wrong
summed = PeerTransport.all_reduce
def wrong_sum(self, arrays, outs, op):
    summed(self, arrays, outs, op)
    outs[3][3] -= 1
PeerTransport.all_reduce = wrong_sum
"""
    told = doctor(mpich, 2, shim(tmp_path, source, rank=0))
    line = told.failed("devices.ways", "1 to 2")
    assert "2 to 1" not in line["found"]
    told.failed("trial.devices", "all_reduce", "device 3")


def test_ranks_that_disagree_in_a_trial(mpich: Flavour, tmp_path: Path) -> None:
    source = """
import numpy
from ncclcomm.doctor import trials
right = trials._terms
trials._terms = lambda member: right(member).astype(numpy.int32)
"""
    told = doctor(mpich, 2, {**shim(tmp_path, source), "NCCLCOMM_NODE_SIZE": "1"})
    told.failed("trial.nodes", "rank 0: ", "all_reduce", "int32")
    told = doctor(mpich, 2, shim(tmp_path, source))
    told.failed("trial.node", "rank 0: ", "all_reduce", "int32")
    assert told.fails() == ["trial.node"]


def test_devices_that_refuse_a_trial(mpich: Flavour, tmp_path: Path) -> None:
    source = """
from ncclcomm.errors import DeviceError
from ncclcomm.transport.peer import PeerTransport
def refuse(self, *args):
    raise DeviceError("cudaErrorIllegalAddress", code=700)
PeerTransport.all_reduce = refuse
"""
    told = doctor(mpich, 2, shim(tmp_path, source, rank=0))
    told.failed("trial.devices", "rank 0: ", "cudaErrorIllegalAddress")


DENY_PROCESS_VM_READV = """
import ctypes, struct
libc = ctypes.CDLL(None)
# A filter: load the system call's number; if it is process_vm_readv's, answer EPERM, else allow.
number = {"x86_64": 310, "aarch64": 270}[os.uname().machine]
code = struct.pack("HBBI" * 4, 0x20, 0, 0, 0, 0x15, 0, 1, number, 0x06, 0, 0, 0x00050001, 0x06, 0, 0, 0x7FFF0000)
memory = ctypes.create_string_buffer(code)
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
program = Program(4, ctypes.addressof(memory))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0
"""


def test_ranks_that_may_not_read_each_other(flavour: Flavour, tmp_path: Path) -> None:
    # MPICH's wheels read all the same, unless told not to, and large messages fail.
    told = doctor(flavour, 3, {**shim(tmp_path, DENY_PROCESS_VM_READV), "MPIR_CVAR_CH4_CMA_ENABLE": "0"})
    line = told.lines["node.process_vm_readv"]
    assert line["status"] == "warn", line
    assert "rank 1 " in line["found"]
    assert "Operation not permitted" in line["found"]
    assert line["mend"]
    assert told.status == 0
    assert told.lines["trial.node"]["status"] == "pass"


def test_an_mpich_that_fails_where_it_may_not_read(mpich: Flavour, tmp_path: Path) -> None:
    told = doctor(mpich, 3, shim(tmp_path, DENY_PROCESS_VM_READV), "--timeout", "5")
    told.failed("node.process_vm_readv", "rank 1 ", "Operation not permitted", "MPIR_CVAR_CH4_CMA_ENABLE=0")
    assert told.lines["trial.init"]["status"] == "fail"
    assert "in all_reduce" in told.stderr


def test_a_rank_that_dies_in_a_trial(flavour: Flavour, tmp_path: Path) -> None:
    source = """
import signal
from ncclcomm.doctor import trials
trials.try_ranks = lambda part: os.kill(os.getpid(), signal.SIGKILL)
"""
    argv = ["-m", "ncclcomm", "doctor", "--json"]
    told = read(flavour.run(2, argv, shim(tmp_path, source), timeout_s=DEADLINE_S))
    assert told.status != 0
    assert told.lines["trial.init"]["found"].startswith("the job ended in a trial")
    assert told.lines["world.answers"]["status"] == "pass"


STUCK = """
import signal
from mpi4py import MPI
if MPI.COMM_WORLD.rank == {stuck}:
    signal.pause()
from ncclcomm.cli import main
raise SystemExit(main(["doctor", "--json", "--timeout", "1.5"]))
"""


def test_a_rank_that_does_not_answer_is_named(flavour: Flavour) -> None:
    started = time.monotonic()
    env = {"PYTHONPATH": str(ROOT)}
    ended = flavour.run(3, ["-c", STUCK.format(stuck=2)], env, timeout_s=DEADLINE_S)
    assert time.monotonic() - started < 20
    told = read(ended)
    line = told.lines["world.answers"]
    assert line["status"] == "fail"
    assert "rank 2 of 3" in line["found"]
    assert "1.5 s" in line["found"]
    assert ended.returncode != 0
    assert told.facts["missing"] == [2]


def test_the_first_rank_does_not_answer(mpich: Flavour) -> None:
    ended = mpich.run(3, ["-c", STUCK.format(stuck=0)], {"PYTHONPATH": str(ROOT)}, timeout_s=DEADLINE_S)
    assert ended.returncode != 0
    assert ended.stderr.count("rank 0 didn't answer rank 1") == 1
    assert "answer rank 2" not in ended.stderr


def test_a_rank_that_never_comes_to_mpi_init(mpich: Flavour) -> None:
    program = """
import os, signal
if os.environ["PMI_RANK"] == "1":
    signal.pause()
from ncclcomm.cli import main
raise SystemExit(main(["doctor", "--timeout", "1"]))
"""
    ended = mpich.run(2, ["-c", program], {"PYTHONPATH": str(ROOT)}, timeout_s=DEADLINE_S)
    assert ended.returncode != 0
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("fail")]
    assert "rank 0" in line
    assert "in MPI_Init for 3 s" in line


def test_a_rank_whose_mpi_cannot_be_loaded_says_so(flavour: Flavour, tmp_path: Path) -> None:
    env = shim(tmp_path, "sys.modules['mpi4py'] = None")
    ended = flavour.run(2, ["-m", "ncclcomm", "doctor"], env, timeout_s=DEADLINE_S)
    assert ended.returncode == 1, ended
    assert "fail  ncclcomm doctor: rank 1 on " in ended.stderr
    assert "mpi4py loads no MPI library (import of mpi4py halted" in ended.stderr


def test_a_rank_that_dies_in_mpi_init(mpich: Flavour, tmp_path: Path) -> None:
    source = """
import signal
from ncclcomm.doctor import session
session.World = lambda mpi, facts: os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = mpich.run(2, ["-m", "ncclcomm", "doctor"], shim(tmp_path, source), timeout_s=DEADLINE_S)
    assert ended.returncode != 0
    lines = [line for line in ended.stderr.splitlines() if line.startswith("fail")]
    assert [line for line in lines if "rank 1 on" in line and "ended in MPI_Init" in line], ended


def test_a_rank_that_hangs_in_a_trial_is_named(mpich: Flavour, tmp_path: Path) -> None:
    source = """
import signal
from ncclcomm.doctor import trials
trials.try_ranks = lambda part: signal.pause()
"""
    told = doctor(mpich, 2, shim(tmp_path, source), "--timeout", "1")
    told.failed("world.answers", "rank 1 of 2")
    told.failed("trial.init", "the job ended in a trial", "barrier")


def test_a_fault_of_the_doctor_itself_ends_the_job(flavour: Flavour, tmp_path: Path) -> None:
    source = """
from ncclcomm.doctor import session
session.run_trials = lambda limit_s: {}["nothing"]
"""
    started = time.monotonic()
    ended = flavour.run(2, ["-m", "ncclcomm", "doctor"], shim(tmp_path, source), timeout_s=DEADLINE_S)
    assert time.monotonic() - started < 20
    assert ended.returncode != 0
    assert "KeyError: 'nothing'" in ended.stderr


def test_the_first_rank_hangs_in_a_trial(mpich: Flavour, tmp_path: Path) -> None:
    source = """
import signal
from ncclcomm.doctor import trials
trials.try_ranks = lambda part: signal.pause()
"""
    told = doctor(mpich, 2, shim(tmp_path, source, rank=0), "--timeout", "1")
    assert told.status != 0
    assert told.lines["trial.init"]["status"] == "fail"
    assert "rank 0 on" in told.stderr
    assert "in the trials for 3 s" in told.stderr
