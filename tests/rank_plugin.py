"""A pytest plugin for tests that run inside the ranks: many pytests that behave as one.

Only rank 0 prints. After each test the ranks meet and rank 0 reports the failures of all, so its summary and every
rank's exit status speak for the whole job. A test that a rank does not finish in time ends the job: every rank dumps
its stacks and dies, without needing the interpreter, which may be stuck inside MPI.

Variables: NCCLCOMM_TEST_RANK_DIR names a folder in which each rank writes `rank-N.txt`, the tests it was in, its
failures and its stacks: what is left of a job that died. Without it stacks go to stderr. NCCLCOMM_TEST_RANKS says how
many ranks there must be, NCCLCOMM_TEST_DEADLINE_S how long one test may take.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mpi4py import MPI

DEADLINE_S = 60.0
GRACE_S = 1.0
"""From the stacks to the death: ranks that reach their deadline a little later still write theirs."""


class _Deadline:
    """Dumps this rank's stacks when time is up, and then kills it; both happen outside the interpreter."""

    def __init__(self, log_fd: int) -> None:
        self._log_fd = log_fd
        self.limit_s = float(os.environ.get("NCCLCOMM_TEST_DEADLINE_S") or DEADLINE_S)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def start(self, item: pytest.Item | None = None) -> None:
        """Begin to count anew; an item's timeout mark sets its own limit."""
        limit_s = self.limit_s
        if item and (mark := item.get_closest_marker("timeout")):
            limit_s = float(mark.args[0] if mark.args else mark.kwargs["timeout"])
        faulthandler.dump_traceback_later(limit_s, file=self._log_fd, exit=False)
        signal.setitimer(signal.ITIMER_REAL, limit_s + GRACE_S)


class RankPlugin:
    """Makes the ranks' pytests one: see the module."""

    def __init__(self, config: pytest.Config, comm: MPI.Comm, log_fd: int, deadline: _Deadline) -> None:
        self._config = config
        self._comm = comm
        self._log_fd = log_fd
        self._deadline = deadline
        self._failed: list[pytest.TestReport | pytest.CollectReport] = []
        self._log(f"rank {comm.rank} of {comm.size}, process {os.getpid()}")

    def _log(self, text: str) -> None:
        """Add lines to this rank's file at once: the next thing may be the end of the process."""
        if os.environ.get("NCCLCOMM_TEST_RANK_DIR"):
            os.write(self._log_fd, f"{text}\n".encode())

    def _keep(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Note a failure of this rank's own; rank 0 also sees those of others, which bear a rank."""
        if report.failed and not hasattr(report, "rank"):
            self._failed.append(report)
            self._log(f"FAILED on rank {self._comm.rank}: {report.nodeid}\n{report.longreprtext}")

    def _share_failures(self) -> None:
        """Meet the other ranks; rank 0 reports what failed on them."""
        hook = self._config.hook
        mine = [hook.pytest_report_to_serializable(config=self._config, report=report) for report in self._failed]
        self._failed.clear()
        for rank, failures in enumerate(self._comm.allgather(mine)):
            for data in failures if self._comm.rank == 0 < rank else ():
                report = hook.pytest_report_from_serializable(config=self._config, data=data)
                report.rank = rank
                report.nodeid += f" (on rank {rank})"
                if isinstance(report, pytest.CollectReport):
                    hook.pytest_collectreport(report=report)
                else:
                    path, line, name = report.location
                    report.location = (path, line, f"{name} (on rank {rank})")
                    hook.pytest_runtest_logreport(report=report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a module that this rank could not collect."""
        self._keep(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a failed phase of a test."""
        self._keep(report)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """End the run unless the ranks will run the same tests: one that runs another test would hang the rest."""
        self._share_failures()
        if self._comm.allreduce(session.testsfailed):
            pytest.exit("collection failed on some rank", returncode=int(pytest.ExitCode.TESTS_FAILED))
        collected = self._comm.allgather([item.nodeid for item in session.items])
        for rank, nodeids in enumerate(collected):
            if nodeids != collected[0]:
                odd = sorted(set(nodeids) ^ set(collected[0])) or ["the same ones in another order"]
                pytest.exit(
                    f"ranks collected different tests: rank 0 {len(collected[0])}, rank {rank} {len(nodeids)}; "
                    f"they differ in {', '.join(odd[:5])}",
                    returncode=int(pytest.ExitCode.TESTS_FAILED),
                )

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Run one test under the deadline, then meet the other ranks, which stop together if one does."""
        self._log(f"runs {item.nodeid}")
        self._deadline.start(item)
        result = yield
        self._share_failures()
        session = item.session
        if self._comm.allreduce(bool(session.shouldfail or session.shouldstop)) and not session.shouldfail:
            session.shouldstop = session.shouldstop or "another rank stopped"
        self._log(f"done {item.nodeid}")
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Give every rank the worst exit status of all."""
        self._deadline.start()
        session.exitstatus = max(self._comm.allgather(int(exitstatus)))

    def pytest_unconfigure(self) -> None:
        """Keep all ranks until rank 0 has printed: launchers kill a job of which one rank exits with a failure."""
        self._comm.Barrier()


def _open_log() -> int:
    """A descriptor for this rank's stacks, in a file that gets its rank's name once there is one."""
    folder = os.environ.get("NCCLCOMM_TEST_RANK_DIR")
    if not folder:
        return os.dup(2)
    return os.open(Path(folder) / f"process-{os.getpid()}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def _silence(config: pytest.Config) -> None:
    """Send this rank's report nowhere."""
    sink = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - lives as long as the run
    config.add_cleanup(sink.close)
    config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(pytest.TerminalReporter(config, sink), "terminalreporter")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Start MPI, under the deadline too, and take over from the plugins that would do the same per process."""
    # Both use the one faulthandler timer or SIGALRM that the deadline needs.
    config.pluginmanager.unregister(name="faulthandler")
    config.pluginmanager.unregister(name="timeout")
    log_fd = _open_log()
    faulthandler.enable(file=log_fd)
    deadline = _Deadline(log_fd)
    deadline.start()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    if folder := os.environ.get("NCCLCOMM_TEST_RANK_DIR"):
        mine = Path(folder) / f"process-{os.getpid()}.txt"
        mine.rename(mine.with_name(f"rank-{comm.rank}.txt"))
    wanted = int(os.environ.get("NCCLCOMM_TEST_RANKS") or comm.size)
    if comm.size != wanted:
        raise pytest.UsageError(f"{wanted} ranks were asked for and MPI started {comm.size}: is mpiexec of this MPI?")
    if comm.rank != 0:
        _silence(config)
    config.pluginmanager.register(RankPlugin(config, comm, log_fd, deadline), "ranks")
