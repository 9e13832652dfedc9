"""Inputs of clipping: containers, and gradients that are missing, sparse, complex, shared, recorded or replaced."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.judge.clauses import clause
from conformance.judge.comparing import Compare
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, assert_same_outcome, differences, observe
from conformance.judge.tolerances import norm_of
from conformance.strategies.clipping import (
    clip_of,
    clipped,
    holding,
    nested_parameter,
    norm_tolerance,
    sparse_parameter,
)
from conformance.strategies.gradients import REFUSED_OVERLAP, Gradient, GradientList, gradient_lists


@clause("nn.utils.clip_grad.clip_grad_norm_.parameter_containers")
@pytest.mark.parametrize(
    "container", [list, tuple, iter, dict.fromkeys, lambda p: (x for x in p), lambda p: p[0]]
)
@given(case=gradient_lists(min_size=2))
def test_containers_match_torch(
    compare: Compare, device: str, container: Callable[[list[Any]], Any], case: GradientList
) -> None:
    compare(lambda library: clip_of(library, case, device, 0.25, container=container), norm_tolerance(case))


@clause("nn.utils.clip_grad.clip_grad_norm_.parameter_containers")
@pytest.mark.parametrize("empty", [lambda: (x for x in ()), lambda: iter(()), list, tuple])
def test_empty_containers(compare: Compare, empty: Callable[[], Iterator[Any]]) -> None:
    [outcome] = compare(lambda library: observe(library.nn.utils.clip_grad_norm_, empty(), 1.0))
    assert bool(outcome.warned) == isinstance(empty(), Generator)


@clause("nn.utils.clip_grad.clip_grad_norm_.no_gradients")
@pytest.mark.parametrize("size", [0, 1, 3])
@pytest.mark.parametrize(
    "keywords", [{}, {"error_if_nonfinite": True}, {"foreach": True}, {"norm_type": math.inf}], ids=str
)
def test_no_gradients(compare: Compare, device: str, size: int, keywords: dict[str, Any]) -> None:
    case = GradientList((Gradient((2,), dtype=None),) * size)
    compare(lambda library: clip_of(library, case, device, 1.0, **keywords))


@clause("nn.utils.clip_grad.clip_grad_norm_.sparse_and_complex")
@pytest.mark.parametrize("foreach", [True, False, None])
@pytest.mark.parametrize("coalesced", [True, False])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_sparse_gradients(
    compare: Compare, device: str, foreach: bool | None, coalesced: bool, norm_type: float
) -> None:
    def outcome(library: Library) -> Outcome:
        parameters = [Gradient((4,), seed=3).parameter(device), sparse_parameter(device, coalesced)]
        return clipped(library, parameters, 1.0, norm_type, foreach=foreach)

    compare(outcome, norm_of(10, 2))


@clause("nn.utils.clip_grad.clip_grad_norm_.sparse_and_complex")
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("with_real", [True, False])
def test_complex_gradients(compare: Compare, device: str, norm_type: float, with_real: bool) -> None:
    def outcome(library: Library) -> Outcome:
        parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64, device=device))
        parameter.grad = torch.tensor([1 + 2j, -3j, 4.0], dtype=torch.complex64, device=device)
        parameters = [parameter, *([Gradient((3,)).parameter(device)] if with_real else [])]
        return clipped(library, parameters, 1.0, norm_type)

    compare(outcome, norm_of(6, 2))


CALLS: dict[str, Callable[[Library, list[torch.nn.Parameter], bool | None], Any]] = {
    "norm": lambda library, params, foreach: library.nn.utils.clip_grad_norm_(params, 1.0, foreach=foreach),
    "value": lambda library, params, foreach: library.nn.utils.clip_grad_value_(params, 0.5, foreach),
    "given norm": lambda library, params, foreach: library.nn.utils.clip_grads_with_norm_(
        params, 1.0, torch.tensor(5.0), foreach
    ),
    "total norm": lambda library, params, foreach: library.nn.utils.get_total_norm(
        [param.grad for param in params], foreach=foreach
    ),
}


@clause("nn.utils.clip_grad.clip_grad_norm_.nested")
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("foreach", [True, False, None])
@pytest.mark.parametrize("call", CALLS)
def test_nested_gradient_matches_torch(
    compare: Compare, call: str, foreach: bool | None, position: int
) -> None:
    """A nested gradient lacks the shape and strides by which a list may be recognised. Plain ones came before it."""

    def outcome(library: Library) -> Outcome:
        params = [Gradient((2, 3, 4), seed=seed).parameter("cpu") for seed in range(3)]
        for _ in range(2):
            CALLS[call](library, params, foreach)
        params[position] = nested_parameter()

        def run() -> list[torch.Tensor]:
            CALLS[call](library, params, foreach)
            return [row.detach() for row in params[position].grad.unbind()]

        return observe(run)

    [nested] = compare(outcome)
    # torch can multiply a nested tensor by a number, but not a list of them.
    assert (nested.raised is None) == (call == "given norm" and foreach is False)


KINDS = pytest.mark.parametrize("kind", ["same parameter", "same gradient", "views of one buffer"])


def shared_parameters(kind: str, device: str) -> list[torch.nn.Parameter]:
    """Return two parameters whose gradients, 12 numbers, share memory."""
    first, second = Gradient((6,), seed=1).parameter(device), Gradient((6,), seed=2).parameter(device)
    if kind == "same parameter":
        return [first, first]
    if kind == "same gradient":
        second.grad = first.grad
    else:
        buffer = torch.arange(9.0, device=device)
        first.grad, second.grad = buffer[:6], buffer[3:]
    return [first, second]


def scaled(
    library: Library, name: str, parameters: list[torch.nn.Parameter], foreach: bool | None
) -> Outcome:
    norm = [torch.tensor(4.0, device=parameters[0].device)] if name == "clip_grads_with_norm_" else []
    return clipped(library, parameters, 0.5, *norm, function=name, foreach=foreach)


@clause("nn.utils.clip_grad.clip_grad_norm_.overlapping_memory")
@KINDS
@pytest.mark.parametrize(
    ("name", "foreach"),
    [
        ("clip_grad_norm_", False),
        ("clip_grads_with_norm_", False),
        *(("clip_grad_value_", foreach) for foreach in (True, False, None)),
    ],
)
def test_shared_gradients(compare: Compare, device: str, name: str, foreach: bool | None, kind: str) -> None:
    compare(lambda library: scaled(library, name, shared_parameters(kind, device), foreach), norm_of(12, 2))


@clause("nn.utils.clip_grad.clip_grad_norm_.overlapping_memory")
@pytest.mark.deviation("clip_grad.shared_memory_in_turn")
@KINDS
@pytest.mark.parametrize("foreach", [True, None])
@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grads_with_norm_"])
def test_shared_gradients_by_foreach(
    deviation: DeviationJudge, reference: Library, device: str, name: str, foreach: bool | None, kind: str
) -> None:
    """torch's operators on CUDA may read an element for both gradients before they write it."""
    alone = [holding(parameter.grad.clone()) for parameter in shared_parameters(kind, device)]
    in_turn = scaled(reference, name, shared_parameters(kind, device), foreach=False)
    scaled(reference, name, alone, foreach=False)
    tolerance = norm_of(12, 2)

    def is_scaled_once_or_in_turn(outcome: Outcome) -> bool:
        return outcome.raised is None and all(
            bool(
                (
                    is_near(actual["grad"].values, parameter.grad.cpu())
                    | is_near(actual["grad"].values, expected["grad"].values)
                ).all()
            )
            for parameter, expected, actual in zip(alone, in_turn.watched, outcome.watched, strict=True)
        )

    def is_near(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        return (actual - expected).abs().double() <= tolerance.bound(expected)

    deviation.judge(
        lambda library: scaled(library, name, shared_parameters(kind, device), foreach),
        torch_does=is_scaled_once_or_in_turn,
        we_do=lambda outcome: not [*differences(in_turn, outcome, tolerance)],
        may_agree=True,
    )


@clause("nn.utils.clip_grad.clip_grad_norm_.overlapping_memory")
@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_"])
@pytest.mark.parametrize("foreach", [True, False, None])
@pytest.mark.parametrize("is_contiguous", [True, False])
def test_negated_view_matches_torch(
    compare: Compare, device: str, name: str, foreach: bool | None, is_contiguous: bool
) -> None:
    """The imaginary part of a conjugate holds the negated values of its memory."""

    def outcome(library: Library) -> Outcome:
        whole = torch.view_as_complex(torch.arange(1.0, 9.0, device=device).view(4, 2)).conj()
        view = torch._neg_view(torch.arange(1.0, 5.0, device=device)) if is_contiguous else whole.imag
        listed = [Gradient((3,)).parameter(device), holding(view)]
        grads = [parameter.grad for parameter in listed]
        return observe(getattr(library.nn.utils, name), listed, 1.0, foreach=foreach, watch=grads)

    compare(outcome, norm_of(7, 2))


@clause("nn.utils.clip_grad.clip_grad_norm_.overlapping_memory")
@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_"])
def test_expanded_gradient(compare: Compare, device: str, name: str) -> None:
    """All elements of the gradient share memory, so torch raises when it writes to it."""

    def outcome(library: Library) -> Outcome:
        parameter = torch.nn.Parameter(torch.zeros(4, 3, device=device))
        parameter.grad = torch.full((1,), 2.0, device=device).expand(4, 3)
        return clipped(library, [parameter], 1.0, function=name)

    [refused] = compare(outcome, norm_of(12, 1))
    assert str(refused.raised).startswith(REFUSED_OVERLAP)


@clause("nn.utils.clip_grad.clip_grad_norm_.overlapping_memory")
@pytest.mark.deviation("clip_grad.hidden_overlap")
@pytest.mark.parametrize("foreach", [True, False, None])
@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grads_with_norm_", "clip_grad_value_"])
def test_overlapping_windows_are_refused(
    deviation: DeviationJudge, device: str, name: str, foreach: bool | None
) -> None:
    """The rows of a gradient are [0, 1, 2], [1, 2, 3] and [2, 3, 4] of one buffer.

    The other gradient is a transposed view, which overlaps nothing.
    """
    extra = (torch.tensor(100.0, device=device),) if name == "clip_grads_with_norm_" else ()

    def probe(library: Library) -> tuple[str, bool, bool]:
        buffer = torch.arange(1.0, 6.0, device=device)
        windows = buffer.as_strided((3, 3), (1, 1))
        sound = torch.arange(6.0, device=device).view(2, 3).t()
        listed = [holding(sound), holding(windows)]
        before = buffer.clone(), sound.clone()
        outcome = observe(getattr(library.nn.utils, name), listed, 0.5, *extra, foreach=foreach)
        return str(outcome.raised), torch.equal(buffer, before[0]), torch.equal(sound, before[1])

    deviation.judge(
        probe,
        torch_does=lambda outcome: outcome == ("None", False, False),
        we_do=lambda outcome: outcome[0].startswith(REFUSED_OVERLAP) and outcome[1:] == (True, True),
    )


@clause("nn.utils.clip_grad.clip_grad_norm_.gradients_of_graphs")
@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_"])
def test_gradients_with_a_graph(compare: Compare, device: str, name: str) -> None:
    def outcome(library: Library) -> Outcome:
        weight = torch.nn.Parameter(torch.arange(1.0, 4.0, device=device))
        (weight**3).sum().backward(create_graph=True)
        outcome = observe(getattr(library.nn.utils, name), [weight], 1.0, watch=[weight.grad])
        weight.grad = None  # breaks the cycle that create_graph=True makes
        return outcome

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*create_graph=True", category=UserWarning)
        compare(outcome, norm_of(3, 1))


@clause("nn.utils.clip_grad.clip_grad_norm_.new_gradients_at_old_addresses")
@given(cases=st.lists(gradient_lists(dtypes=(torch.float32, torch.bfloat16)), min_size=3, max_size=6))
def test_gradients_replaced_between_calls(compare: Compare, device: str, cases: list[GradientList]) -> None:
    """Cached addresses of an implementation must not outlive the tensors."""
    for case in cases:
        tolerance = norm_of(case.numel, len(case.gradients), coarsest=torch.bfloat16)
        compare(lambda library, case=case: clip_of(library, case, device, 0.5), tolerance)
        gc.collect(0)


@clause("nn.utils.clip_grad.clip_grad_norm_.new_gradients_at_old_addresses")
@given(case=gradient_lists(missing=False))
def test_gradients_overwritten_between_calls(
    subject: Library, reference: Library, device: str, case: GradientList
) -> None:
    """Write new values to the same addresses, as `zero_grad(set_to_none=False)` and the next backward do."""
    subject_parameters, reference_parameters = case.parameters(device), case.parameters(device)
    for step in range(3):
        for parameters in (subject_parameters, reference_parameters):
            for gradient, parameter in zip(case.gradients, parameters, strict=True):
                parameter.grad.copy_(gradient.parameter(device).grad * (step + 1))
        assert_same_outcome(
            clipped(reference, reference_parameters, 1e9),
            clipped(subject, subject_parameters, 1e9),
            norm_tolerance(case),
        )


@clause("nn.utils.clip_grad.clip_grad_norm_.new_gradients_at_old_addresses")
@given(
    case=gradient_lists(missing=False, min_size=2),
    steps=st.lists(st.sets(st.integers(0, 5)), min_size=3, max_size=5),
)
def test_gradients_set_to_none_between_calls(
    subject: Library, reference: Library, device: str, case: GradientList, steps: list[set[int]]
) -> None:
    subject_parameters, reference_parameters = case.parameters(device), case.parameters(device)
    for step, missing in enumerate(steps):
        for parameters in (subject_parameters, reference_parameters):
            for index, (gradient, parameter) in enumerate(zip(case.gradients, parameters, strict=True)):
                parameter.grad = None if index in missing else gradient.parameter(device).grad * (step + 1)
        assert_same_outcome(
            clipped(reference, reference_parameters, 0.5),
            clipped(subject, subject_parameters, 0.5),
            norm_tolerance(case),
        )
