"""`make demo` and `make test` see an NVIDIA driver and install the CUDA extra that fits."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]


def _extra(folder: Path, nvidia_smi: str | None, *args: str) -> str:
    """The extras that make would install, where nvidia-smi says this; None: there is no nvidia-smi."""
    fake = folder / "nvidia-smi"
    fake.write_text(f"#!/bin/sh\n{nvidia_smi or 'exit 9'}\n")
    fake.chmod(0o755)
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "GPU")}
    ended = subprocess.run(
        ["make", "-n", "-B", "demo", *args],
        cwd=PROJECT,
        env={**env, "PATH": f"{folder}{os.pathsep}{env['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    line = next(line for line in ended.stdout.splitlines() if "installing ncclcomm[" in line)
    return line.split("[", 1)[1].split("]", 1)[0].removeprefix("mpich,examples").removeprefix(",")


@pytest.mark.parametrize(
    ("says", "extra"),
    [
        ("echo '| NVIDIA-SMI 580.159.04    Driver Version: 580.159.04    CUDA Version: 13.0     |'", "cuda13"),
        ("echo '| NVIDIA-SMI 550.54.15     Driver Version: 550.54.15     CUDA Version: 12.4     |'", "cuda12"),
        ("echo '| NVIDIA-SMI 470.10        Driver Version: 470.10        CUDA Version: 11.4     |'", ""),
        ("echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'; exit 9", ""),
        (None, ""),
    ],
)
def test_the_extra_that_fits_the_driver(tmp_path: Path, says: str | None, extra: str) -> None:
    assert _extra(tmp_path, says) == extra


def test_a_named_extra_wins(tmp_path: Path) -> None:
    assert _extra(tmp_path, "echo 'CUDA Version: 13.0'", "GPU=cuda12") == "cuda12"
    assert _extra(tmp_path, "echo 'CUDA Version: 13.0'", "GPU=") == ""
