"""What a command line of `ncclcomm bench` means, and what is said of one that makes no sense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench_options import options
from ncclcomm.bench.case import Row
from ncclcomm.bench.ops import RANK_OPS
from ncclcomm.bench.options import parse_bytes, shown_bytes, sizes_between
from ncclcomm.bench.precheck import available_bytes, check_files, check_place, rows_of
from ncclcomm.cli import main
from ncclcomm.errors import ArgumentError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("8", 8), ("1K", 1024), ("64k", 65536), ("1M", 1 << 20), ("1.5M", 3 << 19), ("2G", 2 << 30), ("4MiB", 4 << 20)],
)
def test_sizes_are_read_as_nccl_tests_does(text: str, nbytes: int) -> None:
    assert parse_bytes(text, "-b") == nbytes


@pytest.mark.parametrize("text", ["", "0", "-8", "8X", "1.5", "K", "1e3", "0.0001K", "1 0"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"^-e .* is no size: use a whole number of bytes"):
        parse_bytes(text, "-e")


def test_default_sizes() -> None:
    sizes = options().sizes
    assert sizes[0] == 8
    assert sizes[-1] == 512 << 20  # 8 * 4**13; the next one is above 1G
    assert all(later == 4 * size for size, later in zip(sizes, sizes[1:], strict=False))
    assert sizes_between("1K", "1K", "2") == (1024,)
    assert sizes_between("8", "64", "2") == (8, 16, 32, 64)


def test_all_collectives_by_default() -> None:
    assert [op.name for op in options().ops] == [
        "broadcast",
        "scatter",
        "gather",
        "reduce",
        "reduce_add",
        "all_reduce",
        "barrier",
    ]
    assert [op.name for op in options(in_process=True).ops] == [
        "broadcast",
        "scatter",
        "gather",
        "reduce_add",
        "all_reduce",
        "all_gather",
        "reduce_scatter",
    ]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"ops": ["all_redce"]}, "no collective 'all_redce' over ranks: use some of broadcast, scatter"),
        ({"ops": ["barrier"], "in_process": True}, "no collective 'barrier' in one process"),
        ({"against": "mpi4py,mpich"}, "--against 'mpich' is unknown: use some of mpi4py, torch, gloo"),
        ({"against": "raw,"}, "--against 'raw,' has an empty entry"),
        ({"op": "mean"}, "--op 'mean' is unknown: use some of sum, prod"),
        ({"dtype": "float33"}, "--dtype 'float33' is unknown"),
        ({"dtype": "datetime64[s]"}, r"--dtype 'datetime64\[s\]': use a bool, integer, float or complex dtype"),
        ({"dtype": "i4,f4", "begin": "2K", "end": "1K"}, "-b 2K is above -e 1K"),
        ({"factor": "1"}, "-f '1': use a whole number of 2 or more"),
        ({"iters": "0"}, "--iters '0': use a whole number of 1 or more"),
        ({"rounds": "1"}, "--rounds '1': use a whole number of 2 or more"),
        ({"warmup": "-1"}, "--warmup '-1': use a whole number of 0 or more"),
        ({"root": "last"}, "--root 'last': use a whole number of 0 or more or 'rotate'"),
        ({"devices": "2"}, "--devices goes with --in-process"),
        ({"plot": "a.pdf"}, "--plot 'a.pdf': use a name that ends in .png or .svg"),
        ({"plot": "a.png", "ops": ["barrier"]}, "--plot draws figures over size"),
        ({"json": ""}, "--json needs the name of a file"),
        ({"ops": ["reduce"], "op": "max", "dtype": "complex64"}, "reduce: max of complex64 is not supported"),
    ],
)
def test_what_makes_no_sense(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{said}"):
        options(**changed)


def test_rows_are_whole_and_each_once() -> None:
    rows = rows_of(options(begin="1", end="64", factor="2", ops=["gather", "all_reduce", "barrier"]), size=3)
    sizes = {name: [row.nbytes for row in rows if row.op.name == name] for name in ("gather", "all_reduce", "barrier")}
    assert sizes == {"gather": [12, 24, 36, 72], "all_reduce": [4, 8, 16, 32, 64], "barrier": [0]}


def test_unnamed_collectives_without_the_dtype_are_left_out() -> None:
    rows = rows_of(options(dtype="complex64", op="max", end="64"), size=2)
    assert {row.op.name for row in rows} == {"broadcast", "scatter", "gather", "reduce_add", "barrier"}


def test_roots() -> None:
    assert Row.of(RANK_OPS["gather"], np.dtype("f4"), "", 8, 3, None).roots == (0, 1, 2)
    assert Row.of(RANK_OPS["gather"], np.dtype("f4"), "", 8, 3, 2).roots == (2,)
    assert Row.of(RANK_OPS["all_reduce"], np.dtype("f4"), "sum", 8, 3, None).roots == (0,)


@pytest.mark.parametrize(
    ("changed", "ranks", "devices", "said"),
    [
        ({"in_process": True}, 2, 4, "--in-process is for one process, and 2 ranks were started"),
        ({"in_process": True, "devices": "5"}, 1, 4, "--devices 5: this process has 4"),
        ({"root": "2"}, 2, 4, "--root 2: use a rank from 0 to 1"),
        ({"root": "3", "in_process": True, "devices": "3"}, 1, 4, "--root 3: use a device from 0 to 2"),
    ],
)
def test_place(changed: dict[str, Any], ranks: int, devices: int, said: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{said}"):
        check_place(options(**changed), ranks, devices)


def test_files_are_tried_and_left_as_they_were(tmp_path: Path) -> None:
    there, new = tmp_path / "there.json", tmp_path / "new.json"
    there.write_text("kept")
    check_files([there, new, None])
    assert there.read_text() == "kept"
    assert not new.exists()
    for path, why in ((tmp_path / "no" / "x.json", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ArgumentError, match=f"can't be written: {why}"):
            check_files([path])


def test_available_memory_heeds_the_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9000 kB\nMemFree:  100 kB\nMemAvailable:  4000 kB\n")
    assert available_bytes(str(meminfo), str(tmp_path)) == 4000 << 10
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("1500000\n")
    (tmp_path / "memory.stat").write_text("anon 1000000\ninactive_file 200000\n")
    assert available_bytes(str(meminfo), str(tmp_path)) == 1_700_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(str(meminfo), str(tmp_path)) == 4000 << 10


def test_bad_input_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--in-process", "-e", "8X"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "ncclcomm bench: -e '8X' is no size: use a whole number of bytes above 0, such as 8, 64K or 1G\n"


def test_too_little_memory_is_told_before_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich", reason="pip install 'ncclcomm[bench]'")
    assert main(["bench", "--in-process", "-b", "900T", "-e", "900T", "broadcast"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ncclcomm bench: broadcast of 900 TiB needs ")
    assert "are free: lower -e" in line


def test_shown_sizes() -> None:
    assert [shown_bytes(n) for n in (0, 1023, 1024, 1536, 1 << 20, 3 << 29)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "1.5 KiB",
        "1 MiB",
        "1.5 GiB",
    ]
