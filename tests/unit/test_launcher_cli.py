"""`ncclcomm run` before any rank starts: usage errors, the dry run, a missing MPI."""

from __future__ import annotations

import itertools
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import ncclcomm
from ncclcomm.cli import main
from ncclcomm.errors import BackendUnavailableError
from ncclcomm.launcher import flavour as flavour_module
from ncclcomm.launcher.command import CHILD, INTELMPI, MPICH, OPENMPI
from ncclcomm.launcher.flavour import family, find_launcher, guess_launcher

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text("raise SystemExit('it ran')\n")
    return path


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-n", "0", "SCRIPT"], "'0' is not a number of ranks"),
        (["-n", "-1", "SCRIPT"], "-n"),
        (["-n", "abc", "SCRIPT"], "'abc' is not a number of ranks"),
        (["-n", "1.5", "SCRIPT"], "'1.5' is not a number of ranks"),
        (["-n", "²", "SCRIPT"], "is not a number of ranks"),
        (["SCRIPT", "-n", "2"], "-n"),
        (["-n", "2"], "no program given"),
        (["-n", "2", "-m"], "-m needs the name of a module"),
        (["-n", "2", "--timeout", "soon", "SCRIPT"], "'soon' is not a time"),
        (["-n", "2", "--timeout", "nan", "SCRIPT"], "'nan' is not a time"),
        (["-n", "2", "--timeout", "inf", "SCRIPT"], "'inf' is not a time"),
        (["-n", "2", "--timeout", "0", "SCRIPT"], "'0' leaves no time"),
        (["-n", "2", "--timeout=-3", "SCRIPT"], "'-3' is not a time"),
        (["-n", "2", "--grace=-1", "SCRIPT"], "'-1' is not a time"),
        (["-n", "2", "--frob", "SCRIPT"], "--frob"),
        (["-n", "2", "--time", "3", "SCRIPT"], "--time"),
        (["-n", "2", "missing.py"], "there is no file 'missing.py'"),
        (["-n", "2", "FOLDER"], "is a directory"),
        (["-n", "2", "BINARY"], "binary' is no Python program: source code"),
        (["-n", "2", "SHELL"], "shell.sh' is no Python program: line 2: "),
        (["-n", "2", "LATIN"], "latin.py' is no Python program: "),
        (["-n", "0x2", "SCRIPT"], "'0x2' is not a number of ranks"),
        (["-n", "automatic", "SCRIPT"], "'automatic' is not a number of ranks"),
        (["-n", "2", "--ranks-per-node", "0", "SCRIPT"], "'0' is not a count"),
        (["-n", "2", "--devices-per-rank", "two", "SCRIPT"], "'two' is not a count"),
        (["-n", "2", "--bind", "thread", "SCRIPT"], "invalid choice: 'thread'"),
        (["-n", "2", "--launcher", "mpirun", "SCRIPT"], "invalid choice: 'mpirun'"),
        (["-n", "2", "--mpi", "--help", "SCRIPT"], "--mpi"),
        (["-n", "2", "--mpi=pmi 2", "SCRIPT"], "'pmi 2' is no type"),
        (["-n", "2", "--hosts", "h1", "--hostfile", "f", "SCRIPT"], "not allowed with"),
        (["-n", "2", "--env"], "--env"),
        (["-np", "2", "SCRIPT"], "mpirun's -np is -n here"),
        (["-n", "2", "python", "mean.py", "a b"], "'python' is the interpreter, which is taken from here"),
        (["-n", "2", "python", "mean.py", "a b"], "leave it out, as in `-n N mean.py 'a b'`"),
        (["-n", "2", "python3"], "leave it out, as in `-n N SCRIPT`"),
        (["-n", "2", sys.executable, "mean.py"], "leave it out, as in `-n N mean.py`"),
    ],
)
def test_usage_errors_are_one_line_and_status_2(
    options: list[str], said: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"BINARY": "binary", "SHELL": "shell.sh", "LATIN": "latin.py"}
    words = {"SCRIPT": str(script), "FOLDER": str(script.parent)}
    words.update({word: str(script.parent / name) for word, name in files.items()})
    Path(words["BINARY"]).write_bytes(b"\x7fELF\x02\x01\x00\x00")
    Path(words["SHELL"]).write_text("#!/bin/bash\nif [ 1 ]; then echo; fi\n")
    Path(words["LATIN"]).write_bytes(b"name = 'na\xefve'\n")
    with pytest.raises(SystemExit) as ended:
        main(["run", *(words.get(word, word) for word in options)])
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = [line for line in err.splitlines() if "error:" in line]
    assert said in line


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/usr/bin/setpriv").exists(), reason="root reads every file")
def test_unreadable_script_is_refused(script: Path) -> None:
    script.chmod(0)
    argv = [sys.executable, "-m", "ncclcomm", "run", "-n", "2", "--dry-run", str(script)]
    if os.geteuid() == 0:
        argv = ["/usr/bin/setpriv", "--bounding-set=-all", "--inh-caps=-all", *argv]
    ended = subprocess.run(
        argv, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 2, ended.stderr
    assert "cannot be read by this user" in ended.stderr


def test_dry_run_prints_the_command_and_loads_no_mpi(script: Path) -> None:
    program = (
        "import subprocess, sys\n"
        "def refuse(*a, **k): raise AssertionError('a process was started')\n"
        "subprocess.Popen = refuse\n"
        "from ncclcomm.cli import main\n"
        f"status = main(['run', '-n', '3', '--dry-run', {str(script)!r}, '--help', 'a b'])\n"
        "assert not [name for name in sys.modules if name.startswith('mpi4py')]\n"
        "sys.exit(status)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.rstrip("\n").endswith(f"{script} --help 'a b'")
    assert " -n 3 " in ended.stdout


@pytest.mark.parametrize("tail", [["--help", "-n", "9"], ["--", "-n"], ["a", "--", "--", "-m", "x"], ["-m"], [""], []])
def test_what_follows_the_program_is_its_own(tail: list[str], script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for program in ([str(script)], ["-m", "package.module"]):
        assert main(["run", "--dry-run", "-n", "2", *program, *tail]) == 0
        words = shlex.split(capsys.readouterr().out)
        assert words[words.index(CHILD) + 1 :] == [*program, *tail]


def test_a_double_dash_may_end_the_options(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--dry-run", "-n", "2", "--", str(script), "--", "x"]) == 0
    assert shlex.split(capsys.readouterr().out)[-3:] == [str(script), "--", "x"]


def test_a_script_may_be_called_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "python3"
    path.write_text("print('hello')\n")
    assert main(["run", "--dry-run", "-n", "2", str(path), "x"]) == 0
    assert shlex.split(capsys.readouterr().out)[-2:] == [str(path), "x"]


@pytest.mark.parametrize(
    ("argv", "usage"),
    [
        (["run", "-n", "2", "--bogus", "x.py"], "usage: ncclcomm run "),
        (["doctor", "--bogus"], "usage: ncclcomm doctor "),
        (["bench", "--bogus"], "usage: ncclcomm bench "),
        (["--bogus", "doctor"], "usage: ncclcomm ["),
    ],
)
def test_unknown_options_show_the_commands_own_usage(
    argv: list[str], usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(usage)
    assert "--bogus" in err.splitlines()[-1]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"ncclcomm {ncclcomm.__version__}\n"


def test_help_names_the_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("124", "128+N", "130", "143", "--timeout", "--grace"))


def test_no_mpi4py_is_one_line_naming_the_command(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # What --env gives the ranks is where mpi4py is looked for, too.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.path = [p for p in sys.path if 'site-packages' not in p]\n"
    )
    assert main(["run", "-n", "2", "--env", f"PYTHONPATH={tmp_path}", str(script)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no mpi4py" in line
    assert "pip install 'ncclcomm[mpich]'" in line


def test_mpi4py_without_a_library_is_one_line(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "fake" / "mpi4py"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("class rc: pass\n")
    (package / "MPI.py").write_text("raise RuntimeError('cannot load MPI library')\n")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.syspath_prepend(package.parent)
    assert main(["run", "-n", "2", str(script)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot load MPI library" in line
    assert "pip install 'ncclcomm[mpich]'" in line


@pytest.mark.parametrize(
    ("text", "flavour"),
    [
        ("Open MPI v5.0.11, package: Open MPI user@localhost Distribution", OPENMPI),
        ("mpiexec (OpenRTE) 4.1.4", OPENMPI),
        ("MPICH Version:      5.0.2", MPICH),
        ("HYDRA build details:", MPICH),
        ("MVAPICH Version: 3.0", MPICH),
        ("Intel(R) MPI Library 2021.18.1 for Linux* OS", INTELMPI),
    ],
)
def test_family(text: str, flavour: str) -> None:
    assert family(text) == flavour


@pytest.mark.parametrize(
    ("companions", "flavour"),
    [
        (["prterun"], OPENMPI),
        (["mpiexec.hydra"], MPICH),
        (["mpiexec.hydra", "hydra_bstrap_proxy"], INTELMPI),
        ([], MPICH),
    ],
)
def test_guess_looks_beside_python_first(
    companions: list[str], flavour: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mpiexec = executable(tmp_path / "env" / "mpiexec", "exit 9")
    for companion in companions:
        executable(tmp_path / "env" / companion, "exit 9")
    executable(tmp_path / "other" / "mpiexec", "exit 9")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "env" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "other"))
    found = guess_launcher()
    assert (found.flavour, found.mpiexec) == (flavour, str(mpiexec))


SAID = {
    MPICH: "HYDRA build details:",
    OPENMPI: "mpiexec (OpenRTE) 4.1.4",
    INTELMPI: "Intel(R) MPI Library for Linux* OS, Version 2021.18.1",
}


@pytest.mark.parametrize(("loaded", "other"), list(itertools.permutations(SAID, 2)))
def test_launcher_of_another_mpi_is_refused_by_name(
    loaded: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = SAID[other]
    mpiexec = executable(tmp_path / "bin" / "mpiexec", f"echo '{offered}'")
    monkeypatch.setattr(flavour_module, "_ask_mpi4py", lambda _environ: (loaded, ""))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "env" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(BackendUnavailableError) as raised:
        find_launcher()
    assert f"mpi4py loads {loaded}" in str(raised.value)
    assert f"{mpiexec} ({other})" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_matching_launcher_is_taken_from_further_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executable(tmp_path / "first" / "mpiexec", "echo 'HYDRA build details:'")
    second = executable(tmp_path / "second" / "mpiexec", "echo 'mpiexec (Open MPI) 5.0.11'")
    monkeypatch.setattr(flavour_module, "_ask_mpi4py", lambda _environ: (OPENMPI, ""))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "env" / "python"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'first'}{os.pathsep}{tmp_path / 'second'}")
    assert find_launcher().mpiexec == str(second)


def test_a_launcher_may_bear_the_name_of_its_mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executable(tmp_path / "bin" / "mpiexec", "echo 'mpiexec (Open MPI) 4.1.4'")
    other = executable(tmp_path / "bin" / "mpiexec.mpich", "exit 9")
    monkeypatch.setattr(flavour_module, "_ask_mpi4py", lambda _environ: (MPICH, ""))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "env" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert find_launcher().mpiexec == str(other)


def test_no_launcher_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flavour_module, "_ask_mpi4py", lambda _environ: (MPICH, ""))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "env" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendUnavailableError, match="no mpiexec is beside"):
        find_launcher()
