"""The catalogue of clauses: its number, what changed with it, and what is said of each clause."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from conformance import catalogue as command
from conformance.cli.options import MARKS
from conformance.judge import catalogue, clauses, surface
from conformance.judge.catalogue import CatalogueVersion
from conformance.judge.files.rows import all_deviations

ROOT = Path(__file__).parents[2]


def test_version_was_raised_with_clauses() -> None:
    assert not catalogue.is_due(), (
        f"clauses differ from catalogue {catalogue.version()}: "
        'python -m conformance.catalogue --raise "what was changed, and why" gives them the next number'
    )


def test_changes_give_recorded_clauses() -> None:
    numbers = [change.version for change in catalogue.changes()]
    assert numbers == list(range(len(numbers), 0, -1))
    for change in catalogue.changes()[:-1]:
        assert change.says
        assert change.added or change.changed or change.removed
        assert not set(change.added) & set(change.removed)


@pytest.mark.parametrize("key", ["says", "covers", "area", "thread", "torch"])
def test_every_property_of_clause_changes_digest(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    changed, *others = clauses.for_report()
    monkeypatch.setattr(clauses, "for_report", lambda: [changed | {key: "something else"}, *others])
    assert catalogue.is_due()
    then, now = (
        catalogue.digests(rows, clauses.TORCH_VERSIONS) for rows in ([changed, *others], clauses.for_report())
    )
    assert catalogue.difference(then, now) == {"added": (), "changed": (changed["id"],), "removed": ()}


def test_mark_does_not_change_digest() -> None:
    first, *others = clauses.for_report()
    rows = [first | {"mark": "accelerator"}, *others]
    assert {clause["mark"] for clause in others} == set(clauses.MARKS) == set(MARKS)
    assert catalogue.digests(rows, clauses.TORCH_VERSIONS) == catalogue.digests(
        [first, *others], clauses.TORCH_VERSIONS
    )


def test_new_torch_version_changes_only_clauses_that_end_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = {"always": "", "began": ">=2.12", "ended": "<9.1"}
    monkeypatch.setattr(
        clauses,
        "all_clauses",
        lambda: {
            n: clauses.Clause(f"amp.grad_scaler.{n}", n, (), "core", torch=r) for n, r in ranges.items()
        },
    )
    digests = []
    for newest in ("9.0", "9.1"):
        monkeypatch.setattr(clauses, "TORCH_VERSIONS", ("2.11", "2.12", newest))
        digests.append(catalogue.digests(clauses.for_report(), clauses.TORCH_VERSIONS))
    assert catalogue.difference(*digests)["changed"] == ("amp.grad_scaler.ended",)


def test_next_version_lists_added_removed_and_changed_clauses(monkeypatch: pytest.MonkeyPatch) -> None:
    first = tomllib.loads(command._to_toml([CatalogueVersion(1, "The first.")], "0"))
    rows = [{"id": name, "says": name, "torch": ["2.11"]} for name in "abc"]
    then = {"torch": ["2.11"], "clauses": [row | {"since": 1} for row in rows]}
    monkeypatch.setattr(clauses, "TORCH_VERSIONS", ("2.11",))
    monkeypatch.setattr(clauses, "for_report", lambda: rows)
    with pytest.raises(ValueError, match="no clause has changed since catalogue 1"):
        command.text_of_next("nothing", first, then)
    now = [{"id": "a", "says": "a"}, {"id": "b", "says": "B"}, {"id": "d" * 200, "says": "d"}]
    monkeypatch.setattr(clauses, "for_report", lambda: [row | {"torch": ["2.11"]} for row in now])
    written = tomllib.loads(command.text_of_next('said "so" — once', first, then))
    assert catalogue.changes_in(written) == (
        CatalogueVersion(2, 'said "so" — once', ("d" * 200,), ("b",), ("c",)),
        CatalogueVersion(1, "The first."),
    )
    monkeypatch.setattr(catalogue, "read_catalogue", lambda: written)
    assert not catalogue.is_due()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the clauses of another commit take a git checkout")
def test_previous_version_is_read_from_its_commit() -> None:
    file, then = command._before()
    assert file["changes"]
    assert {row["id"] for row in then["clauses"]} & clauses.all_clauses().keys()


def test_clause_has_thread_of_its_deviation() -> None:
    rows = {row["id"]: row for row in catalogue.as_dict()["clauses"]}
    assert rows.keys() == clauses.all_clauses().keys()
    for row in all_deviations().values():
        assert all(rows[clause]["thread"] for clause in row.clauses)
    assert all(row["torch"] and set(row["torch"]) <= set(clauses.TORCH_VERSIONS) for row in rows.values())
    [required] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    oldest, newest = clauses.TORCH_VERSIONS[0], clauses.TORCH_VERSIONS[-1]
    major, minor = map(int, newest.split("."))
    assert required == f"torch>={oldest},<{major}.{minor + 1}"


@pytest.mark.parametrize(
    ("table", "reported"),
    [
        ('[x]\nsays = "It does."\nlevels = "core"', "has the unknown keys ['levels']"),
        ('[x]\nsays = "step returns None."\nneeds = "cuda"', "has needs = 'cuda'; expected accelerator"),
        ('[x]\nsays = "step returns None."\ntorch = "<1.0"', "holds for torch <1.0, which is none of"),
        (
            '[x]\nsays = "step returns None."\ntorch = "~=2.12"',
            "'~=2.12'; expected >=MAJOR.MINOR or <MAJOR.MINOR",
        ),
    ],
)
def test_mistake_in_clause_is_reported(tmp_path: Path, table: str, reported: str) -> None:
    (tmp_path / "x.toml").write_text(table)
    with pytest.raises(ValueError, match=r"x\.toml: ") as caught:
        list(clauses._read("amp", tmp_path / "x.toml"))
    assert reported in str(caught.value)


def test_clause_of_other_torch_versions_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.toml").write_text('[x]\nsays = "step returns None."\ntorch = ">=2.11,<2.13"')
    [clause] = clauses._read("amp", tmp_path / "x.toml")
    for version, holds in {"2.9.0": False, "2.11.1": True, "2.12.0a0+git": True, "2.13.0+cpu": False}.items():
        monkeypatch.setattr(surface.torch, "__version__", version)
        assert clause.holds_here == holds


def test_catalogue_is_printed_as_json_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("jinja2", reason="the extra `conformance` of pyproject.toml brings what draws pages")
    command = [sys.executable, "-m", "conformance.catalogue"]
    printed = subprocess.run(
        [*command, "--json"], cwd=ROOT, capture_output=True, text=True, timeout=100, check=True
    )
    assert json.loads(printed.stdout) == json.loads(json.dumps(catalogue.as_dict()))
    from conformance.report.catalogue_page import write_catalogue  # noqa: PLC0415 (needs jinja2)

    write_catalogue(catalogue.as_dict(), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    for row in catalogue.as_dict()["clauses"]:
        assert f'id="{row["id"]}"' in page
    assert "<td>all</td>" in page
