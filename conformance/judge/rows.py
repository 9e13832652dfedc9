"""The rows of `deviations.toml` and of `reference_limits.toml`."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ANY = "any"  # in a deviation row, where no device changes what torch does
# "sim" is the simulated device. An accelerator with a backend of its own is added here with its first row.
_DEVICE_TYPES = frozenset({"cpu", "cuda", "hpu", "mps", "mtia", "npu", "sim", "xpu"})


@dataclass(frozen=True)
class Deviation:
    id: str
    clause: str
    torch_does: str
    we_do: str
    why: str
    thread: str
    devices: tuple[str, ...]  # device types on which torch is known to do so, or ANY alone

    def holds_on(self, device: str | None) -> bool:
        """Return whether torch is known to do so on `device`. None means that the test names no device."""
        return device is None or self.devices == (ANY,) or device in self.devices


@dataclass(frozen=True)
class ReferenceLimit:
    """Something that torch cannot do on some devices: a row of `reference_limits.toml`.

    Where the device lacks it, no subject can; else a subject may claim that it does better.
    """

    id: str
    clauses: tuple[str, ...]  # whose tests meet it
    devices: tuple[str, ...]
    torch_does: str
    error: str  # a pattern, found in how such a test fails
    thread: str
    of_the_device: bool = False


def limited_clauses() -> frozenset[str]:
    """Clauses that a subject may claim beyond what torch can do."""
    rows = all_reference_limits().values()
    return frozenset(clause for row in rows if not row.of_the_device for clause in row.clauses)


@functools.cache
def all_reference_limits() -> Mapping[str, ReferenceLimit]:
    return {
        row_id: ReferenceLimit(
            id=row_id, **row | {"clauses": tuple(row["clauses"]), "devices": devices_of(row_id, row)}
        )
        for row_id, row in _read_rows("reference_limits.toml").items()
    }


@functools.cache
def all_deviations() -> Mapping[str, Deviation]:
    return {
        row_id: Deviation(id=row_id, **row | {"devices": devices_of(row_id, row, may_be_any=True)})
        for row_id, row in _read_rows("deviations.toml").items()
    }


def _read_rows(file: str) -> Mapping[str, Any]:
    return tomllib.loads((Path(__file__).parents[1] / file).read_text())


def devices_of(row_id: str, row: Mapping[str, Any], *, may_be_any: bool = False) -> tuple[str, ...]:
    devices = row.get("devices")
    if may_be_any and devices == [ANY]:
        return (ANY,)
    if isinstance(devices, list) and devices and _DEVICE_TYPES.issuperset(devices):
        return tuple(devices)
    alone = f', or ["{ANY}"] alone if no device changes what torch does' if may_be_any else ""
    raise ValueError(
        f"row {row_id}: devices is {'missing' if devices is None else repr(devices)}, expected a list of "
        f"{', '.join(sorted(_DEVICE_TYPES))}{alone}. Name each device type on which torch is known to do so."
    )
