"""Information that torch's scaler lacks: whether a step was taken, and which parameter was not finite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from conformance.judge.clauses import clause
from conformance.judge.deviations import DeviationJudge
from conformance.judge.judgement import unavailable
from conformance.judge.library import Library
from conformance.judge.outcome import Raised, observe
from conformance.strategies.gradients import Gradient
from conformance.strategies.scaling import AMP_AWARE, FOUR, PLAIN, Harness, judge_added_method, pickled


@clause("amp.grad_scaler.step.was_taken")
@pytest.mark.deviation("grad_scaler.tells_whether_the_step_was_taken")
@pytest.mark.parametrize("optimizer", [*PLAIN, *AMP_AWARE])
@pytest.mark.parametrize("unscale", [True, False])
def test_step_was_taken_if_gradients_are_finite(
    deviation: DeviationJudge, device: str, optimizer: str, unscale: bool
) -> None:
    """Ask after step and after update, with two optimizers. `found_inf` gives the same answer on the device."""
    grad_outcomes = [None, math.inf, math.nan, None, None]

    def probe(library: Library) -> Any:
        harness, other = Harness(library, device, FOUR, optimizer), Harness(library, device, FOUR)
        other.scaler = harness.scaler
        answers = []
        for last in grad_outcomes:
            for current in (harness, other):
                current.zero_grad()
            harness.backward(last)
            other.backward()
            if unscale:
                harness.scaler.unscale_(harness.optimizer)
            for current in (harness, other):
                current.scaler.step(current.optimizer)
            before = harness.scaler.step_was_taken(harness.optimizer)
            harness.scaler.update()
            found_inf = harness.scaler.found_inf(harness.optimizer)
            assert harness.scaler.step_was_taken(other.optimizer) is True
            assert (found_inf.shape, found_inf.dtype, found_inf.device.type) == ((), torch.float32, device)
            answers.append((before, harness.scaler.step_was_taken(harness.optimizer), float(found_inf)))
        return answers

    expected = [(last is None, last is None, float(last is not None)) for last in grad_outcomes]
    judge_added_method(deviation, "step_was_taken", probe, lambda outcome: outcome == expected)


@clause("amp.grad_scaler.step.was_taken")
@pytest.mark.deviation("grad_scaler.tells_whether_the_step_was_taken")
@pytest.mark.parametrize("optimizer", [*PLAIN, *AMP_AWARE])
def test_step_was_not_taken_if_gradients_of_one_device_are_nonfinite(
    deviation: DeviationJudge, device: str, optimizer: str
) -> None:
    if device == "cpu":
        unavailable("one device type only")

    def probe(library: Library) -> Any:
        harness = Harness(library, device, FOUR, optimizer, init_scale=4.0).used()
        harness.parameters.append(Gradient((5,), seed=8, last=math.inf).parameter("cpu"))
        harness.optimizer.add_param_group({"params": harness.parameters[-1:]})
        harness.scaler.unscale_(harness.optimizer)
        harness.scaler.step(harness.optimizer)
        return harness.scaler.step_was_taken(harness.optimizer)

    judge_added_method(deviation, "step_was_taken", probe, lambda outcome: outcome is False)


@clause("amp.grad_scaler.step.was_taken")
@pytest.mark.deviation("grad_scaler.tells_whether_the_step_was_taken")
@pytest.mark.parametrize("enabled", [True, False])
def test_results_of_step_raise_before_first_step(
    deviation: DeviationJudge, device: str, enabled: bool
) -> None:
    """The methods raise before any step, also on an unpickled copy. A disabled scaler skips nothing."""

    def probe(library: Library) -> Any:
        harness = Harness(library, device, enabled=enabled)
        scalers = [harness.scaler]
        if enabled:
            harness.backward()
            harness.scaler.step(harness.optimizer)
            harness.scaler.update()
            scalers = [library.amp.GradScaler(device), pickled(harness.scaler)]
        answers = []
        for scaler in scalers:
            for question in (scaler.step_was_taken, scaler.found_inf):
                try:
                    answers.append(float(question(harness.optimizer)))
                except RuntimeError:
                    answers.append("RuntimeError")
        return answers

    expected = ["RuntimeError"] * 4 if enabled else [1.0, 0.0]
    judge_added_method(deviation, "step_was_taken", probe, lambda outcome: outcome == expected)


@clause("amp.grad_scaler.step.was_taken")
@pytest.mark.deviation("grad_scaler.tells_whether_the_step_was_taken")
def test_step_that_raises_keeps_last_found_inf(deviation: DeviationJudge, device: str) -> None:
    """A step without any gradient raises, and the result of the last check stays the same."""

    def probe(library: Library) -> Any:
        harness = Harness(library, device, FOUR)
        harness.backward(math.inf)
        harness.scaler.step(harness.optimizer)
        harness.scaler.update()
        harness.optimizer.zero_grad(set_to_none=True)
        with pytest.raises(AssertionError, match="No inf checks"):
            harness.scaler.step(harness.optimizer)
        return float(harness.scaler.found_inf(harness.optimizer)), harness.scaler.step_was_taken(
            harness.optimizer
        )

    judge_added_method(deviation, "found_inf", probe, lambda outcome: outcome == (1.0, False))


@clause("amp.grad_scaler.step.which_parameter")
@pytest.mark.deviation("grad_scaler.tells_whether_the_step_was_taken")
@pytest.mark.parametrize("names", ["current", "outdated", "none"])
@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("bad", [(), (3,), (0, 2), (1, 2, 3)], ids=str)
def test_nonfinite_parameters_names_them(
    deviation: DeviationJudge, device: str, names: str, unscale: bool, bad: tuple[int, ...]
) -> None:
    """A group whose list has changed since the optimizer was made has outdated names, which are not used."""
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.float64]
    values = [math.inf, math.nan, -math.inf, math.nan]
    named = {"current": range(4), "outdated": range(1), "none": range(0)}[names]
    gradients = tuple(
        Gradient((index + 2,), dtype, seed=index, last=values[index] if index in bad else None)
        for index, dtype in enumerate(dtypes)
    )

    def probe(library: Library) -> Any:
        harness = Harness(library, device, gradients).used()
        if names != "none":
            layers = [
                (f"layer.{index}.weight", parameter) for index, parameter in enumerate(harness.parameters)
            ]
            groups = [{"params": layers[:1]}, {"params": layers[1:]}]
            harness.optimizer = torch.optim.SGD(groups, lr=0.125)
        if names == "outdated":
            del harness.optimizer.param_groups[1]["params"][0]
        (harness.scaler.unscale_ if unscale else harness.scaler.step)(harness.optimizer)
        return [tuple(entry) for entry in harness.scaler.nonfinite_parameters(harness.optimizer)]

    def names_them(outcome: Any) -> bool:
        expected = [index for index in bad if names != "outdated" or index != 1]
        return len(outcome) == len(expected) and all(
            (f"layer.{index}.weight" == name if index in named else f"({index + 2},)" in name)
            and (rank, elements) == (0, 1)
            for index, (name, rank, elements) in zip(expected, outcome, strict=True)
        )

    judge_added_method(deviation, "nonfinite_parameters", probe, names_them)


@clause("amp.grad_scaler.step.which_parameter")
@pytest.mark.deviation("grad_scaler.tells_whether_the_step_was_taken")
def test_nonfinite_parameters_raises_without_gradients(deviation: DeviationJudge, device: str) -> None:
    """The method raises after zero_grad, instead of returning an empty list."""

    def probe(library: Library) -> Any:
        harness = Harness(library, device)
        harness.backward(math.inf)
        harness.scaler.step(harness.optimizer)
        harness.zero_grad()
        return observe(harness.scaler.nonfinite_parameters, harness.optimizer).raised

    def is_runtime_error(raised: Raised | None) -> bool:
        return raised is not None and raised.kind is RuntimeError

    judge_added_method(deviation, "nonfinite_parameters", probe, is_runtime_error)


@clause("amp.grad_scaler.update.min_scale")
@pytest.mark.parametrize("how", ["overflows", "new_scale", "new_scale tensor", "load_state_dict"])
def test_scale_never_falls_below_min_scale(subject: Library, device: str, how: str) -> None:
    """The scale never falls below min_scale, by overflow, update or loading."""
    harness = Harness(subject, device).used()
    harness.scaler = scaler = subject.amp.GradScaler(device, init_scale=8.0, min_scale=2.0)
    for _ in range(4 if how == "overflows" else 1):
        harness.zero_grad()
        harness.backward(math.inf)
        scaler.step(harness.optimizer)
        if how.startswith("new_scale"):
            scaler.update(0.5 if how == "new_scale" else torch.tensor(0.5, device=device))
        else:
            scaler.update()
    if how == "load_state_dict":
        scaler.load_state_dict({**scaler.state_dict(), "scale": 0.25})
    assert scaler.get_scale() == 2.0


@clause("amp.grad_scaler.update.min_scale")
def test_error_if_stuck_raises_at_min_scale(subject: Library, device: str) -> None:
    harness = Harness(subject, device)
    harness.scaler = scaler = subject.amp.GradScaler(
        device, init_scale=8.0, min_scale=2.0, error_if_stuck=True
    )

    def skip(times: int) -> None:
        for _ in range(times):
            harness.zero_grad()
            harness.backward(math.nan)
            scaler.step(harness.optimizer)
            scaler.update()

    # Two overflows lower the scale to its floor. Three more overflows at the floor count as stuck.
    skip(4)
    # The scale is read without a sync, so the error may be late.
    with pytest.raises(RuntimeError, match="min_scale"):
        skip(16)
