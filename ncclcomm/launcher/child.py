"""What each rank runs: the user's program as `__main__`, and beside it a small process that watches it.

The MPI launcher starts `python .../child.py [-m] PROGRAM ARGS...` once a rank. The process forks before it has imported
anything of note. The fork runs the program as plain Python would. The first process only watches it (watch.py): it
tells `ncclcomm run` how the program ended, which no MPI launcher tells in full, and ends the program when told to, or
when `ncclcomm run` is gone.

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
from typing import Any, NoReturn, cast

__all__ = ["RANK_VARIABLES", "main"]

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
"""Where the launchers put a rank's number, before MPI starts; mpiexec's first, as it may run inside a task of srun."""

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_WATCHED = (*_FORWARDED, signal.SIGCHLD, signal.SIGRTMIN)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class _Report(io.RawIOBase):
    """The pipe for a program's last words. What is written has been passed on to `ncclcomm run` when write returns.

    It may be followed by an abort, which kills the watcher too. The first byte of a piece tells its kind; see watch.py.
    """

    def __init__(self, descriptor: int, answers: int) -> None:
        self._descriptor = descriptor
        self._answers = answers
        self._inode = os.fstat(descriptor).st_ino
        self._program = os.getpid()

    def is_mine(self) -> bool:
        """True in the program itself, not in a fork of it, as long as it has not closed the pipe."""
        with contextlib.suppress(OSError):
            return os.getpid() == self._program and os.fstat(self._descriptor).st_ino == self._inode
        return False

    def fileno(self) -> int:
        """The pipe."""
        return self._descriptor

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, data: Any) -> int:
        """Write all of it, and wait until the watcher has passed it on."""
        text = bytes(data)
        for start in range(0, len(text), select.PIPE_BUF - 1):
            self._pass_on(b"+" + text[start : start + select.PIPE_BUF - 1])
        return len(text)

    def fail(self, status: int) -> None:
        """Tell the status, and live on until the watcher kills this process.

        Its end would break connections to other ranks, which might fail for that and be heard of first.
        """
        self._pass_on(b"=%d" % status)
        os.read(self._answers, 1)

    def _pass_on(self, piece: bytes) -> None:
        """Hand a piece to the watcher; the pipe takes it as a whole."""
        os.write(self._descriptor, piece)
        os.read(self._answers, 1)


def main(argv: Sequence[str]) -> int:
    """Run the program of a rank; called once, at the bottom of this file.

    Args:
        argv: `[-m] PROGRAM ARGS...`; or `--escaped` and these words, each behind a `=`.

    Returns:
        The exit status of a program that ended well. A program that failed ends the process instead.
    """
    rank = next((os.environ[name] for name in RANK_VARIABLES if os.environ.get(name)), "0")
    link = os.environ.get("NCCLCOMM_JOB_LINK", "")
    if rank != "0":
        _take_no_input()
    report = _split(rank, link) if link else None
    try:
        _allot_devices()
    except ValueError as error:
        _fail(SystemExit(f"ncclcomm: rank {rank}: {error}"), 1, rank, report)
    return _run_program(argv, rank, report)


def _take_no_input() -> None:
    """Have standard input end at once: MPICH gives ranks other than 0 a pipe in which nothing ever comes."""
    null = os.open(os.devnull, os.O_RDONLY)
    if null:
        os.dup2(null, 0)
        os.close(null)
    else:  # it has taken the place of a standard input that was closed
        os.set_inheritable(null, True)


def _split(rank: str, link: str) -> _Report:
    """Go on in a fork, which gets the pipe for its last words; the first process watches it and never returns."""
    watcher = os.getpid()
    read, write = os.pipe()
    answers, answer = os.pipe()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    # What the program leaves behind becomes the watcher's, wherever its parents have gone, and so can be ended.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    program = os.fork()
    with contextlib.suppress(OSError):  # in both processes, as either may be the first
        # A signal that the MPI launcher sends to the watcher's group comes once, forwarded.
        os.setpgid(program, program)
    if program:
        os.close(write)
        _watch(program, rank, (read, answer), link)
    os.close(read)
    os.close(answer)
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != watcher:
        os._exit(128 + signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.environ["NCCLCOMM_JOB_PROGRAM"] = str(os.getpid())  # what inherits it is not watched
    return _Report(write, answers)


def _prctl(option: int, value: int) -> None:
    """Set an attribute of this process; without it `ncclcomm run` still finds leftovers of its own host."""
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _watch(program: int, rank: str, report: tuple[int, int], link: str) -> NoReturn:
    """Wait for the program; see watch.py."""
    wakeup, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    for number in _WATCHED:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
    directory = os.environ.get("NCCLCOMM_JOB_DIR", "")
    _beside("watch").watch(program, rank=rank, report=report, link=link, directory=directory, wakeup=wakeup)
    raise AssertionError("a watcher exits by itself")


def _beside(name: str) -> Any:
    """Load a file of this folder without a trace in sys.modules."""
    spec = importlib.util.spec_from_file_location(name, os.path.join(os.path.dirname(__file__), f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _allot_devices() -> None:
    """Leave the program the devices of its rank, where `ncclcomm run` was told how many each gets."""
    per_rank = os.environ.get("NCCLCOMM_DEVICES_PER_RANK", "")
    if per_rank:
        devices = _beside("devices")
        local_rank = devices.local_rank_of(os.environ)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = devices.devices_of(visible, local_rank or 0, int(per_rank))


def _run_program(argv: Sequence[str], rank: str, report: _Report | None) -> int:
    """Run the program as `__main__`; return if it ends well, else report and end the job."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # a pipe to the MPI launcher would hold lines back
            if os.environ.get("NCCLCOMM_LABELLED"):
                # Labels go before each piece that arrives, and PYTHONUNBUFFERED would make many of a line.
                stream.reconfigure(write_through=False)
    if argv[0] == "--escaped":
        argv = [word[1:] for word in argv[1:]]
    try:
        if argv[0] == "-m":
            _run_module(argv[1], argv[1:])
        else:
            _run_script(argv[0], argv)
    except SystemExit as error:
        if error.code is None or error.code == 0:
            return 0
        _fail(error, error.code & 0xFF if isinstance(error.code, int) else 1, rank, report)
    except KeyboardInterrupt as error:
        _fail(error, 128 + signal.SIGINT, rank, report)
    except BaseException as error:  # whatever it is, the other ranks wait for this one
        _fail(error, 1, rank, report)
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


def _fail(error: BaseException, status: int, rank: str, report: _Report | None) -> NoReturn:
    """Write what plain Python would write about the error, then end this rank, and with it the job.

    Atexit handlers do not run: MPI's would wait for ranks that wait for this one. The streams may be anything that the
    program has put there, or None, and what goes wrong with them must not keep the rank from ending.
    """
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    stderr = sys.stderr
    with contextlib.suppress(BaseException):
        if report is None:
            print(f"ncclcomm: rank {rank} exits with status {status}", file=stderr)
        elif report.is_mine():
            # Told to `ncclcomm run`: what goes to stderr last, an MPI launcher that ends the job may drop.
            sys.stderr = io.TextIOWrapper(cast(Any, report), errors="backslashreplace", write_through=True)
        _describe(error)
        sys.stderr.flush()
    with contextlib.suppress(BaseException):
        stderr.flush()
    with contextlib.suppress(BaseException):  # the watcher is gone, and who may have killed it ends this process too
        if report is None:
            _abort(status)
        elif report.is_mine():
            report.fail(status)
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
