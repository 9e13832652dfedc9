"""Attributes and parameter groups of an optimizer: compiled steps use them as eager steps do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from conformance.judge.clauses import clause
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.strategies.compiled_steps import SET_BY_TORCH, CompiledHarness, judge_values, outcome
from conformance.strategies.optimizers import maker
from conformance.strategies.user_optimizers import Plain


class OddlyNamed(Plain):
    """The attributes are named after parts of the name `_init_group`."""

    group = init = 0.5

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad * self.group * self.init)


@clause("dynamo.optimizer.optimizer.attributes")
@pytest.mark.deviation("optimizer_variable.names_compared_whole")
def test_attributes_named_like_parts_of_init_group(deviation: DeviationJudge, device: str) -> None:
    def graphs(harness: CompiledHarness) -> list[int]:
        return harness.train(2).compiled_after

    deviation.judge(
        lambda library: outcome(library, graphs, OddlyNamed, must_compile=False, device=device).value,
        torch_does=lambda value: value == [0, 0],
        we_do=lambda value: value == [1, 1],
    )


class KeepingCount(Plain):
    """Counts steps in an attribute that changes the result."""

    taken = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.taken += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad * (group["lr"] / self.taken))


@clause("dynamo.optimizer.optimizer.attributes")
@pytest.mark.deviation("optimizer_variable.attributes_are_written")
def test_attributes_that_a_step_writes(deviation: DeviationJudge, device: str) -> None:
    def script(harness: CompiledHarness) -> Any:
        return harness.train(4).weights(), harness.optimizer.taken

    # torch 2.11 raises an AssertionError without a text.
    judge_values(deviation, script, KeepingCount, device, torch_does=(False, "AssertionError"))


@clause("dynamo.optimizer.optimizer.groups_stay")
@pytest.mark.deviation("optimizer_variable.groups_stay")
def test_capturable_stays_as_user_set_it(deviation: DeviationJudge, device: str) -> None:
    """torch treats a group without parameters like one on a CUDA or XPU device."""

    def script(harness: CompiledHarness) -> list[bool]:
        harness.optimizer.add_param_group({"params": []})
        harness.train(2)
        return [group["capturable"] for group in harness.optimizer.param_groups]

    deviation.judge(
        lambda library: outcome(library, script, maker("Adam"), device=device).value,
        torch_does=lambda value: value == [torch.device(device).type in ("cuda", "xpu"), True],
        we_do=lambda value: value == [False, False],
    )


class WritingGroups(Plain):
    """Counts steps in its groups, which have torch's option `capturable` and do not set it."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float = 0.1) -> None:
        super().__init__(parameters, lr)
        for group in self.param_groups:
            group |= {"capturable": False, "taken": 0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["taken"] += 1
        super().step(closure)


@clause("dynamo.optimizer.optimizer.groups_stay")
@pytest.mark.deviation("optimizer_variable.groups_stay")
def test_capturable_of_groups_that_a_step_writes(deviation: DeviationJudge, device: str) -> None:
    def script(harness: CompiledHarness) -> dict[str, Any]:
        return {
            name: value
            for group in harness.train(3).optimizer.param_groups
            for name, value in group.items()
            if name in ("capturable", "taken")
        }

    deviation.judge(
        lambda library: outcome(library, script, WritingGroups, device=device).value,
        torch_does=lambda value: value == {"capturable": True, "taken": 3},
        we_do=lambda value: value == {"capturable": False, "taken": 3},
    )


class AskingGroups(Plain):
    """Updates differently if a group is `capturable`, and has groups without the option."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            factor = 2.0 if group.get("capturable", False) else 1.0
            for parameter in group["params"]:
                parameter.sub_(parameter.grad * group["lr"] * factor)


@clause("dynamo.optimizer.optimizer.options_that_groups_lack")
@pytest.mark.deviation("optimizer_variable.groups_stay")
def test_step_sees_no_option_that_groups_lack(deviation: DeviationJudge, device: str) -> None:
    judge_values(deviation, lambda harness: harness.train(4).weights(), AskingGroups, device)


@clause("dynamo.optimizer.optimizer.groups_stay")
@pytest.mark.parametrize("way", ["defaults", "capturable", "tensor lr"])
def test_groups_keep_their_options(subject: Library, device: str, way: str) -> None:
    """Compare all options, except those that torch sets on CUDA and XPU."""
    set_here = SET_BY_TORCH if torch.device(device).type in ("cuda", "xpu") else ()

    def script(harness: CompiledHarness) -> Any:
        before = [dict(group) for group in harness.optimizer.param_groups]
        same = harness.optimizer.param_groups[0]
        harness.train(2)
        return (
            before,
            [dict(group) for group in harness.optimizer.param_groups],
            same is harness.optimizer.param_groups[0],
        )

    before, now, is_same = outcome(subject, script, maker("AdamW", way), device=device).value
    assert is_same
    for was, is_now in zip(before, now, strict=True):
        for name in ("params", *set_here):
            was.pop(name), is_now.pop(name)
        assert repr(was) == repr(is_now)
