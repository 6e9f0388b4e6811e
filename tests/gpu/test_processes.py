"""What a process may do around a GPU: fork, choose devices late, exit with everything still alive."""

from __future__ import annotations

import subprocess
import sys

import pytest


def _run(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)


_FORK = """
import os, numpy as np
import ncclcomm
{before}
read, write = os.pipe()
if os.fork() == 0:
    try:
        {inside}
    except BaseException as error:
        os.write(write, f"{{type(error).__name__}}: {{error}}".encode())
    else:
        os.write(write, b"fine")
    os._exit(0)
os.wait()
print(os.read(read, 9999).decode())
"""


def test_a_child_forked_after_the_first_use_gets_a_clear_error() -> None:
    ended = _run(_FORK.format(before="ncclcomm.zeros(3)", inside="ncclcomm.zeros(3)"))
    assert ended.returncode == 0, ended.stderr
    assert "DeviceError" in ended.stdout
    assert "spawn" in ended.stdout


def test_a_child_forked_before_the_first_use_works() -> None:
    ended = _run(_FORK.format(before="pass", inside="ncclcomm.to_numpy(ncclcomm.zeros(3))"))
    assert ended.stdout.strip() == "fine", ended.stdout + ended.stderr


def test_visible_devices_are_those_of_the_first_use() -> None:
    ended = _run(
        "import os, ncclcomm; os.environ['CUDA_VISIBLE_DEVICES'] = '0'; print(ncclcomm.device_count(),"
        " ncclcomm.is_available())"
    )
    assert ended.stdout.split() == ["1", "True"], ended.stderr


def test_exit_is_silent_whatever_is_still_alive() -> None:
    ended = _run(
        "import ncclcomm\n"
        "comm = ncclcomm.init()\n"
        "stream = ncclcomm.Stream(); event = stream.record_event()\n"
        "array = comm.all_reduce(ncclcomm.zeros(1 << 20))\n"
        "stream.launch(print, 'ran')\n"
        "stream.synchronize()\n"
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ran\n", "")


@pytest.fixture(autouse=True)
def _cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs take the GPUs that are there."""
    monkeypatch.setenv("NCCLCOMM_DEVICES", "auto")
