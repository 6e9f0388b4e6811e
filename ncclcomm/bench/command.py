"""`ncclcomm bench`: its options, its checks before anything is timed, its exit status."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ncclcomm import config
from ncclcomm.bench.together import is_first, wait_for_ranks
from ncclcomm.errors import ArgumentError, BackendUnavailableError, MismatchError, NcclCommError

if TYPE_CHECKING:
    from ncclcomm.bench.group import Group
    from ncclcomm.bench.options import Options
    from ncclcomm.bench.results import Results

__all__ = ["add_parser"]

NOT_STARTED = 2
WRONG = 1

_EPILOG = """\
Over ranks start it with mpiexec, srun or `ncclcomm run -n N -m ncclcomm bench ...`; every rank of the job takes part.

exit status: 0; 1 if a collective gave a wrong answer; 2 if nothing was timed: wrong arguments, too little memory,
a file that can't be written.
"""


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add `bench` to the commands of the command line; its `call` takes the parsed arguments and returns a status."""
    parser = commands.add_parser(
        "bench",
        help="check and time the collectives, beside other packages",
        usage="ncclcomm bench [OP ...] [-b SIZE] [-e SIZE] [-f N] [--against PEER,...] [...]\n"
        "       ncclcomm bench compare BEFORE.json AFTER.json",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("ops", metavar="OP", nargs="*", help="collectives to time (default: all)")
    add(
        "-b", "--begin", metavar="SIZE", default="8", help="smallest size in bytes; K, M, G: powers of 1024 (default 8)"
    )
    add("-e", "--end", metavar="SIZE", default="1G", help="largest size (default 1G)")
    add("-f", "--factor", metavar="N", default="4", help="from one size to the next (default 4)")
    add("--dtype", metavar="D,...", default="float32", help="dtypes (default float32)")
    add("--op", metavar="R,...", default="sum", help="reductions: sum, prod, min, max, avg (default sum)")
    add("--iters", metavar="N", default="auto", help="calls in a timed round (default: some milliseconds' worth)")
    add("--rounds", metavar="N", default="auto", help="timed rounds (default 25, fewer of what takes long)")
    add("--warmup", metavar="N", default="3", help="calls before timing (default 3)")
    add(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare every element of the results with what they must be, before and after timing (default: do)",
    )
    add("--root", metavar="N", default="0", help="root of rooted collectives, or 'rotate' (default 0)")
    outputs = parser.add_mutually_exclusive_group()
    outputs.add_argument("--out", action="store_true", default=True, help="fill the caller's buffers (default)")
    outputs.add_argument("--fresh", dest="out", action="store_false", help="let each call make its result")
    add("--in-process", action="store_true", help="time ncclcomm.comm, over the devices of this process")
    add("--devices", metavar="N", help="in one process: how many devices (default: all)")
    add(
        "--against",
        metavar="PEER,...",
        default="",
        help="mpi4py, torch, gloo, cupyx, nccl4py, raw (MPI's or NCCL's call)",
    )
    add("--json", metavar="FILE", help="write the figures of every round there")
    add("--plot", metavar="FILE", help="draw time and bandwidth over size there: .png or .svg")
    parser.set_defaults(call=_bench)


def _say(text: str) -> None:
    """Say what is wrong, once where several ranks were started."""
    if is_first():
        print(f"ncclcomm bench: {text}", file=sys.stderr, flush=True)


def _bench(args: argparse.Namespace) -> int:
    """Compare two files, or run."""
    from ncclcomm.bench.options import Options

    try:
        if args.ops[:1] == ["compare"]:
            return _compare(args.ops[1:])
        options = Options.of(args)
        return _run(options)
    except (ArgumentError, MismatchError) as error:
        _say(str(error))
    except (BackendUnavailableError, NcclCommError) as error:
        # Joining may fail on this rank alone, and then the others can't say so.
        print(f"ncclcomm bench: {error}", file=sys.stderr, flush=True)
    wait_for_ranks()
    return NOT_STARTED


def _compare(files: list[str]) -> int:
    """What `compare` does."""
    from ncclcomm.bench.compare import compare
    from ncclcomm.bench.precheck import need_packages

    if len(files) != 2:
        raise ArgumentError(f"compare takes two files of --json, not {len(files)}")
    need_packages("rich")
    compare(Path(files[0]), Path(files[1]))
    return 0


def _run(options: Options) -> int:
    """Join the other ranks, look whether all is well, and time."""
    import ncclcomm
    from ncclcomm.bench.group import Group
    from ncclcomm.bench.machine import commit_of_source

    commit = commit_of_source() if is_first() else ""
    # What users get in the long run is timed: calls past the first ones, which are checked; NCCLCOMM_CHECK decides.
    checked = None if config.variables("NCCLCOMM_CHECK").get("NCCLCOMM_CHECK") else False
    if options.in_process and config.launched() is None:
        return _run_in(Group(None, options.devices), options, commit)
    with ncclcomm.init(check=checked) as world:
        alone = options.in_process and world.size == 1
        group = Group(None, options.devices) if alone else Group(world)
        try:
            return _run_in(group, options, commit)
        except ArgumentError as error:
            # All ranks have it; leaving the block by it would end the job.
            _say(str(error))
            return NOT_STARTED


def _run_in(group: Group, options: Options, commit: str) -> int:
    """Check, open the peers, time every row, and report."""
    from ncclcomm.bench.machine import facts_of, load_average
    from ncclcomm.bench.peers.choose import open_peers
    from ncclcomm.bench.precheck import check_files, check_memory, check_packages, check_place, rows_of
    from ncclcomm.bench.results import Results
    from ncclcomm.bench.runner import WrongAnswerError

    def check_this_rank() -> None:
        """What any rank, or rank 0 for all, can tell alone."""
        check_place(options, group.ranks, group.backend.device_count())
        if group.rank == 0:
            check_packages(options)
            check_files([options.json, options.plot])

    group.agreed(check_this_rank)
    rows = rows_of(options, group.size)
    check_memory(rows, group, fresh=not options.out)
    peers, absent = open_peers(options.peers, group)
    facts = facts_of(group, sys.argv[2:], commit, _settings(options))
    for peer in peers:
        facts["versions"].update(peer.versions())
    results = Results(facts, absent)
    try:
        _time(group, options, rows, peers, results)
    except WrongAnswerError as error:
        _say(f"WRONG ANSWER: {error}")
        return WRONG
    for peer in peers:
        peer.close()
    facts["machine"]["load_after"] = load_average()
    return _write(group, options, results)


def _settings(options: Options) -> dict[str, Any]:
    """How the rows are timed, as the result says it."""
    return {
        "in_process": options.in_process,
        "out": "caller's buffers" if options.out else "fresh",
        "checked_answers": options.check,
        "checked_calls": config.variables("NCCLCOMM_CHECK").get("NCCLCOMM_CHECK", "false"),
        "iters": options.iters or "auto",
        "rounds": options.rounds or "auto",
        "warmup": options.warmup,
    }


def _time(group: Group, options: Options, rows: list[Any], peers: list[Any], results: Results) -> None:
    """Time every row; rank 0 shows each table once its last row is through."""
    from ncclcomm.bench import report
    from ncclcomm.bench.progress import Progress
    from ncclcomm.bench.runner import Runner

    is_root = group.rank == 0
    if is_root:
        report.print_head(results)
    runner = Runner(options, group, peers)
    with Progress(len(rows), shown=is_root) as progress:
        for index, row in enumerate(rows):
            progress.begin(row)
            result = runner.run(row)
            results.rows.append(result)
            progress.end(result)
            following = rows[index + 1] if index + 1 < len(rows) else None
            same = following and (following.op, following.dtype, following.reduction) == (
                row.op,
                row.dtype,
                row.reduction,
            )
            if is_root and not same:
                progress.aside()
                explained = "" if group.comm is None else group.comm.explain(row.op.name, row.nbytes)
                report.print_row_table(results.tables()[result.table], explained)


def _write(group: Group, options: Options, results: Results) -> int:
    """Write the files, on rank 0; a disk that filled up meanwhile is told on all ranks."""

    def write() -> None:
        """Write them."""
        from ncclcomm.bench.plot import plot

        try:
            if options.json is not None:
                results.write(options.json)
            if options.plot is not None:
                plot(results, options.plot)
        except OSError as error:
            raise NcclCommError(f"the results can't be written: {error}") from error

    try:
        group.agreed(write if group.rank == 0 else lambda: None)
    except NcclCommError as error:
        _say(str(error))
        return WRONG
    return 0
