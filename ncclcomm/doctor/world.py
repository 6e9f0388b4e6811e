"""The MPI that this rank has: looked at before MPI_Init, started, and used with a time limit on every exchange."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
import warnings
from typing import Any, NoReturn

from ncclcomm import config
from ncclcomm.doctor.facts import RankFacts
from ncclcomm.launcher.flavour import family

__all__ = ["World", "end_job", "end_job_without_mpi", "load_library", "speak_before_the_end"]

_FACTS_TAG, _WORD_TAG = 101, 102

_MOST_PAUSE_S = 1e-3


def load_library(facts: RankFacts) -> Any:
    """Load the MPI library and write down which it is; MPI_Init comes later.

    Args:
        facts: mpi_library, mpi_flavour and mpi_path are set, or mpi_error.

    Returns:
        The module mpi4py.MPI, or None where there is no MPI.
    """
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a launcher that doesn't fit; the report says it better
            from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        facts.mpi_error = " ".join(str(error).split())
        return None
    text = MPI.Get_library_version().replace("\x00", "")
    facts.mpi_library = " ".join(text.splitlines()[0].partition(",")[0].replace("Version:", "").split())
    facts.mpi_flavour = family(text)
    facts.mpi_path = _loaded_library()
    return MPI


def _loaded_library() -> str:
    """The file of the MPI library that is loaded; '' where the system doesn't tell."""
    if sys.platform != "linux":
        return ""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        return next((word for line in file for word in line.split()[5:6] if "/libmpi" in word), "")


def _start(mpi: Any) -> None:
    """MPI_Init as the import of mpi4py.MPI makes it in a program, whose options and variables say what threads may."""
    import mpi4py

    if mpi4py.rc.threads in (False, "no"):
        mpi.Init()
    else:
        mpi.Init_thread(getattr(mpi, f"THREAD_{mpi4py.rc.thread_level}".upper(), mpi.THREAD_MULTIPLE))


class World:
    """All ranks, as MPI sees them.

    Collective: every process that the launcher started makes one.

    Args:
        mpi: the module mpi4py.MPI.
        facts: rank, size, threads and cuda_aware are set.
    """

    def __init__(self, mpi: Any, facts: RankFacts) -> None:
        self.mpi = mpi
        if not mpi.Is_initialized():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                _start(mpi)
        self.comm = mpi.COMM_WORLD
        self.rank = facts.rank = self.comm.Get_rank()
        self.size = facts.size = self.comm.Get_size()
        levels = ("single", "funneled", "serialized", "multiple")
        numbers = [getattr(mpi, f"THREAD_{level.upper()}") for level in levels]
        facts.threads = levels[numbers.index(mpi.Query_thread())]
        facts.cuda_aware = self._cuda_aware()
        self._sent: list[Any] = []

    def _cuda_aware(self) -> bool | None:
        """What MPIX_Query_cuda_support says; None where the library has no such function."""
        try:
            return bool(ctypes.CDLL(self.mpi.__file__).MPIX_Query_cuda_support())
        except (OSError, AttributeError):
            return None

    def collect(self, text: str, limit_s: float) -> list[str | None]:
        """Every rank's text on rank 0, None from a rank that sent none within the limit; nothing on the others."""
        if self.rank:
            self._sent.append(self.comm.isend(text, 0, _FACTS_TAG))
            return []
        texts: list[str | None] = [text, *[None] * (self.size - 1)]
        deadline = time.monotonic() + limit_s
        while None in texts:
            message = self._next_message(self.mpi.ANY_SOURCE, _FACTS_TAG, deadline)
            if message is None:
                break
            source, texts_of = message
            texts[source] = texts_of
        return texts

    def tell_all(self, text: str) -> None:
        """Send rank 0's word to the others."""
        for rank in range(1, self.size):
            self._sent.append(self.comm.isend(text, rank, _WORD_TAG))

    def hear(self, limit_s: float) -> str | None:
        """Rank 0's word, or None if it sends none within the limit."""
        message = self._next_message(0, _WORD_TAG, time.monotonic() + limit_s)
        return None if message is None else message[1]

    def _next_message(self, source: int, tag: int, deadline: float) -> tuple[int, str] | None:
        """A text and who sent it, or None at the deadline."""
        status = self.mpi.Status()
        pause_s = 0.0
        while True:
            message = self.comm.improbe(source, tag, status)
            if message is not None:
                return status.Get_source(), message.recv()
            if time.monotonic() > deadline:
                return None
            time.sleep(pause_s)
            pause_s = min(pause_s + 1e-5, _MOST_PAUSE_S)

    def first_ranks_on_hosts(self) -> list[int]:
        """For each rank the lowest one that shares memory with it; collective, and without a limit of its own."""
        from ncclcomm.transport.mpi import first_rank_of_host

        return list(self.comm.allgather(first_rank_of_host(self.comm)))

    def barrier(self) -> None:
        """Wait for every rank, without a limit of its own."""
        self.comm.Barrier()

    def finish(self) -> None:
        """End MPI, where every rank does so."""
        self.mpi.Request.waitall(self._sent)
        if not self.mpi.Is_finalized():
            self.mpi.Finalize()


def end_job() -> NoReturn:
    """End all ranks, without those that don't answer."""
    from ncclcomm.transport import mpi

    _flush()
    mpi.end_job(1)
    os._exit(1)


def end_job_without_mpi() -> None:
    """Have other ranks not wait in MPI_Init for this one, which can't join them and is about to exit.

    Hydra, which starts ranks of MPICH and Intel MPI, waits for them whatever a rank's exit status is, unless told in
    the words of PMI-1; other launchers end the job by themselves.
    """
    _flush()
    channel = config.variables("PMI_FD").get("PMI_FD", "")
    if channel.isdecimal():
        with contextlib.suppress(OSError):
            os.write(int(channel), b"cmd=abort exitcode=1\n")


def speak_before_the_end(rank: int, last_words: str, patience_s: float) -> None:
    """Have rank 0 write its report where a watchdog ends the job: afterwards launchers drop what is written.

    Args:
        rank: this rank. Other ranks leave it to rank 0 to end the job, for as long as they have patience.
        last_words: the report as far as it came.
        patience_s: longer than rank 0 waits for an answer.
    """
    from ncclcomm.communicator.watchdog import watchdog
    from ncclcomm.transport import mpi

    def end(status: int) -> None:
        if rank:
            time.sleep(patience_s)
        else:
            print(last_words)
            _flush()
        mpi.end_job(status)

    watchdog(end)


def _flush() -> None:
    """Have the launcher read all that was written."""
    from ncclcomm.communicator.exits import wait_until_read

    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        wait_until_read(stream)
