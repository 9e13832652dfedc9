"""The user's hooks on the gradients of one flat parameter, which autograd does not run."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from impl.distributed.fsdp._layout.flat_buffer import copy_grads
from impl.distributed.fsdp._layout.flat_handle import FlatParamHandle
from impl.distributed.fsdp._params.autograd import apply_gradient_hooks, call_hook
from impl.distributed.fsdp._params.managed import IN_BACKWARD_OPTIMIZERS


def has_hooks(parameter: Tensor) -> bool:
    hooks = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    return bool(hooks) or hasattr(parameter, IN_BACKWARD_OPTIMIZERS)


def run_hooks_before_reduction(
    handle: FlatParamHandle, grads: Sequence[Tensor | None]
) -> Sequence[Tensor | None]:
    """Run the hooks of a flat parameter on this rank's gradients, and return the results.

    Hooks that parameters had before get their own gradients. Those of the flat parameter get one tensor.
    """
    if any(handle.replaced_hooks):
        triples = zip(handle.param_infos, handle.replaced_hooks, grads, strict=True)
        grads = [
            info.local_part(apply_gradient_hooks(hooks, info.wrap_local(grad), info.name))
            if grad is not None and hooks
            else grad
            for info, hooks, grad in triples
        ]
    if handle.use_orig_params or not handle.flat_param._backward_hooks:
        return grads
    present = [grad for grad in grads if grad is not None]
    if not present:
        return grads
    flat = present[0].new_empty(handle.layout.padded_numel)
    copy_grads(handle.layout, grads, handle.views_of(flat), flat)
    result = apply_gradient_hooks(
        handle.flat_param._backward_hooks, flat[: handle.layout.numel], "a flat parameter"
    )
    return handle.views_of(result.contiguous())


def run_hooks_after_reduction(handle: FlatParamHandle, reduced: Tensor) -> None:
    """Run the hooks of original parameters on their pieces of an average [shard_numel], in place."""
    if not handle.use_orig_params or not any(param._backward_hooks for param in handle.parameters):
        return
    for slot, parameter, part in zip(
        handle.layout.slots, handle.parameters, handle.pieces_of(reduced), strict=True
    ):
        if part is not None and parameter._backward_hooks and parameter.requires_grad:
            # A copy, because hooks may keep their argument.
            part.copy_(apply_gradient_hooks(parameter._backward_hooks, part.clone(), slot.name))


def call_accumulation_hooks(handle: FlatParamHandle) -> None:
    """Call the user's hooks and optimizers after accumulation.

    Only after a backward with synchronisation: a step with a rank's own sum would make the ranks diverge.
    """
    names = [slot.name for slot in handle.layout.slots] if handle.use_orig_params else ["a flat parameter"]
    for parameter, name in zip(handle.stepped, names, strict=True):
        if parameter.grad is None:
            continue
        for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
            call_hook(hook, parameter, name)
        optimizers = getattr(parameter, IN_BACKWARD_OPTIMIZERS, ())
        for optimizer in optimizers:
            optimizer.step()
        if optimizers:
            parameter.grad = None
