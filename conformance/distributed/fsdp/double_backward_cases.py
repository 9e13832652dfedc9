"""Cases of double backward: penalties on the gradients of inputs, and gradients of higher order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from conformance.distributed.fsdp.fsdp_cases import (
    Setup,
    average_gradients,
    gathered_gradients,
    zero_for_none,
)
from conformance.distributed.fsdp.lab import Lab, filled

_STEPS = 2


@dataclass(frozen=True)
class Penalty:
    """Penalty on the norm of an input's gradient, or of a gradient of higher order."""

    order: int = 1  # order of the gradient
    # Number of inputs. Each has its own forward, and all forwards run before the first gradient is computed.
    inputs: int = 1
    adds_loss: bool = False  # whether the loss of a last forward is added

    def backward(self, model: nn.Module, rank: int) -> torch.Tensor:
        values = torch.linspace(0, 1, 6).view(2, 3) - rank * 0.25
        inputs = [(values / (1 + number)).requires_grad_() for number in range(self.inputs)]
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
    """Build a model whose inner unit has several layers, so that second derivatives pass through each of them."""
    layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh())
    model = filled(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), layers, nn.Linear(4, 2)))
    layers.requires_grad_(not freezes)
    return model


def _wrapped(
    lab: Lab, *, strategy: str = "FULL_SHARD", use_orig_params: bool = True, freezes: bool = False
) -> Any:
    """Wrap the model and its inner unit, which may be frozen."""
    model, arguments = built(freezes), {"strategy": strategy, "use_orig_params": use_orig_params}
    model[2] = lab.wrap(model[2], **arguments)
    return lab.wrap(model, **arguments)


def penalized(lab: Lab, *, penalty: Penalty, **wrapping: Any) -> dict[str, Any]:
    """Run steps with a penalty on gradients of inputs. Return the penalties and the full gradients."""
    model = _wrapped(lab, **wrapping)
    penalties = [penalty.backward(model, lab.rank.rank) for _ in range(_STEPS)]
    return {"penalties": penalties, "whole": gathered_gradients(lab.library, model)}


def penalized_unsharded(world_size: int, freezes: bool, penalty: Penalty) -> dict[str, torch.Tensor]:
    """Return the gradients of unsharded replicas, averaged, with zero for a missing gradient."""
    replicas = [built(freezes) for _ in range(world_size)]
    for rank, replica in enumerate(replicas):
        for _ in range(_STEPS):
            penalty.backward(replica, rank)
    average_gradients(replicas, Setup())
    return {name: zero_for_none(parameter) for name, parameter in replicas[0].named_parameters()}


def directional_derivatives(model: nn.Module, along: torch.Tensor) -> list[torch.Tensor]:
    """Return derivatives of the outputs in the direction `along`, each computed from two gradients.

    All steps start the first gradient with the same leaf, `weights`.
    """
    weights = torch.ones(2, 2, requires_grad=True)
    derivatives = []
    for _ in range(5):
        x = torch.linspace(-1, 1, 6).view(2, 3).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x), x, weights, create_graph=True)
        (derivative,) = torch.autograd.grad(gradient, weights, along)
        derivatives.append(derivative)
    assert len(weights._backward_hooks or ()) <= 2, "each step has left its hooks on a tensor of the user's"
    return derivatives


def differentiated_along(lab: Lab, *, strategy: str) -> list[torch.Tensor]:
    return directional_derivatives(_wrapped(lab, strategy=strategy), torch.ones(2, 3))


def input_used_elsewhere(lab: Lab) -> list[torch.Tensor]:
    """Run a double backward of an unsharded model on rank 0 only, with an input that the sharded model has used."""
    model, x = _wrapped(lab), torch.linspace(-1, 1, 6).view(2, 3).requires_grad_()
    model(x).sum().backward()
    if lab.rank.rank == 0:
        (gradient,) = torch.autograd.grad(built(freezes=False)(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()
    return [model(x).detach()]


def gradients_with_a_graph(lab: Lab, *, use_orig_params: bool) -> None:
    """Run a backward with `create_graph=True`, which asks for differentiable gradients of the parameters."""
    model = _wrapped(lab, use_orig_params=use_orig_params)
    model(torch.ones(1, 3) * lab.rank.rank).sum().backward(create_graph=True)
