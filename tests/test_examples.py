"""The examples of docs/ run and give what they promise."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flavours import Flavour, find, run_tree

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "docs" / "examples"
RANKS = {"mpich": (1, 2, 3, 4), "openmpi": (3,)}

image = pytest.importorskip("PIL.Image", reason="pip install 'ncclcomm[examples]'")


def run_digits(flavour: Flavour, n: int, folder: Path, *args: str) -> dict[str, Any]:
    """Run the digits example and check what any run of it must give."""
    picture, result = folder / f"digits-{n}.png", folder / f"digits-{n}.json"
    done = flavour.run(n, [EXAMPLES / "digits.py", "--output", picture, "--json", result, *args])
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(result.read_text())
    assert told["ranks"] == n
    assert sum(told["samples_per_rank"]) == 1797 - 360
    assert f"final loss    {told['loss']:.12f}" in done.stdout
    assert "\r" not in done.stdout + done.stderr, "a progress bar went into a log"
    with image.open(picture) as opened:
        assert opened.format == "PNG"
        assert opened.width >= 800
        assert len(np.unique(np.asarray(opened.convert("L")))) > 20, "the picture is nearly blank"
    return dict(told)


def test_digits_loss_is_the_same_on_any_number_of_ranks(flavour: Flavour, tmp_path: Path) -> None:
    results = [run_digits(flavour, n, tmp_path) for n in RANKS[flavour.name]]
    for result in results:
        assert result["accuracy"] >= 0.93
        assert result["loss"] == pytest.approx(results[0]["loss"], abs=1e-9)
        assert len(set(result["samples_per_rank"])) == result["ranks"], "the split is meant to be uneven"


def test_digits_loss_is_that_of_numpy_alone(tmp_path: Path) -> None:
    datasets = pytest.importorskip("sklearn.datasets", reason="pip install 'ncclcomm[examples]'")
    pixels, labels = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))[360:]
    samples, wanted = np.c_[pixels / 16, np.ones(len(pixels))][order], np.eye(10)[labels[order]]
    weights = np.zeros((65, 10))

    def likelihoods() -> Any:
        scores = samples @ weights
        return scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))

    for _ in range(20):
        gradient = samples.T @ (np.exp(likelihoods()) - wanted) / len(samples)
        weights -= 0.5 * (gradient + 1e-4 * weights)
    expected = -(likelihoods() * wanted).sum() / len(samples)
    result = run_digits(find("mpich"), 3, tmp_path, "--steps", "20")
    assert result["loss"] == pytest.approx(expected, abs=1e-9)


def test_digits_in_single_precision(tmp_path: Path) -> None:
    result = run_digits(find("mpich"), 2, tmp_path, "--dtype", "float32")
    assert result["accuracy"] >= 0.93


def test_digits_says_what_is_wrong_with_its_arguments(tmp_path: Path) -> None:
    done = find("mpich").run(1, [EXAMPLES / "digits.py", "--steps", "0"], cwd=tmp_path)
    assert done.returncode == 2
    assert "at least one step is needed" in done.stderr
    assert not list(tmp_path.iterdir())


def readme_program(containing: str, folder: Path) -> Path:
    """Write the README's program that contains a text into a file."""
    programs = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    (program,) = [text for text in programs if containing in text]
    path = folder / "readme.py"
    path.write_text(program)
    return path


def test_readme_program_over_ranks(flavour: Flavour, tmp_path: Path) -> None:
    done = flavour.run(3, [readme_program("ncclcomm.init()", tmp_path)])
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.findall(r"rank (\d) of 3 on (?:host|cuda): mean 5\.5", done.stdout)
    assert sorted(told) == ["0", "1", "2"]


def test_readme_program_over_devices(tmp_path: Path) -> None:
    done = run_tree([sys.executable, readme_program("from ncclcomm import comm", tmp_path)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split("[")[1].split() == [f"{1 + 4 * i}." for i in range(11)] + ["45.]"]
