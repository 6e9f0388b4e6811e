"""What a run found: figures of every row and what they were measured on, as a JSON file."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ncclcomm.bench.case import Row
from ncclcomm.bench.stats import Spread, algbw_gbps, geometric_mean
from ncclcomm.errors import ArgumentError

__all__ = ["OURS", "SCHEMA", "Measured", "Results", "RowResult", "mean_ratio"]

SCHEMA = "ncclcomm-bench-1"
OURS = "ncclcomm"

_NUMBERS = re.compile(r'\[[-+.,\deE\s]*\]|\{\s*(?:"\w+": [-+.\deE]+,?\s*)+\}')
"""A list of numbers in JSON, or a dictionary of numbers."""


@dataclass
class Measured:
    """One contender's rounds of a row; of each round the slowest rank's figure, of one call, in microseconds."""

    time_us: list[float]
    """To the result."""
    host_us: list[float] | None
    """Until the call returned; None on the host backend, where the result is there then."""
    device_us: list[float] | None
    """Between events on the devices' streams; None on the host backend."""
    iters: int
    """Calls in a round."""
    wrong: str = ""
    """What was wrong with a peer's answer; '' where it was right or not looked at."""

    @property
    def time(self) -> Spread:
        """The time to the result, in microseconds."""
        return Spread.of(self.time_us)


@dataclass
class RowResult:
    """A row of the table."""

    op: str
    dtype: str
    reduction: str
    """'' where data is only moved."""
    root: int | str
    """A member, 'rotate', or '' of a collective without a root."""
    size_bytes: int
    count: int
    members: int
    """Number of ranks, or of devices of one process."""
    bus_factor: float
    measured: dict[str, Measured]
    """By contender; ours is 'ncclcomm'."""
    absent: dict[str, str]
    """Peers that took no part in the row, with the reason."""

    @classmethod
    def of(cls, row: Row, measured: dict[str, Measured], absent: dict[str, str]) -> RowResult:
        """The figures of a row.

        Args:
            row: the row.
            measured: by contender.
            absent: peers that took no part, with the reason.
        """
        return cls(
            op=row.op.name,
            dtype=row.dtype.name,
            reduction=row.reduction,
            root="" if not row.op.rooted else row.roots[0] if len(row.roots) == 1 else "rotate",
            size_bytes=row.nbytes,
            count=row.count,
            members=row.size,
            bus_factor=row.op.bus(row.size),
            measured=measured,
            absent=absent,
        )

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """What makes it the same row in another run."""
        return self.op, self.dtype, self.reduction, str(self.root), self.size_bytes

    @property
    def table(self) -> tuple[str, str, str]:
        """The table that it stands in: collective, dtype, reduction."""
        return self.op, self.dtype, self.reduction

    def algbw(self, name: str) -> float:
        """A contender's algorithm bandwidth, in GB/s."""
        return algbw_gbps(self.size_bytes, self.measured[name].time.median / 1e6)

    def busbw(self, name: str) -> float:
        """A contender's bus bandwidth, in GB/s."""
        return self.algbw(name) * self.bus_factor

    def ratio(self, peer: str) -> Spread | None:
        """Our time over a peer's, of each round; None where the peer took no part or was wrong."""
        theirs = self.measured.get(peer)
        if theirs is None or theirs.wrong:
            return None
        pairs = zip(self.measured[OURS].time_us, theirs.time_us, strict=True)
        return Spread.of([ours / their for ours, their in pairs])

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it: the rounds, and what is computed from them."""
        contenders = {}
        for name, found in self.measured.items():
            ratio = None if name == OURS else self.ratio(name)
            contenders[name] = {
                "time_us": vars(found.time),
                "host_us": None if found.host_us is None else vars(Spread.of(found.host_us)),
                "device_us": None if found.device_us is None else vars(Spread.of(found.device_us)),
                "algbw_GBps": self.algbw(name),
                "busbw_GBps": self.busbw(name),
                "ours_over_it": None if ratio is None else vars(ratio),
                "wrong": found.wrong,
                "iters": found.iters,
                "rounds": {"time_us": found.time_us, "host_us": found.host_us, "device_us": found.device_us},
            }
        own = {name: value for name, value in vars(self).items() if name != "measured"}
        return {**own, "contenders": contenders}

    @classmethod
    def from_dict(cls, told: dict[str, Any]) -> RowResult:
        """From what `to_dict` gave.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        measured = {
            # A file may say it once for all contenders of a row.
            name: Measured(**found["rounds"], iters=found.get("iters") or told["iters"], wrong=found.get("wrong", ""))
            for name, found in told["contenders"].items()
        }
        names = set(cls.__dataclass_fields__) - {"measured"}
        row = cls(**{name: told[name] for name in names}, measured=measured)
        row.measured[OURS].time  # noqa: B018 - asks whether there is a round
        return row


@dataclass
class Results:
    """A run."""

    facts: dict[str, Any]
    """Command, time, machine, versions, settings, commit."""
    absent: dict[str, str] = field(default_factory=dict)
    """Peers that could not take part at all, with the reason."""
    rows: list[RowResult] = field(default_factory=list)

    @property
    def peers(self) -> list[str]:
        """The peers that took part in some row."""
        names = dict.fromkeys(name for row in self.rows for name in row.measured)
        return [name for name in names if name != OURS]

    def tables(self) -> dict[tuple[str, str, str], list[RowResult]]:
        """The rows by table, in the order of the run."""
        found: dict[tuple[str, str, str], list[RowResult]] = {}
        for row in self.rows:
            found.setdefault(row.table, []).append(row)
        return found

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        means = []
        for (op, dtype, reduction), rows in self.tables().items():
            for peer in self.peers:
                mean = mean_ratio(rows, peer)
                if mean is not None:
                    means.append({"op": op, "dtype": dtype, "reduction": reduction, "peer": peer, "ours_over_it": mean})
        return {
            "schema": SCHEMA,
            **self.facts,
            "absent": self.absent,
            "geometric_means": means,
            "rows": [row.to_dict() for row in self.rows],
        }

    def write(self, path: Path) -> None:
        """Write the JSON file.

        Raises:
            OSError: the file can't be written.
        """
        text = json.dumps(self.to_dict(), indent=1)
        # The rounds of a row on one line each, so that the file can be read, and its changes too.
        text = _NUMBERS.sub(lambda found: " ".join(found[0].split()), text)
        path.write_text(f"{text}\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read a file that `write` wrote.

        Raises:
            ArgumentError: it can't be read, or is no result of `ncclcomm bench`.
        """
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ArgumentError(f"{path} can't be read: {error}") from error
        if not isinstance(told, dict) or told.get("schema") != SCHEMA:
            raise ArgumentError(f"{path} is no file of `ncclcomm bench --json` (schema {SCHEMA})")
        try:
            rows = [RowResult.from_dict(row) for row in told["rows"]]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArgumentError(f"{path} is damaged: {type(error).__name__}: {error}") from error
        computed = ("schema", "absent", "geometric_means", "rows")
        return cls({name: value for name, value in told.items() if name not in computed}, told.get("absent", {}), rows)


def mean_ratio(rows: list[RowResult], peer: str) -> float | None:
    """The geometric mean over a table's rows of our time over a peer's; None where it took part in none.

    Args:
        rows: rows of one table.
        peer: the peer's name.
    """
    ratios = [ratio.median for row in rows if (ratio := row.ratio(peer)) is not None]
    return geometric_mean(ratios)
