"""Accounts of clauses without tests: every clause has an outcome, and tests that cannot pass are not scheduled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from conformance.judge.accounting import NotRun, clauses_of_file, known_before
from conformance.judge.clauses import HERE, all_clauses
from conformance.judge.sandbox.trial import SubjectInfo
from conformance.report.verdict import parts
from conformance.selftests.misbehaving import write_files
from conformance.selftests.test_misbehaving_subjects import judged

CLIP = "nn.utils.clip_grad_norm_"
OVERLAP = "nn.utils.clip_grad.clip_grad_norm_.extreme_gradients_survive"
VALUE, VALUE_CLAUSE = (
    "conformance/nn/utils/test_clip_grad_value.py",
    "nn.utils.clip_grad.clip_grad_value_.clamps",
)

pytestmark = pytest.mark.deadline(220)


ONLY_CLIP = """
import torch

def clip_grad_norm_(parameters, max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None):
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
"""


def judge(folder: Path, words: Sequence[str] = ()) -> tuple[int, dict[str, Any]]:
    """Judge a package that has only `clip_grad_norm_`, in one process, and return the exit code and the report."""
    write_files(folder / "onlyclip", {"__init__.py": "", "nn/__init__.py": "", "nn/utils.py": ONLY_CLIP})
    report = judged("onlyclip", folder, *words)
    return report.pop("exit code"), report


def test_package_with_one_function_is_judged_by_its_tests_only(tmp_path: Path) -> None:
    code, report = judge(
        tmp_path,
        ["conformance/nn", "conformance/amp", "conformance/dynamo", "-k", "test_extreme or test_total"],
    )
    assert code == 0
    files = {test["nodeid"].partition("::")[0] for test in report["tests"]}
    assert files
    assert {Path(file).parent.name for file in files} == {"utils"}
    tested = {test["clause"] for test in report["tests"]}
    outcomes = {result["clause"]: result for result in report["not_run"]}
    assert tested.isdisjoint(outcomes)
    assert tested | outcomes.keys() == all_clauses().keys()
    scales = outcomes["amp.grad_scaler.scale.multiplies"]
    assert (scales["outcome"], scales["reason"]) == (
        "not provided",
        "onlyclip does not provide amp.GradScaler",
    )
    assert outcomes["amp.grad_scaler.fused_step.waits_for_nothing"]["outcome"] == "not claimed"
    assert f"; {len(outcomes)} accounted, not run: " in parts(report)[0].says


@pytest.mark.parametrize("target", ["conformance/amp", "conformance/amp/test_grad_scaler_construct.py"])
def test_package_without_judged_name_is_red(tmp_path: Path, target: str) -> None:
    code, report = judge(tmp_path, [target])
    assert (code, report["verdict"], report["tests"], report["provides_nothing"]) == (1, "red", [], True)


NOTHING_JUDGED = {
    "profile": ["--profile=smoke", f"--clauses={OVERLAP}"],
    "mark": ["--marks=cuda"],
    "keyword": ["-k", "no_such_test"],
}


@pytest.mark.parametrize("words", NOTHING_JUDGED.values(), ids=NOTHING_JUDGED)
def test_run_that_judges_nothing_is_not_green(tmp_path: Path, words: list[str]) -> None:
    code, report = judge(tmp_path, ["--subject=torch", *words, "conformance/nn/utils"])
    assert (code, report["tests"]) == (pytest.ExitCode.NO_TESTS_COLLECTED, [])
    assert report["ended_early"] == ["pytest ended with code 5"]


def test_shard_without_tests_is_green(tmp_path: Path) -> None:
    words = ["--subject=torch", "--shard=2/2", f"--clauses={VALUE_CLAUSE}", f"{VALUE}::test_clamps_values"]
    code, report = judge(tmp_path, words)
    assert (code, report["verdict"], report["tests"]) == (0, "green", [])


@pytest.mark.parametrize(
    ("mark", "target", "others"),
    [
        ("accelerator", "conformance/amp/test_grad_scaler_unscale.py", {"generic"}),
        ("cuda", "conformance/cuda", set()),
    ],
)
def test_marks_select_clauses(tmp_path: Path, mark: str, target: str, others: set[str]) -> None:
    code, report = judge(tmp_path, ["--subject=torch", f"--marks={mark}", target])
    marks = {clause["id"]: clause["mark"] for clause in report["clauses"]}
    assert (code, report["marks"], report["is_narrowed"]) == (0, [mark], True)
    assert report["tests"]
    assert {marks[test["clause"]] for test in report["tests"]} == {mark}
    reasons = {result["clause"]: result["reason"] for result in report["not_run"]}
    deselected = {
        marks[name]
        for name, reason in reasons.items()
        if reason == f"its mark {marks[name]} is not in --marks"
    }
    assert deselected == others


def info(claims: Sequence[str], provided: Sequence[str] | None) -> SubjectInfo:
    return SubjectInfo(frozenset(claims), provided=None if provided is None else frozenset(provided))


def test_names_without_provider_or_claim_are_known_to_lack() -> None:
    [scaler] = {
        name for clause in all_clauses().values() for name in clause.names if name == "amp.GradScaler"
    }
    about = {clause.id for clause in all_clauses().values() if clause.names == (scaler,)}

    def lacking(known: dict[str, NotRun]) -> set[str]:
        return {name for name, result in known.items() if result.outcome == "not provided"} & about

    assert lacking(known_before("json", info([], [CLIP])))
    assert not lacking(known_before("json", info([], [scaler])))
    assert not lacking(known_before("json", info([scaler], [])))
    assert not lacking(known_before("json", info([], None)))
    assert not lacking(known_before("json", SubjectInfo(None)))


def test_file_with_computed_clause_is_imported(tmp_path: Path) -> None:
    area = HERE / "nn" / "utils"
    assert "nn.utils.clip_grad.clip_grad_norm_.scales_to_max_norm" in clauses_of_file(
        area / "test_clip_grad.py"
    )
    assert clauses_of_file(HERE / "test_surface.py") == frozenset()
    assert clauses_of_file(tmp_path / "test_else.py") == frozenset()
