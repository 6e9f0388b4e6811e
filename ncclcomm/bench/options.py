"""What a command line asks for, and what is wrong with it, before anything starts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ncclcomm.bench.ops import DEVICE_OPS, RANK_OPS, Op
from ncclcomm.errors import ArgumentError, UnsupportedError
from ncclcomm.reductions import OPS as REDUCTIONS
from ncclcomm.reductions import check_reduction

__all__ = ["PEERS", "ROTATE", "Options", "parse_bytes", "shown_bytes", "sizes_between"]

PEERS = ("mpi4py", "torch", "gloo", "cupyx", "nccl4py", "raw")
"""What --against takes."""

ROTATE = "rotate"
PICTURES = (".png", ".svg")

_BINARY = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class Options:
    """A command line that makes sense, apart from what only the ranks together can tell."""

    ops: tuple[Op, ...]
    sizes: tuple[int, ...]
    """Bytes, rising."""
    dtypes: tuple[np.dtype[Any], ...]
    reductions: tuple[str, ...]
    peers: tuple[str, ...]
    iters: int | None
    """Timed calls of a round; None: as many as make a round long enough."""
    rounds: int | None
    """None: as many as fit into some seconds a row."""
    warmup: int
    check: bool
    root: int | None
    """None: every rank in turn."""
    out: bool
    """The caller's buffers are filled, where the call takes them; else each call makes its result."""
    in_process: bool
    devices: int | None
    """How many devices, in one process; None: all."""
    json: Path | None
    plot: Path | None

    @classmethod
    def of(cls, args: Any) -> Options:
        """Read the parsed arguments.

        Args:
            args: what `command.add_parser`'s parser gave.

        Raises:
            ArgumentError: a value makes no sense; says which and what to pass.
        """
        table = DEVICE_OPS if args.in_process else RANK_OPS
        unknown = [name for name in args.ops if name not in table]
        if unknown:
            where = "in one process" if args.in_process else "over ranks"
            raise ArgumentError(f"no collective {unknown[0]!r} {where}: use some of {', '.join(table)}")
        ops = tuple(table[name] for name in dict.fromkeys(args.ops or table))
        dtypes = tuple(_dtype(name) for name in _words(args.dtype, "--dtype"))
        reductions = _known(args.op, "--op", REDUCTIONS)
        if args.devices is not None and not args.in_process:
            raise ArgumentError("--devices goes with --in-process; over ranks each rank has one device")
        options = cls(
            ops=ops,
            sizes=sizes_between(args.begin, args.end, args.factor),
            dtypes=dtypes,
            reductions=reductions,
            peers=_known(args.against, "--against", PEERS) if args.against else (),
            iters=None if args.iters == "auto" else _number("--iters", args.iters, 1),
            rounds=None if args.rounds == "auto" else _number("--rounds", args.rounds, 2),
            warmup=_number("--warmup", args.warmup, 0),
            check=args.check,
            root=None if args.root == ROTATE else _number("--root", args.root, 0, f" or '{ROTATE}'"),
            out=args.out,
            in_process=args.in_process,
            devices=None if args.devices is None else _number("--devices", args.devices, 1),
            json=_path(args.json, "--json"),
            plot=_path(args.plot, "--plot"),
        )
        if options.plot is not None and options.plot.suffix.lower() not in PICTURES:
            raise ArgumentError(f"--plot {str(options.plot)!r}: use a name that ends in {' or '.join(PICTURES)}")
        if options.plot is not None and not any(op.moves for op in ops):
            raise ArgumentError("--plot draws figures over size, and a barrier has none: name another collective")
        if args.ops:
            options._check_named()
        return options

    def _check_named(self) -> None:
        """Refuse reductions of dtypes that they don't take, where the collective was named."""
        for op in self.ops:
            for dtype in self.dtypes:
                if op.reduces and not self.reductions_of(op, dtype):
                    wanted = ", ".join(op.reductions(self.reductions))
                    raise ArgumentError(f"{op.name}: {wanted} of {dtype.name} is not supported; choose another --dtype")

    def reductions_of(self, op: Op, dtype: np.dtype[Any]) -> tuple[str, ...]:
        """The reductions to time an operation with, '' for one that reduces nothing; none where no row makes sense."""
        if not op.reduces:
            return ("",)
        return tuple(name for name in op.reductions(self.reductions) if _takes(name, dtype))


def _takes(reduction: str, dtype: np.dtype[Any]) -> bool:
    """True if a reduction takes a dtype."""
    try:
        check_reduction(reduction, dtype, "bench")
    except UnsupportedError:
        return False
    return True


def parse_bytes(text: str, option: str) -> int:
    """Read a size as nccl-tests does: a number of bytes, K, M, G and T being powers of 1024.

    Args:
        text: such as 8, 64K or 1.5M.
        option: named in the error.

    Raises:
        ArgumentError: no such size, or no whole number of bytes.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:I?B)?", text.strip().upper())
    nbytes = float(found[1]) * _BINARY[found[2]] if found else 0.0
    if not found or nbytes < 1 or nbytes != int(nbytes):
        raise ArgumentError(f"{option} {text!r} is no size: use a whole number of bytes above 0, such as 8, 64K or 1G")
    return int(nbytes)


def sizes_between(begin: str, end: str, factor: str) -> tuple[int, ...]:
    """The sizes of nccl-tests' -b, -e and -f: begin, begin * factor, ... up to end.

    Raises:
        ArgumentError: one of them makes no sense, or begin is above end.
    """
    first, last = parse_bytes(begin, "-b"), parse_bytes(end, "-e")
    step = _number("-f", factor, 2)
    if first > last:
        raise ArgumentError(f"-b {begin} is above -e {end}: no size lies between them")
    sizes = [first]
    while sizes[-1] * step <= last:
        sizes.append(sizes[-1] * step)
    return tuple(sizes)


def shown_bytes(nbytes: int) -> str:
    """A size as people write it: 8 B, 64 KiB, 1.5 GiB."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"


def _words(text: str, option: str) -> tuple[str, ...]:
    """The words of a list with commas, each once."""
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    if not all(words):
        raise ArgumentError(f"{option} {text!r} has an empty entry: use names with commas between them")
    return words


def _known(text: str, option: str, known: Sequence[str]) -> tuple[str, ...]:
    """The words of a list, each one of a few."""
    words = _words(text, option)
    for word in words:
        if word not in known:
            raise ArgumentError(f"{option} {word!r} is unknown: use some of {', '.join(known)}")
    return words


def _number(option: str, text: Any, least: int, also: str = "") -> int:
    """A whole number that is large enough."""
    if not re.fullmatch(r"[0-9]{1,9}", str(text)) or int(text) < least:
        raise ArgumentError(f"{option} {text!r}: use a whole number of {least} or more{also}")
    return int(text)


def _path(text: str | None, option: str) -> Path | None:
    """The name of an output file."""
    if text is None:
        return None
    if not text:
        raise ArgumentError(f"{option} needs the name of a file")
    return Path(text)


def _dtype(name: str) -> np.dtype[Any]:
    """A dtype by name, of NumPy or ml_dtypes."""
    try:
        found: np.dtype[Any] = np.dtype(name)
    except TypeError:
        found = _small_float(name)
    if found.kind not in "biufcV" or found.itemsize == 0 or (found.kind == "V" and found.fields is not None):
        raise ArgumentError(f"--dtype {name!r}: use a bool, integer, float or complex dtype, such as float32")
    return found


def _small_float(name: str) -> np.dtype[Any]:
    """A float of ml_dtypes."""
    try:
        import ml_dtypes
    except ImportError:
        hint = "; bfloat16 and fp8 need: pip install ml_dtypes"
    else:
        if name.startswith(("bfloat16", "float8")) and hasattr(ml_dtypes, name):
            found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
            return found
        hint = ""
    raise ArgumentError(f"--dtype {name!r} is unknown: use a dtype of NumPy, such as float32{hint}")
