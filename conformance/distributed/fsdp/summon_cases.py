"""Cases of `summon_full_params`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from conformance.distributed.fsdp.fsdp_cases import gathered_parameters, state_of
from conformance.distributed.fsdp.lab import Lab, named, tried
from conformance.distributed.fsdp.module_trees import call, loss_of, out_of_form


def summon(lab: Lab, *, options: Mapping[str, Any], at: int = 0, adds: float = 0.0) -> dict[str, Any]:
    """Return the tensors inside `summon_full_params`, and after it.

    If `adds` is not zero, `adds` plus the rank is added to each parameter, and with `with_grads` to each gradient. `at`
    is the number of the unit, counted from the root.
    """
    lab.backward()
    with lab.fsdp.summon_full_params(lab.units[at], **options):
        inside = {name: state_of(parameter) for name, parameter in lab.model.named_parameters()}
        buffers = [name for name, _ in lab.model.named_buffers()]
        with torch.no_grad():
            for parameter in lab.model.parameters():
                if adds:
                    parameter.add_(adds + lab.rank.rank)
                if adds and parameter.grad is not None and options.get("with_grads"):
                    parameter.grad.add_(adds + lab.rank.rank)
    return {
        "inside": inside,
        "buffers": buffers,
        "shards": {name: state_of(parameter) for name, parameter in lab.model.named_parameters()},
        "whole": gathered_parameters(lab.library, lab.model),
        "trained": [parameter.requires_grad for parameter in lab.model.parameters()],
    }


def unsharded(lab: Lab, *, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the full parameters and gradients on the device where they are shown."""
    lab.backward()
    with lab.fsdp.summon_full_params(lab.model, **options):
        return {name: state_of(parameter) for name, parameter in lab.model.named_parameters()}


def changed_behind(lab: Lab) -> dict[str, torch.Tensor]:
    """Return the tensors that a second summon showed. The parameters are zeroed right after it.

    The second summon shows them in memory that the first one kept.
    """
    shown: dict[str, torch.Tensor] = {}
    for _ in range(2):
        with lab.fsdp.summon_full_params(lab.model, writeback=False):
            shown = named(lab.model)
    with torch.no_grad():
        for parameter in lab.model.parameters():
            parameter.zero_()
    return shown


def computes(
    lab: Lab, *, options: Mapping[str, Any], by: str = "unit", backward: str = "", adds: float = 0.0
) -> dict[str, Any]:
    """Run a forward inside, of the root unit or of the `module` that it wraps.

    `backward` is `inside`, `after` or empty.
    """
    with lab.fsdp.summon_full_params(lab.model, **options):
        with torch.no_grad():
            for parameter in lab.model.parameters() if adds else ():
                parameter.add_(adds)
        with torch.set_grad_enabled(bool(backward)):
            model = lab.model if by == "unit" else lab.model.module
            output = out_of_form(call(model, lab.tree, lab.tree.batch(0, lab.rank.rank).on(lab.rank.device)))
        inside = [parameter.shape for parameter in lab.model.parameters()]
        if backward == "inside":
            loss_of(output).backward()
    if backward == "after":
        loss_of(output).backward()
    gradients = lab.gradients()
    lab.model.zero_grad()
    return {
        "output": output.detach(),
        "inside": inside,
        "gradients": gradients,
        "whole": gathered_parameters(lab.library, lab.model),
        "loss": lab.backward(1),
    }


def backward_beside_gradients(lab: Lab) -> Any:
    """Return the error of a backward inside the context while full gradients are shown."""
    lab.backward()

    def inside() -> None:
        with lab.fsdp.summon_full_params(lab.model, with_grads=True):
            lab.backward(1)

    return tried(inside)


def between_barriers(lab: Lab) -> None:
    dist.barrier()
    with lab.fsdp.summon_full_params(lab.model):
        pass
    dist.barrier()


def trains_on(lab: Lab) -> list[torch.Tensor]:
    """Return the losses before and after a summon that changes the parameters."""
    losses = [lab.backward()]
    with lab.fsdp.summon_full_params(lab.model), torch.no_grad():
        for parameter in lab.model.parameters():
            parameter.mul_(0.5)
    losses.append(lab.backward(1))
    return losses


def summon_in_summon(lab: Lab) -> Any:
    with lab.fsdp.summon_full_params(lab.model):
        return tried(lambda: lab.fsdp.summon_full_params(lab.model).__enter__())


def summon_in_forward(lab: Lab) -> Any:
    return _summoned_by(lab, lab.model.head.register_forward_pre_hook)


def summon_in_backward(lab: Lab) -> Any:
    return _summoned_by(lab, lab.model.head.register_full_backward_hook)


def backward_in_summon(lab: Lab) -> Any:
    loss = loss_of(lab.forward())
    with lab.fsdp.summon_full_params(lab.model):
        return tried(loss.backward)


def _summoned_by(lab: Lab, register: Any) -> Any:
    attempts: list[Any] = []
    register(lambda *_: attempts.append(tried(lambda: lab.fsdp.summon_full_params(lab.model).__enter__())))
    lab.backward()
    return attempts


def restores_after_an_error(lab: Lab) -> dict[str, Any]:
    """Raise inside the context. Return the error, the restored shards and the next loss."""

    def raises() -> None:
        with lab.fsdp.summon_full_params(lab.model):
            raise KeyError("injected")

    return {"raised": tried(raises), "shards": named(lab.model), "loss": lab.backward()}


def of_plain_modules(lab: Lab) -> dict[str, torch.Tensor]:
    """Summon a module that is not a unit, with units inside and around it."""
    with lab.fsdp.summon_full_params(lab.model.body):
        return named(lab.model.body)
