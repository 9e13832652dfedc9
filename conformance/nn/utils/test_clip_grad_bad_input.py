"""Invalid gradients and invalid numbers for clipping raise, and leave the gradients unchanged."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from conformance.judge.clauses import clause
from conformance.judge.comparing import Compare
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, observe
from conformance.strategies.clipping import clip_of, clipped, holding, sparse_parameter
from conformance.strategies.gradients import REFUSED_OVERLAP, Gradient, GradientList

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
def test_bad_arguments(compare: Compare, device: str, call: str) -> None:
    args, kwargs = BAD_CALLS[call]
    case = GradientList((Gradient((3,)), Gradient((2, 2), seed=1)))
    [outcome] = compare(lambda library: clip_of(library, case, device, *args, **kwargs))
    assert outcome.raised is not None


@clause("nn.utils.clip_grad.clip_grad_norm_.bad_arguments")
@pytest.mark.parametrize("parameters", [None, 3, [1.0], [None], ["p"]], ids=repr)
@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_"])
def test_non_parameters_raise(compare: Compare, name: str, parameters: Any) -> None:
    [outcome] = compare(lambda library: observe(getattr(library.nn.utils, name), parameters, 1.0))
    assert outcome.raised is not None


@clause("nn.utils.clip_grad.clip_grad_value_.bad_arguments")
@pytest.mark.parametrize("value", ["high", None, [1.0]], ids=repr)
def test_clip_value_that_is_no_number_raises(compare: Compare, device: str, value: Any) -> None:
    def outcome(library: Library) -> Outcome:
        parameter = Gradient((5,)).parameter(device)
        return clipped(library, [parameter], value, function="clip_grad_value_")

    [refused] = compare(outcome)
    assert refused.raised is not None


@clause("nn.utils.clip_grad.clip_grad_value_.bad_arguments")
@pytest.mark.parametrize("kind", ["sparse", "complex", "integer"])
def test_unsupported_gradients_of_clip_grad_value_raise(compare: Compare, device: str, kind: str) -> None:
    def outcome(library: Library) -> Outcome:
        if kind == "sparse":
            parameters = [sparse_parameter(device, coalesced=True)]
        else:
            dtype = torch.complex64 if kind == "complex" else torch.int32
            parameters = [torch.nn.Parameter(torch.zeros(3, dtype=dtype, device=device), requires_grad=False)]
            parameters[0].grad = torch.tensor([1, -3, 4], dtype=dtype, device=device)
        return clipped(library, parameters, 2.0, function="clip_grad_value_")

    [refused] = compare(outcome)
    assert refused.raised is not None


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
        """Return the outcome of the call, and whether the gradients lost all information."""
        parameter = Gradient((6,)).parameter(device)
        before = parameter.grad.clone()
        outcome = observe(getattr(library.nn.utils, name), [parameter], *args)
        lost = not torch.isfinite(parameter.grad).any() or parameter.grad.unique().numel() == 1
        return outcome, bool(lost) if not torch.equal(parameter.grad, before) else False

    deviation.judge(
        probe,
        torch_does=lambda outcome: outcome[0].raised is None and outcome[1],
        we_do=lambda outcome: (
            outcome[0].raised is not None and outcome[0].raised.kind is ValueError and not outcome[1]
        ),
    )


def expanded(device: str) -> torch.Tensor:
    return torch.full((1,), 2.0, device=device).expand(4, 3)


def made_in_inference_mode(device: str) -> torch.Tensor:
    with torch.inference_mode():
        return torch.full((4, 3), 2.0, device=device)


# Gradients that cannot be written, in one list with writable ones: (the gradient, its error).
REFUSING: dict[str, tuple[Callable[[str], torch.Tensor], str]] = {
    "expanded": (expanded, REFUSED_OVERLAP),
    "inference": (
        made_in_inference_mode,
        "RuntimeError: Inplace update to inference tensor outside InferenceMode",
    ),
}


@clause("nn.utils.clip_grad.refusal_is_whole")
@pytest.mark.deviation("clip_grad.refusal_is_whole")
@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grads_with_norm_", "clip_grad_value_"])
@pytest.mark.parametrize("kind", list(REFUSING))
def test_unsupported_gradient_leaves_all_unchanged(
    deviation: DeviationJudge, device: str, name: str, kind: str
) -> None:
    make, refusal = REFUSING[kind]
    extra = (torch.tensor(100.0, device=device),) if name == "clip_grads_with_norm_" else ()

    def probe(library: Library) -> tuple[str, bool]:
        """Return the error, and whether each gradient is as it was."""
        grads = [
            Gradient((8,), scale=5.0).parameter(device).grad,
            Gradient((3, 2)).parameter(device).grad.t(),
        ]
        if name != "clip_grad_value_":
            grads.append(torch.full((2,), 7.0, dtype=torch.complex64, device=device))
        grads.append(make(device))
        before = [grad.clone() for grad in grads]
        listed = [holding(grad) for grad in grads]
        outcome = observe(getattr(library.nn.utils, name), listed, 0.1, *extra, foreach=False)
        return str(outcome.raised), all(map(torch.equal, grads, before))

    deviation.judge(
        probe,
        torch_does=lambda outcome: outcome[0].startswith(refusal) and not outcome[1],
        we_do=lambda outcome: outcome[0].startswith(refusal) and outcome[1],
    )


def bounded_by_a_million(library: Library, device: str, half_first: bool) -> tuple[str, bool]:
    """Return the error, and whether each gradient is as it was. float16 cannot hold 1e6."""
    half = torch.full((3,), 6e4, dtype=torch.float16, device=device)
    # The gradient is long enough that an implementation may change it on its own.
    whole = torch.full((20_000,), 3e6, device=device)
    grads = [half, whole] if half_first else [whole, half]
    before = [grad.clone() for grad in grads]
    listed = [holding(grad) for grad in grads]
    outcome = observe(library.nn.utils.clip_grad_value_, listed, 1e6)
    return str(outcome.raised), all(map(torch.equal, grads, before))


@clause("nn.utils.clip_grad.refusal_is_whole")
@pytest.mark.deviation("clip_grad.refusal_is_whole")
def test_unrepresentable_bound_leaves_all_unchanged(deviation: DeviationJudge, device: str) -> None:
    """torch has clamped the other gradient before it raises, in one of the two orders."""

    def probe(library: Library) -> tuple[set[str], list[bool]]:
        outcomes = [bounded_by_a_million(library, device, half_first) for half_first in (True, False)]
        return {raised for raised, _ in outcomes}, sorted(whole for _, whole in outcomes)

    # Kernels of an accelerator may clamp float16 in float32 without an error, so the text comes from the CPU.
    raised, _ = bounded_by_a_million(deviation.reference, "cpu", half_first=True)
    assert raised.startswith("RuntimeError: value cannot be converted")
    deviation.judge(
        probe,
        torch_does=lambda outcome: outcome == ({raised}, [False, True]),
        we_do=lambda outcome: outcome == ({raised}, [True, True]),
    )
