"""Tests of the figures to quote, of the causes of changes, and of the text of an issue, on invented results."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks import catalogue, decision, figures, fsdp_ranks, history, movers
from benchmarks.history import RatioPoint
from benchmarks.issue import issue
from benchmarks.tests.sample_results import git

pytestmark = pytest.mark.deadline(60)
TRAITS = {"cpu": "AMD EPYC", "num_cpu": "2", "gpu": "none", "torch": "2.13.0", "python": "3.11"}
COPIED = "RatioUnscale[gpt2, float32, kept, cpu]"
BEFORE = RatioPoint(0.5, 0.01, of_impl=0.05, of_torch=0.1)
SLOWER = RatioPoint(0.8, 0.01, of_impl=0.08, of_torch=0.1)


def point(
    commit: str, day: int, ratios: dict[str, RatioPoint], machine: str = "amd", **traits: str
) -> history.Point:
    return history.Point(Path(), machine, commit * 40, day * 86_400_000, TRAITS | traits, ratios)


def cause(after: RatioPoint = SLOWER, *, has_impl_changed: bool = True, **place: str) -> str:
    before, later = point("a", 1, {"x": BEFORE}), point("b", 2, {"x": after}, **place)
    return movers.cause(before, later, "x", has_impl_changed=has_impl_changed)


def test_cause_is_code_if_only_impl_has_changed() -> None:
    assert cause() == "code"
    assert cause(replace(SLOWER, value=0.3, of_impl=0.03)) == "code"
    # Both sides became slower by a fifth with the machine, and impl by much more.
    assert cause(replace(SLOWER, of_impl=0.096, of_torch=0.12)) == "code"


def test_cause_is_machine_if_something_else_than_impl_has_changed() -> None:
    assert cause(machine="intel") == "machine"
    assert cause(torch="2.14.0") == "machine"
    assert cause(has_impl_changed=False) == "machine"
    # impl takes as long as before, and torch became faster.
    assert cause(replace(SLOWER, of_impl=0.05, of_torch=0.0625)) == "machine"


def test_cause_is_method_if_the_benchmark_has_another_version() -> None:
    assert cause(replace(SLOWER, version="2")) == "method"
    assert cause(replace(SLOWER, version="2"), machine="intel") == "method"
    assert cause(replace(BEFORE, version="2")) == "method"


def test_cause_is_noise_if_the_intervals_overlap() -> None:
    assert cause(replace(SLOWER, noise=0.5)) == "noise"
    assert cause(replace(SLOWER, value=0.51)) == "noise"  # each interval ends between the two ratios
    assert cause(replace(SLOWER, value=0.53)) == "code"
    assert cause(replace(SLOWER, value=0.47)) == "code"


def test_each_cause_has_a_meaning() -> None:
    assert set(movers.CAUSES) == {"method", "noise", "machine", "code"}


def test_movers_are_sorted_by_seconds_and_not_by_ratio() -> None:
    quick, slow = (
        RatioPoint(1.0, 0.0, of_impl=1e-6, of_torch=1e-6),
        RatioPoint(1.0, 0.0, of_impl=1.0, of_torch=1.0),
    )
    bytes_used = RatioPoint(1.0, 0.0, None, 8.0, 8.0, "bytes")
    before = point("a", 1, {"quick": quick, "slow": slow, "memory": bytes_used, "old": RatioPoint(1.0, 0.0)})
    after = point(
        "b", 2,
        {
            "quick": replace(quick, value=9.0), "slow": replace(slow, value=0.9), "old": slow,
            "memory": replace(bytes_used, value=2.0), "new": slow,
        },
    )  # fmt: skip
    moved = movers.movers([before, after], None, lambda *commits: True)
    assert [(mover.case, mover.change, mover.ratios) for mover in moved] == [
        ("slow", "−100 ms", "1.00 → 0.90"),
        ("quick", "+8 µs", "1.00 → 9.00"),
    ]


@pytest.mark.parametrize(
    ("since_day", "earlier"), [(None, "a"), (0, "a"), (1, "a"), (2, "b"), (3, "b"), (4, "d"), (5, None)]
)
def test_movers_compare_with_the_newest_result_up_to_a_commit(
    since_day: int | None, earlier: str | None
) -> None:
    points = [point(commit, day, {"x": BEFORE}) for day, commit in enumerate("ab", 1)]
    points += [
        point("c", 3, {"x": BEFORE}, "intel"),
        point("d", 4, {"x": BEFORE}),
        point("e", 5, {"x": SLOWER}),
    ]
    since_ms = None if since_day is None else since_day * 86_400_000
    moved = movers.movers(points, since_ms, lambda *commits: True)
    assert [mover.commits for mover in moved] == ([f"{earlier * 8} → eeeeeeee"] if earlier else [])


def test_movers_of_a_new_machine_are_compared_with_another_one() -> None:
    (mover,) = movers.movers([point("a", 1, {"x": BEFORE}), point("b", 2, {"x": SLOWER}, "intel")], None)
    assert (mover.machine, mover.cause) == ("amd → intel", "machine")
    assert "| `x` | +30 ms | 0.50 → 0.80 | aaaaaaaa → bbbbbbbb | amd → intel | machine |\n" in movers.table(
        [mover]
    )


def test_impl_has_changed_if_a_commit_between_changes_it(tmp_path: Path) -> None:
    (tmp_path / "impl").mkdir()
    git(tmp_path, "init", "-q", "-b", "main")
    ids: list[str] = []
    for name in ("impl/a", "notes", "impl/b"):
        (tmp_path / name).write_text("")
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-qm", name)
        ids.append(git(tmp_path, "rev-parse", "HEAD"))
    first, second, third = ids
    assert [history.has_impl_changed(*pair, tmp_path) for pair in ((first, second), (second, third))] == [
        False,
        True,
    ]
    assert not history.has_impl_changed(first, first, tmp_path)
    assert history.has_impl_changed(first, "f" * 40, tmp_path)
    assert history.subjects(f"{first}..{third}", "--", "impl", root=tmp_path) == {third: "impl/b"}
    assert history.subjects(root=tmp_path) == dict(zip(ids, ("impl/a", "notes", "impl/b"), strict=True))
    assert history.release_date_ms(tmp_path) is None
    git(tmp_path, "tag", "v0.1.0", second)
    assert (
        history.release_date_ms(tmp_path) == int(git(tmp_path, "show", "-s", "--format=%at", second)) * 1000
    )


# Figures to quote


def test_figure_of_a_memory_bound_call_has_the_time_of_a_copy_as_floor() -> None:
    (row,) = figures.figures([point("a", 1, {COPIED: replace(BEFORE, share_of_copy=0.8)})])
    assert (row.figure, row.floor, row.reached) == ("0.50 × torch, 50 ms", "40 ms", "80%")
    assert (row.machine, row.commit) == ("amd", "a" * 8)
    assert f'`python -m benchmarks --case "{COPIED}"`' in figures.table([row])


def test_figure_of_a_state_dict_has_a_copy_of_its_bytes_as_floor() -> None:
    case = "RatioFsdpSave[model, FULL, cpu]"
    copied = replace(BEFORE, share_of_copy=0.8)
    rows = figures.figures([point("a", 1, {COPIED: copied, case: BEFORE})])
    assert [(row.floor, row.reached) for row in rows] == [("40 ms", "80%"), ("6.75 ms", "14%")]
    (row,) = figures.figures([point("a", 1, {case: BEFORE})])
    assert (row.floor, row.reached) == ("not recorded", "")


def test_figure_of_memory_has_bytes_as_floor() -> None:
    (row,) = figures.figures(
        [point("a", 1, {"FsdpPeak[2]": RatioPoint(0.8, 0.0, None, 160e6, 200e6, "bytes")})]
    )
    assert (row.figure, row.floor, row.reached) == ("0.80 × torch, 160 MB", "84 MB", "53%")
    transformer = fsdp_ranks.Transformer()
    assert sum(parameter.nbytes for parameter in transformer.parameters()) == figures.TRANSFORMER_BYTES


def test_figure_without_floor_says_why() -> None:
    (row,) = figures.figures([point("a", 1, {"RatioFsdpStep[2, original, cpu]": BEFORE})])
    assert (row.floor, row.reached) == ("none: mostly matrix products", "")
    (row,) = figures.figures([point("a", 1, {COPIED: RatioPoint(0.5, 0.01)})])
    assert (row.figure, row.floor, row.reached) == ("0.50 × torch", "not recorded", "")


def test_figure_is_of_the_newest_result_with_seconds() -> None:
    points = [
        point("a", 1, {COPIED: BEFORE}),
        point("b", 2, {COPIED: SLOWER}),
        point("c", 3, {COPIED: RatioPoint(0.1, 0.0)}),
    ]
    (row,) = figures.figures(points)
    assert row.figure == "0.80 × torch, 80 ms"
    assert figures.figures([]) == []


def test_commands_of_figures_measure_exactly_their_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.torch.cuda, "is_available", lambda: True)
    for headline in figures.QUOTED:
        words = shlex.split(figures.command(headline.case))
        assert words[:3] == ["python", "-m", "benchmarks"]
        monkeypatch.setattr(sys, "argv", words[2:])
        names = [catalogue.name_of(*case) for case in command._cases(command._options())]
        expected = [headline.case]
        if not headline.case.startswith("Ratio"):
            expected = [headline.case.replace("[", f"[{subject}, ") for subject in ("impl", "torch")]
        assert names == expected


# The text of an issue


def report(**rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "rows": [
            {"name": name, "outcome": "measured", "ratio": 0.8, "was": 0.5, "again": [0.81, 0.82]} | row
            for name, row in rows.items()
        ]
    }


def test_issue_names_case_commits_machine_command_and_cause() -> None:
    before, after = point("a", 1, {"x": BEFORE, "y": BEFORE}), point("b", 2, {"x": SLOWER, "y": SLOWER})
    red = {"verdict": decision.REGRESSION, "reported": "x was 0.50 × torch's time, now 0.80, 0.81, 0.82"}
    text = issue(report(x=red, y={"verdict": decision.OK}), after, [before], lambda *commits: True)
    assert text.startswith("Title: x was 0.50 × torch's time, now 0.80, 0.81, 0.82\n\n| case |")
    assert (
        "| `x` | 0.50 × torch (50 ms, torch 100 ms) at aaaaaaaa "
        "| 0.80, 0.81, 0.82 × torch (80 ms, torch 100 ms) at bbbbbbbb | +30 ms | code |\n"
    ) in text
    assert "`y`" not in text
    assert "Machine: amd (AMD EPYC, 2 cores, no GPU), torch 2.13.0, Python 3.11.\n" in text
    assert (
        'ci/bench --commit aaaaaaaa --machine amd --only "x"\nci/bench --commit bbbbbbbb --machine amd --only "x"\n'
        in text
    )
    assert "- *code*: impl has changed" in text


def test_issue_lists_commits_of_impl(monkeypatch: pytest.MonkeyPatch) -> None:
    def subjects(*revisions: str) -> dict[str, str]:
        assert revisions == (f"{'a' * 40}..{'b' * 40}", "--", "impl")
        return {f"{number:040}": "amp: do it" for number in range(22)}

    monkeypatch.setattr(history, "subjects", subjects)
    red = {"verdict": decision.REGRESSION, "reported": "x"}
    text = issue(report(x=red), point("b", 2, {"x": SLOWER}), [point("a", 1, {"x": BEFORE})])
    lines = ["- 00000000 amp: do it"] * 20
    assert "\n".join(["Commits of impl in aaaaaaaa..bbbbbbbb:", "", *lines, "- and 2 more", ""]) in text


def test_issue_says_if_torchs_earlier_time_is_unknown_or_a_case_is_missing() -> None:
    before, after = point("a", 1, {"x": RatioPoint(0.5, 0.01), "lost": BEFORE}), point("b", 2, {"x": SLOWER})
    lost = {
        "verdict": decision.MISSING,
        "outcome": "not available",
        "why": "no such name",
        "reported": "lost",
    }
    red = {"verdict": decision.REGRESSION, "reported": "x"}
    text = issue(report(x=red, lost=lost), after, [before], lambda *commits: True)
    assert text.startswith("Title: x (and 1 more)\n")
    assert "| +30 ms | code, unless torch's time moved (it was not recorded) |\n" in text
    assert "at aaaaaaaa | not available: no such name | | |\n" in text


@pytest.mark.parametrize("verdict", [decision.OK, decision.NEW, decision.INCONCLUSIVE, decision.SUSPECT])
def test_run_without_regression_has_no_issue(verdict: str) -> None:
    assert issue(report(x={"verdict": verdict}), point("b", 2, {"x": SLOWER}), []) == ""
