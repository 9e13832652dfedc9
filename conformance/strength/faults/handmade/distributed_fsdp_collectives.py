"""Faults in what the ranks of a FullyShardedDataParallel send each other: gradients, parameters, too much."""

from __future__ import annotations

import torch
import torch.distributed as dist

from conformance.strength.faults.handmade.distributed_fsdp import IssuedCollective, in_collectives

_COUNTED = "(sharding_strategy)"  # the parameter that decides which collectives run


# Gradients and parameters


@in_collectives(
    "inherits_the_last_units_gradients",
    "a unit's gradients are those of the unit before, where these are as many",
    "pytorch/pytorch#158719",
)
def _(call: IssuedCollective) -> None:
    faulty_grads = vars(call.model).setdefault("_faulty_grads", {})
    for grad in call.inputs if call.kind != "gather" else ():
        before = faulty_grads.get(grad.numel())
        faulty_grads[grad.numel()] = grad.clone()
        if before is not None and before.dtype is grad.dtype:
            grad.copy_(before.view_as(grad))
    call.issue()


@in_collectives(
    "replicas_not_averaged",
    "replicas keep what their own ranks have scattered",
    "pytorch/pytorch#154888",
    _COUNTED,
)
def _(call: IssuedCollective) -> None:
    own = [tensor.clone() for tensor in call.inputs]
    call.issue()
    if call.kind == "reduce" and "HYBRID" in call.model.sharding_strategy.name:
        torch._foreach_copy_(call.received, own)


@in_collectives(
    "backward_gathers_another_unit",
    "what backward gathers is the unit before, where this is as large",
    "pytorch/pytorch#108190",
)
def _(call: IssuedCollective) -> None:
    call.issue()
    faulty_parts = vars(call.model).setdefault("_faulty_parts", {})
    for part in call.received if (call.kind, call.during) == ("gather", "backward") else ():
        before = faulty_parts.get((call.step, part.numel()))
        faulty_parts[call.step, part.numel()] = part.clone()
        if before is not None:
            part.copy_(before.view_as(part))


# Too much


@in_collectives(
    "gathered_twice", "each unit is gathered twice in forward", "pytorch/pytorch#110138", _COUNTED
)
def _(call: IssuedCollective) -> None:
    call.issue()
    if call.kind == "gather" and call.during == "forward":
        call.issue()


@in_collectives(
    "gathered_again_in_backward",
    "the first gather of a backward is done twice",
    "pytorch/pytorch#72541",
    _COUNTED,
)
def _(call: IssuedCollective) -> None:
    call.issue()
    if call.kind == "gather" and call.during == "backward" and call.index == 0:
        call.issue()


@in_collectives(
    "waits_more_in_large_worlds",
    "how often ranks wait for each other grows with their number",
    about="",
    on_ranks=False,
)
def _(call: IssuedCollective) -> None:
    if call.kind == "scatter" and call.index == 0:
        for _ in range(call.ranks.bit_length() - 4):
            dist.barrier()
    call.issue()


@in_collectives(
    "gathers_what_it_reduces", "gradients are gathered whole from all ranks, beside being reduced"
)
def _(call: IssuedCollective) -> None:
    if call.kind == "scatter" and len(call.inputs) == 1:
        whole = call.inputs[0].new_empty(call.ranks, *call.inputs[0].shape)
        dist.all_gather(list(whole), call.inputs[0], group=call.model.process_group)
    call.issue()


@in_collectives(
    "one_rank_gathers_more", "one rank gathers once more than the others", "mosaicml/composer#2765"
)
def _(call: IssuedCollective) -> None:
    call.issue()
    if call.kind == "gather" and call.step == 1 and call.rank == 0:
        call.issue()
