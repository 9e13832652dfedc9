"""Cases of nested units that each have their own mixed precision, on the ranks and unsharded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from conformance.distributed.fsdp.fsdp_cases import Setup, average_gradients, gathered_gradients, state_of
from conformance.distributed.fsdp.lab import Lab, filled

_BACKWARDS = 2
Precision = Mapping[str, Any]


@dataclass(frozen=True)
class Nesting:
    """Arguments of MixedPrecision for two units. A unit with empty arguments has no mixed precision."""

    outer: Precision = field(default_factory=dict)
    inner: Precision = field(default_factory=dict)
    inner_strategy: str = "FULL_SHARD"


class CastingLinear(nn.Linear):
    """Linear layer that computes in the dtype of its weight, or in `computes_in` if that is set."""

    computes_in: torch.dtype | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        dtype = self.computes_in or self.weight.dtype
        return functional.linear(input.to(dtype), self.weight.to(dtype), self.bias.to(dtype))


def built() -> nn.Sequential:
    return filled(
        nn.Sequential(
            CastingLinear(3, 4), nn.Sequential(CastingLinear(4, 5), CastingLinear(5, 3)), CastingLinear(3, 2)
        )
    )


def trained_in_parts(lab: Lab, *, nesting: Nesting, use_orig_params: bool) -> dict[str, Any]:
    def wrap(module: nn.Module, precision: Precision, strategy: str = "FULL_SHARD") -> Any:
        mixed = lab.api.MixedPrecision(**precision) if precision else None
        return lab.wrap(module, strategy=strategy, mixed_precision=mixed, use_orig_params=use_orig_params)

    model = built()
    model[1] = wrap(model[1], nesting.inner, nesting.inner_strategy)
    whole = wrap(model, nesting.outer)
    return {
        **_run(whole, lab.rank.rank),
        "shards": {name: state_of(parameter) for name, parameter in whole.named_parameters()},
        "whole_gradients": gathered_gradients(lab.library, whole),
    }


def trained_unsharded(nesting: Nesting, world_size: int) -> list[dict[str, Any]]:
    """Train unsharded: one replica for each rank, whose gradients are averaged in full precision."""
    replicas = [built() for _ in range(world_size)]
    for replica in replicas:
        for name, module in replica.named_modules():
            if isinstance(module, CastingLinear):
                precision = nesting.inner if name.startswith("1.") else nesting.outer
                module.computes_in = precision.get("param_dtype")
    results = [_run(replica, rank) for rank, replica in enumerate(replicas)]
    average_gradients(replicas, Setup())
    gradients = {name: parameter.grad for name, parameter in replicas[0].named_parameters()}
    return [{**result, "whole_gradients": gradients} for result in results]


def _run(model: nn.Module, rank: int) -> dict[str, Any]:
    outputs, input_gradients = [], []
    for number in range(_BACKWARDS):
        x = (torch.linspace(0, 1 + number, 15).view(5, 3) - rank * 0.25).requires_grad_()
        output = model(x)
        output.float().square().mean().backward()
        outputs.append(output.detach())
        input_gradients.append(x.grad)
    return {"outputs": outputs, "input_gradients": input_gradients}
