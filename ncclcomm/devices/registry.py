"""Which backend this process uses: chosen once, at first use, from what `config` reads and what the machine has."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn, cast

from ncclcomm import config
from ncclcomm.devices.base import DeviceBackend
from ncclcomm.errors import BackendUnavailableError, DeviceError

__all__ = ["current_backend", "use_backend", "why_backend"]

_backend: DeviceBackend | None = None
_why = ""
_lock = threading.RLock()


def current_backend() -> DeviceBackend:
    """The backend in use, one for the whole process.

    The first call chooses it. NCCLCOMM_DEVICES=host (or host:N) and cuda say which; auto, the default, takes the GPUs
    where CuPy and a GPU are found, and virtual host devices elsewhere.

    Raises:
        BackendUnavailableError: GPUs were demanded, or SLURM allotted some, and they can't be used.
        ArgumentError: a variable of the configuration makes no sense.
    """
    backend = _backend
    return backend if backend is not None else _choose_once()


def why_backend() -> str:
    """Why the backend in use was chosen, in words; '' where `use_backend` named it."""
    return _why


@contextmanager
def use_backend(backend: DeviceBackend) -> Iterator[DeviceBackend]:
    """Use a backend inside the `with` block, in every thread; for tests and for programs that embed ncclcomm.

    Streams and events made inside belong to it and are of no use to another backend.

    Args:
        backend: the backend to use until the block is left.

    Yields:
        The backend.
    """
    global _backend
    with _lock:
        before, _backend = _backend, backend
    try:
        yield backend
    finally:
        with _lock:
            _backend = before


def _choose_once() -> DeviceBackend:
    """Choose and keep the backend, once even among threads."""
    global _backend
    with _lock:
        if _backend is None:
            _backend = _choose(config.load(), config.slurm_gpus())
        return _backend


def _choose(settings: config.Config, slurm_gpus: str) -> DeviceBackend:
    """The backend that the settings ask for; `slurm_gpus` is the variable that says SLURM allotted GPUs, or ''."""
    global _why
    _why = f"NCCLCOMM_DEVICES={settings.backend}"
    if settings.backend == "host":
        return _host(settings)
    from ncclcomm.devices import cuda

    try:
        cuda.count_devices()
    except BackendUnavailableError as error:
        if settings.backend == "cuda":
            raise BackendUnavailableError(f"NCCLCOMM_DEVICES=cuda demands GPUs, and none is usable: {error}") from error
        if slurm_gpus:
            raise BackendUnavailableError(
                f"SLURM allotted GPUs ({slurm_gpus}), and none is usable: {error}. "
                "To run on virtual host devices all the same, set NCCLCOMM_DEVICES=host"
            ) from error
        _why = f"no GPU is usable: {error}"
        return _host(settings)
    if settings.backend == "auto":
        _why = "GPUs are usable"
    return cuda.CudaBackend()


def _host(settings: config.Config) -> DeviceBackend:
    """The host backend as the settings want it."""
    from ncclcomm.devices.host import HostBackend

    return HostBackend(settings.host_devices, immediate=settings.host_streams == "sync")


class _Forked:
    """What a forked child finds in place of the parent's CUDA backend."""

    name = "cuda"

    def __getattr__(self, call: str) -> NoReturn:
        """Refuse every call: CUDA can't be used again after a fork, and says so in ways that help nobody."""
        raise DeviceError(
            f"{call}: this process was forked from one that had started CUDA, which can't be used on both sides of a "
            "fork. Start workers with multiprocessing.get_context('spawn'), or fork before the first call of ncclcomm"
        )


def _after_fork() -> None:
    """In a forked child: a thread of the parent may hold the lock for good, and CUDA is lost."""
    global _backend, _lock
    _lock = threading.RLock()
    if _backend is not None and _backend.name == "cuda":
        _backend = cast("DeviceBackend", _Forked())


os.register_at_fork(after_in_child=_after_fork)
