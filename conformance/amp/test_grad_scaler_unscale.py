"""GradScaler.unscale_: division by the scale, the check for inf and nan, and devices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.judge.clauses import clause
from conformance.judge.comparing import Compare
from conformance.judge.deviations import DeviationJudge
from conformance.judge.judgement import unavailable
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, observe
from conformance.judge.sandbox.global_state import default_dtype
from conformance.strategies.gradients import LAYOUTS, Gradient, GradientList, gradient_lists, laid_out
from conformance.strategies.scaling import FOUR, MEASURED_DTYPES, Harness, Recording, Scenario

NONFINITE = st.sampled_from([math.inf, -math.inf, math.nan])
SCALES = st.sampled_from([1.0, 3.0, 2.0**16, 1e5 / 3, 2.0**-10, 0.1, 7.0])
StepOutcomes = list[tuple[str | None, list[list[str]]]]


def unscaling(case: GradientList, device: str, **options: Any) -> Scenario:
    """Return a scenario that unscales, steps and updates with existing gradients."""

    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, case.gradients, **options).used()
        yield from harness.calls("unscale_", "step", "update")

    return scenario


def numbers(parameter: torch.Tensor) -> list[str]:
    """Return the values of `parameter` and its gradient as text, so that nan equals nan."""
    return [
        str(tensor.detach().cpu().tolist()) for tensor in (parameter, parameter.grad) if tensor is not None
    ]


@clause("amp.grad_scaler.unscale_.divides")
@pytest.mark.parametrize("dtype", MEASURED_DTYPES, ids=str)
@given(data=st.data(), init_scale=SCALES)
def test_divides_in_place(
    compare: Compare, device: str, dtype: torch.dtype, data: st.DataObject, init_scale: float
) -> None:
    case = data.draw(gradient_lists(dtypes=(dtype,)))
    compare(unscaling(case, device, init_scale=init_scale))


def three_groups(groups: list[dict[str, Any]]) -> Any:
    """Return an optimizer whose first and last parameters have groups of their own."""
    params = [param for group in groups for param in group["params"]]
    return Recording([{"params": params[:1]}, {"params": params[1:-1]}, {"params": params[-1:]}])


@clause("amp.grad_scaler.unscale_.divides")
def test_divides_in_every_group(compare: Compare, device: str) -> None:
    """Every group is divided by the current scale, also after the scale has moved."""

    def scenario(library: Library) -> Iterator[Outcome]:
        gradients = tuple(Gradient((3,), seed=seed) for seed in range(4))
        harness = Harness(library, device, gradients, three_groups, init_scale=8.0, growth_interval=1)
        for last in (None, math.inf, None, None):
            yield from harness.iteration(last, unscale=True)

    compare(scenario)


@clause("amp.grad_scaler.unscale_.divides")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_under_another_default_dtype(compare: Compare, device: str, dtype: torch.dtype) -> None:
    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, init_scale=8.0, growth_interval=1)
        for last in (None, math.inf, None):
            yield from harness.iteration(last)
        yield harness.did(harness.scaler.load_state_dict, harness.scaler.state_dict())

    with default_dtype(dtype):
        compare(scenario)


@clause("amp.grad_scaler.unscale_.divides")
@given(init_scale=st.floats(1e-3, 1e6), seed=st.integers(0, 999))
def test_divides_by_the_true_reciprocal(subject: Library, device: str, init_scale: float, seed: int) -> None:
    """The reciprocal of the scale is rounded once, from float64. The expected value comes from no library."""
    harness = Harness(
        subject,
        device,
        (Gradient((9,), seed=seed), Gradient((3,), torch.float64, seed=seed)),
        init_scale=init_scale,
    )
    before = [parameter.grad.clone() for parameter in harness.parameters]
    scale = torch.tensor(init_scale, dtype=torch.float32)
    harness.used().scaler.unscale_(harness.optimizer)
    inverse = (1.0 / scale.double()).float()
    for grad, parameter in zip(before, harness.parameters, strict=True):
        assert torch.equal(parameter.grad.cpu(), grad.cpu() * inverse.to(grad.dtype))


@clause("amp.grad_scaler.unscale_.mixed_dtypes")
@given(
    case=gradient_lists(dtypes=(torch.float32, torch.bfloat16, torch.float64), min_size=2), init_scale=SCALES
)
def test_mixed_dtypes(compare: Compare, device: str, case: GradientList, init_scale: float) -> None:
    compare(unscaling(case, device, init_scale=init_scale))


@clause("amp.grad_scaler.unscale_.mixed_dtypes")
@pytest.mark.deviation("grad_scaler.bfloat16_on_cuda")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("last", [None, math.inf])
def test_bfloat16_gradients_are_unscaled_on_every_device(
    deviation: DeviationJudge, reference: Library, device: str, layout: str, last: float | None
) -> None:
    """The values match those of the same gradients on the CPU. Torch's operator is not replaced here."""

    def probe(library: Library, device: str = device) -> StepOutcomes:
        gradients = (
            Gradient((7,), torch.bfloat16, seed=1),
            Gradient((4, 5), torch.bfloat16, seed=2, layout=layout),
            Gradient((3,), seed=3),
            Gradient((5,), torch.bfloat16, seed=4, layout=layout, last=last),
        )
        harness = Harness(library, device, gradients, init_scale=24.0).used()
        calls = (
            (harness.scaler.unscale_, (harness.optimizer,)),
            (harness.scaler.step, (harness.optimizer,)),
            (harness.scaler.update, ()),
        )
        return [
            (str(observe(call, *args).raised), [numbers(parameter) for parameter in harness.parameters])
            for call, args in calls
        ]

    expected = probe(reference, "cpu")
    deviation.judge(
        probe,
        torch_does=lambda outcome: outcome[0][0].startswith("NotImplementedError: "),
        we_do=lambda outcome: outcome == expected,
    )


@clause("amp.grad_scaler.unscale_.finds_nonfinite")
@pytest.mark.parametrize("dtype", MEASURED_DTYPES, ids=str)
@given(data=st.data())
def test_nonfinite_last_element_is_found(
    compare: Compare, device: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    case = data.draw(gradient_lists(dtypes=(dtype,), last=NONFINITE, missing=False))
    compare(unscaling(case, device))


@clause("amp.grad_scaler.unscale_.finds_nonfinite")
@pytest.mark.parametrize("dtype", MEASURED_DTYPES, ids=str)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan], ids=repr)
@pytest.mark.parametrize("where", range(5))
def test_nonfinite_value_anywhere_skips_step(
    subject: Library, device: str, dtype: torch.dtype, value: float, where: int
) -> None:
    """The step is skipped no matter which gradient, group or dtype has the non-finite value."""
    gradients = [
        Gradient((3,), torch.float32, seed=1),
        Gradient((1025,), dtype, seed=2, layout="offset"),
        Gradient((4, 5), torch.float64, seed=3, layout="transposed"),
        Gradient((33,), dtype, seed=4, layout="sliced"),
        Gradient((), torch.bfloat16, seed=5),
    ]
    gradients[where] = dataclasses.replace(gradients[where], last=value)
    harness = Harness(subject, device, tuple(gradients), three_groups, init_scale=8.0).used()
    assert [outcome.raised for outcome in harness.calls("step", "update")] == [None, None]
    assert harness.optimizer.calls == [], "the optimizer stepped although a gradient is not finite"
    assert harness.scaler.get_scale() == 4.0


def with_largest_gradients(library: Library, device: str, dtype: torch.dtype, init_scale: float) -> Harness:
    """Return a harness whose gradients are the largest and the smallest finite number."""
    harness = Harness(library, device, (Gradient((4,), dtype), Gradient((3,), dtype)), init_scale=init_scale)
    for sign, parameter in zip((1, -1), harness.used().parameters, strict=True):
        parameter.grad.fill_(sign * torch.finfo(dtype).max)
    return harness


@clause("amp.grad_scaler.unscale_.finds_nonfinite")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_finite_gradients_are_no_overflow(compare: Compare, device: str, dtype: torch.dtype) -> None:
    """The largest finite numbers are finite, even if their sum is not."""

    def scenario(library: Library) -> Iterator[Outcome]:
        for init_scale in (65536.0, 1.0):
            yield from with_largest_gradients(library, device, dtype, init_scale).calls(
                "unscale_", "step", "update"
            )

    scales = [outcome.watched["scaler"]["scale"] for outcome in compare(scenario)]
    assert scales == [65536.0] * 3 + [1.0] * 3


@clause("amp.grad_scaler.unscale_.finds_nonfinite")
@pytest.mark.deviation("grad_scaler.large_float64_gradients")
@pytest.mark.parametrize("layout", ["contiguous", "sliced"])
@pytest.mark.parametrize("init_scale", [65536.0, 1.0])
def test_large_finite_float64_gradients_are_no_overflow(
    deviation: DeviationJudge, device: str, init_scale: float, layout: str
) -> None:
    def probe(library: Library) -> tuple[list[str], float]:
        harness = with_largest_gradients(library, device, torch.float64, init_scale)
        for parameter in harness.parameters:
            parameter.grad = laid_out(parameter.grad, layout)
        assert [outcome.raised for outcome in harness.calls("unscale_", "step", "update")] == [None] * 3
        return [
            text for parameter in harness.parameters for text in numbers(parameter)
        ], harness.scaler.get_scale()

    largest = torch.finfo(torch.float64).max / init_scale
    gradients = [[sign * largest] * size for sign, size in ((1, 4), (-1, 3))]
    stepped = [str(values) for grad in gradients for values in ([-0.125 * value for value in grad], grad)]
    skipped = [str(values) for grad in gradients for values in ([0.0] * len(grad), grad)]
    deviation.judge(
        probe,
        torch_does=lambda outcome: outcome == (skipped, init_scale / 2),
        we_do=lambda outcome: outcome == (stepped, init_scale),
    )


@clause("amp.grad_scaler.unscale_.divides_on_overflow_too")
@given(case=gradient_lists(last=NONFINITE, missing=False), init_scale=SCALES)
def test_finite_neighbours_are_divided_too(
    subject: Library, device: str, case: GradientList, init_scale: float
) -> None:
    harness = Harness(subject, device, case.gradients, init_scale=init_scale).used()
    before = [parameter.grad.clone() for parameter in harness.parameters]
    harness.scaler.step(harness.optimizer)
    inverse = (1.0 / torch.tensor(init_scale, dtype=torch.float32).double()).float().to(device)
    for grad, parameter in zip(before, harness.parameters, strict=True):
        expected = grad * inverse
        assert torch.equal(parameter.grad.nan_to_num(), expected.nan_to_num())


@clause("amp.grad_scaler.unscale_.same_tensors")
def test_gradients_stay_the_same_tensors(subject: Library, device: str) -> None:
    """A view of a gradient, such as a bucket or a flat buffer, sees the unscaled values."""
    harness = Harness(subject, device, FOUR, init_scale=4.0).used()
    flat = torch.full((6,), 8.0, device=device)
    harness.parameters[0].grad = flat[:5]
    held = [parameter.grad for parameter in harness.parameters]
    harness.scaler.unscale_(harness.optimizer)
    assert all(parameter.grad is grad for parameter, grad in zip(harness.parameters, held, strict=True))
    assert flat.tolist() == [2.0] * 5 + [8.0]


@clause("amp.grad_scaler.unscale_.several_devices")
@pytest.mark.deviation("grad_scaler.gradients_on_the_host")
@pytest.mark.parametrize("last", [None, math.inf])
def test_gradients_on_two_devices(
    deviation: DeviationJudge, device: str, last: float | None, reference: Library
) -> None:
    """The values match those of the same gradients on the CPU."""
    if device == "cpu":
        unavailable("one device type only")

    def probe(library: Library, device: str = device) -> StepOutcomes:
        harness = Harness(library, device, FOUR, init_scale=4.0).used()
        harness.parameters.append(Gradient((5,), seed=8, last=last).parameter("cpu"))
        harness.optimizer.add_param_group({"params": harness.parameters[-1:]})
        return [
            (outcome.raised and outcome.raised.text, [numbers(parameter) for parameter in harness.parameters])
            for outcome in harness.calls("unscale_", "step", "update")
        ]

    expected = probe(reference, "cpu")
    deviation.judge(
        probe,
        torch_does=lambda outcome: outcome != expected,
        we_do=lambda outcome: outcome == expected,
        may_agree=True,  # unless the copy ends after the host reads
    )


@clause("amp.grad_scaler.sync.none")
@pytest.mark.parametrize(
    "scaler_calls", [["scale", "unscale_"], ["scale", "unscale_", "update", "scale"]], ids=str
)
def test_nothing_waits_for_the_device(subject: Library, scaler_calls: list[str]) -> None:
    """Tensors on the meta device have no values, so reading one on the host raises."""
    harness = Harness(subject, "meta", init_scale=4.0)
    calls = {
        "scale": lambda: harness.scaler.scale(
            [torch.zeros(3, device="meta"), (torch.zeros((), device="meta"),)]
        ),
        "unscale_": lambda: harness.scaler.unscale_(harness.optimizer),
        "update": harness.scaler.update,
    }
    results = [calls[name]() for name in scaler_calls]
    assert results[0][0].device.type == "meta"
