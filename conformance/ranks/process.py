"""The process of a rank, which runs cases for its parent."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import fcntl
import functools
import gc
import importlib
import math
import os
import pickle
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from conformance import simulator
from conformance.judge.library import LookupFailed, NotProvided, load_library
from conformance.judge.rank_errors import Failure
from conformance.judge.sandbox import seeding
from conformance.judge.sandbox.environment import quieten_triton
from conformance.ranks import by_value
from conformance.ranks.channel import Channel
from conformance.ranks.collective_traces import report_collectives

# Longer than every deadline of the parent, which ends cases that hang.
_GROUP_TIMEOUT = datetime.timedelta(hours=1)
# Limit for the groups that cases leave, which need threads and files. They are kept, because DTensor continues to use
# the first of several equal meshes.
MOST_GROUPS = 50
_LOOPBACK = "127.0.0.1"
_LONGEST_TEXT = 20_000


@dataclass(frozen=True)
class Rank:
    """The rank that a case runs on. The default process group exists."""

    rank: int
    world_size: int
    device: torch.device

    def mesh(self, *sizes: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
        """Return a mesh of the first ranks, or of all.

        It is the same for all cases, because DTensor remembers the first of equal meshes.
        """
        return _mesh(dist.group.WORLD, self.device.type, sizes, names)

    def group_of_device(self) -> dist.ProcessGroup:
        """Return a group of all ranks that has a backend only for the device, as with NCCL."""
        return _group_of_device(dist.group.WORLD, self.device.type)


@functools.cache
def _mesh(_: Any, device: str, sizes: tuple[int, ...], names: tuple[str, ...] | None) -> DeviceMesh:
    return DeviceMesh(device, torch.arange(math.prod(sizes)).view(sizes), mesh_dim_names=names)


@functools.cache
def _group_of_device(_: Any, device: str) -> dist.ProcessGroup:
    return dist.new_group(backend=f"{device}:{dist.get_backend()}")


@dataclass(frozen=True)
class RankSettings:
    rank: int
    world_size: int
    backend: str
    device: str
    device_module: str  # module that registers the device, or ""
    seed: int  # seed of the run
    environment: dict[str, str]


# A rank sends its parent, in this order: Listening (rank 0 only), Ready, and for each case Resolved, any number of
# Collective, and either Done or Failure.
@dataclass(frozen=True)
class Listening:
    port: int


@dataclass(frozen=True)
class Ready:
    pass


@dataclass(frozen=True)
class Resolved:
    """Message that the case's module is imported, which starts the deadline."""


@dataclass(frozen=True)
class Done:
    result: bytes
    # Whether the process can run another case.
    is_clean: bool
    # On the simulated device, pairs of accesses to the same memory that no wait orders.
    hazards: Sequence[str] = ()


def serve(
    settings: RankSettings,
    control: socket.socket,
    output: Connection,
    stacks: Connection,
    lifeline: Connection,
) -> None:
    """Start a rank, then run one case after another until the rank is killed or its parent ends."""
    # The parent kills the session with all processes that the rank started, and only the parent gets Ctrl-C.
    os.setsid()
    os.environ.clear()
    os.environ.update(settings.environment)
    _die_with(lifeline.fileno())
    _redirect_output(output.fileno())
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=stacks.fileno(), all_threads=True)
    channel = Channel(control)
    with contextlib.suppress(EOFError, ConnectionError):
        _come_up(settings, channel)
        # Imported objects stay, so the collections that cases request need not visit them.
        gc.freeze()
        _hooks = report_collectives(channel.send)
        while True:
            _run_case(settings, channel, channel.receive())


def _die_with(lifeline: int) -> None:
    """Make the kernel kill this process and its children once the other end of the pipe `lifeline` is closed.

    A thread that waits for the end of the pipe is not enough, because it does not run if a rank hangs in C with
    Python's lock held.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # closed before the request
        os._exit(1)


def _redirect_output(output: int) -> None:
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    # Line buffering, so that the last output of a killed rank is not lost in a buffer.
    sys.stdout, sys.stderr = (
        open(descriptor, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115 open for life
        for descriptor in (1, 2)
    )


def find_hosts_in_files() -> None:
    """Find the names of hosts without a name server, in this process and its forks.

    Each connection to a TCPStore looks up the name of 127.0.0.1. It takes 5 s if an answer of a name server is lost.
    """
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).__nss_configure_lookup(b"hosts", b"files")


def _come_up(settings: RankSettings, channel: Channel) -> None:
    torch.set_num_threads(1)
    find_hosts_in_files()
    quieten_triton()
    seeding.set_run_seed(settings.seed)
    device = _device(settings)
    # The group only communicates on this machine. gloo would look up the host's name, which may not resolve.
    for backend in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{backend}_SOCKET_IFNAME", "lo")
    if settings.backend == "nccl" and settings.world_size > torch.cuda.device_count():
        os.environ.update(sharing_one_gpu(settings.rank))
    # With port 0 the system chooses a free port, so two pools cannot race for it.
    store = None
    if settings.rank == 0:
        store = dist.TCPStore(_LOOPBACK, 0, settings.world_size, is_master=True, wait_for_workers=False)
        channel.send(Listening(store.port))
    port = channel.receive()
    store = store or dist.TCPStore(
        _LOOPBACK, port, settings.world_size, is_master=False, wait_for_workers=False
    )
    dist.init_process_group(
        settings.backend,
        store=store,
        rank=settings.rank,
        world_size=settings.world_size,
        timeout=_GROUP_TIMEOUT,
        device_id=device if settings.backend == "nccl" else None,
    )
    channel.send(Ready())


def sharing_one_gpu(rank: int) -> dict[str, str]:
    """Return the environment variables that make NCCL treat each rank as a separate host, reached by sockets.

    NCCL refuses two ranks on one GPU of the same host.
    """
    off = ("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE")
    return {"NCCL_HOSTID": f"tandem-rank-{rank}", "NCCL_NET": "Socket", **dict.fromkeys(off, "1")}


def _device(settings: RankSettings) -> torch.device:
    if settings.device == simulator.NAME:
        simulator.enable()
    if settings.device_module:
        importlib.import_module(settings.device_module)
    if settings.device == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(settings.device)
    device = torch.device(settings.device, settings.rank % module.device_count())
    # The `set_device` of a package may take no torch.device.
    module.set_device(device.index)
    return device


def _run_case(settings: RankSettings, channel: Channel, request: bytes) -> None:
    try:
        name, arguments = pickle.loads(request)
        case = resolve(name)
        rank = Rank(settings.rank, settings.world_size, _device(settings))
        channel.send(Resolved())
        before = _lasting_state()
        # The seed is the same on all ranks and before every case. Cases derive differences from the rank's number.
        seeding.begin(settings.rank)
        if settings.device == simulator.NAME:
            simulator.log_hazards()
        result = by_value.dumps(case(rank, **arguments))
        if settings.device != "cpu":
            # A failure of the case's queued work must not be charged to the next case.
            torch.get_device_module(settings.device).synchronize()
        hazards = list(map(str, simulator.take_hazards())) if settings.device == simulator.NAME else []
        message = Done(result, _lasting_state() == before, hazards)
    except BaseException as error:
        # Report the failure before leaving the group, which may fail too.
        channel.send(_failure(settings.rank, error))
        # Peers in a collective notice that gloo's connection is closed, and raise. Leaving an nccl group may wait for
        # collectives that will never be issued.
        if settings.backend == "gloo" and dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        return
    channel.send(message)


def load(rank: Rank, *, library: str) -> None:
    """Import a library, as a case, so that no deadline of later cases counts it."""
    load_library(library)


def resolve(name: str) -> Callable[..., Any]:
    """Return the function that `module:function` names."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _lasting_state() -> tuple[Any, ...]:
    """Return the state that a case could leave changed for the next case."""
    return (
        id(dist.group.WORLD),
        len(dist.distributed_c10d._world.pg_map) > MOST_GROUPS,  # pyright: ignore[reportPrivateUsage]
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.is_autocast_cache_enabled(),
        os.getcwd(),
    )


def _failure(rank: int, error: BaseException) -> Failure:
    # TracebackException also works if `str` of the exception raises. The first frame is this module's.
    formatter = traceback.TracebackException(
        type(error), error, error.__traceback__ and error.__traceback__.tb_next
    )
    return Failure(
        rank=rank,
        kind=type(error).__qualname__,
        text=str(formatter)[:_LONGEST_TEXT],
        traceback="".join(formatter.format())[-_LONGEST_TEXT:],
        when_ns=time.monotonic_ns(),
        lookup=error if isinstance(error, (NotProvided, LookupFailed)) else None,
    )
