"""Functions of the simulator for programs: choose a schedule, and read what it observed."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import site
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from conformance.simulator import _build, device

_extension: ModuleType | None = None
_FOLDERS = (
    *(sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib")),
    *site.getsitepackages(),
    site.getusersitepackages(),
    Path(torch.__file__).parents[1],
    Path(__file__).parent,
)
# Folders of Python, installed packages and the simulator. Their frames are not of the program.
_LIBRARIES = tuple({path + os.sep for folder in _FOLDERS for path in (str(folder), os.path.realpath(folder))})


class Step(NamedTuple):
    """An operation, or a wait of `stream` for the operations of `source` up to `source_tick`."""

    stream: str
    tick: int
    name: str
    place: str
    source: str
    source_tick: int


@dataclass(frozen=True)
class Hazard:
    """Two operations on the same memory, one of which writes, that nothing orders."""

    now: str
    now_stream: str
    now_place: str
    before: str
    before_stream: str
    before_place: str
    missing: str
    now_tick: int = field(default=-1, compare=False)  # -1: the host
    before_tick: int = field(default=-1, compare=False)
    # Steps of the program up to the later operation.
    steps: tuple[Step, ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Hazard:
        """Return the hazard whose `vars` were written as JSON."""
        return cls(**fields | {"steps": tuple(Step(*step) for step in fields["steps"])})

    def __str__(self) -> str:
        where = "" if self.now_stream == "host" else f" on {self.now_stream}"
        return (
            f"{self.now}{where} at {in_program(self.now_place)}\n"
            f"  what {self.before} on {self.before_stream} at {in_program(self.before_place)}\n"
            f"  missing: {self.missing}"
        )


@dataclass(frozen=True)
class HostWait:
    """A line where the host waited for the device, and how often."""

    why: str
    place: str
    count: int

    def __str__(self) -> str:
        return f"{self.why} at {in_program(self.place)}, {self.count} times"


def enable(devices: int = 1, *, name: str | None = None) -> None:
    """Register `sim` with `devices` devices: `torch.device("sim")`, `torch.sim`, and the c10d backend simccl.

    Args:
        name: another name than `sim`, for a stand-in of another device. The judge treats it as an unknown device.

    Raises:
        Unavailable: torch is not 2.13 to 2.15, or there is no compiler and the extension was not built before.
        RuntimeError: another accelerator has torch's only slot, or an earlier call requested another number of devices.
    """
    global _extension  # noqa: PLW0603 - a device is registered once for the process
    if devices < 1:
        raise ValueError(f"got {devices} devices, but there has to be one at least")
    if _extension is not None:
        if _extension.device_count() != devices:
            raise RuntimeError(f"got {devices} devices, but sim has {_extension.device_count()} already")
        return
    present = torch._C._get_privateuse1_backend_name()
    if present != "privateuseone":
        raise RuntimeError(
            f"torch has room for one device of others, and {present} has taken it in this process"
        )
    _extension = _build.load()
    device.NAME = name or device.NAME
    _extension.set_device_count(devices)
    _extension.set_library_folders(list(_LIBRARIES))
    device.register(_extension)
    if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
        from conformance.simulator import triton_kernels  # noqa: PLC0415  slow to import, and few programs have kernels

        triton_kernels.serve(launch)
    atexit.register(_drain_at_exit)


def device_is_enabled() -> bool:
    return _extension is not None


def set_schedule(seed: int, rank: int = 0) -> None:
    """Finish all queued work, continue with the schedule of `seed`, and drop earlier observations.

    Args:
        seed: 0 to 3 are extreme schedules, the others are drawn.
        rank: rank of this process. Each rank draws separately.
    Sync: all devices.
    """
    extension = needed()
    extension.begin_fresh_memory()
    extension.set_schedule(seed, rank)
    take_hazards()


def log_hazards(on: bool = True) -> None:
    """Compare each operation with those that touched the same memory, and watch what the host reads."""
    needed().log_hazards(on)


def take_hazards() -> list[Hazard]:
    """Return the hazards since the last call, without duplicates, at most a thousand."""
    return [
        Hazard(*map(_as_place, texts), now_tick, before_tick, tuple(Step(*step) for step in steps))
        for texts, now_tick, before_tick, steps in needed().take_hazards()
    ]


def _as_place(text: str) -> str:
    """Return a traceback as a place such as `train.py:3 step < train.py:9 main`, and other texts as they are."""
    frames = re.findall(r'File "(.*)", line (\d+) in (.*)', text)
    return " < ".join(f"{file}:{line} {name}" for file, line, name in frames) or text


def take_host_waits() -> list[HostWait]:
    """Return the lines where the host has waited since the last call."""
    return [HostWait(*why_and_where, count) for why_and_where, count in needed().take_waits().items()]


def take_unreplayable() -> list[str]:
    """Return the decisions of the clock since the last call. A run that has any cannot be replayed by its seed."""
    return list(needed().take_unreplayable())


def course() -> str:
    """Return a digest of the device's tasks and allocations since the schedule was set, in their order."""
    return f"{needed().course():016x}"


def synchronize() -> None:
    """Finish all queued work of all devices, without counting it as a wait of the program."""
    needed().drain()


def leave_peers(checks_sends: bool) -> None:
    """Report to the other ranks that this rank ends.

    Args:
        checks_sends: wait until all messages of this rank are received.
    Raises:
        RuntimeError: a message is never received, because all other ranks have ended or wait for each other.
    """
    needed().leave_peers(checks_sends)


def launch(
    function: Callable[[], object],
    reads: Sequence[torch.Tensor],
    writes: Sequence[torch.Tensor],
    name: str = "launch",
) -> None:
    """Queue `function` on the current stream, as a kernel of the caller.

    Args:
        function: called without arguments when the stream reaches it. It uses `device.host_view` of the tensors.
        reads: tensors of the device or in pinned memory.
        writes: likewise.
        name: its name in hazards.
    """
    extension = needed()
    on = next(
        (tensor.device.index for tensor in (*writes, *reads) if tensor.device.type == device.NAME),
        torch.accelerator.current_device_index(),
    )
    extension.launch(name, function, list(reads), list(writes), on)


def in_program(place: str) -> str:
    """Return the innermost frame of `place` that is not of Python, an installed package or the simulator."""
    prefix, _, frames = place.rpartition(") ") if place.startswith("(") else ("", "", place)
    shown = prefix + ") " if prefix else ""
    for frame in frames.split(" < "):
        if not frame.startswith("<") and not os.path.realpath(frame).startswith(_LIBRARIES):
            return shown + frame
    return shown + frames.split(" < ", maxsplit=1)[0]


def needed() -> ModuleType:
    if _extension is None:
        raise RuntimeError("the simulator is not enabled: call conformance.simulator.enable() first")
    return _extension


def _drain_at_exit() -> None:
    with contextlib.suppress(RuntimeError):  # a peer that is gone must not keep this process
        synchronize()
        leave_peers(checks_sends=False)
