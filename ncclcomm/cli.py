"""The `ncclcomm` command: one parser, to which each command adds its own."""

from __future__ import annotations

import argparse
import codecs
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ncclcomm import __version__
from ncclcomm.bench.command import add_parser as add_bench
from ncclcomm.bench.together import is_first, wait_for_ranks
from ncclcomm.doctor.command import add_parser as add_doctor
from ncclcomm.launcher.run import add_parser as add_run

__all__ = ["main"]


class _Parser(argparse.ArgumentParser):
    """Says what is wrong, or helps, once where several ranks read the same command line."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse what this command does not know, with its own usage: argparse leaves that to the parser above."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print on the first rank alone."""
        if is_first():
            super()._print_message(message, file)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Leave with the other ranks."""
        if message:
            self._print_message(message, sys.stderr)
        if status:
            wait_for_ranks()
        sys.exit(status)


def _open_missing_streams() -> None:
    """Give /dev/null to what a caller has closed of standard input, output and errors.

    Files that are opened later would take their numbers, and get what is printed by the processes below.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _print_any_text() -> None:
    """Let standard output take arguments and variables that are no valid text: as they came, or else escaped."""
    codecs.register_error("ncclcomm", _as_it_came)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="ncclcomm")


def _as_it_came(error: UnicodeError) -> tuple[str | bytes, int]:
    """The bytes that Python could not read as text, where it was those; other characters escaped."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.lookup_error("backslashreplace")(error)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the console script and `python -m ncclcomm` call it.

    Args:
        argv: arguments without the program's name; None takes sys.argv's.

    Returns:
        The exit status.

    Raises:
        SystemExit: with status 2 for a usage error, 0 after --help.
    """
    _open_missing_streams()
    _print_any_text()
    parser = _Parser(prog="ncclcomm", description="Collectives over GPUs and ranks.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"ncclcomm {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    add_run(commands)
    add_doctor(commands)
    add_bench(commands)
    args = parser.parse_args(argv)
    status: int = args.call(args)
    return status
