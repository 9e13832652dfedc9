"""The fused step, which replaces unscale_, clip_grad_norm_, step and update, judged by torch's four calls."""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD, Adagrad

from conformance.distributed.fsdp.scenes.rank_judging import share_of_examples
from conformance.judge.clauses import clause
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, Raised, assert_same_outcome, observe
from conformance.strategies.fused_steps import (
    FUSED,
    GRAD_OUTCOMES,
    KINDS,
    SOME,
    TORCH_HAS_NO_FUSED_STEP,
    FusedStep,
    Iterations,
    Take,
    assert_same_states,
    by_four,
    by_one,
    state_of,
)
from conformance.strategies.gradients import Gradient
from conformance.strategies.scaling import Harness


@clause("amp.grad_scaler.fused_step.does_what_the_four_do")
@TORCH_HAS_NO_FUSED_STEP
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("max_norm", [math.inf, 0.5])
@share_of_examples(0.4)
@given(grad_outcomes=GRAD_OUTCOMES)
def test_iterations_match_four_calls(
    fused: FusedStep, kind: str, max_norm: float, grad_outcomes: list[float | None]
) -> None:
    fused.judge_scenario(kind, grad_outcomes, max_norm)


@clause("amp.grad_scaler.fused_step.does_what_the_four_do")
@TORCH_HAS_NO_FUSED_STEP
@pytest.mark.parametrize("kind", ["adamw", "rmsprop"])
@pytest.mark.parametrize("norm_type", [1.0, 3.0, 0.5, math.inf, 0.0])
def test_norms_of_every_order(fused: FusedStep, kind: str, norm_type: float) -> None:
    fused.judge_scenario(kind, [None, math.nan, None], 0.5, norm_type)


@clause("amp.grad_scaler.fused_step.does_what_the_four_do")
@TORCH_HAS_NO_FUSED_STEP
@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("sizes", [(5, 5), (5, 7)])
def test_groups_can_be_reordered(fused: FusedStep, device: str, kind: str, sizes: tuple[int, int]) -> None:
    """Groups with equal settings may be updated together, in the order of the first step."""

    def reported(library: Library, take: Take) -> list[Outcome]:
        gradients = tuple(
            Gradient((size,), seed=size, scale=scale) for size, scale in zip(sizes, (1, 4), strict=True)
        )
        harness = Harness(library, device, gradients, KINDS[kind])
        states: list[Outcome] = []
        for _ in range(2):
            harness.zero_grad()
            harness.backward()
            take(harness, math.inf)
            states.append(state_of(harness))
            harness.optimizer.param_groups.reverse()
        return states

    fused.judge_states(reported)


def by_a_compiled_step(harness: Harness, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    if "step" not in vars(harness.optimizer):
        harness.optimizer.step = torch.compile(harness.optimizer.step, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo's own warnings during compilation
        return by_one(harness, max_norm, norm_type)


@clause("amp.grad_scaler.fused_step.does_what_the_four_do")
@TORCH_HAS_NO_FUSED_STEP
@pytest.mark.parametrize(
    ("compiled", "kind"),
    [
        ("fused_step", "adamw"),
        ("optimizer.step", "adamw"),
        pytest.param("fused_step", "rmsprop", marks=pytest.mark.profile("full")),
        pytest.param("optimizer.step", "sgd", marks=pytest.mark.profile("full")),
    ],
)
def test_compiled_steps_match_four_calls(fused: FusedStep, compiled: str, kind: str) -> None:
    torch._dynamo.reset()
    try:
        take = torch.compile(by_one, backend="eager") if compiled == "fused_step" else by_a_compiled_step
        fused.judge_scenario(kind, [None, None, math.inf, None], 0.5, take=take)
    finally:
        torch._dynamo.reset()


@clause("amp.grad_scaler.fused_step.leaves_gradients")
@TORCH_HAS_NO_FUSED_STEP
@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("last", [None, math.inf])
def test_gradients_stay_as_they_are(fused: FusedStep, device: str, kind: str, last: float | None) -> None:
    def probe(library: Library) -> Any:
        harness = Harness(library, device, SOME, KINDS[kind], init_scale=8.0)
        harness.zero_grad()
        harness.backward(last)
        having = [p for p in harness.parameters if p.grad is not None]
        before = [(p.grad, p.grad.clone()) for p in having]
        by_one(harness, 0.5)
        return [p.grad is grad and torch.equal(grad.nan_to_num(), copy.nan_to_num())
                for p, (grad, copy) in zip(having, before, strict=True)]  # fmt: skip

    def compare(are_unchanged: list[bool]) -> None:
        assert len(are_unchanged) == 5
        assert all(are_unchanged)

    fused.judge(probe, compare)


@clause("amp.grad_scaler.fused_step.does_what_the_four_do")
@TORCH_HAS_NO_FUSED_STEP
@pytest.mark.parametrize("kind", ["adamw", "nesterov", "rmsprop"])
@pytest.mark.parametrize("last", [None, math.inf])
def test_unscaled_gradients_are_not_unscaled_again(
    fused: FusedStep, device: str, kind: str, last: float | None
) -> None:
    """Gradients that the user has unscaled and changed are not unscaled again. The check of `unscale_` decides."""

    def reported(library: Library, take: Take) -> list[Outcome]:
        harness = Harness(library, device, SOME, KINDS[kind], init_scale=8.0)
        states = []
        for grad_outcome in (None, last):
            harness.zero_grad()
            harness.backward(grad_outcome)
            harness.scaler.unscale_(harness.optimizer)
            for parameter in harness.parameters:
                if parameter.grad is not None:
                    parameter.grad.clamp_(-0.5, 0.5)
            if take is by_one:
                harness.scaler.fused_step(harness.optimizer)
            else:
                harness.scaler.step(harness.optimizer)
                harness.scaler.update()
            states.append(state_of(harness))
        return states

    fused.judge_states(reported)


@clause("amp.grad_scaler.fused_step.several_optimizers")
@TORCH_HAS_NO_FUSED_STEP
@given(
    grad_outcomes=st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=5),
    kinds=st.tuples(*[st.sampled_from(["adam", "sgd", "adagrad", "rmsprop"])] * 2),
)
def test_several_optimizers(
    fused: FusedStep, device: str, grad_outcomes: Any, kinds: tuple[str, str]
) -> None:
    """The scale moves once per iteration, by the checks of all optimizers, no matter which uses the fused step."""

    def reported(library: Library, take: Take) -> list[Outcome]:
        harnesses = [
            Harness(library, device, SOME[-2:], KINDS[kind], init_scale=8.0, growth_interval=2)
            for kind in kinds
        ]
        harnesses[1].scaler = harnesses[0].scaler
        states = []
        for first_bad, second_bad, second_plain in grad_outcomes:
            for harness, bad, plain in zip(
                harnesses, (first_bad, second_bad), (False, second_plain), strict=True
            ):
                harness.zero_grad()
                harness.backward(math.inf if bad else None)
                if take is by_one and not plain:
                    harness.scaler.fused_step(harness.optimizer, update=False)
                else:
                    harness.scaler.step(harness.optimizer)
            harnesses[0].scaler.update()
            states += [state_of(harness) for harness in harnesses]
        return states

    fused.judge_states(reported)


@clause("amp.grad_scaler.fused_step.in_order")
@TORCH_HAS_NO_FUSED_STEP
def test_calls_out_of_order_raise(fused: FusedStep, device: str) -> None:
    """A second step before update, a step before any scale, and a step without gradients raise the errors of `step`."""

    def probe(library: Library) -> Any:
        harness = Harness(library, device, SOME, KINDS["adamw"])
        early = observe(harness.scaler.fused_step, harness.optimizer).raised
        harness.used().zero_grad()
        others = [
            observe(ask, other).raised
            for ask in (harness.scaler.fused_step, harness.scaler.nonfinite_parameters)
            for other in (torch.nn.Linear(1, 1), SGD)
        ]
        without = observe(harness.scaler.fused_step, harness.optimizer).raised
        harness.backward()
        harness.scaler.fused_step(harness.optimizer, update=False)
        twice = observe(harness.scaler.fused_step, harness.optimizer).raised
        weights = [parameter.detach().clone() for parameter in harness.parameters]
        ruinous = [
            observe(harness.scaler.fused_step, harness.optimizer, **arguments).raised
            for arguments in (
                {"max_norm": math.nan},
                {"norm_type": math.nan},
                {"low_precision_params": [torch.ones(1)]},
            )
        ]
        harness.scaler.update()
        ruinous.append(
            observe(harness.scaler.fused_step, harness.optimizer, low_precision_params=[torch.ones(1)]).raised
        )
        is_unchanged = all(map(torch.equal, weights, harness.parameters))
        return [raised and raised.text for raised in (early, *others, without, twice, *ruinous)], is_unchanged

    def compare(outcome: Any) -> None:
        texts, is_unchanged = outcome
        expected = [
            "Attempted fused_step but _scale is None",
            *["expected an optimizer, which has param_groups, got Linear", "got the class SGD"] * 2,
            "No inf checks were recorded for this optimizer",
            "step() has already been called since the last update()",
            "max_norm is nan",
            "norm_type is nan",
            "step() has already been called since the last update()",
            "low_precision_params are 1 tensors",
        ]
        mentions = [text and words in text for text, words in zip(texts, expected, strict=True)]
        assert mentions == [True] * 11
        assert is_unchanged

    fused.judge(probe, compare)


@clause("amp.grad_scaler.fused_step.in_order")
@TORCH_HAS_NO_FUSED_STEP
@pytest.mark.parametrize("kind", ["adamw", "rmsprop"])
def test_fused_step_without_gradients_can_be_repeated_with_them(
    fused: FusedStep, device: str, kind: str
) -> None:
    """The second step unscales its gradients, because the refused one has recorded nothing."""

    def repeated(library: Library, take: Take, is_first_refused: bool) -> tuple[Outcome, Outcome]:
        harness = Harness(library, device, SOME, KINDS[kind], init_scale=8.0).used()
        harness.zero_grad()
        refused = observe(harness.scaler.fused_step, harness.optimizer) if is_first_refused else Outcome()
        harness.backward()
        take(harness, math.inf)
        return refused, state_of(harness)

    _, expected = repeated(fused.reference, by_four, is_first_refused=False)

    def compare(actual: tuple[Outcome, Outcome]) -> None:
        refused, state = actual
        assert "No inf checks were recorded for this optimizer" in str(refused.raised)
        assert_same_states([expected], [state])

    fused.judge(lambda library: repeated(library, by_one, is_first_refused=True), compare)


@clause("amp.grad_scaler.fused_step.in_order")
@TORCH_HAS_NO_FUSED_STEP
def test_python_step_counts_raise_error_of_torch(fused: FusedStep, device: str) -> None:
    """Old state dicts contain such step counts. The error is that of torch's own step."""

    def reported(library: Library, take: Take) -> list[Any]:
        harness = Harness(library, device, SOME, KINDS["adamw"])
        # torch's fused optimizers on CUDA refuse a gradient with other strides than its parameter.
        harness.zero_grad()
        harness.backward()
        harness.optimizer.step()
        for state in harness.optimizer.state.values():
            state["step"] = state["step"].item()
        harness.zero_grad()
        harness.backward()
        return [
            observe(take, harness, math.inf).raised,
            [parameter.tolist() for parameter in harness.parameters],
        ]

    expected = reported(fused.reference, by_four)

    def compare(actual: list[Any]) -> None:
        assert actual == expected
        assert expected[0] is not None

    fused.judge(lambda library: reported(library, by_one), compare)


@clause("amp.grad_scaler.fused_step.in_order")
@TORCH_HAS_NO_FUSED_STEP
def test_refused_fused_optimizer_can_step_later(fused: FusedStep, device: str) -> None:
    """The error is that of torch's own step, and nothing is changed.

    torch 2.11 refuses `Adagrad(fused=True)` on CUDA. Here its check refuses the optimizer on every device.
    """

    def reported(library: Library, take: Take) -> tuple[Raised | None, Outcome]:
        harness = Harness(
            library, device, SOME, lambda groups: Adagrad(groups, lr=0.125, fused=True), init_scale=8.0
        )
        harness.zero_grad()
        harness.backward()

        def state() -> Outcome:
            return observe(lambda: [state_of(harness).value, [p.grad for p in harness.parameters]])

        before = state()
        step = harness.optimizer.step if take is by_four else functools.partial(take, harness, 0.5)
        refused = RuntimeError("no fused kernel for this device")
        with mock.patch("torch.optim.adagrad._device_dtype_check_for_fused", side_effect=refused):
            refusal = observe(step).raised
        assert_same_outcome(before, state())
        for group in harness.optimizer.param_groups:
            group["fused"] = False
        harness.optimizer._step_supports_amp_scaling = False  # set by the constructor, from torch 2.13 on
        take(harness, 0.5)
        return refusal, state_of(harness)

    expected_refusal, expected_state = reported(fused.reference, by_four)
    assert expected_refusal is not None

    def compare(actual: tuple[Raised | None, Outcome]) -> None:
        assert actual[0] == expected_refusal
        assert_same_states([expected_state], [actual[1]])

    fused.judge(lambda library: reported(library, by_one), compare)


@clause("amp.grad_scaler.fused_step.switched_off")
@TORCH_HAS_NO_FUSED_STEP
@pytest.mark.parametrize("kind", ["adamw", "rmsprop"])
@pytest.mark.parametrize("max_norm", [math.inf, 0.5])
def test_disabled_scaler_clips_and_steps(fused: FusedStep, device: str, kind: str, max_norm: float) -> None:
    """A disabled scaler clips and steps with any gradients."""

    def reported(library: Library, take: Take) -> Iterations:
        harness = Harness(library, device, SOME, KINDS[kind], enabled=False)
        iterations: Iterations = []
        for times in (1.0, 2.0):
            harness.zero_grad()
            harness.backward(times=times)
            iterations.append((observe(take, harness, max_norm), state_of(harness)))
        return iterations

    fused.judge_iterations(reported)


@clause("amp.grad_scaler.fused_step.does_what_the_four_do")
@TORCH_HAS_NO_FUSED_STEP
@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_momentum_that_begins_with_a_skipped_step(fused: FusedStep, device: str, dampening: float) -> None:
    """Compare with torch's unfused momentum, whose products are exact.

    torch's fused SGD reads uninitialised memory here.
    """

    def reported(library: Library, take: Take) -> Iterations:
        harness = Harness(
            library, device, SOME, lambda groups: SGD(groups, lr=0.125, momentum=0.5, dampening=dampening)
        )
        outcomes = []
        for last in (math.inf, None, None):
            harness.zero_grad()
            harness.backward(last)
            norm = observe(take, harness, math.inf)
            outcomes.append(
                (norm, observe(lambda: [parameter.detach().clone() for parameter in harness.parameters]))
            )
        return outcomes

    fused.judge_iterations(reported)
