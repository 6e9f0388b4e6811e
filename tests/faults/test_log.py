"""NCCLCOMM_LOG=info: what was chosen for each communicator, and why, said once."""

from __future__ import annotations

from pathlib import Path

from flavours import Flavour, find, run_tree

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import numpy as np
import ncclcomm
with ncclcomm.init(check=7, timeout_s=30) as comm:
    comm.all_reduce(np.ones(3))
    comm.split(comm.rank % 2).close()
"""


def test_each_communicator_says_once_what_was_chosen(flavour: Flavour, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    env = {"NCCLCOMM_LOG": "info", "NCCLCOMM_DEVICES": "host:2", "NCCLCOMM_NODE_SIZE": "2"}
    ended = flavour.run(3, [tmp_path / "program.py"], env=env)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    library = "MPICH" if flavour.name == "mpich" else "Open MPI" if flavour.name == "openmpi" else "Intel"
    blocks = sorted(block for block in ended.stderr.split("ncclcomm: communicator of ") if block)
    assert len(blocks) == 3, ended.stderr
    one, two, world = blocks
    assert world.startswith("3 ranks on 2 nodes (1 or 2 a node; nodes by NCCLCOMM_NODE_SIZE=2)\n"), world
    assert "backend: host, 2 devices visible (NCCLCOMM_DEVICES=host)" in world
    assert "devices of the ranks: 0, 1, 0\n  within a node: mpi\n  across nodes: mpi\n" in world
    assert f"MPI: {library}" in world
    assert "checked calls: the first 7; time limit of a call: 30 s" in world
    assert one.startswith("1 rank on 1 node (1 a node;"), one
    assert two.startswith("2 ranks on 2 nodes (1 a node;"), two
    assert "devices of the ranks: 0, 0" in two


def test_a_world_of_one_and_its_parts_say_it_too(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(f"{PROGRAM}    assert comm.split(None) is None\n")
    mpich = find("mpich")
    env = mpich.env({"NCCLCOMM_LOG": "info", "PYTHONPATH": str(ROOT)})
    ended = run_tree([mpich.python, tmp_path / "program.py"], env=env)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    world, part = (block for block in ended.stderr.split("ncclcomm: communicator of ") if block)
    assert world == part
    assert part.startswith("1 rank on 1 node (1 a node; nodes by shared memory)\n")
    assert part.endswith("  checked calls: the first 7; time limit of a call: 30 s\n")


def test_nothing_is_said_unasked(flavour: Flavour, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    ended = flavour.run(2, [tmp_path / "program.py"])
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
