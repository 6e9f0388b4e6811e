"""A small process beside each rank that ends it where it hangs, or tells where it died.

MPI and NCCL hold the interpreter while they wait, so that no thread of the rank could speak. This file is also that
process's program: Python runs it by its path, with the standard library alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from types import TracebackType

__all__ = ["Guard", "watch"]

_PARENT_GONE = 1


class Guard:
    """The rank's side: say what comes next, and how long it may take.

    A stage that takes longer ends the rank, with a line on standard error; there is such a line, too, if the rank's
    process ends within a stage. Used in a `with` block, whose end lets the guard go.

    Args:
        who: how the line names this rank.
    """

    def __init__(self, who: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), who],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches the rank alone, which then lets the guard go
        )

    def stage(self, doing: str, limit_s: float, mend: str, *, may_end: bool = False, last_words: str = "") -> None:
        """Say what this rank does next.

        Args:
            doing: in words that follow `in`, such as 'MPI_Init'.
            limit_s: seconds that it may take.
            mend: what to type where it fails.
            may_end: whether the process's end within it is nothing to speak of.
            last_words: what to write to standard output where it fails: the report as far as it came.
        """
        stage = {"doing": doing, "limit_s": limit_s, "mend": mend, "may_end": may_end, "last_words": last_words}
        self._tell(stage)

    def _tell(self, message: dict[str, object]) -> None:
        """Send a line; a guard that is gone leaves the rank on its own."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def __enter__(self) -> Guard:
        """Use it in a `with` block."""
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Let the guard go."""
        self._tell({})
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


def watch(parent: int, who: str, channel: int) -> int:
    """The guard's side: read stages until the rank lets go, is late, or is gone; then return the exit status.

    Args:
        parent: the rank's process id.
        who: how the line names it.
        channel: file descriptor that the rank writes to.
    """
    buffer = b""
    stage: dict[str, object] = {}
    while True:
        limit_s = float(str(stage["limit_s"])) if stage else None
        ready, _, _ = select.select([channel], [], [], limit_s)
        if not ready:
            _say(stage, f"{who} has been in {stage['doing']} for {limit_s:g} s, and was ended")
            with contextlib.suppress(ProcessLookupError):
                os.kill(parent, signal.SIGKILL)
            return _PARENT_GONE
        data = os.read(channel, 1 << 16)
        if not data:
            if stage and not stage["may_end"]:
                _say(stage, f"{who} ended in {stage['doing']}")
            return _PARENT_GONE
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            stage = json.loads(line)
            if not stage:
                return 0


def _say(stage: dict[str, object], found: str) -> None:
    """Write the report as far as it came, and a fail line as it has them."""
    with contextlib.suppress(OSError):
        if stage["last_words"]:
            print(stage["last_words"], flush=True)
        print(f"fail  ncclcomm doctor: {found}\n      -> {stage['mend']}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.exit(watch(int(sys.argv[1]), sys.argv[2], 0))
