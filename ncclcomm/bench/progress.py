"""How far a run is: a bar where a person watches, a line for each row elsewhere; on rank 0's stderr."""

from __future__ import annotations

import shutil
import sys
from types import TracebackType
from typing import Any

from ncclcomm import config
from ncclcomm.bench.case import Row
from ncclcomm.bench.options import shown_bytes
from ncclcomm.bench.results import RowResult

__all__ = ["Progress", "is_watched"]


def is_watched() -> bool:
    """True if a person sees this process's stderr: a terminal, also behind `ncclcomm run`."""
    return sys.stderr.isatty() or config.variables("NCCLCOMM_WATCHED").get("NCCLCOMM_WATCHED") == "1"


class Progress:
    """A run's progress; a context manager.

    Args:
        total: number of rows.
        shown: False on the ranks that say nothing.
    """

    def __init__(self, total: int, shown: bool) -> None:
        self._total = total
        self._shown = shown
        self._done = 0
        self._bar: Any = None
        if shown and is_watched():
            from tqdm import tqdm

            # Behind `ncclcomm run`, and in some terminals, the size isn't known: then it is 80 by 24.
            size = shutil.get_terminal_size()
            self._bar = tqdm(
                total=total, unit="row", file=sys.stderr, leave=False, ncols=size.columns, nrows=size.lines
            )

    def begin(self, row: Row) -> None:
        """A row begins."""
        if self._bar is not None:
            self._bar.set_description(f"{row.op.name} {shown_bytes(row.nbytes)}")

    def end(self, result: RowResult) -> None:
        """A row is through."""
        self._done += 1
        if self._bar is not None:
            self._bar.update()
        elif self._shown:
            words = [result.op, result.dtype, result.reduction, shown_bytes(result.size_bytes)]
            times = ", ".join(f"{name} {found.time.median:.1f} us" for name, found in result.measured.items())
            print(f"[{self._done}/{self._total}] {' '.join(filter(None, words))}: {times}", file=sys.stderr, flush=True)

    def aside(self) -> None:
        """Make room for a table on stdout."""
        if self._bar is not None:
            self._bar.clear()

    def __enter__(self) -> Progress:
        """Begin."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
