"""Options of `ncclcomm run` on this host, with each MPI flavour's own launcher."""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flavours import FLAVOURS, Flavour, clean_env, run_tree

pytestmark = pytest.mark.flavours(*FLAVOURS)

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 40.0

DESCRIBE = """
import json, os, sys
from mpi4py import MPI
mine = [dict(os.environ), sys.argv[1:], sorted(os.sched_getaffinity(0))]
everyone = MPI.COMM_WORLD.gather(mine)
if everyone: print(json.dumps(everyone))
"""

VALUES = {
    "X_SPACE": " a b  c ",
    "X_QUOTES": 'it\'s "so" $HOME `x` \\ ;|&* %d {1..3}',
    "X_EMPTY": "",
    "X_LINES": "one\ntwo\n",
    "X_EQUALS": "=a=b=",
    "X_EQ": "=",
    "X_UNICODE": "naïve",
}


def launch(flavour: Flavour, *args: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in clean_env().items() if not name.startswith(("NCCLCOMM_", "CUDA_", "X_"))}
    argv = [flavour.python, "-m", "ncclcomm", "run", *args]
    return run_tree(argv, env={**environ, "PYTHONPATH": str(ROOT), **env}, timeout_s=LIMIT_S)


@pytest.fixture
def describe(tmp_path: Path) -> Path:
    path = tmp_path / "describe it.py"
    path.write_text(DESCRIBE)
    return path


def told(ended: subprocess.CompletedProcess[str]) -> list[tuple[dict[str, str], list[str], list[int]]]:
    """Each rank's environment, arguments and cores."""
    assert ended.returncode == 0, ended.stderr
    return [(environ, argv, cores) for environ, argv, cores in json.loads(ended.stdout)]


def test_variables_and_arguments_arrive_exactly(flavour: Flavour, describe: Path) -> None:
    options = [word for name, value in VALUES.items() for word in ("--env", f"{name}={value}")]
    args = ["-n", ":", "a:b", "", "=x", "--escaped"]
    ranks = told(launch(flavour, "-n", "2", *options, "--env", "X_SET", describe, *args, X_SET="as it is", X_EQ="old"))
    for environ, argv, _ in ranks:
        assert environ.items() >= {**VALUES, "X_SET": "as it is"}.items()
        assert argv == args


def test_the_dry_runs_line_does_the_same(flavour: Flavour, describe: Path) -> None:
    options = ["-n", "2", "--env", "X_A=it's \n$HOME", "--bind", "none", "--devices-per-rank", "1"]
    dry = launch(flavour, *options, "--dry-run", describe, "a b", ":", CUDA_VISIBLE_DEVICES="5,7")
    assert dry.returncode == 0, dry.stderr
    env = {**clean_env(), "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "5,7"}
    pasted = told(run_tree(["sh", "-c", dry.stdout], env=env, timeout_s=LIMIT_S))
    started = told(launch(flavour, *options, describe, "a b", ":", CUDA_VISIBLE_DEVICES="5,7"))
    for (environ, *rest), (own, *expected) in zip(pasted, started, strict=True):
        assert rest == expected
        for name in ("X_A", "CUDA_VISIBLE_DEVICES", "PYTHONPATH", "PATH"):
            assert environ[name] == own[name], name


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["by line", "unbuffered"])
def test_labels_name_the_rank_of_each_line(flavour: Flavour, tmp_path: Path, unbuffered: str) -> None:
    script = tmp_path / "say.py"
    script.write_text(
        "import sys\nfrom mpi4py import MPI\nrank = MPI.COMM_WORLD.rank\n"
        "for line in range(3): print('rank', rank, 'line', line)\nprint('rank', rank, 'err', 0, file=sys.stderr)\n"
    )
    ended = launch(flavour, "-n", "3", "--label", script, PYTHONUNBUFFERED=unbuffered)
    assert ended.returncode == 0, ended.stderr
    for text, word, count in ((ended.stdout, "line", 3), (ended.stderr, "err", 1)):
        form = re.compile(rf"(?:\[(\d)\]|\[1,(\d)\]<std(?:out|err)>:) rank (\d) {word} (\d)")
        lines = [form.fullmatch(line) for line in text.splitlines()]
        assert all(lines), text
        found = sorted((line[1] or line[2], line[3], line[4]) for line in lines if line)
        assert found == [(str(rank), str(rank), str(number)) for rank in range(3) for number in range(count)]


def test_without_labels_lines_are_as_printed(flavour: Flavour, tmp_path: Path) -> None:
    script = tmp_path / "say.py"
    script.write_text("print('plain')\n")
    # Unbuffered, as an environment may ask for, the pieces of a line mix.
    assert launch(flavour, "-n", "2", script, PYTHONUNBUFFERED="").stdout == "plain\nplain\n"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="binding shows only where there are two cores")
def test_bind_core_holds_each_rank_to_one(flavour: Flavour, describe: Path) -> None:
    ranks = told(launch(flavour, "-n", "2", "--bind", "core", describe))
    held = [tuple(cores) for _, _, cores in ranks]
    assert len(set(held)) == 2, held
    assert all(len(cores) < len(os.sched_getaffinity(0)) for cores in held)


@pytest.mark.parametrize("bind", ["none", "core", "socket", "numa"])
def test_more_ranks_than_cores_start_however_bound(flavour: Flavour, describe: Path, bind: str) -> None:
    size = len(os.sched_getaffinity(0)) + 1
    if size > 9:
        pytest.skip(f"{size} ranks would be needed")
    ranks = told(launch(flavour, "-n", str(size), "--bind", bind, describe))
    assert len(ranks) == size
    if bind == "none":
        assert all(set(cores) == os.sched_getaffinity(0) for _, _, cores in ranks)


def test_devices_go_to_ranks_in_groups_as_they_are_named(flavour: Flavour, describe: Path) -> None:
    visible = "GPU-5a1c,3,MIG-GPU-77/1/0,MIG-5a1c,2"
    ranks = told(launch(flavour, "-n", "2", "--devices-per-rank", "2", describe, CUDA_VISIBLE_DEVICES=visible))
    assert [environ["CUDA_VISIBLE_DEVICES"] for environ, _, _ in ranks] == ["GPU-5a1c,3", "MIG-GPU-77/1/0,MIG-5a1c"]
    ranks = told(launch(flavour, "-n", "2", describe, CUDA_VISIBLE_DEVICES=visible))
    assert [environ["CUDA_VISIBLE_DEVICES"] for environ, _, _ in ranks] == [visible] * 2


def test_auto_is_the_number_of_cores_where_there_is_no_gpu(flavour: Flavour, describe: Path) -> None:
    from ncclcomm.launcher.machine import physical_cores

    ranks = told(launch(flavour, "-n", "auto", describe, NCCLCOMM_DEVICES="host"))
    assert len(ranks) == physical_cores()


COMMAND = [sys.executable, "-m", "ncclcomm"]
HERE = {**clean_env(), "PYTHONPATH": str(ROOT)}


def test_closed_streams_are_opened(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("")
    line = f"exec {shlex.join(COMMAND)} run -n 1 --dry-run {tmp_path}/p.py"
    for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        ended = run_tree(["sh", "-c", f"{line} {closed}"], env=HERE, timeout_s=LIMIT_S)
        assert (ended.returncode, ended.stderr) == (0, ""), closed
        assert bool(ended.stdout) is (" >&-" not in f" {closed}"), closed


def test_words_that_are_no_text_are_printed_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("")
    for encoding, shown in (("utf-8:strict", "na\xefve \xe9".encode()), ("ascii:strict", b"na\\xefve \\xe9")):
        ended = subprocess.run(
            [*map(os.fsencode, COMMAND), *(b"run", b"-n", b"1", b"--dry-run", b"--env", b"X=\xff", b"p.py"), shown],
            env={**HERE, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "1"},
            cwd=tmp_path,
            capture_output=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert (ended.returncode, ended.stderr) == (0, b"")
        assert b"X='\xff' " in ended.stdout
        assert shown in ended.stdout


def test_no_folder_for_temporary_files(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("")
    program = (
        "import sys, tempfile\ntempfile._candidate_tempdir_list = lambda: ['/proc/none']\n"
        "from ncclcomm.cli import main\nsys.exit(main(['run', '-n', '1', 'p.py']))\n"
    )
    ended = run_tree([sys.executable, "-c", program], env=HERE, timeout_s=LIMIT_S, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert "set TMPDIR" in line


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_hosts_are_looked_at(tmp_path: Path, number: signal.Signals) -> None:
    ssh, mark = tmp_path / "ssh", tmp_path / "pid"
    os.mkfifo(mark)
    channel = os.open(mark, os.O_RDWR)
    ssh.write_text(f"#!/bin/sh\necho $$ >{mark}\nexec sleep 60\n")
    ssh.chmod(0o755)
    (tmp_path / "p.py").write_text("")
    argv = [*COMMAND, "run", "-n", "1", "--hosts", "h1", "--ssh", str(ssh), "p.py"]
    with subprocess.Popen(argv, env=HERE, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert select.select([channel], [], [], LIMIT_S)[0]
            ended = os.pidfd_open(int(os.read(channel, 32)))
            process.send_signal(number)
            _, errors = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
            os.close(channel)
    assert (process.returncode, errors) == (128 + number, f"ncclcomm run: stopped by {number.name}\n")
    assert select.select([ended], [], [], 0.0)[0], "ssh runs on"
    os.close(ended)


@pytest.mark.parametrize(("script", "word"), [("single_node.sh", "N SCRIPT"), ("multi_node.sh", "--hostfile FILE")])
def test_scripts_have_help(script: str, word: str) -> None:
    ended = run_tree([ROOT / "launch" / script, "--help"])
    assert (ended.returncode, ended.stderr) == (0, "")
    assert word in ended.stdout
    assert "set -euo" not in ended.stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["missing.py"], "there is no file 'missing.py'"),
        (["."], "there is no file '.'"),
        (["-m", ""], "-m needs the name of a module"),
        (["-m", "this", ":", "true"], "takes what follows a ':' for a second program"),
    ],
)
def test_single_node_script_refuses_what_it_cannot_run(args: list[str], said: str) -> None:
    ended = run_tree([ROOT / "launch" / "single_node.sh", "2", *args])
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert said in line
