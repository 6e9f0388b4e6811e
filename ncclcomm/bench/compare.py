"""`ncclcomm bench compare`: what changed from one result to another."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import IO, Any

from ncclcomm.bench.options import shown_bytes
from ncclcomm.bench.report import duration, new_table, print_table, range_of, title_of
from ncclcomm.bench.results import OURS, Results, RowResult
from ncclcomm.bench.stats import Spread, geometric_mean
from ncclcomm.errors import ArgumentError

__all__ = ["compare", "differences", "verdict"]

_SHOWN = ("where", "machine", "versions", "settings", "commit")
_NOT_SHOWN = ("load_before", "load_after")


def verdict(before: Spread, after: Spread) -> str:
    """What to make of two times: 'faster' or 'slower' where their middle four fifths lie apart, else ''."""
    if after.high < before.low:
        return "faster"
    return "slower" if after.low > before.high else ""


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The lines that say in what two runs differ, apart from their figures.

    Args:
        before: facts of the first run.
        after: facts of the second.
    """
    lines: list[str] = []
    for part in _SHOWN:
        _compare_values(part, before.get(part), after.get(part), lines)
    return lines


def _compare_values(name: str, before: Any, after: Any, lines: list[str]) -> None:
    """Add a line for each value that differs, inside dictionaries too."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys([*before, *after]):
            if key not in _NOT_SHOWN:
                _compare_values(f"{name}.{key}", before.get(key), after.get(key), lines)
    elif before != after:
        lines.append(f"{name}: {before} -> {after}")


def compare(first: Path, second: Path, stream: IO[str] | None = None) -> None:
    """Print what changed: the time of every row of both, its ratio, and whether it lies outside the spread.

    Args:
        first: a file of `--json`.
        second: another.
        stream: where to; None is stdout.

    Raises:
        ArgumentError: a file is none of ours, or they have no row in common.
    """
    stream = stream or sys.stdout
    before, after = Results.read(first), Results.read(second)
    earlier = {row.key: row for row in before.rows}
    pairs = [(earlier[row.key], row) for row in after.rows if row.key in earlier]
    if not pairs:
        raise ArgumentError(f"{first} and {second} have no row in common: time the same collectives, dtypes and sizes")
    for line in differences(before.facts, after.facts):
        print(line, file=stream)
    tables: dict[tuple[str, str, str], list[tuple[RowResult, RowResult]]] = {}
    for pair in pairs:
        tables.setdefault(pair[0].table, []).append(pair)
    for rows in tables.values():
        _print_pairs(rows, stream)
    alone = len(before.rows) + len(after.rows) - 2 * len(pairs)
    if alone:
        print(f"{alone} rows are in one of the files only", file=stream)


def _print_pairs(pairs: list[tuple[RowResult, RowResult]], stream: IO[str]) -> None:
    """Print one table."""
    first, last = pairs[0][0], pairs[0][1]
    names = [name for name in first.measured if name in last.measured]
    table = new_table(["size", "who", "before us", "10-90 %", "after us", "10-90 %", "after/before", ""], stream)
    ratios: dict[str, list[float]] = {name: [] for name in names}
    for before, after in pairs:
        for name in names:
            if name not in before.measured or name not in after.measured:
                continue
            old, new = before.measured[name].time, after.measured[name].time
            ratio = new.median / old.median
            ratios[name].append(ratio)
            size = shown_bytes(before.size_bytes) if name == OURS else ""
            times = duration(old.median), range_of(old), duration(new.median), range_of(new)
            table.add_row(size, name, *times, f"{ratio:.2f}", verdict(old, new))
    for name in names:
        mean = geometric_mean(ratios[name])
        table.add_row("geo. mean", name, "", "", "", "", "" if mean is None else f"{mean:.2f}", "")
    print_table(table, title_of(first), stream)
