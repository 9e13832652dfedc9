"""Cases of `gradient_norms`: gradients in every layout that equal their parameters, whose norms are known."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim import SGD, Optimizer, RMSprop

from conformance.distributed.fsdp.lab import Lab, tried
from conformance.distributed.fsdp.nonfinite_cases import named_params

SCALE = 8.0
OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": SGD, "rmsprop": RMSprop}


def joint_norm_and_norms(
    lab: Lab, *, scaler: str, layout: str, kind: str, norm_type: float, enabled: bool
) -> Any:
    """Return the joint norm, and the norm of each parameter that `gradient_norms` returns after two fused steps.

    Args:
        lab: the rank.
        scaler: name of the scaler.
        layout: one of `nonfinite_cases.LAYOUTS`.
        kind: one of `OPTIMIZERS`.
        norm_type: order of the norms.
        enabled: whether the scaler is enabled.
    """
    named = named_params(lab, layout)
    optimizer = OPTIMIZERS[kind](named, lr=0.0)
    its_scaler = lab.library.find(scaler)(lab.rank.device.type, init_scale=SCALE, enabled=enabled)
    its_scaler.scale(torch.ones((), device=lab.rank.device))
    joint: Any = None
    for factor in (1.0, 3.0):  # the second step has cached lists
        for _, param in named:
            param.grad = param.detach() * (factor * SCALE if enabled else factor)
        joint = its_scaler.fused_step(optimizer, norm_type=norm_type, keep_norms=True)
    return joint.item(), {name: norm.item() for name, norm in its_scaler.gradient_norms(optimizer).items()}


def one_fails(lab: Lab, *, scaler: str) -> tuple[Any, Any]:
    """Return the error of a fused step that keeps norms and fails on rank 0, and the result of the next one."""
    named = named_params(lab, "dtensor")
    optimizer, its_scaler = SGD(named, lr=0.0), lab.library.find(scaler)(lab.rank.device.type)
    its_scaler.scale(torch.ones((), device=lab.rank.device))
    results: list[Any] = []
    for max_norm in (math.nan if lab.rank.rank == 0 else math.inf, math.inf):
        for _, param in named:
            param.grad = param.detach().clone()
        results.append(tried(lambda max_norm=max_norm: _step(its_scaler, optimizer, max_norm)))
    return tuple(results)


def _step(scaler: Any, optimizer: Optimizer, max_norm: float) -> int:
    scaler.fused_step(optimizer, max_norm, keep_norms=True)
    return len(scaler.gradient_norms(optimizer))
