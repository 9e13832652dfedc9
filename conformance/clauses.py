"""The clauses: each behaviour that is judged, by a stable id, with one sentence and the public names it covers.

They are written in a TOML file beside the tests that ask about them: `amp/grad_scaler.toml` holds the clauses
`amp.grad_scaler.*`, asked by `amp/test_grad_scaler*.py`. An id is never renamed or reused.

Each has a level:
    core         torch does it, so every subject must
    deviation    a row of `deviations.toml` belongs to it: a subject does it torch's way or the better one
    extension    torch cannot do it, and it is asked of those alone that claim it; its table says so
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from conformance import surface
from conformance.deviations import all_deviations

HERE = Path(__file__).parent
# Folders whose tests judge a subject; the others test this repository's own parts.
AREAS = ("amp", "clients", "cpu", "cuda", "distributed", "dynamo", "nn")
LEVELS = ("core", "deviation", "extension")


@dataclass(frozen=True)
class Clause:
    id: str
    says: str
    covers: tuple[str, ...]  # surface items (`conformance.surface`) that this clause is about
    level: str  # one of `LEVELS`

    @property
    def area(self) -> str:
        """The torch module it belongs to, which is the TOML file it stands in."""
        return next(area for area in _files() if self.id.startswith(area + "."))

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The public names that it is about: those whose methods and parameters it covers."""
        return tuple(dict.fromkeys(surface.owner(item) for item in self.covers))


def clause(clause_id: str) -> pytest.MarkDecorator:
    """Say which clause a test asks about."""
    return pytest.mark.clause(clause_id)


@functools.cache
def all_clauses() -> Mapping[str, Clause]:
    return {found.id: found for area, file in _files().items() for found in _read(area, file)}


def for_report() -> list[dict[str, Any]]:
    """Every clause as a report holds it: its fields and its area."""
    return [asdict(found) | {"area": found.area} for found in all_clauses().values()]


@functools.cache
def _files() -> dict[str, Path]:
    files = [file for area in AREAS for file in sorted((HERE / area).rglob("*.toml"))]
    return {".".join(file.relative_to(HERE).with_suffix("").parts): file for file in files}


def _read(area: str, file: Path) -> Iterator[Clause]:
    deviating = {row.clause for row in all_deviations().values()}

    def visit(path: str, table: Mapping[str, Any]) -> Iterator[Clause]:
        if "says" in table:
            unknown = table.keys() - {"says", "covers", "level"}
            if unknown:
                raise ValueError(
                    f"{file}: [{path}] has the unknown keys {sorted(unknown)}; wanted says, covers and level"
                )
            if table.get("level", "extension") != "extension":
                raise ValueError(
                    f"{file}: [{path}] has the level {table['level']!r}; only extension is written, "
                    "the others follow from the rows of deviations.toml"
                )
            level = table.get("level") or ("deviation" if path in deviating else "core")
            yield Clause(path, table["says"], tuple(table.get("covers", ())), level)
            return
        for key, inner in table.items():
            yield from visit(f"{path}.{key}", inner)

    yield from visit(area, tomllib.loads(file.read_text()))
