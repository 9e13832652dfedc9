"""GradScaler.step: when the optimizer steps, the returned value, and optimizers that unscale themselves."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.judge.clauses import clause
from conformance.judge.comparing import Compare
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome
from conformance.strategies.gradients import Gradient
from conformance.strategies.scaling import (
    AMP_AWARE,
    FOUR,
    MEASURED_DTYPES,
    OPTIMIZERS,
    PLAIN,
    Aware,
    Harness,
    Recording,
    TakesScaler,
)

NONFINITE = [math.inf, -math.inf, math.nan]
# The outcome of each iteration: None is clean, other values replace the last element of the last gradient.
GRAD_OUTCOMES = st.lists(st.sampled_from([None, None, *NONFINITE]), min_size=3, max_size=8)


@clause("amp.grad_scaler.step.steps_or_skips")
@pytest.mark.parametrize("optimizer", [*PLAIN, *AMP_AWARE])
@given(grad_outcomes=GRAD_OUTCOMES)
def test_iterations_match_torch(
    compare: Compare, device: str, optimizer: str, grad_outcomes: list[float | None]
) -> None:
    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, optimizer=optimizer, init_scale=8.0, growth_interval=2)
        for last in grad_outcomes:
            yield from harness.iteration(last)

    compare(scenario)


@clause("amp.grad_scaler.step.steps_or_skips")
@pytest.mark.parametrize("dtype", MEASURED_DTYPES, ids=str)
@pytest.mark.parametrize("unscale", [True, False])
@given(grad_outcomes=GRAD_OUTCOMES)
def test_iterations_of_every_dtype(
    compare: Compare, device: str, dtype: torch.dtype, unscale: bool, grad_outcomes: list[float | None]
) -> None:
    gradients = (
        Gradient((5,), dtype, seed=1),
        Gradient((3, 4), dtype, seed=2),
        Gradient((9,), dtype, seed=3),
    )

    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, gradients, "momentum", init_scale=24.0, growth_interval=2)
        for last in grad_outcomes:
            yield from harness.iteration(last, unscale=unscale)

    compare(scenario)


@clause("amp.grad_scaler.step.steps_or_skips")
@pytest.mark.parametrize("last", [None, *NONFINITE], ids=repr)
def test_skipped_step_is_not_called(subject: Library, device: str, last: float | None) -> None:
    """A skipped step is not even called with zeroed gradients, because schedulers and hooks count the calls."""
    harness = Harness(subject, device, optimizer="recording")
    hooked: list[str] = []
    harness.optimizer.register_step_pre_hook(lambda *_: hooked.append("before"))
    harness.backward(last)
    harness.scaler.step(harness.optimizer)
    assert len(harness.optimizer.calls) == (1 if last is None else 0)
    assert bool(hooked) == (last is None)
    assert all(bool((parameter == 0).all()) for parameter in harness.parameters) == (last is not None)


@clause("amp.grad_scaler.step.steps_or_skips")
@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("optimizer", ["recording", "aware", "fused adam"])
@given(edit=st.sampled_from([0.0, 1.0, math.inf, math.nan]), last=st.sampled_from([None, math.inf, math.nan]))
def test_changed_gradients_keep_decision_of_unscale(
    compare: Compare, device: str, unscale: bool, optimizer: str, edit: float, last: float | None
) -> None:
    """Gradients that change after unscale_ (clipped, zeroed, non-finite) do not change the decision of unscale_."""

    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, optimizer=optimizer, init_scale=8.0)
        for _ in range(2):
            harness.zero_grad()
            harness.backward(last)
            if unscale:
                yield harness.did(harness.scaler.unscale_, harness.optimizer)
            harness.parameters[-1].grad.fill_(edit)
            yield from harness.calls("step", "update")

    compare(scenario)


@clause("amp.grad_scaler.step.returns")
@pytest.mark.parametrize("last", [None, math.inf], ids=repr)
@pytest.mark.parametrize("returns", [None, 0.5, "text", 0, False])
def test_returns_what_the_optimizer_returns(
    compare: Compare, device: str, last: float | None, returns: Any
) -> None:
    def scenario(library: Library) -> Iterator[Outcome]:
        make = functools.partial(Recording, returns=returns)
        harness = Harness(library, device, optimizer=make)
        harness.backward(last)
        yield harness.did(harness.scaler.step, harness.optimizer)

    compare(scenario)


@clause("amp.grad_scaler.step.hands_arguments_on")
@pytest.mark.parametrize("optimizer", ["recording", "aware"])
@given(
    args=st.lists(st.integers() | st.text(max_size=3), max_size=3),
    kwargs=st.dictionaries(st.sampled_from(["metric", "lr", "clip"]), st.floats(0, 1), max_size=3),
)
def test_hands_arguments_on(
    compare: Compare, device: str, optimizer: str, args: list[Any], kwargs: dict[str, Any]
) -> None:
    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, optimizer=optimizer)
        harness.backward()
        yield harness.did(harness.scaler.step, harness.optimizer, *args, **kwargs)

    compare(scenario)


@clause("amp.grad_scaler.step.refuses_closures")
@pytest.mark.parametrize("optimizer", ["sgd", "aware", "fused adam"])
@pytest.mark.parametrize("closure", [lambda: 1.0, None], ids=["closure", "None"])
@pytest.mark.parametrize("unscale", [True, False])
def test_closure_by_keyword(
    compare: Compare, device: str, optimizer: str, closure: Callable[[], float] | None, unscale: bool
) -> None:
    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, optimizer=optimizer)
        yield harness.did(harness.scaler.step, harness.optimizer, closure=closure)
        harness.backward()
        if unscale:
            yield harness.did(harness.scaler.unscale_, harness.optimizer)
        yield harness.did(harness.scaler.step, harness.optimizer, closure=closure)
        yield harness.did(harness.scaler.step, harness.optimizer)

    before, *_, refused, repeated = compare(scenario)
    assert all("Closure use is not" in str(outcome.raised) for outcome in (before, refused))
    assert repeated.raised is None


@clause("amp.grad_scaler.step.refuses_closures")
@pytest.mark.deviation("grad_scaler.closure_by_position")
@pytest.mark.parametrize("unscale", [True, False])
def test_closure_by_position(deviation: DeviationJudge, device: str, unscale: bool) -> None:
    def probe(library: Library) -> tuple[int, str, bool]:
        harness = Harness(library, device, FOUR[:1])
        harness.backward()
        calls: list[int] = []
        if unscale:
            harness.scaler.unscale_(harness.optimizer)
        before = harness.parameters[0].grad.clone()

        def closure() -> float:
            calls.append(1)
            return 0.0

        outcome = harness.did(harness.scaler.step, harness.optimizer, closure)
        is_unchanged = torch.equal(before, harness.parameters[0].grad)
        return len(calls), str(outcome.raised), is_unchanged

    text = "RuntimeError: Closure use is not currently supported if GradScaler is enabled."
    deviation.judge(
        probe,
        torch_does=lambda outcome: outcome[:2] == (1, "None"),
        we_do=lambda outcome: outcome == (0, text, True),
    )


@clause("amp.grad_scaler.step.aware_optimizers")
@pytest.mark.parametrize("optimizer", AMP_AWARE)
@given(
    plan=st.lists(st.tuples(st.booleans(), st.sampled_from([None, None, *NONFINITE])), min_size=3, max_size=6)
)
def test_optimizers_that_unscale_by_themselves(
    compare: Compare, device: str, optimizer: str, plan: list[tuple[bool, float | None]]
) -> None:
    """The optimizers get the scale unless unscale_ was called. They always get found_inf, and keep no attribute."""

    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, optimizer=optimizer, init_scale=24.0, growth_interval=2)
        for unscale, last in plan:
            harness.zero_grad()
            harness.backward(last)
            yield from harness.calls(*["unscale_"] * unscale, "step", "update")

    compare(scenario)


@clause("amp.grad_scaler.step.aware_optimizers")
@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("last", [None, math.nan], ids=repr)
def test_existing_grad_scale_is_multiplied_by_scale(
    compare: Compare, device: str, unscale: bool, last: float | None
) -> None:
    """A grad_scale that the optimizer already has is multiplied by the scale."""

    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, optimizer="aware", init_scale=8.0)
        harness.optimizer.grad_scale = torch.tensor(4.0, device=device)
        harness.backward(last)
        yield from harness.calls(*["unscale_"] * unscale, "step", "update")

    compare(scenario)


@clause("amp.grad_scaler.step.aware_optimizers")
@pytest.mark.parametrize("optimizer", AMP_AWARE)
def test_aware_optimizers_without_gradients(compare: Compare, device: str, optimizer: str) -> None:
    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, (Gradient((2,), None),) * 2, optimizer).used()
        yield from harness.calls("step", "update")

    compare(scenario)


@clause("amp.grad_scaler.step.aware_optimizers")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("last", [None, math.inf], ids=repr)
def test_aware_optimizers_may_hold_half_precision(
    compare: Compare, device: str, dtype: torch.dtype, last: float | None
) -> None:
    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(
            library, device, (Gradient((3,), dtype, seed=1), Gradient((5,), dtype, last=last)), "aware"
        )
        harness.used()
        for _ in range(2):
            yield from harness.calls("step", "update")

    compare(scenario)


@clause("amp.grad_scaler.step.aware_optimizers")
def test_optimizers_that_take_the_scaler(compare: Compare, device: str) -> None:
    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, optimizer=TakesScaler, init_scale=8.0)
        harness.backward()
        yield harness.did(harness.scaler.step, harness.optimizer)
        assert [scaler is harness.scaler for scaler in harness.optimizer.scalers] == [True]
        yield from harness.calls("step", "update")

    compare(scenario)


@clause("amp.grad_scaler.step.optimizer_raises")
@pytest.mark.parametrize("unscale", [True, False])
def test_plain_step_that_raises_can_be_repeated(compare: Compare, device: str, unscale: bool) -> None:
    """The gradients were unscaled before the error, so the next attempt must not unscale them again."""

    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, init_scale=8.0)
        harness.backward()
        real = harness.optimizer.step

        def fails(*_: Any) -> None:
            raise MemoryError("no room for the step")

        harness.optimizer.step = fails
        if unscale:
            yield harness.did(harness.scaler.unscale_, harness.optimizer)
        yield harness.did(harness.scaler.step, harness.optimizer)
        harness.optimizer.step = real
        yield from harness.calls("step", "step", "update")

    compare(scenario)


@clause("amp.grad_scaler.step.optimizer_raises")
@pytest.mark.deviation("grad_scaler.nothing_left_on_the_optimizer")
def test_aware_step_that_raises_leaves_no_attributes(deviation: DeviationJudge, device: str) -> None:
    """The attributes on the optimizer must be removed, because the next attempt would multiply them in."""

    def probe(library: Library) -> tuple[bool, list[Any]]:
        harness = Harness(library, device, optimizer=functools.partial(Aware, raises=True), init_scale=8.0)
        harness.backward()
        assert "no room for the step" in str(harness.did(harness.scaler.step, harness.optimizer).raised)
        left = hasattr(harness.optimizer, "grad_scale") or hasattr(harness.optimizer, "found_inf")
        harness.optimizer.raises = False
        harness.scaler.step(harness.optimizer)
        return left, [scale for scale, _ in harness.optimizer.handed]

    deviation.judge(
        probe,
        torch_does=lambda outcome: outcome == (True, [8.0, 64.0]),
        we_do=lambda outcome: outcome == (False, [8.0, 8.0]),
    )


@clause("amp.grad_scaler.step.schedulers_see_skips")
@pytest.mark.parametrize("last", [None, math.inf], ids=repr)
def test_scheduler_warns_after_skipped_first_step(compare: Compare, device: str, last: float | None) -> None:
    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device)
        scheduler = torch.optim.lr_scheduler.StepLR(harness.optimizer, 1)
        yield from harness.iteration(last)
        yield harness.did(scheduler.step)

    assert bool(compare(scenario)[-1].warned) == (last is not None)


@clause("amp.grad_scaler.step.several_optimizers")
@pytest.mark.parametrize("first", ["sgd", "aware", "fused adam"])
@given(data=st.data())
def test_several_optimizers(compare: Compare, device: str, first: str, data: st.DataObject) -> None:
    """Each optimizer is skipped by its own gradients. The scale backs off if any gradient was not finite."""
    grad_outcomes = data.draw(
        st.lists(st.tuples(*[st.sampled_from([None, None, math.inf])] * 3), min_size=2, max_size=5)
    )

    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, FOUR, first, init_scale=8.0, growth_interval=2)
        others = [Harness(library, device, FOUR, "recording") for _ in range(2)]
        harnesses = [harness, *others]
        for other in others:
            other.scaler = harness.scaler
        for grad_outcome in grad_outcomes:
            for current, last in zip(harnesses, grad_outcome, strict=True):
                current.zero_grad()
                yield current.did(current.backward, last)
            yield others[0].did(harness.scaler.unscale_, others[0].optimizer)
            for current in harnesses:
                yield current.did(harness.scaler.step, current.optimizer)
            yield harness.did(harness.scaler.update)

    compare(scenario)


@clause("amp.grad_scaler.step.several_optimizers")
def test_optimizer_without_gradients_does_not_affect_other(compare: Compare, device: str) -> None:
    """The step of one optimizer raises, and the other optimizer is not affected."""

    def scenario(library: Library) -> Iterator[Outcome]:
        harness, bare = Harness(library, device), Harness(library, device, (Gradient((2,), None),))
        bare.scaler = harness.scaler
        harness.backward()
        yield bare.did(harness.scaler.step, bare.optimizer)
        yield from harness.calls("step", "update")
        yield from harness.iteration()

    refused, *others = compare(scenario)
    assert "No inf checks were recorded for this optimizer" in str(refused.raised)
    assert all(outcome.raised is None for outcome in others)


@clause("amp.grad_scaler.step.order_of_calls")
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize(
    "calls", ["step step", "unscale_ unscale_", "step unscale_", "unscale_ step step unscale_"]
)
def test_wrong_order_of_calls_raises(compare: Compare, device: str, optimizer: str, calls: str) -> None:
    """Calls in a wrong order raise until update(), and only for the optimizer in question."""

    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, optimizer=optimizer)
        harness.backward()
        yield from harness.calls(*calls.split(), "update", *calls.split())

    refused = str(compare(scenario)[calls.count(" ")].raised)
    assert "has already been called" in refused or "is being called after step()" in refused


@clause("amp.grad_scaler.step.order_of_calls")
@pytest.mark.parametrize("call", ["unscale_", "step", "update", "update to"])
def test_calls_before_first_scale_raise(compare: Compare, device: str, call: str) -> None:
    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, FOUR, init_scale=8.0)
        method, _, new = call.partition(" ")
        arguments = (2.0,) if new else () if method == "update" else (harness.optimizer,)
        yield harness.did(getattr(harness.scaler, method), *arguments)
        yield harness.did(harness.scaler.scale, torch.ones((), device=device))
        yield harness.did(harness.scaler.step, harness.optimizer)

    refused, *others = compare(scenario)
    assert "_scale is None" in str(refused.raised)
    assert [outcome.raised for outcome in others] == [None, None]


@clause("amp.grad_scaler.step.again_after_a_refusal")
@pytest.mark.deviation("grad_scaler.refused_step_can_be_taken_again")
def test_step_without_gradients_can_be_repeated_with_them(deviation: DeviationJudge, device: str) -> None:
    def probe(library: Library) -> tuple[str, str, bool]:
        """Return the errors of the steps without and with gradients, and whether the latter changed the weights."""
        harness = Harness(library, device, (Gradient((3,)),), init_scale=8.0).used()
        harness.zero_grad()
        without = harness.did(harness.scaler.step, harness.optimizer)
        harness.backward()
        having = harness.did(harness.scaler.step, harness.optimizer)
        return str(without.raised), str(having.raised), bool(harness.parameters[0].detach().any())

    text = "AssertionError: No inf checks were recorded for this optimizer."
    deviation.judge(
        probe,
        torch_does=lambda outcome: outcome == (text, text, False),
        we_do=lambda outcome: outcome == (text, "None", True),
    )
