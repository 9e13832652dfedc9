"""Reports of a few tests, benchmarks and training runs, tables of a few faults, and a parser of the pages."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from conformance.judge.judgement import Judgement
from conformance.judge.sandbox import environment
from conformance.strength.results import CLAUSES, FAULTS, KILLED, SURVIVED, Row, Table
from conformance.training.compare import Check
from conformance.training.config import small_config
from conformance.training.judge import TrainingComparison, as_entry
from conformance.training.trainer import TrainingRun

# Texts that could end a tag, an attribute, the style or the script; a formula for matplotlib; half a character,
# terminal codes, control characters, and a character that reverses the text direction.
HOSTILE = "</style></script><script>alert(1)</script>\"'><b onclick=x> &amp; $\\frac{ _x \ud800 \x1b[31m \0 \x07 \u202e"


class Page(HTMLParser):
    """The elements of a page, and the text of its styles and scripts."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.code: dict[str, str] = {}
        self.text = ""
        self._inside = ""
        self.source = file.read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside in ("style", "script"):
            self.code[self._inside] = self.code.get(self._inside, "") + data
        else:
            self.text += data


CLAUSE = {
    "id": "amp.grad_scaler.x",
    "says": "It does.",
    "covers": ["amp.GradScaler"],
    "level": "core",
    "area": "amp.grad_scaler",
    "thread": "",
    "torch": ["2.13"],
}


DEVIATION = {
    "id": "a.row",
    "clause": CLAUSE["id"],
    "torch_does": "This.",
    "we_do": "That.",
    "why": "So.",
    "thread": "pytorch/pytorch#1",
}


def judged(outcome: str, **more: Any) -> dict[str, Any]:
    words = {
        "nodeid": f"test_{outcome}",
        "outcome": outcome,
        "seconds": 0.1,
        "clause": CLAUSE["id"],
        "device": "cpu",
    }
    return vars(Judgement(**words | more))


def trained(passed: bool) -> dict[str, Any]:
    run = TrainingRun(
        losses=[8.0, 7.0],
        grad_norms=[1.0, 1.0],
        scales=[4.0, 2.0],
        skipped=[1],
        held_out={2: 7.5},
        weights="w",
    )
    check = Check("bits", passed, "said <b>so</b>")
    entry = as_entry(TrainingComparison("bf16", small_config("bf16"), run, run, None, [check]))
    return json.loads(json.dumps(entry))  # the form in a report


def a_kill(fault: str, nodeid: str = "t", how: str = "failed", seconds: float = 1.0, **more: str) -> Row:
    return Row(fault, FAULTS, KILLED, nodeid, CLAUSE["id"], how, seconds, **more)


def a_survivor(fault: str, **more: str) -> Row:
    return Row(fault, FAULTS, SURVIVED, seconds=9.0, **more)


def an_idle_clause(clause: str, tried: int, kills: str = "", why: str = "") -> Row:
    return Row(clause, CLAUSES, KILLED if kills else SURVIVED, fault=kills, tried=tried, why=why)


def a_table(*rows: Row, subject: str = "impl", commit: str = "abc", **more: Any) -> Table:
    return Table("faults", subject, commit, "2026-01-01T00:00:00+00:00", rows=list(rows), **more)


def timed(name: str, low: float, high: float) -> dict[str, Any]:
    ratio = (low + high) / 2
    return {"benchmark": name, "case": {"device": "cpu"}, "name": f"{name}[cpu]", "outcome": "measured"} | {
        "ratio": ratio,
        "low": low,
        "high": high,
        "subject_s": 1e-3 * ratio,
        "reference_s": 1e-3,
    }


def not_timed(name: str, why: str) -> dict[str, Any]:
    return {"benchmark": name, "case": {"device": "cpu"}, "name": f"{name}[cpu]"} | {
        "outcome": "failed",
        "why": why,
    }


def a_report(*tests: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "verdict": "red" if any(Judgement(**test).is_red for test in tests) else "green",
        "schema": 1,
        "suite": {"version": "0.1.0", "commit": "", "catalogue": "262c9d0d1e03"},
        "torch": "2.13.0+cpu",
        "subject": "impl",
        "subject_version": "0.1.0",
        "subject_commit": "",
        "device": "auto",
        "devices": ["cpu"],
        "world_sizes": "1,2",
        "replay": "tandem-judge impl WHAT --profile quick",
        "bad_input": [],
        "expectations": [],
        "claims_file": None,
        "provides_nothing": False,
        "profile": "quick",
        "seed": None,
        "began": "2026-01-01T00:00:00+00:00",
        "seconds": 1.0,
        "environment": environment.describe(),
        "clauses": [CLAUSE],
        "deviations": [],
        "tests": list(tests),
        "not_run": [],
        "ended_early": [],
        "speed": {},
        "training": {},
    } | more
