"""What each rank runs: the user's program as `__main__`, and beside it a small process that watches it.

The MPI launcher starts `python .../child.py [-m] PROGRAM ARGS...` once a rank. The process forks before it has imported
anything of note. The fork runs the program as plain Python would. The first process only waits: it tells
`ncclcomm run`, through a pipe in the job's directory, how the program ended, which no MPI launcher tells in full, and
ends the program when `ncclcomm run` is gone. After a failure it stays until it is let go, so that the MPI launcher
does not tear the other ranks down before they have had their SIGTERM and their grace.

The file is run by its path and imports the standard library alone: a module of the user's directory cannot take the
place of one that this file needs, and the program finds `sys.modules` as plain Python leaves it.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.machinery
import importlib.util
import io
import os
import select
import signal
import sys
import types
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["RANK_VARIABLES", "main"]

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
"""Where the MPI launchers put a rank's number, before MPI starts."""

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_WATCHED = (*_FORWARDED, signal.SIGCHLD)
_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str]) -> int:
    """Run the program of a rank; called once, at the bottom of this file.

    Args:
        argv: `[-m] PROGRAM ARGS...`.

    Returns:
        The exit status of a program that ended well. A program that failed ends the process instead.
    """
    rank = next((os.environ[name] for name in RANK_VARIABLES if os.environ.get(name)), "0")
    directory = os.environ.get("NCCLCOMM_JOB_DIR", "")
    if os.path.isdir(directory):
        _split(rank, directory)
    return _run_program(argv, rank, directory)


def _split(rank: str, directory: str) -> None:
    """Go on in a fork; the first process watches it and never returns."""
    watcher = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    program = os.fork()
    if program:
        _watch(program, rank, directory)
    os.setpgid(0, 0)  # a signal that the MPI launcher sends to the watcher's group comes once, forwarded
    _die_with_parent(watcher)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, whatever ends it."""
    with contextlib.suppress(ImportError, OSError, AttributeError):  # without it `ncclcomm run` still finds leftovers
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def _watch(program: int, rank: str, directory: str) -> NoReturn:
    """Wait for the program, passing signals on; tell how it ended; exit with its status."""
    wakeup, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    for number in _WATCHED:
        signal.signal(number, lambda *_: None)
    launcher = os.open(os.path.join(directory, "lifeline"), os.O_RDONLY | os.O_NONBLOCK)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
    _tell(directory, f"start {rank} {os.getpid()}")

    if not _launcher_lives():
        os.kill(program, signal.SIGKILL)
    poll = select.poll()
    poll.register(wakeup, select.POLLIN)
    poll.register(launcher, 0)  # POLLHUP: the launcher closed it, or is gone
    asked = False
    while True:
        ended, status = os.waitpid(program, os.WNOHANG)
        if ended:
            break
        for descriptor, _ in poll.poll():
            if descriptor == launcher:
                poll.unregister(launcher)
                os.kill(program, signal.SIGKILL)
                continue
            for arrived in os.read(wakeup, 512):
                if arrived != signal.SIGCHLD:
                    asked = True
                    os.kill(program, arrived)

    killed_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    code = 128 + killed_by if killed_by else os.WEXITSTATUS(status)
    _tell(directory, f"end {rank} {code} {killed_by} {int(asked)}")
    if (code or asked) and _launcher_lives():
        hangup = select.poll()
        hangup.register(launcher, 0)
        hangup.poll()
    if not _launcher_lives():
        _remove(directory)
    os._exit(code)


def _remove(directory: str) -> None:
    """Remove the job's directory, whose maker can no longer do it."""
    import shutil

    shutil.rmtree(directory, ignore_errors=True)  # other watchers do the same at the same time


def _launcher_lives() -> bool:
    """True while the process that made the job's directory is there."""
    try:
        os.kill(int(os.environ["NCCLCOMM_JOB_PID"]), 0)
    except (KeyError, ValueError, ProcessLookupError):
        return False
    return True


def _tell(directory: str, line: str) -> None:
    """Write one line to `ncclcomm run`; it is shorter than PIPE_BUF, so lines of ranks do not mix."""
    with contextlib.suppress(OSError):  # `ncclcomm run` is gone, and with it whoever would want to know
        events = os.open(os.path.join(directory, "events"), os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(events, f"{line}\n".encode())
        finally:
            os.close(events)


def _run_program(argv: Sequence[str], rank: str, directory: str) -> int:
    """Run the program as `__main__`; return if it ends well, else report and end the job."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a pipe to the MPI launcher would hold lines back
    try:
        if argv[0] == "-m":
            _run_module(argv[1], argv[1:])
        else:
            _run_script(argv[0], argv)
    except SystemExit as error:
        if error.code is None or error.code == 0:
            return 0
        _fail(error, error.code & 0xFF if isinstance(error.code, int) else 1, rank, directory)
    except KeyboardInterrupt as error:
        _fail(error, 128 + signal.SIGINT, rank, directory)
    except BaseException as error:  # whatever it is, the other ranks wait for this one
        _fail(error, 1, rank, directory)
    return 0


def _run_script(path: str, argv: Sequence[str]) -> None:
    """Run a file as `python PATH ...` does."""
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    full_path = os.path.abspath(path)
    main_module = _new_main(full_path, argv)
    main_module.__loader__ = importlib.machinery.SourceFileLoader("__main__", full_path)
    with io.open_code(full_path) as file:
        source = file.read()
    exec(compile(source, full_path, "exec", dont_inherit=True), main_module.__dict__)


def _run_module(name: str, argv: Sequence[str]) -> None:
    """Run a module, or a package's `__main__`, as `python -m NAME ...` does."""
    _set_first_path(os.getcwd())
    sys.argv[:] = ["-m", *argv[1:]]
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = importlib.util.find_spec(name)
    get_code = getattr(spec.loader, "get_code", None) if spec else None
    code = get_code(name) if get_code else None
    if spec is None or code is None:
        raise ModuleNotFoundError(f"No module named {name!r} that can be run with -m", name=name)
    main_module = _new_main(spec.origin or name, [spec.origin or name, *argv[1:]])
    main_module.__spec__, main_module.__loader__, main_module.__package__ = spec, spec.loader, spec.parent
    exec(code, main_module.__dict__)


def _set_first_path(directory: str) -> None:
    """Put the program's directory where Python put this file's."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = directory


def _new_main(path: str, argv: Sequence[str]) -> types.ModuleType:
    """Make and install the module that the program's names go into."""
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=builtins, __file__=path, __cached__=None, __doc__=None)
    sys.modules["__main__"] = module
    sys.argv[:] = argv
    return module


def _fail(error: BaseException, status: int, rank: str, directory: str) -> NoReturn:
    """Write what plain Python would write about the error, then end this rank, and with it the job.

    Atexit handlers do not run: MPI's would wait for ranks that wait for this one.
    """
    watched = os.path.isdir(directory)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    stderr = sys.stderr
    with contextlib.suppress(OSError):  # a full disk must not keep the rank from ending
        if watched:
            # Read by `ncclcomm run`: what goes to stderr last, an MPI launcher that ends the job may drop.
            report = os.open(os.path.join(directory, f"report-{rank}"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            sys.stderr = io.TextIOWrapper(io.FileIO(report, "w"), errors="backslashreplace", write_through=True)
        else:
            print(f"ncclcomm: rank {rank} exits with status {status}", file=stderr)
        _describe(error)
        sys.stderr.flush()
    with contextlib.suppress(OSError, ValueError, AttributeError):
        stderr.flush()
    if not watched:
        _abort(status)
    os._exit(status)


def _describe(error: BaseException) -> None:
    """Write the message of a SystemExit, or have the program's excepthook write the traceback, to stderr."""
    trace = error.__traceback__
    while trace and trace.tb_frame.f_globals is globals():
        trace = trace.tb_next
    if isinstance(error, SystemExit):
        if isinstance(error.code, int):
            while trace and trace.tb_next:
                trace = trace.tb_next
            where = f" at {trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno}" if trace else ""
            print(f"SystemExit: {error.code}{where}", file=sys.stderr)
        else:
            print(error.code, file=sys.stderr)
        return
    error = error.with_traceback(trace)
    try:
        sys.excepthook(type(error), error, trace)
    except BaseException:  # as plain Python: a hook that fails does not hide the error
        sys.__excepthook__(type(error), error, trace)


def _abort(status: int) -> None:
    """End the other ranks by MPI itself, where no `ncclcomm run` does it."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(status)  # MPICH's can return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
