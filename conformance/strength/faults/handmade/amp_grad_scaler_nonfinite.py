"""Faults in `nonfinite_parameters`, of GradScaler and of ShardedGradScaler; torch has none to put them in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from conformance.strength.faults.fault import Substitute, in_method, register_fault, subclass
from conformance.strength.faults.handmade.distributed_fsdp_sharded_grad_scaler import SCALER

NONFINITE = "nonfinite_parameters"


def broken(fault_id: str, breaks: str, says: str, **more: Any) -> Callable[[Substitute], Substitute]:
    """Enter `fault(original, scaler, optimizer)`, which is called in the place of the method, where there is one."""

    def enter(fault: Substitute) -> Substitute:
        def make(whole: type) -> type:
            return in_method(NONFINITE, fault)(whole) if hasattr(whole, NONFINITE) else subclass(whole, {})

        register_fault(f"nonfinite.{fault_id}", breaks, says=says, wants=NONFINITE, **more)(make)
        return fault

    return enter


@broken("counts_parameters", "amp.GradScaler", "the number of elements is that of parameters", on_ranks=True)
def counts_parameters(original: Any, self: Any, optimizer: Any) -> Any:
    return [(name, rank, 1) for name, rank, _ in original(self, optimizer)]


@broken("of_this_rank", SCALER, "each rank names its own gradients only", on_ranks=True)
def of_this_rank(original: Any, self: Any, optimizer: Any) -> Any:
    return [entry for entry in original(self, optimizer) if entry[1] == dist.get_rank()]
