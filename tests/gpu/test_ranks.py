"""tests/ranks with arrays on GPUs: NCCL on one node, nodes emulated on shared GPUs; and the main job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flavours import Flavour, find
from rank_jobs import TESTS, run_rank_tests

JOB_DEADLINE_S = 300.0
DIGITS = TESTS.parent / "docs" / "examples" / "digits.py"


@pytest.fixture
def flavour() -> Flavour:
    """The MPI that is here: a GPU machine need not have both."""
    for name in ("openmpi", "mpich"):
        try:
            found = find(name)
        except pytest.skip.Exception:
            continue
        return found
    return find("mpich")


def _run(flavour: Flavour, n: int, **env: str) -> None:
    """Run the rank tests on the CUDA backend."""
    job = run_rank_tests(
        flavour,
        n,
        [TESTS / "ranks", "-W", "ignore::RuntimeWarning"],
        env={"NCCLCOMM_DEVICES": "cuda", **env},
        timeout_s=JOB_DEADLINE_S,
    )
    if job.status:
        pytest.fail(job.report, pytrace=False)


@pytest.mark.timeout(JOB_DEADLINE_S + 60)
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.gpu(2))])
def test_a_gpu_a_rank(flavour: Flavour, n: int) -> None:
    _run(flavour, n)


@pytest.mark.timeout(JOB_DEADLINE_S + 60)
@pytest.mark.parametrize("n", [3, 4])
def test_shared_gpus_and_emulated_nodes(flavour: Flavour, n: int) -> None:
    _run(flavour, n, NCCLCOMM_SHARE_DEVICES="1")


def _loss(flavour: Flavour, n: int, folder: Path, **env: str) -> dict[str, object]:
    """What the main job says, in float32."""
    out = folder / "digits.json"
    ended = flavour.run(
        n,
        [DIGITS, "--dtype", "float32", "--steps", "100", "--output", folder / "digits.png", "--json", out],
        env=env,
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, object] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize(
    ("n", "env"),
    [
        (1, {}),
        pytest.param(2, {}, marks=pytest.mark.gpu(2)),
        pytest.param(4, {"NCCLCOMM_NODE_SIZE": "2"}, marks=pytest.mark.gpu(2)),
    ],
)
def test_digits_lose_the_same_as_on_the_host(flavour: Flavour, tmp_path: Path, n: int, env: dict[str, str]) -> None:
    on_gpu = _loss(flavour, n, tmp_path, NCCLCOMM_DEVICES="cuda", **env)
    on_host = _loss(flavour, n, tmp_path, NCCLCOMM_DEVICES="host", **env)
    assert (on_gpu["backend"], on_host["backend"]) == ("cuda", "host")
    assert on_gpu["loss"] == pytest.approx(on_host["loss"], abs=1e-6)
    assert on_gpu["accuracy"] == pytest.approx(on_host["accuracy"], abs=0.01)
