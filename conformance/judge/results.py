"""Collection of the judgements of all workers, printed at the end and written to `report.json`."""

from __future__ import annotations

import contextlib
import json
import textwrap
import time
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import pytest

from conformance.judge import clauses
from conformance.judge.accounting import NOT_RUN, OTHER_SHARD, NotRun, account
from conformance.judge.durations import first_tests
from conformance.judge.files.expectations import ExpectationResult, Expectations, TestRecord
from conformance.judge.heading import heading, replay_command
from conformance.judge.judgement import RED, Judgement, if_expected, judgement_of
from conformance.judge.sandbox.notes import Incident, Notes
from conformance.judge.sandbox.trial import SubjectInfo

BAD_INPUT = 2  # exit code for wrong input, whatever the outcomes of tests
NO_DEVICE = "no device"  # beginning of the reason of an unavailable test
EXPECTATION = "expectation of "  # beginning of the id of an expectation that no longer holds
_PROPERTY = "conformance"
_MOST_OUTPUT = 20_000  # characters of a failing test's output
_SELFTEST = "a test of the suite itself"


class WorkerRecorder:
    """A pytest plugin of every process that runs tests. It attaches each judgement to the report that xdist sends."""

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
    """A pytest plugin of the controlling process. It gathers judgements, prints the verdict and writes the report."""

    def __init__(self, config: pytest.Config, notes: Notes, subject: SubjectInfo) -> None:
        self._config = config
        self._notes = notes
        self._subject = subject
        self._expectations: list[ExpectationResult] = []  # evaluated at the end
        self._judgements: dict[str, Judgement] = {}
        self._not_collected: dict[str, str] = {}  # file and the last line of its error
        self._not_run: list[NotRun] = []  # clauses of the selection without tests, known at the end
        self._began = time.time()
        self._ended_early: list[str] = []
        self._log: TextIO | None = None
        if config.option.report:
            directory = Path(config.option.report)
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "report.json").unlink(missing_ok=True)
            # A line is written when its test ends, so that the results survive the end of this process.
            self._log = (directory / "judgements.jsonl").open("w", buffering=1)

    @staticmethod
    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(node: Any) -> None:
        """Ignore errors of sending tests to a worker that has died. Its tests go to other workers once this is noticed.

        Without this, pytest-xdist 3.8 ends the run, for example if two workers die at about the same time.
        """
        send = node.sendcommand

        def send_if_alive(name: str, **arguments: object) -> None:
            with contextlib.suppress(OSError):
                send(name, **arguments)

        node.sendcommand = send_if_alive

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._note_collected(ids)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._not_collected[report.nodeid or "a file"] = (
                report.longreprtext.strip().rpartition("\n")[2].removeprefix("E ").strip()
            )

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self._note_collected([item.nodeid for item in session.items])

    def _note_collected(self, ids: Sequence[str]) -> None:
        self._note({"collected": len(ids), "first": first_tests(ids)})

    def _note(self, entry: dict[str, Any]) -> None:
        if self._log is not None:
            self._log.write(json.dumps(entry) + "\n")

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        """Judge a test whose worker died, either by itself or, if an incident was noted, killed by the watchdog."""
        noted = [incident for incident in self._notes.incidents() if incident.nodeid == crashitem]
        incident = (
            noted[-1] if noted else Incident(crashitem, "crash", f"ended its process: {report.longrepr}")
        )
        if not noted:
            self._notes.note(incident)
        stack = self._notes.last_stack(report.node.gateway.id)  # pyright: ignore[reportAttributeAccessIssue]
        clause = self._notes.read("clauses").get(crashitem, "")
        result = (incident.outcome, f"{incident.reason}\n{stack}".strip())
        outcome, reason = if_expected(self._config, crashitem, clause, result, report)
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
        fields = dict(report.user_properties).get(_PROPERTY)
        if fields is None:
            return
        new = Judgement(**fields)
        old = self._judgements.get(new.nodeid)
        if old is None or not old.is_red:
            self._judgements[new.nodeid] = new
            self._note(asdict(new))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._not_run = [NotRun(**fields) for fields in self._notes.read("not-run")]
        needs_no_tests = session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._needs_no_tests()
        is_complete = session.exitstatus in (0, 1) or needs_no_tests
        self._ended_early = [str(why) for why in (session.shouldstop, session.shouldfail) if why]
        if not is_complete and not self._ended_early:
            self._ended_early = [f"pytest ended with code {int(session.exitstatus)}"]
        if is_complete and (self._judgements or self._not_run):
            self._evaluate_expectations(is_complete=not self._ended_early)
            # pytest's status does not know of subjects that provide nothing and of stale expectations.
            session.exitstatus = BAD_INPUT if self._bad_input() else int(self._verdict() == "red")
        if self._log is not None:
            self._log.close()
            self._log = None
            (Path(self._config.option.report) / "report.json").write_text(
                json.dumps(self.as_dict(), indent=1)
            )

    def _needs_no_tests(self) -> bool:
        """Return whether a run without tests has judged the selected clauses, or leaves them to other shards."""
        if not self._not_run or _is_narrowed_by_pytest(self._config):
            return False
        outcomes = {result.outcome for result in self._not_run}
        is_shard = any(result.reason == OTHER_SHARD for result in self._not_run)
        return is_shard or "not provided" in outcomes or NOT_RUN not in outcomes

    def _evaluate_expectations(self, *, is_complete: bool) -> None:
        tests = [
            TestRecord(judgement.nodeid, judgement.clause, judgement.outcome, judgement.draws)
            for judgement in self._judgements.values()
        ]
        is_complete = is_complete and not (self._config.option.shard or _is_narrowed(self._config))
        self._expectations = Expectations.of_run(self._config).evaluate(tests, is_complete=is_complete)
        for judgement in stale_expectations(self._expectations, tests):
            self._judgements[judgement.nodeid] = judgement
            self._note(asdict(judgement))

    def _verdict(self) -> str:
        if self._bad_input():
            return "red"
        return verdict(self._results(), self._subject.claims)

    def _results(self) -> list[Judgement | NotRun]:
        return [*self._judgements.values(), *self._not_run]

    def _bad_input(self) -> list[str]:
        """Return what the user has to fix before judging.

        This includes files that cannot be imported, which pytest-xdist leaves out, and requested devices that tests did
        not find.
        """
        unavailable = Counter(
            judgement.reason for judgement in self._judgements.values() if judgement.outcome == "unavailable"
        )
        not_collected = [
            f"the tests of {file} cannot be collected and did not run: {error}; fix this and judge again"
            for file, error in sorted(self._not_collected.items())
        ]
        return [*self._subject.bad_input, *not_collected] + [
            f"--device names {device}, but this machine has none, and {count} tests did not run; run on a machine that "
            "has one, or without --device, which uses the available devices"
            for device in self._config.option.device.split(",")
            if (count := unavailable[f"{NO_DEVICE} {device}"])
        ]

    def tests_as_dicts(self) -> list[dict[str, Any]]:
        return [asdict(self._judgements[nodeid]) for nodeid in sorted(self._judgements)]

    def as_dict(self) -> dict[str, Any]:
        return heading(self._config.option, self._began) | {
            "verdict": self._verdict(),
            "provides_nothing": provides_nothing(self._results(), self._subject.claims),
            "bad_input": self._bad_input(),
            "ended_early": self._ended_early,
            "selection": self._notes.read("selection") or None,
            "is_narrowed": _is_narrowed(self._config),
            "devices": sorted({judgement.device for judgement in self._judgements.values()} - {""}),
            "expectations": [result.as_dict() for result in self._expectations],
            "tests": self.tests_as_dicts(),
            "not_run": [asdict(result) for result in self._account()],
        }

    def _account(self) -> list[NotRun]:
        """Return the outcome of each clause of the catalogue that no test ran of."""
        why = f"the run ended early: {'; '.join(self._ended_early) or 'its tests have no result'}"
        return account(
            {judgement.clause for judgement in self._judgements.values()},
            {result.clause: result for result in self._not_run},
            set(self._notes.read("clauses").values()),
            why,
        )

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> Generator[None]:
        """Write the verdict last, so that it is at the bottom of the terminal."""
        yield
        if self._judgements or self._not_run:
            self._write_verdict(terminalreporter)

    def _write_verdict(self, terminalreporter: Any) -> None:
        judgements = list(self._judgements.values())
        write = terminalreporter.write_line
        terminalreporter.section("verdict")
        judged = [judgement for judgement in judgements if judgement.clause]
        tested = {judgement.clause for judgement in judged}
        write(f"subject {self._config.option.subject}: {len(tested)} clauses in {len(judged)} tests")
        known = clauses.all_clauses()
        for names, attribute in ((clauses.LEVELS, "level"), (clauses.MARKS, "mark")):
            counts = Counter(getattr(known[name], attribute) for name in tested if name in known)
            write(f"  {', '.join(f'{counts[name]} {name}' for name in names)}")
        accounted = sorted(Counter(result.outcome for result in self._account()).items())
        counts = ", ".join(
            f"{count} {'not selected' if outcome == NOT_RUN else outcome}" for outcome, count in accounted
        )
        write(f"  accounted, not run: {counts or 'none'}")
        for outcome in sorted({judgement.outcome for judgement in judgements}):
            write(f"  {outcome}: {sum(judgement.outcome == outcome for judgement in judgements)}")
        for broken in broken_clauses([asdict(judgement) for judgement in judgements]):
            write(f"RED {broken.name}: {broken.count}")
            write(f"    {broken.says}")
            write(f"    {broken.why}")
            write(f"    {broken.replay}")
        for result in self._expectations:
            if result.state == "met":
                write(f"MET {result.expectation.about}: {result.says}")
        for sentence in self._bad_input():
            write(f"BAD INPUT {sentence}")
        colour = self._verdict()
        write(f"verdict: {colour}", green=colour == "green", red=colour == "red", bold=True)


def stale_expectations(
    results: Iterable[ExpectationResult], tests: Sequence[TestRecord]
) -> Iterator[Judgement]:
    """Yield a red judgement for each expectation that no longer holds."""
    for result in results:
        if result.is_red:
            row = result.expectation
            clause = row.clause or next(test.clause for test in tests if row.covers(test.nodeid, test.clause))
            reason = f"the claims file expects it to fail ({row.reason}), but {result.says}"
            yield Judgement(f"{EXPECTATION}{row.about}", "stale", 0.0, clause, reason=reason)


def _is_narrowed(config: pytest.Config) -> bool:
    """Return whether the run was limited to some tests of a folder. A shard of all of them is not."""
    option = config.option
    chosen = [option.clauses, option.profile == "smoke", option.marks != ",".join(clauses.MARKS)]
    paths = [path for argument in config.args if (path := Path(str(argument))).name != "test_surface.py"]
    return any(chosen) or _is_narrowed_by_pytest(config) or not all(path.is_dir() for path in paths)


def _is_narrowed_by_pytest(config: pytest.Config) -> bool:
    return any(getattr(config.option, name, None) for name in ("keyword", "markexpr", "lf", "deselect"))


def verdict(results: Collection[Judgement | NotRun], claimed: frozenset[str] | None) -> str:
    """Return `red` if any outcome is red or the subject provides no judged name, else `green`.

    Args:
        claimed: the subject's claims, or None if they are unknown.
    """
    is_red = any(result.is_red for result in results)
    return "red" if is_red or provides_nothing(results, claimed) else "green"


def provides_nothing(results: Iterable[Judgement | NotRun], claimed: frozenset[str] | None) -> bool:
    """Return whether the subject has none of the names that were judged, in the whole suite or in the selected part."""
    outcomes = {result.outcome for result in results if result.clause}
    return claimed == frozenset() or outcomes - {"not claimed", "unavailable", NOT_RUN} == {"not provided"}


@dataclass
class Broken:
    """A clause that a subject breaks, with all of its failing tests."""

    name: str  # id of the clause, or of the test if it has no clause
    says: str
    count: str
    why: str  # first difference of the first failing test
    replay: str  # replay command of that test
    tests: Sequence[Mapping[str, Any]]  # all failing tests


def broken_clauses(
    tests: Sequence[Mapping[str, Any]], catalogue: Sequence[Mapping[str, Any]] | None = None
) -> list[Broken]:
    """Return the broken clauses of a report's `tests`: the largest share of failing tests first, then by clause.

    `catalogue` has the report's clauses. The default is the present catalogue.
    """
    totals = Counter(test["clause"] or test["nodeid"] for test in tests)
    red: dict[str, list[Mapping[str, Any]]] = {}
    for test in tests:
        if test["outcome"] in RED:
            red.setdefault(test["clause"] or test["nodeid"], []).append(test)
    says = {clause["id"]: clause["says"] for clause in catalogue or clauses.for_report()}
    place = {name: position for position, name in enumerate([*says, *sorted(red.keys() - says.keys())])}
    broken: list[Broken] = []
    for name, failing in sorted(
        red.items(), key=lambda entry: (-len(entry[1]) / totals[entry[0]], place[entry[0]])
    ):
        outcomes = ", ".join(sorted({test["outcome"] for test in failing}))
        count = f"{outcomes} in {len(failing)} of {totals[name]} {'test' if totals[name] == 1 else 'tests'}"
        why = _first_difference(failing[0]["reason"])
        broken.append(Broken(name, says.get(name, _SELFTEST), count, why, failing[0]["replay"], failing))
    return broken


def _first_difference(reason: str) -> str:
    first, *others = [line.strip() for line in reason.splitlines() if line.strip()] or ["no reason is known"]
    reported = others[0].removeprefix("- ") if first.endswith(":") and others else first
    return textwrap.shorten(reported, 200, placeholder=" …")
