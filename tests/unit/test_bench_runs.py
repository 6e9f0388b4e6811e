"""Runs over the virtual devices of one process: tables, JSON, picture, comparison, wrong answers."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ncclcomm.bench import ops, plot, report
from ncclcomm.bench.compare import differences, verdict
from ncclcomm.bench.peers import plain
from ncclcomm.bench.results import OURS, SCHEMA, Measured, Results, RowResult
from ncclcomm.bench.stats import Spread
from ncclcomm.cli import main

pytest.importorskip("rich", reason="pip install 'ncclcomm[bench]'")

ROOT = Path(__file__).parents[2]
QUICK = ["--iters", "2", "--rounds", "3", "--warmup", "1"]
SMALL = ["bench", "--in-process", "-b", "64", "-e", "16K", "-f", "16", *QUICK]
ROW_FIELDS = {
    *("op", "dtype", "reduction", "root", "size_bytes", "count", "members", "bus_factor", "absent"),
    "contenders",
}


def run(folder: Path, *argv: str) -> dict[str, Any]:
    """Run over all four virtual devices and read the JSON file."""
    path = folder / "result.json"
    assert main([*SMALL, *argv, "--json", str(path)]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_json_says_all_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = run(tmp_path, "--against", "raw,torch,mpi4py")
    assert told["schema"] == SCHEMA
    assert told["where"] == {"ranks": 1, "nodes": 1, "backend": "host", "devices": 4}
    assert {"cpus", "cores_per_host", "hosts", "ranks_per_host", "load_before", "load_after"} <= set(told["machine"])
    assert {"python", "numpy", "ncclcomm"} <= set(told["versions"])
    assert told["settings"]["variables"]["NCCLCOMM_DEVICES"] == "host"
    assert "mpiexec" in told["absent"]["mpi4py"]
    assert set(told["absent"]) == {"torch", "mpi4py"}
    factors = {
        "broadcast": 1,
        "scatter": 0.75,
        "gather": 0.75,
        "reduce_add": 1,
        "all_reduce": 1.5,
        "all_gather": 0.75,
        "reduce_scatter": 0.75,
    }
    assert len(told["rows"]) == len(factors) * 3
    for row in told["rows"]:
        assert set(row) == ROW_FIELDS
        assert set(row["contenders"]) == {OURS, "raw"}
        ours, raw = row["contenders"][OURS], row["contenders"]["raw"]
        assert len(ours["rounds"]["time_us"]) == len(raw["rounds"]["time_us"]) == 3
        assert ours["device_us"] is ours["host_us"] is None
        assert ours["iters"] == raw["iters"] == 2
        median = ours["time_us"]["median"]
        assert median == pytest.approx(np.median(ours["rounds"]["time_us"]))
        assert ours["algbw_GBps"] == pytest.approx(row["size_bytes"] / median / 1e3)
        assert ours["busbw_GBps"] == pytest.approx(factors[row["op"]] * ours["algbw_GBps"])
        ratios = np.array(ours["rounds"]["time_us"]) / np.array(raw["rounds"]["time_us"])
        assert raw["ours_over_it"]["median"] == pytest.approx(np.median(ratios))
    assert [mean["op"] for mean in told["geometric_means"]] == list(factors)
    out, err = capsys.readouterr()
    assert "left out  torch: " in out
    assert out.count("| geo. mean |") == len(factors)
    assert err.count("ncclcomm ") == len(factors) * 3, "a line for each row in a log"
    assert "\r" not in err


def test_tables_cut_no_number_and_align_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = run(tmp_path, "broadcast", "--against", "raw")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert "…" not in "".join(lines)
    assert len({len(line) for line in lines}) == 1
    for row, line in zip(told["rows"], lines[2:], strict=False):
        cells = [cell for cell in line.split("|")[1:-1]]
        assert all(cell.endswith(" ") and not cell.endswith("  ") for cell in cells)
        assert cells[1].strip() == f"{row['count']:,}"
        assert cells[2].strip() == report.duration(row["contenders"][OURS]["time_us"]["median"])


@pytest.mark.parametrize("more", [["--fresh"], ["--root", "rotate"], ["--root", "2"], ["--devices", "1"]])
@pytest.mark.parametrize("dtype", ["float32,int16", "bool,complex64"])
def test_every_form_gives_right_answers(more: list[str], dtype: str, tmp_path: Path) -> None:
    told = run(tmp_path, "--dtype", dtype, *more, "--against", "raw")
    assert all(contender["wrong"] == "" for row in told["rows"] for contender in row["contenders"].values())
    root = {"rotate": "rotate", "2": 2}.get(more[-1], 0)
    unrooted = ("all_reduce", "all_gather", "reduce_scatter")
    assert {(row["op"] in unrooted, row["root"]) for row in told["rows"]} == {(False, root), (True, "")}


def test_fresh_results_of_the_root_cost_the_peers_nothing_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: dict[int, int] = {}
    copy = np.copyto

    def counted(target: Any, source: Any) -> None:
        copied[target.ctypes.data] = copied.get(target.ctypes.data, 0) + 1
        copy(target, source)

    monkeypatch.setattr(plain, "np", SimpleNamespace(copyto=counted, ndarray=np.ndarray, split=np.split))
    for op in ("broadcast", "scatter"):
        for form, targets in ((["--fresh"], 3), (["--out"], 4)):
            copied.clear()
            told = run(tmp_path, op, "-b", "64K", "-e", "64K", "--root", "1", *form, "--against", "raw")
            assert told["rows"][0]["contenders"]["raw"]["wrong"] == ""
            assert len(copied) == targets, (op, form)


def test_settings_hold_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    shown = {"UCX_TLS": "tcp", "NCCL_IB_PKEY": "1", "NCCL_DEBUG_FILE": "/tmp/%h"}
    hidden = {"FI_API_TOKEN": "s3cret", "NCCL_AUTH": "s3cret", "UCX_my_password": "s3cret", "FI_OPX_KEY": "s3cret"}
    for name, value in {**shown, **hidden, "OMPI_MCA_proxy": "http://me:s3cret@host:80"}.items():
        monkeypatch.setenv(name, value)
    variables = run(tmp_path, "broadcast")["settings"]["variables"]
    assert {name: variables[name] for name in shown} == shown
    assert {variables[name] for name in hidden} == {"(hidden)"}
    assert variables["OMPI_MCA_proxy"] == "http://(hidden)@host:80"
    assert "s3cret" not in capsys.readouterr().out + (tmp_path / "result.json").read_text()


def spoil(monkeypatch: pytest.MonkeyPatch, name: str, place: int) -> None:
    """Make ncclcomm's in-process collective wrong in one element of the last device's result."""
    op = ops.DEVICE_OPS[name]

    def ours(comm: Any, case: Any) -> Any:
        call = op.ours(comm, case)

        def wrong() -> Any:
            result = call()
            last = result[-1] if isinstance(result, tuple) else result
            last[place] += 1
            return result

        return wrong

    monkeypatch.setitem(ops.DEVICE_OPS, name, dataclasses.replace(op, ours=ours))


@pytest.mark.parametrize("more", [[], ["--fresh"]])
@pytest.mark.parametrize(("name", "device", "place"), [("scatter", 3, 2), ("reduce_add", 0, 15), ("gather", 0, 7)])
def test_a_wrong_answer_ends_the_run(
    name: str, device: int, place: int, more: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    spoil(monkeypatch, name, place)
    assert main([*SMALL, "--dtype", "int32", name, *more]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "WRONG" in line]
    assert f"{name}{' sum' * (name == 'reduce_add')} of 64 bytes of int32, root 0: device {device}" in line
    words = line.replace(":", "").replace(",", "").split()
    assert int(words[words.index("element") + 1]) == place
    assert int(words[words.index("got") + 1]) == int(words[words.index("expected") + 1]) + 1


def test_without_checks_a_wrong_answer_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, "scatter", 0)
    assert main([*SMALL, "--no-check", "scatter"]) == 0


def test_a_wrong_peer_is_named_and_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plain.RawNumpy, "_gather", lambda *_: lambda: None)
    told = run(tmp_path, "gather", "broadcast", "--against", "raw")
    for row in told["rows"]:
        assert ("raw" in row["contenders"]) == (row["op"] == "broadcast")
    assert "note: raw: gather of 64 bytes of float32, root 0: device 0, element 0: expected" in capsys.readouterr().out


def test_picture_is_not_blank(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="pip install 'ncclcomm[bench]'")
    png, svg = tmp_path / "picture.png", tmp_path / "picture.svg"
    run(tmp_path, "broadcast", "--against", "raw", "--plot", str(png))
    plot.plot(Results.read(tmp_path / "result.json"), svg)
    with image.open(png) as opened:
        assert opened.format == "PNG"
        colours = opened.convert("RGB").getcolors(1 << 24)
    for wanted in (plot._COLOURS[0], plot._COLOURS[1]):
        rgb = tuple(bytes.fromhex(wanted[1:]))
        assert sum(count for count, colour in colours if colour == rgb) > 300, f"no line of colour {wanted}"
    assert "<svg" in svg.read_text()


def results(times: dict[int, list[float]], **facts: Any) -> Results:
    """A result with one table: our times in microseconds, by size."""
    rows = [
        RowResult("gather", "float32", "", 0, size, size // 4, 2, 0.5, {OURS: Measured(t, None, None, 1)}, {})
        for size, t in times.items()
    ]
    return Results({"where": {"ranks": 2}, "versions": {"numpy": "1"}, **facts}, {}, rows)


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    first = results({8: [1.0, 2.0, 3.0], 16: [4.0]})
    first.write(path)
    assert Results.read(path) == first
    told = json.loads(path.read_text())
    for row in told["rows"]:
        row["iters"] = row["contenders"][OURS].pop("iters")
    path.write_text(json.dumps(told))
    assert Results.read(path) == first, "a file that says iters once a row"


def test_compare_flags_what_lies_outside_the_spread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = tmp_path / "a.json", tmp_path / "b.json"
    results({8: [10.0, 11.0, 12.0], 16: [10.0, 11.0, 12.0], 32: [10.0, 11.0, 12.0], 64: [5.0]}).write(before)
    results({8: [20.0, 22.0, 24.0], 16: [5.0, 5.5, 6.0], 32: [11.0, 11.5, 30.0]}, versions={"numpy": "2"}).write(after)
    assert main(["bench", "compare", str(before), str(after)]) == 0
    out = capsys.readouterr().out
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("|")]
    found = {row[0]: (row[6], row[7]) for row in cells[2:]}
    assert found == {
        "8 B": ("2.00", "slower"),
        "16 B": ("0.50", "faster"),
        "32 B": ("1.05", ""),
        "geo. mean": ("1.01", ""),
    }
    assert "versions.numpy: 1 -> 2" in out
    assert "1 rows are in one of the files only" in out


def test_verdict_needs_spreads_that_lie_apart() -> None:
    assert verdict(Spread.of([1, 2, 3]), Spread.of([2, 3, 4])) == ""
    assert verdict(Spread.of([2, 3, 4]), Spread.of([1, 2, 3])) == ""
    assert verdict(Spread.of([1, 2, 3]), Spread.of([4, 5, 6])) == "slower"
    assert verdict(Spread.of([4, 5, 6]), Spread.of([1, 2, 3])) == "faster"


def test_load_is_no_difference() -> None:
    assert differences({"machine": {"load_before": 1}}, {"machine": {"load_before": 2}}) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "can't be read"),
        ("{", "can't be read"),
        ("[]", "is no file of `ncclcomm bench --json`"),
        ('{"schema": "other"}', "is no file of `ncclcomm bench --json`"),
        (json.dumps({"schema": SCHEMA, "rows": [{}]}), "is damaged"),
        (json.dumps({"schema": SCHEMA, "rows": []}), "have no row in common"),
    ],
)
def test_compare_refuses_other_files(text: str | None, said: str, tmp_path: Path, capsys: Any) -> None:
    good, other = tmp_path / "good.json", tmp_path / "other.json"
    results({8: [1.0]}).write(good)
    if text is not None:
        other.write_text(text)
    assert main(["bench", "compare", str(good), str(other)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_bar_where_a_person_watches() -> None:
    pytest.importorskip("tqdm", reason="pip install 'ncclcomm[bench]'")
    ours, theirs = os.openpty()
    argv = [sys.executable, "-m", "ncclcomm", *SMALL, "broadcast"]
    with subprocess.Popen(argv, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs) as program:
        os.close(theirs)
        shown = b""
        while chunk := read_terminal(ours):
            shown += chunk
    os.close(ours)
    text = shown.decode()
    assert program.returncode == 0, text
    assert "broadcast 64 B:   0%" in text, "no bar"
    assert "[1/3]" not in text, "lines of a log on a terminal"
    assert "─" in text
    assert "geo" not in text, "a mean without a peer"


def read_terminal(descriptor: int) -> bytes:
    """What a program wrote to its terminal; nothing once it has closed it."""
    try:
        return os.read(descriptor, 1 << 16)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return b""
