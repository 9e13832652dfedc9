"""The fused step of low-precision parameters, and of masters with low-precision copies."""

from __future__ import annotations

import math

import pytest
import torch
from torch.optim import SGD

from conformance.judge.clauses import clause
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, assert_same_outcome, observe
from conformance.judge.sandbox import seeding
from conformance.judge.surface import is_torch_in
from conformance.judge.tolerances import stored_updates, updates
from conformance.strategies.fused_steps import (
    FUSED,
    KINDS,
    TORCH_HAS_NO_FUSED_STEP,
    FusedStep,
    Iterations,
    assert_same_iterations,
    by_four,
    clipped,
    norms_in,
)
from conformance.strategies.gradients import Gradient
from conformance.strategies.scaling import Harness


@clause("amp.grad_scaler.fused_step.low_precision_params")
@TORCH_HAS_NO_FUSED_STEP
@pytest.mark.parametrize("kind", ["adam", "nesterov", "adagrad", "rmsprop"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("max_norm", [math.inf, 0.5])
def test_copies_in_lower_precision(
    fused: FusedStep, device: str, kind: str, dtype: torch.dtype, max_norm: float
) -> None:
    """Compare with loops that upcast the copies' gradients, step, and round the masters to the copies."""

    def reported(library: Library, norms: list[torch.Tensor | None] | None) -> Iterations:
        """Run torch's four calls with loops that clip by `norms`, or one fused call if `norms` is None."""
        copies = [
            torch.nn.Parameter(torch.ones(shape, dtype=dtype, device=device))
            for shape in ((5,), (130, 130), (0,))
        ]
        masters = [copy.detach().float() for copy in copies]
        optimizer = KINDS[kind](masters)
        scaler = library.amp.GradScaler(device, init_scale=8.0)
        scaler.scale(torch.zeros((), device=device))
        iterations = []
        for number in range(3):
            for copy in copies:
                draw = torch.Generator().manual_seed(number)
                copy.grad = torch.randn(copy.shape, generator=draw).to(device, dtype)
            if number == 1:
                copies[0].grad[-1] = math.inf
            if norms is None:
                norm = scaler.fused_step(optimizer, max_norm, low_precision_params=copies)
            else:
                for master, copy in zip(masters, copies, strict=True):
                    master.grad = copy.grad.float()
                scaler.unscale_(optimizer)
                norm = clipped(masters, max_norm, total_norm=norms[number])
                scaler.step(optimizer)
                scaler.update()
                for master, copy in zip(masters, copies, strict=True):
                    copy.data.copy_(master)
            state = [master.clone() for master in masters]
            rounded = [master.to(dtype) for master in masters]
            assert all(map(torch.equal, copies, rounded)), "copies are not the parameters rounded"
            iterations.append((observe(lambda norm=norm: norm), observe(list, state)))
        assert norms is not None or all(master.grad is None for master in masters)
        return iterations

    fused.judge(
        lambda library: reported(library, None),
        lambda iterations: assert_same_iterations(
            reported(fused.reference, norms_in(iterations)), iterations
        ),
    )


@clause("amp.grad_scaler.fused_step.low_precision")
@TORCH_HAS_NO_FUSED_STEP
@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_parameters_of_every_dtype(fused: FusedStep, device: str, kind: str, dtype: torch.dtype) -> None:
    """Low-precision parameters are upcast, and rounded once per update. A loop around float32 parameters does the same.

    torch's own fused updates cannot be the reference, as the next test shows.
    """
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    shapes = ((5, 1.0), (16_500, 0.1))

    def reported(library: Library, fused: bool) -> list[Outcome]:
        gradients = tuple(
            Gradient((numel,), dtype if fused else wide, seed=seed, scale=scale)
            for seed, (numel, scale) in enumerate(shapes, 1)
        )
        harness = Harness(library, device, gradients, KINDS[kind], init_scale=8.0)
        states = []
        for last in (None, math.nan, None):
            harness.zero_grad()
            harness.backward(last)
            if fused:
                harness.scaler.fused_step(harness.optimizer)
            else:
                for parameter in harness.parameters:
                    parameter.grad.copy_(parameter.grad.to(dtype))
                by_four(harness, math.inf)
                stored = [
                    t
                    for state in harness.optimizer.state.values()
                    for name, t in state.items()
                    if name != "step"
                ]
                for tensor in (*harness.parameters, *stored):
                    tensor.data.copy_(tensor.to(dtype))
            states.append(observe(lambda: [parameter.detach().double() for parameter in harness.parameters]))
        return states

    def compare(log: list[Outcome]) -> None:
        for step, (state, our_state) in enumerate(zip(reported(fused.reference, False), log, strict=True), 1):
            assert_same_outcome(state, our_state, stored_updates(step, dtype))

    fused.judge(lambda library: reported(library, True), compare)


def with_states(library: Library, device: str, kind: str, dtype: torch.dtype) -> Harness:
    """Return a harness after one step, whose parameters and states then got bfloat16 values. States have `dtype`."""
    gradients = (Gradient((5,), seed=1), Gradient((130, 130), seed=2, scale=0.1), Gradient((7,), seed=3))
    harness = Harness(library, device, gradients, KINDS[kind], init_scale=8.0)
    harness.backward()
    by_four(harness, math.inf)
    draw = seeding.generator(7)
    for param in harness.parameters:
        param.data.copy_(torch.randn(param.shape, generator=draw).bfloat16())
        state = harness.optimizer.state[param]
        for name in sorted(state.keys() - {"step"}):
            state[name] = torch.rand(param.shape, generator=draw).bfloat16().to(device, dtype)
    return harness


def stored_states(harness: Harness) -> list[torch.Tensor]:
    states = [harness.optimizer.state[param] for param in harness.parameters]
    return [state[name].clone() for state in states for name in sorted(state.keys() - {"step"})]


@clause("amp.grad_scaler.fused_step.bfloat16_states")
@pytest.mark.parametrize("kind", ["adam", "adamw", "nesterov", "dampened", "adagrad"])
@pytest.mark.parametrize("max_norm", [math.inf, 0.5])
def test_bfloat16_states_of_float32_parameters(
    subject: Library, reference: Library, device: str, kind: str, max_norm: float
) -> None:
    """Compare with the same values in float32. From torch 2.15 on, its fused Adam takes bfloat16 states on CUDA."""
    takes_narrow = device == "cuda" and is_torch_in(">=2.15") and kind in ("adam", "adamw")
    expected = with_states(reference, device, kind, torch.bfloat16 if takes_narrow else torch.float32)
    actual = with_states(subject, device, kind, torch.bfloat16)
    for harness in (expected, actual):
        harness.zero_grad()
        harness.backward(times=3.0)
    norm = actual.scaler.fused_step(actual.optimizer, max_norm)
    by_four(expected, max_norm, total_norm=norm)
    assert actual.scaler.explain(actual.optimizer).is_fused
    assert_same_outcome(
        observe(lambda: [param.detach() for param in expected.parameters]),
        observe(lambda: [param.detach() for param in actual.parameters]),
        updates(1),
    )
    assert_same_outcome(
        observe(lambda: [state.bfloat16() for state in stored_states(expected)]),
        observe(lambda: stored_states(actual)),
        stored_updates(1, torch.bfloat16),
    )


@clause("amp.grad_scaler.fused_step.bfloat16_states")
@pytest.mark.parametrize("kind", ["adam", "nesterov", "adagrad"])
def test_skipped_step_keeps_bfloat16_states(subject: Library, device: str, kind: str) -> None:
    harness = with_states(subject, device, kind, torch.bfloat16)
    before = [*(param.detach().clone() for param in harness.parameters), *stored_states(harness)]
    harness.zero_grad()
    harness.backward(last=math.inf)
    harness.scaler.fused_step(harness.optimizer)
    after = [*(param.detach() for param in harness.parameters), *stored_states(harness)]
    assert all(map(torch.equal, before, after))
    assert {state.dtype for state in stored_states(harness)} == {torch.bfloat16}


@clause("amp.grad_scaler.fused_step.low_precision")
@pytest.mark.deviation("grad_scaler.fused_sgd_in_halves")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_fused_step_updates_all_elements_of_16_bit_parameters(
    deviation: DeviationJudge, dtype: torch.dtype, momentum: float
) -> None:
    def count_updated(library: Library) -> int:
        parameter = torch.nn.Parameter(torch.ones(67, dtype=dtype))
        optimizer = SGD([parameter], lr=0.5, momentum=momentum, fused=True)
        scaler = library.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(torch.zeros(()))
        for _ in range(2):
            parameter.grad = torch.full_like(parameter, 8.0)
            if hasattr(scaler, "fused_step"):
                scaler.fused_step(optimizer)
            else:
                scaler.step(optimizer)
                scaler.update()
        return int((parameter == 1.0 - 0.5 * (2.0 + momentum)).sum())

    # torch updates only the elements after the last full vector register. With momentum they are wrong too.
    deviation.judge(count_updated, torch_does=lambda count: count <= 67 % 16, we_do=lambda count: count == 67)
