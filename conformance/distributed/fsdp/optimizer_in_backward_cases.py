"""Optimizers that step while the backward runs, so that no gradient outlives it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from conformance.distributed.fsdp.fsdp_cases import FSDP, Setup, average_gradients, gathered_parameters
from conformance.distributed.fsdp.torch_limit_removed_cases import built
from conformance.judge.library import load_library
from conformance.judge.outcome import Outcome, observe
from conformance.ranks import Rank

_STEPS = 3
_LEARNING_RATE = 0.5


def trained(
    rank: Rank, *, library: str, by: str, strategy: str, use_orig_params: bool, accumulates: bool
) -> Outcome:
    """Each optimizer has one parameter; `by` is `hooks` of the user's or `torch`'s helper.

    Where it `accumulates`, a backward in no_sync comes before each.
    """
    found, plain = load_library(library), nn.Sequential(built("plain"), nn.Tanh())

    def run() -> dict[str, Any]:
        model = found.find(FSDP)(
            plain,
            sharding_strategy=found.distributed.fsdp.ShardingStrategy[strategy],
            device_id=torch.device("cpu"),
            use_orig_params=use_orig_params,
        )
        if by == "torch":
            _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": _LEARNING_RATE})
        else:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(_stepping(parameter))
        for number in range(_STEPS):
            if accumulates:
                with model.no_sync():
                    _backward(model, rank.rank, 2 * number)
            _backward(model, rank.rank, 2 * number + 1)
        left = [parameter for parameter in model.parameters() if parameter.grad is not None]
        return {"left": len(left), "whole": gathered_parameters(found, model)}

    return observe(run)


def without_original_parameters(rank: Rank, *, library: str, strategy: str, is_late: bool) -> Outcome:
    """torch's helper with the flat parameter, before the first backward or behind it."""
    found, plain = load_library(library), nn.Sequential(built("plain"), nn.Tanh())

    def run() -> None:
        kind = found.distributed.fsdp.ShardingStrategy[strategy]
        model = found.find(FSDP)(plain, sharding_strategy=kind, device_id=torch.device("cpu"))
        if is_late:
            _backward(model, rank.rank, 0)
            model.zero_grad()
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": _LEARNING_RATE})
        _backward(model, rank.rank, 1)

    return observe(run)


def only_an_input(rank: Rank, *, library: str, use_orig_params: bool) -> Outcome:
    """How often hooks were called by a backward, and by then asking for the gradient of an input alone."""
    found, plain = load_library(library), nn.Sequential(built("plain"), nn.Tanh())

    def run() -> list[int]:
        model = found.find(FSDP)(plain, device_id=torch.device("cpu"), use_orig_params=use_orig_params)
        called: list[torch.Tensor] = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(called.append)
        _backward(model, rank.rank, 1)
        by_backward = len(called)
        x = torch.ones(5, 3, requires_grad=True)
        torch.autograd.grad(model(x).sum(), x)
        return [by_backward, len(called)]

    return observe(run)


def _stepping(parameter: nn.Parameter) -> Any:
    optimizer = torch.optim.SGD([parameter], lr=_LEARNING_RATE)

    def step(_: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


def _backward(model: nn.Module, rank: int, number: int) -> None:
    x = torch.linspace(0, 1 + number, 15).view(5, 3) - rank * 0.25
    model(x).square().mean().backward()


def trained_unsharded(world_size: int, accumulates: bool) -> dict[str, torch.Tensor]:
    """With one optimizer after each backward."""
    replicas = [nn.Sequential(built("plain"), nn.Tanh()) for _ in range(world_size)]
    for number in range(_STEPS):
        for rank, replica in enumerate(replicas):
            if accumulates:
                _backward(replica, rank, 2 * number)
            _backward(replica, rank, 2 * number + 1)
        average_gradients(replicas, Setup())
        for replica in replicas:
            optimizer = torch.optim.SGD(replica.parameters(), lr=_LEARNING_RATE)
            optimizer.step()
            optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in replicas[0].named_parameters()}
