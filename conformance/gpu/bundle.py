"""The bundle: a flat folder of few small files, rewritten after every phase, so that it is always complete."""

from __future__ import annotations

import json
import math
import os
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks import asv_format, point, source
from conformance.gpu.phase_rows import BENCHMARKS, PhaseTask
from conformance.gpu.phases import NO_CUDA, STOPPED, PhaseRun
from conformance.gpu.summary import summary

REPORT, SUMMARY, JUNIT, LOG = "report.json", "summary.md", "junit.xml", "log.txt"
_LARGEST_BYTES = 2_000_000  # size limit of a file
_SHORT_TEXT = 300
_LOG_BYTES = 60_000  # size limit of a phase's log


@dataclass
class Bundle:
    """Results of the phases that have run, in order (`ran`). Their files are in `folder`."""

    task: PhaseTask
    folder: Path
    out: Path
    budget_s: float
    options: str
    began: float = field(default_factory=time.time)
    ran: list[PhaseRun] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._files = source.files()
        self._commit = source.commit_here()
        self._changed = source.differing(source.files_of(self._commit), self._files) if self._commit else []

    def add(self, ran: PhaseRun) -> None:
        self.ran.append(ran)
        self.write()

    def phase(self, name: str) -> PhaseRun | None:
        return next((ran for ran in self.ran if ran.phase.name == name), None)

    @property
    def host(self) -> dict[str, Any]:
        """The row of the phase `host`, of its first or second try. Empty before it has run."""
        rows = (ran.recorded.rows for ran in self.ran if ran.phase.name.startswith("host"))
        return next((recorded[0] for recorded in rows if recorded), {})

    def write(self) -> dict[str, Any]:
        """Write all files; return the report."""
        self.out.mkdir(parents=True, exist_ok=True)
        report = self.report()
        self._put(REPORT, json.dumps(_finite(_fitting(report)), indent=1, allow_nan=False))
        self._put(SUMMARY, _summary_or_error(report))
        self._put(LOG, self._log())
        junit = self.folder / "judge" / JUNIT
        if junit.is_file():
            self._put(JUNIT, _fitting_junit(junit))
        if self.host and self.task.subject == "impl":
            self._write_point()
        return report

    def _put(self, name: str, text: str) -> None:
        """Write the file atomically, so that no reader gets half a file."""
        half = self.out / f".{name}"
        half.write_text(text)
        os.replace(half, self.out / name)

    def report(self) -> dict[str, Any]:
        phases = {
            ran.phase.name: {
                "why": ran.why,
                "seconds": ran.seconds,
                "not_run": ran.not_run,
                "rows": ran.recorded.rows,
            }
            for ran in self.ran
        }
        red_reasons = reasons(self.ran, self._judges_own_verdict())
        missing = not_shown(self.ran)
        return {
            "verdict": verdict(red_reasons, missing, self.ran),
            "reasons": red_reasons,
            "not_shown": missing,
            "subject": self.task.subject,
            "device": self.task.device,
            "devices_judged": self.task.devices or self.task.device,
            "profile": self.task.profile,
            "seed": self.task.seed,
            "tests_asked_for": self.task.tests,
            "options": self.options,
            "began": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(self.began)),
            "seconds": round(time.time() - self.began, 1),
            "budget_s": self.budget_s,
            "commit": self._commit,
            "changed_since_commit": self._changed,
            "files": self._files,
            "host": self.host,
            "phases": phases,
        }

    def _judges_own_verdict(self) -> str:
        """Return pytest's verdict, which is red if the subject provides nothing. Empty if pytest was cut."""
        written = self.folder / "judge" / REPORT
        return json.loads(written.read_text())["verdict"] if written.is_file() else ""

    def _log(self) -> str:
        parts: list[str] = []
        for ran in self.ran:
            log = self.folder / f"{ran.phase.name}.log"
            if log.is_file():
                with log.open("rb") as file:
                    file.seek(max(0, log.stat().st_size - _LOG_BYTES))
                    parts.append(f"== {ran.phase.name}\n{file.read().decode(errors='replace')}")
        return "\n".join(parts)

    def _write_point(self) -> None:
        speed, described = self.phase("speed"), self.folder / BENCHMARKS
        measured = measured_by_name(speed.recorded.rows) if speed and described.is_file() else {}
        if not measured:
            return
        machine, environment = self.host["machine"], self.host["environment"]
        versions = {
            "python": environment["python"].rpartition(".")[0],
            "torch": environment["packages"]["torch"],
        }
        began_ms = int(self.began * 1000)
        results = asv_format.results(json.loads(described.read_text()), measured, machine, versions, began_ms)
        ran = {"commit": self._commit, "files": self._files}
        self._put(point.FILE, json.dumps(point.content_of(results, machine, ran)))


def measured_by_name(rows: Sequence[dict[str, Any]]) -> asv_format.Measured:
    """Return the rows of `speed` in the form that asv_format needs."""
    measured: asv_format.Measured = {}
    for row in rows:
        for name, value in row.get("values", {}).items():
            measured.setdefault(name, {})[tuple(row["case"].values())] = value
    return measured


def reasons(ran: Sequence[PhaseRun], judges_own_verdict: str) -> list[str]:
    """Return the reasons for a red verdict, or an empty list."""
    texts: list[str] = []
    for phase_run in ran:
        if phase_run.why and not phase_run.was_cut and not phase_run.is_left_out:
            texts.append(f"{phase_run.phase.name} {phase_run.why}")
        # The judge's rows say whether they are red. In other phases one outcome is red.
        is_red = (row.get("red", row["outcome"] == "failed") for row in phase_run.recorded.rows)
        red = Counter(row["outcome"] for row, red in zip(phase_run.recorded.rows, is_red, strict=True) if red)
        texts += [f"{phase_run.phase.name}: {count} {outcome}" for outcome, count in red.items()]
    if judges_own_verdict == "red" and not texts:
        texts.append("judge: the subject provides none of the names that are judged")
    return texts


def not_shown(ran: Sequence[PhaseRun]) -> list[str]:
    """Return the requested phases that are missing: cut judgements, and phases after the user's interrupt."""
    cut = [
        phase_run
        for phase_run in ran
        if phase_run.was_cut and (phase_run.phase.is_judging or phase_run.why in (STOPPED, NO_CUDA))
    ]
    return [f"{phase_run.phase.name}: {phase_run.why}" for phase_run in cut]


def verdict(reasons: Sequence[str], missing: Sequence[str], ran: Sequence[PhaseRun]) -> str:
    """Return `red`, `not shown`, `green`, or `not judged` if the suite was not requested."""
    if reasons or missing:
        return "red" if reasons else "not shown"
    judged = any(phase_run.phase.name == "judge" and not phase_run.is_left_out for phase_run in ran)
    return "green" if judged else "not judged"


def _summary_or_error(report: dict[str, Any]) -> str:
    """Return the summary. An error in it must not end the run, whose rows are all in the report."""
    try:
        return summary(report)
    except Exception:
        lines = [f"# {report['verdict'].upper()}: {report['subject']} on {report['device']}", ""]
        return "\n".join([*lines, f"No summary, see {REPORT}:", "", traceback.format_exc()])


def _fitting(report: dict[str, Any]) -> dict[str, Any]:
    """Return the report, with shorter texts in its rows if it would be too large."""
    if len(json.dumps(report)) <= _LARGEST_BYTES:
        return report
    phases = {
        name: phase | {"rows": [_shortened(row) for row in phase["rows"]]}
        for name, phase in report["phases"].items()
    }
    return report | {"phases": phases}


def _finite(value: Any) -> Any:
    """Return `value` with None instead of floats that JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _shortened(row: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value[:_SHORT_TEXT] if key in ("says", "reason", "replay") else value
        for key, value in row.items()
    }


def _fitting_junit(file: Path) -> str:
    text = file.read_text(errors="replace")
    if len(text) <= _LARGEST_BYTES:
        return text
    tree = ElementTree.fromstring(text)
    for case in tree.iter("testcase"):
        for child in list(case):
            if child.tag in ("system-out", "system-err", "properties"):
                case.remove(child)
            child.text = (child.text or "")[:_SHORT_TEXT]
            child.attrib = {name: value[:_SHORT_TEXT] for name, value in child.attrib.items()}
    return ElementTree.tostring(tree, encoding="unicode")
