"""Lines on the transfers that were tried."""

from __future__ import annotations

from typing import Any

from ncclcomm.doctor.findings import Findings
from ncclcomm.doctor.lines import Line, failed, not_checked, passed
from ncclcomm.doctor.trials import NBYTES

__all__ = ["TRIALS", "check_trials"]

TRIALS = "the trials"
"""The step in which ranks move data."""

_RUN_AGAIN = "mend the other fails first, if any; then run it with NCCL_DEBUG=INFO, which tells more"


def check_trials(found: Findings) -> list[Line]:
    """All lines on transfers."""
    return [
        _init(found),
        _level(found, "trial.devices", "devices", "devices of one process", _no_devices(found)),
        _level(found, "trial.node", "node_ranks", "ranks of a node", "no node has two ranks"),
        _level(found, "trial.nodes", "leaders", "nodes", "there is one node"),
    ]


def _init(found: Findings) -> Line:
    """Do the ranks find each other?"""
    name = "trial.init"
    if found.ended_in == TRIALS:
        return failed(name, f"the job ended in a trial: {found.ended_because or 'see standard error'}", _RUN_AGAIN)
    if found.trials is None:
        return not_checked(name, found.no_trials)
    for rank, told in enumerate(found.trials):
        if told["init_error"]:
            return failed(name, f"rank {rank}: ncclcomm.init: {told['init_error']}", "the message says what to type")
    nodes = found.topology.num_nodes
    return passed(name, f"ncclcomm.init joins {_count(len(found.trials), 'rank')} on {_count(nodes, 'node')}")


def _no_devices(found: Findings) -> str:
    """Why no sum over devices of a process was tried, where none was."""
    if any(told["kernel"] and told["kernel"]["error"] for told in found.trials or []):
        return "kernels can't be compiled (see gpu.kernels)"
    return "no process sees two devices"


def _count(number: int, noun: str) -> str:
    """A number of things, in words."""
    return f"{number} {noun}{'s' * (number != 1)}"


def _level(found: Findings, name: str, key: str, members: str, absent: str) -> Line:
    """Do all-reduce and broadcast arrive, and how fast?"""
    if found.trials is None:
        return not_checked(name, found.no_trials)
    if any(told["init_error"] for told in found.trials):
        return not_checked(name, "ncclcomm.init failed")
    made = [(rank, told[key]) for rank, told in enumerate(found.trials) if told[key]]
    if not made:
        return not_checked(name, absent)
    for rank, trial in made:
        if trial["error"]:
            return failed(name, f"rank {rank}: {trial['error']}", _RUN_AGAIN)
    for call in ("all_reduce", "broadcast"):
        wrong = [f"rank {rank}: {', '.join(trial[call]['wrong'])}" for rank, trial in made if trial[call]["wrong"]]
        if wrong:
            return failed(name, f"{call} gave wrong numbers, {'; '.join(wrong[:8])}", _RUN_AGAIN)
    most = max(trial["members"] for _, trial in made)
    speeds = ", ".join(_speed(made, call) for call in ("all_reduce", "broadcast"))
    return passed(name, f"{most} {members}, {NBYTES >> 20} MiB: {speeds}")


def _speed(made: list[tuple[int, dict[str, Any]]], call: str) -> str:
    """Time and bandwidth (bytes of the array by time, in decimal GB/s) of the slowest member."""
    seconds = max(trial[call]["seconds"] for _, trial in made)
    return f"{call} {seconds * 1e3:.3g} ms ({NBYTES / seconds / 1e9:.3g} GB/s)"
