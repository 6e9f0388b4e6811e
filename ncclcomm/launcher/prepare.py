"""From the options of `ncclcomm run`, the environment and this machine to a plan, or a line that says what is wrong."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ncclcomm import config
from ncclcomm.errors import ArgumentError, BackendUnavailableError
from ncclcomm.launcher.command import Plan, Step
from ncclcomm.launcher.devices import devices_of
from ncclcomm.launcher.flavour import Launcher, find_flavour, find_launcher, guess_launcher
from ncclcomm.launcher.hosts import Host, Place, parse_hostfile, parse_hosts, place
from ncclcomm.launcher.machine import count_gpus, physical_cores
from ncclcomm.launcher.slurm import Allocation, allocation, mpi_types, srun_mpi

__all__ = ["make_plan"]


def make_plan(args: argparse.Namespace, program: list[str], environ: Mapping[str, str]) -> Plan:
    """What to start, and where.

    Args:
        args: the options, see run.py.
        program: `[-m] PROGRAM ARGS...`.
        environ: the user's environment.

    Raises:
        ArgumentError: an option, a file or a variable makes no sense, or there are more ranks than slots.
        BackendUnavailableError: what it takes to start ranks is missing.
    """
    settings = _read_settings(args.env, environ)
    config.load({**environ, **settings})
    whole = {**environ, "NCCLCOMM_DEVICES_PER_RANK": str(args.devices_per_rank or ""), **settings}
    per_rank = config.load(whole).devices_per_rank
    hosts = _read_hosts(args)
    if args.ssh is not None and not hosts:
        raise ArgumentError(f"--ssh {args.ssh!r} reaches other hosts, and none is named: add --hosts, or leave it out")
    ssh = _ssh_words(args.ssh, environ) if hosts else ()
    job = None if hosts else _slurm_job(args, environ)
    places: tuple[Place, ...] = ()
    if hosts:
        places = place(hosts, args.size, args.ranks_per_node)
    elif job is not None:
        places = _place_in_job(job, args)
    size = sum(at.ranks for at in places) if places else _size_here(args, per_rank or 1, whole)
    if per_rank is not None and job is None:
        _check_devices(per_rank, max((at.ranks for at in places), default=size), whole, here=not places)
    launcher, step = _choose_launcher(args, job, environ, whole)
    if args.mpi is not None and step is None:
        raise ArgumentError(f"--mpi {args.mpi} is srun's, and ranks are started by {launcher.mpiexec}: leave it out")
    return Plan(
        flavour=launcher.flavour,
        starter=launcher.mpiexec,
        python=sys.executable,
        program=tuple(program),
        size=size,
        cores=len(os.sched_getaffinity(0)),
        is_root=os.geteuid() == 0,
        environ=environ,
        settings=settings,
        places=places,
        ssh=ssh,
        step=step,
        devices_per_rank=per_rank,
        bind=args.bind,
        label=sys.stdout.isatty() and size > 1 if args.label is None else args.label,
    )


def _read_settings(texts: list[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that --env sets or names."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ArgumentError(f"--env {text!r}: {name!r} is no variable's name; write NAME=VALUE, or NAME alone")
        if name.startswith("NCCLCOMM_JOB_"):
            raise ArgumentError(f"--env {text!r}: `ncclcomm run` itself sets NCCLCOMM_JOB_ variables; leave it out")
        if not equals and name not in environ:
            raise ArgumentError(f"--env {name}: no such variable is set; set it, or write {name}=VALUE")
        found[name] = value if equals else environ[name]
    return found


def _read_hosts(args: argparse.Namespace) -> tuple[Host, ...]:
    """The hosts that --hosts or --hostfile names; none without them."""
    if args.hosts is None and args.hostfile is None:
        return ()
    if args.launcher == "srun":
        raise ArgumentError("--launcher srun goes by the SLURM job's own nodes: leave out --hosts and --hostfile")
    if args.hosts is not None:
        return parse_hosts(args.hosts)
    try:
        text = Path(args.hostfile).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ArgumentError(f"--hostfile {args.hostfile!r} cannot be read: {reason}") from error
    return parse_hostfile(text, f"--hostfile {args.hostfile}")


def _slurm_job(args: argparse.Namespace, environ: Mapping[str, str]) -> Allocation | None:
    """The SLURM job whose nodes get the ranks; None for this host alone."""
    job = allocation(environ)
    if job is None:
        if args.launcher == "srun":
            raise ArgumentError("--launcher srun needs a SLURM job, and SLURM_JOB_ID is not set: use salloc or sbatch")
        return None
    if not job.in_task:
        return job
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks != "1":
        raise ArgumentError(
            f"srun runs `ncclcomm run` in {tasks} tasks (SLURM_STEP_NUM_TASKS), each of which would start all ranks: "
            "call it without srun, in the batch script or in salloc's shell"
        )
    if args.launcher == "srun":
        raise ArgumentError("--launcher srun can't be used inside a task of srun: call `ncclcomm run` without srun")
    return None


def _place_in_job(job: Allocation, args: argparse.Namespace) -> tuple[Place, ...]:
    """How many ranks each of the job's nodes gets."""
    tasks = job.tasks_per_node or (None,) * len(job.nodes)
    hosts = [Host(name, count) for name, count in zip(job.nodes, tasks, strict=True)]
    mend = f"ask SLURM for more in job {job.job_id}'s place, by --ntasks or --ntasks-per-node"
    places = place(hosts, args.size, args.ranks_per_node, mend)
    cores = dict(zip(job.nodes, job.cpus_per_node or (), strict=False))
    return tuple(replace(at, cores=cores.get(at.host)) for at in places)


def _size_here(args: argparse.Namespace, per_rank: int, environ: Mapping[str, str]) -> int:
    """Number of ranks on this host alone."""
    size: int | None = args.size
    most: int | None = args.ranks_per_node
    if size is not None and most is not None and size > most:
        raise ArgumentError(f"-n {size} is more than --ranks-per-node {most} on this host alone: name hosts by --hosts")
    if size is None:
        size = most
    if size is None and (gpus := count_gpus(environ)):
        if gpus < per_rank:
            raise ArgumentError(f"--devices-per-rank {per_rank} is more than the {gpus} GPUs of this host")
        size = gpus // per_rank
    return size or physical_cores()


def _check_devices(per_rank: int, ranks: int, environ: Mapping[str, str], here: bool) -> None:
    """Raise where a host's ranks need more devices than are visible; other hosts' are not counted."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None and here and (gpus := count_gpus(environ)):
        visible = ",".join(map(str, range(gpus)))
    if visible is not None:
        try:
            devices_of(visible, ranks - 1, per_rank)
        except ValueError as error:
            raise ArgumentError(str(error)) from error


def _choose_launcher(
    args: argparse.Namespace, job: Allocation | None, environ: Mapping[str, str], whole: Mapping[str, str]
) -> tuple[Launcher, Step | None]:
    """The srun of a SLURM job where its --mpi has a type that fits, mpiexec elsewhere; `whole` is the ranks' own."""
    if job is None or args.launcher == "mpiexec":
        return guess_launcher() if args.dry_run else find_launcher(whole), None
    flavour = guess_launcher().flavour if args.dry_run else find_flavour(whole)
    srun = shutil.which("srun", path=environ.get("PATH"))
    if srun is None and args.launcher == "srun":
        raise BackendUnavailableError("--launcher srun: there is no srun on PATH; load SLURM's clients")
    kind = args.mpi or (srun_mpi(flavour, mpi_types(environ, srun)) if srun else None)
    if srun is not None and kind is not None:
        return Launcher(flavour, srun), Step(kind, job.cpus_per_task)
    if args.launcher == "srun":
        raise BackendUnavailableError(
            f"srun --mpi=list has no type for {flavour}: name one by --mpi, or use --launcher mpiexec"
        )
    return guess_launcher() if args.dry_run else find_launcher(whole), None


def _ssh_words(option: str | None, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The words of the command that reaches other hosts, its program by its whole path."""
    where, text = ("--ssh", option) if option is not None else ("NCCLCOMM_SSH", environ.get("NCCLCOMM_SSH") or "ssh")
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ArgumentError(f"{where} {text!r} is no command: {error}") from error
    if not all(words) or not words:
        raise ArgumentError(f"{where} {text!r}: expected words that are not empty, such as 'ssh -p 2222'")
    found = shutil.which(words[0])
    if found is None:
        raise ArgumentError(f"{where} {text!r}: there is no command {words[0]!r}; install ssh, or name another")
    words[0] = os.path.abspath(found)
    for word in words:
        if re.search(r"\s", word):
            raise ArgumentError(
                f"{where} {text!r}: {word!r} holds a space, at which MPI would cut it: name another path"
            )
    return tuple(words)
