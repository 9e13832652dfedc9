"""Comparison of two runs: what broke, was fixed, was added or removed, and became slower or faster."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.judge.accounting import NOT_RUN
from conformance.judge.judgement import RED
from conformance.judge.results import BAD_INPUT

_REQUIRED = ("verdict", "subject", "profile", "began", "environment", "clauses", "tests")


@dataclass(frozen=True)
class Change:
    """A change of a clause's tests, or of a benchmark or training run, since the baseline."""

    name: str  # clause, test without clause, file, benchmark or training run
    tests: list[str]
    note: str = ""


@dataclass(frozen=True)
class Pace:
    """A benchmark whose two intervals do not overlap."""

    name: str
    was: tuple[float, float, float]  # low, ratio, high
    now: tuple[float, float, float]


@dataclass(frozen=True)
class BaselineComparison:
    subject: str
    began: str
    verdict: str
    differs: list[str]  # differences that make the runs hard to compare
    broke: list[Change]
    fixed: list[Change]
    changed: list[Change]  # other outcomes, none of them red
    new: list[Change]
    gone: list[Change]
    slower: list[Pace]
    faster: list[Pace]


def read_report(file: Path) -> dict[str, Any]:
    """Read the `report.json` of an earlier run.

    Raises:
        ValueError: the file does not exist or is not a report.
    """
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"there is no report at {file}: {error.strerror}") from None
    except ValueError:
        raise ValueError(f"{file} is not JSON; expected the report.json of an earlier run") from None
    missing = [key for key in _REQUIRED if not isinstance(report, dict) or key not in report]
    if missing:
        raise ValueError(f"{file} lacks {', '.join(missing)}; expected the report.json of an earlier run")
    try:
        compare(report, report)
    except (KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{file} is not a report of this gate ({why}); expected an earlier report.json"
        ) from None
    return report


def compare(old: dict[str, Any], new: dict[str, Any]) -> BaselineComparison:
    """Compare two reports test by test, and return the differences by clause.

    If the reports are of different shards, tests that another shard may have are neither new nor removed.
    """
    then, now = _tests(old, new), _tests(new, old)
    if old.get("shard") != new.get("shard"):
        then = (
            then if new.get("shard") is None else {name: test for name, test in then.items() if name in now}
        )
        now = now if old.get("shard") is None else {name: test for name, test in now.items() if name in then}
    both = [(then[nodeid], test) for nodeid, test in now.items() if nodeid in then]
    paces = list(_paces(old, new))
    return BaselineComparison(
        subject=old["subject"],
        began=old["began"],
        verdict=old["verdict"],
        differs=_differs(old, new),
        broke=_by_clause((b for a, b in both if _breaks(a, b)), own=_own_test)
        + _changed_phases(old, new, broke=True),
        fixed=_by_clause((b for a, b in both if _is_red(a) and not _is_red(b)), own=_own_test)
        + _changed_phases(old, new, broke=False),
        changed=_by_clause(
            (
                b
                for a, b in both
                if a["outcome"] != b["outcome"] and not (_is_red(a) or _is_red(b) or _breaks(a, b))
            ),
            lambda test: f"{then[test['nodeid']]['outcome']}, now {test['outcome']}",
        ),
        new=_by_clause(
            (test for nodeid, test in now.items() if nodeid not in then),
            lambda test: test["outcome"] if _is_red(test) else "",
        )
        + _only_in(new, old),
        gone=_by_clause(test for nodeid, test in then.items() if nodeid not in now) + _only_in(old, new),
        slower=[pace for pace in paces if pace.now[0] > pace.was[2]],
        faster=[pace for pace in paces if pace.now[2] < pace.was[0]],
    )


def _tests(report: dict[str, Any], other: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the tests by id, with those that only `other` has if `report` knew the outcome without running them."""
    known = {result["clause"]: result for result in report.get("not_run", []) if result["outcome"] != NOT_RUN}
    others = (test for test in other["tests"] if test["clause"] in known)
    unscheduled = {test["nodeid"]: {**test, **known[test["clause"]], "replay": ""} for test in others}
    return unscheduled | {test["nodeid"]: test for test in report["tests"]}


def exit_code_since(comparison: BaselineComparison, report: dict[str, Any]) -> int:
    """Return the exit code of a run that only has to be as good as the earlier one.

    It is 2 if the input is invalid, 1 if something broke or the run ended early, else 0.
    """
    if report.get("bad_input"):
        return BAD_INPUT
    return int(bool(comparison.broke or report.get("ended_early")))


def sentences(comparison: BaselineComparison, most: int = 3) -> list[str]:
    """Return a summary of the comparison for a terminal, with at most `most` names of each kind."""
    red = sum(change.note != "" for change in comparison.new)
    lines = [f"compared with the baseline ({comparison.subject}, {comparison.began}): "]
    counts = [
        (len(comparison.broke), "broke"),
        (len(comparison.fixed), "fixed"),
        (len(comparison.changed), "changed otherwise"),
        (len(comparison.new), "with new tests" + (f" ({red} red)" if red else "")),
        (len(comparison.gone), "with removed tests"),
        (len(comparison.slower), "slower"),
        (len(comparison.faster), "faster"),
    ]
    lines[0] += ", ".join(f"{count} {word}" for count, word in counts if count) or "no difference"
    lines += [f"  the runs differ in: {'; '.join(comparison.differs)}"] if comparison.differs else []
    named = [("broke", [change.name for change in comparison.broke])]
    named += [("fixed", [change.name for change in comparison.fixed])]
    paces = [f"{pace.name} {pace.was[1]:.2g}, now {pace.now[1]:.2g}" for pace in comparison.slower]
    named += [("slower", paces)]
    for word, names in named:
        more = f" and {len(names) - most} more" if len(names) > most else ""
        lines += [f"  {word}: {'; '.join(names[:most])}{more}"] if names else []
    return lines


def _is_red(test: dict[str, Any]) -> bool:
    return test["outcome"] in RED


def _breaks(then: dict[str, Any], now: dict[str, Any]) -> bool:
    """Return whether a test became red, or passed with a name that the subject lacks now."""
    has_lost_name = (then["outcome"], now["outcome"]) == ("passed", "not provided")
    return has_lost_name or (_is_red(now) and not _is_red(then))


def _own_test(test: dict[str, Any]) -> str:
    return test["nodeid"]


def _own_file(test: dict[str, Any]) -> str:
    return test["nodeid"].partition("::")[0]


def _by_clause(
    tests: Iterable[dict[str, Any]],
    note: Callable[[dict[str, Any]], str] = lambda test: "",
    own: Callable[[dict[str, Any]], str] = _own_file,
) -> list[Change]:
    """Group tests by clause, those with a note first. `own` returns the group of a test without clause."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for test in tests:
        groups.setdefault(test["clause"] or own(test), []).append(test)
    changes = [
        Change(name, [test["nodeid"] for test in tests], "; ".join(sorted(set(map(note, tests)) - {""})))
        for name, tests in groups.items()
    ]
    return sorted(changes, key=lambda change: (not change.note, change.name))


def _changed_phases(old: dict[str, Any], new: dict[str, Any], broke: bool) -> list[Change]:
    """Return the benchmarks and training runs that broke or, without `broke`, were fixed."""
    changes: list[Change] = []
    for outcomes_of, word in ((_benchmark_outcomes, "benchmark"), (_training_outcomes, "training")):
        then, now = outcomes_of(old), outcomes_of(new)
        for name in then.keys() & now.keys():
            if then[name] != now[name] and now[name] == (not broke):
                changes.append(Change(f"{word} {name}", []))
    return sorted(changes, key=lambda change: change.name)


def _only_in(report: dict[str, Any], other: dict[str, Any]) -> list[Change]:
    """Return the benchmarks that only `report` has, or none if `other` has no timings."""
    rows = _rows(report)
    return [Change(f"benchmark {name}", []) for name in rows if name not in (_rows(other) or rows)]


def _rows(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in (report.get("speed") or {}).get("rows", [])}


def _benchmark_outcomes(report: dict[str, Any]) -> dict[str, bool]:
    rows = _rows(report)
    return {
        name: row["outcome"] == "measured"
        for name, row in rows.items()
        if row["outcome"] in ("measured", "failed")
    }


def _training_outcomes(report: dict[str, Any]) -> dict[str, bool]:
    return {run["name"]: run["agrees"] for run in (report.get("training") or {}).get("runs", [])}


def _paces(old: dict[str, Any], new: dict[str, Any]) -> Iterable[Pace]:
    then = _rows(old)
    for name, row in _rows(new).items():
        was = then.get(name)
        if was and was["outcome"] == row["outcome"] == "measured":
            yield Pace(name, (was["low"], was["ratio"], was["high"]), (row["low"], row["ratio"], row["high"]))


def _differs(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    traits: dict[str, Callable[[dict[str, Any]], Any]] = {
        "subject": lambda report: report["subject"],
        "profile": lambda report: report["profile"],
        "seed": lambda report: report.get("seed") or "default",
        "shard (tests of other shards are not compared)": lambda report: report.get("shard") or "all tests",
        "devices": lambda report: ", ".join(sorted({t["device"] for t in report["tests"]} - {""})) or "none",
        "torch": lambda report: report["environment"].get("packages", {}).get("torch"),
        "machine": lambda report: ", ".join(
            str(report["environment"].get(key)) for key in ("processor", "cores", "gpus")
        ),
    }
    return [
        f"{name}: {trait(new)}, in the baseline {trait(old)}"
        for name, trait in traits.items()
        if trait(old) != trait(new)
    ]
