"""The judgements of all tests, gathered over all workers, told at the end and written as `report.json`."""

from __future__ import annotations

import contextlib
import json
import textwrap
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import pytest

from conformance.judge import clauses
from conformance.judge.expectations import Expectations, Held, Seen
from conformance.judge.heading import heading, replay_command
from conformance.judge.judgement import RED, Judgement, if_expected, judgement_of
from conformance.judge.notes import Incident, Notes
from conformance.judge.trial import Learned

BAD_INPUT = 2  # the exit code where the claims file is wrong, whatever became of the tests
NO_DEVICE = "no device"  # how the reason begins why a test is unavailable
_PROPERTY = "conformance"
_MOST_OUTPUT = 20_000  # of what a failing test has written
_OWN_PART = "a test of the suite's own parts"


class WorkerRecorder:
    """In every process that runs tests: hangs each test's judgement on its report, which xdist carries home."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "call" or call.excinfo is not None:
            judgement = judgement_of(item, call, report)
            report.user_properties.append((_PROPERTY, asdict(judgement)))
            report.sections = [(name, _bounded(text)) for name, text in report.sections]
            if judgement.replay:
                report.sections.append(("replay", judgement.replay))
            if judgement.outcome in ("hang", "crash"):
                self._notes.note(Incident(judgement.nodeid, judgement.outcome, judgement.reason))
        return report


def _bounded(text: str) -> str:
    return text if len(text) <= _MOST_OUTPUT else f"… {len(text)} characters, lastly:\n{text[-_MOST_OUTPUT:]}"


class Recorder:
    """In the controlling process: gathers all judgements, prints the verdict, writes the report."""

    def __init__(self, config: pytest.Config, notes: Notes, learned: Learned) -> None:
        self._config = config
        self._notes = notes
        self._learned = learned
        self._held: list[Held] = []  # known in the end
        self._judgements: dict[str, Judgement] = {}
        self._began = time.time()
        self._log: TextIO | None = None
        if config.option.report:
            directory = Path(config.option.report)
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "report.json").unlink(missing_ok=True)
            # One line a test, as they end: what is known survives whatever happens to this process.
            self._log = (directory / "judgements.jsonl").open("w", buffering=1)

    @staticmethod
    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(node: Any) -> None:
        """Let tests be sent to a worker that has died unnoticed: when that is noticed, others get them.

        By itself pytest-xdist 3.8 ends the run there, as when two workers die at about the same time.
        """
        send = node.sendcommand

        def send_if_alive(name: str, **arguments: object) -> None:
            with contextlib.suppress(OSError):
                send(name, **arguments)

        node.sendcommand = send_if_alive

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._note({"collected": len(ids)})

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self._note({"collected": len(session.items)})

    def _note(self, entry: dict[str, Any]) -> None:
        if self._log is not None:
            self._log.write(json.dumps(entry) + "\n")

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        """A worker died under a test, by itself or, if that is noted, by what watches over it."""
        noted = [incident for incident in self._notes.incidents() if incident.nodeid == crashitem]
        incident = (
            noted[-1] if noted else Incident(crashitem, "crash", f"ended its process: {report.longrepr}")
        )
        if not noted:
            self._notes.note(incident)
        stack = self._notes.last_stack(report.node.gateway.id)  # pyright: ignore[reportAttributeAccessIssue]
        clause = self._notes.clauses().get(crashitem, "")
        found = (incident.outcome, f"{incident.reason}\n{stack}".strip())
        outcome, reason = if_expected(self._config, crashitem, clause, found, report)
        judgement = Judgement(
            crashitem,
            outcome,
            0.0,
            clause=clause,
            reason=reason,
            replay=replay_command(self._config.option, crashitem),
        )
        report.user_properties.append((_PROPERTY, asdict(judgement)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = dict(report.user_properties).get(_PROPERTY)
        if found is None:
            return
        new = Judgement(**found)
        old = self._judgements.get(new.nodeid)
        if old is None or not old.is_red:
            self._judgements[new.nodeid] = new
            self._note(asdict(new))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._judgements and session.exitstatus in (0, 1):
            self._hold_expectations(is_whole=not session.shouldstop and not session.shouldfail)
            # A subject that provides nothing fails no test, nor does an expectation that no longer holds.
            session.exitstatus = BAD_INPUT if self._bad_input() else int(self._verdict() == "red")
        if self._log is not None:
            self._log.close()
            self._log = None
            (Path(self._config.option.report) / "report.json").write_text(
                json.dumps(self.as_dict(), indent=1)
            )

    def _hold_expectations(self, *, is_whole: bool) -> None:
        seen = [
            Seen(each.nodeid, each.clause, each.outcome, each.draws) for each in self._judgements.values()
        ]
        is_whole = is_whole and not _is_narrowed(self._config)
        self._held = Expectations.of(self._config).held(seen, is_whole=is_whole)
        for held in self._held:
            if held.is_red:
                row, nodeid = held.expectation, f"expectation of {held.expectation.about}"
                clause = row.clause or next(
                    each.clause for each in seen if row.covers(each.nodeid, each.clause)
                )
                self._judgements[nodeid] = Judgement(nodeid, "stale", 0.0, clause, reason=_no_longer(held))
                self._note(asdict(self._judgements[nodeid]))

    def _verdict(self) -> str:
        found = verdict(self._judgements.values(), self._learned.claims)
        return "red" if self._bad_input() else found

    def _bad_input(self) -> list[str]:
        """What has to be mended first; a device that was asked for and is not here, only the tests have noticed."""
        lacking = Counter(
            judgement.reason for judgement in self._judgements.values() if judgement.outcome == "unavailable"
        )
        asked = self._config.option.device.split(",")
        return [*self._learned.bad_input] + [
            f"--device asks for {device}, which is not here: {count} tests were not run; run where one is, or leave "
            "--device out, which takes what is there"
            for device in asked
            if (count := lacking[f"{NO_DEVICE} {device}"])
        ]

    def as_dict(self) -> dict[str, Any]:
        judgements = sorted(self._judgements.values(), key=lambda judgement: judgement.nodeid)
        return heading(self._config.option, self._began) | {
            "verdict": self._verdict(),
            "provides_nothing": self._learned.claims == frozenset(),
            "bad_input": self._bad_input(),
            "devices": sorted({judgement.device for judgement in judgements} - {""}),
            "expectations": [held.as_dict() for held in self._held],
            "tests": [asdict(judgement) for judgement in judgements],
        }

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> Generator[None]:
        """The last that is written, so that it is what is seen."""
        yield
        if self._judgements:
            self._write_verdict(terminalreporter)

    def _write_verdict(self, terminalreporter: Any) -> None:
        judgements = list(self._judgements.values())
        write = terminalreporter.write_line
        terminalreporter.section("verdict")
        judged = [judgement for judgement in judgements if judgement.clause]
        asked = {judgement.clause for judgement in judged}
        write(f"subject {self._config.option.subject}: {len(asked)} clauses asked by {len(judged)} tests")
        write(f"  {', '.join(_by_level(judged))}")
        for outcome in sorted({judgement.outcome for judgement in judgements}):
            write(f"  {outcome}: {sum(judgement.outcome == outcome for judgement in judgements)}")
        for broken in broken_clauses([asdict(judgement) for judgement in judgements]):
            write(f"RED {broken.name}: {broken.count}")
            write(f"    {broken.says}")
            write(f"    {broken.why}")
            write(f"    {broken.replay}")
        for held in self._held:
            if held.state == "met":
                write(f"MET {held.expectation.about}: {held.says}")
        for sentence in self._bad_input():
            write(f"BAD INPUT {sentence}")
        found = self._verdict()
        write(f"verdict: {found}", green=found == "green", red=found == "red", bold=True)


def _by_level(judged: Sequence[Judgement]) -> Iterator[str]:
    """How many clauses of each level were asked, and how many of them the subject does not claim."""
    not_claimed = {judgement.clause for judgement in judged if judgement.outcome == "not claimed"}
    asked = {judgement.clause for judgement in judged} & clauses.all_clauses().keys()
    counts = Counter(clauses.all_clauses()[clause_id].level for clause_id in asked)
    for level in clauses.LEVELS:
        yield f"{counts[level]} {level}"
    yield f"{len(not_claimed)} not claimed"


def _is_narrowed(config: pytest.Config) -> bool:
    """Whether the run was given less than whole folders of tests."""
    option = config.option
    chosen = (getattr(option, name, None) for name in ("keyword", "markexpr", "lf", "deselect", "clauses"))
    asked = [path for argument in config.args if (path := Path(str(argument))).name != "test_surface.py"]
    return any(chosen) or not all(path.is_dir() for path in asked)


def _no_longer(held: Held) -> str:
    return f"the claims file expects it to fail ({held.expectation.reason}), but {held.says}"


def verdict(judgements: Iterable[Judgement], claimed: frozenset[str] | None) -> str:
    """`green`, or `red` on any red outcome, and on a subject that claims nothing to judge; None is not known."""
    is_red = any(judgement.is_red for judgement in judgements)
    return "red" if is_red or claimed == frozenset() else "green"


@dataclass
class Broken:
    """A clause that a subject breaks, told once for all the tests that saw it."""

    name: str  # the clause's id, or the test's where it belongs to none
    says: str
    count: str
    why: str  # the first difference of the first of them, in a line
    replay: str  # of the same


def broken_clauses(tests: Sequence[Mapping[str, Any]]) -> list[Broken]:
    """What is red in the `tests` of a report: those broken in most of their tests first, else as the clauses stand."""
    asked = Counter(test["clause"] or test["nodeid"] for test in tests)
    red: dict[str, list[Mapping[str, Any]]] = {}
    for test in tests:
        if test["outcome"] in RED:
            red.setdefault(test["clause"] or test["nodeid"], []).append(test)
    says = {clause["id"]: clause["says"] for clause in clauses.for_report()}
    place = {name: position for position, name in enumerate([*says, *sorted(red.keys() - says.keys())])}
    broken: list[Broken] = []
    for name, found in sorted(
        red.items(), key=lambda entry: (-len(entry[1]) / asked[entry[0]], place[entry[0]])
    ):
        outcomes = ", ".join(sorted({test["outcome"] for test in found}))
        count = f"{outcomes} in {len(found)} of {asked[name]} {'test' if asked[name] == 1 else 'tests'}"
        why = _first_difference(found[0]["reason"])
        broken.append(Broken(name, says.get(name, _OWN_PART), count, why, found[0]["replay"]))
    return broken


def _first_difference(reason: str) -> str:
    first, *others = [line.strip() for line in reason.splitlines() if line.strip()] or ["no reason is known"]
    reported = others[0].removeprefix("- ") if first.endswith(":") and others else first
    return textwrap.shorten(reported, 200, placeholder=" …")
