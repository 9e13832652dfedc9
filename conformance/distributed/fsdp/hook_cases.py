"""Cases of hooks that users register on modules, tensors and parameters, and of communication hooks."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks

from conformance.distributed.fsdp.fsdp_cases import clean, constructor_arguments, gathered_gradients
from conformance.distributed.fsdp.lab import Lab, tried
from conformance.distributed.fsdp.module_trees import loss_of, out_of_form

# -- users' hooks


def hooks_of_modules(lab: Lab, *, on: str) -> dict[str, Any]:
    """Register every type of module hook on the root, on a unit, or on the module that a unit wraps."""
    module = {"root": lab.model, "unit": lab.units[1], "wrapped": lab.units[1].module}[on]
    events: list[Any] = []

    def note(kind: str) -> Any:
        def hook(_: Any, *arguments: Any) -> None:
            weight = tuple(module.inner.weight.shape) if on == "wrapped" else None
            events.append([kind, _described(arguments), weight])

        return hook

    module.register_forward_pre_hook(note("forward pre"))
    module.register_forward_hook(note("forward"))
    module.register_full_backward_pre_hook(note("backward pre"))
    module.register_full_backward_hook(note("backward"))
    lab.backward()
    return {"events": events, "whole": gathered_gradients(lab.library, lab.model)}


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [tuple(value.shape), str(value.dtype)]
    if isinstance(value, (tuple, list)):
        return [_described(item) for item in value]
    return type(value).__name__


def hooks_that_change(lab: Lab) -> dict[str, Any]:
    """Register hooks that replace inputs, outputs and gradients."""
    unit = lab.units[1]
    unit.register_forward_pre_hook(lambda _, args: (args[0] * 2.0,))
    unit.register_forward_hook(lambda *arguments: arguments[2] * 0.5)
    unit.register_full_backward_hook(
        lambda _, inputs, __: tuple(grad if grad is None else grad * 3.0 for grad in inputs)
    )
    loss = lab.backward()
    return {"loss": loss, "whole": gathered_gradients(lab.library, lab.model)}


def hooks_of_tensors(lab: Lab) -> dict[str, Any]:
    """Register hooks on the input tensor and on the output tensor."""
    events: list[Any] = []
    batch = lab.tree.batch(0, lab.rank.rank)
    batch.x.register_hook(lambda grad: events.append(["input", tuple(grad.shape)]) or grad * 2)
    output = out_of_form(lab.model(batch.x, ids=batch.ids))
    output.register_hook(lambda grad: events.append(["output", tuple(grad.shape)]))
    # A plain sum after batch statistics would be the same for all inputs.
    loss_of(output).backward()
    return {"events": events, "input gradient": batch.x.grad}


def hooks_of_parameters(lab: Lab) -> list[str]:
    """Register hooks on the parameters of which this rank has elements."""
    events: list[str] = []
    for name, parameter in lab.model.named_parameters():
        if parameter.numel():
            parameter.register_post_accumulate_grad_hook(_noting(events, clean(name)))
    lab.backward()
    return sorted(events)


def _noting(events: list[Any], name: str) -> Any:
    return lambda _: events.append(name)


def hooks_on_gradients(lab: Lab, *, no_sync: bool, before: bool = False) -> dict[str, Any]:
    """Return the shapes that gradient hooks get and those of `.grad`, and whether the hooks tripled the gradients.

    Args:
        before: register the hooks before wrapping, and remove some of them afterwards.
    """
    plain = _accumulated(lab, no_sync=no_sync)
    hooked = Lab(lab.rank, lab.library, lab.setup, lab.tree)
    shapes: list[Any] = []
    removed: list[Any] = []
    for name, parameter in (hooked.plain if before else hooked.model).named_parameters():
        if parameter.numel():
            parameter.register_hook(_tripling(shapes, clean(name)))
            removed.append(parameter.register_hook(_tripling(shapes, clean(name))))
    model = hooked.model
    for hook in removed:
        hook.remove()
    whole = _accumulated(hooked, no_sync=no_sync)
    are_tripled = [torch.allclose(whole[name], 3 * plain[name]) for name in plain]
    return {
        "shapes": sorted(shapes),
        "grad shapes": sorted(
            (clean(name), tuple(parameter.grad.shape))
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        ),
        "whole": whole,
        "are tripled": all(are_tripled),
    }


def _accumulated(lab: Lab, *, no_sync: bool) -> dict[str, torch.Tensor]:
    with lab.model.no_sync() if no_sync else contextlib.nullcontext():
        lab.backward(0)
    lab.backward(1)
    return gathered_gradients(lab.library, lab.model)


def _tripling(shapes: list[Any], name: str) -> Any:
    return lambda grad: shapes.append((name, tuple(grad.shape))) or grad * 3


def barriers_where_units_compute(lab: Lab) -> None:
    """Run two forwards and backwards with a barrier wherever a unit's module begins to compute."""
    for unit in lab.units[1:]:
        unit.module.register_forward_pre_hook(_meet)
        unit.module.register_full_backward_pre_hook(_meet)
    for number in range(2):
        lab.backward(number)


def _meet(*_: Any) -> None:
    dist.barrier()


# -- communication hooks


class HookCalls:
    """State of a user-defined communication hook, which records the hook's inputs."""

    def __init__(self) -> None:
        self.seen: list[Any] = []


def local_sum(reported: HookCalls, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """Sum over the ranks without dividing, so that a division by the library would be visible."""
    parts = None if output is None else grad.numel() // output.numel()
    reported.seen.append([grad.dim(), str(grad.dtype), parts])
    dist.all_reduce(grad)
    if output is not None:
        rank = dist.get_rank()
        output.copy_(grad.chunk(dist.get_world_size())[rank])


def comm_hook(lab: Lab, *, hook: str, backwards: int = 1, no_sync: bool = False) -> dict[str, Any]:
    """Train with a communication hook. `hook` is the name of one of torch's hooks, or `own`."""
    if hook == "own":
        state: Any = HookCalls()
        lab.model.register_comm_hook(state, local_sum)
    else:
        state = _state_of(hook)
        lab.model.register_comm_hook(state, getattr(default_hooks, hook))
    for number in range(backwards):
        is_last = number == backwards - 1
        with lab.model.no_sync() if no_sync and not is_last else contextlib.nullcontext():
            lab.backward(number)
    return {
        "gradients": lab.gradients(),
        "reported": state.seen if hook == "own" else None,
        "whole": gathered_gradients(lab.library, lab.model),
    }


def _state_of(hook: str) -> Any:
    if hook.endswith("compress_hook"):
        return default_hooks.LowPrecisionState(dist.group.WORLD)
    return default_hooks.DefaultState(dist.group.WORLD)


def comm_hook_refused(lab: Lab, *, why: str) -> Any:
    match why:
        case "an inner unit":
            lab.forward()
            return tried(lambda: lab.units[1].register_comm_hook(None, local_sum))
        case "twice":
            lab.model.register_comm_hook(HookCalls(), local_sum)
            return tried(lambda: lab.model.register_comm_hook(HookCalls(), local_sum))
        case "no callable":
            return tried(lambda: lab.model.register_comm_hook(None, "no hook"))
        case "replicas of a part":
            model = _around_replicas(lab)
            return tried(lambda: model.register_comm_hook(HookCalls(), local_sum))
        case _:
            return tried(lambda: lab.model.register_comm_hook(HookCalls(), local_sum))


def _around_replicas(lab: Lab) -> Any:
    """Return a root that is not hybrid, with a hybrid unit inside."""
    arguments = constructor_arguments(lab.rank, lab.library, lab.model, lab.setup)
    inner = lab.fsdp(nn.Linear(3, 4), **arguments)
    return lab.fsdp(nn.Sequential(inner, nn.Linear(4, 2)), device_id=lab.rank.device)
