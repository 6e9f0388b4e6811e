"""Pictures of a run: time and bandwidth over size, ours and the peers', a row of panels for each collective."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ncclcomm.bench.results import OURS, Results, RowResult

__all__ = ["plot"]

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
"""Told apart by people with any colour vision."""
_MARKS = ("o", "s", "^", "D", "v", "P", "X")
_ROW_INCHES = 2.7
_WIDTH_INCHES = 10.5


def plot(results: Results, path: Path) -> None:
    """Draw a run into a file.

    Args:
        results: the run.
        path: its suffix says the format: .png or .svg.

    Raises:
        OSError: the file can't be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tables = [rows for rows in results.tables().values() if rows[0].size_bytes]
    names = [OURS, *results.peers]
    figure = Figure(figsize=(_WIDTH_INCHES, _ROW_INCHES * len(tables) + 1.1), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(tables), 2, squeeze=False)
    for rows, (left, right) in zip(tables, panels, strict=True):
        for index, name in enumerate(names):
            style = {
                "color": _COLOURS[index % len(_COLOURS)],
                "marker": _MARKS[index % len(_MARKS)],
                "linewidth": 2.0 if name == OURS else 1.2,
                "zorder": 3 if name == OURS else 2,
            }
            _draw(left, right, rows, name, style)
        _label(left, right, rows)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(names), frameon=False)
    figure.suptitle(_title(results), x=0.01, ha="left", fontsize=10)
    figure.savefig(path, dpi=110)


def _title(results: Results) -> str:
    """What the picture shows, in two lines."""
    facts = results.facts
    where, versions = facts["where"], facts["versions"]
    who = f"{where['devices']} devices" if facts["settings"]["in_process"] else f"{where['ranks']} ranks"
    below = versions.get("mpi", "") if where["backend"] == "host" else ", ".join(facts["machine"].get("gpus", []))
    return (
        f"{who}, {where['backend']} backend{below and f', {below}'}, {', '.join(facts['machine']['cpus'])}\n"
        "line: median of the rounds; band: 10 to 90 % of them"
    )


def _draw(left: Any, right: Any, rows: list[RowResult], name: str, style: dict[str, Any]) -> None:
    """One contender's line in both panels, with the spread of its time behind it."""
    have = [row for row in rows if name in row.measured and not row.measured[name].wrong]
    sizes = [row.size_bytes for row in have]
    spreads = [row.measured[name].time for row in have]
    left.plot(sizes, [spread.median for spread in spreads], markersize=4, label=name, **style)
    low, high = [spread.low for spread in spreads], [spread.high for spread in spreads]
    left.fill_between(sizes, low, high, color=style["color"], alpha=0.15, linewidth=0)
    bandwidths = [row.busbw(name) for row in have]
    if any(bandwidths):
        right.plot(sizes, bandwidths, markersize=4, **style)


def _label(left: Any, right: Any, rows: list[RowResult]) -> None:
    """Axes of a pair of panels: sizes in powers of two, both axes logarithmic."""
    first = rows[0]
    words = [first.op, first.reduction, first.dtype]
    left.set_title(" ".join(word for word in words if word), loc="left", fontsize=10, fontweight="bold")
    left.set_ylabel("time, us")
    right.set_ylabel("busbw, GB/s")
    sizes = sorted({row.size_bytes for row in rows})
    step = -(-len(sizes) // 8)
    for panel in (left, right):
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(sizes[::step], [_short(size) for size in sizes[::step]])
        panel.minorticks_off()
        panel.grid(True, which="major", alpha=0.3)
        panel.set_xlabel("size, bytes")


def _short(nbytes: int) -> str:
    """A size on an axis: 8, 64K, 1M."""
    for unit, name in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g}{name}"
    return str(nbytes)
