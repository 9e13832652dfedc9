"""Cases of asynchronous backward finalization: of two roots that share streams, and of a handle that was dropped."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from conformance.distributed.fsdp.fully_shard_cases import held
from conformance.distributed.fsdp.fully_shard_construct_cases import Site
from conformance.distributed.fsdp.lab import filled, tried


def _model(site: Site, *, is_manual: bool = True) -> Any:
    """Return a model whose first unit has no differentiable input, so that its backward does not end by itself."""
    model: Any = filled(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))).to(site.rank.device)
    site.shard_children(model)
    if is_manual:
        model.set_manual_backward_finalization(True)
    return model


def _loss(site: Site, model: Any, number: int = 0) -> Tensor:
    batch = torch.full((2, 4), 1.0 + site.rank.rank + number, device=site.rank.device)
    return model(batch).square().mean()


def of_open_unit(site: Site, is_manual: bool) -> dict[str, Any]:
    """Run two backwards that leave the first unit open. Return the parameters and gradients."""
    model = _model(site, is_manual=is_manual)
    for number in range(2):
        _loss(site, model, number).backward()
    if is_manual:
        model.finalize_backward()
    return held(model)


def of_two_roots(site: Site) -> dict[str, Any]:
    """Finalize one of two roots that share streams asynchronously, and call the other one meanwhile."""
    first, second = _model(site), _model(site)
    site.fsdp.share_comm_ctx([first, second])
    _loss(site, second).backward()
    second.finalize_backward()
    _loss(site, first).backward()
    handle = first.finalize_backward(async_op=True)
    refused = [
        tried(lambda: _loss(site, second)),
        tried(second.finalize_backward),
        tried(second.reset_iter_state),
    ]
    handle.wait()
    handle.wait()
    _loss(site, second, 1).backward()
    second.finalize_backward()
    return {"refused": refused, "held": [held(first), held(second)]}


def of_lost_handle(site: Site) -> dict[str, Any]:
    """Drop the handle of an asynchronous finalization. Return the error's notes, and the gradients after a reset."""
    model = _model(site)
    _loss(site, model).backward()
    model.finalize_backward(async_op=True)
    notes: list[str] = []
    try:
        _loss(site, model)
    except RuntimeError as error:
        notes = error.__notes__
    model.reset_iter_state()
    model.zero_grad()
    _loss(site, model, 1).backward()
    model.finalize_backward()
    return {"notes": notes, "held": held(model)}
