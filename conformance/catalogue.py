"""The catalogue: all clauses under one number, which is raised whenever one comes, goes or changes.

    python -m conformance.catalogue                 each clause: its level, its sentence
    python -m conformance.catalogue --json          with what it covers, its thread, the torch versions it holds for
    python -m conformance.catalogue --raise WHY     give the clauses, as they are now, the next number

Two reports with the same number judged by the same clauses. `catalogue.toml` has what changed with each number, and a
digest of each clause by which a test sees that the number was forgotten.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conformance.judge import clauses

FILE = Path(__file__).with_name("catalogue.toml")
_ABOUT = """\
# Written by `python -m conformance.catalogue --raise WHY`: what changed with each number of the catalogue, newest
# first, and a digest of each clause as it is.
"""


@dataclass(frozen=True)
class Change:
    """What came with one number of the catalogue."""

    version: int
    says: str
    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


@functools.cache
def changes() -> tuple[Change, ...]:
    """Newest first."""
    lists = ("added", "changed", "removed")
    return tuple(
        Change(row["version"], row["says"], *(tuple(row.get(name, ())) for name in lists))
        for row in _read()["changes"]
    )


def version() -> int:
    return changes()[0].version


def digests() -> dict[str, str]:
    """Of each clause as it is: of all that it says about itself."""
    return {
        row["id"]: hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:12]
        for row in sorted(clauses.for_report(), key=lambda row: row["id"])
    }


def difference(then: Mapping[str, str], now: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """What was added, changed and removed between two lists of digests."""
    return {
        "added": tuple(sorted(now.keys() - then.keys())),
        "changed": tuple(sorted(name for name in now.keys() & then.keys() if now[name] != then[name])),
        "removed": tuple(sorted(then.keys() - now.keys())),
    }


def recorded() -> dict[str, str]:
    """The digests that the newest number was given for."""
    return _read()["clauses"]


def as_dict() -> dict[str, Any]:
    """The catalogue for other programs; each clause with the number under which it last changed, 1 if it never did."""
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
        "changes": [asdict(change) for change in changes()],
    }


def raised(why: str) -> str:
    """The file under the next number.

    Raises:
        ValueError: no clause differs from what is recorded.
    """
    now = digests()
    found = difference(recorded(), now)
    if not any(found.values()):
        raise ValueError(f"no clause has changed since catalogue {version()}; it keeps its number")
    return _written([Change(version() + 1, why, **found), *changes()], now)


def _written(rows: Sequence[Change], known: Mapping[str, str]) -> str:
    lines = [_ABOUT]
    for row in rows:
        lines += ["[[changes]]", f"version = {row.version}", f"says = {json.dumps(row.says)}"]
        for name in ("added", "changed", "removed"):
            if ids := getattr(row, name):
                lines += [f"{name} = [", *(f"    {json.dumps(each)}," for each in ids), "]"]
        lines.append("")
    lines += ["[clauses]", *(f"{json.dumps(name)} = {json.dumps(digest)}" for name, digest in known.items())]
    return "\n".join(lines) + "\n"


@functools.cache
def _read() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text())


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.catalogue",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--json", action="store_true", help="print it as JSON")
    kinds.add_argument("--raise", dest="why", metavar="WHY", help="record the clauses under the next number")
    options = parser.parse_args(words)
    if options.why:
        try:
            FILE.write_text(raised(options.why))
        except ValueError as error:
            parser.error(str(error))
    elif options.json:
        print(json.dumps(as_dict(), indent=1))  # noqa: T201 the command's output
    else:
        for row in as_dict()["clauses"]:
            print(f"{row['id']} ({row['level']})\n    {row['says']}")  # noqa: T201 the command's output
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
