"""Units of which not every output gets a gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from conformance.distributed.fsdp.construct_cases import Site
from conformance.distributed.fsdp.fsdp_cases import COMPILER, gathered_gradients, groups_put_back, state_of
from conformance.library import load_library
from conformance.outcome import Outcome, observe
from conformance.ranks import Rank

_WIDTH = 4


class _Twofold(torch.autograd.Function):
    """Two outputs of one node."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return 2 * x, 3 * x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> torch.Tensor | None:
        scaled = [factor * grad for factor, grad in zip((2, 3), grads, strict=True) if grad is not None]
        return torch.stack(scaled).sum(0) if scaled else None


class _Silent(torch.autograd.Function):
    """Has no gradient for its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> None:
        return None


class _Forked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return _Twofold.apply(self.inner(x))


class _Attentive(nn.Module):
    """A transformer's block that returns its attention too; compiled, it is one node with all that it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixed = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 3 * _WIDTH)
        self.out = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value = self.mixed(self.norm(x)).chunk(3, -1)
        attention = (query @ key.transpose(-1, -2)).softmax(-1)
        return x + self.out(attention @ value), attention


class Model(nn.Module):
    """Whose outermost unit uses one output of an inner one, or both, or lets no gradient through."""

    def __init__(self, uses: str) -> None:
        super().__init__()
        self.uses = uses
        self.first = _Attentive() if uses == "compiled" else _Forked()
        self.last = nn.Linear(_WIDTH, 2)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.first(x)
        if self.uses == "both, one without gradient":
            one = one + _Silent.apply(other)
        if self.uses == "none":
            one = _Silent.apply(one)
        return self.last(one.detach() if self.uses == "detached" else one)


def trained(rank: Rank, *, library: str, strategy: str, use_orig_params: bool, uses: str) -> Outcome:
    """Two steps; the outcome's value is what each rank saw and holds."""
    found, model = load_library(library), Model(uses)

    def run() -> dict[str, Any]:
        site = Site(rank, found, model)
        arguments: dict[str, Any] = {
            "sharding_strategy": site.strategy(strategy),
            "use_orig_params": use_orig_params,
        }
        if uses == "compiled":
            torch._dynamo.reset()
            model.first.compile(backend=COMPILER)
        model.first = site.wrap(model.first, **arguments)
        whole = site.wrap(**arguments)
        optimizer = torch.optim.SGD(whole.parameters(), 0.05)
        seen = []
        for number in range(2):
            x = _input(number, rank.rank)
            loss = whole(x).square().sum()
            loss.backward()
            seen.append([loss.detach(), x.grad, [state_of(parameter) for parameter in whole.parameters()]])
            gradients = gathered_gradients(found, whole)
            optimizer.step()
            optimizer.zero_grad()
        return {"seen": seen, "whole": gradients}

    with groups_put_back():
        return observe(run)


def _input(number: int, rank: int) -> torch.Tensor:
    x = torch.linspace(-1, 1 + number, 2 * 3 * _WIDTH).view(2, 3, _WIDTH) - rank * 0.25
    return x.requires_grad_()
