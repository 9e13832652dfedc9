"""Tests of what the judge does without a kernel of torch, which these tests remove on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from conformance.judge.library import Library, load_library
from conformance.judge.outcome import Outcome, assert_same_outcome
from conformance.strategies import missing_kernels
from conformance.strategies.gradients import Gradient
from conformance.strategies.scaling import Harness

OPERATOR = torch._amp_foreach_non_finite_check_and_unscale_
GRADIENTS = (
    Gradient((5,), seed=1),
    Gradient((3, 4), torch.bfloat16, seed=2, layout="sliced"),
    Gradient((7,), torch.bfloat16, seed=3),
)


def raise_for_bfloat16(grads: list[torch.Tensor], *numbers: torch.Tensor) -> None:
    if grads[0].dtype is torch.bfloat16:
        raise NotImplementedError("not implemented for 'BFloat16'")
    OPERATOR(grads, *numbers)


@pytest.fixture
def expected(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Outcome]]:
    """Outcomes of torch with its kernel, which is then missing during the test."""
    outcomes = outcomes_of(load_library("torch"))
    monkeypatch.setattr(torch, OPERATOR.__name__, raise_for_bfloat16)
    forget()
    yield outcomes
    forget()


def forget() -> None:
    for function in (missing_kernels.refusal_of_bfloat16, missing_kernels.refuses_bfloat16):
        function.cache_clear()


def outcomes_of(library: Library) -> list[Outcome]:
    harness = Harness(library, "cpu", GRADIENTS, init_scale=24.0).used()
    return list(harness.calls("unscale_", "step", "update"))


class OtherLibrary:
    """A library with a scaler of its own. `unscale` replaces torch's operator in it."""

    spec = "other"

    def __init__(self, unscale: Any) -> None:
        class Scaler(torch.amp.GradScaler):
            def _unscale_grads_(self, *args: Any) -> Any:
                with mock.patch.object(torch, OPERATOR.__name__, unscale):
                    return super()._unscale_grads_(*args)

        self.amp = SimpleNamespace(GradScaler=Scaler)

    def provides(self, path: str) -> bool:
        return path == "amp.GradScaler"


def test_library_without_kernel_like_torch_gets_values_of_cpu(expected: list[Outcome]) -> None:
    for library in (load_library("torch"), load_library("conformance.exact_copy")):
        assert missing_kernels.refuses_bfloat16(library, "cpu")
        for outcome, actual in zip(expected, outcomes_of(library), strict=True):
            assert_same_outcome(outcome, actual)
    assert torch._amp_foreach_non_finite_check_and_unscale_ is raise_for_bfloat16


@pytest.mark.usefixtures("expected")
def test_library_without_own_kernel_is_unavailable() -> None:
    """The replacement of torch's operator has no effect on this library."""
    with pytest.raises(pytest.skip.Exception, match="other refuses bfloat16 gradients on cpu, as torch does"):
        outcomes_of(OtherLibrary(raise_for_bfloat16))  # type: ignore[arg-type]


@pytest.mark.usefixtures("expected")
def test_library_that_rejects_some_layouts_is_judged() -> None:
    """A library that unscales bfloat16 gets no replacement, so its error is seen."""

    def raise_for_gaps(grads: list[torch.Tensor], *numbers: torch.Tensor) -> None:
        if not all(grad.is_contiguous() for grad in grads):
            raise NotImplementedError("not implemented for 'BFloat16'")
        OPERATOR(grads, *numbers)

    library: Any = OtherLibrary(raise_for_gaps)
    assert not missing_kernels.refuses_bfloat16(library, "cpu")
    raised = outcomes_of(library)[0].raised
    assert raised is not None
    assert raised.kind is NotImplementedError


def test_nothing_is_replaced_if_torch_has_the_kernel() -> None:
    assert missing_kernels.refusal_of_bfloat16("cpu") is None
    with missing_kernels.replaced_for(load_library("torch"), "cpu"):
        assert torch._amp_foreach_non_finite_check_and_unscale_ is OPERATOR


def test_plain_adagrad_replaces_a_refused_fused_one(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [torch.nn.Parameter(torch.ones(2, device="meta"))]
    fused = missing_kernels.fused_adagrad([torch.nn.Parameter(torch.ones(2))], lr=0.5)
    monkeypatch.setattr(missing_kernels, "steps_fused_adagrad", lambda device: False)
    plain = missing_kernels.fused_adagrad([{"params": parameters}], lr=0.5)
    assert (fused.defaults["fused"], plain.defaults["fused"]) == (True, None)
    assert plain.state[parameters[0]]["step"].device.type == "meta"
    assert plain.defaults["lr"] == 0.5
