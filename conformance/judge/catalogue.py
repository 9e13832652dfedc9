"""The numbered catalogue of clauses. Its number rises when a clause is added, changed or removed."""

from __future__ import annotations

import functools
import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conformance.judge import clauses

FILE = clauses.HERE / "catalogue.toml"


@dataclass(frozen=True)
class CatalogueVersion:
    """The changes of one number of the catalogue."""

    version: int
    says: str
    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


def changes() -> tuple[CatalogueVersion, ...]:
    """Return all numbers with their changes, newest first."""
    return changes_in(read_catalogue())


def changes_in(file: Mapping[str, Any]) -> tuple[CatalogueVersion, ...]:
    lists = ("added", "changed", "removed")
    return tuple(
        CatalogueVersion(row["version"], row["says"], *(tuple(row.get(name, ())) for name in lists))
        for row in file["changes"]
    )


def version() -> int:
    return changes()[0].version


def is_due() -> bool:
    """Return whether the clauses differ from those that have the newest number."""
    return read_catalogue()["digest"] != digest_of(digests(clauses.for_report(), clauses.TORCH_VERSIONS))


def digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def digests(rows: Sequence[Mapping[str, Any]], supported: Sequence[str]) -> dict[str, str]:
    """Return a digest of all fields of each clause.

    The digest includes the supported versions of torch that the clause does not hold for, so that support of a new
    version changes only the clauses that do not hold for it. It does not depend on the installed torch. A mark is left
    out, because it changes who is judged by a clause, and not what the clause requires.
    """

    def lasting(row: Mapping[str, Any]) -> dict[str, Any]:
        level = {"level": "extension"} if row.get("until") else {}
        fields = {key: value for key, value in row.items() if key != "mark"}
        return {**fields, **level, "torch": sorted(set(supported) - set(row["torch"]))}

    return {row["id"]: digest_of(lasting(row)) for row in rows}


def difference(then: Mapping[str, str], now: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the ids that were added, changed and removed between two mappings of digests."""
    return {
        "added": tuple(sorted(now.keys() - then.keys())),
        "changed": tuple(sorted(name for name in now.keys() & then.keys() if now[name] != then[name])),
        "removed": tuple(sorted(then.keys() - now.keys())),
    }


def as_dict() -> dict[str, Any]:
    """Return the catalogue as JSON data. `since` is the number with which a clause last changed, or 1."""
    since = {
        name: change.version for change in reversed(changes()) for name in (*change.added, *change.changed)
    }
    return {
        "catalogue": version(),
        "torch": list(clauses.TORCH_VERSIONS),
        "clauses": [
            row | {"torch": list(row["torch"]), "since": since.get(row["id"], 1)}
            for row in clauses.for_report()
        ],
    }


@functools.cache
def read_catalogue() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text())
