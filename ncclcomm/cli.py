"""The `ncclcomm` command: one parser, to which each command adds its own."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ncclcomm.launcher.run import add_parser as add_run

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the console script and `python -m ncclcomm` call it.

    Args:
        argv: arguments without the program's name; None takes sys.argv's.

    Returns:
        The exit status.

    Raises:
        SystemExit: with status 2 for a usage error, 0 after --help.
    """
    parser = argparse.ArgumentParser(
        prog="ncclcomm", description="Collectives over GPUs and ranks.", allow_abbrev=False
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    add_run(commands)
    args = parser.parse_args(argv)
    status: int = args.call(args)
    return status
