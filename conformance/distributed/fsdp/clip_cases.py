"""Cases that clip gradients with `clip_grad_norm_`."""

from __future__ import annotations

from typing import Any

import torch

from conformance.distributed.fsdp.fsdp_cases import gathered_gradients
from conformance.distributed.fsdp.lab import Lab, tried


def clip(lab: Lab, *, max_norm: Any, norm_type: Any = 2.0, backwards: int = 1, **more: Any) -> dict[str, Any]:
    """Run backwards and clip. Return the norm, this rank's gradients after clipping, and the full gradients."""
    for number in range(backwards):
        lab.backward(number)
    norm = lab.model.clip_grad_norm_(max_norm, norm_type, **more)
    return {"norm": norm, "gradients": lab.gradients(), "whole": gathered_gradients(lab.library, lab.model)}


def clip_with_a_unit_that_is_not_sharded(lab: Lab, *, norm_type: float) -> dict[str, Any]:
    lab.plain.head = lab.wrap(lab.plain.head, strategy="NO_SHARD")
    lab.model = lab.wrap(lab.plain)
    return clip(lab, max_norm=0.25, norm_type=norm_type)


def clip_nonfinite(lab: Lab, *, value: float) -> dict[str, Any]:
    """Clip after rank 0 has set one gradient element to `value`."""
    lab.backward()
    grad = next(parameter.grad for parameter in lab.model.parameters() if parameter.grad is not None)
    if lab.rank.rank == 0:
        grad.view(-1)[0] = value
    return {"norm": lab.model.clip_grad_norm_(1.0)}


def clip_an_inner_unit(lab: Lab) -> Any:
    lab.backward()
    return tried(lambda: lab.units[1].clip_grad_norm_(1.0))


def clip_before_any_forward(lab: Lab) -> Any:
    """Clip before the first forward, so that the call must initialise the root itself."""
    return {"norm": lab.model.clip_grad_norm_(1.0), "root": lab.model.check_is_root()}


def clip_in_backward(lab: Lab) -> Any:
    attempts: list[Any] = []
    batch = lab.tree.batch(0, lab.rank.rank)
    batch.x.register_hook(lambda _: attempts.append(tried(lambda: lab.model.clip_grad_norm_(1.0))))
    output: torch.Tensor = lab.model(batch.x, ids=batch.ids)
    output.sum().backward()
    return attempts
