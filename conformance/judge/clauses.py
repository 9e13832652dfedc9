"""Clauses, the behaviours that are judged: each has a stable id, one sentence and the public names that it covers.

They are in TOML files next to their tests: `amp/grad_scaler.toml` has the clauses `amp.grad_scaler.*`, which
`amp/test_grad_scaler*.py` tests. An id is never renamed or reused. A table may name the thread where the behaviour was
reported, and the torch versions (`torch = ">=2.12"`) that the clause holds for, if not for all.

Each clause has a level:
    core         torch does it, so every subject must
    deviation    an entry of `deviations.toml` belongs to it: a subject does what torch does, or what is better
    extension    torch cannot do it, and only subjects that claim it are judged by it; its table says so. With
                 `until = "2.15"` it is an extension only before torch 2.15, and core or deviation from then on

and a mark, the devices that it can be judged on:
    generic      every device
    accelerator  devices with streams, events, pinned memory and an asynchronous host (`needs = "accelerator"`)
    cuda         torch's names for CUDA (`torch.cuda.amp`), which a subject for another device need not have
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
from conformance.judge.files.rows import all_deviations

HERE = Path(__file__).parents[1]
TORCH_VERSIONS = ("2.11", "2.12", "2.13", "2.14", "2.15")  # supported by this package
# Folders whose tests judge a subject. The other folders test this repository.
AREAS = ("amp", "clients", "cpu", "cuda", "distributed", "dynamo", "nn")
LEVELS = ("core", "deviation", "extension")
MARKS = ("generic", "accelerator", "cuda")


@dataclass(frozen=True)
class Clause:
    id: str
    says: str
    covers: tuple[str, ...]  # surface items (`conformance.judge.surface`)
    level: str  # member of `LEVELS`
    # Where the behaviour was reported or how it was discovered. By default the thread of the clause's deviation.
    thread: str = ""
    torch: str = ""  # the range of torch versions that it holds for
    until: str = ""  # the first torch version that can do what an extension asks
    needs: str = ""  # accelerator, or empty if any device will do

    @property
    def area(self) -> str:
        """The torch module that it belongs to, which is also the name of its TOML file."""
        return next(area for area in _files() if self.id.startswith(area + "."))

    def is_asked_by(self, beginnings: Sequence[str]) -> bool:
        """Return whether the id is one of `beginnings` or begins with one."""
        return any(self.id == beginning or self.id.startswith(f"{beginning}.") for beginning in beginnings)

    @property
    def mark(self) -> str:
        """A member of `MARKS`."""
        return self.needs or ("cuda" if self.area.startswith("cuda.") else "generic")

    @property
    def holds_here(self) -> bool:
        """Whether the clause holds for the installed torch."""
        return surface.is_torch_in(self.torch)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The public names whose methods and parameters the clause covers."""
        return tuple(dict.fromkeys(surface.owner(item) for item in self.covers))


def clause(clause_id: str) -> pytest.MarkDecorator:
    """Mark a test as a test of a clause."""
    return pytest.mark.clause(clause_id)


def clause_of(item: pytest.Item) -> str:
    """Return the id of the clause that a test belongs to, or an empty string for a test of this repository."""
    marker = item.get_closest_marker("clause")
    return marker.args[0] if marker else ""


def parameters_of(item: pytest.Item) -> Mapping[str, Any]:
    """Return the parameters of a test by name."""
    return getattr(getattr(item, "callspec", None), "params", {})


def is_test(nodeid: str) -> bool:
    """Return whether the function of a node id exists, whatever its parameters."""
    file, _, function = nodeid.partition("[")[0].partition("::")
    path = HERE.parent / file
    return path.is_file() and f"def {function.rpartition('::')[2]}(" in path.read_text(encoding="utf-8")


@functools.cache
def all_clauses() -> Mapping[str, Clause]:
    return {entry.id: entry for area, file in _files().items() for entry in _read(area, file)}


def for_report() -> list[dict[str, Any]]:
    """Return every clause as a report has it: its fields, its area, and the supported torch versions it holds for."""
    return [_for_report(entry) for entry in all_clauses().values()]


def _for_report(entry: Clause) -> dict[str, Any]:
    fields = {name: value for name, value in asdict(entry).items() if name != "until" or value}
    del fields["needs"]
    versions = tuple(version for version in TORCH_VERSIONS if surface.is_torch_in(entry.torch, version))
    return fields | {"area": entry.area, "mark": entry.mark, "torch": versions}


@functools.cache
def _files() -> dict[str, Path]:
    files = [file for area in AREAS for file in sorted((HERE / area).rglob("*.toml"))]
    return {".".join(file.relative_to(HERE).with_suffix("").parts): file for file in files}


def _read(area: str, file: Path) -> Iterator[Clause]:
    threads = {clause: row.thread for row in all_deviations().values() for clause in row.clauses}

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
    if unknown := table.keys() - {"says", "covers", "level", "thread", "torch", "until", "needs"}:
        raise ValueError(
            f"has the unknown keys {sorted(unknown)}; expected says, covers, level, thread, torch, until and needs"
        )
    if table.get("level", "extension") != "extension":
        raise ValueError(
            f"has the level {table['level']!r}; only extension is written, "
            "the other levels follow from deviations.toml"
        )
    needs = table.get("needs", "accelerator")
    if needs != "accelerator":
        raise ValueError(f"has needs = {needs!r}; expected accelerator, or no such key if any device will do")
    until = table.get("until", "")
    if until and ("level" not in table or until not in TORCH_VERSIONS):
        raise ValueError(
            f"has until = {until!r}; expected one of {', '.join(TORCH_VERSIONS)} beside level = 'extension'"
        )
    holds_for = table.get("torch", "")
    if not any(surface.is_torch_in(holds_for, version) for version in TORCH_VERSIONS):
        raise ValueError(f"holds for torch {holds_for}, which is none of {', '.join(TORCH_VERSIONS)}")
    is_extension = "level" in table and not (until and surface.is_torch_in(f">={until}"))
    level = "extension" if is_extension else "deviation" if name in threads else "core"
    thread = table.get("thread", threads.get(name, ""))
    return Clause(
        name,
        table["says"],
        tuple(table.get("covers", ())),
        level,
        thread,
        holds_for,
        until,
        table.get("needs", ""),
    )
