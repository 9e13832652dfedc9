"""Tests of the first page of `ci/gpu`'s summary, and of its predictions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conformance.gpu import __main__ as command
from conformance.gpu import bandwidth, large, launches, predictions, speed_phase, steps
from conformance.gpu.first_page import causes_of, first_page
from conformance.gpu.phases import OUT_OF_TIME
from conformance.gpu.predictions import Prediction

STEP = {"name": "fused_step gpt2 float32", "outcome": "measured", "says": "", "ratio": 0.6, "seconds": 1.4e-3}
STEP |= {"ratio_to_foreach": 0.5, "host_seconds": 1.0, "torch_host_seconds": 2.0}


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
        name.replace("_", "-"): {"rows": rows_of_phase, "why": "", "not_run": [], "seconds": 1.0}
        for name, rows_of_phase in rows.items()
    }
    return {"device": device, "phases": phases}


def row(name: str, outcome: str, says: str = "", **more: Any) -> dict[str, Any]:
    return {"name": name, "outcome": outcome, "says": says, **more}


def test_first_page_lists_missing_parts_of_the_host() -> None:
    warm = [row("compiler", "missing", "no cc"), row("C library", "there", "found _library.so")]
    page = first_page(report(warm_up=warm))
    assert "- **missing: compiler** no cc" in page
    assert "- C library: found _library.so" in page
    assert "what this host lacks is unknown" in first_page(report())


def test_first_page_counts_agreeing_rows_and_names_the_others() -> None:
    rows = [row("a", "agrees"), row("b", "failed", "waits"), row("c", "failed", "waits")]
    assert "- waits: 1 of 3 good; **failed**: b, c" in first_page(report(waits=rows))


def test_first_page_lists_tests_that_were_not_run() -> None:
    cut = report(judge=[])
    cut["phases"]["judge"] |= {"why": f"cut: 2 of 9 {OUT_OF_TIME}", "not_run": ["t.py::a", "t.py::b"]}
    assert "- **not run: 2 of judge** (cut: 2 of 9" in first_page(cut)
    assert "t.py::a, t.py::b" in first_page(cut)


def test_red_tests_are_grouped_by_cause() -> None:
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


def test_predictions_are_listed_with_measurements() -> None:
    norm = row("total_norm 2 impl gpt2 float32", "measured", share=0.5)
    page = first_page(report(steps=[STEP], bandwidth=[norm]))
    assert (
        "| fused_step gpt2 float32: time ÷ torch's | 0.58 to 0.62 | ≤ 0.62 | 0.6 | goal met, as expected |"
        in page
    )
    assert "| fused_step gpt2 float32: time ms | 1.33 to 1.5 |  | 1.4 | as expected |" in page
    assert "| 0.75 to 1 | ≥ 0.75 | 0.5 | GOAL MISSED, lower |" in page
    assert "not measured" in page
    assert "Expected" not in first_page(report("cpu", steps=[STEP]))


def counted(call: str, shapes: str, subject: str, kernels: int, copies: int) -> dict[str, Any]:
    counts = {"kernels": kernels, "copies": copies, "synchronisations": 0, "reads": 0, "operators": 7}
    return row(f"{call} {shapes} {subject}", "counted", counts=counts)


def test_launches_are_measured_by_their_own_phase() -> None:
    # As an H100 counted them.
    counts = [
        counted("unscale_", "gpt2", "impl", 2, 0),
        counted("clip_grad_norm_", "gpt2", "impl", 3, 0),
        counted("whole AMP step", "1000x1k", "torch", 107, 2),
        counted("whole AMP step", "gpt2", "impl", 18, 0),
        counted("whole AMP step", "gpt2", "torch", 48, 2),
        counted("fused AMP step", "gpt2", "impl", 6, 0),
    ]
    page = first_page(report(launches=counts))
    assert "| unscale_ gpt2 impl: launches | 2 at d2211600 | ≤ 2 | 2 | goal met, as expected |" in page
    assert "| clip_grad_norm_ gpt2 impl: launches | 3 at d2211600 | ≤ 3 | 3 | goal met, as expected |" in page
    assert "| fused AMP step gpt2 impl: launches | 5 at d2211600 | ≤ 5 | 6 | GOAL MISSED, higher |" in page
    assert "| whole AMP step 1000x1k torch: launches | 109 at d2211600 |  | 109 | as expected |" in page
    assert "| whole AMP step gpt2 torch: launches | 50 at d2211600 |  | 50 | as expected |" in page
    assert "| whole AMP step gpt2 impl: launches | 18 at d2211600 |  | 18 | as expected |" in page
    on_cpu = counted("unscale_", "gpt2", "impl", 2, 0)
    on_cpu["counts"] |= {"copies": None}
    assert "| unscale_ gpt2 impl: launches | 2 at d2211600 | ≤ 2 | not measured |" in first_page(
        report(launches=[on_cpu])
    )


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"a": {"b": 4.0}, "c": 2.0}, 2000.0),
        ({"a": {"b": 4.0}}, None),
        ({"a": {}, "c": 2.0}, None),
        ({}, None),
    ],
)
def test_measured_value_is_looked_up_divided_and_scaled(
    values: dict[str, Any], expected: float | None
) -> None:
    prediction = Prediction("p", "r", "", "a.b", [0.0, 1.0], over="c", scale=1e3)
    assert prediction.measured([{"name": "r", **values}]) == expected


def test_predictions_name_planned_rows() -> None:
    """A prediction of an unknown row would be shown as not measured."""
    lists = [f"{shapes} float32" for shapes in steps._SHAPES["cuda"]] + list(map(" ".join, steps._OF_MODEL))
    large_lists = [f"{large._SHAPES['cuda']} {dtype}" for dtype in large._DTYPES]
    kernels = bandwidth.calls_on([torch.zeros(1)])
    planned = {
        "steps": {f"{call} {of}" for call in steps.CALLS for of in lists},
        "large": {f"{call} {of}" for call in steps.CALLS for of in large_lists},
        "bandwidth": {f"{kernel} impl gpt2 float32" for kernel in kernels},
        "launches": {
            f"{call} {of} {subject}"
            for call in launches.WORKLOADS
            for of in launches._SHAPES["cuda"]
            for subject in ("impl", "torch")
        },
        "speed": {case.name for case in speed_phase.cases("cuda")},
    }
    loaded = predictions.load()
    assert [entry.row for entry in loaded if entry.row not in planned[entry.phase]] == []
    assert planned.keys() <= set(command.NAMES)
    assert all(entry.expected[0] <= entry.expected[1] for entry in loaded)
