"""The first page of the summary of `ci/gpu`, and the predictions on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conformance.gpu import __main__ as command
from conformance.gpu import bandwidth, large, predictions, speed_phase, steps
from conformance.gpu.first_page import causes_of, first_page
from conformance.gpu.phases import OUT_OF_TIME
from conformance.gpu.predictions import Prediction

STEP = {"name": "fused_step gpt2 float32", "outcome": "measured", "says": "", "ratio": 0.6, "seconds": 1.4e-3}
STEP |= {"ratio_to_foreach": 0.5, "launches": 15, "host_seconds": 1.0, "torch_host_seconds": 2.0}


def red(test: str, reason: str) -> dict[str, Any]:
    return {
        "name": test,
        "outcome": "failed",
        "red": True,
        "reason": reason,
        "replay": f"pytest {test}",
    }


def report(device: str = "cuda", **rows: list[dict[str, Any]]) -> dict[str, Any]:
    phases = {
        name.replace("_", "-"): {"rows": found, "why": "", "not_run": [], "seconds": 1.0}
        for name, found in rows.items()
    }
    return {"device": device, "phases": phases}


def row(name: str, outcome: str, says: str = "", **more: Any) -> dict[str, Any]:
    return {"name": name, "outcome": outcome, "says": says, **more}


def test_first_page_says_what_the_host_lacks() -> None:
    warm = [row("compiler", "missing", "no cc"), row("C library", "there", "found _library.so")]
    page = first_page(report(warm_up=warm))
    assert "- **missing: compiler** no cc" in page
    assert "- C library: found _library.so" in page
    assert "what this host lacks is unknown" in first_page(report())


def test_first_page_counts_what_agrees_and_names_the_rest() -> None:
    rows = [row("a", "agrees"), row("b", "failed", "waits"), row("c", "failed", "waits")]
    assert "- waits: 1 of 3 good; **failed**: b, c" in first_page(report(waits=rows))


def test_first_page_lists_what_did_not_fit_the_time() -> None:
    found = report(judge=[])
    found["phases"]["judge"] |= {"why": f"cut: 2 of 9 {OUT_OF_TIME}", "not_run": ["t.py::a", "t.py::b"]}
    assert "- **not run: 2 of judge** (cut: 2 of 9" in first_page(found)
    assert "t.py::a, t.py::b" in first_page(found)


def test_red_tests_of_one_cause_stand_together() -> None:
    judged = [
        red("t.py::a", "RuntimeError: tensor 3 of 8 at 0x7f12: 'norm' is 1.5e-07\nmore"),
        red("t.py::b", "RuntimeError: tensor 12 of 40 at 0x7fab: 'scale' is -2.25"),
        red("t.py::c", "ValueError: another"),
        row("t.py::d", "passed"),
    ]
    assert [len(tests) for tests in causes_of(judged).values()] == [2, 1]
    page = first_page(report(judge=judged))
    assert (
        "| 2 | failed | RuntimeError: tensor 3 of 8 at 0x7f12: 'norm' is 1.5e-07 | pytest t.py::a |" in page
    )


def test_predictions_stand_beside_measurements() -> None:
    copy = row(
        "copy gpt2 float32", "measured", call="copy", shapes="gpt2", dtype="float32", seconds=1e-3, bytes=3e9
    )
    norm = copy | {
        "name": "total_norm 2 impl gpt2 float32",
        "call": "total_norm 2",
        "whose": "impl",
        "share": 0.5,
    }
    page = first_page(report(steps=[STEP], bandwidth=[copy, norm]))
    assert (
        "| fused_step ÷ torch's fused, GPT-2 float32 | 0.58 to 0.62 | ≤ 0.62 | 0.6 | goal met, as expected |"
        in page
    )
    assert "| fused_step, GPT-2 float32 ms | 1.33 to 1.5 |  | 1.4 | as expected |" in page
    assert "| launches of fused_step | 5 | ≤ 5 | 15 | GOAL MISSED, higher |" in page
    assert "| 0.75 to 1 | ≥ 0.75 | 0.5 | GOAL MISSED, lower |" in page
    assert "not measured" in page
    assert "| copy | 3.00 TB/s |" in page
    assert "| total_norm 2 | 50% |" in page
    assert "Expected" not in first_page(report("cpu", steps=[STEP]))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"a": {"b": 4.0}, "c": 2.0}, 2000.0),
        ({"a": {"b": 4.0}}, None),
        ({"a": {}, "c": 2.0}, None),
        ({}, None),
    ],
)
def test_measured_value_is_looked_up_divided_and_scaled(
    found: dict[str, Any], expected: float | None
) -> None:
    each = Prediction("", "p", "r", "a.b", [0.0, 1.0], over="c", scale=1e3)
    assert each.measured([{"name": "r", **found}]) == expected


def test_predictions_are_of_rows_that_the_phases_plan() -> None:
    """A row under another name would be taken for one that was not measured."""
    lists = [f"{shapes} float32" for shapes in steps._SHAPES["cuda"]] + list(map(" ".join, steps._OF_MODEL))
    large_lists = [f"{large._SHAPES['cuda']} {dtype}" for dtype in large._DTYPES]
    kernels = bandwidth.calls_on([torch.zeros(1)])
    planned = {
        "steps": {f"{call} {of}" for call in steps.CALLS for of in lists},
        "large": {f"{call} {of}" for call in steps.CALLS for of in large_lists},
        "bandwidth": {f"{kernel} impl gpt2 float32" for kernel in kernels},
        "speed": {case.name for case in speed_phase.cases("cuda")},
    }
    assert [each.row for each in predictions.load() if each.row not in planned[each.phase]] == []
    assert planned.keys() <= set(command.NAMES)
    assert all(each.expected[0] <= each.expected[1] for each in predictions.load())
