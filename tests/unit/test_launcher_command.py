"""Command lines and variables, from plain values."""

from __future__ import annotations

import shlex

import pytest

from ncclcomm.launcher.command import CHILD, MPICH, OPENMPI, Command, build_command


def build(flavour: str, size: int, cores: int = 4, is_root: bool = False, **environ: str) -> Command:
    return build_command(
        flavour=flavour,
        mpiexec="/some where/mpiexec",
        python="/py",
        program=["a b.py", "--help", ""],
        size=size,
        cores=cores,
        is_root=is_root,
        environ=environ,
    )


@pytest.mark.parametrize("flavour", [MPICH, OPENMPI])
def test_program_and_arguments_come_last_and_unchanged(flavour: str) -> None:
    assert build(flavour, 3).argv == ("/some where/mpiexec", "-n", "3", "/py", CHILD, "a b.py", "--help", "")


@pytest.mark.parametrize(("size", "shared"), [(1, False), (4, False), (5, True)])
def test_ranks_yield_only_when_they_share_cores(size: int, shared: bool) -> None:
    assert ("MPIR_CVAR_CH4_NETMOD" in build(MPICH, size).variables) is shared
    assert ("OMPI_MCA_mpi_yield_when_idle" in build(OPENMPI, size).variables) is shared


@pytest.mark.parametrize("is_root", [False, True])
def test_root_is_allowed_only_to_root(is_root: bool) -> None:
    assert ("OMPI_ALLOW_RUN_AS_ROOT" in build(OPENMPI, 2, is_root=is_root).variables) is is_root
    assert ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM" in build(OPENMPI, 2, is_root=is_root).variables) is is_root


def test_openmpi_binds_no_rank_and_takes_any_number() -> None:
    variables = build(OPENMPI, 2).variables
    assert variables["PRTE_MCA_hwloc_default_binding_policy"] == "none"
    assert variables["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"


@pytest.mark.parametrize("value", ["core", ""])
def test_the_users_own_setting_wins(value: str) -> None:
    command = build(OPENMPI, 9, PRTE_MCA_hwloc_default_binding_policy=value, OMPI_MCA_mpi_yield_when_idle=value)
    assert "PRTE_MCA_hwloc_default_binding_policy" not in command.variables
    assert "OMPI_MCA_mpi_yield_when_idle" not in command.variables
    assert build(MPICH, 9, MPIR_CVAR_CH4_NETMOD=value).variables == {}


def test_text_is_what_a_shell_runs() -> None:
    command = build(OPENMPI, 9, is_root=True)
    words = shlex.split(str(command))
    count = len(command.variables)
    assert tuple(words[count:]) == command.argv
    assert dict(word.split("=", 1) for word in words[:count]) == command.variables
