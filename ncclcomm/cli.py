"""The `ncclcomm` command: one parser, to which each command adds its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ncclcomm.bench.command import add_parser as add_bench
from ncclcomm.bench.together import is_first, wait_for_ranks
from ncclcomm.doctor.command import add_parser as add_doctor
from ncclcomm.launcher.run import add_parser as add_run

__all__ = ["main"]


class _Parser(argparse.ArgumentParser):
    """Says what is wrong, or helps, once where several ranks read the same command line."""

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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the console script and `python -m ncclcomm` call it.

    Args:
        argv: arguments without the program's name; None takes sys.argv's.

    Returns:
        The exit status.

    Raises:
        SystemExit: with status 2 for a usage error, 0 after --help.
    """
    parser = _Parser(prog="ncclcomm", description="Collectives over GPUs and ranks.", allow_abbrev=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    add_run(commands)
    add_doctor(commands)
    add_bench(commands)
    args = parser.parse_args(argv)
    status: int = args.call(args)
    return status
