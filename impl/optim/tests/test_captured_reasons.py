"""Explanations of a captured optimizer's steps, and the conditions under which lists are not cached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from impl.optim import capture, explain, release
from impl.optim.tests import captured_twins as on
from impl.optim.tests.captured_twins import EAGER, KINDS, CapturedTwins, Side
from impl.optim.tests.test_captured import TrainingEvent, play, steps

pytestmark = pytest.mark.deadline(120)


@pytest.mark.parametrize("kind", list(KINDS))
def test_explain_names_implementation(kind: str) -> None:
    side = Side(kind, captured=True)
    for seed in range(3):
        on.iteration(side, seed)
    name, options = KINDS[kind]
    reported = explain(side.optimizer)
    assert reported.captured == (kind not in EAGER)
    assert reported.implementation == next(
        (flag for flag in ("fused", "foreach") if options.get(flag)), "single"
    )
    # SGD makes its momentum in the first step, when the lists have been built.
    makes_momentum = name == "SGD" and "momentum" in options
    assert reported.builds == (0 if kind in EAGER else 2 if makes_momentum else 1)


REASONS: dict[str, tuple[TrainingEvent, str]] = {
    "nothing": ((on.zero_grad, {}), "it is the first step"),
    "a missing gradient": ((on.give_gradients, {"missing": (0,)}), "the gradient of parameter 0 is None"),
    "another group": ((on.add_group, {}), "a group was added"),
    "a load": ((on.load, {"through_file": True}), "a parameter's state was replaced"),
    "cleared state": ((on.clear_state, {}), "a parameter's state was replaced"),
    "replaced state": ((on.edit_states, {"how": "replaced"}), "a parameter has other state"),
    "a moved counter": ((on.edit_states, {"how": "moved"}), "a step counter has other memory"),
    "a switch": ((on.set_values, {"amsgrad": False, "maximize": True}), "the group's maximize changed"),
    "a tensor for lr": ((on.set_values, {"lr": torch.tensor(0.5)}), "the group's lr changed"),
    "a schedule": ((on.set_values, {"lr": 0.5, "betas": (0.1, 0.2)}), "it is the first step"),
}


@pytest.mark.parametrize("name", list(REASONS))
def test_explain_names_reason_for_new_lists(name: str) -> None:
    (event, kwargs), because = REASONS[name]
    side = Side("AdamW fused", captured=True)
    for seed in range(3):
        on.iteration(side, seed)
    event(side, **kwargs)
    if event is not on.give_gradients:
        on.give_gradients(side)
    on.step(side)
    assert explain(side.optimizer).reason == because
    assert because in str(explain(side.optimizer))


# Parameters without a gradient: more sets than lists are kept for.
MISSING = ((0,), (1,), (2,), (0, 1), (1, 2))


def test_lists_for_alternating_gradients_are_kept() -> None:
    """Each of four sets of gradients has lists of its own, whose counters count the steps of all."""
    twins = CapturedTwins("AdamW fused")
    play(twins, steps(2))
    for number in range(25):
        twins.do(on.iteration, number, ((), *MISSING)[number % 4])
        reported = explain(twins.captured.optimizer)
        assert (reported.captured, reported.builds) == (True, min(number + 1, 4))
    twins.do(on.edit_states, how="replaced")
    twins.do(on.iteration, 25)
    assert explain(twins.captured.optimizer).reason == "a parameter has other state"


def test_lists_that_never_stay_are_not_kept() -> None:
    """Gradients that come and go; the steps are eager for a while, and captured again when they stay."""
    twins = CapturedTwins("AdamW fused")
    play(twins, steps(2))
    reported = []
    for number in range(25):
        twins.do(on.iteration, number, MISSING[number % 5])
        reported.append(explain(twins.captured.optimizer))
    assert [explained.captured for explained in reported] == [True] * 3 + [False] * 16 + [True] * 5 + [False]
    assert [reported[3].builds, reported[-1].builds] == [5, 10]
    assert (
        "its lists changed 4 times in succession, the last time because the gradient of parameter 0 is None"
        in str(reported[3])
    )
    play(twins, steps(18))
    assert explain(twins.captured.optimizer).captured


def test_first_build_is_no_change() -> None:
    """Four changes pause it; the lists of the first step, and of the first after a pause, have not changed."""
    side = Side("AdamW fused", captured=True)
    reported = []
    for number in range(5):
        on.iteration(side, number, MISSING[number % 5])
        reported.append((explain(side.optimizer).captured, explain(side.optimizer).builds))
    assert reported == [(True, 1), (True, 2), (True, 3), (True, 4), (False, 5)]
    for number in range(17):
        on.iteration(side, number)
    assert explain(side.optimizer).reason == "none were cached in the 16 steps before"
    assert explain(side.optimizer).builds == 6


def test_explain_names_reason_for_new_lists_with_graphs() -> None:
    side = Side("AdamW fused", captured=True)
    capture(side.optimizer, graph=True)
    reported = []
    for graph in (None, False, True):
        capture(side.optimizer, graph=graph)
        on.iteration(side)
        reported.append(explain(side.optimizer).reason)
    assert reported == ["it is the first step", "graphs are not wanted any more", "graphs were asked for"]


class OwnStep(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step(closure)


class OwnLists(torch.optim.SGD):
    def _init_group(self, *args: Any) -> Any:
        return super()._init_group(*args)


class OwnOptimizer(Optimizer):
    def _init_group(self, group: Any, params: Any) -> None: ...


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (OwnStep, f"{__name__}.OwnStep has its own step: what its lists depend on is not known"),
        (OwnLists, f"{__name__}.OwnLists has its own _init_group: what its lists depend on is not known"),
        (
            lambda params: OwnOptimizer(params, {}),
            f"{__name__}.OwnOptimizer is not of torch.optim: what its lists depend on is not known",
        ),
        (torch.optim.LBFGS, "LBFGS builds no lists: it has no _init_group"),
        (torch.optim.SparseAdam, "SparseAdam builds no lists: it has no _init_group"),
    ],
)
def test_capture_warns_why_optimizer_stays_eager(kind: Callable[..., Optimizer], reason: str) -> None:
    """The warning is given once, by capture."""
    optimizer = kind([torch.nn.Parameter(torch.zeros(1))])
    assert explain(optimizer).reason == "capture was not called"
    with pytest.warns(UserWarning, match="^nothing is captured") as warned:
        actual = [capture(optimizer) for _ in range(2)]
    assert actual == [optimizer] * 2
    assert [str(warning.message) for warning in warned] == [
        f"nothing is captured, and the step stays as it is: {reason}"
    ]
    assert str(explain(optimizer)) == f"eager, single: {reason}"
    assert explain(release(optimizer)).reason == "capture was not called"


def test_user_class_is_named_with_its_module() -> None:
    """The user's class has the name of a class of torch."""
    kind = type("AdamW", (Optimizer,), {"__module__": "strangers.optim", "__init__": OwnOptimizer.__init__})
    optimizer = kind([torch.nn.Parameter(torch.zeros(1))], {})
    with pytest.raises(ValueError, match=r"^strangers\.optim\.AdamW has no fused implementation"):
        capture(optimizer, implementation="fused")
    with pytest.raises(ValueError, match=r"^LBFGS has no fused implementation"):
        capture(torch.optim.LBFGS(optimizer.param_groups[0]["params"]), implementation="fused")


def test_subclass_with_unchanged_step_is_captured() -> None:
    class Mine(torch.optim.AdamW):
        def add_param_group(self, param_group: dict[str, Any]) -> None:
            super().add_param_group(param_group)

    assert explain(capture(Mine([torch.nn.Parameter(torch.zeros(1))]))).captured
