"""`ncclcomm doctor` and `ncclcomm info`: their options and what they print."""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

__all__ = ["add_parser"]

DEFAULT_LIMIT_S = 20.0

_DOCTOR = """\
Alone it looks at this process; started on ranks (ncclcomm run -n 4 -m ncclcomm doctor, mpiexec -n 4 ncclcomm doctor,
srun ... ncclcomm doctor) it looks at all of them, and rank 0 prints one report. A line is pass, warn, fail or
not checked, says what was found and, after an arrow, what to type.

exit status: 1 if a line is fail, else 0.
"""

_INFO = "Alone it tells of this process; started on ranks, rank 0 tells of all of them."


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add `doctor` and `info` to the command line; their `call` takes the parsed arguments and returns a status."""
    for name, text, more, call in (
        ("doctor", "say what is wrong with this environment, and what to type", _DOCTOR, _doctor),
        ("info", "tell versions, devices, launcher and hosts", _INFO, _info),
    ):
        parser = commands.add_parser(
            name,
            help=text,
            description=more,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        parser.add_argument("--json", action="store_true", help="print one JSON object")
        parser.add_argument(
            "--timeout",
            metavar="S",
            type=_seconds,
            default=DEFAULT_LIMIT_S,
            help=f"seconds that a rank has for an answer (default {DEFAULT_LIMIT_S:g})",
        )
        parser.set_defaults(call=call)


def _seconds(text: str) -> float:
    """Read a time above zero."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time: use a number of seconds above 0, such as 30")
    return value


def _doctor(args: argparse.Namespace) -> int:
    """Look, judge, print."""
    from ncclcomm.doctor.findings import Findings
    from ncclcomm.doctor.lines import FAIL
    from ncclcomm.doctor.report import as_json, judge, lines_as_text
    from ncclcomm.doctor.session import examine

    def render(found: Findings) -> str:
        lines = judge(found)
        # Open MPI's launcher gives ranks a terminal of their own, whatever it writes to itself.
        colour = sys.stdout.isatty() and found.here.promised is None
        return as_json(found, lines) if args.json else lines_as_text(found, lines, colour=colour)

    with examine(args.timeout, trials=True, render=render) as session:
        if session.found is None:
            session.close()
            return 0
        print(render(session.found), flush=True)
        fails = any(line.status == FAIL for line in judge(session.found))
        session.close()
    return 1 if fails else 0


def _info(args: argparse.Namespace) -> int:
    """Look, print."""
    from ncclcomm.doctor.findings import Findings
    from ncclcomm.doctor.report import as_json, facts_as_text
    from ncclcomm.doctor.session import examine

    def render(found: Findings) -> str:
        return as_json(found, []) if args.json else facts_as_text(found)

    with examine(args.timeout, trials=False, render=render) as session:
        found = session.found
        if found is not None:
            print(render(found), flush=True)
        session.close()
    return 1 if found is not None and found.missing else 0
