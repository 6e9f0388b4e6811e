"""`ncclcomm run`: its options, its checks before anything starts, its dry run."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from typing import Any

from ncclcomm.errors import BackendUnavailableError
from ncclcomm.launcher.command import build_command
from ncclcomm.launcher.flavour import find_launcher, guess_launcher
from ncclcomm.launcher.job import run_job

__all__ = ["add_parser"]

DEFAULT_GRACE_S = 5.0
NOT_STARTED = 2
"""Exit status when no rank was started."""

_EPILOG = """\
Options of `ncclcomm run` come before the program; everything after it is the program's own.

exit status: 0 if every rank ended well; the status of the first rank that failed (128+N if signal N killed it);
124 after --timeout; 130 on Ctrl-C, 143 on SIGTERM; 2 if nothing was started.
"""


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add `run` to the commands of the command line; its `call` takes the parsed arguments and returns a status."""
    parser = commands.add_parser(
        "run",
        help="start a program on several ranks of this host",
        usage="ncclcomm run -n N [--timeout S] [--grace S] [--dry-run] (-m MODULE | SCRIPT) [ARGS ...]",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-n", dest="size", metavar="N", type=_count, required=True, help="number of ranks")
    parser.add_argument("--timeout", metavar="S", type=_positive_s, help="stop the job after S seconds, status 124")
    parser.add_argument(
        "--grace",
        metavar="S",
        type=_seconds,
        default=DEFAULT_GRACE_S,
        help=f"seconds between SIGTERM and SIGKILL for ranks that are stopped (default {DEFAULT_GRACE_S:g})",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the command and start nothing")
    parser.add_argument(
        "-m", dest="module", metavar="MODULE", nargs=argparse.REMAINDER, help="run a module, as python -m does"
    )
    parser.add_argument("script", metavar="SCRIPT", nargs=argparse.REMAINDER, help="a Python file, and its arguments")
    parser.set_defaults(call=_run, parser=parser)


def _count(text: str) -> int:
    """Read -n."""
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks: use a whole number of 1 or more")
    return int(text)


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
    """Check, then print the command or run it."""
    program = _program(args)
    try:
        launcher = guess_launcher() if args.dry_run else find_launcher()
    except BackendUnavailableError as error:
        print(f"ncclcomm run: {error}", file=sys.stderr)
        return NOT_STARTED
    command = build_command(
        flavour=launcher.flavour,
        mpiexec=launcher.mpiexec,
        python=sys.executable,
        program=program,
        size=args.size,
        cores=len(os.sched_getaffinity(0)),
        is_root=os.geteuid() == 0,
        environ=os.environ,
    )
    if args.dry_run:
        print(command)
        return 0
    try:
        return run_job(command, size=args.size, environ=os.environ, timeout_s=args.timeout, grace_s=args.grace)
    except OSError as error:
        print(f"ncclcomm run: {launcher.mpiexec} cannot be started: {error}", file=sys.stderr)
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
    if not os.path.exists(path):
        parser.error(f"there is no file {path!r} (looked in {os.getcwd()})")
    if not os.access(path, os.R_OK):
        parser.error(f"{path!r} cannot be read by this user: check its permissions")
    return script
