"""Levels of clauses: a clause that torch and the exact copy of its source pass is no extension."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from conformance.judge.clauses import all_clauses
from conformance.judge.files import claims_file
from conformance.judge.files.claims import claimed_extensions, claims
from conformance.judge.files.rows import limited_clauses
from conformance.judge.surface import names
from conformance.strength.order import Task
from conformance.strength.worker import Worker

CLAIMANT = "conformance.selftests.claims_all"
EXTENSIONS = [clause.id for clause in all_clauses().values() if clause.level == "extension"]


class Claimant:
    """A subject that claims every extension, in a worker that starts when it is first asked."""

    def __init__(self, spec: str) -> None:
        self.spec = spec

    @functools.cached_property
    def worker(self) -> Worker:
        return Worker(self.spec)

    def passes(self, clause_id: str) -> bool:
        """Return whether the subject is asked for this clause here, and is green."""
        ending = self.worker.judge(Task(self.spec, frozenset({clause_id}), may_be_empty=True))
        return bool(ending.tests_run) and not ending.how


@pytest.fixture(scope="module")
def torch_claimant() -> Iterator[Claimant]:
    claimant = Claimant(CLAIMANT)
    yield claimant
    claimant.worker.close()


@pytest.fixture(scope="module")
def copy_claimant(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Claimant]:
    """The exact copy of torch's source, which Dynamo and torch.export do not know by identity."""
    file = tmp_path_factory.mktemp("claims") / claims_file.NAME
    file.write_text('extensions = ["*"]')
    claimant = Claimant("conformance.exact_copy")
    with pytest.MonkeyPatch.context() as patch:
        # The worker's process reads the variable too.
        patch.setenv("TANDEM_CLAIMS", f"{claimant.spec}={file}")
        yield claimant
        claimant.worker.close()


@pytest.mark.deadline(330)
@pytest.mark.parametrize("clause_id", EXTENSIONS)
def test_torch_or_its_copy_fails_each_extension(
    torch_claimant: Claimant, copy_claimant: Claimant, clause_id: str
) -> None:
    passed = torch_claimant.passes(clause_id) and copy_claimant.passes(clause_id)
    assert not passed, f"torch and its copy pass {clause_id}: it is core, take its level out"


@pytest.mark.deadline(330)
def test_passed_core_clause_is_recognised(torch_claimant: Claimant, copy_claimant: Claimant) -> None:
    assert torch_claimant.passes("amp.grad_scaler.getters.answer")
    assert copy_claimant.passes("amp.grad_scaler.getters.answer")


def test_extensions_are_claimed_by_name() -> None:
    until_later = [clause.id for clause in all_clauses().values() if clause.until]
    everything = {*EXTENSIONS, *until_later, *limited_clauses()}
    assert claimed_extensions("impl") == claimed_extensions(CLAIMANT) == everything
    assert EXTENSIONS
    assert claimed_extensions("torch") == frozenset()
    assert claims("impl") == frozenset(names())


def test_clause_with_deviation_has_its_level() -> None:
    assert all_clauses()["amp.grad_scaler.update.never_dies"].level == "deviation"
