"""Cases of the parameters that an optimizer steps: those of before wrapping."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from conformance.distributed.fsdp.fsdp_cases import gathered_parameters
from conformance.distributed.fsdp.lab import Lab, filled, tried


def _backward(lab: Lab, model: nn.Module) -> None:
    model(torch.linspace(-1, 1, 15, device=lab.rank.device).view(5, 3)).square().mean().backward()


def _changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in before if not torch.equal(before[name], after[name])]


def optimizer_made_before(lab: Lab, *, of: str, use_orig_params: bool) -> dict[str, Any]:
    """Make an optimizer before wrapping. Return the result or error of its first step, and the changed parameters.

    Args:
        of: the optimizer's parameters: those of the model, of a model on the "meta" device, or of a model of which only
            a "frozen" module is wrapped; those that are put into it after wrapping ("replaced"); "ignored" parameters;
            or those of another module, which may have one of the model's parameters ("shared").
    """
    wrap = partial(lab.wrap, use_orig_params=use_orig_params)
    model: Any = filled(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))).to(lab.rank.device)
    other = filled(nn.Linear(3, 4)).to(lab.rank.device)
    trained = model.to("meta") if of == "meta" else model
    if of in ("another", "shared"):
        trained = other
    if of == "shared":
        other.weight = model[0].weight
    stepped = model[0] if of == "ignored" else trained
    optimizer = torch.optim.SGD(stepped.parameters(), 0.1)
    if of == "frozen":
        model[1] = wrap(model[1].requires_grad_(False))
    else:
        model = wrap(model, ignored_states=[*model[0].parameters()] if of == "ignored" else None)
    if of == "replaced":
        optimizer.param_groups[0]["params"] = [*model.parameters()]
    before = gathered_parameters(lab.library, model)
    _backward(lab, other if trained is other else model)
    step = tried(optimizer.step)
    return {"step": step, "changed": _changed(before, gathered_parameters(lab.library, model))}
