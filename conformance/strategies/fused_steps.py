"""Steps with clipping by torch's four calls and by `fused_step`, and scenarios of such steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, assert_same_outcome, observe
from conformance.judge.tolerances import Tolerance, norm_of, updates
from conformance.strategies.gradients import Gradient
from conformance.strategies.missing_kernels import fused_adagrad
from conformance.strategies.scaling import Harness, judge_added_method

TORCH_HAS_NO_FUSED_STEP = pytest.mark.deviation("grad_scaler.fused_step")
# 16500 elements are too many to be joined with other parameters, and are split into pieces.
SOME = (
    Gradient((5,), seed=1),
    Gradient((0,), seed=2),
    Gradient((3, 4), seed=3, layout="transposed"),
    Gradient((6,), None),
    Gradient((16_500,), seed=4, scale=0.1),
    Gradient((7,), seed=5),
)
# Betas that float32 holds exactly. torch's operators round betas to float32 before they compute 1 - beta on CUDA, and
# after it on the CPU.
_BETAS = (0.875, 0.984375)
KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "adam": lambda groups: Adam(groups, lr=0.125, betas=_BETAS, amsgrad=True, weight_decay=0.25, fused=True),
    "adamw": lambda groups: AdamW(groups, lr=0.125, betas=_BETAS, maximize=True, fused=True),
    "sgd": lambda groups: SGD(groups, lr=0.125, fused=True),
    "nesterov": lambda groups: SGD(groups, lr=0.125, momentum=0.5, nesterov=True, fused=True),
    "dampened": lambda groups: SGD(groups, lr=0.125, momentum=0.5, dampening=0.25, fused=True),
    "adagrad": lambda groups: fused_adagrad(groups, lr=0.125, lr_decay=0.5),
    "rmsprop": lambda groups: RMSprop(groups, lr=0.125),
}
FUSED = [name for name in KINDS if name != "rmsprop"]
# The first gradient is always finite, because torch's fused momentum reads uninitialised memory after a skipped first
# step.
GRAD_OUTCOMES = st.lists(st.sampled_from([None, None, None, math.inf, math.nan]), min_size=2, max_size=5).map(
    lambda grad_outcomes: [None, *grad_outcomes]
)
Take = Callable[..., torch.Tensor]  # a step: `by_four` (torch's calls) or `by_one` (`fused_step`)
Iterations = list[tuple[Outcome, Any]]  # the norm and the lasting state of each iteration


def by_four(
    harness: Harness, max_norm: float, norm_type: float = 2.0, total_norm: torch.Tensor | None = None
) -> torch.Tensor:
    """Step with torch's four calls. Clip by `total_norm`, or else by torch's norm. Return the norm."""
    harness.scaler.unscale_(harness.optimizer)
    norm = clipped([p for p in harness.parameters if p.numel()], max_norm, norm_type, total_norm)
    harness.scaler.step(harness.optimizer)
    harness.scaler.update()
    return norm


def clipped(
    parameters: list[Any], max_norm: float, norm_type: float = 2.0, total_norm: torch.Tensor | None = None
) -> torch.Tensor:
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)
    if max_norm < math.inf:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm if total_norm is None else total_norm)
    return norm


def by_one(harness: Harness, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    return harness.scaler.fused_step(harness.optimizer, max_norm, norm_type)


def norms_in(iterations: Iterable[tuple[Outcome, Any]]) -> list[torch.Tensor | None]:
    return [None if norm.raised else norm.value.values for norm, _ in iterations]


def by_four_with(norms: Iterable[torch.Tensor | None]) -> Take:
    """Return a step with torch's four calls that clips by these norms, one per iteration.

    Results that follow from a norm have the same bits, no matter how the norm was computed.
    """
    remaining_norms = iter(norms)
    return lambda harness, *expected: by_four(harness, *expected, total_norm=next(remaining_norms))


def state_of(harness: Harness) -> Outcome:
    return observe(
        lambda: {
            "parameters": [parameter.detach().clone() for parameter in harness.parameters],
            "optimizer": {
                number: {name: torch.as_tensor(value).clone() for name, value in state.items()}
                for number, state in harness.optimizer.state_dict()["state"].items()
            },
            "scaler": harness.scaler.state_dict(),
        }
    )


def iterations(
    library: Library, device: str, take: Take, kind: str, grad_outcomes: list[float | None], *expected: float
) -> Iterator[tuple[Outcome, Outcome]]:
    """Yield the norm and the lasting state after each iteration."""
    harness = Harness(library, device, SOME, KINDS[kind], init_scale=8.0, growth_interval=2)
    harness.optimizer.param_groups[-1]["lr"] *= 2
    for number, last in enumerate(grad_outcomes):
        harness.zero_grad()
        harness.backward(last, times=1.0 + number)
        if number == 2:
            harness.parameters[0].grad = None
        yield observe(take, harness, *expected), state_of(harness)


def assert_same_iterations(expected: Iterations, actual: Iterations, norm_type: float = 2.0) -> None:
    """Compare norms within the rounding of their sums, and the lasting state within the rounding of the updates."""
    tolerance = norm_of_some(norm_type)
    for norm, our_norm in zip([norm for norm, _ in expected], [norm for norm, _ in actual], strict=True):
        assert_same_outcome(norm, our_norm, tolerance)
    assert_same_states([state for _, state in expected], [state for _, state in actual])


def assert_same_states(expected: Sequence[Outcome], actual: Sequence[Outcome]) -> None:
    """Compare the states after each step, within the rounding of the updates so far."""
    for step, (state, actual_state) in enumerate(zip(expected, actual, strict=True), 1):
        assert_same_outcome(state, actual_state, updates(step))


def norm_of_some(norm_type: float) -> Tolerance:
    return norm_of(
        sum(math.prod(gradient.shape) for gradient in SOME if gradient.dtype), len(SOME), norm_type
    )


class FusedStep:
    """The fixture `fused`: the subject's fused step, judged by torch's four calls."""

    def __init__(self, deviation: DeviationJudge, reference: Library, device: str) -> None:
        self._deviation, self.reference, self._device = deviation, reference, device

    def judge(self, probe: Callable[[Library], Any], compare: Callable[[Any], None]) -> None:
        """Judge the result of `probe`. `compare` raises if it is wrong."""

        def is_right(outcome: Any) -> bool:
            compare(outcome)
            return True

        judge_added_method(self._deviation, "fused_step", probe, is_right)

    def judge_reported(self, reported: Callable[[Library, Take], Any]) -> None:
        """Judge that `reported` gives the same for one call as for four, within the rounding of an update."""
        expected = observe(reported, self.reference, by_four)
        assert expected.raised is None, expected.raised
        self.judge(
            lambda library: observe(reported, library, by_one),
            lambda actual: assert_same_states([expected], [actual]),
        )

    def judge_states(self, reported: Callable[[Library, Take], list[Outcome]]) -> None:
        """Judge that `reported` gives the same states for one call as for four, after each step."""
        expected = reported(self.reference, by_four)
        self.judge(
            lambda library: reported(library, by_one), lambda actual: assert_same_states(expected, actual)
        )

    def judge_iterations(
        self, reported: Callable[[Library, Take], Iterations], norm_type: float = 2.0, take: Take = by_one
    ) -> None:
        """Judge iterations by torch's four calls, which clip by the subject's norms.

        The norms are compared with torch's.
        """
        self.judge(
            lambda library: reported(library, take),
            lambda actual: assert_same_iterations(
                reported(self.reference, by_four_with(norms_in(actual))), actual, norm_type
            ),
        )

    def judge_scenario(
        self, kind: str, grad_outcomes: list[float | None], *expected: float, take: Take = by_one
    ) -> None:
        """Judge the scenario `iterations`. `expected` are the maximum norm and its order."""

        def reported(library: Library, take: Take) -> Iterations:
            return list(iterations(library, self._device, take, kind, grad_outcomes, *expected))

        self.judge_iterations(reported, *expected[1:], take=take)
