"""Entries of `deviations.toml` and of `reference_limits.toml`."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from conformance.judge.surface import is_torch_in, torch_bounds

_DAY = re.compile(r"\d{4}-\d\d-\d\d")
# Harm that torch does to the user, worst first: silently wrong numbers or weights; a hang, an ended process or lost
# work; a wrong or misleading error; more memory or time, or missing information; none, because Tandem lacks something.
HARMS = ("silent", "hang", "error", "cost", "limit")
# The simulated device, and every other device that a package registers with torch (PrivateUse1).
CUSTOM = "sim"
_DEVICE_TYPES = frozenset({"cpu", "cuda", "hpu", "mps", "mtia", "xpu", CUSTOM})


@dataclass(frozen=True)
class Row:
    """Fields of deviations and reference limits: the torch versions that behave so, and the day of the entry."""

    id: str
    torch: str = field(default="", kw_only=True)  # a range such as `<2.14`
    # The day of the entry, such as 2026-01-31, which is needed if a version fixed it.
    recorded: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        try:
            is_fixed = bool(self.fixed_in)
        except ValueError as error:
            raise ValueError(f"row {self.id}: {error}") from None
        if is_fixed and not _DAY.fullmatch(self.recorded):
            raise ValueError(
                f"row {self.id}: torch {self.fixed_in} fixed it and recorded is {self.recorded!r}; "
                "expected the day of the row, such as 2026-01-31"
            )

    @property
    def is_of_this_torch(self) -> bool:
        return is_torch_in(self.torch)

    @property
    def fixed_in(self) -> str:
        """The first torch version that no longer does so, such as `2.14`, or an empty string."""
        upper = [bound for side, bound in torch_bounds(self.torch) if side == "<"]
        return ".".join(map(str, min(upper))) if upper else ""


@dataclass(frozen=True)
class Deviation(Row):
    clause: str
    torch_does: str
    we_do: str
    why: str
    thread: str
    harm: str  # member of HARMS
    devices: tuple[str, ...] = ()  # device types on which torch is known to do so, if not on all
    also: tuple[str, ...] = ()  # further clauses in which the same fault of torch shows

    @property
    def clauses(self) -> tuple[str, ...]:
        return (self.clause, *self.also)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.harm not in HARMS:
            raise ValueError(f"row {self.id}: harm is {self.harm!r}; expected one of {', '.join(HARMS)}")

    def holds_on(self, device: str | None) -> bool:
        """Return whether torch is known to do so on `device`. None means that the test names no device."""
        return device is None or not self.devices or device in self.devices


@dataclass(frozen=True)
class ReferenceLimit(Row):
    """A limit of torch on some devices: an entry of `reference_limits.toml`.

    If the device itself is the limit, no subject can do it. Otherwise a subject may claim that it can.
    """

    clauses: tuple[str, ...]  # clauses whose tests run into the limit
    devices: tuple[str, ...]
    torch_does: str
    error: str  # a pattern of the failure
    thread: str
    of_the_device: bool = False

    def holds_on(self, devices: Iterable[str]) -> bool:
        """Return whether torch has the limit on one of these device types."""
        custom = torch._C._get_privateuse1_backend_name()
        return any((CUSTOM if device == custom else device) in self.devices for device in devices)


def limited_clauses() -> frozenset[str]:
    """Return the clauses that torch cannot do everywhere and that a subject may claim nevertheless."""
    rows = all_reference_limits().values()
    return frozenset(clause for row in rows if not row.of_the_device for clause in row.clauses)


@functools.cache
def all_reference_limits() -> Mapping[str, ReferenceLimit]:
    return {
        row_id: ReferenceLimit(
            id=row_id,
            **row | {"clauses": tuple(row["clauses"]), "devices": devices_of(row_id, row.get("devices"))},
        )
        for row_id, row in _read_rows("reference_limits.toml").items()
    }


@functools.cache
def all_deviations() -> Mapping[str, Deviation]:
    return {
        row_id: Deviation(
            id=row_id,
            **row
            | {
                "also": tuple(row.get("also", ())),
                "devices": devices_of(row_id, row["devices"]) if "devices" in row else (),
            },
        )
        for row_id, row in _read_rows("deviations.toml").items()
    }


def _read_rows(file: str) -> Mapping[str, Any]:
    return tomllib.loads((Path(__file__).parents[2] / file).read_text())


def devices_of(row_id: str, devices: Any) -> tuple[str, ...]:
    if isinstance(devices, list) and devices and _DEVICE_TYPES.issuperset(devices):
        return tuple(devices)
    raise ValueError(
        f"row {row_id}: devices is {'missing' if devices is None else repr(devices)}, expected a list of "
        f"{', '.join(sorted(_DEVICE_TYPES))}. Name each device type on which torch is known to do so."
    )
