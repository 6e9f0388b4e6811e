"""tests/ranks with arrays on GPUs: NCCL on one node, nodes emulated on shared GPUs; and the main job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flavours import Flavour
from rank_jobs import TESTS, run_rank_tests

JOB_DEADLINE_S = 300.0
DIGITS = TESTS.parent / "docs" / "examples" / "digits.py"


def _run(any_flavour: Flavour, n: int, **env: str) -> None:
    """Run the rank tests on the CUDA backend."""
    job = run_rank_tests(
        any_flavour,
        n,
        [TESTS / "ranks", "-W", "ignore::RuntimeWarning"],
        env={"NCCLCOMM_DEVICES": "cuda", **env},
        timeout_s=JOB_DEADLINE_S,
    )
    if job.status:
        pytest.fail(job.report, pytrace=False)


@pytest.mark.timeout(JOB_DEADLINE_S + 60)
@pytest.mark.parametrize(
    ("n", "env"),
    [
        (1, {}),
        pytest.param(2, {}, marks=pytest.mark.gpu(2, ranks=True)),
        pytest.param(4, {"NCCLCOMM_NODE_SIZE": "2"}, marks=pytest.mark.gpu(2, ranks=True)),
    ],
)
def test_a_gpu_a_rank(any_flavour: Flavour, n: int, env: dict[str, str]) -> None:
    _run(any_flavour, n, **env)


@pytest.mark.timeout(JOB_DEADLINE_S + 60)
@pytest.mark.parametrize("n", [3, 4])
def test_shared_gpus_and_emulated_nodes(any_flavour: Flavour, n: int) -> None:
    _run(any_flavour, n, NCCLCOMM_SHARE_DEVICES="1")


def _loss(any_flavour: Flavour, n: int, folder: Path, **env: str) -> dict[str, object]:
    """What the main job says, in float32."""
    out = folder / "digits.json"
    ended = any_flavour.run(
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
        pytest.param(2, {}, marks=pytest.mark.gpu(2, ranks=True)),
        pytest.param(4, {"NCCLCOMM_NODE_SIZE": "2"}, marks=pytest.mark.gpu(2, ranks=True)),
    ],
)
def test_digits_lose_the_same_as_on_the_host(any_flavour: Flavour, tmp_path: Path, n: int, env: dict[str, str]) -> None:
    on_gpu = _loss(any_flavour, n, tmp_path, NCCLCOMM_DEVICES="cuda", **env)
    on_host = _loss(any_flavour, n, tmp_path, NCCLCOMM_DEVICES="host", **env)
    assert (on_gpu["backend"], on_host["backend"]) == ("cuda", "host")
    assert on_gpu["loss"] == pytest.approx(on_host["loss"], abs=1e-6)
    assert on_gpu["accuracy"] == pytest.approx(on_host["accuracy"], abs=0.01)


_ALL_REDUCE = """
import numpy as np, ncclcomm
with ncclcomm.init() as comm:
    print(ncclcomm.to_numpy(comm.all_reduce(ncclcomm.asarray(np.full(3, comm.rank + 1.0)))))
"""


def test_two_ranks_on_one_gpu(any_flavour: Flavour, tmp_path: Path) -> None:
    script = tmp_path / "sum.py"
    script.write_text(_ALL_REDUCE)
    env = {"NCCLCOMM_DEVICES": "cuda", "CUDA_VISIBLE_DEVICES": "0"}
    refused = any_flavour.run(2, [script], env=env, timeout_s=60)
    assert refused.returncode != 0
    assert "ranks 0-1 of node 0 share the GPU" in refused.stderr
    assert "NCCLCOMM_SHARE_DEVICES=1" in refused.stderr
    shared = any_flavour.run(2, [script], env={**env, "NCCLCOMM_SHARE_DEVICES": "1"}, timeout_s=60)
    assert (shared.returncode, shared.stdout.count("[3. 3. 3.]")) == (0, 2), shared.stderr
    assert shared.stderr.count("RuntimeWarning") == 1, shared.stderr


@pytest.mark.gpu(2)
def test_more_ranks_than_gpus(any_flavour: Flavour, tmp_path: Path, gpus: int) -> None:
    script = tmp_path / "sum.py"
    script.write_text(_ALL_REDUCE)
    ended = any_flavour.run(gpus + 1, [script], env={"NCCLCOMM_DEVICES": "cuda"}, timeout_s=60)
    assert ended.returncode != 0
    assert f"local rank {gpus} finds {gpus} GPUs visible" in ended.stderr
