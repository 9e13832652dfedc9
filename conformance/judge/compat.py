"""Names that are private in torch and yet read or overridden by widely used packages: rows of `compat_names.toml`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class CompatName:
    owner: str  # the public class or function that carries the name
    name: str
    used_by: str
    construct: tuple[Any, ...] = ()  # positional arguments that make an instance to look at
    on_ranks: bool = False  # what carries it exists on ranks alone; `distributed/fsdp` looks there


def _read() -> tuple[CompatName, ...]:
    table = tomllib.loads((Path(__file__).parents[1] / "compat_names.toml").read_text())
    return tuple(
        CompatName(owner, name, used_by, tuple(rows.get("construct", ())), rows.get("on_ranks", False))
        for owner, rows in table.items()
        for name, used_by in rows["names"].items()
    )


COMPAT_NAMES = _read()
