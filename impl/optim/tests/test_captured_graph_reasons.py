"""Reasons why `impl.optim.capture(..., graph=True)` replays no graph, as far as they need no device with graphs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from impl.optim import capture, explain, release
from impl.optim._graphed_update import ReplayConditions, reason_for_eager
from impl.optim.tests import captured_twins as on
from impl.optim.tests.captured_graphs import DTYPES, reported, settled
from impl.optim.tests.captured_twins import CapturedTwins, Side
from impl.optim.tests.test_captured import play

pytestmark = pytest.mark.deadline(120)


def test_first_unmet_condition_is_the_reason() -> None:
    """A graph needs all conditions. The reason names the first unmet one, for every combination."""
    reasons: list[tuple[str, tuple[Any, ...], Any, str]] = [
        ("has_graphs", (True, False), True, "its parameters are on cpu, for which this torch has no graphs"),
        (
            "dtype",
            (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64),
            None,
            "a graph reads the learning rate in float32, too coarse for parameters of",
        ),
        ("is_on_one_device", (True, False), True, "a state or gradient of its parameters is not on cpu"),
        ("is_inference", (False, True), False, "inference mode is on"),
        ("is_watched", (False, True), False, "a TorchDispatchMode is active"),
        ("is_capturing", (False, True), False, "the user is capturing the step in another graph"),
    ]
    half = (torch.float32, torch.float16, torch.bfloat16)
    for values in itertools.product(*(values for _, values, _, _ in reasons)):
        against = [
            words
            for value, (name, _, expected, words) in zip(values, reasons, strict=True)
            if (value not in half if name == "dtype" else value is not expected)
        ]
        conditions: dict[str, Any] = {name: value for value, (name, *_) in zip(values, reasons, strict=True)}
        why = reason_for_eager(ReplayConditions("cpu", **conditions))
        assert (why is None) == (not against)
        assert why is None or why.startswith(against[0])


def test_cpu_steps_have_no_graph() -> None:
    twins = CapturedTwins("AdamW fused", graph=True, dtypes=DTYPES)
    play(twins, settled())
    assert str(explain(twins.captured.optimizer)) == (
        "captured, fused: 1 build of lists, the last one because it is the first step; "
        "no graph: its parameters are on cpu, for which this torch has no graphs"
    )


def test_eager_optimizer_explains_missing_graph() -> None:
    optimizer = torch.optim.LBFGS([torch.nn.Parameter(torch.zeros(1))])
    assert explain(capture(optimizer)).graph is None
    for graph in (True, None):
        assert str(explain(capture(optimizer, graph=graph)).graph) == "no graph: the whole step is eager"
    assert explain(capture(optimizer, graph=False)).graph is None
    capture(optimizer, graph=True)
    assert explain(release(optimizer)).graph is None


def test_graphs_that_were_asked_for_are_wanted_once_it_is_captured() -> None:
    side = Side("AdamW fused", captured=False)
    vars(side.optimizer)["_init_group"] = type(side.optimizer)._init_group
    capture(side.optimizer, graph=True)
    assert reported(side).reason == "the whole step is eager"
    del vars(side.optimizer)["_init_group"]
    capture(side.optimizer)
    assert reported(side).reason == "there was no step since graphs were asked for"


def test_steps_without_lists_say_so_of_graphs() -> None:
    side = Side("AdamW fused", captured=True, graph=True)
    for number in range(6):
        on.iteration(side, number, missing=(number % 2,))
    assert not explain(side.optimizer).captured
    assert reported(side).reason == "the whole step is eager"


def test_step_without_gradients_explains_missing_graph() -> None:
    side = Side("AdamW fused", captured=True, graph=True)
    on.step(side)
    assert reported(side).reason == "no parameter had a gradient"
