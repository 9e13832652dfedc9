"""Fused steps of several parameter groups, of which those with equal settings are updated together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from impl import kernels
from impl.amp import GradScaler
from impl.optim import _fused_updates
from impl.optim._joined_buckets import JoinedBuckets

_OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda groups: AdamW(groups, lr=0.125),
    "momentum": lambda groups: SGD(groups, lr=0.125, momentum=0.5, dampening=0.25),
    "Adagrad": lambda groups: Adagrad(groups, lr=0.125),
}


def _change_lr(optimizer: Optimizer) -> None:
    optimizer.param_groups[1]["lr"] = 0.5


def _change_dtype(optimizer: Optimizer) -> None:
    param = optimizer.param_groups[1]["params"][0]
    param.data = param.data.double()
    param.grad = None
    if isinstance(optimizer, Adagrad):  # creates no state in a step before torch 2.12
        optimizer.state[param]["sum"] = torch.zeros_like(param)
    else:
        optimizer.state.pop(param, None)


def _clear_gradient(optimizer: Optimizer) -> None:
    optimizer.param_groups[1]["params"][0].grad = None


def _move_counter(optimizer: Optimizer) -> None:
    for state in [optimizer.state[param] for param in optimizer.param_groups[2]["params"]]:
        if "step" in state:
            state["step"].data = state["step"].data.clone() + 3


def _share_counter(optimizer: Optimizer) -> None:
    first, second = (optimizer.state[group["params"][0]] for group in optimizer.param_groups[:2])
    if "step" in first:
        second["step"] = first["step"]


def _share_memory(optimizer: Optimizer) -> None:
    first, second = (group["params"][0] for group in optimizer.param_groups[:2])
    second.data = first.data


def _narrow_states(optimizer: Optimizer) -> None:
    for state in [optimizer.state[param] for param in optimizer.param_groups[1]["params"]]:
        state.update((key, value.bfloat16()) for key, value in state.items() if value.dim())


def _load_state(optimizer: Optimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def _change_nothing(optimizer: Optimizer) -> None:
    del optimizer


_EDITS = [
    _change_lr,
    _change_dtype,
    _clear_gradient,
    _move_counter,
    _share_counter,
    _share_memory,
    _narrow_states,
    _load_state,
    _change_nothing,
]


def _steps(name: str, edit: Callable[[Optimizer], None]) -> tuple[list[torch.Tensor], list[int]]:
    """Return all values after each of eight steps, before four of which `edit` changes the optimizer.

    Return also the number of updates in each step.
    """
    random = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(numel, generator=random)) for numel in (40, 40, 3, 7, 5)]
    optimizer = _OPTIMIZERS[name]([{"params": params[:1]}, {"params": params[1:3]}, {"params": params[3:]}])
    scaler = GradScaler("cpu", init_scale=8.0)
    values: list[torch.Tensor] = []
    counts: list[int] = []
    for step in range(8):
        for param in params:
            param.grad = torch.randn(param.shape, generator=random).to(param.dtype)
        if step in (3, 4, 6):
            edit(optimizer)
        scaler.scale(torch.ones(()))
        with mock.patch.object(_fused_updates, "fused_step_", wraps=kernels.fused_step_) as updates:
            values.append(scaler.fused_step(optimizer, max_norm=1.0))
        counts.append(updates.call_count)
        values += [param.detach().clone() for param in params]
        values += [value.clone() for state in optimizer.state.values() for value in state.values()]
    return values, counts


@pytest.mark.parametrize("edit", _EDITS)
@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_joined_groups_get_the_bits_of_groups_that_are_apart(
    name: str, edit: Callable[[Optimizer], None]
) -> None:
    values, _ = _steps(name, edit)
    with mock.patch.object(JoinedBuckets, "_key", lambda self, lists, bucket, copies: bucket):
        expected, counts = _steps(name, edit)
    assert min(counts) > 1
    assert len(values) == len(expected)
    for step, (value, expected_value) in enumerate(zip(values, expected, strict=True)):
        assert torch.equal(value, expected_value), step


@pytest.mark.parametrize(
    ("edit", "counts"),
    [
        (_change_nothing, [1] * 8),
        (_change_lr, [1] * 3 + [3] * 5),
        (_share_counter, [1] * 3 + [3] * 5),
        (_load_state, [1] * 8),
    ],
)
def test_groups_with_equal_settings_have_one_update(
    edit: Callable[[Optimizer], None], counts: list[int]
) -> None:
    assert _steps("AdamW", edit)[1] == counts
