"""Tests of the record of judged versions."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

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
        "tests": [{"clause": clause, "outcome": outcome} for clause, outcome in outcomes.items()],
        **facts,
    }
    file.write_text(json.dumps(report))
    return file


def test_table_counts_clauses_that_hold(tree: Path) -> None:
    outcomes = {"amp.a": "passed", "amp.b": "failed", "amp.c": "known", "amp.d": "unavailable"}
    _runs.record(write_report(tree, outcomes))
    assert "| torch 2.13.0, Python 3.11.7, impl | 2 of 3 | not run | not run | not run |" in _runs.page()
    assert _runs.recorded()["torch 2.13.0, Python 3.11.7, impl"]["amp"]["red"] == ["amp.b"]


def test_later_report_replaces_its_areas_only(tree: Path) -> None:
    _runs.record(write_report(tree, {"amp.a": "hang", "nn.a": "passed"}))
    _runs.record(write_report(tree, {"amp.a": "passed"}))
    assert "| 1 of 1 | 1 of 1 | not run | not run |" in _runs.page()


def test_page_keeps_text_around_the_table(tree: Path) -> None:
    page = _runs.page()
    assert page.startswith("before\n<!-- runs -->\n| run |")
    assert page.endswith("<!-- end of runs -->\nafter\n")
    assert "old" not in page


@pytest.mark.parametrize(
    "facts", [{"commit": "0123456789ab-dirty"}, {"commit": ""}, {"ended_early": ["--maxfail"]}]
)
def test_report_without_a_commit_or_an_end_is_refused(tree: Path, facts: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="only whole runs of a commit are recorded"):
        _runs.record(write_report(tree, {"amp.a": "passed"}, **facts))
