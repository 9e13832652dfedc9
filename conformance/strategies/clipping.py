"""Inputs for gradient clipping: numbers to clip by, sparse gradients, and a call with its full outcome."""

from __future__ import annotations

import itertools
import math
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, observe
from conformance.judge.tolerances import Tolerance, norm_of
from conformance.strategies.gradients import GradientList

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
NONFINITE = st.sampled_from([math.inf, -math.inf, math.nan])
max_norms = st.sampled_from([1e-3, 0.5, 1.0, 10.0, 1e6, 0.0, -1.0, math.inf, 3])

# Devices of the parameters. The meta device has no foreach operators. If both devices are mixed, torch may raise on
# foreach=True after it has changed some gradients, which the clause `refusal_is_whole` covers.
WITH_AND_WITHOUT_FOREACH = pytest.mark.parametrize(
    ("where", "foreach"),
    [
        *itertools.product(("cpu", "meta"), (True, False, None)),
        *itertools.product(("cpu meta", "meta cpu"), (False, None)),
    ],
)


def holding(grad: torch.Tensor) -> Any:
    """Return a stand-in parameter for a gradient that no real parameter accepts."""
    return SimpleNamespace(grad=grad, device=grad.device, dtype=grad.dtype, shape=grad.shape)


def clipped(
    library: Library,
    parameters: list[Any],
    *args: Any,
    function: str = "clip_grad_norm_",
    container: Any = list,
    **kwargs: Any,
) -> Outcome:
    """Clip `parameters`. Return the outcome with everything that the call changed.

    `container` converts the list of parameters for the call.
    """
    called = getattr(library.nn.utils, function)
    return observe(called, container(parameters), *args, watch=parameters, **kwargs)


def clip_of(library: Library, case: GradientList, device: str, *args: Any, **kwargs: Any) -> Outcome:
    """Clip the fresh parameters of a case. Return the outcome."""
    return clipped(library, case.parameters(device), *args, **kwargs)


def norm_tolerance(case: GradientList) -> Tolerance:
    return norm_of(case.numel, len(case.gradients))


def nested_parameter() -> torch.nn.Parameter:
    """Return a parameter on the CPU that is a strided nested tensor, with a gradient."""
    with warnings.catch_warnings():
        # The first nested tensor in a process warns that they are a prototype.
        warnings.simplefilter("ignore")
        rows = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], device="cpu")
    parameter = torch.nn.Parameter(rows)
    (2 * parameter).to_padded_tensor(0.0).sum().backward()
    return parameter


def sparse_parameter(device: str, coalesced: bool) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros(5, 2, device=device))
    rows = torch.tensor([[1, 3, 1]], device=device)
    values = torch.arange(1.0, 7.0, device=device).view(3, 2)
    grad = torch.sparse_coo_tensor(rows, values, (5, 2), check_invariants=True)
    parameter.grad = grad.coalesce() if coalesced else grad
    return parameter
