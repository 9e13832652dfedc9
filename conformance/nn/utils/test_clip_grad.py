"""Gradient clipping: every public function of torch.nn.utils.clip_grad, asked of both libraries."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.clauses import clause
from conformance.deviations import DeviationJudge
from conformance.library import Library
from conformance.outcome import Outcome, assert_same_outcome, observe
from conformance.strategies.gradients import Gradient, GradientList, gradient_lists
from conformance.tolerances import EXACT, Tolerance, norm_of

NORM_TYPES = [2.0, 1.0, 0.5, 3.0, 0.0, math.inf, -math.inf, -1.0, "inf", 2]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
max_norms = st.sampled_from([1e-3, 0.5, 1.0, 10.0, 1e6, 0.0, -1.0, math.inf, 3])
NONFINITE = st.sampled_from([math.inf, -math.inf, math.nan])


def clip_of(library: Library, case: GradientList, device: str, *args: Any, **kwargs: Any) -> Outcome:
    parameters = case.parameters(device)
    return observe(library.nn.utils.clip_grad_norm_, parameters, *args, watch=parameters, **kwargs)


def norm_tolerance(case: GradientList) -> Tolerance:
    return norm_of(case.numel, len(case.gradients))


@clause("nn.utils.clip_grad.clip_grad_norm_.scales_to_max_norm")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
def test_clips_as_torch_does(
    subject: Library, reference: Library, device: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    case = data.draw(gradient_lists(dtypes=(dtype,)))
    max_norm = data.draw(max_norms)
    assert_same_outcome(
        clip_of(reference, case, device, max_norm),
        clip_of(subject, case, device, max_norm),
        norm_tolerance(case),
    )


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
def test_every_norm_type(
    subject: Library, reference: Library, device: str, norm_type: Any, data: st.DataObject
) -> None:
    # The norm of an empty tensor is undefined for negative orders: torch raises, which the next test asks about.
    case = data.draw(gradient_lists().filter(lambda case: all(gradient.numel for gradient in case.gradients)))
    max_norm = data.draw(max_norms)
    assert_same_outcome(
        clip_of(reference, case, device, max_norm, norm_type=norm_type),
        clip_of(subject, case, device, max_norm, norm_type=norm_type),
        norm_of(case.numel, len(case.gradients), order=float(norm_type)),
    )


@clause("nn.utils.clip_grad.clip_grad_norm_.every_norm_type")
@pytest.mark.parametrize("norm_type", [-2.0, -math.inf, "nuc", None, [2.0]], ids=repr)
def test_norm_types_on_the_edge(subject: Library, reference: Library, device: str, norm_type: Any) -> None:
    case = GradientList((Gradient((3,)), Gradient((0,)), Gradient((2, 2), seed=1)))
    assert_same_outcome(
        clip_of(reference, case, device, 1.0, norm_type=norm_type),
        clip_of(subject, case, device, 1.0, norm_type=norm_type),
    )


@clause("nn.utils.clip_grad.clip_grad_norm_.mixed_dtypes")
@given(
    case=gradient_lists(dtypes=(torch.float32, torch.bfloat16, torch.float64), min_size=2), max_norm=max_norms
)
def test_mixed_dtypes(
    subject: Library, reference: Library, device: str, case: GradientList, max_norm: float
) -> None:
    # torch rounds each gradient's norm to that gradient's dtype; the joint norm can be no better than the coarsest.
    tolerance = norm_of(case.numel, len(case.gradients), coarsest=torch.bfloat16)
    assert_same_outcome(
        clip_of(reference, case, device, max_norm), clip_of(subject, case, device, max_norm), tolerance
    )


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
        wanted = gradient.values().half().double() * factor
        assert parameter.grad.dtype == torch.float16
        # Results below float16's normal range are rounded to its fixed spacing there.
        half = torch.finfo(torch.float16)
        close = (parameter.grad.cpu().double() - wanted).abs() <= tolerance.bound(
            wanted
        ) + half.smallest_normal * half.eps
        assert bool(close.all())


@clause("nn.utils.clip_grad.clip_grad_norm_.nonfinite_gradients")
@given(case=gradient_lists(last=NONFINITE, missing=False), norm_type=st.sampled_from([2.0, 1.0, math.inf]))
def test_nonfinite_gradients(
    subject: Library, reference: Library, device: str, case: GradientList, norm_type: float
) -> None:
    assert_same_outcome(
        clip_of(reference, case, device, 1.0, norm_type),
        clip_of(subject, case, device, 1.0, norm_type),
        norm_tolerance(case),
    )


@clause("nn.utils.clip_grad.clip_grad_norm_.error_if_nonfinite")
@given(
    case=gradient_lists(last=st.one_of(NONFINITE, st.none())), norm_type=st.sampled_from([2.0, 1.0, math.inf])
)
def test_error_if_nonfinite(
    subject: Library, reference: Library, device: str, case: GradientList, norm_type: float
) -> None:
    assert_same_outcome(
        clip_of(reference, case, device, 1.0, norm_type, error_if_nonfinite=True),
        clip_of(subject, case, device, 1.0, norm_type, error_if_nonfinite=True),
        norm_tolerance(case),
    )


@clause("nn.utils.clip_grad.clip_grad_norm_.foreach")
@pytest.mark.parametrize("foreach", [True, False, None])
@given(case=gradient_lists(dtypes=(torch.float32, torch.float64)), max_norm=max_norms)
def test_foreach(
    subject: Library,
    reference: Library,
    device: str,
    foreach: bool | None,
    case: GradientList,
    max_norm: float,
) -> None:
    assert_same_outcome(
        clip_of(reference, case, device, max_norm, foreach=foreach),
        clip_of(subject, case, device, max_norm, foreach=foreach),
        norm_of(case.numel, len(case.gradients), coarsest=torch.float32),
    )


@clause("nn.utils.clip_grad.clip_grad_norm_.foreach")
@pytest.mark.parametrize("foreach", [True, False, None])
def test_foreach_where_the_device_has_none(
    subject: Library, reference: Library, foreach: bool | None
) -> None:
    def on_meta(library: Library) -> Outcome:
        parameter = Gradient((2,)).parameter("meta")
        return observe(lambda: library.nn.utils.clip_grad_norm_([parameter], 1.0, foreach=foreach).shape)

    assert_same_outcome(on_meta(reference), on_meta(subject))


@clause("nn.utils.clip_grad.clip_grad_norm_.parameter_containers")
@pytest.mark.parametrize(
    "container", [list, tuple, iter, dict.fromkeys, lambda p: (x for x in p), lambda p: p[0]]
)
@given(case=gradient_lists(min_size=2))
def test_containers(
    subject: Library,
    reference: Library,
    device: str,
    container: Callable[[list[Any]], Any],
    case: GradientList,
) -> None:
    def clipped(library: Library) -> Outcome:
        parameters = case.parameters(device)
        return observe(library.nn.utils.clip_grad_norm_, container(parameters), 0.25, watch=parameters)

    assert_same_outcome(clipped(reference), clipped(subject), norm_tolerance(case))


@clause("nn.utils.clip_grad.clip_grad_norm_.parameter_containers")
@pytest.mark.parametrize("empty", [lambda: (x for x in ()), lambda: iter(()), list, tuple])
def test_empty_containers(subject: Library, reference: Library, empty: Callable[[], Iterator[Any]]) -> None:
    assert_same_outcome(
        observe(reference.nn.utils.clip_grad_norm_, empty(), 1.0),
        observe(subject.nn.utils.clip_grad_norm_, empty(), 1.0),
    )


@clause("nn.utils.clip_grad.clip_grad_norm_.no_gradients")
@pytest.mark.parametrize("size", [0, 1, 3])
@pytest.mark.parametrize(
    "keywords", [{}, {"error_if_nonfinite": True}, {"foreach": True}, {"norm_type": math.inf}], ids=str
)
def test_no_gradients(
    subject: Library, reference: Library, device: str, size: int, keywords: dict[str, Any]
) -> None:
    case = GradientList((Gradient((2,), dtype=None),) * size)
    assert_same_outcome(
        clip_of(reference, case, device, 1.0, **keywords), clip_of(subject, case, device, 1.0, **keywords)
    )


def sparse_parameters(device: str, coalesced: bool) -> list[torch.nn.Parameter]:
    dense = Gradient((4,), seed=3).parameter(device)
    sparse = torch.nn.Parameter(torch.zeros(5, 2, device=device))
    rows = torch.tensor([[1, 3, 1]], device=device)
    grad = torch.sparse_coo_tensor(rows, torch.arange(1.0, 7.0, device=device).view(3, 2), (5, 2))
    sparse.grad = grad.coalesce() if coalesced else grad
    return [dense, sparse]


@clause("nn.utils.clip_grad.clip_grad_norm_.sparse_and_complex")
@pytest.mark.parametrize("foreach", [True, False, None])
@pytest.mark.parametrize("coalesced", [True, False])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_sparse_gradients(
    subject: Library, reference: Library, device: str, foreach: bool | None, coalesced: bool, norm_type: float
) -> None:
    def clipped(library: Library) -> Outcome:
        parameters = sparse_parameters(device, coalesced)
        return observe(
            library.nn.utils.clip_grad_norm_, parameters, 1.0, norm_type, foreach=foreach, watch=parameters
        )

    assert_same_outcome(clipped(reference), clipped(subject), norm_of(10, 2))


@clause("nn.utils.clip_grad.clip_grad_norm_.sparse_and_complex")
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("with_real", [True, False])
def test_complex_gradients(
    subject: Library, reference: Library, device: str, norm_type: float, with_real: bool
) -> None:
    def clipped(library: Library) -> Outcome:
        parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64, device=device))
        parameter.grad = torch.tensor([1 + 2j, -3j, 4.0], dtype=torch.complex64, device=device)
        parameters = [parameter, *([Gradient((3,)).parameter(device)] if with_real else [])]
        return observe(library.nn.utils.clip_grad_norm_, parameters, 1.0, norm_type, watch=parameters)

    assert_same_outcome(clipped(reference), clipped(subject), norm_of(6, 2))


@clause("nn.utils.clip_grad.clip_grad_norm_.overlapping_memory")
@pytest.mark.parametrize("foreach", [True, False, None])
@pytest.mark.parametrize("kind", ["same parameter", "same gradient", "views of one buffer"])
def test_shared_gradients(
    subject: Library, reference: Library, device: str, foreach: bool | None, kind: str
) -> None:
    def clipped(library: Library) -> Outcome:
        one, two = Gradient((6,), seed=1).parameter(device), Gradient((6,), seed=2).parameter(device)
        if kind == "same parameter":
            two = one
        elif kind == "same gradient":
            two.grad = one.grad
        else:
            buffer = torch.arange(9.0, device=device)
            one.grad, two.grad = buffer[:6], buffer[3:]
        return observe(library.nn.utils.clip_grad_norm_, [one, two], 0.5, foreach=foreach, watch=[one, two])

    assert_same_outcome(clipped(reference), clipped(subject), norm_of(12, 2))


@clause("nn.utils.clip_grad.clip_grad_norm_.overlapping_memory")
@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_"])
@pytest.mark.parametrize("foreach", [True, False, None])
def test_view_that_negates(
    subject: Library, reference: Library, device: str, name: str, foreach: bool | None
) -> None:
    """The imaginary part of a conjugate holds the negative of what lies in memory."""

    def clipped(library: Library) -> Outcome:
        whole = torch.view_as_complex(torch.arange(1.0, 9.0, device=device).view(4, 2)).conj()
        listed = [Gradient((3,)).parameter(device), SimpleNamespace(grad=whole.imag)]
        grads = [each.grad for each in listed]
        return observe(getattr(library.nn.utils, name), listed, 1.0, foreach=foreach, watch=grads)

    assert_same_outcome(clipped(reference), clipped(subject), norm_of(7, 2))


@clause("nn.utils.clip_grad.clip_grad_norm_.overlapping_memory")
@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_"])
def test_expanded_gradient(subject: Library, reference: Library, device: str, name: str) -> None:
    """All elements of one gradient are the same memory: torch refuses to write to it."""

    def clipped(library: Library) -> Outcome:
        parameter = torch.nn.Parameter(torch.zeros(4, 3, device=device))
        parameter.grad = torch.full((1,), 2.0, device=device).expand(4, 3)
        return observe(getattr(library.nn.utils, name), [parameter], 1.0, watch=[parameter])

    assert_same_outcome(clipped(reference), clipped(subject), norm_of(12, 1))


@clause("nn.utils.clip_grad.clip_grad_norm_.gradients_of_graphs")
@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_"])
def test_gradients_with_a_graph(subject: Library, reference: Library, device: str, name: str) -> None:
    def clipped(library: Library) -> Outcome:
        weight = torch.nn.Parameter(torch.arange(1.0, 4.0, device=device))
        (weight**3).sum().backward(create_graph=True)
        outcome = observe(getattr(library.nn.utils, name), [weight], 1.0, watch=[weight.grad])
        weight.grad = None  # breaks the cycle that create_graph=True makes
        return outcome

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*create_graph=True", category=UserWarning)
        assert_same_outcome(clipped(reference), clipped(subject), norm_of(3, 1))


BAD_CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "max_norm a string": (("one",), {}),
    "max_norm None": ((None,), {}),
    "norm_type a string": ((1.0, "two"), {}),
    "norm_type None": ((1.0, None), {}),
    "no max_norm": ((), {}),
    "an unknown keyword": ((1.0,), {"p": 2}),
}


@clause("nn.utils.clip_grad.clip_grad_norm_.bad_arguments")
@pytest.mark.parametrize("call", list(BAD_CALLS))
def test_bad_arguments(subject: Library, reference: Library, device: str, call: str) -> None:
    args, kwargs = BAD_CALLS[call]
    case = GradientList((Gradient((3,)), Gradient((2, 2), seed=1)))
    assert_same_outcome(
        clip_of(reference, case, device, *args, **kwargs), clip_of(subject, case, device, *args, **kwargs)
    )


@clause("nn.utils.clip_grad.clip_grad_norm_.bad_arguments")
@pytest.mark.parametrize("parameters", [None, 3, [1.0], [None], ["p"]], ids=repr)
def test_things_that_are_no_parameters(subject: Library, reference: Library, parameters: Any) -> None:
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        assert_same_outcome(
            observe(getattr(reference.nn.utils, name), parameters, 1.0),
            observe(getattr(subject.nn.utils, name), parameters, 1.0),
        )


EXTREMES = {
    "overflow in float32": Gradient((64,), torch.float32, scale=1e20),
    "overflow in float16": Gradient((64,), torch.float16, scale=2e4),
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

    def true_norm_and_scaled(seen: tuple[torch.Tensor, list[torch.Tensor]]) -> bool:
        norm, grads = seen
        factor = 0.5 if true_norm > 1 else 1.0
        wanted = [g.values().to(g.dtype).double() * factor for g in case.gradients]
        return (
            norm.dtype == torch.float32
            and tolerance.excess(torch.tensor(true_norm, dtype=torch.float32), norm) is None
            and all(
                tolerance.excess(one, grad.double()) is None for one, grad in zip(wanted, grads, strict=True)
            )
        )

    def norm_lost(seen: tuple[torch.Tensor, list[torch.Tensor]]) -> bool:
        norm, grads = seen
        return bool(norm.isinf() and all((grad == 0).all() for grad in grads)) or float(norm) == 0.0

    deviation.judge(probe, torch_does=norm_lost, we_do=true_norm_and_scaled)


RUINOUS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "max_norm nan": ("clip_grad_norm_", (math.nan,)),
    "max_norm -inf": ("clip_grad_norm_", (-math.inf,)),
    "norm_type nan": ("clip_grad_norm_", (1.0, math.nan)),
    "max_norm nan, norm given": ("clip_grads_with_norm_", (math.nan, torch.tensor(2.0))),
    "max_norm -inf, norm given": ("clip_grads_with_norm_", (-math.inf, torch.tensor(2.0))),
    "clip_value nan": ("clip_grad_value_", (math.nan,)),
    "clip_value negative": ("clip_grad_value_", (-0.5,)),
}


@clause("nn.utils.clip_grad.ruinous_arguments")
@pytest.mark.deviation("clip_grad.ruinous_arguments")
@pytest.mark.parametrize("call", list(RUINOUS))
def test_ruinous_arguments(deviation: DeviationJudge, device: str, call: str) -> None:
    name, args = RUINOUS[call]

    def probe(library: Library) -> tuple[Outcome, bool]:
        """What the call did, and whether nothing is left of what the gradients told."""
        parameter = Gradient((6,)).parameter(device)
        kept = parameter.grad.clone()
        outcome = observe(getattr(library.nn.utils, name), [parameter], *args)
        lost = not torch.isfinite(parameter.grad).any() or parameter.grad.unique().numel() == 1
        return outcome, bool(lost) if not torch.equal(parameter.grad, kept) else False

    deviation.judge(
        probe,
        torch_does=lambda seen: seen[0].raised is None and seen[1],
        we_do=lambda seen: seen[0].raised is not None and seen[0].raised.kind is ValueError and not seen[1],
    )


@clause("nn.utils.clip_grad.clip_grad_norm_.new_gradients_at_old_addresses")
@given(cases=st.lists(gradient_lists(dtypes=(torch.float32, torch.bfloat16)), min_size=3, max_size=6))
def test_gradients_replaced_between_calls(
    subject: Library, reference: Library, device: str, cases: list[GradientList]
) -> None:
    """Whatever an implementation remembers about addresses must not outlive the tensors there."""
    for case in cases:
        tolerance = norm_of(case.numel, len(case.gradients), coarsest=torch.bfloat16)
        wanted = clip_of(reference, case, device, 0.5)
        gc.collect(0)
        assert_same_outcome(wanted, clip_of(subject, case, device, 0.5), tolerance)


@clause("nn.utils.clip_grad.clip_grad_norm_.new_gradients_at_old_addresses")
@given(
    case=gradient_lists(missing=False, min_size=2),
    steps=st.lists(st.sets(st.integers(0, 5)), min_size=3, max_size=5),
)
def test_gradients_set_to_none_between_calls(
    subject: Library, reference: Library, device: str, case: GradientList, steps: list[set[int]]
) -> None:
    ours, theirs = case.parameters(device), case.parameters(device)
    for step, missing in enumerate(steps):
        for parameters in (ours, theirs):
            for index, (gradient, parameter) in enumerate(zip(case.gradients, parameters, strict=True)):
                parameter.grad = None if index in missing else gradient.parameter(device).grad * (step + 1)
        wanted = observe(reference.nn.utils.clip_grad_norm_, theirs, 0.5, watch=theirs)
        got = observe(subject.nn.utils.clip_grad_norm_, ours, 0.5, watch=ours)
        assert_same_outcome(wanted, got, norm_tolerance(case))


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
    subject: Library,
    reference: Library,
    device: str,
    keywords: dict[str, Any],
    last: float | None,
    max_norm: float,
) -> None:
    case = GradientList((Gradient((3,)), Gradient((4, 2), seed=1, last=last)))

    def clipped(library: Library) -> Outcome:
        parameters = case.parameters(device)
        return observe(library.nn.utils.clip_grad_norm, parameters, max_norm, **keywords, watch=parameters)

    assert_same_outcome(clipped(reference), clipped(subject), norm_tolerance(case))


@clause("nn.utils.clip_grad.clip_grad_norm.deprecated_spelling")
@pytest.mark.parametrize("foreach", [True, False])
def test_deprecated_spelling_hands_foreach_on(subject: Library, reference: Library, foreach: bool) -> None:
    def on_meta(library: Library) -> Outcome:
        parameter = Gradient((2,)).parameter("meta")
        return observe(lambda: library.nn.utils.clip_grad_norm([parameter], 1.0, foreach=foreach).shape)

    assert_same_outcome(on_meta(reference), on_meta(subject))


@clause("nn.utils.clip_grad.clip_grad_value_.clamps")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@given(data=st.data())
def test_clamps_values(
    subject: Library, reference: Library, device: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    case = data.draw(gradient_lists(dtypes=(dtype,), last=st.one_of(NONFINITE, st.none())))
    value = data.draw(st.sampled_from([0.5, 1, 0.0, 1e-3, 100.0, math.inf, True]))

    def clipped(library: Library) -> Outcome:
        parameters = case.parameters(device)
        return observe(library.nn.utils.clip_grad_value_, parameters, value, watch=parameters)

    assert_same_outcome(clipped(reference), clipped(subject), EXACT)


@clause("nn.utils.clip_grad.clip_grad_value_.clamps")
@pytest.mark.parametrize("container", [list, tuple, lambda p: (x for x in p), lambda p: p[-1]])
@given(case=gradient_lists(dtypes=(torch.float32, torch.float16), min_size=2))
def test_clamps_any_container(
    subject: Library,
    reference: Library,
    device: str,
    container: Callable[[list[Any]], Any],
    case: GradientList,
) -> None:
    def clipped(library: Library) -> Outcome:
        parameters = case.parameters(device)
        return observe(library.nn.utils.clip_grad_value_, container(parameters), 0.25, watch=parameters)

    assert_same_outcome(clipped(reference), clipped(subject), EXACT)


@clause("nn.utils.clip_grad.clip_grad_value_.foreach")
@pytest.mark.parametrize("where", ["cpu", "meta"])
@pytest.mark.parametrize("foreach", [True, False, None])
def test_clamping_foreach(subject: Library, reference: Library, where: str, foreach: bool | None) -> None:
    def clipped(library: Library) -> Outcome:
        parameter = Gradient((5,), scale=3.0).parameter(where)
        watch = [parameter] if where != "meta" else None
        return observe(library.nn.utils.clip_grad_value_, [parameter], 0.5, foreach=foreach, watch=watch)

    assert_same_outcome(clipped(reference), clipped(subject))


@clause("nn.utils.clip_grad.clip_grad_value_.bad_arguments")
@pytest.mark.parametrize("value", ["high", None, [1.0]], ids=repr)
def test_clamping_by_no_number(subject: Library, reference: Library, device: str, value: Any) -> None:
    def clipped(library: Library) -> Outcome:
        parameter = Gradient((5,)).parameter(device)
        return observe(library.nn.utils.clip_grad_value_, [parameter], value, watch=[parameter])

    assert_same_outcome(clipped(reference), clipped(subject))


@clause("nn.utils.clip_grad.clip_grad_value_.bad_arguments")
@pytest.mark.parametrize("kind", ["sparse", "complex", "integer"])
def test_clamping_what_cannot_be_clamped(
    subject: Library, reference: Library, device: str, kind: str
) -> None:
    def clipped(library: Library) -> Outcome:
        if kind == "sparse":
            parameters = sparse_parameters(device, coalesced=True)[1:]
        else:
            dtype = torch.complex64 if kind == "complex" else torch.int32
            parameters = [torch.nn.Parameter(torch.zeros(3, dtype=dtype, device=device), requires_grad=False)]
            parameters[0].grad = torch.tensor([1, -3, 4], dtype=dtype, device=device)
        return observe(library.nn.utils.clip_grad_value_, parameters, 2.0, watch=parameters)

    assert_same_outcome(clipped(reference), clipped(subject))


def tensors_of(case: GradientList, device: str) -> list[torch.Tensor]:
    return [p.grad for p in case.parameters(device) if p.grad is not None]


@clause("nn.utils.clip_grad.get_total_norm.joint_norm")
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf], ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
def test_total_norm(
    subject: Library,
    reference: Library,
    device: str,
    dtype: torch.dtype,
    norm_type: float,
    data: st.DataObject,
) -> None:
    case = data.draw(
        gradient_lists(dtypes=(dtype,)).filter(
            lambda case: all(gradient.numel for gradient in case.gradients)
        )
    )

    def norm(library: Library) -> Outcome:
        tensors = tensors_of(case, device)
        return observe(library.nn.utils.get_total_norm, tensors, norm_type, watch=tensors)

    assert_same_outcome(
        norm(reference), norm(subject), norm_of(case.numel, len(case.gradients), order=norm_type)
    )


@clause("nn.utils.clip_grad.get_total_norm.joint_norm")
@pytest.mark.parametrize("tensors", [[], (), torch.tensor([3.0, 4.0]), torch.tensor(-2.0)], ids=repr)
def test_total_norm_of_odd_containers(subject: Library, reference: Library, tensors: Any) -> None:
    for give in (
        lambda: tensors,
        lambda: iter(tensors) if not isinstance(tensors, torch.Tensor) else tensors,
    ):
        assert_same_outcome(
            observe(reference.nn.utils.get_total_norm, give()),
            observe(subject.nn.utils.get_total_norm, give()),
            norm_of(2, 1),
        )


@clause("nn.utils.clip_grad.get_total_norm.error_if_nonfinite")
@pytest.mark.parametrize("error_if_nonfinite", [True, False])
@given(case=gradient_lists(last=NONFINITE, missing=False))
def test_total_norm_of_nonfinite(
    subject: Library, reference: Library, device: str, error_if_nonfinite: bool, case: GradientList
) -> None:
    def norm(library: Library) -> Outcome:
        return observe(
            library.nn.utils.get_total_norm, tensors_of(case, device), error_if_nonfinite=error_if_nonfinite
        )

    assert_same_outcome(norm(reference), norm(subject))


@clause("nn.utils.clip_grad.get_total_norm.foreach")
@pytest.mark.parametrize("foreach", [True, False, None])
def test_total_norm_foreach(subject: Library, reference: Library, foreach: bool | None) -> None:
    def norm(library: Library) -> Outcome:
        return observe(
            lambda: library.nn.utils.get_total_norm([torch.zeros(2, device="meta")], foreach=foreach).shape
        )

    assert_same_outcome(norm(reference), norm(subject))


@clause("nn.utils.clip_grad.clip_grads_with_norm_.scales_by_given_norm")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
def test_scales_by_the_given_norm(
    subject: Library, reference: Library, device: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    case = data.draw(gradient_lists(dtypes=(dtype,), last=st.one_of(NONFINITE, st.none())))
    max_norm = data.draw(max_norms)
    norm = data.draw(st.sampled_from([0.0, 1e-7, 0.5, 3.0, 1e30, math.inf, math.nan]))

    def clipped(library: Library) -> Outcome:
        parameters, total_norm = case.parameters(device), torch.tensor(norm, dtype=dtype, device=device)
        watch = [*parameters, total_norm]
        return observe(library.nn.utils.clip_grads_with_norm_, parameters, max_norm, total_norm, watch=watch)

    # One quotient and one product on both sides: the same operations, or one rounding apart.
    assert_same_outcome(clipped(reference), clipped(subject), norm_of(1, 1))


@clause("nn.utils.clip_grad.clip_grads_with_norm_.foreach")
@pytest.mark.parametrize("foreach", [True, False, None])
@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_scaling_foreach(subject: Library, reference: Library, where: str, foreach: bool | None) -> None:
    def clipped(library: Library) -> Outcome:
        parameter = Gradient((5,), scale=3.0).parameter(where)
        watch = [parameter] if where != "meta" else None
        norm = torch.tensor(4.0, device=where)
        return observe(
            library.nn.utils.clip_grads_with_norm_, [parameter], 0.5, norm, foreach=foreach, watch=watch
        )

    assert_same_outcome(clipped(reference), clipped(subject), norm_of(1, 1))


@clause("nn.utils.clip_grad.clip_grads_with_norm_.scales_by_given_norm")
@pytest.mark.parametrize("parameters", [[], (), None, 3], ids=repr)
def test_scaling_odd_containers(subject: Library, reference: Library, parameters: Any) -> None:
    norm = torch.tensor(2.0)
    assert_same_outcome(
        observe(reference.nn.utils.clip_grads_with_norm_, parameters, 1.0, norm),
        observe(subject.nn.utils.clip_grads_with_norm_, parameters, 1.0, norm),
    )


def expanded(device: str) -> torch.Tensor:
    return torch.full((1,), 2.0, device=device).expand(4, 3)


def made_in_inference_mode(device: str) -> torch.Tensor:
    with torch.inference_mode():
        return torch.full((4, 3), 2.0, device=device)


# What refuses to be changed, where it can be in one list with what does not: (the gradient, its refusal).
REFUSING: dict[str, tuple[Callable[[str], torch.Tensor], str]] = {
    "expanded": (
        expanded,
        "RuntimeError: unsupported operation: more than one element of the written-to tensor",
    ),
    "inference": (
        made_in_inference_mode,
        "RuntimeError: Inplace update to inference tensor outside InferenceMode",
    ),
}


@clause("nn.utils.clip_grad.refusal_is_whole")
@pytest.mark.deviation("clip_grad.refusal_is_whole")
@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grads_with_norm_", "clip_grad_value_"])
@pytest.mark.parametrize("kind", list(REFUSING))
def test_one_gradient_refuses(deviation: DeviationJudge, device: str, name: str, kind: str) -> None:
    make, refusal = REFUSING[kind]
    extra = (torch.tensor(100.0, device=device),) if name == "clip_grads_with_norm_" else ()

    def probe(library: Library) -> tuple[str, bool]:
        """What was raised, and whether each gradient is as it was."""
        grads = [
            Gradient((8,), scale=5.0).parameter(device).grad,
            Gradient((3, 2)).parameter(device).grad.t(),
        ]
        if name != "clip_grad_value_":
            grads.append(torch.full((2,), 7.0, dtype=torch.complex64, device=device))
        grads.append(make(device))
        before = [grad.clone() for grad in grads]
        listed = [SimpleNamespace(grad=grad) for grad in grads]
        outcome = observe(getattr(library.nn.utils, name), listed, 0.1, *extra, foreach=False)
        return str(outcome.raised), all(map(torch.equal, grads, before))

    deviation.judge(
        probe,
        torch_does=lambda seen: seen[0].startswith(refusal) and not seen[1],
        we_do=lambda seen: seen[0].startswith(refusal) and seen[1],
    )
