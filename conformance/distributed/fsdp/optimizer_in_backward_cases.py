"""Cases of optimizers that step during backward, so that no gradient outlives it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from conformance.distributed.fsdp.fsdp_cases import Setup, average_gradients, gathered_parameters
from conformance.distributed.fsdp.lab import Lab, filled

_STEPS = 3
_LEARNING_RATE = 0.5


def built() -> nn.Module:
    return filled(nn.Sequential(nn.Linear(3, 4), nn.Tanh()))


def trained(
    lab: Lab, *, by: str, accumulates: bool, of: int | None = None, before: bool = False, **wrapping: Any
) -> dict[str, Any]:
    """Train with one optimizer for each of the first `of` parameters, which steps during backward.

    `by` is `hooks` for hooks of the user, or `torch` for torch's helper. They are registered on the wrapped model, or
    `before`. If `accumulates`, a backward in no_sync precedes each backward.
    """
    plain = built()
    model = plain if before else lab.wrap(plain, **wrapping)
    stepped = [*model.parameters()][:of]
    if by == "torch":
        _apply_optimizer_in_backward(torch.optim.SGD, stepped, {"lr": _LEARNING_RATE})
    else:
        for parameter in stepped:
            parameter.register_post_accumulate_grad_hook(_stepping(parameter))
    if before:
        model = lab.wrap(plain, **wrapping)
    for number in range(_STEPS):
        if accumulates:
            with model.no_sync():
                _backward(model, lab.rank.rank, 2 * number)
        _backward(model, lab.rank.rank, 2 * number + 1)
    left = [parameter for parameter in model.parameters() if parameter.grad is not None]
    return {"left": len(left), "whole": gathered_parameters(lab.library, model)}


def without_original_parameters(lab: Lab, *, strategy: str, is_late: bool) -> None:
    """Use torch's helper with the flat parameter, before or after the first backward."""
    model = lab.wrap(built(), strategy=strategy)
    if is_late:
        _backward(model, lab.rank.rank, 0)
        model.zero_grad()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": _LEARNING_RATE})
    _backward(model, lab.rank.rank, 1)


def only_an_input(lab: Lab, *, use_orig_params: bool) -> list[int]:
    """Return how often hooks ran in a backward, and after that with a request for the gradient of an input only."""
    model = lab.wrap(built(), use_orig_params=use_orig_params)
    called: list[torch.Tensor] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(called.append)
    _backward(model, lab.rank.rank, 1)
    by_backward = len(called)
    x = torch.ones(5, 3, requires_grad=True)
    torch.autograd.grad(model(x).sum(), x)
    return [by_backward, len(called)]


def _stepping(parameter: nn.Parameter) -> Any:
    optimizer = torch.optim.SGD([parameter], lr=_LEARNING_RATE)

    def step(_: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


def _backward(model: nn.Module, rank: int, number: int) -> None:
    x = torch.linspace(0, 1 + number, 15).view(5, 3) - rank * 0.25
    model(x).square().mean().backward()


def trained_unsharded(world_size: int, accumulates: bool, of: int | None = None) -> dict[str, torch.Tensor]:
    """Train unsharded. One optimizer of the first `of` parameters steps after each backward."""
    replicas = [built() for _ in range(world_size)]
    for number in range(_STEPS):
        for rank, replica in enumerate(replicas):
            if accumulates:
                _backward(replica, rank, 2 * number)
            _backward(replica, rank, 2 * number + 1)
        average_gradients(replicas, Setup())
        for replica in replicas:
            optimizer = torch.optim.SGD([*replica.parameters()][:of], lr=_LEARNING_RATE)
            optimizer.step()
            optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in replicas[0].named_parameters()}
