"""The catalogue of clauses: its digest, and what it says about each clause."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from conformance.cli.options import MARKS
from conformance.judge import catalogue, clauses, surface
from conformance.judge.files.rows import all_deviations
from conformance.report.page import write_catalogue
from conformance.selftests.processes import ROOT, run_python


@pytest.mark.parametrize("key", ["says", "covers", "area", "thread", "torch"])
def test_every_property_of_clause_changes_digest(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    before = catalogue.digest()
    changed, *others = clauses.for_report()
    monkeypatch.setattr(clauses, "for_report", lambda: [changed | {key: "something else"}, *others])
    assert catalogue.digest() != before


def test_mark_does_not_change_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    before = catalogue.digest()
    first, *others = clauses.for_report()
    assert {clause["mark"] for clause in others} == set(clauses.MARKS) == set(MARKS)
    monkeypatch.setattr(clauses, "for_report", lambda: [first | {"mark": "accelerator"}, *others])
    assert catalogue.digest() == before


@pytest.mark.parametrize(("torch", "changes"), [("", False), (">=2.12", False), ("<9.1", True)])
def test_new_torch_version_changes_digest_only_if_a_clause_ends_before_it(
    monkeypatch: pytest.MonkeyPatch, torch: str, changes: bool
) -> None:
    clause = clauses.Clause("amp.grad_scaler.x", "x", (), "core", torch=torch)
    monkeypatch.setattr(clauses, "all_clauses", lambda: {"x": clause})
    digests = set()
    for newest in ("9.0", "9.1"):
        monkeypatch.setattr(clauses, "TORCH_VERSIONS", ("2.11", "2.12", newest))
        digests.add(catalogue.digest())
    assert (len(digests) == 2) == changes


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


def read_clause(folder: Path, keys: str) -> clauses.Clause:
    file = folder / "x.toml"
    file.write_text(f'[x]\nsays = "step returns None."\n{keys}')
    [clause] = clauses._read("amp", file)
    return clause


@pytest.mark.parametrize(
    ("keys", "reported"),
    [
        ('levels = "core"', "has the unknown keys ['levels']"),
        ('level = "core"', "has the level 'core'; only extension is written"),
        ('needs = "cuda"', "has needs = 'cuda'; expected accelerator"),
        ('torch = "<1.0"', "holds for torch <1.0, which is none of"),
        ('torch = "~=2.12"', "'~=2.12'; expected >=MAJOR.MINOR or <MAJOR.MINOR"),
        ('until = "2.15"', "has until = '2.15'; expected one of 2.11, "),
        ('level = "extension"\nuntil = "2.1"', "has until = '2.1'; expected one of 2.11, "),
    ],
)
def test_mistake_in_clause_is_reported(tmp_path: Path, keys: str, reported: str) -> None:
    with pytest.raises(ValueError, match=r"x\.toml: ") as caught:
        read_clause(tmp_path, keys)
    assert reported in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "level"),
    [
        ("", "core"),
        ('level = "extension"', "extension"),
        ('level = "extension"\nuntil = "2.11"', "core"),
    ],
)
def test_clause_level(tmp_path: Path, keys: str, level: str) -> None:
    assert read_clause(tmp_path, keys).level == level


def test_clause_of_other_torch_versions_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clause = read_clause(tmp_path, 'torch = ">=2.11,<2.13"')
    for version, holds in {"2.9.0": False, "2.11.1": True, "2.12.0a0+git": True, "2.13.0+cpu": False}.items():
        monkeypatch.setattr(surface.torch, "__version__", version)
        assert clause.holds_here == holds


def test_catalogue_is_printed_as_json_and_drawn(tmp_path: Path) -> None:
    printed = run_python("-m", "conformance.catalogue", "--json")
    assert json.loads(printed.stdout) == json.loads(json.dumps(catalogue.as_dict()))
    write_catalogue(catalogue.as_dict(), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    for row in catalogue.as_dict()["clauses"]:
        assert f'id="{row["id"]}"' in page
    assert "<td>all</td>" in page
