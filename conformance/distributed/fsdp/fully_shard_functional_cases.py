"""Cases of fully_shard under torch.func.functional_call, which replaces the parameters that a forward computes with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from conformance.distributed.fsdp.fully_shard_beside_cases import blocks
from conformance.distributed.fsdp.fully_shard_cases import full_value
from conformance.distributed.fsdp.fully_shard_construct_cases import Site

_LossOf = Callable[[dict[str, Tensor]], Tensor]


def _loss(site: Site, rank: int, model: nn.Module, tensors: dict[str, Tensor]) -> Tensor:
    batch = torch.linspace(-1, 1, 24, dtype=torch.float64, device=site.rank.device).view(4, 6)
    return functional_call(model, tensors, (batch * (1 + rank),)).square().mean()


def _gradients(loss_of: _LossOf, tensors: dict[str, Tensor], inner_steps: int) -> dict[str, Tensor | None]:
    """Return the gradients of the loss after `inner_steps` of SGD, by the names in `tensors`."""
    for tensor in tensors.values():
        tensor.requires_grad_()
    fast = dict(tensors)
    for _ in range(inner_steps):
        grads = torch.autograd.grad(loss_of(fast), list(fast.values()), create_graph=True)
        pairs = zip(fast.items(), grads, strict=True)
        fast = {name: tensor - 0.1 * grad for (name, tensor), grad in pairs}
    loss_of(fast).backward()
    return {name: _whole(tensor.grad) for name, tensor in tensors.items()}


def _whole(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else full_value(grad)


def substituted(site: Site, how: str, keeps: bool, inner_steps: int) -> list[dict[str, Any]]:
    """Return results of a sharded model with other tensors for its parameters, and of the same one without sharding."""
    rank, device = site.rank.rank, site.rank.device
    plain, model = (blocks(2).to(device) for _ in range(2))
    whole = {name: param.detach() * 2 for name, param in plain.named_parameters()}
    site.shard_children(model, reshard_after_forward=not keeps)
    sharded = {name: param.detach() * 2 for name, param in model.named_parameters()}
    tensors = sharded if how == "sharded" else {name: tensor.clone() for name, tensor in whole.items()}
    with torch.no_grad():
        _loss(site, rank, model, {})  # the root's first forward
        results: dict[str, Any] = {"loss": _loss(site, rank, model, dict(tensors))}
    results["gradients"] = _gradients(lambda fast: _loss(site, rank, model, dict(fast)), tensors, inner_steps)
    for block in (*model, model):
        block.reshard()
    own_grads = [_whole(param.grad) for param in model.parameters()]
    results["own"] = [*map(full_value, model.parameters()), *own_grads]
    ranks = range(dist.get_world_size()) if how == "sharded" else [rank]

    def mean_loss(fast: dict[str, Tensor]) -> Tensor:
        return torch.stack([_loss(site, peer, plain, dict(fast)) for peer in ranks]).mean()

    expected: dict[str, Any] = {"loss": _loss(site, rank, plain, dict(whole))}
    expected["gradients"] = _gradients(mean_loss, whole, inner_steps)
    expected["own"] = [*(param.detach() for param in plain.parameters()), *([None] * len(own_grads))]
    return [results, expected]
