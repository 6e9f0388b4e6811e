"""`ncclcomm run`: its options, its checks before anything starts, its dry run."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import shlex
import signal
import sys
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from ncclcomm.errors import ArgumentError, BackendUnavailableError
from ncclcomm.launcher.command import Command, Plan
from ncclcomm.launcher.job import run_job
from ncclcomm.launcher.leftovers import kill_marked
from ncclcomm.launcher.mpiexec import build_mpiexec
from ncclcomm.launcher.prepare import make_plan
from ncclcomm.launcher.remote import check_hosts
from ncclcomm.launcher.srun import build_srun

__all__ = ["add_parser"]

DEFAULT_GRACE_S = 5.0
NOT_STARTED = 2
"""Exit status when no rank was started."""

_USAGE = "ncclcomm run -n N [OPTIONS] (-m MODULE | SCRIPT) [ARGS ...]"

_EPILOG = """\
Options of `ncclcomm run` come before the program; everything after it is the program's own.

exit status: 0 if every rank ended well; the status of the first rank that failed (128+N if signal N killed it);
124 after --timeout; 130 on Ctrl-C, 143 on SIGTERM; 2 if nothing was started.
"""


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add `run` to the commands of the command line; its `call` takes the parsed arguments and returns a status."""
    parser = commands.add_parser(
        "run",
        help="start a program on several ranks",
        usage=_USAGE,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-n", dest="size", metavar="N", type=_ranks, required=True, help="number of ranks, or auto: as many as fit"
    )
    _add_places(parser)
    _add_ranks(parser)
    parser.add_argument("--timeout", metavar="S", type=_positive_s, help="stop the job after S seconds, status 124")
    parser.add_argument(
        "--grace",
        metavar="S",
        type=_seconds,
        default=DEFAULT_GRACE_S,
        help=f"seconds between SIGTERM and SIGKILL for ranks that are stopped (default {DEFAULT_GRACE_S:g})",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the command and start no rank")
    parser.add_argument(
        "-m", dest="module", metavar="MODULE", nargs=argparse.REMAINDER, help="run a module, as python -m does"
    )
    parser.add_argument("script", metavar="SCRIPT", nargs=argparse.REMAINDER, help="a Python file, and its arguments")
    parser.set_defaults(call=_run, parser=parser)


def _add_places(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where ranks run, and what starts them."""
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument("--hosts", metavar="LIST", help="h1,h2:4,node[01-03]; `:4` gives a host's slots")
    hosts.add_argument("--hostfile", metavar="FILE", help="hosts, one a line, as in --hosts or as `h1 slots=4`")
    parser.add_argument("--ranks-per-node", metavar="N", type=_count, help="ranks of each host (default: its slots)")
    parser.add_argument("--ssh", metavar="COMMAND", help="what reaches other hosts (default: NCCLCOMM_SSH, or ssh)")
    parser.add_argument(
        "--launcher",
        choices=("auto", "mpiexec", "srun"),
        default="auto",
        help="what starts the ranks (default: srun inside a SLURM job where it can, else mpiexec)",
    )
    parser.add_argument("--mpi", metavar="TYPE", type=_word, help="srun's --mpi (default: the one that fits)")


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what each rank gets."""
    parser.add_argument(
        "--devices-per-rank", metavar="N", type=_count, help="show each rank only its own N of the visible devices"
    )
    parser.add_argument(
        "--bind", choices=("none", "core", "socket", "numa"), help="hold each rank to one of these (default: none)"
    )
    parser.add_argument(
        "--env", metavar="NAME[=VALUE]", action="append", default=[], help="a variable for all ranks; repeatable"
    )
    parser.add_argument(
        "--label",
        action=argparse.BooleanOptionalAction,
        help="begin each line of output with its rank (default: when several ranks write to a terminal)",
    )


def _ranks(text: str) -> int | None:
    """Read -n; None for auto."""
    if text == "auto":
        return None
    if text == "p":  # argparse takes -np for -n with the value p
        raise argparse.ArgumentTypeError("mpirun's -np is -n here: write -n and the number of ranks")
    if not _is_count(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks: use a whole number of 1 or more, or auto")
    return int(text)


def _count(text: str) -> int:
    """Read a number for each host or rank."""
    if not _is_count(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a count: use a whole number of 1 or more")
    return int(text)


def _is_count(text: str) -> bool:
    """Whether a text is a whole number from 1 to 999999."""
    return text.isascii() and text.isdecimal() and len(text) <= 6 and int(text) >= 1


def _word(text: str) -> str:
    """Read a name that srun may take."""
    if not text.replace("_", "").isalnum():
        raise argparse.ArgumentTypeError(f"{text!r} is no type: use one that `srun --mpi=list` shows, such as pmix")
    return text


def _seconds(text: str) -> float:
    """Read a time of zero or more."""
    value = math.nan
    with contextlib.suppress(ValueError):
        value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time: use a number of seconds, such as 30 or 0.5")
    return value


def _positive_s(text: str) -> float:
    """Read a time above zero."""
    if (value := _seconds(text)) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} leaves no time: use a number of seconds above 0")
    return value


def _run(args: argparse.Namespace) -> int:
    """Check, then print the command or run it; a signal that comes while no rank runs ends that in one line."""
    try:
        with _stopped_by_signals():
            return _check_and_run(args)
    except _Stopped as stopped:
        _refuse(f"stopped by {stopped.signal.name}")
        return 128 + stopped.signal


class _Stopped(BaseException):
    """A signal asked this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Raise _Stopped on signals that are not ignored, so that processes which look at hosts are ended first."""

    def stop(number: int, _frame: FrameType | None) -> None:
        raise _Stopped(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {n: signal.signal(n, stop) for n in numbers if signal.getsignal(n) != signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _check_and_run(args: argparse.Namespace) -> int:
    """What `_run` does while no signal comes."""
    program = _program(args)
    try:
        plan = make_plan(args, program, os.environ)
    except (ArgumentError, BackendUnavailableError) as error:
        return _refuse(str(error))
    if args.dry_run:
        print(_command(plan))
        return 0
    return _start(plan, args)


def _command(plan: Plan) -> Command:
    """The command line for a plan."""
    return build_srun(plan) if plan.step else build_mpiexec(plan)


def _start(plan: Plan, args: argparse.Namespace) -> int:
    """Look at the hosts, then run the job."""
    try:
        tempfile.gettempdir()
    except OSError as error:
        return _refuse(f"no folder for temporary files: {error.strerror}; set TMPDIR to one that can be written")
    hosts = [at.host for at in plan.places]
    if plan.ssh:
        wrong, cores = _look_at_hosts(plan, hosts)
        if wrong:
            return _refuse(*wrong)
        plan = replace(plan, places=tuple(replace(at, cores=cores.get(at.host)) for at in plan.places))
    try:
        return run_job(
            _command(plan),
            size=plan.size,
            environ=os.environ,
            timeout_s=args.timeout,
            grace_s=args.grace,
            hosts=hosts if plan.ssh else (),
            ssh=plan.ssh,
            places=hosts,
        )
    except OSError as error:
        return _refuse(f"{plan.starter} cannot be started: {error}")


def _look_at_hosts(plan: Plan, hosts: list[str]) -> tuple[list[str], dict[str, int]]:
    """What is wrong with the hosts, a line each, and their cores; leaves no process where a signal ends it."""
    script = None if plan.program[0] == "-m" else plan.program[0]
    look = uuid.uuid4().hex
    environ = {**os.environ, "NCCLCOMM_JOB_ID": look}
    try:
        return check_hosts(hosts, ssh=plan.ssh, folder=_folder(), python=plan.python, script=script, environ=environ)
    except _Stopped:
        kill_marked(look)  # it may come between the start of an ssh and the note of it
        raise


def _folder() -> str:
    """The current folder by the name that the user's shell has for it: other hosts may lack what links resolve to."""
    named = os.environ.get("PWD", "")
    with contextlib.suppress(OSError):
        if os.path.isabs(named) and os.path.samefile(named, os.curdir):
            return named
    return os.getcwd()


def _refuse(*reasons: str) -> int:
    """Say why nothing is started."""
    for reason in reasons:
        print(f"ncclcomm run: {reason}", file=sys.stderr)
    return NOT_STARTED


def _program(args: argparse.Namespace) -> list[str]:
    """The program and its arguments as child.py takes them; ends with a usage error if there is none to run."""
    parser: argparse.ArgumentParser = args.parser
    if args.module is not None:
        if not args.module or not args.module[0]:
            parser.error("-m needs the name of a module")
        return ["-m", *args.module, *args.script]  # argparse ends -m's words at a `--`, and takes the rest as SCRIPT
    script: list[str] = args.script[1:] if args.script[:1] == ["--"] else args.script
    if not script:
        parser.error("no program given: name a Python file, or -m and a module")
    path = script[0]
    if path.startswith("-"):
        parser.error(f"unknown option {path!r}; options of the program come after it")
    if os.path.isdir(path):
        parser.error(f"{path!r} is a directory: name a Python file in it, or use -m for a package")
    if _is_python(path):
        rest = shlex.join(script[1:]) or "SCRIPT"
        parser.error(f"{path!r} is the interpreter, which is taken from here: leave it out, as in `-n N {rest}`")
    if not os.path.exists(path):
        parser.error(f"there is no file {path!r} (looked in {os.getcwd()})")
    if not os.access(path, os.R_OK):
        parser.error(f"{path!r} cannot be read by this user: check its permissions")
    if reason := _why_not_python(path):
        parser.error(f"{path!r} is no Python program: {reason}")
    return script


def _is_python(path: str) -> bool:
    """Whether a program is named as for mpirun, the interpreter first; a script may have that name too."""
    if not re.fullmatch(r"python[\d.]*", os.path.basename(path)):
        return False
    return not os.path.exists(path) or bool(os.access(path, os.R_OK) and _why_not_python(path))


def _why_not_python(path: str) -> str:
    """What keeps this Python from reading a file as a program; '' if nothing does."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks will show them
            compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}" if error.lineno else error.msg
    except (OSError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        return str(error)
    return ""
