"""Record of the versions that were judged: `ci/runs.toml`, and the table in README that is made from it.

`ci/check --record report/report.json` adds the areas that a report has judged. A later report of the same torch, Python
and subject replaces them.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from _environment import ROOT

SOURCE = "ci/runs.toml"
PAGE = "README.md"
_HEAD = (
    "# Judged versions, by torch, Python and subject. Written by `ci/check --record REPORT`. Do not edit.\n"
)
_AREAS = {
    "amp": ("amp", "cpu", "cuda"),
    "clipping": ("nn",),
    "compiled optimizers": ("dynamo",),
    "sharding": ("distributed",),
}
_FAILED = ("failed", "hang", "crash", "stale", "expected")
_UNTESTED = ("not provided", "not claimed", "unavailable", "reference cannot run here")

Runs = dict[str, dict[str, dict[str, Any]]]


def recorded() -> Runs:
    """Return the facts of each area, by run and area."""
    return tomllib.loads((ROOT / SOURCE).read_text())


def record(file: Path) -> None:
    """Add the areas that a report has judged completely.

    Raises:
        ValueError: the suite had uncommitted changes, or the run selected tests or ended early.
    """
    report = json.loads(file.read_text())
    commit = report["suite"]["commit"]
    if commit.endswith("-dirty") or not commit:
        raise ValueError(f"{file}: only runs of a commit are recorded; got {commit!r}")
    if report["ended_early"] or report["is_narrowed"]:
        raise ValueError(
            f"{file}: only complete runs are recorded, but this one selected tests or ended early"
        )
    environment, devices = report["environment"], ", ".join(report["devices"])
    torch = environment["packages"]["torch"].partition("+")[0]
    name = f"torch {torch}, Python {environment['python']}, {report['subject']} on {devices}"
    runs = recorded()
    runs.setdefault(name, {}).update(
        {
            area: facts | {"profile": report["profile"], "day": report["began"][:10], "commit": commit[:8]}
            for area, facts in _areas(report).items()
        }
    )
    (ROOT / SOURCE).write_text(_HEAD + "".join(_section(*run) for run in sorted(runs.items())))


def _areas(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    areas: dict[str, dict[str, Any]] = {}
    for area, folders in _AREAS.items():
        tests = [test for test in report["tests"] if test["clause"].partition(".")[0] in folders]
        if {test["clause"].partition(".")[0] for test in tests} != {*folders}:
            continue
        areas[area] = {
            "clauses": len({test["clause"] for test in tests if test["outcome"] not in _UNTESTED}),
            "tests": sum(test["outcome"] not in _UNTESTED for test in tests),
            "failed": sorted({test["clause"] for test in tests if test["outcome"] in _FAILED}),
        }
    return areas


def _section(name: str, areas: dict[str, dict[str, Any]]) -> str:
    lines = [
        f"{json.dumps(area)} = {{ "
        + ", ".join(f"{key} = {json.dumps(value)}" for key, value in facts.items())
        + " }"
        for area, facts in areas.items()
    ]
    return f"\n[{json.dumps(name)}]\n" + "\n".join(lines) + "\n"


def page() -> str:
    """Return README with the table of the recorded runs."""
    return with_block(PAGE, (ROOT / PAGE).read_text(), "runs", _table(recorded()))


def with_block(page: str, text: str, name: str, content: str) -> str:
    """Return the text of a page with `content` between `<!-- name -->` and `<!-- end of name -->`.

    Raises:
        ValueError: the page has no such block.
    """
    block = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end of {name} -->)", re.DOTALL)
    if not block.search(text):
        raise ValueError(f"{page} has no block between `<!-- {name} -->` and `<!-- end of {name} -->`")
    return block.sub(lambda _: content, text)


def _table(runs: Runs) -> str:
    rows = [f"| run | {' | '.join(_AREAS)} |", "|---" * (len(_AREAS) + 1) + "|"]
    rows += [
        f"| {name} | {' | '.join(_cell(areas[area]) if area in areas else 'not run' for area in _AREAS)} |"
        for name, areas in runs.items()
    ]
    return "\n".join(rows) + "\n"


def _cell(facts: dict[str, Any]) -> str:
    return f"{facts['clauses'] - len(facts['failed'])} of {facts['clauses']}"
