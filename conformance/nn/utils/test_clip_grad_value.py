"""clip_grad_value_ clamps every element."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.judge.clauses import clause
from conformance.judge.comparing import Compare
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, observe
from conformance.strategies.clipping import DTYPES, NONFINITE, WITH_AND_WITHOUT_FOREACH, clip_of
from conformance.strategies.gradients import Gradient, GradientList, gradient_lists


@clause("nn.utils.clip_grad.clip_grad_value_.clamps")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@given(data=st.data())
def test_clamps_values(compare: Compare, device: str, dtype: torch.dtype, data: st.DataObject) -> None:
    case = data.draw(gradient_lists(dtypes=(dtype,), last=st.one_of(NONFINITE, st.none())))
    value = data.draw(st.sampled_from([0.5, 1, 0.0, 1e-3, 100.0, math.inf, True]))
    compare(lambda library: clip_of(library, case, device, value, function="clip_grad_value_"))


@clause("nn.utils.clip_grad.clip_grad_value_.clamps")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_long_gradients_among_short_ones(compare: Compare, device: str, dtype: torch.dtype) -> None:
    """Both methods clamp at both bounds if an implementation switches methods at some length."""

    def outcome(library: Library) -> Outcome:
        lengths = [3, 20_000, 7, 1 << 16]
        listed = [Gradient((length,), dtype, seed=length, scale=3.0).parameter(device) for length in lengths]
        watch = [parameter.grad for parameter in listed]
        return observe(library.nn.utils.clip_grad_value_, listed, 0.5, watch=watch)

    compare(outcome)


@clause("nn.utils.clip_grad.clip_grad_value_.clamps")
@pytest.mark.parametrize("container", [list, tuple, lambda p: (x for x in p), lambda p: p[-1]])
@given(case=gradient_lists(dtypes=(torch.float32, torch.float16), min_size=2))
def test_clamps_any_container(
    compare: Compare, device: str, container: Callable[[list[Any]], Any], case: GradientList
) -> None:
    compare(
        lambda library: clip_of(library, case, device, 0.25, function="clip_grad_value_", container=container)
    )


@clause("nn.utils.clip_grad.clip_grad_value_.foreach")
@WITH_AND_WITHOUT_FOREACH
def test_clamping_foreach(compare: Compare, where: str, foreach: bool | None) -> None:
    def outcome(library: Library) -> Outcome:
        parameters = [Gradient((5,), scale=3.0).parameter(device) for device in where.split()]
        watch = [parameter for parameter in parameters if parameter.device.type == "cpu"]
        return observe(library.nn.utils.clip_grad_value_, parameters, 0.5, foreach=foreach, watch=watch)

    [clamped] = compare(outcome)
    assert ("foreach" in str(clamped.raised)) == bool("meta" in where and foreach)
