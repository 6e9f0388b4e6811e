"""Which report and which exit status come of what is heard of a job's ranks."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable

import pytest

from ncclcomm.launcher.link import Event, Watcher
from ncclcomm.launcher.verdict import Verdict

Make = Callable[..., Watcher]


@pytest.fixture
def rank() -> Make:
    """Make a rank's watcher, on host h and the rank's number unless told otherwise."""

    def make(number: int, report: str = "", host: str = "") -> Watcher:
        watcher = Watcher(socket.socket())
        watcher.connection.close()
        watcher.rank, watcher.host, watcher.report = str(number), host or f"h{number}", report.encode()
        return watcher

    return make


def fail(verdict: Verdict, watcher: Watcher, status: int, killed_by: int = 0) -> None:
    """A rank fails of itself."""
    event = Event("end", watcher, status, killed_by)
    if watcher.report:
        verdict.note_report(watcher)
    verdict.note_end(event)
    verdict.note_failure(event)


def test_first_failure_is_shown_once(rank: Make, capsys: pytest.CaptureFixture[str]) -> None:
    verdict = Verdict(3, names_hosts=False)
    fail(verdict, rank(2, "Traceback\nLookupError"), 7)
    verdict.show_failure()
    fail(verdict, rank(0), 137, 9)
    verdict.show_failure()
    assert verdict.status("mpiexec", 143) == 7
    assert capsys.readouterr().err == "ncclcomm run: rank 2 exited with status 7\nTraceback\nLookupError\n"


def test_a_killed_rank_explains_those_that_gave_up_before_it_was_heard_of(
    rank: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = Verdict(4, names_hosts=True)
    fail(verdict, rank(0), 14)
    fail(verdict, rank(1, "connection broke"), 1)
    fail(verdict, rank(2), 134, 6)
    fail(verdict, rank(3), 139, 11)
    assert verdict.status("mpiexec", 1) == 139
    assert capsys.readouterr().err == "ncclcomm run: rank 3 on host h3 was killed by SIGSEGV\n"


def test_the_first_report_explains_what_is_heard_before_its_ranks_end(
    rank: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = Verdict(3, names_hosts=True)
    first = rank(2, "root cause")
    verdict.note_report(first)
    fail(verdict, rank(0), 14)
    fail(verdict, rank(1, "peer has gone"), 1)
    fail(verdict, first, 3)
    assert verdict.status("mpiexec", 14) == 3
    assert capsys.readouterr().err == "ncclcomm run: rank 2 on host h2 exited with status 3\nroot cause\n"


def test_a_rank_without_a_report_may_have_said_why_itself(rank: Make, capsys: pytest.CaptureFixture[str]) -> None:
    verdict = Verdict(1, names_hosts=False)
    fail(verdict, rank(0), 5)
    assert verdict.status("mpiexec", 1) == 5
    assert capsys.readouterr().err == "ncclcomm run: rank 0 exited with status 5: what is printed above may say why\n"


def test_a_signal_without_a_name_is_told_by_its_number(rank: Make, capsys: pytest.CaptureFixture[str]) -> None:
    verdict = Verdict(1, names_hosts=False)
    fail(verdict, rank(0), 168, 40)
    assert verdict.status("mpiexec", 1) == 168
    assert capsys.readouterr().err == "ncclcomm run: rank 0 was killed by signal 40\n"


def test_without_a_stderr_nothing_is_written(
    rank: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    verdict = Verdict(1, names_hosts=False)
    fail(verdict, rank(0, "Traceback"), 7)
    assert verdict.status("mpiexec", 1) == 7
    assert capsys.readouterr().out == ""


def test_a_report_without_an_end_is_shown(rank: Make, capsys: pytest.CaptureFixture[str]) -> None:
    verdict = Verdict(2, names_hosts=False)
    verdict.note_report(rank(1, "hook saw KeyError"))
    verdict.note_report(rank(0, "other"))
    assert verdict.status("mpiexec", 0) == 1
    said = capsys.readouterr().err
    assert said == "ncclcomm run: rank 1 failed, and MPI ended the job\nhook saw KeyError\n"


@pytest.mark.parametrize(
    ("silent", "returncode", "status", "said"),
    [
        (True, 0, 1, "ranks 1, 10 on host h were lost: the host does not answer"),
        (True, 255, 1, "ranks 1, 10 on host h were lost: the host does not answer"),
        (True, -9, 1, "ranks 1, 10 on host h were lost: the host does not answer"),
        (False, 255, 255, "mpiexec ended with status 255, and ranks 1, 10 on host h were killed, or the host was"),
        (False, 0, 1, "mpiexec ended with status 0, and ranks 1, 10 on host h were killed, or the host was"),
        (False, 9, 9, "mpiexec ended with status 9, and ranks 1, 10 on host h were killed, or the host was"),
        (False, -9, 1, "mpiexec ended with status 1, and ranks 1, 10 on host h were killed, or the host was"),
        (
            False,
            1,
            1,
            "mpiexec ended with status 1, and ranks 1, 10 on host h with it, as after MPI_Abort: "
            "what is printed above says why, or the host was lost",
        ),
    ],
)
def test_lost_ranks(
    rank: Make, capsys: pytest.CaptureFixture[str], silent: bool, returncode: int, status: int, said: str
) -> None:
    verdict = Verdict(3, names_hosts=True)
    for watcher in (rank(10, host="h"), rank(1, host="h"), rank(2)):
        verdict.note_lost(Event("lost", watcher, is_silent=silent))
    assert verdict.is_complete
    assert verdict.status("mpiexec", returncode) == status
    assert capsys.readouterr().err == f"ncclcomm run: {said}\n"


def test_a_silent_host_is_told_beside_a_failure(rank: Make, capsys: pytest.CaptureFixture[str]) -> None:
    verdict = Verdict(3, names_hosts=True)
    fail(verdict, rank(0), 1)
    verdict.note_lost(Event("lost", rank(1)))
    verdict.note_lost(Event("lost", rank(2), is_silent=True))
    assert verdict.status("mpiexec", 1) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[1:] == ["ncclcomm run: rank 2 on host h2 was lost: the host does not answer"]
    assert verdict.silent_hosts == {"h2"}


@pytest.mark.parametrize(
    ("asked", "returncode", "status", "said"),
    [
        (False, 0, 1, "ncclcomm run: srun ended with status 0, but ranks 1, 2 were not seen to end\n"),
        (False, 5, 5, "ncclcomm run: srun ended with status 5\n"),
        (False, -15, 143, "ncclcomm run: srun ended with status 143\n"),
        (True, 0, 143, ""),
    ],
)
def test_ranks_that_say_nothing(
    rank: Make, capsys: pytest.CaptureFixture[str], asked: bool, returncode: int, status: int, said: str
) -> None:
    verdict = Verdict(3, names_hosts=False)
    verdict.note_end(Event("end", rank(0)))
    verdict.was_asked = asked
    assert verdict.status("srun", returncode) == status
    assert capsys.readouterr().err == said


def test_every_rank_ended_well(rank: Make, capsys: pytest.CaptureFixture[str]) -> None:
    verdict = Verdict(2, names_hosts=False)
    for number in range(2):
        assert not verdict.is_complete
        verdict.note_end(Event("end", rank(number)))
    assert verdict.is_complete
    assert verdict.status("mpiexec", 0) == 0
    assert capsys.readouterr().err == ""
