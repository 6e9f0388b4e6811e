"""What the environment asks for."""

from __future__ import annotations

from typing import Any

import pytest

from ncclcomm.config import Config, Launch, launched, load, slurm_gpus
from ncclcomm.errors import ArgumentError


def test_defaults() -> None:
    config = load({})
    assert config == Config()
    assert (config.backend, config.host_devices, config.host_streams) == ("auto", 4, "sync")
    assert (config.node_sizes, config.node_map, config.check) == ((), (), 64)
    assert not config.share_devices
    assert load(dict.fromkeys((f"NCCLCOMM_{name}" for name in NAMES), "")) == Config()


NAMES = {
    "DEVICES": [
        ("auto", {"backend": "auto"}),
        ("cuda", {"backend": "cuda"}),
        ("host", {"backend": "host", "host_devices": 4}),
        ("host:1", {"backend": "host", "host_devices": 1}),
        (" host:7 ", {"backend": "host", "host_devices": 7}),
    ],
    "DEVICES_PER_RANK": [("1", {"devices_per_rank": 1}), (" 12 ", {"devices_per_rank": 12})],
    "HOST_STREAMS": [("sync", {"host_streams": "sync"}), ("async", {"host_streams": "async"})],
    "NODE_SIZE": [("2", {"node_sizes": (2,)}), ("3,1", {"node_sizes": (3, 1)}), (" 3 , 1 ", {"node_sizes": (3, 1)})],
    "NODE_MAP": [("0,1,0,1", {"node_map": (0, 1, 0, 1)}), ("0", {"node_map": (0,)})],
    "CHECK": [
        ("true", {"check": True}),
        ("False", {"check": False}),
        ("0", {"check": 0}),
        ("1", {"check": 1}),
        ("128", {"check": 128}),
    ],
    "CHUNK_BYTES": [("1024", {"chunk_bytes": 1024}), ("64", {"chunk_bytes": 64})],
    "SHARE_DEVICES": [
        ("1", {"share_devices": True}),
        ("0", {"share_devices": False}),
        ("true", {"share_devices": True}),
    ],
}

LONG = "1" * 5000
"""More digits than Python reads."""

BAD = {
    "DEVICES": [
        "gpu",
        "host:0",
        "host:-1",
        "host:",
        "host:x",
        "host:1.5",
        "cuda:1",
        "auto:2",
        "host:4:4",
        "4",
        "host:99999",
        f"host:{LONG}",
    ],
    "DEVICES_PER_RANK": ["0", "-1", "two", "1.5", "1,2", LONG],
    "HOST_STREAMS": ["later", "1", "asynchronous"],
    "NODE_SIZE": ["0", "2,0", "2,,1", "2,", "-1", "x", "1.5", "2;1", LONG],
    "NODE_MAP": ["0,-1", "a,b", "0,,1", "0 1", LONG],
    "CHECK": ["-1", "yes", "1.5", "all", LONG],
    "CHUNK_BYTES": ["0", "63", "-1", "1k", "1024,2048", "1e9", LONG],
    "SHARE_DEVICES": ["2", "yes", "no"],
}


@pytest.mark.parametrize(("name", "text", "fields"), [(n, *case) for n, cases in NAMES.items() for case in cases])
def test_values(name: str, text: str, fields: dict[str, Any]) -> None:
    config = load({f"NCCLCOMM_{name}": text})
    assert config == Config(**fields)
    for field, value in fields.items():
        assert type(getattr(config, field)) is type(value)


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in BAD.items() for text in texts])
def test_values_that_make_no_sense(name: str, text: str) -> None:
    with pytest.raises(ArgumentError, match=f"^NCCLCOMM_{name}={text!r}".replace(".", r"\.")):
        load({f"NCCLCOMM_{name}": text})


def test_reads_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCLCOMM_DEVICES", "host:9")
    assert load().host_devices == 9
    monkeypatch.setenv("PMI_SIZE", "3")
    monkeypatch.setenv("PMI_RANK", "2")
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
    assert launched() == Launch("PMI_SIZE", 3, 2)


OMPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}
PMI = {"PMI_SIZE": "5", "PMI_RANK": "0"}
BATCH = {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7", "SLURM_LOCALID": "0"}
STEP = {"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_JOB_ID": "7", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (OMPI, ("OMPI_COMM_WORLD_SIZE", 4, 2)),
        (PMI, ("PMI_SIZE", 5, 0)),
        (STEP, ("SLURM_NTASKS", 4, 3, True)),
        (BATCH, None),
        ({**BATCH, "SLURM_NTASKS": "4"}, None),
        ({**BATCH, **OMPI}, ("OMPI_COMM_WORLD_SIZE", 4, 2)),
        ({**STEP, **OMPI}, ("OMPI_COMM_WORLD_SIZE", 4, 2)),
        ({**STEP, **PMI}, ("PMI_SIZE", 5, 0, False)),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, None),
        ({"PMI_SIZE": "x", "PMI_RANK": "0"}, None),
        ({"PMI_SIZE": LONG, "PMI_RANK": "0"}, None),
        ({**STEP, "SLURM_STEP_ID": LONG}, None),
        ({"SLURM_NTASKS": "", "SLURM_PROCID": ""}, None),
    ],
)
def test_what_a_launcher_said(environ: dict[str, str], expected: tuple[str, int, int] | None) -> None:
    assert launched(environ) == (expected and Launch(*expected))


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ""),
        ({"SLURM_STEP_GPUS": "0"}, "SLURM_STEP_GPUS=0"),
        ({"SLURM_JOB_GPUS": "0,1"}, "SLURM_JOB_GPUS=0,1"),
        ({"SLURM_GPUS_ON_NODE": "2"}, "SLURM_GPUS_ON_NODE=2"),
        ({"SLURM_GPUS_ON_NODE": "0"}, ""),
        ({"SLURM_STEP_GPUS": " ", "SLURM_JOB_GPUS": "3"}, "SLURM_JOB_GPUS=3"),
    ],
)
def test_slurm_gpus(environ: dict[str, str], expected: str) -> None:
    assert slurm_gpus(environ) == expected
