"""Private names of torch that widely used packages read or override, from `compat_names.toml`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class CompatName:
    owner: str  # the public class or function that has the name
    name: str
    used_by: str
    construct: tuple[Any, ...] = ()  # positional arguments for the instance to test
    on_ranks: bool = False  # the owner exists only on ranks, tested in `distributed/fsdp`


def _read() -> tuple[CompatName, ...]:
    table = tomllib.loads((Path(__file__).parents[2] / "compat_names.toml").read_text())
    return tuple(
        CompatName(owner, name, used_by, tuple(rows.get("construct", ())), rows.get("on_ranks", False))
        for owner, rows in table.items()
        for name, used_by in rows["names"].items()
    )


COMPAT_NAMES = _read()
