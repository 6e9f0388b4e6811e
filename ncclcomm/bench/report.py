"""Tables for people, by rich: a grid in a terminal, Markdown elsewhere, numbers never cut."""

from __future__ import annotations

import sys
from typing import IO, Any

from ncclcomm.bench.options import shown_bytes
from ncclcomm.bench.progress import is_watched
from ncclcomm.bench.results import OURS, Results, RowResult, mean_ratio
from ncclcomm.bench.stats import Spread

__all__ = ["duration", "new_table", "print_head", "print_row_table", "print_table", "range_of", "title_of"]

_LESS, _MORE = 0.95, 1.05
"""Ratios between these two are not coloured."""


def duration(microseconds: float) -> str:
    """A time in microseconds: three digits or more, thousands apart."""
    digits = 2 if microseconds < 10 else 1 if microseconds < 100 else 0
    return f"{microseconds:,.{digits}f}"


def range_of(spread: Spread) -> str:
    """The middle four fifths of a time."""
    return f"{duration(spread.low)} - {duration(spread.high)}"


def _bandwidth(gbps: float) -> str:
    """A bandwidth in GB/s; nothing where nothing moves."""
    return f"{gbps:,.{4 if gbps < 0.1 else 2 if gbps < 100 else 1}f}" if gbps else ""


def _ratio(spread: Spread | None) -> str:
    """A ratio, coloured where a terminal shows colours."""
    if spread is None:
        return "-"
    text = f"{spread.median:.2f}"
    if spread.median < _LESS:
        return f"[green]{text}[/green]"
    return f"[red]{text}[/red]" if spread.median > _MORE else text


def _is_terminal(stream: IO[str]) -> bool:
    """True if a person sees the stream. Open MPI gives ranks a terminal of its own as stdout, but not as stderr."""
    return stream.isatty() and is_watched()


def new_table(columns: list[str], stream: IO[str]) -> Any:
    """An empty table whose columns are aligned to the right.

    Args:
        columns: their heads.
        stream: where it will be printed: a terminal gets a grid, anything else Markdown.
    """
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD if _is_terminal(stream) else box.MARKDOWN)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def print_table(table: Any, title: str, stream: IO[str] | None = None) -> None:
    """Print a table below its title, as wide as its numbers need, and an empty line.

    Args:
        table: from `new_table`.
        title: one line of text, or more.
        stream: where to; None is stdout.
    """
    from rich.console import Console

    stream = stream or sys.stdout
    terminal = _is_terminal(stream)
    console = Console(file=stream, highlight=False, force_terminal=terminal)
    widest = console.measure(table, options=console.options.update(width=10_000)).maximum
    # A table wider than the terminal is wrapped by it, and no number is cut.
    console = Console(file=stream, highlight=False, force_terminal=terminal, width=max(widest, console.width))
    with console.capture() as captured:
        console.print(table, crop=False, overflow="ignore", no_wrap=True)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    print(title, "", *filter(None, lines), "", sep="\n", file=stream, flush=True)


def print_head(results: Results, stream: IO[str] | None = None) -> None:
    """Print what the run is measured on, and which peers are left out.

    Args:
        results: a run, of which the rows may be missing.
        stream: where to; None is stdout.
    """
    facts, stream = results.facts, stream or sys.stdout
    where, machine, settings = facts["where"], facts["machine"], facts["settings"]
    ranks = f"{where['ranks']} rank{'s' * (where['ranks'] > 1)}"
    who = f"{where['devices']} devices of one process" if settings["in_process"] else ranks
    hosts = f"{machine['hosts']} host{'s' * (machine['hosts'] > 1)}"
    if where["nodes"] != machine["hosts"]:
        hosts += f", as {where['nodes']} nodes"
    lines = [
        f"ncclcomm bench: {who} on {hosts}, {where['backend']} backend",
        f"machine   {', '.join(machine['cpus'])}, {', '.join(map(str, machine['cores_per_host']))} cores, "
        f"load {machine['load_before'][0]:g}" + "".join(f", {gpu}" for gpu in machine.get("gpus", [])),
        f"versions  {', '.join(f'{name} {version}' for name, version in facts['versions'].items())}"
        + (f", commit {facts['commit']}" if facts["commit"] else ""),
        f"settings  {', '.join(f'{name}={_word(value)}' for name, value in settings.items() if name != 'variables')}",
        f"variables {' '.join(f'{name}={value}' for name, value in settings['variables'].items()) or 'none'}",
    ]
    lines += [f"left out  {name}: {reason}" for name, reason in results.absent.items()]
    print("\n".join(lines), end="\n\n", file=stream, flush=True)


def _word(value: Any) -> str:
    """A setting in a word."""
    return "/".join(map(str, value)) if isinstance(value, list) else str(value)


def print_row_table(rows: list[RowResult], explained: str = "", stream: IO[str] | None = None) -> None:
    """Print the rows of one collective, dtype and reduction.

    Args:
        rows: at least one.
        explained: a line on what the largest size does; '' for none.
        stream: where to; None is stdout.
    """
    stream = stream or sys.stdout
    first = rows[0]
    peers = [name for name in dict.fromkeys(name for row in rows for name in row.measured) if name != OURS]
    on_devices = first.measured[OURS].device_us is not None
    columns = ["size", "count", "time us", "10-90 %", *(["device us", "host us"] if on_devices else [])]
    columns += ["algbw GB/s", "busbw GB/s"]
    for name in peers:
        columns += [f"{name} us", "10-90 %", f"ours/{name}"]
    table = new_table(columns, stream)
    for row in rows:
        table.add_row(*_cells(row, peers, on_devices))
    if peers and len(rows) > 1:
        means = []
        for name in peers:
            mean = mean_ratio(rows, name)
            means += ["", "", "-" if mean is None else f"{mean:.2f}"]
        blanks = [""] * (len(columns) - 1 - len(means))
        table.add_row("geo. mean", *blanks, *means)
    print_table(table, title_of(first) + (explained and f"\n{explained}"), stream)
    notes = dict.fromkeys((name, why) for row in rows for name, why in row.absent.items())
    for name, why in notes:
        print(f"note: {name}: {why}", file=stream)
    if notes:
        print(file=stream, flush=True)


def title_of(row: RowResult) -> str:
    """A row's collective, reduction, dtype and root."""
    words = [row.op, row.reduction, row.dtype if row.size_bytes else "", "" if row.root == "" else f"(root {row.root})"]
    return " ".join(word for word in words if word)


def _cells(row: RowResult, peers: list[str], on_devices: bool) -> list[str]:
    """The cells of a row."""
    ours = row.measured[OURS]
    cells = [shown_bytes(row.size_bytes), f"{row.count:,}", duration(ours.time.median), range_of(ours.time)]
    if on_devices:
        assert ours.device_us is not None
        assert ours.host_us is not None
        cells += [duration(Spread.of(ours.device_us).median), duration(Spread.of(ours.host_us).median)]
    cells += [_bandwidth(row.algbw(OURS)), _bandwidth(row.busbw(OURS))]
    for name in peers:
        theirs = row.measured.get(name)
        if theirs is None:
            cells += ["-", "-", "-"]
        else:
            cells += [duration(theirs.time.median), range_of(theirs.time), "wrong" if theirs.wrong else ""]
            if not theirs.wrong:
                cells[-1] = _ratio(row.ratio(name))
    return cells
