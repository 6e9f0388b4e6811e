"""Command lines and settings of mpiexec, for each MPI flavour, on this host or over several."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ncclcomm.launcher.command import INTELMPI, MPICH, OPENMPI, Command, Plan, is_forwarded
from ncclcomm.launcher.hosts import Place
from ncclcomm.launcher.remote import SSH_OPTIONS

__all__ = ["build_mpiexec", "settings_of"]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def build_mpiexec(plan: Plan) -> Command:
    """The command that starts the ranks by mpiexec.

    Args:
        plan: what to start, with an mpiexec as its `starter`.
    """
    return _BUILDERS[plan.flavour](plan)


def settings_of(plan: Plan) -> dict[str, str]:
    """Variables that an MPI wants in its ranks, whatever starts them; the user's own win.

    Args:
        plan: what to start.
    """
    variables: dict[str, str] = {}
    if plan.flavour == OPENMPI:
        if plan.one_host:
            # Looking for network interfaces that one host has no use for takes most of a second.
            variables["OMPI_MCA_btl"] = "^ofi"
        if plan.crowded:
            variables["OMPI_MCA_mpi_yield_when_idle"] = "1"  # a rank that waits must not hold a core that others need
        return variables
    if plan.flavour == MPICH:
        if plan.crowded:
            # UCX spins without yielding, which costs whole time slices once ranks share cores.
            variables["MPIR_CVAR_CH4_NETMOD"] = "ofi"
        if not plan.one_host:
            # MPICH takes libfabric's `sockets` before its `tcp`, which is slower and hung in some runs. Excluding these
            # leaves hosts with InfiniBand or Slingshot their own providers, whatever the host where the job starts has.
            variables["FI_PROVIDER"] = "^sockets,udp"
    return variables


def _build_mpich(plan: Plan) -> Command:
    """MPICH's command."""
    options = ["-prepend-rank"] if plan.label else []
    if plan.bind not in (None, "none"):
        options += ["-bind-to", str(plan.bind)]
    own: dict[str, str] = {}
    if plan.places:
        options += [*_hydra_bootstrap(plan), "-hosts", ",".join(f"{at.host}:{at.ranks}" for at in plan.places)]
        if plan.ssh:
            own["HYDRA_LAUNCHER_EXTRA_ARGS"] = " ".join((*plan.ssh[1:], *SSH_OPTIONS))
    elif _in_slurm(plan):
        own.update(HYDRA_LAUNCHER="fork", HYDRA_RMK="user")
    variables = plan.spread(own, settings_of(plan))
    if not plan.places:
        return _one_program(plan, options, variables)
    options = ["-genvlist", ",".join(_forwarded_names(plan, variables)), *options]
    command = _one_program(plan, options, variables, "-genvlist")
    # With it MPICH 5.0.2 loses the last entry of its environment; `env` puts one there that nobody needs.
    last = ("env", "-u", "NCCLCOMM_LAST", "NCCLCOMM_LAST=1")
    return replace(command, argv=(*last, *command.argv), before=len(last) + 1)


def _build_intelmpi(plan: Plan) -> Command:
    """Intel MPI's command. Its -hosts does not read `:RANKS`."""
    options = ["-prepend-rank"] if plan.label else []
    own: dict[str, str] = {}
    if plan.bind == "none":
        own["I_MPI_PIN"] = "off"
    elif plan.bind is not None:
        own.update(I_MPI_PIN="on", I_MPI_PIN_DOMAIN=plan.bind)
    if _in_slurm(plan):
        # Else it places ranks as SLURM's variables say.
        own["I_MPI_JOB_RESPECT_PROCESS_PLACEMENT"] = "off"
        if not plan.places:
            own["I_MPI_HYDRA_BOOTSTRAP"] = "fork"
            options += ["-hosts", "localhost"]
    if plan.ssh:
        own["I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"] = " ".join((*plan.ssh[1:], *SSH_OPTIONS))
    # It pins each rank to a share of the cores by itself.
    variables = plan.spread(own, {"I_MPI_PIN": "off", **settings_of(plan)} if plan.bind is None else settings_of(plan))
    if not plan.places:
        return _one_program(plan, options, variables)
    options = ["-genvlist", ",".join(_forwarded_names(plan, variables)), *options, *_hydra_bootstrap(plan)]
    first = plan.places[0].ranks
    if all(at.ranks == first for at in plan.places[:-1]) and plan.places[-1].ranks <= first:
        options += ["-hosts", ",".join(at.host for at in plan.places), "-ppn", str(first)]
        return _one_program(plan, options, variables, "-genvlist")
    parts = [word for at in plan.places for word in (*_intelmpi_part(plan, at), ":")][:-1]
    return Command((plan.starter, *options, *parts), variables, "-genvlist")


def _intelmpi_part(plan: Plan, at: Place) -> tuple[str, ...]:
    """One host's part of a command whose hosts get different numbers of ranks."""
    return ("-host", at.host, "-n", str(at.ranks), *plan.words)


def _build_openmpi(plan: Plan) -> Command:
    """Open MPI's command; settings of version 4 beside those of 5, which ignore each other's."""
    options = ["--tag-output"] if plan.label else []
    wanted = settings_of(plan)
    own: dict[str, str] = {}
    if plan.bind is None:
        # The default pins each of two ranks to a core of its own, threads of NumPy included.
        wanted.update(PRTE_MCA_hwloc_default_binding_policy="none", OMPI_MCA_hwloc_base_binding_policy="none")
    else:
        options += ["--bind-to", plan.bind if plan.bind == "none" else f"{plan.bind}:overload-allowed"]
    if plan.is_root:
        wanted.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    if not plan.places:
        # Slots default to the number of cores, and more ranks than slots are refused.
        wanted.update(PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe", OMPI_MCA_rmaps_base_oversubscribe="1")
    if plan.ssh or not plan.places:
        if plan.ssh:
            agent = " ".join((*plan.ssh, *SSH_OPTIONS))
            own.update(PRTE_MCA_plm_ssh_agent=agent, OMPI_MCA_plm_rsh_agent=agent)
        if _in_slurm(plan):
            own.update(PRTE_MCA_plm="ssh", PRTE_MCA_ras="^slurm", OMPI_MCA_plm="rsh", OMPI_MCA_ras="^slurm")
    variables = plan.spread(own, wanted)
    if plan.places:
        options += ["--host", ",".join(f"{at.host}:{at.ranks}" for at in plan.places), "--map-by", "slot"]
        options = [word for name in _forwarded_names(plan, variables) for word in ("-x", name)] + options
    return _one_program(plan, options, variables, "-x" if plan.places else "")


def _hydra_bootstrap(plan: Plan) -> list[str]:
    """How hydra, MPICH's and Intel MPI's, reaches other hosts."""
    return ["-launcher", "ssh", "-launcher-exec", plan.ssh[0]] if plan.ssh else ["-launcher", "slurm"]


def _one_program(plan: Plan, options: Sequence[str], variables: Mapping[str, str], forward: str = "") -> Command:
    """The command whose ranks are all started alike."""
    argv = (plan.starter, *options, "-n", str(plan.size), *plan.words)
    return Command(argv, variables, forward)


def _forwarded_names(plan: Plan, variables: Mapping[str, str]) -> list[str]:
    """Names of the variables that ranks on other hosts get; those of Open MPI it passes on itself."""
    names = {name for name in {**plan.environ, **variables} if is_forwarded(name) and _NAME.fullmatch(name)}
    return sorted({*names, *plan.settings} - {"I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"})


def _in_slurm(plan: Plan) -> bool:
    """Whether mpiexec would notice a SLURM job and start ranks by its means."""
    return any(name in plan.environ for name in ("SLURM_JOB_ID", "SLURM_JOBID"))


_BUILDERS: dict[str, Callable[[Plan], Command]] = {
    MPICH: _build_mpich,
    OPENMPI: _build_openmpi,
    INTELMPI: _build_intelmpi,
}
