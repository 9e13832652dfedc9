"""Tests of the record of judged versions."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from conformance.selftests.processes import run_pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
import _runs


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(_runs, "ROOT", tmp_path)
    (tmp_path / "ci").mkdir()
    (tmp_path / _runs.SOURCE).write_text("")
    (tmp_path / _runs.PAGE).write_text("before\n<!-- runs -->\nold\n<!-- end of runs -->\nafter\n")
    return tmp_path


def write_report(tree: Path, outcomes: dict[str, str], commit: str = "0123456789ab", **facts: object) -> Path:
    file = tree / "report.json"
    report = {
        "suite": {"commit": commit},
        "subject": "impl",
        "environment": {"python": "3.11.7", "packages": {"torch": "2.13.0+cpu"}},
        "profile": "quick",
        "began": "2026-11-27T14:33:47+00:00",
        "ended_early": [],
        "is_narrowed": False,
        "devices": ["cpu"],
        "tests": [{"clause": clause, "outcome": outcome} for clause, outcome in outcomes.items()],
        **facts,
    }
    file.write_text(json.dumps(report))
    return file


def test_table_counts_clauses_that_hold(tree: Path) -> None:
    outcomes = {
        "nn.a": "passed",
        "nn.b": "failed",
        "nn.c": "known",
        "nn.d": "unavailable",
        "nn.e": "expected",
    }
    _runs.record(write_report(tree, outcomes))
    name = "torch 2.13.0, Python 3.11.7, impl on cpu"
    assert f"| {name} | not run | 2 of 4 | not run | not run |" in _runs.page()
    assert _runs.recorded()[name]["clipping"]["failed"] == ["nn.b", "nn.e"]


def test_later_report_replaces_its_areas_only(tree: Path) -> None:
    _runs.record(write_report(tree, {"dynamo.a": "hang", "nn.a": "passed"}))
    _runs.record(write_report(tree, {"dynamo.a": "passed"}))
    assert "| not run | 1 of 1 | 1 of 1 | not run |" in _runs.page()


def test_area_is_recorded_only_with_all_its_folders(tree: Path) -> None:
    outcomes = {"amp.a": "passed", "cuda.a": "passed"}
    _runs.record(write_report(tree, outcomes))
    assert "2 of 2" not in _runs.page()
    _runs.record(write_report(tree, outcomes | {"cpu.a": "passed"}))
    assert "| 3 of 3 | not run |" in _runs.page()


def test_page_keeps_text_around_the_table(tree: Path) -> None:
    page = _runs.page()
    assert page.startswith("before\n<!-- runs -->\n| run |")
    assert page.endswith("<!-- end of runs -->\nafter\n")
    assert "old" not in page


@pytest.mark.parametrize(
    "facts",
    [{"commit": "0123456789ab-dirty"}, {"commit": ""}, {"ended_early": ["--maxfail"]}, {"is_narrowed": True}],
)
def test_incomplete_report_is_refused(tree: Path, facts: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"only (runs of a commit|complete runs) are recorded"):
        _runs.record(write_report(tree, {"nn.a": "passed"}, **facts))


def pytest_report(folder: Path, *options: str) -> dict[str, object]:
    """Return the report of a run of one test. `options` go to pytest."""
    words = ["conformance/nn", "-k", "test_clamps_values", f"--report={folder}"]
    run_pytest(*words, *options, packages=[folder])
    report: dict[str, object] = json.loads((folder / "report.json").read_text())
    return report


def test_report_of_pytest_has_recorded_facts(tmp_path: Path) -> None:
    report = pytest_report(tmp_path)
    assert report["is_narrowed"]
    assert report["ended_early"] == []
    assert {"suite", "subject", "environment", "devices", "profile", "began", "tests"} <= report.keys()


def test_report_of_interrupted_pytest_is_incomplete(tmp_path: Path) -> None:
    (tmp_path / "interrupt.py").write_text("def pytest_runtest_logfinish():\n    raise KeyboardInterrupt\n")
    assert pytest_report(tmp_path, "-p", "interrupt")["ended_early"] == ["pytest ended with code 2"]
