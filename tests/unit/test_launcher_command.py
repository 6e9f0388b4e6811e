"""Command lines and variables, from plain values."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from ncclcomm.launcher.command import CHILD, INTELMPI, MPICH, OPENMPI, Command, Plan, Step, is_forwarded
from ncclcomm.launcher.hosts import Place
from ncclcomm.launcher.mpiexec import build_mpiexec
from ncclcomm.launcher.srun import build_srun

FLAVOURS = (MPICH, OPENMPI, INTELMPI)
PROGRAM = ("a b.py", "--help", "")
RUNS = ("/py", CHILD, *PROGRAM)
TWO = (Place("h1", 2), Place("h2", 1))
UNEVEN = (Place("h1", 1), Place("h2", 3), Place("h3", 1))
SSH = ("/bin/ssh", "-p", "22")


def plan(flavour: str, **given: Any) -> Plan:
    whole: dict[str, Any] = {
        "starter": "/some where/mpiexec",
        "python": "/py",
        "program": PROGRAM,
        "size": sum(at.ranks for at in given.get("places", ())) or 3,
        "cores": 4,
        "is_root": False,
        "environ": {},
    }
    return Plan(flavour, **{**whole, **given})


def build(flavour: str, **given: Any) -> Command:
    return build_mpiexec(plan(flavour, **given))


def option(command: Command, name: str) -> str:
    """What follows an option."""
    return command.argv[command.argv.index(name) + 1]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_program_and_arguments_come_last_and_unchanged(flavour: str) -> None:
    assert build(flavour).argv == ("/some where/mpiexec", "-n", "3", *RUNS)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_lone_colon_is_no_argument_of_mpiexec(flavour: str) -> None:
    argv = build(flavour, program=("p.py", ":", "a:b", "")).argv
    assert argv[argv.index(CHILD) + 1 :] == ("--escaped", "=p.py", "=:", "=a:b", "=")


@pytest.mark.parametrize(("size", "shared"), [(1, False), (4, False), (5, True)])
def test_ranks_yield_only_when_they_share_cores(size: int, shared: bool) -> None:
    assert ("MPIR_CVAR_CH4_NETMOD" in build(MPICH, size=size).variables) is shared
    assert ("OMPI_MCA_mpi_yield_when_idle" in build(OPENMPI, size=size).variables) is shared
    places = (Place("h1", 1), Place("h2", size))
    assert ("OMPI_MCA_mpi_yield_when_idle" in build(OPENMPI, places=places, ssh=SSH).variables) is shared


@pytest.mark.parametrize(
    ("here", "cores", "shared"),
    [
        (1, (2, 3), False),
        (9, (3, 2), True),
        (9, (1, 3), True),
        (3, (2, None), False),
        (2, (2, None), True),
    ],
)
def test_each_host_has_cores_of_its_own(here: int, cores: tuple[int | None, int | None], shared: bool) -> None:
    places = (Place("h1", 2, cores[0]), Place("h2", 3, cores[1]))
    variables = build(OPENMPI, places=places, ssh=SSH, cores=here).variables
    assert ("OMPI_MCA_mpi_yield_when_idle" in variables) is shared
    assert ("MPIR_CVAR_CH4_NETMOD" in build(MPICH, places=places, ssh=SSH, cores=here).variables) is shared


@pytest.mark.parametrize("is_root", [False, True])
def test_root_is_allowed_only_to_root(is_root: bool) -> None:
    assert ("OMPI_ALLOW_RUN_AS_ROOT" in build(OPENMPI, is_root=is_root).variables) is is_root
    assert ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM" in build(OPENMPI, is_root=is_root).variables) is is_root


def test_no_rank_is_bound_and_any_number_taken_unless_asked() -> None:
    variables = build(OPENMPI).variables
    assert variables["PRTE_MCA_hwloc_default_binding_policy"] == "none"
    assert variables["OMPI_MCA_hwloc_base_binding_policy"] == "none"
    assert variables["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"
    assert variables["OMPI_MCA_rmaps_base_oversubscribe"] == "1"
    assert build(INTELMPI).variables == {"I_MPI_PIN": "off"}
    assert build(MPICH).variables == {}


@pytest.mark.parametrize("value", ["core", ""])
def test_the_users_own_setting_wins(value: str) -> None:
    own = {
        "PRTE_MCA_hwloc_default_binding_policy": value,
        "OMPI_MCA_mpi_yield_when_idle": value,
        "MPIR_CVAR_CH4_NETMOD": value,
        "I_MPI_PIN": value,
    }
    for flavour in FLAVOURS:
        assert not own.keys() & build(flavour, size=9, environ=own).variables.keys()


def test_an_option_wins_over_the_users_variable() -> None:
    command = build(INTELMPI, bind="none", environ={"I_MPI_PIN": "on"})
    assert command.variables["I_MPI_PIN"] == "off"
    command = build(MPICH, devices_per_rank=2, environ={"NCCLCOMM_DEVICES_PER_RANK": "1"})
    assert command.variables["NCCLCOMM_DEVICES_PER_RANK"] == "2"


def test_env_wins_over_everything() -> None:
    command = build(OPENMPI, size=9, settings={"OMPI_MCA_mpi_yield_when_idle": "0", "X": 'a "b'})
    assert command.variables["OMPI_MCA_mpi_yield_when_idle"] == "0"
    assert command.variables["X"] == 'a "b'


@pytest.mark.parametrize("bind", ["core", "socket", "numa"])
def test_bind(bind: str) -> None:
    assert option(build(MPICH, bind=bind), "-bind-to") == bind
    assert option(build(OPENMPI, bind=bind), "--bind-to") == f"{bind}:overload-allowed"
    assert build(INTELMPI, bind=bind).variables["I_MPI_PIN_DOMAIN"] == bind
    assert build(INTELMPI, bind=bind).variables["I_MPI_PIN"] == "on"


def test_bind_none_is_each_launchers_own() -> None:
    assert "-bind-to" not in build(MPICH, bind="none").argv
    assert option(build(OPENMPI, bind="none"), "--bind-to") == "none"


@pytest.mark.parametrize(
    ("flavour", "word"), [(MPICH, "-prepend-rank"), (OPENMPI, "--tag-output"), (INTELMPI, "-prepend-rank")]
)
def test_label(flavour: str, word: str) -> None:
    assert word in build(flavour, label=True).argv
    assert build(flavour, label=True).variables["NCCLCOMM_LABELLED"] == "1"
    assert word not in build(flavour).argv


def test_hosts_of_mpich() -> None:
    command = build(MPICH, places=TWO, ssh=SSH, environ={"PATH": "/bin"}, settings={"X": "1"})
    assert option(command, "-hosts") == "h1:2,h2:1"
    assert (option(command, "-launcher"), option(command, "-launcher-exec")) == ("ssh", "/bin/ssh")
    assert command.variables["HYDRA_LAUNCHER_EXTRA_ARGS"].startswith("-p 22 -o BatchMode=yes ")
    # MPICH would lose the last entry of its environment.
    last = ("env", "-u", "NCCLCOMM_LAST", "NCCLCOMM_LAST=1")
    assert command.argv[:7] == (*last, "/some where/mpiexec", "-genvlist", "FI_PROVIDER,PATH,X")
    # It leaves tcp, and what InfiniBand and others have, on every host.
    assert command.variables["FI_PROVIDER"] == "^sockets,udp"
    assert "FI_PROVIDER" not in build(MPICH, places=TWO[:1], ssh=SSH).variables
    assert command.argv[-len(RUNS) - 2 :] == ("-n", "3", *RUNS)


def test_hosts_of_openmpi() -> None:
    command = build(OPENMPI, places=TWO, ssh=SSH, environ={"PATH": "/bin", "OTHER": "x"})
    assert option(command, "--host") == "h1:2,h2:1"
    assert option(command, "--map-by") == "slot"
    assert command.argv[1:3] == ("-x", "PATH")
    assert "OTHER" not in command.argv
    for name in ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent"):
        assert command.variables[name].startswith("/bin/ssh -p 22 -o BatchMode=yes ")
    # With it all ranks would go to the first host.
    assert "PRTE_MCA_rmaps_default_mapping_policy" not in command.variables


def test_hosts_of_intelmpi_with_equal_numbers() -> None:
    command = build(INTELMPI, places=TWO, ssh=SSH)
    assert (option(command, "-hosts"), option(command, "-ppn"), option(command, "-n")) == ("h1,h2", "2", "3")
    assert command.variables["I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"].startswith("-p 22 -o BatchMode=yes ")
    assert "FI_PROVIDER" not in command.variables  # it takes tcp by itself


def test_hosts_of_intelmpi_with_uneven_numbers() -> None:
    argv = build(INTELMPI, places=UNEVEN, ssh=SSH).argv
    parts = [("-host", f"h{number}", "-n", str(ranks), *RUNS) for number, ranks in ((1, 1), (2, 3), (3, 1))]
    assert argv[argv.index("-host") :] == (*parts[0], ":", *parts[1], ":", *parts[2])


def test_inside_a_slurm_job_mpiexec_stays_on_this_host() -> None:
    environ = {"SLURM_JOB_ID": "7"}
    assert build(MPICH, environ=environ).variables["HYDRA_LAUNCHER"] == "fork"
    assert build(INTELMPI, environ=environ).variables["I_MPI_HYDRA_BOOTSTRAP"] == "fork"
    assert option(build(INTELMPI, environ=environ), "-hosts") == "localhost"
    assert build(OPENMPI, environ=environ).variables["PRTE_MCA_ras"] == "^slurm"


def test_inside_a_slurm_job_mpiexec_reaches_its_nodes_by_slurm() -> None:
    environ = {"SLURM_JOB_ID": "7"}
    for flavour in (MPICH, INTELMPI):
        command = build(flavour, places=TWO, environ=environ)
        assert option(command, "-launcher") == "slurm"
        assert "-launcher-exec" not in command.argv
        assert not {"HYDRA_LAUNCHER_EXTRA_ARGS", "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"} & command.variables.keys()
    command = build(OPENMPI, places=TWO, environ=environ)
    assert option(command, "--host") == "h1:2,h2:1"
    assert not {"PRTE_MCA_plm", "PRTE_MCA_ras", "PRTE_MCA_plm_ssh_agent"} & command.variables.keys()


def test_srun_over_uneven_places() -> None:
    step = Step("pmi2", 3)
    command = build_srun(plan(MPICH, starter="/bin/srun", places=TWO, step=step, label=True, bind="numa"))
    words = (
        *("/bin/srun", "--mpi=pmi2", "--kill-on-bad-exit=1", "--ntasks=3", "--distribution=arbitrary"),
        *("--nodelist=h1,h1,h2", "--export=ALL", "--input=0", "--cpus-per-task=3", "--cpu-bind=ldoms", "--label"),
        *RUNS,
    )
    assert command.argv == words
    environ = {"SLURM_NTASKS_PER_NODE": "2"}
    command = build_srun(
        plan(MPICH, starter="/bin/srun", places=TWO, step=step, label=True, bind="numa", environ=environ)
    )
    assert command.argv == ("env", "-u", "SLURM_NTASKS_PER_NODE", *words)


def test_srun_over_equal_places() -> None:
    places = (Place("h1", 2), Place("h2", 2))
    environ = {"SLURM_NTASKS_PER_NODE": "4"}
    command = build_srun(plan(OPENMPI, starter="/bin/srun", places=places, step=Step("pmix"), environ=environ))
    assert command.argv == (
        *("/bin/srun", "--mpi=pmix", "--kill-on-bad-exit=1", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2"),
        *("--export=ALL", "--input=0", *RUNS),
    )


def test_marks_reach_other_hosts_and_stay_out_of_the_command_line() -> None:
    marks = {"NCCLCOMM_JOB_ID": "1", "NCCLCOMM_JOB_LINK": "secret"}
    for flavour in FLAVOURS:
        command = build(flavour, places=TWO, ssh=SSH, settings={"X": ""}).marked(marks)
        assert command.variables.items() >= marks.items()
        assert "secret" not in command.argv
        words = [word for part in command.argv for word in part.split(",")]
        assert {"NCCLCOMM_JOB_ID", "NCCLCOMM_JOB_LINK", "X"} <= set(words)
        assert command.argv.count("-genvlist") <= 1
        assert command.argv[-len(RUNS) :] == RUNS
        here = build(flavour).marked(marks)
        assert here.argv == build(flavour).argv
        assert here.variables.items() >= marks.items()


@pytest.mark.parametrize(
    ("name", "sent"),
    [("PATH", True), ("PATHS", False), ("NCCL_DEBUG", True), ("PYTHONPATH", True), ("HOME", False), ("TMPDIR", False)],
)
def test_which_variables_reach_other_hosts_unasked(name: str, sent: bool) -> None:
    assert is_forwarded(name) is sent


def test_text_is_what_a_shell_runs() -> None:
    command = build(OPENMPI, size=9, is_root=True, settings={"X": "a 'b' $c\nd"})
    words = shlex.split(str(command))
    count = len(command.variables)
    assert tuple(words[count:]) == command.argv
    assert dict(word.split("=", 1) for word in words[:count]) == command.variables
