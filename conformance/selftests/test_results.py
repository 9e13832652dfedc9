"""Summary of a report's tests: the broken clauses of a subject, and the names that it lacks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conformance.judge import clauses
from conformance.judge.files.claims import claims, is_claimed
from conformance.judge.judgement import _axes
from conformance.judge.library import NotProvided, load_library
from conformance.judge.outcome import differences, observe
from conformance.judge.results import BAD_INPUT, Recorder, broken_clauses
from conformance.ranks import RankPool
from conformance.selftests.misbehaving import write_files
from conformance.selftests.processes import run_pytest

FIRST, SECOND, THIRD = (clause["id"] for clause in clauses.for_report()[:3])


def entry(nodeid: str, clause: str, outcome: str) -> dict[str, Any]:
    reason = f"AssertionError: the two differ:\n  - value: of {nodeid}\n  - raised nothing"
    return {"nodeid": nodeid, "clause": clause, "outcome": outcome} | {
        "reason": reason,
        "replay": f"pytest {nodeid}",
    }


def test_broken_clause_is_reported_once_most_broken_first() -> None:
    tests = [
        entry("a", FIRST, "failed"),
        entry("b", FIRST, "passed"),
        entry("c", SECOND, "hang"),
        entry("d", SECOND, "failed"),
        entry("own", "", "failed"),
        entry("e", FIRST, "unavailable"),
        entry("f", THIRD, "passed"),
        entry("g", THIRD, "known"),
    ]
    broken = broken_clauses(tests)
    assert [clause.name for clause in broken] == [SECOND, "own", FIRST]
    reported = {clause.name: clause for clause in broken}
    assert reported[FIRST].count == "failed in 1 of 3 tests"
    assert reported[FIRST].replay == "pytest a"
    assert reported[FIRST].why == "value: of a"
    assert reported[SECOND].count == "failed, hang in 2 of 2 tests"
    assert reported[SECOND].says == next(c["says"] for c in clauses.for_report() if c["id"] == SECOND)
    assert reported["own"].count == "failed in 1 of 1 test"


def test_equally_broken_clauses_keep_catalogue_order() -> None:
    broken = broken_clauses([entry(name, name, "failed") for name in (SECOND, FIRST)])
    assert [clause.name for clause in broken] == [FIRST, SECOND]


@pytest.mark.parametrize(
    ("reason", "why"),
    [
        ("ValueError: no\nmore", "ValueError: no"),
        ("", "no reason is known"),
        ("AssertionError: assert 1 == 2\n  - 2\n  + 1", "AssertionError: assert 1 == 2"),
        ("AssertionError:", "AssertionError:"),
        ("E:\n - a " + "x " * 300, "a " + "x " * 98 + "…"),
    ],
)
def test_failure_is_summarised_in_one_line(reason: str, why: str) -> None:
    assert broken_clauses([entry("a", FIRST, "failed") | {"reason": reason}])[0].why == why


def test_message_to_dead_worker_does_not_end_run() -> None:
    sent: list[str] = []

    def sendcommand(name: str, **_: object) -> None:
        sent.append(name)
        raise OSError("cannot send (already closed?)")

    node = SimpleNamespace(sendcommand=sendcommand)
    Recorder.pytest_configure_node(node)
    node.sendcommand("runtests", indices=[7])
    assert sent == ["runtests"]


def test_missing_name_is_no_outcome() -> None:
    lacking = load_library("math")
    with pytest.raises(NotProvided, match="math does not provide amp"):
        observe(lambda: lacking.amp.GradScaler("cpu"))


def warning_at(stacklevel: int) -> Callable[[], None]:
    """A function of a library that is not the judge's."""
    run: dict[str, Any] = {}
    source = f"import warnings\ndef call(): warnings.warn('told', stacklevel={stacklevel})"
    exec(compile(source, "/elsewhere/library.py", "exec"), run)
    return run["call"]


def test_warning_with_other_place_than_reference_is_reported() -> None:
    inside, at_the_caller = (observe(lambda level=level: warning_at(level)()) for level in (1, 2))
    assert [*differences(inside, at_the_caller)] == []
    [reported] = differences(at_the_caller, inside)
    assert reported.startswith("warned ('UserWarning', 'told') at a line of its own")


def test_injected_missing_name_is_still_claimed() -> None:
    spec = "torch+lack:amp.grad_scaler.OptState"
    assert claims(spec) == claims("torch")
    assert is_claimed(load_library(spec), "amp.grad_scaler.OptState")


SUBJECTS = {
    "empty": ("", 1, "verdict: red"),
    "quits": ("import sys; sys.exit(0)", BAD_INPUT, "the subject 'quits' cannot be loaded (SystemExit: 0)"),
    "patches": (
        "import torch; torch.nn.utils.clip_grad_value_ = lambda *_: None",
        BAD_INPUT,
        "replaced objects of torch (nn.utils.clip_grad_value_)",
    ),
    "patches_what_is_imported_late": (
        "import torch._dynamo.variables.optimizer as one\n"
        "one.OptimizerVariable = type('OptimizerVariable', (one.OptimizerVariable,), {'__module__': one.__name__})",
        BAD_INPUT,
        "replaced objects of torch (dynamo.OptimizerVariable)",
    ),
}


@pytest.mark.parametrize("name", list(SUBJECTS))
def test_unjudgeable_subject_ends_in_error(tmp_path: Path, name: str) -> None:
    source, code, reported = SUBJECTS[name]
    write_files(tmp_path, {f"{name}/__init__.py": source})
    words = ("--profile", "quick", "--subject", name, "conformance/nn/utils/test_clip_grad_value.py")
    ended = run_pytest(*words, packages=[tmp_path])
    assert ended.returncode == code, ended.stdout
    assert reported in ended.stdout + ended.stderr


def test_file_that_workers_cannot_import_is_red(tmp_path: Path) -> None:
    write_files(tmp_path, {"test_other.py": "import missing_package"})
    words = ("-n1", "--profile=quick", "--subject=torch", "conformance/nn/utils/test_clip_grad_value.py")
    ended = run_pytest(*words, str(tmp_path / "test_other.py"))
    assert ended.returncode == BAD_INPUT, ended.stdout
    assert (
        "cannot be collected and did not run: ModuleNotFoundError: No module named 'missing_package'"
        in ended.stdout
    )
    assert "verdict: red" in ended.stdout


@pytest.mark.parametrize("dtype", ["torch.float16"])
def test_report_contains_number_of_ranks(
    request: pytest.FixtureRequest, ranks: Callable[..., RankPool], dtype: str
) -> None:
    assert _axes(request.node) == {"dtype": "float16"}
    ranks(2)
    assert _axes(request.node) == {"dtype": "float16", "device": "cpu", "world_size": "2"}
    ranks(1)
    assert _axes(request.node) == {"dtype": "float16"}
