"""The clauses: each behaviour that is judged, by a stable id, with one sentence and the public names it covers.

They are written in a TOML file beside the tests that ask about them: `amp/grad_scaler.toml` holds the clauses
`amp.grad_scaler.*`, asked by `amp/test_grad_scaler*.py`. An id is never renamed or reused. A table may name the thread
where its matter was reported, and the torch versions (`torch = ">=2.12"`) that it holds for, if not for all.

Each has a level:
    core         torch does it, so every subject must
    deviation    a row of `deviations.toml` belongs to it: a subject does it torch's way or the better one
    extension    torch cannot do it, and it is asked of those alone that claim it; its table says so
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from conformance.judge import surface
from conformance.judge.rows import all_deviations

HERE = Path(__file__).parents[1]
TORCH_VERSIONS = ("2.11", "2.12", "2.13", "2.14")  # all that this package supports
# Folders whose tests judge a subject; the others test this repository's own parts.
AREAS = ("amp", "clients", "cpu", "cuda", "distributed", "dynamo", "nn")
LEVELS = ("core", "deviation", "extension")


@dataclass(frozen=True)
class Clause:
    id: str
    says: str
    covers: tuple[str, ...]  # surface items (`conformance.judge.surface`) that this clause is about
    level: str  # one of `LEVELS`
    thread: str = ""  # where it was reported, or how it was found; its deviation's, unless it names one
    torch: str = ""  # the range of versions that it holds for

    @property
    def area(self) -> str:
        """The torch module it belongs to, which is the TOML file it stands in."""
        return next(area for area in _files() if self.id.startswith(area + "."))

    def is_asked_by(self, beginnings: Sequence[str]) -> bool:
        """Whether its id is one of these, or begins with one."""
        return any(self.id == each or self.id.startswith(f"{each}.") for each in beginnings)

    @property
    def holds_here(self) -> bool:
        """Whether it is about the torch that is installed."""
        return surface.is_torch_in(self.torch)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The public names that it is about: those whose methods and parameters it covers."""
        return tuple(dict.fromkeys(surface.owner(item) for item in self.covers))


def clause(clause_id: str) -> pytest.MarkDecorator:
    """Say which clause a test asks about."""
    return pytest.mark.clause(clause_id)


def clause_of(item: pytest.Item) -> str:
    """The clause that a test asks about; empty for one of this repository's own parts."""
    marker = item.get_closest_marker("clause")
    return marker.args[0] if marker else ""


@functools.cache
def all_clauses() -> Mapping[str, Clause]:
    return {found.id: found for area, file in _files().items() for found in _read(area, file)}


def for_report() -> list[dict[str, Any]]:
    """Every clause as a report holds it: its fields, its area, and the supported torch versions that it holds for."""
    return [
        asdict(found)
        | {
            "area": found.area,
            "torch": tuple(each for each in TORCH_VERSIONS if surface.is_torch_in(found.torch, each)),
        }
        for found in all_clauses().values()
    ]


@functools.cache
def _files() -> dict[str, Path]:
    files = [file for area in AREAS for file in sorted((HERE / area).rglob("*.toml"))]
    return {".".join(file.relative_to(HERE).with_suffix("").parts): file for file in files}


def _read(area: str, file: Path) -> Iterator[Clause]:
    threads = {row.clause: row.thread for row in all_deviations().values()}

    def visit(path: str, table: Mapping[str, Any]) -> Iterator[Clause]:
        if "says" not in table:
            for key, inner in table.items():
                yield from visit(f"{path}.{key}", inner)
            return
        try:
            yield _clause(path, table, threads)
        except ValueError as error:
            raise ValueError(f"{file}: [{path}] {error}") from None

    yield from visit(area, tomllib.loads(file.read_text()))


def _clause(name: str, table: Mapping[str, Any], threads: Mapping[str, str]) -> Clause:
    if unknown := table.keys() - {"says", "covers", "level", "thread", "torch"}:
        raise ValueError(
            f"has the unknown keys {sorted(unknown)}; expected says, covers, level, thread and torch"
        )
    if table.get("level", "extension") != "extension":
        raise ValueError(
            f"has the level {table['level']!r}; only extension is written, "
            "the others follow from the rows of deviations.toml"
        )
    holds_for = table.get("torch", "")
    if not any(surface.is_torch_in(holds_for, version) for version in TORCH_VERSIONS):
        raise ValueError(f"holds for torch {holds_for}, which is none of {', '.join(TORCH_VERSIONS)}")
    level = table.get("level") or ("deviation" if name in threads else "core")
    thread = table.get("thread", threads.get(name, ""))
    return Clause(name, table["says"], tuple(table.get("covers", ())), level, thread, holds_for)
