"""Tensors that groups or parameters share in some steps only: compiled steps match eager ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conformance.judge.clauses import clause
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.strategies.compiled_steps import CompiledHarness, is_right, judge_values
from conformance.strategies.optimizers import Make, maker
from conformance.strategies.user_optimizers import Plain


def groups_of_one_rate(make: Any) -> Make:
    """Return a function that makes an optimizer of two groups, which share the tensor of their learning rate."""

    def make_groups(parameters: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
        return make(groups, lr=torch.tensor(0.1))

    return make_groups


@clause("dynamo.optimizer.guards.schedules")
@pytest.mark.deviation("optimizer_variable.shared_tensors")
@pytest.mark.parametrize("make", [torch.optim.SGD, Plain])
@pytest.mark.parametrize("rate", [1.0, torch.tensor(1.0)], ids=["number", "tensor"])
def test_rate_that_groups_shared_is_guarded(
    deviation: DeviationJudge, device: str, rate: Any, make: Any
) -> None:
    def script(harness: CompiledHarness) -> list[torch.Tensor]:
        harness.train(2).optimizer.param_groups[1]["lr"] = rate
        return harness.train(2).weights()

    judge_values(deviation, script, groups_of_one_rate(make), device)


def alike(harness: CompiledHarness) -> list[torch.nn.Parameter]:
    """Give the first two parameters one shape, and return them. No other parameter has a gradient."""
    first, second = harness.parameters[:2]
    second.data = torch.ones_like(first)
    harness.without_gradient = {2, 3}
    return [first, second]


@clause("dynamo.optimizer.guards.gradients")
@pytest.mark.deviation("optimizer_variable.shared_tensors")
def test_zeros_that_gradients_shared_are_guarded(deviation: DeviationJudge, device: str) -> None:
    def script(harness: CompiledHarness) -> list[torch.Tensor]:
        parameters = alike(harness)
        zeros = torch.zeros_like(parameters[0])
        for parameter in parameters:
            parameter.grad = zeros
        harness.take_step()
        return harness.train(2).weights()

    judge_values(deviation, script, maker("SGD"), device)


@clause("dynamo.optimizer.guards.gradients")
def test_gradients_shared_in_some_steps_match_eager_steps(subject: Library, device: str) -> None:
    def script(harness: CompiledHarness) -> list[torch.Tensor]:
        parameters = alike(harness)
        for _ in range(2):
            shared = torch.ones_like(harness.train().parameters[0])
            for parameter in parameters:
                parameter.grad = shared
            harness.take_step()
        return harness.train().weights()

    assert is_right(script, maker("SGD"), device, subject) is True


def replace_shared_state(harness: CompiledHarness) -> list[torch.Tensor]:
    entries = [harness.optimizer.state[parameter] for parameter in alike(harness)]
    harness.plain_train(1)
    (name,) = entries[0]
    entries[1][name] = entries[0][name]
    entries[1][name] = torch.full_like(harness.train(2).parameters[0], 0.5)
    return harness.train(2).weights()


@clause("dynamo.optimizer.guards.state")
def test_state_that_parameters_shared_is_guarded(subject: Library, device: str) -> None:
    assert is_right(replace_shared_state, maker("SGD", options=["momentum"]), device, subject) is True


@clause("dynamo.optimizer.guards.state")
@pytest.mark.deviation("optimizer_variable.shared_tensors")
def test_shared_state_is_guarded_without_init_group(deviation: DeviationJudge, device: str) -> None:
    judge_values(deviation, replace_shared_state, Plain, device)
