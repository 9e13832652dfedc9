"""Levels of clauses: what torch passes is no extension."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.faults.order import Task
from conformance.faults.worker import Worker
from conformance.judge.claims import claimed_extensions, claims
from conformance.judge.clauses import _read, all_clauses
from conformance.judge.rows import limited_clauses
from conformance.judge.surface import names

CLAIMANT = "conformance.selftests.claims_all"
EXTENSIONS = [clause.id for clause in all_clauses().values() if clause.level == "extension"]


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker(CLAIMANT) as worker:
        yield worker


def passes(worker: Worker, clause_id: str) -> bool:
    """Whether torch, asked as a subject that claims every extension, is green in a clause that can be asked here."""
    ending = worker.judge(Task(CLAIMANT, frozenset({clause_id}), may_be_empty=True))
    return bool(ending.asked) and not ending.how


@pytest.mark.deadline(330)
@pytest.mark.parametrize("clause_id", EXTENSIONS)
def test_torch_passes_no_extension(worker: Worker, clause_id: str) -> None:
    assert not passes(worker, clause_id), f"torch passes {clause_id}: it is core, take its level out"


@pytest.mark.deadline(330)
def test_what_torch_passes_is_seen(worker: Worker) -> None:
    assert passes(worker, "amp.grad_scaler.getters.answer")


def test_extensions_are_claimed_by_name_alone() -> None:
    everything = {*EXTENSIONS, *limited_clauses()}
    assert claimed_extensions("impl") == claimed_extensions(CLAIMANT) == everything
    assert EXTENSIONS
    assert claimed_extensions("torch") == frozenset()
    assert claims("impl") == frozenset(names())


@pytest.mark.parametrize(
    ("written", "level"), [("", "core"), ('level = "extension"', "extension"), ('level = "core"', None)]
)
def test_the_level_of_a_clause(tmp_path: Path, written: str, level: str | None) -> None:
    file = tmp_path / "area.toml"
    file.write_text(f'[it.does]\n{written}\nsays = "It does."')
    if level is None:
        with pytest.raises(ValueError, match="only extension is written"):
            list(_read("area", file))
    else:
        assert [clause.level for clause in _read("area", file)] == [level]


def test_a_row_makes_a_deviation() -> None:
    assert all_clauses()["amp.grad_scaler.update.never_dies"].level == "deviation"
