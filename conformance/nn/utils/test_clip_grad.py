"""clip_grad_norm_: the returned norm, its effect on plain gradients, and its older spelling."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.judge.clauses import clause
from conformance.judge.comparing import Compare
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, observe
from conformance.judge.tolerances import norm_of
from conformance.strategies.clipping import (
    DTYPES,
    NONFINITE,
    clip_of,
    clipped,
    max_norms,
    norm_tolerance,
)
from conformance.strategies.gradients import Gradient, GradientList, gradient_lists

NORM_TYPES = [2.0, 1.0, 0.5, 3.0, 0.0, math.inf, -math.inf, -1.0, "inf", 2]


@clause("nn.utils.clip_grad.clip_grad_norm_.scales_to_max_norm")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
def test_clips_as_torch_does(compare: Compare, device: str, dtype: torch.dtype, data: st.DataObject) -> None:
    case = data.draw(gradient_lists(dtypes=(dtype,)))
    max_norm = data.draw(max_norms)
    compare(lambda library: clip_of(library, case, device, max_norm), norm_tolerance(case))


@clause("nn.utils.clip_grad.clip_grad_norm_.scales_to_max_norm")
@given(case=gradient_lists(max_size=3), room=st.sampled_from([1.01, 2.0, 1e4]))
def test_leaves_small_gradients_alone_to_the_bit(
    subject: Library, device: str, case: GradientList, room: float
) -> None:
    parameters = case.parameters(device)
    before = [None if p.grad is None else p.grad.clone() for p in parameters]
    subject.nn.utils.clip_grad_norm_(parameters, case.norm(2.0) * room + 1e-3)
    for parameter, grad in zip(parameters, before, strict=True):
        assert (parameter.grad is None) == (grad is None)
        assert grad is None or torch.equal(parameter.grad, grad)


@clause("nn.utils.clip_grad.clip_grad_norm_.returns_norm_before_clipping")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_returned_norm_survives_later_calls(
    subject: Library, device: str, dtype: torch.dtype, norm_type: float
) -> None:
    """Training loops collect norms and read them much later."""

    def norm_of_fresh(size: int) -> torch.Tensor:
        parameter = Gradient((size,), dtype, seed=size).parameter(device)
        return subject.nn.utils.clip_grad_norm_([parameter], 1.0, norm_type)

    norms = [norm_of_fresh(size) for size in (3, 3, 5)]
    before = [norm.clone() for norm in norms]
    norms.append(norm_of_fresh(7))
    norms[-1].fill_(-1.0)
    assert [norm.item() for norm in norms[:3]] == [norm.item() for norm in before]
    assert norm_of_fresh(3).item() == before[0].item()


@clause("nn.utils.clip_grad.clip_grad_norm_.returns_norm_before_clipping")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
def test_returns_the_norm_of_before(
    subject: Library, device: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    case = data.draw(gradient_lists(dtypes=(dtype,), missing=False))
    norm = subject.nn.utils.clip_grad_norm_(case.parameters(device), 1e-2)
    assert (norm.shape, norm.dtype, norm.device.type) == ((), dtype, device)
    oracle = torch.tensor(case.norm(2.0), dtype=torch.float64).to(dtype)
    assert (excess := norm_tolerance(case).excess(oracle, norm.cpu())) is None, excess


@clause("nn.utils.clip_grad.clip_grad_norm_.every_norm_type")
@pytest.mark.parametrize("norm_type", NORM_TYPES, ids=repr)
@given(data=st.data())
def test_every_norm_type(compare: Compare, device: str, norm_type: Any, data: st.DataObject) -> None:
    # The norm of an empty tensor is undefined for negative orders. torch raises, which the next test covers.
    case = data.draw(gradient_lists().filter(lambda case: all(gradient.numel for gradient in case.gradients)))
    max_norm = data.draw(max_norms)
    compare(
        lambda library: clip_of(library, case, device, max_norm, norm_type=norm_type),
        norm_of(case.numel, len(case.gradients), order=float(norm_type)),
    )


@clause("nn.utils.clip_grad.clip_grad_norm_.every_norm_type")
@pytest.mark.parametrize("norm_type", [-2.0, -math.inf, "nuc", None, [2.0]], ids=repr)
def test_norm_types_on_the_edge(compare: Compare, device: str, norm_type: Any) -> None:
    """Include a gradient without elements, which has no norm of a negative order."""
    case = GradientList((Gradient((3,)), Gradient((0,)), Gradient((2, 2), seed=1)))
    [outcome] = compare(lambda library: clip_of(library, case, device, 1.0, norm_type=norm_type))
    assert outcome.raised is not None


@clause("nn.utils.clip_grad.clip_grad_norm_.mixed_dtypes")
@given(
    case=gradient_lists(dtypes=(torch.float32, torch.bfloat16, torch.float64), min_size=2), max_norm=max_norms
)
def test_mixed_dtypes(compare: Compare, device: str, case: GradientList, max_norm: float) -> None:
    # torch rounds each gradient's norm to the gradient's dtype, so the joint norm is as precise as the coarsest one.
    tolerance = norm_of(case.numel, len(case.gradients), coarsest=torch.bfloat16)
    compare(lambda library: clip_of(library, case, device, max_norm), tolerance)


@clause("nn.utils.clip_grad.clip_grad_norm_.mixed_dtypes")
@pytest.mark.parametrize("foreach", [True, False, None])
def test_mixed_dtypes_keep_their_own_precision(subject: Library, device: str, foreach: bool | None) -> None:
    """The factor may be as coarse as the coarsest dtype, but each gradient keeps its own precision."""
    before = torch.linspace(1.0, 2.0, 37, device=device)
    parameters = [
        torch.nn.Parameter(torch.zeros_like(before, dtype=d)) for d in (torch.bfloat16, before.dtype)
    ]
    for parameter in parameters:
        parameter.grad = before.to(parameter.dtype, copy=True)
    subject.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=foreach)
    factors = parameters[1].grad.double() / before.double()
    assert float(factors.max() / factors.min()) - 1 <= 2 * torch.finfo(before.dtype).eps


@clause("nn.utils.clip_grad.clip_grad_norm_.half_precision")
@given(
    case=gradient_lists(dtypes=(torch.float16,), missing=False), max_norm=st.sampled_from([1e-2, 1.0, 100.0])
)
def test_half_precision_by_the_true_norm(
    subject: Library, device: str, case: GradientList, max_norm: float
) -> None:
    parameters = case.parameters(device)
    norm = subject.nn.utils.clip_grad_norm_(parameters, max_norm)
    oracle = case.norm(2.0)
    tolerance = norm_of(case.numel, len(case.gradients), coarsest=torch.float16)
    assert (excess := tolerance.excess(torch.tensor(oracle), norm.cpu().float())) is None, excess
    factor = min(1.0, max_norm / (oracle + 1e-6))
    for gradient, parameter in zip(case.gradients, parameters, strict=True):
        expected = gradient.values().half().double() * factor
        assert parameter.grad.dtype == torch.float16
        # Results below float16's normal range are rounded to its fixed spacing there.
        half = torch.finfo(torch.float16)
        close = (parameter.grad.cpu().double() - expected).abs() <= tolerance.bound(
            expected
        ) + half.smallest_normal * half.eps
        assert bool(close.all())


@clause("nn.utils.clip_grad.clip_grad_norm_.nonfinite_gradients")
@given(case=gradient_lists(last=NONFINITE, missing=False), norm_type=st.sampled_from([2.0, 1.0, math.inf]))
def test_nonfinite_gradients(compare: Compare, device: str, case: GradientList, norm_type: float) -> None:
    [outcome] = compare(lambda library: clip_of(library, case, device, 1.0, norm_type), norm_tolerance(case))
    assert outcome.raised is not None or not outcome.value.values.isfinite()


@clause("nn.utils.clip_grad.clip_grad_norm_.error_if_nonfinite")
@given(
    case=gradient_lists(last=st.one_of(NONFINITE, st.none())), norm_type=st.sampled_from([2.0, 1.0, math.inf])
)
def test_error_if_nonfinite(compare: Compare, device: str, case: GradientList, norm_type: float) -> None:
    [outcome] = compare(
        lambda library: clip_of(library, case, device, 1.0, norm_type, error_if_nonfinite=True),
        norm_tolerance(case),
    )
    # The infinity norm of an empty gradient raises another error.
    has_norm = norm_type < math.inf or all(math.prod(gradient.shape) for gradient in case.gradients)
    is_refused = case.gradients[-1].last is not None and has_norm
    assert ("non-finite" in str(outcome.raised)) == is_refused


@clause("nn.utils.clip_grad.clip_grad_norm_.no_gradients")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_no_gradients_of_any_dtype(compare: Compare, device: str, dtype: torch.dtype) -> None:
    def norm(library: Library) -> Outcome:
        return clipped(library, [torch.nn.Parameter(torch.zeros(2, dtype=dtype, device=device))], 1.0)

    compare(norm)


@clause("nn.utils.clip_grad.clip_grad_norm_.foreach")
@pytest.mark.parametrize("foreach", [True, False, None])
@given(case=gradient_lists(dtypes=(torch.float32, torch.float64)), max_norm=max_norms)
def test_foreach_matches_torch(
    compare: Compare, device: str, foreach: bool | None, case: GradientList, max_norm: float
) -> None:
    compare(
        lambda library: clip_of(library, case, device, max_norm, foreach=foreach),
        norm_of(case.numel, len(case.gradients), coarsest=torch.float32),
    )


def norm_on_meta(library: Library, function: str, foreach: bool | None) -> Outcome:
    """Return the outcome of a norm on the meta device, which has no foreach operators: its device type and shape."""
    parameter = Gradient((2,)).parameter("meta")

    def call() -> tuple[str, torch.Size]:
        norm = getattr(library.nn.utils, function)([parameter], 1.0, foreach=foreach)
        return norm.device.type, norm.shape

    return observe(call)


@clause("nn.utils.clip_grad.clip_grad_norm_.foreach")
@pytest.mark.parametrize("foreach", [True, False, None])
def test_foreach_raises_on_device_without_it(compare: Compare, foreach: bool | None) -> None:
    [outcome] = compare(lambda library: norm_on_meta(library, "clip_grad_norm_", foreach))
    assert ("foreach" in str(outcome.raised)) == bool(foreach)


EXTREMES = {
    "overflow in float32": Gradient((64,), torch.float32, scale=1e20),
    "overflow in float16": Gradient((256,), torch.float16, scale=8e3),  # eight sigma from inf, for any seed
    "underflow in float32": Gradient((64,), torch.float32, scale=1e-25),
}


@clause("nn.utils.clip_grad.clip_grad_norm_.extreme_gradients_survive")
@pytest.mark.deviation("clip_grad.true_norm_of_extreme_gradients")
@pytest.mark.parametrize("extreme", list(EXTREMES))
@pytest.mark.parametrize("others", [0, 3])
def test_extreme_gradients(deviation: DeviationJudge, device: str, extreme: str, others: int) -> None:
    gradient = EXTREMES[extreme]
    case = GradientList(
        (*(Gradient((5,), gradient.dtype, seed=i, scale=gradient.scale) for i in range(others)), gradient)
    )
    true_norm = case.norm(2.0)
    tolerance = norm_of(case.numel, len(case.gradients), coarsest=gradient.dtype or torch.float32)

    def probe(library: Library) -> tuple[torch.Tensor, list[torch.Tensor]]:
        parameters = case.parameters(device)
        norm = library.nn.utils.clip_grad_norm_(parameters, true_norm / 2 if true_norm > 1 else 1.0)
        return norm.cpu(), [p.grad.cpu() for p in parameters]

    def true_norm_and_scaled(norm_and_grads: tuple[torch.Tensor, list[torch.Tensor]]) -> bool:
        norm, grads = norm_and_grads
        factor = 0.5 if true_norm > 1 else 1.0
        expected = [g.values().to(g.dtype).double() * factor for g in case.gradients]
        return (
            norm.dtype == torch.float32
            and tolerance.excess(torch.tensor(true_norm, dtype=torch.float32), norm) is None
            and all(
                tolerance.excess(expected_grad, grad.double()) is None
                for expected_grad, grad in zip(expected, grads, strict=True)
            )
        )

    def norm_lost(norm_and_grads: tuple[torch.Tensor, list[torch.Tensor]]) -> bool:
        norm, grads = norm_and_grads
        return bool(norm.isinf() and all((grad == 0).all() for grad in grads)) or float(norm) == 0.0

    deviation.judge(probe, torch_does=norm_lost, we_do=true_norm_and_scaled)


@clause("nn.utils.clip_grad.clip_grad_norm_.extreme_gradients_survive")
def test_small_float64_gradients_keep_their_values(compare: Compare, device: str) -> None:
    # The norm is below the range that is safe in float32.
    case = GradientList(tuple(Gradient((n,), torch.float64, seed=n, scale=1e-12) for n in (64, 5)))
    compare(lambda library: clip_of(library, case, device, 1.0), norm_tolerance(case))


@clause("nn.utils.clip_grad.clip_grad_norm.deprecated_spelling")
@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"norm_type": 1.0},
        {"norm_type": math.inf, "error_if_nonfinite": True},
        {"error_if_nonfinite": True},
        {"foreach": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("last", [None, math.nan])
@pytest.mark.parametrize("max_norm", [0.5, 1.0])
def test_deprecated_spelling(
    compare: Compare, device: str, keywords: dict[str, Any], last: float | None, max_norm: float
) -> None:
    case = GradientList((Gradient((3,)), Gradient((4, 2), seed=1, last=last)))
    [outcome] = compare(
        lambda library: clip_of(library, case, device, max_norm, function="clip_grad_norm", **keywords),
        norm_tolerance(case),
    )
    assert [kind for kind, _ in outcome.warned] == ["FutureWarning"]


@clause("nn.utils.clip_grad.clip_grad_norm.deprecated_spelling")
@pytest.mark.parametrize("foreach", [True, False])
def test_deprecated_spelling_passes_foreach(compare: Compare, foreach: bool) -> None:
    [outcome] = compare(lambda library: norm_on_meta(library, "clip_grad_norm", foreach))
    assert ("foreach" in str(outcome.raised)) == foreach
