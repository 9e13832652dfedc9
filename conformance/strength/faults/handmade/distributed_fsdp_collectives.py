"""Faults in the collectives of FullyShardedDataParallel: gradients, parameters, and redundant collectives."""

from __future__ import annotations

import torch
import torch.distributed as dist

from conformance.strength.faults.handmade.distributed_fsdp import IssuedCollective, in_collectives

_COUNTED = "(sharding_strategy)"  # the parameter that decides which collectives run


# Gradients and parameters


@in_collectives("pytorch/pytorch#158719")
def gradients_of_previous_unit(call: IssuedCollective) -> None:
    """A unit has the gradients of the previous unit with as many elements."""
    faulty_grads = vars(call.model).setdefault("_faulty_grads", {})
    for grad in call.inputs if call.kind != "gather" else ():
        before = faulty_grads.get(grad.numel())
        faulty_grads[grad.numel()] = grad.clone()
        if before is not None and before.dtype is grad.dtype:
            grad.copy_(before.view_as(grad))
    call.issue()


@in_collectives("pytorch/pytorch#154888", _COUNTED)
def replicas_not_averaged(call: IssuedCollective) -> None:
    """Replicas keep the gradients that their own ranks have reduced."""
    own = [tensor.clone() for tensor in call.inputs]
    call.issue()
    if call.kind == "reduce" and "HYBRID" in call.model.sharding_strategy.name:
        torch._foreach_copy_(call.received, own)


@in_collectives("pytorch/pytorch#108190")
def backward_gathers_another_unit(call: IssuedCollective) -> None:
    """Backward gathers the previous unit with as many elements."""
    call.issue()
    faulty_parts = vars(call.model).setdefault("_faulty_parts", {})
    for part in call.received if (call.kind, call.during) == ("gather", "backward") else ():
        before = faulty_parts.get((call.step, part.numel()))
        faulty_parts[call.step, part.numel()] = part.clone()
        if before is not None:
            part.copy_(before.view_as(part))


# Redundant collectives


@in_collectives("pytorch/pytorch#110138", _COUNTED)
def gathered_twice(call: IssuedCollective) -> None:
    """Each unit is gathered twice in forward."""
    call.issue()
    if call.kind == "gather" and call.during == "forward":
        call.issue()


@in_collectives("pytorch/pytorch#72541", _COUNTED)
def gathered_again_in_backward(call: IssuedCollective) -> None:
    """The first gather of a backward is done twice."""
    call.issue()
    if call.kind == "gather" and call.during == "backward" and call.index == 0:
        call.issue()


@in_collectives(about="", on_ranks=False)
def waits_more_in_large_worlds(call: IssuedCollective) -> None:
    """The number of barriers grows with the number of ranks."""
    if call.kind == "scatter" and call.index == 0:
        for _ in range(call.ranks.bit_length() - 4):
            dist.barrier()
    call.issue()


@in_collectives()
def gathers_reduced_gradients(call: IssuedCollective) -> None:
    """Unsharded gradients are gathered from all ranks besides being reduced."""
    if call.kind == "scatter" and len(call.inputs) == 1:
        whole = call.inputs[0].new_empty(call.ranks, *call.inputs[0].shape)
        dist.all_gather(list(whole), call.inputs[0], group=call.model.process_group)
    call.issue()


@in_collectives("mosaicml/composer#2765")
def one_rank_gathers_more(call: IssuedCollective) -> None:
    """Rank 0 gathers more often than the others."""
    call.issue()
    if call.kind == "gather" and call.step == 1 and call.rank == 0:
        call.issue()
