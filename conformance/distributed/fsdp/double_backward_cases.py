"""Gradients that are differentiated: penalties on the gradient of an input, and what asks for more."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from conformance.distributed.fsdp.fsdp_cases import FSDP, Setup, average_gradients, gathered_gradients
from conformance.library import load_library
from conformance.outcome import Outcome, observe
from conformance.ranks import Rank

_STEPS = 2


def built(freezes: bool) -> nn.Sequential:
    """Of several layers, each of which its neighbours' second derivatives pass through."""
    layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh())
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), layers, nn.Linear(4, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
    layers.requires_grad_(not freezes)
    return model


def _wrapped(fsdp: Any, make: Any, model: nn.Sequential, strategy: str, use_orig_params: bool) -> Any:
    def wrap(module: nn.Module) -> Any:
        return make(
            module,
            sharding_strategy=fsdp.ShardingStrategy[strategy],
            device_id=torch.device("cpu"),
            use_orig_params=use_orig_params,
        )

    model[2] = wrap(model[2])
    return wrap(model)


def penalized(
    rank: Rank, *, library: str, strategy: str, use_orig_params: bool, freezes: bool, adds_loss: bool
) -> Outcome:
    """Steps of a penalty on the input's gradient; `freezes` the inner unit, `adds_loss` of a second forward."""
    found, plain = load_library(library), built(freezes)

    def run() -> dict[str, Any]:
        model = _wrapped(found.distributed.fsdp, found.find(FSDP), plain, strategy, use_orig_params)
        penalties = [_penalty(model, rank.rank, adds_loss) for _ in range(_STEPS)]
        return {"penalties": penalties, "whole": gathered_gradients(found, model)}

    return observe(run)


def _penalty(model: nn.Module, rank: int, adds_loss: bool) -> torch.Tensor:
    x = (torch.linspace(0, 1, 6).view(2, 3) - rank * 0.25).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    penalty = (gradient.norm() - 1).square()
    whole = penalty + model(2 * x).square().mean() if adds_loss else penalty
    whole.backward()
    return penalty.detach()


def penalized_unsharded(world_size: int, freezes: bool, adds_loss: bool) -> dict[str, torch.Tensor]:
    """The averaged gradients, zero for none."""
    replicas = [built(freezes) for _ in range(world_size)]
    for rank, replica in enumerate(replicas):
        for _ in range(_STEPS):
            _penalty(replica, rank, adds_loss)
    average_gradients(replicas, Setup())
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in replicas[0].named_parameters()
    }


def gradients_with_a_graph(rank: Rank, *, library: str, use_orig_params: bool) -> Outcome:
    """A backward that is to leave gradients of parameters which can be differentiated."""
    found, plain = load_library(library), built(freezes=False)

    def run() -> None:
        model = _wrapped(found.distributed.fsdp, found.find(FSDP), plain, "FULL_SHARD", use_orig_params)
        model(torch.ones(1, 3) * rank.rank).sum().backward(create_graph=True)

    return observe(run)
