"""The published packages under `conformance/subjects`: what is said of them without having them."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
from pathlib import Path

import pytest
import torch

from conformance.judge.claims_file import NAME, read
from conformance.judge.clauses import all_clauses
from conformance.subjects.__main__ import HERE, RESULTS, SUBJECTS, counted, folders, table
from conformance.subjects.source import Instead, definitions

ROOT = HERE.parents[1]
NOTED = json.loads(RESULTS.read_text())


@pytest.mark.parametrize("name", SUBJECTS)
def test_each_expected_failure_leads_to_its_proof_and_each_proof_is_of_one(name: str) -> None:
    file = read(HERE / name / NAME)
    assert file.problems == ()
    proofs = HERE / name / "proofs.py"
    kept = {
        f"{proofs.relative_to(ROOT)}::{node.name}"
        for node in ast.parse(proofs.read_text()).body
        if isinstance(node, ast.FunctionDef) and "PROOFS.keep" in map(ast.unparse, node.decorator_list)
    }
    assert {row.link for row in file.expectations} == kept


@pytest.mark.parametrize("name", SUBJECTS)
def test_what_is_noted_is_what_is_expected(name: str) -> None:
    rows = {row.test.partition("[")[0] for row in read(HERE / name / NAME).expectations}
    broken = NOTED[name]["broken"]
    assert {test for tests in broken.values() for test in tests} == rows - _OF_NO_CLAUSE
    assert broken.keys() <= all_clauses().keys()


_SURFACE = "conformance/test_surface.py::"
_OF_NO_CLAUSE = {
    f"{_SURFACE}{name}" for name in ("test_name_that_others_read_exists", "test_signature_is_torchs")
}


def test_readme_has_the_table_of_what_is_noted() -> None:
    assert "\n".join(table(NOTED)) in (ROOT / "README.md").read_text()


def test_what_is_noted_was_judged_at_the_pinned_versions() -> None:
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (HERE / "requirements.txt").read_text(), re.MULTILINE))
    noted = {read(HERE / name / NAME).distribution: row["version"] for name, row in NOTED.items()}
    assert noted.items() <= pins.items()
    assert NOTED.keys() == set(SUBJECTS)


def test_only_the_folders_of_a_subjects_names_are_asked() -> None:
    assert folders("torchtitan") == ["conformance/test_surface.py", "conformance/nn"]
    assert "conformance/amp" in folders("torch_npu")


def test_clauses_are_counted_by_the_worst_that_was_seen() -> None:
    first, second, third = list(all_clauses())[:3]
    tests = [
        {"clause": clause, "nodeid": str(number), "outcome": outcome}
        for number, (clause, outcome) in enumerate(
            [
                (first, "passed"),
                (first, "expected"),
                (second, "not provided"),
                (third, "known"),
                ("", "failed"),
            ]
        )
    ]
    report = {"tests": tests, "began": "2026-01-02T03:04:05", "profile": "quick"}
    found = counted(report | {"environment": {"packages": {"torch": "2.13.0"}}})
    assert found["clauses"] == {"expected": 1, "known": 1}
    assert found["tests"] == {"expected": 1, "known": 1, "passed": 1}
    assert found["broken"] == {first: ["1"]}


SOURCE = """
import theirs
import torch
from math import inf

limit: theirs.Limit = theirs.LIMIT

def total(tensors: theirs.Tensors) -> theirs.Norm:
    if not tensors[0].is_npu:
        raise ValueError("npu tensors, please")
    found = torch.zeros((), device="npu").pin_memory()
    for tensor in tensors:
        found = found + helper(tensor)
    theirs.dist.all_reduce(found)
    return found, inf

def helper(tensor):
    return tensor.sum()
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs.py").write_text(SOURCE)
    (tmp_path / "theirs-1.0.dist-info").mkdir()
    (tmp_path / "theirs-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("installed")
def test_definitions_run_as_they_are_but_for_what_is_said() -> None:
    reduced: list[torch.Tensor] = []
    instead = Instead(
        objects={"theirs.dist.all_reduce": reduced.append},
        texts={"npu": "cpu"},
        attributes={"is_npu": "is_cpu"},
        left_out=["pin_memory"],
    )
    total = definitions("theirs", "theirs.py", ["total", "helper"], instead).total
    assert total([torch.ones(3), torch.ones(2)]) == (5.0, float("inf"))
    assert reduced == [torch.tensor(5.0)]


@pytest.mark.usefixtures("installed")
def test_a_definition_that_a_version_lacks_is_reported() -> None:
    with pytest.raises(LookupError, match="of theirs does not define mean in this version"):
        definitions("theirs", "theirs.py", ["total", "mean"], Instead())
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        definitions("not-theirs", "theirs.py", ["total"], Instead())
