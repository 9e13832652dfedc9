"""Reports that are joined: shards of one run, and runs with the same seed that find flaky tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conformance.judge.accounting import OTHER_SHARD
from conformance.judge.clauses import all_clauses
from conformance.report import __main__ as command
from conformance.report import conclude
from conformance.report.merging import mark_flaky, merge_shards
from conformance.report.verdict import reasons
from conformance.selftests.misbehaving import write_files
from conformance.selftests.processes import run_python
from conformance.selftests.sample_reports import a_report, judged
from conformance.selftests.test_accounting import judge

FIRST, SECOND = list(all_clauses())[:2]
VALUE = "conformance/nn/utils/test_clip_grad_value.py"
pytestmark = pytest.mark.deadline(280.0)

WRONG_ONCE = """\
from pathlib import Path

import torch

_MARKER = Path(__file__).with_name("called")


def clip_grad_value_(parameters, clip_value, foreach=None):
    if _MARKER.exists():
        return torch.nn.utils.clip_grad_value_(parameters, clip_value, foreach)
    _MARKER.touch()
"""


def shard(number: int, *tests: dict[str, Any], **more: Any) -> dict[str, Any]:
    return a_report(*tests, shard=f"{number}/2", **more)


def not_run(clause: str, reason: str) -> dict[str, str]:
    return {"clause": clause, "outcome": "not run", "reason": reason}


def test_merged_shards_account_for_each_clause_once() -> None:
    others = {"not_run": [not_run(name, OTHER_SHARD) for name in all_clauses()]}
    first = shard(1, judged("passed", nodeid="b", clause=FIRST), **others)
    second = shard(2, judged("failed", nodeid="a", clause=SECOND), not_run=[not_run(FIRST, OTHER_SHARD)])
    merged = merge_shards([second, first])
    assert [test["nodeid"] for test in merged["tests"]] == ["a", "b"]
    assert {result["clause"] for result in merged["not_run"]} == all_clauses().keys() - {FIRST, SECOND}
    assert OTHER_SHARD not in {result["reason"] for result in merged["not_run"]}
    assert (reasons(merged), merged["shard"], merged["seconds"]) == (["1 test failed"], None, 2.0)


def test_merged_shards_keep_reasons_and_lack_of_names() -> None:
    lacking = {"clause": FIRST, "outcome": "not provided", "reason": "it lacks amp"}
    merged = merge_shards([shard(1, not_run=[lacking]), shard(2, not_run=[lacking])])
    assert lacking in merged["not_run"]
    assert merged["provides_nothing"]
    assert not merge_shards([shard(1, judged("passed"), not_run=[lacking]), shard(2)])["provides_nothing"]


def test_merged_report_has_no_baseline_of_a_shard() -> None:
    assert merge_shards([shard(1, baseline={"broke": []}), shard(2)])["baseline"] is None


def test_expectation_is_stale_if_its_tests_pass_in_all_shards() -> None:
    row = {"clause": FIRST, "test": "", "reason": "known", "expires": "9999-01-01", "link": ""}
    row |= {"state": "met", "outcome": "passed", "says": "all its tests that were selected for this run pass"}
    parts = [
        shard(number, judged("passed", nodeid=str(number), clause=FIRST), expectations=[row])
        for number in (1, 2)
    ]
    merged = merge_shards(parts)
    assert reasons(merged) == ["1 test stale"]
    assert merged["expectations"][0]["state"] == "met"
    assert reasons(merge_shards([parts[0], parts[1] | {"is_narrowed": True}])) == []
    parts[1]["tests"][0]["outcome"] = "expected"
    assert reasons(merge_shards(parts)) == []


@pytest.mark.parametrize(
    ("reports", "reported"),
    [
        ([shard(1)], "got the shards 1/2; expected 1/2, 2/2"),
        ([shard(2), shard(2)], "got the shards 2/2, 2/2; expected 1/2, 2/2"),
        ([shard(1), shard(2, subject="torch")], "the shards differ in subject: impl, torch"),
        ([shard(1), shard(2, seed=3)], "the shards differ in seed: None, 3"),
        ([shard(1), shard(2, suite={"catalogue": "other"})], "the shards have different catalogues"),
        ([shard(1, selection="a"), shard(2, selection="b")], "the shards divided different tests"),
    ],
)
def test_incomplete_or_different_shards_are_refused(reports: list[dict[str, Any]], reported: str) -> None:
    with pytest.raises(ValueError, match=reported):
        merge_shards(reports)


def test_shards_run_each_test_once_and_merge_to_complete_report(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("all", "1", "2")]
    for folder, words in zip(folders, ([], ["--shard=1/2"], ["--shard=2/2"]), strict=True):
        folder.mkdir()
        code, report = judge(folder, ["--subject=torch", *words, VALUE])
        assert code == 0
        conclude(report, folder, lambda report: None)
    complete, *parts = [json.loads((folder / "report.json").read_text()) for folder in folders]
    assert complete["selection"] is None
    assert len({report["selection"] for report in parts} - {None}) == 1
    ids = [{test["nodeid"] for test in report["tests"]} for report in (complete, *parts)]
    assert min(map(len, ids)) > 0
    assert ids[1] | ids[2] == ids[0]
    assert not ids[1] & ids[2]
    files = [str(folder / "report.json") for folder in folders[1:]]
    assert command.main(["--merge", *files, "--out", str(tmp_path / "merged")]) == 0
    merged = json.loads((tmp_path / "merged" / "report.json").read_text())
    assert [test["nodeid"] for test in merged["tests"]] == [test["nodeid"] for test in complete["tests"]]
    assert merged["not_run"] == complete["not_run"]
    relays = [json.loads((folder / "relay.json").read_text()) for folder in (folders[0], tmp_path / "merged")]
    assert [relay.pop("artifact") for relay in relays] == [str(folders[0]), str(tmp_path / "merged")]
    assert relays[0] == relays[1]
    assert relays[0].keys() == {"passed", "failed", "skipped"}
    assert sum(relays[0].values()) == len(complete["tests"]) + len(complete["not_run"])


def test_different_outcomes_with_same_seed_are_flaky() -> None:
    def run(*outcomes: str, **more: Any) -> dict[str, Any]:
        tests = [judged(outcome, nodeid=name, **more) for name, outcome in zip("ab", outcomes, strict=True)]
        return a_report(*tests)

    failed = run("passed", "failed", reason="wrong", replay="replay it")
    report = mark_flaky([run("passed", "passed"), failed, run("passed", "passed")])
    steady, flaky = report["tests"]
    assert steady["outcome"] == "passed"
    assert (flaky["outcome"], flaky["replay"]) == ("flaky", "replay it")
    assert flaky["reason"] == "passed, failed, passed in 3 runs with the same seed\nwrong"
    assert reasons(report) == ["1 test flaky"]
    assert (report["reruns"], report["seconds"]) == (2, 3.0)
    assert reasons(mark_flaky([failed, failed])) == ["1 test failed"]
    given_up = run("unavailable", "unavailable", reason="not run: its clause was given up after x (hang)")
    assert {test["outcome"] for test in mark_flaky([run("passed", "passed"), given_up])["tests"]} == {
        "passed"
    }
    assert reasons(mark_flaky([given_up, failed])) == ["1 test failed"]


def test_failure_of_a_clause_that_an_earlier_run_did_not_test_is_red() -> None:
    first = a_report(not_run=[not_run(FIRST, "lacking"), not_run(SECOND, "lacking")])
    report = mark_flaky([first, a_report(judged("failed", clause=FIRST))])
    assert reasons(report) == ["1 test failed"]
    assert report["not_run"] == [not_run(SECOND, "lacking")]


def test_rerun_reports_test_that_fails_once(tmp_path: Path) -> None:
    write_files(tmp_path / "wrong_once", {"__init__.py": "", "nn/__init__.py": "", "nn/utils.py": WRONG_ONCE})
    test = f"{VALUE}::test_clamps_values"
    words = ["wrong_once", test, "-n", "1", "--rerun", "1", "--out", str(tmp_path / "report")]
    ended = run_python("-m", "conformance", *words, cwd=tmp_path)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    outcomes = [test["outcome"] for test in report["tests"]]
    assert outcomes.count("flaky") == 1
    assert set(outcomes) == {"flaky", "passed"}
