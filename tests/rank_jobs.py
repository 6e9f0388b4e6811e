"""Starting pytest inside the ranks, and telling what happened there."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flavours import DEADLINE_S, Flavour

__all__ = ["RankJob", "run_rank_tests"]

TESTS = Path(__file__).parent


@dataclass(frozen=True)
class RankJob:
    """How a job of rank tests ended."""

    status: int
    """mpiexec's exit status."""
    report: str
    """Rank 0's report, stderr, and what each rank wrote if the job did not come to its end."""


def run_rank_tests(
    flavour: Flavour,
    n: int,
    args: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    timeout_s: float = DEADLINE_S,
) -> RankJob:
    """Run `mpiexec -n N python -m pytest ARGS --with-mpi` in the project's root.

    Args:
        flavour: the MPI to run with.
        n: number of ranks.
        args: arguments of pytest.
        env: variables for the ranks.
        timeout_s: seconds for the whole job; each test has a deadline of its own, see rank_plugin.
    """
    with tempfile.TemporaryDirectory(prefix="ncclcomm-ranks-") as folder:
        ended = flavour.run(
            n,
            ["-m", "pytest", *args, "--with-mpi", "--color=no", "-p", "no:cacheprovider"],
            env={"NCCLCOMM_TEST_RANK_DIR": folder, "NCCLCOMM_TEST_RANKS": str(n), **(env or {})},
            timeout_s=timeout_s,
            cwd=TESTS.parent,
        )
        report = f"{ended.stdout}\n{ended.stderr}"
        if ended.returncode:
            for log in sorted(Path(folder).glob("*.txt")):
                report += f"\n--- {log.stem} wrote\n{log.read_text(errors='replace')}"
    return RankJob(ended.returncode, f"mpiexec of {flavour.name} with {n} ranks exited {ended.returncode}\n{report}")
