"""Judging by a deviation: a subject does what torch does or what Tandem does, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from conformance.distributed.fsdp.scenes import twins
from conformance.distributed.fsdp.scenes.scene import Scene
from conformance.judge import surface
from conformance.judge.deviations import DeviationJudge, StaleDeviation, does_as
from conformance.judge.files.rows import Deviation, ReferenceLimit, devices_of
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, observe
from conformance.judge.rank_errors import FaultRecord
from conformance.ranks import RankDied, RankRaised

ROW = Deviation("area.row", "area.clause", "torch does.", "We do.", "So.", "", "silent", ("cpu",))
OURS, TORCHS, THIRD = [observe(lambda: torch.ones(2))], [observe(lambda: torch.zeros(2))], []


def test_deviation_with_unknown_harm_raises() -> None:
    with pytest.raises(ValueError, match=r"row area\.row: harm is 'small'; expected one of silent, hang"):
        replace(ROW, harm="small")


def raising(error: Exception) -> list[Outcome]:
    def fail() -> None:
        raise error

    return [observe(fail)]


def is_ours(outcomes: Any) -> bool:
    return len(outcomes) == 1 and outcomes[0].raised is None and bool((outcomes[0].value.values == 1).all())


def takes_torchs_side(
    torchs: Any,
    subjects: Any,
    *,
    is_promised: bool = False,
    device: str | None = None,
    row: Deviation = ROW,
    **sides: Any,
) -> bool:
    libraries = {"conformance.exact_copy": subjects, "torch": torchs}
    judge = DeviationJudge(Library("conformance.exact_copy"), Library("torch"), row, is_promised, device)
    judge.judge(lambda library: libraries[library.spec], we_do=is_ours, **sides)
    return judge.subject_takes_torchs_side


REPORTED = {"torch_does": lambda outcome: outcome is TORCHS}
either_side = pytest.mark.parametrize("sides", [{}, REPORTED], ids=["other than Tandem", "as reported"])


@either_side
def test_outcome_of_one_side_is_accepted(sides: dict[str, Any]) -> None:
    assert takes_torchs_side(TORCHS, TORCHS, **sides)
    assert not takes_torchs_side(TORCHS, OURS, **sides)
    with pytest.raises(AssertionError, match="expected what Tandem does"):
        takes_torchs_side(TORCHS, THIRD, **sides)
    with pytest.raises(AssertionError, match="got what torch does"):
        takes_torchs_side(TORCHS, TORCHS, is_promised=True, **sides)
    with pytest.raises(StaleDeviation, match="what Tandem does"):
        takes_torchs_side(OURS, OURS, **sides)
    assert not takes_torchs_side(OURS, OURS, may_agree=True, **sides)
    with pytest.raises(AssertionError, match="torch does the right thing here too"):
        takes_torchs_side(OURS, TORCHS, may_agree=True, **sides)


@pytest.mark.parametrize(
    ("subject", "result", "expected_runs"),
    [
        ("conformance.exact_copy", OURS, ["conformance.exact_copy"]),
        ("conformance.exact_copy", TORCHS, ["conformance.exact_copy", "torch"]),
        ("torch", OURS, ["torch", "torch"]),
    ],
)
def test_torch_runs_only_if_needed(subject: str, result: Any, expected_runs: list[str]) -> None:
    runs = []

    def probe(library: Library) -> Any:
        runs.append(library.spec)
        return TORCHS if library.spec == "torch" else result

    judge = DeviationJudge(Library(subject), Library("torch"), ROW, asks_torch=False)
    judge.judge(probe, we_do=is_ours)
    assert runs == expected_runs


def test_deviation_is_stale_if_torch_does_neither() -> None:
    with pytest.raises(StaleDeviation, match="something else"):
        takes_torchs_side(THIRD, OURS, **REPORTED)


@either_side
def test_deviation_is_not_stale_on_other_device(sides: dict[str, Any]) -> None:
    with pytest.raises(StaleDeviation, match="what Tandem does"):
        takes_torchs_side(OURS, OURS, device="cpu", **sides)
    assert not takes_torchs_side(OURS, OURS, device="xpu", **sides)
    with pytest.raises(AssertionError, match="expected what Tandem does"):
        takes_torchs_side(OURS, TORCHS, device="xpu", **sides)


@either_side
def test_either_side_is_accepted_on_unnamed_device(sides: dict[str, Any]) -> None:
    for torchs in (TORCHS, THIRD):
        assert not takes_torchs_side(torchs, OURS, device="xpu", **sides)
        assert takes_torchs_side(torchs, torchs, device="xpu", is_promised=True, **sides)
    with pytest.raises(AssertionError, match="expected what Tandem does"):
        takes_torchs_side(TORCHS, THIRD, device="xpu", **sides)
    with pytest.raises(AssertionError, match="got what torch does"):
        takes_torchs_side(TORCHS, TORCHS, device="cpu", is_promised=True, **sides)


def test_deviation_without_devices_holds_on_all() -> None:
    row = replace(ROW, devices=())
    assert all(row.holds_on(device) for device in ("cpu", "cuda", "sim", None))


def test_dead_rank_equals_any_failure() -> None:
    record = FaultRecord("case", 1)
    died, raised = RankDied("exit code -11", record), raising(RuntimeError("escaped"))
    for failed in (died, raised, RankRaised("raised", record)):
        assert does_as(died, failed)
        assert does_as(failed, died)
    for results in (TORCHS, [*raised, *TORCHS]):
        assert not does_as(died, results)
        assert not does_as(results, died)


FIXED = replace(ROW, torch="<2.14", recorded="2026-11-22")


@pytest.fixture
def torch_is(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda version: monkeypatch.setattr(surface.torch, "__version__", version)


@either_side
def test_subjects_follow_tandem_on_fixed_torch(
    torch_is: Callable[[str], None], sides: dict[str, Any]
) -> None:
    torch_is("2.14.1+cpu")
    assert not takes_torchs_side(OURS, OURS, row=FIXED, **sides)
    with pytest.raises(AssertionError, match="torch does the right thing here too"):
        takes_torchs_side(OURS, TORCHS, row=FIXED, **sides)
    torch_is("2.13.0+cpu")
    assert takes_torchs_side(TORCHS, TORCHS, row=FIXED, **sides)
    with pytest.raises(StaleDeviation, match="torch now does what Tandem does"):
        takes_torchs_side(OURS, OURS, row=FIXED, **sides)


@either_side
@pytest.mark.parametrize("subjects", [OURS, TORCHS], ids=["ours", "torch's"])
def test_deviation_that_ends_too_early_is_stale(
    torch_is: Callable[[str], None], subjects: Any, sides: dict[str, Any]
) -> None:
    torch_is("2.14.1+cpu")
    with pytest.raises(StaleDeviation, match=r"is limited to torch <2\.14, but torch 2\.14 behaves so too"):
        takes_torchs_side(TORCHS, subjects, row=FIXED, **sides)


def test_third_outcome_of_fixed_torch_is_accepted(torch_is: Callable[[str], None]) -> None:
    torch_is("2.14.1+cpu")
    for right in (THIRD, OURS):
        assert not takes_torchs_side(THIRD, right, row=FIXED, **REPORTED)
    with pytest.raises(AssertionError, match="expected what Tandem does"):
        takes_torchs_side(THIRD, TORCHS, row=FIXED, **REPORTED)


def test_fix_of_torch_is_unknown_on_unnamed_device(
    torch_is: Callable[[str], None],
) -> None:
    torch_is("2.14.1+cpu")
    for torchs in (OURS, TORCHS):
        assert not takes_torchs_side(torchs, OURS, row=FIXED, device="xpu")


@pytest.mark.parametrize(
    ("torch_range", "version", "can", "does"),
    [
        ("<2.14", "2.13.0", False, ""),
        ("<2.14", "2.13.0", True, "is of torch <2.14, but torch 2.13 succeeds"),
        ("<2.14", "2.14.1", True, ""),
        ("<2.14", "2.14.1", False, "is of torch <2.14, but torch 2.14 fails"),
        ("", "2.14.1", False, ""),
        ("", "2.14.1", True, "is of all versions, but torch 2.14 succeeds"),
    ],
)
def test_limit_holds_for_its_torch_versions(
    torch_is: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    torch_range: str,
    version: str,
    can: bool,
    does: str,
) -> None:
    row = ReferenceLimit("area.limit", (), ("cpu",), "", "", "", torch=torch_range, recorded="2026-11-22")
    torch_is(version)
    monkeypatch.setattr(twins, "_torch_can", lambda *_: can)
    if not does:
        twins.assert_limit(row, Scene.forward)
    else:
        with pytest.raises(StaleDeviation, match=does):
            twins.assert_limit(row, Scene.forward)


@pytest.mark.parametrize(
    ("torch_range", "inside", "outside"),
    [
        ("", ["2.9.0", "2.13.0+cpu", "10.0"], []),
        ("<2.14", ["2.9.1", "2.13.0+cpu"], ["2.14.0a0+git1", "2.14.1", "3.0"]),
        (">=2.12", ["2.12.0", "2.100", "3.0"], ["2.11.0", "2.2"]),
        (">=2.12,<2.14", ["2.12.1", "2.13"], ["2.11", "2.14"]),
    ],
)
def test_range_holds_for_complete_releases(torch_range: str, inside: list[str], outside: list[str]) -> None:
    assert all(surface.is_torch_in(torch_range, version) for version in inside)
    assert not any(surface.is_torch_in(torch_range, version) for version in outside)


@pytest.mark.parametrize("torch_range", ["2.14", "<=2.14", "<2.14.1", "<2", ">=2.12, <2.14", "<2.14,"])
def test_invalid_range_raises(torch_range: str) -> None:
    with pytest.raises(ValueError, match=r"row area.row: torch = .* expected >=MAJOR.MINOR or <MAJOR.MINOR"):
        replace(ROW, torch=torch_range)


def test_ended_deviation_has_date() -> None:
    with pytest.raises(ValueError, match=r"row area\.row: torch 2\.14 fixed it and recorded is ''"):
        replace(ROW, torch="<2.14")
    assert FIXED.fixed_in == "2.14"
    assert replace(ROW, torch=">=2.12").fixed_in == ""


def test_deviation_lists_its_devices() -> None:
    assert devices_of("area.row", ["cpu", "xpu"]) == ("cpu", "xpu")


@pytest.mark.parametrize(
    ("devices", "got"),
    [(None, "missing"), ([], r"\[\]"), ("cpu", "'cpu'"), (["cpu", "cdua"], r"\['cpu', 'cdua'\]")],
    ids=["missing", "empty", "no list", "unknown"],
)
def test_unknown_devices_of_row_raise(devices: Any, got: str) -> None:
    """A limit of torch names its devices, because a limit on any device would leave nothing to judge."""
    with pytest.raises(ValueError, match=f"row area.row: devices is {got}, expected a list of cpu, cuda"):
        devices_of("area.row", devices)


@pytest.mark.parametrize("name", ["sim", "acme"])
def test_limit_of_the_simulated_device_holds_on_every_custom_one(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: name)
    row = ReferenceLimit("area.limit", (), ("sim",), "", "", "")
    assert row.holds_on([name, "cpu"])
    assert not row.holds_on(["cpu", "cuda"])


@pytest.mark.parametrize(
    ("third", "is_torchs"),
    [
        (raising(RuntimeError("of torch's insides")), True),
        (raising(RuntimeError("of its own")), True),
        (raising(TypeError("of torch's insides")), False),
        (TORCHS, False),
        (raising(RuntimeError("on one rank")) + TORCHS, False),
    ],
    ids=["same", "other words", "another error", "none", "on another rank too"],
)
def test_error_of_torch_is_identified_by_type(third: Any, is_torchs: bool) -> None:
    torchs = raising(RuntimeError("of torch's insides"))
    if is_torchs:
        assert takes_torchs_side(torchs, third)
    else:
        with pytest.raises(AssertionError, match="or what torch does"):
            takes_torchs_side(torchs, third)


@pytest.mark.parametrize("error", [1e-5, 1e-2])
def test_numbers_are_torchs_within_roundings(error: float) -> None:
    subjects = [observe(lambda: torch.full((2,), error))]
    if error < 1e-3:
        assert takes_torchs_side(TORCHS, subjects)
    else:
        with pytest.raises(AssertionError, match="or what torch does"):
            takes_torchs_side(TORCHS, subjects)
