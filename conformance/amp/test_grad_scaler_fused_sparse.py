"""The fused step with sparse gradients, judged by torch's calls with the norm of the gradients made dense."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from conformance.judge.clauses import clause
from conformance.judge.library import Library
from conformance.judge.outcome import assert_same_outcome, observe
from conformance.judge.tolerances import norm_of
from conformance.strategies.fused_steps import (
    TORCH_HAS_NO_FUSED_STEP,
    FusedStep,
    Iterations,
    assert_same_states,
)

_SCALE = 8.0
_KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda params: SGD(params, lr=0.125),
    "adagrad": lambda params: Adagrad(params, lr=0.125),
    "sparse adam": lambda params: SparseAdam(params[:1], lr=0.125),  # does not accept dense gradients
}
# Row 1 is given twice, like a word that comes twice. Rows that are not given are zeros.
_ROWS = torch.tensor([[1, 4, 1]])
Take = Callable[[Any, Optimizer, float, float], torch.Tensor]


def by_one(scaler: Any, optimizer: Optimizer, max_norm: float, norm_type: float) -> torch.Tensor:
    return scaler.fused_step(optimizer, max_norm, norm_type)


def by_four(scaler: Any, optimizer: Optimizer, max_norm: float, norm_type: float) -> torch.Tensor:
    scaler.unscale_(optimizer)
    params = optimizer.param_groups[0]["params"]
    norm = torch.nn.utils.get_total_norm([param.grad.to_dense() for param in params], norm_type)
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    scaler.step(optimizer)
    scaler.update()
    return norm


def reported(
    library: Library, device: str, take: Take, kind: str, max_norm: float, norm_type: float
) -> Iterations:
    """Return the norm and the lasting state of each iteration. The second one finds inf."""
    params = [torch.nn.Parameter(torch.ones(6, 2, device=device)) for _ in range(2)]
    optimizer, scaler = _KINDS[kind](params), library.amp.GradScaler(device, init_scale=_SCALE)
    iterations: Iterations = []
    for number, last in enumerate((3.0, math.inf, 5.0)):
        scaler.scale(torch.ones((), device=device))
        values = torch.tensor([[1.0, -2.0], [0.5, 4.0], [2.0, last]], device=device) * _SCALE
        params[0].grad = torch.sparse_coo_tensor(_ROWS.to(device), values * (1 + number), (6, 2))
        params[1].grad = torch.full((6, 2), 2.0 * _SCALE, device=device)
        norm = observe(take, scaler, optimizer, max_norm, norm_type)
        after = observe(
            lambda: [*(param.detach().clone() for param in params), scaler.get_scale(), scaler.state_dict()]
        )
        iterations.append((norm, after))
    return iterations


@pytest.fixture(autouse=True)
def _checked_tensors() -> Generator[None]:
    """Set the checks explicitly, because torch warns the first time in a process if they are not set."""
    with torch.sparse.check_sparse_tensor_invariants():
        yield


@clause("amp.grad_scaler.fused_step.does_what_the_four_do")
@TORCH_HAS_NO_FUSED_STEP
@pytest.mark.parametrize("kind", list(_KINDS))
@pytest.mark.parametrize(
    ("max_norm", "norm_type"), [(math.inf, 2.0), (0.5, 2.0), (0.5, math.inf), (0.5, 0.0), (0.5, -1.0)]
)
def test_sparse_gradients(
    fused: FusedStep, device: str, kind: str, max_norm: float, norm_type: float
) -> None:
    expected = reported(fused.reference, device, by_four, kind, max_norm, norm_type)

    def compare(iterations: Iterations) -> None:
        for (norm, _), (our_norm, _) in zip(expected, iterations, strict=True):
            assert_same_outcome(norm, our_norm, norm_of(24, 2, norm_type))
        assert_same_states([after for _, after in expected], [after for _, after in iterations])

    fused.judge(lambda library: reported(library, device, by_one, kind, max_norm, norm_type), compare)
