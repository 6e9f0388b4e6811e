"""Joining a group of ranks: who is where, do the settings agree, and which transports serve it."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ncclcomm import config
from ncclcomm.arrays import HOST_MEMORY, empty_on
from ncclcomm.chunks import whole_number
from ncclcomm.communicator.agree import Facts, agree
from ncclcomm.communicator.board import Running
from ncclcomm.communicator.checks import Control, SoloControl, raise_mismatch, seconds_above_0, together
from ncclcomm.communicator.engine import Engine
from ncclcomm.communicator.exits import end_job, guard_exit
from ncclcomm.communicator.gpu import GpuGroup, agree_on_gpus
from ncclcomm.communicator.log import say_what_was_chosen
from ncclcomm.communicator.watchdog import say_goodbye, watchdog
from ncclcomm.communicator.watchdog_address import Address
from ncclcomm.communicator.watchdog_answers import Group, report, report_head
from ncclcomm.devices.base import DeviceBackend
from ncclcomm.devices.index import resolve_device
from ncclcomm.devices.registry import current_backend
from ncclcomm.errors import ArgumentError, DeviceError
from ncclcomm.topology import Topology, nodes_of_hosts
from ncclcomm.transport.peer import PeerTransport

if TYPE_CHECKING:
    from ncclcomm.communicator.communicator import Communicator

__all__ = ["Member", "drop", "join"]


@dataclass
class Member:
    """What one rank holds of a group."""

    topology: Topology
    rank: int
    device: int
    backend: DeviceBackend
    check: bool | int
    chunk_bytes: int
    mpi_comm: Any
    control: Control
    node_names: tuple[int, ...]
    """Each rank's node, by numbers that sub-communicators keep."""
    name: str = ""
    """The same on all ranks of the group, and no other group's."""
    timeout_s: float | None = None
    """Time limit of a call; None: none."""
    addresses: tuple[Address, ...] = ()
    """Where the ranks' watchdogs listen; () where they are off."""
    gpu: GpuGroup | None = None
    """What was agreed on the ranks' GPUs; None on the host backend."""
    devices: tuple[int, ...] = ()
    """Each rank's device, as that rank numbers it."""
    nodes_by: str = "shared memory"
    """What tells the nodes apart."""
    log: bool = False
    """Say what was chosen."""
    _host_engine: Engine | None = field(default=None, repr=False)
    _device_engine: Engine | None = field(default=None, repr=False)

    def flat(self, count: int, dtype: Any, device: int) -> Any:
        """A new flat array in plain form, on a device or in host memory."""
        return empty_on(self.backend, (count,), dtype, device).data

    @property
    def transport_names(self) -> tuple[str, str]:
        """The transports within a node and across nodes for arrays of this rank's device; without making them."""
        if self.mpi_comm is None:
            return "peer", "none"
        if self.gpu is None:
            return "mpi", "mpi"
        return ("nccl" if self.gpu.use_nccl else "mpi, staged"), "mpi, staged"

    @property
    def is_over(self) -> bool:
        """True once MPI was finalised: no rank can be reached, and nothing is left to free."""
        return self.mpi_comm is not None and _is_finalized()()

    def on_device(self) -> AbstractContextManager[object]:
        """A context in which this rank's GPU is the current device."""
        return self.backend.on_device(self.device)

    def engine(self, device: int) -> Engine:
        """What runs collectives on arrays of a device or of host memory; collective on first use of each.

        Virtual devices are host memory, so that one engine serves both.
        """
        if device != HOST_MEMORY and self.gpu is not None:
            if self._device_engine is None:
                self._device_engine = self.gpu.make_engine(self)
            return self._device_engine
        if self._host_engine is None:
            self._host_engine = self._make_host_engine()
        return self._host_engine

    def _make_host_engine(self) -> Engine:
        """The engine for host memory."""

        def empty(count: int, dtype: Any) -> np.ndarray[Any, Any]:
            return np.empty(count, dtype)

        if self.mpi_comm is None:
            # What the host backend's engine gets is memory that the host may touch at once.
            where = HOST_MEMORY if self.backend.name == "host" else self.device
            return Engine(self.topology, self.rank, PeerTransport(self.backend, (where,)), None, empty)
        from ncclcomm.transport import mpi

        node, local_rank = self.topology.locate(self.rank)
        if self.topology.num_nodes == 1:
            intra = mpi.MpiTransport(mpi.split(self.mpi_comm, 0, self.rank), self.chunk_bytes)
            return Engine(self.topology, self.rank, intra, None, empty)
        intra = mpi.MpiTransport(mpi.split(self.mpi_comm, node, local_rank), self.chunk_bytes)
        leaders = mpi.split(self.mpi_comm, 0 if local_rank == 0 else None, node)
        inter = None if leaders is None else mpi.MpiTransport(leaders, self.chunk_bytes)
        return Engine(self.topology, self.rank, intra, inter, empty)

    def watch(self) -> Member:
        """Have this group's calls watched, unless the watchdogs are off, and say what was chosen for it."""
        if self.mpi_comm is not None:
            from ncclcomm.transport import mpi

            supervised = config.supervised()
            guard_exit(mpi.MPI, hooks=bool(self.addresses), supervised=supervised, say_goodbye=say_goodbye)
            if self.addresses:
                group = Group(self.name, self.topology, self.rank, self.addresses)
                watchdog(end_job).add(group, is_launched=mpi.MPI.COMM_WORLD.Get_size() > 1)
        return say_what_was_chosen(self)

    def report(self, entry: Running, why: str) -> str:
        """Where all ranks are, as their watchdogs say."""
        if not self.addresses:
            head = report_head(entry, self.topology.describe(self.rank), why)
            return f"{head}\n  where the others are is not known: NCCLCOMM_WATCHDOG=false"
        dog = watchdog(end_job)
        group = dog.groups[self.name]
        return report(entry, group, dog.ask(group), why)

    def barrier(self) -> None:
        """Wait for every rank."""
        self.engine(HOST_MEMORY).barrier()

    def split(self, comm: Communicator, color: Any, key: Any) -> Member | None:
        """See Communicator.split."""

        def validate() -> Facts[None]:
            """Look at this rank's arguments."""
            number = None if color is None else whole_number(color, "split: color")
            if number is not None and number < 0:
                raise ArgumentError(f"split: color is {number}; expected 0 or more, or None")
            return Facts(None, {}, {"color": number, "key": whole_number(key, "split: key")})

        _, facts = agree(comm, "split", validate, header="all")
        # MPI takes small numbers alone; a hash is a common color.
        colors = sorted({own["color"] for own in facts if own["color"] is not None})
        mine = facts[comm.rank]["color"]
        wanted = None if mine is None else colors.index(mine)
        order = sorted(range(comm.size), key=lambda rank: (facts[rank]["key"], rank)).index(comm.rank)
        if self.mpi_comm is None:
            return None if wanted is None else replace(self, _host_engine=None, _device_engine=None).watch()
        from ncclcomm.transport import mpi

        _free_dropped(self.control)
        part = mpi.split(self.mpi_comm, wanted, order)
        if part is None:
            return None
        names = part.allgather(self.node_names[self.rank])
        return Member(
            topology=Topology(tuple(names)),
            rank=part.Get_rank(),
            device=self.device,
            backend=self.backend,
            check=self.check,
            chunk_bytes=self.chunk_bytes,
            mpi_comm=part,
            control=mpi.MpiControl(part),
            node_names=tuple(names),
            name=_new_name(mpi.MpiControl(part)),
            timeout_s=self.timeout_s,
            addresses=tuple(part.allgather(self.addresses[self.rank])) if self.addresses else (),
            gpu=self.gpu,
            devices=tuple(part.allgather(self.device)),
            nodes_by=self.nodes_by,
            log=self.log,
        ).watch()

    def close(self) -> None:
        """Free the group's communicators; collective."""
        with ExitStack() as stack:
            if self.mpi_comm is not None:
                from ncclcomm.transport import mpi

                stack.callback(mpi.free, self.mpi_comm)
                if self.addresses:
                    dog = watchdog(end_job)
                    dog.close(self.name)
                    # After the engines, which may wait for work of a device.
                    stack.callback(dog.remove, self.name)
            for engine in (self._host_engine, self._device_engine):
                if engine is not None:
                    stack.callback(engine.close)


@cache
def _is_finalized() -> Callable[[], bool]:
    """MPI's own function; kept, since each call asks."""
    from ncclcomm.transport import mpi

    return mpi.MPI.Is_finalized


_dropped: dict[str, Member] = {}
"""Groups whose Communicator this rank dropped without closing it: freeing them is collective, so they wait here."""


def drop(member: Member) -> None:
    """Keep what a dropped Communicator held until all its ranks have dropped theirs; called by the collector."""
    if member.mpi_comm is not None:
        _dropped[member.name] = member


def _free_dropped(control: Control) -> None:
    """Free the groups that all their ranks have dropped; collective over any group that has these ranks in it."""
    told = control.all_gather_object([(name, member.topology.size) for name, member in list(_dropped.items())])
    votes = Counter(entry for entries in told for entry in entries)
    for name, size in sorted(votes):
        if votes[name, size] == size and name in _dropped:
            _dropped.pop(name).close()


def _new_name(control: Control) -> str:
    """A name for a new group, the same on its ranks.

    Gathered rather than broadcast: MPI may hold a broadcast back until the root's next call, which may be far away.
    """
    return str(control.all_gather_object(uuid.uuid4().hex)[0])


def join(mpi_comm: Any, device: Any, check: bool | int | None, timeout_s: float | None = None) -> Member:
    """Join the group of an mpi4py communicator, or a world of one.

    Collective over mpi_comm.

    Raises:
        ArgumentError: no intracommunicator, or this rank's device or check makes no sense; on every rank.
        MismatchError: ranks differ in backend or settings; on every rank.
    """
    if mpi_comm is None:
        settings = config.load()
        backend = current_backend()
        number = _device_for(device, 0, backend, share=False)
        log = settings.log == "info"
        checked, limit_s = _check_of(check, settings), _timeout_of(timeout_s, settings)
        alone, control = Topology((0,)), SoloControl()
        return Member(
            alone, 0, number, backend, checked, settings.chunk_bytes, None, control, (0,), timeout_s=limit_s, log=log
        ).watch()
    from ncclcomm.transport import mpi

    return _join_mpi(mpi.duplicate(mpi_comm), device, check, timeout_s)


def _nodes_by(settings: config.Config) -> str:
    """What tells nodes apart, in words."""
    if settings.node_map:
        return f"NCCLCOMM_NODE_MAP={','.join(map(str, settings.node_map))}"
    if settings.node_sizes:
        return f"NCCLCOMM_NODE_SIZE={','.join(map(str, settings.node_sizes))}"
    return "shared memory"


def _join_mpi(own: Any, device: Any, check: bool | int | None, timeout_s: float | None) -> Member:
    """Join over a communicator that is ours: agree on the topology and the settings, or free it and raise."""
    from ncclcomm.transport import mpi

    control, rank = mpi.MpiControl(own), own.Get_rank()
    try:
        _free_dropped(control)
        host_of = control.all_gather_object(mpi.first_rank_of_host(own))
        settings = together(control, rank, "init", config.load)
        backend = together(control, rank, "init", current_backend)
        checked = together(control, rank, "init", lambda: _check_of(check, settings))
        limit_s = together(control, rank, "init", lambda: _timeout_of(timeout_s, settings))
        _agree_on(control, rank, settings, backend, checked, limit_s)
        names = together(control, rank, "init", lambda: nodes_of_hosts(host_of, settings.node_sizes, settings.node_map))
        topology = Topology(names)
        place = _place_among(topology.locate(rank).local_rank, backend, settings.devices_per_rank)
        number = together(control, rank, "init", lambda: _device_for(device, place, backend, settings.share_devices))
        gpu = agree_on_gpus(control, topology, rank, number, backend, share=settings.share_devices)
        if gpu is not None and gpu.warning:
            # A program may turn warnings into errors: then all ranks must get it.
            together(control, rank, "init", lambda: gpu.warn(rank))
        # What listens, and runs threads, can fail on one rank alone.
        dog = together(control, rank, "init", lambda: watchdog(end_job)) if settings.watchdog else None
    except Exception:
        mpi.free(own)
        raise
    addresses: tuple[Address, ...] = ()
    if dog is not None:
        dog.stall_s = settings.stall_s
        addresses = tuple(control.all_gather_object(dog.address))
        # Before the next collective, so that all are still there.
        dog.greet(addresses)
    return Member(
        topology=topology,
        rank=rank,
        device=number,
        backend=backend,
        check=checked,
        chunk_bytes=settings.chunk_bytes,
        mpi_comm=own,
        control=control,
        node_names=names,
        name=_new_name(control),
        timeout_s=limit_s,
        addresses=addresses,
        gpu=gpu,
        devices=tuple(control.all_gather_object(number)),
        nodes_by=_nodes_by(settings),
        log=settings.log == "info",
    ).watch()


def _agree_on(
    control: Control,
    rank: int,
    settings: config.Config,
    backend: DeviceBackend,
    check: bool | int,
    timeout_s: float | None,
) -> None:
    """Raise where ranks differ in what must be the same on all."""
    mine = {
        "backend": backend.name,
        "NCCLCOMM_NODE_SIZE": settings.node_sizes,
        "NCCLCOMM_NODE_MAP": settings.node_map,
        "NCCLCOMM_CHUNK_BYTES": settings.chunk_bytes,
        "NCCLCOMM_SHARE_DEVICES": settings.share_devices,
        "NCCLCOMM_WATCHDOG": settings.watchdog,
        "check": repr(check),
        "timeout_s": timeout_s,
    }
    told = control.all_gather_object(mine)
    flat = Topology((0,) * len(told))
    for name in mine:
        values = [other[name] for other in told]
        if any(value != values[0] for value in values):
            raise_mismatch(
                flat, rank, f"init: ranks differ in {name}", values, "Start all ranks with the same setting."
            )


def _timeout_of(timeout_s: Any, settings: config.Config) -> float | None:
    """The time limit of a communicator's calls."""
    if timeout_s is None:
        return settings.timeout_s
    return seconds_above_0(timeout_s)


def _check_of(check: Any, settings: config.Config) -> bool | int:
    """The check setting of a communicator."""
    if check is None:
        return settings.check
    if isinstance(check, bool):
        return check
    number = whole_number(check, "check")
    if number < 0:
        raise ArgumentError(f"check is {number}; expected True, False or a number of calls")
    return number


def _place_among(local_rank: int, backend: DeviceBackend, per_rank: int | None) -> int:
    """A rank's number among those that see the same devices: 0 where the launcher shows it its own alone."""
    return 0 if per_rank is not None and backend.name == "cuda" else local_rank


def _device_for(device: Any, local_rank: int, backend: DeviceBackend, share: bool) -> int:
    """The device of a rank: the one asked for, the only one it sees, or by local rank; virtual devices are shared."""
    if device is not None:
        return resolve_device(device)
    count = backend.device_count()
    if backend.name == "cuda" and 1 < count <= local_rank and not share:
        raise DeviceError(
            f"local rank {local_rank} finds {count} GPUs visible, one for each of the first {count} ranks of a node; "
            "start fewer ranks a node, or set NCCLCOMM_SHARE_DEVICES=1 to let ranks share GPUs (slower)"
        )
    return local_rank % count
