"""The published packages under `conformance/subjects`: their files and table, without the packages."""

from __future__ import annotations

import ast
import importlib.metadata
import re
from pathlib import Path

import pytest
import torch

from conformance.judge.clauses import all_clauses, is_test
from conformance.judge.files.claims_file import NAME, read
from conformance.selftests.misbehaving import write_files
from conformance.subjects.__main__ import HERE, PAGE, SUBJECTS, folders, noted, row
from conformance.subjects.package_source import Instead, definitions

ROOT = HERE.parents[1]
NOTED = {
    name: match[1].rpartition(" ")
    for name in SUBJECTS
    if (
        match := re.search(
            rf"^\| ([^|]+) \|.*\(\.\./conformance/subjects/{name}/proofs\.py\) \|$", PAGE.read_text(), re.M
        )
    )
}


@pytest.mark.parametrize("name", SUBJECTS)
def test_each_expected_failure_has_its_proof(name: str) -> None:
    file = read(HERE / name / NAME)
    assert file.problems == ()
    proofs = HERE / name / "proofs.py"
    reproductions = {
        f"{proofs.relative_to(ROOT)}::{node.name}"
        for node in ast.parse(proofs.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(decorator).endswith(".keep") for decorator in node.decorator_list)
    }
    assert {row.link for row in file.expectations} == reproductions
    tests = {expected.test for expected in file.expectations if expected.test}
    assert [test for test in tests if not is_test(test)] == []


def test_recorded_subjects_were_judged_at_pinned_versions() -> None:
    files = (HERE / "requirements.txt", HERE.parent / "clients" / "requirements.txt")
    text = "".join(file.read_text() for file in files)
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", text, re.MULTILINE))
    assert NOTED.keys() == set(SUBJECTS)
    assert {distribution: version for distribution, _, version in NOTED.values()}.items() <= pins.items()


def test_subject_is_judged_by_folders_of_its_names() -> None:
    assert folders("torchtitan") == ["conformance/test_surface.py", "conformance/nn"]
    assert "conformance/amp" in folders("torch_npu")


def test_clauses_are_counted_by_worst_outcome() -> None:
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
    line = row("torchtitan", "9.9", {"tests": tests})
    assert "| 1 of 2, 1 in torch's way | 2 of 3, 1 in torch's way | [1](" in line
    again = noted(PAGE.read_text(), {"torchtitan": line})
    assert set(again.splitlines()) - set(PAGE.read_text().splitlines()) == {line}


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
    metadata = "Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n"
    write_files(tmp_path, {"theirs.py": SOURCE, "theirs-1.0.dist-info/METADATA": metadata})
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("installed")
def test_definitions_run_with_requested_replacements() -> None:
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
def test_missing_definition_of_version_is_reported() -> None:
    with pytest.raises(LookupError, match="of theirs does not define mean in this version"):
        definitions("theirs", "theirs.py", ["total", "mean"], Instead())
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        definitions("not-theirs", "theirs.py", ["total"], Instead())
