"""Faults in units that hold nothing, or nothing that is trained, and in outputs of rarer kinds."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from conformance.faults.handmade.distributed_fsdp import Backward, after_backward, broken


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


@broken(
    "buffers_of_hollow_units_stay", "forward", "what a unit without parameters does to its buffers is lost"
)
def buffers_of_hollow_units_stay(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    before = {} if list(self.parameters()) else {b: b.clone() for b in self.buffers()}
    output = original(self, *args, **kwargs)
    for buffer, values in before.items():
        buffer.copy_(values)
    return output


@broken("hollow_units_detach", "forward", "no gradient goes through a unit without parameters")
def hollow_units_detach(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    output = original(self, *args, **kwargs)
    return output if list(self.parameters()) else _detached(output)


@broken("frozen_units_detach", "forward", "no gradient goes through a unit that is frozen")
def frozen_units_detach(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    output = original(self, *args, **kwargs)
    parameters = list(self.parameters())
    return _detached(output) if parameters and not any(p.requires_grad for p in parameters) else output


@after_backward("frozen_roots_silence_units", "where the outermost unit trains nothing itself, no unit does")
def _(backward: Backward) -> None:
    own = backward.model._flat_param
    if own is None or not own.requires_grad:
        for grad, _ in backward.pairs:
            grad.zero_()


@broken("named_tuples_become_tuples", "forward", "outputs in a named tuple come back in a plain one")
def named_tuples_become_tuples(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    output = original(self, *args, **kwargs)
    is_named = hasattr(output, "_fields") and not isinstance(output, PackedSequence)
    return tuple(output) if is_named else output


@broken("outputs_in_sets_detached", "forward", "outputs in a set get no gradients")
def outputs_in_sets_detached(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    output = original(self, *args, **kwargs)
    return {_detached(one) for one in output} if isinstance(output, set) else output


@broken("packed_outputs_detached", "forward", "outputs in a packed sequence get no gradients")
def packed_outputs_detached(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    output = original(self, *args, **kwargs)
    return output._replace(data=output.data.detach()) if isinstance(output, PackedSequence) else output
