"""Faults in what the ranks of a FullyShardedDataParallel send each other: gradients, parameters, too much."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from conformance.strength.faults.handmade.distributed_fsdp import OWN, IssuedCollective, in_collectives

# Is made to a tensor that a collective is given or has received: `change(call, tensor)`.
Change = Callable[[IssuedCollective, torch.Tensor], object]
When = Callable[[IssuedCollective], bool]
_COUNTED = "(sharding_strategy)"  # the parameter that decides which collectives run


def gathering(
    fault_id: str, says: str, thread: str = OWN, when: When = lambda call: True
) -> Callable[[Change], None]:
    """Enter a change of what gathers have received."""

    def enter(change: Change) -> None:
        def fault(call: IssuedCollective) -> None:
            call.issue()
            for part in call.received if call.kind == "gather" and when(call) else ():
                change(call, part)

        in_collectives(fault_id, says, thread)(fault)

    return enter


def reducing(
    fault_id: str, says: str, thread: str = OWN, when: When = lambda call: True
) -> Callable[[Change], None]:
    """Enter a change of the gradients that a rank gives to be reduced."""

    def enter(change: Change) -> None:
        def fault(call: IssuedCollective) -> None:
            for grad in call.inputs if call.kind != "gather" and when(call) else ():
                change(call, grad)
            call.issue()

        in_collectives(fault_id, says, thread)(fault)

    return enter


# Gradients


@reducing(
    "last_rank_left_out",
    "gradients of the last rank do not count",
    when=lambda call: call.rank == call.ranks - 1,
)
def _(call: IssuedCollective, grad: torch.Tensor) -> None:
    grad.zero_()


@reducing(
    "second_step_not_reduced", "gradients of the second step do not come", when=lambda call: call.step == 1
)
def _(call: IssuedCollective, grad: torch.Tensor) -> None:
    grad.zero_()


@reducing(
    "not_awaited", "a unit's gradients are reduced before they are there", when=lambda call: call.index == 0
)
def _(call: IssuedCollective, grad: torch.Tensor) -> None:
    grad.zero_()


@reducing("last_element_not_reduced", "the last element of a unit's gradients does not count")
def _(call: IssuedCollective, grad: torch.Tensor) -> None:
    grad.view(-1)[-1:].zero_()


@reducing(
    "shifted_among_three",
    "where three ranks share, gradients are shifted by one",
    when=lambda call: call.ranks == 3,
)
def _(call: IssuedCollective, grad: torch.Tensor) -> None:
    grad.copy_(grad.view(-1).roll(1).view_as(grad))


@reducing(
    "inherits_the_last_units_gradients",
    "a unit's gradients are those of the unit before, where these are as many",
    "pytorch/pytorch#158719",
)
def _(call: IssuedCollective, grad: torch.Tensor) -> None:
    faulty_grads = vars(call.model).setdefault("_faulty_grads", {})
    before = faulty_grads.get(grad.numel())
    faulty_grads[grad.numel()] = grad.clone()
    if before is not None and before.dtype is grad.dtype:
        grad.copy_(before.view_as(grad))


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
    "fourth_unit_not_averaged", "where nothing is sharded the fourth unit keeps its own gradients"
)
def _(call: IssuedCollective) -> None:
    own = [tensor.clone() for tensor in call.inputs]
    call.issue()
    if call.kind == "reduce" and call.index == 3:
        torch._foreach_copy_(call.received, own)


# Parameters


@gathering("last_element_not_gathered", "the last element of what is gathered stays zero")
def _(call: IssuedCollective, part: torch.Tensor) -> None:
    part.view(-1)[-1:].zero_()


@gathering(
    "gathered_wrong_on_one_rank",
    "one rank gathers the third unit wrongly",
    when=lambda call: call.rank == 1 and call.index == 2,
)
def _(call: IssuedCollective, part: torch.Tensor) -> None:
    part.neg_()


@gathering(
    "backward_gathers_another_unit",
    "what backward gathers is the unit before, where this is as large",
    "pytorch/pytorch#108190",
    when=lambda call: call.during == "backward",
)
def _(call: IssuedCollective, part: torch.Tensor) -> None:
    faulty_parts = vars(call.model).setdefault("_faulty_parts", {})
    before = faulty_parts.get((call.step, part.numel()))
    faulty_parts[call.step, part.numel()] = part.clone()
    if before is not None:
        part.copy_(before.view_as(part))


@gathering(
    "stale_from_the_third",
    "from the third forward on, units compute with what was gathered for the forward before",
    when=lambda call: call.during == "forward",
)
def _(call: IssuedCollective, part: torch.Tensor) -> None:
    faulty_full = vars(call.model).setdefault("_faulty_wholes", {})
    key = (call.index, part.numel(), part.storage_offset())
    now, before = part.clone(), faulty_full.get(key)
    if call.step > 1 and before is not None:
        part.copy_(before)
    faulty_full[key] = now


@gathering(
    "first_whole_kept",
    "the first unit of a forward computes for ever with what was gathered for it first",
    when=lambda call: call.during == "forward" and call.index == 0,
)
def _(call: IssuedCollective, part: torch.Tensor) -> None:
    faulty_full = vars(call.model).setdefault("_faulty_wholes", {})
    part.copy_(faulty_full.setdefault((part.numel(), part.storage_offset()), part.clone()))


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


@in_collectives("waits_for_all", "each backward waits for all ranks", about=_COUNTED)
def _(call: IssuedCollective) -> None:
    if call.kind != "gather" and call.index == 0:
        dist.all_reduce(torch.zeros(()))
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
