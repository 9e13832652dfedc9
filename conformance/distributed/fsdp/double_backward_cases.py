"""Gradients that are differentiated: penalties on the gradient of an input, and what asks for more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from conformance.distributed.fsdp.fsdp_cases import FSDP, Setup, average_gradients, gathered_gradients
from conformance.judge.library import load_library
from conformance.judge.outcome import Outcome, observe
from conformance.ranks import Rank

_STEPS = 2


@dataclass(frozen=True)
class Penalty:
    """On the norm of an input's gradient, or of the gradient of that one's."""

    order: int = 1  # of the gradient
    inputs: int = 1  # each with its forward, all of which run before there is any gradient
    adds_loss: bool = False  # of one more forward, after the gradients

    def backward(self, model: nn.Module, rank: int) -> torch.Tensor:
        given = torch.linspace(0, 1, 6).view(2, 3) - rank * 0.25
        inputs = [(given / (1 + number)).requires_grad_() for number in range(self.inputs)]
        outputs = [model(x).sum() for x in inputs]
        gradients = [self._gradient(output, x) for output, x in zip(outputs, inputs, strict=True)]
        penalty = torch.stack([(gradient.norm() - 1).square() for gradient in gradients]).sum()
        whole = penalty + model(2 * inputs[0]).square().mean() if self.adds_loss else penalty
        whole.backward()
        return penalty.detach()

    def _gradient(self, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(output, x, create_graph=True)
        for _ in range(self.order - 1):
            (gradient,) = torch.autograd.grad(gradient.square().sum(), x, create_graph=True)
        return gradient


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
    rank: Rank, *, library: str, strategy: str, use_orig_params: bool, freezes: bool, penalty: Penalty
) -> Outcome:
    """Steps of a penalty on gradients of inputs; `freezes` the inner unit."""
    found, plain = load_library(library), built(freezes)

    def run() -> dict[str, Any]:
        model = _wrapped(found.distributed.fsdp, found.find(FSDP), plain, strategy, use_orig_params)
        penalties = [penalty.backward(model, rank.rank) for _ in range(_STEPS)]
        return {"penalties": penalties, "whole": gathered_gradients(found, model)}

    return observe(run)


def penalized_unsharded(world_size: int, freezes: bool, penalty: Penalty) -> dict[str, torch.Tensor]:
    """The averaged gradients, zero for none."""
    replicas = [built(freezes) for _ in range(world_size)]
    for rank, replica in enumerate(replicas):
        for _ in range(_STEPS):
            penalty.backward(replica, rank)
    average_gradients(replicas, Setup())
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in replicas[0].named_parameters()
    }


def directional_derivatives(model: nn.Module, along: torch.Tensor) -> list[torch.Tensor]:
    """Of the outputs along the inputs, each by two gradients; the first is begun with one leaf in all steps."""
    weights = torch.ones(2, 2, requires_grad=True)
    found = []
    for _ in range(5):
        x = torch.linspace(-1, 1, 6).view(2, 3).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x), x, weights, create_graph=True)
        (derivative,) = torch.autograd.grad(gradient, weights, along)
        found.append(derivative)
    assert len(weights._backward_hooks or ()) <= 2, "each step has left its hooks on a tensor of the user's"
    return found


def differentiated_along(rank: Rank, *, library: str, strategy: str) -> Outcome:
    found, plain = load_library(library), built(freezes=False)

    def run() -> list[torch.Tensor]:
        model = _wrapped(found.distributed.fsdp, found.find(FSDP), plain, strategy, use_orig_params=True)
        return directional_derivatives(model, torch.ones(2, 3))

    return observe(run)


def input_used_elsewhere(rank: Rank, *, library: str) -> Outcome:
    """A penalty by another model, on the first rank alone, on what was an input of the sharded one."""
    found, plain = load_library(library), built(freezes=False)

    def run() -> torch.Tensor:
        model = _wrapped(found.distributed.fsdp, found.find(FSDP), plain, "FULL_SHARD", use_orig_params=True)
        x = torch.linspace(-1, 1, 6).view(2, 3).requires_grad_()
        model(x).sum().backward()
        if rank.rank == 0:
            (gradient,) = torch.autograd.grad(built(freezes=False)(x).sum(), x, create_graph=True)
            gradient.square().sum().backward()
        return model(x).detach()

    return observe(run)


def gradients_with_a_graph(rank: Rank, *, library: str, use_orig_params: bool) -> Outcome:
    """A backward that is to leave gradients of parameters which can be differentiated."""
    found, plain = load_library(library), built(freezes=False)

    def run() -> None:
        model = _wrapped(found.distributed.fsdp, found.find(FSDP), plain, "FULL_SHARD", use_orig_params)
        model(torch.ones(1, 3) * rank.rank).sum().backward(create_graph=True)

    return observe(run)
