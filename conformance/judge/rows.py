"""The rows of `deviations.toml` and of `reference_limits.toml`."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Deviation:
    id: str
    clause: str
    torch_does: str
    we_do: str
    why: str
    thread: str
    devices: tuple[str, ...] = ()  # device types on which torch is known to do so; all, if empty

    def holds_on(self, device: str | None) -> bool:
        return device is None or not self.devices or device in self.devices


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
    rows = tomllib.loads((Path(__file__).parents[1] / "reference_limits.toml").read_text())
    return {
        row_id: ReferenceLimit(id=row_id, **row | {key: tuple(row[key]) for key in ("clauses", "devices")})
        for row_id, row in rows.items()
    }


@functools.cache
def all_deviations() -> Mapping[str, Deviation]:
    rows = tomllib.loads((Path(__file__).parents[1] / "deviations.toml").read_text())
    return {
        row_id: Deviation(id=row_id, **row | {"devices": tuple(row.get("devices", ()))})
        for row_id, row in rows.items()
    }
