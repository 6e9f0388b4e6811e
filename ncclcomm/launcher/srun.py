"""The command line of srun, inside a SLURM allocation."""

from __future__ import annotations

from ncclcomm.launcher.command import Command, Plan
from ncclcomm.launcher.mpiexec import settings_of

__all__ = ["build_srun"]

_PER_NODE = "SLURM_NTASKS_PER_NODE"
_CPU_BIND = {"none": "none", "core": "cores", "socket": "sockets", "numa": "ldoms"}


def build_srun(plan: Plan) -> Command:
    """The command that starts the ranks by srun, which passes on the whole environment.

    Without --bind it is the site's setting that holds ranks to the cores that SLURM gave them.

    Args:
        plan: what to start, with srun as its `starter` and a `step`.
    """
    step = plan.step
    assert step is not None
    options = [f"--mpi={step.mpi}", "--kill-on-bad-exit=1", *_placement(plan), "--export=ALL", "--input=0"]
    if step.cpus_per_task is not None:
        options.append(f"--cpus-per-task={step.cpus_per_task}")
    if plan.bind is not None:
        options.append(f"--cpu-bind={_CPU_BIND[plan.bind]}")
    if plan.label:
        options.append("--label")
    # A number for each node of the job would be wrong for an uneven step, and srun warns of it.
    unset = ("env", "-u", _PER_NODE) if not _is_even(plan) and _PER_NODE in plan.environ else ()
    return Command((*unset, plan.starter, *options, *plan.words), plan.spread({}, settings_of(plan)))


def _is_even(plan: Plan) -> bool:
    """Whether every node that gets ranks gets as many as the others."""
    return len({at.ranks for at in plan.places}) == 1


def _placement(plan: Plan) -> list[str]:
    """The options that put the ranks where the plan has them."""
    if _is_even(plan):
        nodes = len(plan.places)
        return [f"--nodes={nodes}", f"--ntasks={plan.size}", f"--ntasks-per-node={plan.size // nodes}"]
    names = ",".join(name for at in plan.places for name in [at.host] * at.ranks)
    return [f"--ntasks={plan.size}", "--distribution=arbitrary", f"--nodelist={names}"]
