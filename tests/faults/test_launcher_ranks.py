"""What ranks of `ncclcomm run` find: environment, arguments, cores, standard streams, their `__main__`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from flavours import FLAVOURS, Flavour, clean_env, run_tree

pytestmark = pytest.mark.flavours(*FLAVOURS)

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 40.0

CONSOLE_SCRIPT = "import sys; sys.path.remove(''); from ncclcomm.cli import main; sys.exit(main())"
"""As the installed command starts: the current directory is no place to import from."""

VALUES = {
    "X_SPACE": "a b  c",
    "X_QUOTES": 'it\'s "so" $HOME `x` \\ ;|&*',
    "X_EMPTY": "",
    "X_LINES": "one\ntwo\n",
    "X_EQUALS": "a=b",
    "X_UNICODE": "naïve",
    "NCCL_DEBUG": "WARN",
}

DESCRIBE = """
import json, os, sys
from mpi4py import MPI
world = MPI.COMM_WORLD
mine = {
    "size": world.size, "argv": sys.argv, "path": sys.path, "name": __name__, "cores": len(os.sched_getaffinity(0)),
    "environ": {k: v for k, v in os.environ.items() if k.startswith(("X_", "NCCL_", "PYTHON", "LD_"))},
    "main": sys.modules["__main__"].__dict__ is globals(),
    "file": __file__, "ncclcomm": [m for m in sys.modules if m.startswith("ncclcomm")],
}
everyone = world.gather(mine)
if everyone: print(json.dumps(everyone))
"""


def base_env(**extra: str) -> dict[str, str]:
    environ = {k: v for k, v in clean_env().items() if not k.startswith(("NCCL", "X_", "PYTHON", "LD_"))}
    return {**environ, "PYTHONPATH": str(ROOT), **extra}


def launch(
    flavour: Flavour, *args: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    argv = [flavour.python, "-c", CONSOLE_SCRIPT, "run", *args]
    return run_tree(argv, env=env or base_env(), timeout_s=LIMIT_S, cwd=cwd)


@pytest.fixture
def describe(tmp_path: Path) -> Path:
    folder = tmp_path / "some where"
    folder.mkdir()
    path = folder / "describe it.py"
    path.write_text(DESCRIBE)
    return path


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_ranks_form_one_world_with_all_cores(flavour: Flavour, describe: Path, size: int) -> None:
    ended = launch(flavour, "-n", str(size), describe)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    ranks = json.loads(ended.stdout)
    assert [rank["size"] for rank in ranks] == [size] * size
    assert [rank["cores"] for rank in ranks] == [len(os.sched_getaffinity(0))] * size


def test_environment_arrives_exactly(flavour: Flavour, describe: Path) -> None:
    env = base_env(**VALUES, LD_LIBRARY_PATH="/no/such folder")
    ranks = json.loads(launch(flavour, "-n", "3", describe, env=env).stdout)
    for rank in ranks:
        assert rank["environ"].items() >= {**VALUES, "PYTHONPATH": str(ROOT)}.items()
        assert "/no/such folder" in rank["environ"]["LD_LIBRARY_PATH"]
        assert "PYTHONUNBUFFERED" not in rank["environ"]


def test_arguments_arrive_exactly(flavour: Flavour, describe: Path) -> None:
    args = ["--help", "-n", "9", "--", "a b", "it's", '"', "", "$HOME", "*", "one\ntwo", "--timeout"]
    ranks = json.loads(launch(flavour, "-n", "2", describe, *args).stdout)
    assert [rank["argv"] for rank in ranks] == [[str(describe), *args]] * 2


def test_script_is_main_as_with_plain_python(flavour: Flavour, describe: Path, tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("raise RuntimeError('of the current directory')")
    relative = describe.relative_to(tmp_path)
    plain = run_tree([flavour.python, relative, "x"], env=flavour.env({"PYTHONPATH": str(ROOT)}), cwd=tmp_path)
    ranks = json.loads(launch(flavour, "-n", "2", relative, "x", cwd=tmp_path).stdout)
    (expected,) = json.loads(plain.stdout)
    for rank in ranks:
        for key in ("argv", "path", "name", "main", "file", "ncclcomm"):
            assert rank[key] == expected[key], key
    assert expected["main"] is True


def test_module_is_main_as_with_plain_python(flavour: Flavour, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text("VALUE = 3\n")
    (package / "__main__.py").write_text(f"from .part import VALUE\n{DESCRIBE}")
    plain = run_tree([flavour.python, "-m", "package", "-m"], env=flavour.env({"PYTHONPATH": str(ROOT)}), cwd=tmp_path)
    ranks = json.loads(launch(flavour, "-n", "2", "-m", "package", "-m", cwd=tmp_path).stdout)
    (expected,) = json.loads(plain.stdout)
    for rank in ranks:
        for key in ("argv", "path", "name", "main", "file"):
            assert rank[key] == expected[key], key


def test_missing_module_is_named(flavour: Flavour, tmp_path: Path) -> None:
    ended = launch(flavour, "-n", "2", "-m", "no_such_module", cwd=tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.count("No module named 'no_such_module'") == 1


def test_rank_0_reads_stdin(flavour: Flavour, tmp_path: Path) -> None:
    script = tmp_path / "read.py"
    script.write_text(
        "from mpi4py import MPI\nc = MPI.COMM_WORLD\n"
        "print(c.bcast([input(), input()] if c.rank == 0 else None) if c.rank else c.bcast([input(), input()]))\n"
    )
    line = 'printf "first\\nsecond\\n" | "$@"'
    argv = ["bash", "-c", line, "bash", flavour.python, "-m", "ncclcomm", "run", "-n", "3", script]
    ended = run_tree(argv, env=base_env(), timeout_s=LIMIT_S)
    assert ended.stdout.splitlines() == ["['first', 'second']"] * 3, ended.stderr


@pytest.mark.parametrize("source", ["echo hello |", "</dev/null"])
def test_other_ranks_find_the_end_of_the_input(flavour: Flavour, tmp_path: Path, source: str) -> None:
    script = tmp_path / "read.py"
    # Rank 0 leaves its own alone: Open MPI 5 does not pass on the end.
    script.write_text(
        "import sys\nfrom mpi4py import MPI\nc = MPI.COMM_WORLD\n"
        "print(c.rank, repr(sys.stdin.read()) if c.rank else 'none', flush=True)\nc.barrier()\n"
    )
    line = f'{source} "$@"' if source.endswith("|") else f'"$@" {source}'
    argv = ["bash", "-c", line, "bash", flavour.python, "-m", "ncclcomm", "run", "-n", "3", script]
    ended = run_tree(argv, env=base_env(), timeout_s=LIMIT_S)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["0 none", "1 ''", "2 ''"]


def test_stdout_passes_bytes_unchanged(flavour: Flavour, tmp_path: Path) -> None:
    script = tmp_path / "bytes.py"
    script.write_text("import sys\nsys.stdout.buffer.write(bytes(range(256)) * 400 + b'\\n\\r\\n')\n")
    out = tmp_path / "out"
    argv = ["bash", "-c", '"$@" > "$0"', out, flavour.python, "-m", "ncclcomm", "run", "-n", "1", script]
    assert run_tree(argv, env=base_env(), timeout_s=LIMIT_S).returncode == 0
    assert out.read_bytes() == bytes(range(256)) * 400 + b"\n\r\n"


def test_lines_appear_while_the_rank_runs(flavour: Flavour, tmp_path: Path) -> None:
    script = tmp_path / "prompt.py"
    go = tmp_path / "go"
    os.mkfifo(go)
    script.write_text(f"print('ready')\nopen({str(go)!r}).read()\nprint('done')\n")
    process = subprocess.Popen(
        [flavour.python, "-m", "ncclcomm", "run", "-n", "1", "--timeout", str(LIMIT_S), script],
        env=base_env(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "ready\n"  # the rank now waits for this test
        go.write_text("")
        assert process.stdout.readline() == "done\n"
    assert process.wait(LIMIT_S) == 0


def test_single_node_script_starts_the_same_ranks(flavour: Flavour, describe: Path) -> None:
    argv = [ROOT / "launch" / "single_node.sh", "3", describe, "a b"]
    ended = run_tree(argv, env=base_env(PYTHON=flavour.python), timeout_s=LIMIT_S)
    assert ended.returncode == 0, ended.stderr
    command, _, output = ended.stdout.partition("\n")
    assert command.startswith("+ ")
    assert f"{Path(flavour.python).parent}/mpiexec -n 3" in command
    ranks = json.loads(output)
    assert [(rank["size"], rank["argv"]) for rank in ranks] == [(3, [str(describe), "a b"])] * 3


def test_single_node_script_returns_the_status(flavour: Flavour, tmp_path: Path) -> None:
    script = tmp_path / "fail.py"
    script.write_text("from mpi4py import MPI\nc = MPI.COMM_WORLD\nif c.rank == 1: raise SystemExit(7)\nc.Barrier()\n")
    argv = [ROOT / "launch" / "single_node.sh", "3", script]
    assert run_tree(argv, env=base_env(PYTHON=flavour.python), timeout_s=LIMIT_S).returncode == 7


@pytest.mark.parametrize("args", [[], ["3"], ["0", "x.py"], ["-1", "x.py"], ["two", "x.py"]])
def test_single_node_script_refuses_nonsense(args: list[str]) -> None:
    ended = run_tree([ROOT / "launch" / "single_node.sh", *args], env=base_env())
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "usage:" in ended.stderr
