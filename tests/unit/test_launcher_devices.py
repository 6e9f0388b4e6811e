"""The devices of each rank under --devices-per-rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ncclcomm.communicator.setup import _device_for, _place_among
from ncclcomm.launcher.devices import devices_of, local_rank_of


@pytest.mark.parametrize(
    ("visible", "local_rank", "per_rank", "own"),
    [
        (None, 0, 1, "0"),
        (None, 1, 2, "2,3"),
        ("2,3", 0, 1, "2"),
        ("2,3", 1, 1, "3"),
        ("3, 1,0,2", 1, 2, "0,2"),
        ("GPU-5a1c,GPU-77", 1, 1, "GPU-77"),
        ("MIG-GPU-5a1c/1/0,MIG-5a1c", 0, 2, "MIG-GPU-5a1c/1/0,MIG-5a1c"),
    ],
)
def test_groups_of_the_visible_devices(visible: str | None, local_rank: int, per_rank: int, own: str) -> None:
    assert devices_of(visible, local_rank, per_rank) == own


@pytest.mark.parametrize(
    ("visible", "count"), [("0,1", 2), ("", 0), ("-1", 0), ("0,-1,1,2", 1), ("0,,1,2", 1), ("NoDevFiles", 1)]
)
def test_too_few_devices(visible: str, count: int) -> None:
    with pytest.raises(ValueError, match="with 2 per rank local rank 1 needs number 2 to 3") as raised:
        devices_of(visible, 1, 2)
    assert f"CUDA_VISIBLE_DEVICES={visible!r} shows {count} devices" in str(raised.value)


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "3", "SLURM_LOCALID": "0"}, 3),
        ({"MPI_LOCALRANKID": "2", "SLURM_LOCALID": "0"}, 2),
        ({"SLURM_LOCALID": "1"}, 1),
        ({"SLURM_LOCALID": "x"}, None),
        ({"MPI_LOCALRANKID": ""}, None),
    ],
)
def test_local_rank(environ: dict[str, str], rank: int | None) -> None:
    assert local_rank_of(environ) == rank


@pytest.mark.parametrize(("per_rank", "devices"), [(2, [0, 0, 0]), (None, [0, 1, 2])])
def test_init_takes_the_first_of_a_ranks_own_devices(per_rank: int | None, devices: list[int]) -> None:
    gpus: Any = SimpleNamespace(name="cuda", device_count=lambda: per_rank or 3)
    assert [_device_for(None, _place_among(rank, gpus, per_rank), gpus, False) for rank in range(3)] == devices


def test_virtual_devices_are_chosen_by_local_rank_whatever_is_shown() -> None:
    virtual: Any = SimpleNamespace(name="host", device_count=lambda: 4)
    assert [_device_for(None, _place_among(rank, virtual, 2), virtual, False) for rank in range(3)] == [0, 1, 2]
